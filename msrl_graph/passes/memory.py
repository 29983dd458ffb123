"""memory: what each phase holds on a device and on a host at its peak.

Invariant: every phase is listed, whether it fits or not; checks/memory.py judges. Items are those of the busiest device and host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..engine import BYTES, EngineSpec
from ..plan import Memory, Plan
from . import holdings
from .place import DEVICES
from .traffic import column_bytes

PHASES = ("load", "reshard", "generate", "infer", "update")


@dataclass(frozen=True)
class CountMemory:
    """`engines` are the specs by name."""

    engines: Mapping[str, EngineSpec]

    def __call__(self, plan: Plan) -> Plan:
        by_phase = {"load": [self._load(plan)]}
        by_phase["reshard"] = self._reshards(plan)
        for verb in PHASES[2:]:
            by_phase[verb] = [self._state(plan, n.name, verb) for n in plan.graph.verb(verb) if plan.placement(n.name).pool == DEVICES]
        # A phase of several states is as large as its largest.
        devices = [max(by_phase[p], key=lambda m: m.total) for p in PHASES if by_phase[p]]
        hosts = [self._host(plan, phase, devices) for phase in PHASES if by_phase[phase]]
        return replace(plan, memory=(*devices, *hosts))

    def _entry(self, plan: Plan, phase: str, items: dict[str, int], remark: str = "") -> Memory:
        return Memory("device", DEVICES, phase, {k: v for k, v in items.items() if v}, holdings.capacity(plan.cluster), remark)

    def _load(self, plan: Plan) -> Memory:
        items = {k: v for k, v in holdings.resident(plan, self.engines).items() if not k.endswith(" optimizer")}
        nodes = [p.node for p in plan.placements if p.pool == DEVICES]
        largest = max((t.elements * BYTES[holdings.dtype(plan, n)] for n in nodes for t in plan.model(n).tensors), default=0)
        return self._entry(plan, "load", {**items, "largest tensor": largest}, "tensors are read one by one, each cut to its slice")

    def _reshards(self, plan: Plan) -> list[Memory]:
        entries = []
        for r in plan.reshards:
            items = holdings.resident(plan, self.engines)
            worker = plan.graph.node(r.src).worker
            if r.order == "staged":
                items[f"{worker} weights"] = max(0, r.update_bytes_per_device - r.generate_bytes_per_device)
            items |= {"generation weights": r.generate_bytes_per_device, "bucket": r.bucket_bytes}
            entries.append(self._entry(plan, "reshard", items, f"{r.src} => {r.dst}, {r.order}"))
        return entries

    def _state(self, plan: Plan, node: str, verb: str) -> Memory:
        if verb == "generate":
            at_once, times = holdings.waves(plan, node)
            each = holdings.kv_sequence(plan, node)
            samples = holdings.samples(plan, node)
            most = holdings.most_samples(plan, node)
            items = {**holdings.generation_items(plan, self.engines, node), "KV cache": at_once * most * each}
            total = holdings.group_rows(plan, node) * samples
            remark = f"{node}: {at_once * samples:,} of a group's {total:,} sequences at once, {times} wave{'s' * (times > 1)}"
            remark += f", {at_once * most:,} where an evaluation draws {most:,} a prompt" if most > samples else ""
            return self._entry(plan, verb, items, f"{remark}; {holdings.gigabytes(each)} of keys and values each")
        items = holdings.resident(plan, self.engines)
        items["gathered weights"] = holdings.gathered(plan, self.engines, node)
        if verb == "update":
            items["gradients"] = holdings.gradients(plan, self.engines, node)
        items |= {"activations": holdings.activations(plan, node), "logits": holdings.logits(plan, node)}
        size, tokens = holdings.micro_batch(plan, node), holdings.row_tokens(plan, node)
        return self._entry(plan, verb, items, f"{node}: micro-batch of {size} row{'s' * (size > 1)} of {tokens:,} tokens")

    def _host(self, plan: Plan, phase: str, devices: list[Memory]) -> Memory:
        cluster = plan.cluster
        items: dict[str, int] = {}
        if phase in ("reshard", "generate"):
            for r in plan.reshards:
                name = f"swapped {plan.graph.node(r.src).worker} weights"
                items[name] = max(items.get(name, 0), r.released_bytes_per_device * cluster.devices_per_node)
        if phase in PHASES[2:]:
            items["rows"] = sum(column_bytes(plan.graph, c.name) for c in plan.graph.columns) // len(plan.docks.hosts)
        if cluster.device.backend == "cpu":
            items["ranks"] = next(m.total for m in devices if m.phase == phase) * cluster.devices_per_node
        kept = {k: v for k, v in items.items() if v}
        return Memory("host", "hosts", phase, kept, cluster.device.host_memory)
