"""Offloading to host memory, for plans that otherwise do not fit or are slow.

Invariant: a plan that fits is unchanged unless offloading makes its nodes faster by more than `MARGIN`: a KV cache with
room for more sequences, or an update that recomputes less. A plan that does not fit even with offloading is unchanged.
Weights of frozen workers are offloaded before optimizer states. Only as much is offloaded as is necessary. Optimizer
states are copied to the device as a whole for their update if that fits and is not slower than part by part. Options
that the file states are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..backends.spec import BYTES
from ..cost import groups, holdings
from ..cost.kv_cache import KvCache
from ..ir.graph import Node, Worker
from ..ir.plan import FUNCTIONS, Plan, PlanNote
from ..ir.search_record import MARGIN
from ..passes.buckets import GIB
from ..passes.estimate import EstimateTime
from ..passes.memory import CountMemory, describe_overflow
from ..passes.reshard import InsertResharding
from .simplicity import count_chosen

# What is in host memory, by the value of the option `offload`.
HELD = {"weights": "the weights of {}", "optimizer": "the optimizer states of {}"}
HELD["phase"] = f"{HELD['optimizer']} (as a whole)"


def complete_with_offloading(plan: Plan, engines: holdings.Engines, complete: Callable[[Plan], Plan]) -> Plan:
    """Complete a placed plan, with offloading if that makes it fit or much faster.

    `complete` is the function that fills in the open values of the placements.
    """
    return _Offloading(plan, engines, complete).complete_plan()


@dataclass(frozen=True)
class _Offloading:
    """The choice of what the workers of a placed plan offload.

    A choice is a dictionary of values of the option `offload`, by worker.
    """

    plan: Plan
    engines: holdings.Engines
    complete: Callable[[Plan], Plan]
    completed: dict[frozenset[tuple[str, str]], Plan] = field(default_factory=dict)  # by choice

    def complete_plan(self) -> Plan:
        placed = self._apply({})
        workers = [worker for worker in self.plan.graph.workers if can_offload(self.plan, self.engines, worker)]
        workers.sort(key=lambda worker: holdings.update_of(self.plan, worker.name) is not None)
        values = {
            worker.name: "weights" if holdings.update_of(self.plan, worker.name) is None else "optimizer"
            for worker in workers
        }
        chosen: dict[str, str] = {}
        reasons = []
        if workers and (overflow := _describe_overflow(placed, self.engines)):
            if not (chosen := self._find_fitting(values)):
                return placed
            reasons.append(overflow)
            placed = self._apply(chosen)
        if chosen != values and self._lacks_memory(placed):
            faster, why = self._find_faster(values, placed)
            if faster:
                chosen = faster
                reasons.append(why)
        if not chosen:
            return placed
        offloading_plan = self._apply(chosen)
        for name in [name for name, value in chosen.items() if value == "optimizer"]:
            by_phase = {**chosen, name: "phase"}
            candidate = self._apply(by_phase)
            if _describe_overflow(candidate, self.engines):
                continue
            if self._sum_seconds(candidate) <= self._sum_seconds(offloading_plan):
                chosen = by_phase
                offloading_plan = candidate
        held = [HELD[value].format(self.plan.graph.sharing(name)[0].name) for name, value in chosen.items()]
        note = PlanNote(
            "offload", f"in host memory while others compute: {', '.join(held)}; otherwise {', and '.join(reasons)}"
        )
        return replace(offloading_plan, notes=(*offloading_plan.notes, note))

    def _find_fitting(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return what must be offloaded for the plan to fit.

        The result is empty if nothing makes it fit. `values` has what can be offloaded, in the order of preference.
        """
        chosen: dict[str, str] = {}
        for name, value in values.items():
            chosen[name] = value
            if self._fits(chosen):
                break
        else:
            return {}
        for name in list(chosen)[:-1]:
            fewer = {other: value for other, value in chosen.items() if other != name}
            if self._fits(fewer):
                chosen = fewer
        return chosen

    def _find_faster(self, values: Mapping[str, str], placed: Plan) -> tuple[dict[str, str], str]:
        """Return what to offload to make the plan `placed` much faster, and the gain.

        The results are empty if nothing makes it much faster.
        """
        before = self._sum_seconds(placed)
        chosen = dict(values)
        fastest = chosen_seconds = self._sum_seconds(self._apply(chosen))
        if fastest * (1 + MARGIN) >= before or not self._fits(chosen):
            return {}, ""
        for name in values:
            fewer = {other: value for other, value in chosen.items() if other != name}
            seconds = self._sum_seconds(self._apply(fewer)) if fewer else before
            if seconds <= fastest * (1 + MARGIN) and seconds * (1 + MARGIN) < before and self._fits(fewer):
                chosen, chosen_seconds = fewer, seconds
        return chosen, f"the nodes would take {before:,.0f} s instead of {chosen_seconds:,.0f} s"

    def _apply(self, values: Mapping[str, str]) -> Plan:
        """Return the completed plan with a choice.

        Completing takes time, so it is done once for each choice.
        """
        choice = frozenset(values.items())
        if choice not in self.completed:
            self.completed[choice] = self._complete_anew(values)
        return self.completed[choice]

    def _complete_anew(self, values: Mapping[str, str]) -> Plan:
        how = {node.name: value for worker, value in values.items() for node in self.plan.graph.sharing(worker)}
        placements = (
            holdings.with_options(placement, {"offload": how[placement.node]}) if placement.node in how else placement
            for placement in self.plan.placements
        )
        return self.complete(replace(self.plan, placements=tuple(placements)))

    def _fits(self, values: Mapping[str, str]) -> bool:
        return not _describe_overflow(self._apply(values), self.engines)

    def _sum_seconds(self, placed: Plan) -> float:
        """Return the seconds that the nodes on devices take in an iteration."""
        estimate = EstimateTime(self.engines)
        names = [placement.node for placement in placed.placements if placement.pool != FUNCTIONS]
        return math.fsum(figure.value for name in names for figure in estimate.of_node(placed, name))

    def _lacks_memory(self, placed: Plan) -> bool:
        """Return whether more device memory could make a node faster.

        It could if memory limits the sequences of a generation, or makes an update recompute activations.
        """
        for placement in placed.placements:
            node = placement.node
            if placed.graph.node(node).verb == "generate":
                most = holdings.prompts_at_once(placed, node) * holdings.most_samples(placed, node)
                if placement.sequences < most or KvCache(placed, self.engines, node).is_full:
                    return True
        return count_chosen(placed, "recompute") > 0


