"""memory: the peak memory of each phase, on a device and on a host.

Invariant: every phase is listed, whether it fits or not; checks/memory.py judges. Items are those of the busiest device
and the busiest host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..backends.spec import BYTES, EngineSpec
from ..cost import groups, holdings
from ..ir import verify
from ..ir.async_schedule import lanes
from ..ir.attributes import CallAttributes
from ..ir.graph import Graph
from ..ir.plan import PhaseMemory, Plan
from .spec import Pass

# Endings of items that do not exist at the start: optimizer states, whose moments are created by the first step (the
# float32 masters of bf16 weights exist from the start), and what generations keep once it is fetched.
LATER = (" optimizer", holdings.KEPT)
PHASES = ("load", "reshard", "generate", "swap", "infer", "update")


@dataclass(frozen=True)
class CountMemory(Pass):
    """The pass that counts memory; `engines` are the specs by name."""

    name = "memory"
    needs = ("place", "dock", "reshard")

    engines: Mapping[str, EngineSpec]

    def verify(self, plan: Plan) -> Iterator[str]:
        return verify.memory(plan)

    def apply(self, plan: Plan) -> Plan:
        devices = self.devices(plan)
        away: dict[str, int] = {}
        for pool in plan.pools:
            for item, size in holdings.offloaded(plan, self.engines, pool.name).items():
                away[item] = away.get(item, 0) + size * max(plan.on_hosts(pool.name))
        rounds = _rounds(plan.graph)
        rows = sum(size * rounds.get(column, 1) for column, size in plan.graph.column_bytes.items())
        hosts = [
            self._host(plan, phase, devices, away, rows) for phase in PHASES if any(m.phase == phase for m in devices)
        ]
        return replace(plan, memory=(*devices, *hosts))

    def devices(self, plan: Plan) -> list[PhaseMemory]:
        """Return the phases of every pool's devices.

        Needs no docks; needs the reshards only if the caller wants their phase.
        """
        return [m for pool in plan.pools for m in self._pool(plan, pool.name)]

    def _pool(self, plan: Plan, pool: str) -> list[PhaseMemory]:
        by_phase = {"load": [self._load(plan, pool), *self._built(plan, pool)]}
        by_phase["reshard"] = self._reshards(plan, pool)
        by_phase["swap"] = self._swaps(plan, pool)
        for verb in ("generate", "infer", "update"):
            by_phase[verb] = [
                self._of_node(plan, n.name, verb) for n in plan.graph.verb(verb) if plan.placement(n.name).pool == pool
            ]
        # A phase of several nodes is as large as its largest.
        return [max(by_phase[p], key=lambda m: m.total) for p in PHASES if by_phase[p]]

    def _entry(self, plan: Plan, pool: str, phase: str, items: dict[str, int], remark: str = "") -> PhaseMemory:
        every = {**items, groups.BUFFERS: groups.buffers(plan, self.engines, pool)}
        return PhaseMemory(
            "device", pool, phase, {k: v for k, v in every.items() if v}, holdings.capacity(plan.cluster), remark
        )

    def _load(self, plan: Plan, pool: str) -> PhaseMemory:
        items = {k: v for k, v in holdings.resident(plan, self.engines, pool).items() if not k.endswith(LATER)}
        items |= holdings.masters(plan, self.engines, pool)
        nodes = [p.node for p in plan.placements if p.pool == pool]
        largest = max((plan.model(n).largest_read * BYTES[holdings.dtype(plan, n)] for n in nodes), default=0)
        # Weights that will be offloaded are read first, one state after the other.
        leaving = holdings.offloaded(plan, self.engines, pool)
        first = max(((size, item) for item, size in leaving.items() if item.endswith(" weights")), default=(0, ""))
        if first[0] > sum(items.values()):
            items = {first[1].removeprefix("offloaded "): first[0]}
        return self._entry(
            plan,
            pool,
            "load",
            {**items, "largest tensor": largest},
            "tensors are read one by one, each cut to its slice",
        )

    def _built(self, plan: Plan, pool: str) -> Iterator[PhaseMemory]:
        """Yield the memory of generators while they are built.

        Generators are built one after the other, before anything else, and free their own memory again. Where no
        process group can be made while they sleep, they are built last, next to what the device holds during
        generation.
        """
        early, nodes = plan.cluster.device.kind.groups_beside_sleep, [*plan.graph.verb("generate")]
        own = {f"{n.name} weights" for n in nodes}  # of generators that no edge reshards into: these stay
        frozen = {k: v for k, v in holdings.resident(plan, self.engines, pool).items() if k in own}
        for node in nodes:
            building = holdings.spec(plan, self.engines, node.name).building
            if plan.placement(node.name).pool != pool or building is None:
                continue
            name = f"{node.name} weights" if f"{node.name} weights" in frozen else "generation weights"
            beside = frozen if early else self._beside(plan, pool, node.name)
            items = beside | {name: holdings.weights(plan, self.engines, node.name)}
            items |= building(holdings.work(plan, self.engines, node.name))
            yield self._entry(plan, pool, "load", items, f"{node.name} is built with its whole cache, then frees it")

    def _beside(self, plan: Plan, pool: str, node: str) -> dict[str, int]:
        """Return the items on a device during a generation before the first update."""
        items = holdings.generation_items(plan, self.engines, node)
        return {k: v for k, v in items.items() if not k.endswith(LATER)} | holdings.masters(plan, self.engines, pool)

    def _reshards(self, plan: Plan, pool: str) -> list[PhaseMemory]:
        entries = []
        for r in plan.reshards:
            source = plan.placement(r.src).pool
            target = plan.placement(r.dst).pool
            if pool not in (source, target):
                continue
            items = holdings.resident(plan, self.engines, pool, r.dst)
            worker = plan.graph.node(r.src).worker
            if r.order == "staged":
                # The device holds either the update weights or what replaces them.
                items[f"{worker} weights"] = max(
                    0, r.update_bytes_per_device - r.generate_bytes_per_device - r.bucket_bytes
                )
            items |= {"generation weights": r.generate_bytes_per_device * (pool == target), "bucket": r.bucket_bytes}
            how = r.order if source == target else r.mode
            entries.append(self._entry(plan, pool, "reshard", items, f"{r.name}, {how}"))
            if pool == source:  # first the trainer computes the reference for the comparison with the generator
                items = holdings.resident(plan, self.engines, pool) | holdings.probing(plan, self.engines, r.src, r.dst)
                entries.append(self._entry(plan, pool, "reshard", items, f"{r.name}, while it is probed"))
        return entries

    def _swaps(self, plan: Plan, pool: str) -> list[PhaseMemory]:
        back = [
            f"{r.src}'s weights"
            for r in plan.reshards
            if r.released_bytes_per_device and plan.placement(r.src).pool == pool
        ]
        remark = f"{' and '.join(dict.fromkeys(back))} return from host memory after generation"
        return [self._entry(plan, pool, "swap", holdings.resident(plan, self.engines, pool), remark)] if back else []

    def _of_node(self, plan: Plan, node: str, verb: str) -> PhaseMemory:
        pool = plan.placement(node).pool
        moment, working = holdings.fullest(plan, self.engines, node)
        fullest = f"; fullest: {moment}" if moment else ""
        if plan.model(node).experts and plan.placement(node).layout.ep > 1:
            fullest += "; tokens are spread evenly over experts"
        if verb == "generate":
            at_once, times = holdings.waves(plan, node)
            each = holdings.kv_sequence(plan, node)
            samples = holdings.samples(plan, node)
            most = holdings.most_samples(plan, node)
            items = holdings.generation_items(plan, self.engines, node) | working
            total = holdings.group_rows(plan, node) * samples
            remark = (
                f"{node}: {at_once * samples:,} of a group's {total:,} sequences at once, {times} "
                f"wave{'s' * (times > 1)}"
            )
            remark += f", {at_once * most:,} where an evaluation draws {most:,} a prompt" if most > samples else ""
            return self._entry(
                plan, pool, verb, items, f"{remark}; {holdings.gigabytes(each)} of keys and values each{fullest}"
            )
        items = holdings.resident(plan, self.engines, pool, node) | working
        size = holdings.micro_batch(plan, node)
        tokens = holdings.row_tokens(plan, node)
        return self._entry(
            plan,
            pool,
            verb,
            items,
            f"{node}: micro-batch of {size} row{'s' * (size > 1)} of {tokens:,} tokens{fullest}",
        )

    def _host(
        self, plan: Plan, phase: str, devices: list[PhaseMemory], away: Mapping[str, int], rows: int
    ) -> PhaseMemory:
        """Return a phase's memory on the busiest host.

        `away` are the offloaded bytes by item, `rows` the bytes of an iteration's rows.
        """
        cluster = plan.cluster
        items = dict(away)
        if phase == "update":
            there = {p.name for p in plan.pools}  # the planner may count one pool alone
            for placement in map(plan.placement, (n.name for n in plan.graph.verb("update"))):
                size = holdings.activations_away(plan, self.engines, placement.node) if placement.pool in there else 0
                if size:
                    items[f"{placement.node} activations"] = size * max(plan.on_hosts(placement.pool))
        # Frozen nodes infer while the weights are on their way back.
        if phase in ("reshard", "generate", "swap", "infer"):
            for r in plan.reshards:
                name = f"swapped {plan.graph.node(r.src).worker} weights"
                ranks = max(plan.on_hosts(plan.placement(r.src).pool))
                items[name] = max(items.get(name, 0), r.released_bytes_per_device * ranks)
        if phase in PHASES[2:]:
            # A generation may be several iterations ahead: no update has read their rows yet.
            items["rows"] = lanes(plan) * rows // len(plan.docks.warehouses)
        if cluster.device.kind.shares_host_memory:
            # A pool without this phase may be in any of its own phases meanwhile.
            held = [0] * cluster.nodes
            for pool in plan.pools:
                own = [m for m in devices if m.pool == pool.name]
                most = max(m.total for m in [m for m in own if m.phase == phase] or own)
                held = [h + n * most for h, n in zip(held, plan.on_hosts(pool.name), strict=True)]
            items["ranks"] = max(held)
        kept = {k: v for k, v in items.items() if v}
        return PhaseMemory("host", "hosts", phase, kept, cluster.device.host_memory)


def _rounds(graph: Graph) -> dict[str, int]:
    """Return, by column, from how many rounds of prompts the dock may hold rows.

    Only columns that are not written after a refilling filter are listed.
    """
    found: dict[str, int] = {}
    for filter in (n for n in graph.nodes if CallAttributes.of(n).refill):
        after = graph.flow.after(filter.name)
        # With rounds of adaptive size, the last may begin just before the bound.
        rounds = (1 + CallAttributes.of(filter).refill) * (2 if CallAttributes.of(filter).adaptive else 1)
        found |= {c: rounds for n in graph.nodes if n.name not in after for c in n.writes}
    return found


def over(memory: Iterable[PhaseMemory]) -> str:
    """Describe the worst phase that does not fit; "" if all fit."""
    found = [m for m in memory if m.total > m.capacity.value]
    if not found:
        return ""
    worst = max(found, key=lambda m: m.total / m.capacity.value)
    return (
        f"{worst.phase} needs {holdings.gigabytes(worst.total)} a {worst.place} of "
        f"{holdings.gigabytes(worst.capacity.value)}"
    )
