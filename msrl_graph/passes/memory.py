"""The peak memory of each phase, on a device and on a host.

Invariant: every phase is listed, even if it does not fit; checks/memory.py reports phases that do not fit. The bytes
are those of the busiest device and of the busiest host, by item.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..analysis.async_schedule import count_lanes
from ..analysis.row_packing import MicroBatchLimit
from ..backends.spec import BYTES
from ..cost import groups, holdings
from ..cost.kv_cache import KvCache
from ..diagnostics.quantities import size as format_size
from ..diagnostics.sheet import Sheet
from ..ir.attributes import CallAttributes
from ..ir.graph import Graph
from ..ir.plan import PhaseMemory, Plan
from ..sharding.layout import count_host_elements
from .facts import Fact, Section
from .spec import Pass, describe_incomplete

# Endings of items that do not exist at the start: optimizer states, whose moments are created by the first step (the
# float32 masters of bf16 weights exist from the start), and what generations keep once it is fetched.
LATER = (" optimizer", holdings.KEPT)
PHASES = ("load", "reshard", "generate", "swap", "infer", "update")


@dataclass(frozen=True)
class CountMemory(Pass):
    """The pass that counts memory."""

    name = "memory"
    title = "Memory"
    needs = ("place", "dock", "reshard")
    fills = ("memory",)

    def apply(self, plan: Plan) -> Plan:
        devices = self.devices(plan)
        offloaded_bytes: dict[str, int] = {}
        for pool in plan.pools:
            for item, size in holdings.offloaded_items(plan, self.engines, pool.name).items():
                offloaded_bytes[item] = offloaded_bytes.get(item, 0) + size * max(plan.on_hosts(pool.name))
        rounds = _rounds_by_column(plan.graph)
        rows = sum(size * rounds.get(column, 1) for column, size in plan.graph.column_bytes.items())
        hosts = [
            self._host_phase(plan, phase, devices, offloaded_bytes, rows)
            for phase in PHASES
            if any(entry.phase == phase for entry in devices)
        ]
        return replace(plan, memory=(*devices, *hosts))

    def devices(self, plan: Plan) -> list[PhaseMemory]:
        """Return the memory of every phase on every pool's devices.

        The plan needs no docks. It needs reshards only if the caller needs the phase "reshard".
        """
        return [entry for pool in plan.pools for entry in self._pool_phases(plan, pool.name)]

    def _pool_phases(self, plan: Plan, pool: str) -> list[PhaseMemory]:
        by_phase = {"load": [self._load_phase(plan, pool), *self._building_phases(plan, pool)]}
        by_phase["reshard"] = self._reshard_phases(plan, pool)
        by_phase["swap"] = self._swap_phases(plan, pool)
        for verb in ("generate", "infer", "update"):
            by_phase[verb] = [
                self._node_phase(plan, node.name, verb)
                for node in plan.graph.verb(verb)
                if plan.placement(node.name).pool == pool
            ]
        # A phase of several nodes is as large as its largest.
        return [max(by_phase[phase], key=lambda entry: entry.total) for phase in PHASES if by_phase[phase]]

    def _make_entry(self, plan: Plan, pool: str, phase: str, items: dict[str, int], remark: str = "") -> PhaseMemory:
        all_items = {**items, groups.BUFFERS: groups.buffer_bytes(plan, self.engines, pool)}
        return PhaseMemory(
            "device",
            pool,
            phase,
            {item: size for item, size in all_items.items() if size},
            holdings.capacity(plan.cluster),
            remark,
        )

    def _load_phase(self, plan: Plan, pool: str) -> PhaseMemory:
        items = {
            name: size for name, size in holdings.resident(plan, self.engines, pool).items() if not name.endswith(LATER)
        }
        masters = holdings.masters(plan, self.engines, pool, loading=True)
        nodes = [placement.node for placement in plan.placements if placement.pool == pool]
        largest = max((plan.model(node).largest_read * BYTES[holdings.dtype(plan, node)] for node in nodes), default=0)
        # Weights that will be offloaded are read first, one state after the other.
        leaving = holdings.offloaded_items(plan, self.engines, pool)
        first = max(((size, item) for item, size in leaving.items() if item.endswith(" weights")), default=(0, ""))
        if first[0] > sum(items.values()) + sum(masters.values()):
            items, masters = {first[1].removeprefix("offloaded "): first[0]}, {}
        # Masters are made when the weights of their worker have been read, perhaps before those of another worker.
        beside = {**masters, "largest tensor": largest}
        if sum(item.endswith(" weights") for item in items) == 1:
            beside = {"largest tensor": largest} if largest > sum(masters.values()) else masters
        remark = "tensors are read one by one, each cut to its slice"
        return self._make_entry(plan, pool, "load", items | beside, remark)

    def _building_phases(self, plan: Plan, pool: str) -> Iterator[PhaseMemory]:
        """Yield the memory of a pool's devices while each generation engine is built.

        Normally, generation engines are built one after the other, before anything else is loaded. Each engine frees
        the memory of its KV cache before the next engine is built. Some devices cannot create process groups while an
        engine's memory is freed. On these devices, generation engines are built last. While an engine is built last,
        the device also holds all other items that it holds during a generation.
        """
        early = plan.cluster.device.kind.groups_beside_sleep
        nodes = [*plan.graph.verb("generate")]
        own = {
            f"{generation.name} weights" for generation in nodes
        }  # of generators that no edge reshards into: these stay
        frozen = {item: size for item, size in holdings.resident(plan, self.engines, pool).items() if item in own}
        for node in nodes:
            building = holdings.spec(plan, self.engines, node.name).memory.building
            if plan.placement(node.name).pool != pool or building is None:
                continue
            name = f"{node.name} weights" if f"{node.name} weights" in frozen else "generation weights"
            present = frozen if early else self._items_before_update(plan, pool, node.name)
            items = present | {name: holdings.weights(plan, self.engines, node.name)}
            items |= building(holdings.work(plan, self.engines, node.name))
            yield self._make_entry(
                plan, pool, "load", items, f"{node.name} is built with its whole cache, then frees it"
            )

    def _items_before_update(self, plan: Plan, pool: str, node: str) -> dict[str, int]:
        """Return a device's bytes by item during a generation before any update has run."""
        items = holdings.generation_items(plan, self.engines, node)
        return {item: size for item, size in items.items() if not item.endswith(LATER)} | holdings.masters(
            plan, self.engines, pool
        )

    def _reshard_phases(self, plan: Plan, pool: str) -> list[PhaseMemory]:
        entries = []
        for reshard in plan.reshards:
            source = plan.placement(reshard.src).pool
            target = plan.placement(reshard.dst).pool
            if pool not in (source, target):
                continue
            items = holdings.resident(plan, self.engines, pool, reshard.dst)
            worker = plan.graph.node(reshard.src).worker
            if reshard.order == "staged":
                # The device holds either the update weights or what replaces them.
                items[f"{worker} weights"] = max(
                    0, reshard.update_bytes_per_device - reshard.generate_bytes_per_device - reshard.bucket_bytes
                )
            items |= {
                "generation weights": reshard.generate_bytes_per_device * (pool == target),
                "bucket": reshard.bucket_bytes,
            }
            how = reshard.order if source == target else reshard.mode
            entries.append(self._make_entry(plan, pool, "reshard", items, f"{reshard.name}, {how}"))
            if pool == source:  # first the trainer computes the reference for the comparison with the generator
                items = holdings.resident(plan, self.engines, pool) | holdings.probe_bytes(
                    plan, self.engines, reshard.src, reshard.dst
                )
                entries.append(self._make_entry(plan, pool, "reshard", items, f"{reshard.name}, while it is probed"))
        return entries

    def _swap_phases(self, plan: Plan, pool: str) -> list[PhaseMemory]:
        returning = [
            f"{reshard.src}'s weights"
            for reshard in plan.reshards
            if reshard.released_bytes_per_device and plan.placement(reshard.src).pool == pool
        ]
        remark = f"{' and '.join(dict.fromkeys(returning))} return from host memory after generation"
        return (
            [self._make_entry(plan, pool, "swap", holdings.resident(plan, self.engines, pool), remark)]
            if returning
            else []
        )

    def _node_phase(self, plan: Plan, node: str, verb: str) -> PhaseMemory:
        pool = plan.placement(node).pool
        moment, working = holdings.fullest(plan, self.engines, node)
        fullest = f"; fullest: {moment}" if moment else ""
        if plan.model(node).experts and plan.placement(node).layout.ep > 1:
            fullest += "; tokens are spread evenly over experts"
        if verb == "generate":
            sequence_bytes = holdings.kv_sequence(plan, node)
            items = holdings.generation_items(plan, self.engines, node) | working
            remark = f"{node}: {KvCache(plan, self.engines, node).describe()}"
            return self._make_entry(
                plan,
                pool,
                verb,
                items,
                f"{remark}; {holdings.gigabytes(sequence_bytes)} of keys and values each{fullest}",
            )
        items = holdings.resident(plan, self.engines, pool, node) | working
        limit = MicroBatchLimit.of(plan, node)
        size = limit.full_rows
        tokens = holdings.row_tokens(plan, node)
        batch = f"micro-batch of {size} row{'s' * (size > 1)} of {tokens:,} tokens"
        if limit.tokens:
            batch = f"micro-batches of up to {limit.most_tokens:,} tokens, rows of up to {tokens:,}"
        return self._make_entry(
            plan,
            pool,
            verb,
            items,
            f"{node}: {batch}{fullest}",
        )

    def _host_phase(
        self, plan: Plan, phase: str, device_phases: list[PhaseMemory], offloaded_bytes: Mapping[str, int], rows: int
    ) -> PhaseMemory:
        """Return a phase's memory on the busiest host.

        `offloaded_bytes` are the bytes of each offloaded item. `rows` is the number of bytes that an iteration's rows
        occupy.
        """
        cluster = plan.cluster
        items = dict(offloaded_bytes)
        if phase == "update":
            known_pools = {pool.name for pool in plan.pools}  # the planner may count one pool alone
            for placement in map(plan.placement, (node.name for node in plan.graph.verb("update"))):
                size = (
                    holdings.activations_away(plan, self.engines, placement.node)
                    if placement.pool in known_pools
                    else 0
                )
                if size:
                    items[f"{placement.node} activations"] = size * max(plan.on_hosts(placement.pool))
        for reshard in plan.reshards if phase != "load" else ():
            name = f"swapped {plan.graph.node(reshard.src).worker} weights"
            # Frozen nodes infer while the weights are on their way back. Frozen weights keep their host buffers.
            swapped = reshard.released_bytes_per_device
            if swapped and phase == "update":
                swapped = holdings.weights(plan, self.engines, reshard.src, "frozen_kinds")
            items[name] = max(items.get(name, 0), swapped * max(plan.on_hosts(plan.placement(reshard.src).pool)))
            # Ranks of a host share copies of equal shards.
            side = holdings.side(plan, self.engines, reshard.dst)
            copied = count_host_elements(plan.model(reshard.dst).frozen_kinds, side, cluster.devices_per_node)
            items[f"frozen {reshard.dst} weights"] = copied * BYTES[holdings.dtype(plan, reshard.dst)]
        if phase in PHASES[2:]:
            # A generation may be several iterations ahead: no update has read their rows yet.
            items["rows"] = count_lanes(plan) * rows // len(plan.docks.warehouses)
        if cluster.device.kind.shares_host_memory:
            # A pool without this phase may be in any of its own phases meanwhile.
            held_bytes = [0] * cluster.nodes
            for pool in plan.pools:
                own = [entry for entry in device_phases if entry.pool == pool.name]
                most = max(entry.total for entry in [entry for entry in own if entry.phase == phase] or own)
                held_bytes = [
                    bytes_before + ranks * most
                    for bytes_before, ranks in zip(held_bytes, plan.on_hosts(pool.name), strict=True)
                ]
            items["ranks"] = max(held_bytes)
        nonzero_items = {item: size for item, size in items.items() if size}
        return PhaseMemory("host", "hosts", phase, nonzero_items, cluster.device.host_memory)

    @staticmethod
    def verify(plan: Plan) -> Iterator[str]:
        """Verify that the plan has the memory of the hosts and of every pool's devices."""
        if {(phase.place, phase.pool) for phase in plan.memory} != {
            *(("device", pool.name) for pool in plan.pools),
            ("host", "hosts"),
        }:
            yield describe_incomplete("memory")

    @classmethod
    def write(cls, page: Sheet, plan: Plan) -> None:
        for place, pool in dict.fromkeys((phase.place, phase.pool) for phase in plan.memory):
            phases = [phase for phase in plan.memory if (phase.place, phase.pool) == (place, pool)]
            has = phases[0].capacity
            pool_name = f", pool {pool}" if place == "device" and len(plan.pools) > 1 else ""
            page.heading(
                f"Memory of a {place}{pool_name}", f"{format_size(has.value)} ({has.source}); the sums are derived"
            )
            rows = []
            for entry in phases:
                items = ", ".join(
                    f"{item} {format_size(bytes_held)}"
                    for item, bytes_held in sorted(
                        entry.items.items(), key=lambda entry_item: (-entry_item[1], entry_item[0])
                    )
                )
                part = f"{100 * entry.total / entry.capacity.value:.1f} %" + (
                    " OVER" if entry.total > entry.capacity.value else ""
                )
                rows.append(
                    (
                        entry.phase,
                        format_size(entry.total),
                        part,
                        f"{items or '-'}{f' ({entry.remark})' if entry.remark else ''}",
                    )
                )
            page.table(("phase", "peak", "share", "items"), rows, (1, 2))

    @staticmethod
    def facts(plan: Plan) -> Section:
        section: Section = {}
        for entry in plan.memory:
            items = {item: Fact(float(size), "bytes", True) for item, size in entry.items.items()}
            where = f"{entry.place}, pool {entry.pool}" if entry.place == "device" else entry.place
            total = {"peak": Fact(float(entry.total), "bytes"), "of": Fact(entry.capacity.value, "bytes", True)}
            section[f"{where}, {entry.phase}"] = {**total, **items}
        return section