def can_offload(plan: Plan, engines: holdings.Engines, worker: Worker) -> bool:
    """Return whether the planner may offload a worker's weights or optimizer states.

    The planner may do so under three conditions: the file does not state `offload`, the engine supports offloading, and
    host memory is separate from device memory.
    """
    if plan.cluster.device.kind.shares_host_memory:
        return False
    choices = [plan.placement(node.name).engine for node in offloading_nodes(plan, worker)[:1]]
    return any(
        "offload" in engines[choice.name].capabilities.options and "offload" not in choice.options for choice in choices
    )


def offloading_nodes(plan: Plan, worker: Worker) -> tuple[Node, ...]:
    """Return the nodes whose engine options decide whether a worker is offloaded."""
    return plan.graph.sharing(worker.name) if worker.kind != "function" else ()


def _describe_overflow(plan: Plan, engines: holdings.Engines) -> str:
    """Describe what does not fit on a device; "" if everything fits.

    Resharding is planned only if some reshard, or its buffers, might not fit.
    """
    counted = CountMemory(engines).devices(plan)
    if why := describe_overflow(counted):
        return why
    buffers = groups.bound_edge_bytes(plan)
    if all(entry.total + buffers <= entry.capacity.value for entry in counted) and not any(
        _may_overflow(plan, engines, edge.src, edge.dst) for edge in plan.graph.reshards()
    ):
        return ""
    return describe_overflow(CountMemory(engines).devices(InsertResharding(engines, compare=False).apply(plan)))


def _may_overflow(plan: Plan, engines: holdings.Engines, source: str, target: str) -> bool:
    """Return whether a reshard might not fit if its buckets have the greatest size."""
    options = plan.deploy.reshard
    item = BYTES[holdings.dtype(plan, source)]
    model = plan.model(source)
    arriving = holdings.weights(plan, engines, target) + max(options.bucket or GIB, item * model.largest)
    leaving = 0
    pools = {plan.placement(node).pool for node in (source, target)}
    if len(pools) == 1 and options.mode == "swap" and options.order != "direct":
        leaving = min(arriving, holdings.weights(plan, engines, source))
    most = max(sum(holdings.resident(plan, engines, pool).values()) for pool in pools)
    return most + arriving - leaving > holdings.capacity(plan.cluster).value