def _rounds_by_column(graph: Graph) -> dict[str, int]:
    """Return, for each column, how many rounds of rows the dock may hold.

    A refilling filter may request further rounds of prompts in an iteration. For columns that are written before the
    filter, the dock holds the rows of all rounds. For all other columns, the dock holds one round; these columns are
    not in the result.
    """
    rounds_of: dict[str, int] = {}
    for filter in (node for node in graph.nodes if CallAttributes.of(node).refill):
        after = graph.flow.after(filter.name)
        # With rounds of adaptive size, the last may begin just before the bound.
        rounds = (1 + CallAttributes.of(filter).refill) * (2 if CallAttributes.of(filter).adaptive else 1)
        rounds_of |= {column: rounds for node in graph.nodes if node.name not in after for column in node.writes}
    return rounds_of


def describe_overflow(memory: Iterable[PhaseMemory]) -> str:
    """Describe the phase that exceeds its memory most; "" if all phases fit."""
    too_large = [entry for entry in memory if entry.total > entry.capacity.value]
    if not too_large:
        return ""
    worst = max(too_large, key=lambda entry: entry.total / entry.capacity.value)
    return (
        f"{worst.phase} needs {holdings.gigabytes(worst.total)} a {worst.place} of "
        f"{holdings.gigabytes(worst.capacity.value)}"
    )
