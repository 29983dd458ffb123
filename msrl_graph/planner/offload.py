"""Offloading to host memory, for plans that do not fit into device memory.

Invariant: a plan that fits without offloading is unchanged. A plan that does not fit even with offloading is unchanged.
Weights of frozen workers are offloaded before optimizer states. Only as much is offloaded as is necessary for the plan
to fit. Optimizer states are copied to the device as a whole for their update if that fits and is not slower than part
by part. Options that the file states are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..backends.spec import BYTES
from ..cost import groups, holdings
from ..ir.graph import Node, Worker
from ..ir.plan import Plan, PlanNote
from ..passes.buckets import GIB
from ..passes.estimate import EstimateTime
from ..passes.memory import CountMemory, describe_overflow
from ..passes.reshard import InsertResharding

# What is in host memory, by the value of the option `offload`.
HELD = {"weights": "the weights of {}", "optimizer": "the optimizer states of {}"}
HELD["phase"] = f"{HELD['optimizer']} (as a whole)"


def complete_with_offloading(plan: Plan, engines: holdings.Engines, complete: Callable[[Plan], Plan]) -> Plan:
    """Complete a placed plan, and offload what is necessary to make the plan fit.

    `complete` is the function that fills in the open values of the placements.
    """
    placed = complete(plan)
    workers = [candidate for candidate in plan.graph.workers if can_offload(plan, engines, candidate)]
    if not workers or not (why := _describe_overflow(placed, engines)):
        return placed
    chosen: dict[str, str] = {}  # values of `offload` by worker
    for worker in sorted(workers, key=lambda candidate: holdings.update_of(plan, candidate.name) is not None):
        chosen[worker.name] = "weights" if holdings.update_of(plan, worker.name) is None else "optimizer"
        if not _describe_overflow(complete(_with_offloading(plan, chosen)), engines):
            break
    else:
        return placed
    for name in list(chosen)[:-1]:
        fewer = {other: value for other, value in chosen.items() if other != name}
        if not _describe_overflow(complete(_with_offloading(plan, fewer)), engines):
            chosen = fewer
    relieved_plan = complete(_with_offloading(plan, chosen))
    for name in [name for name, value in chosen.items() if value == "optimizer"]:
        by_phase = {**chosen, name: "phase"}
        candidate = complete(_with_offloading(plan, by_phase))
        if _describe_overflow(candidate, engines):
            continue
        if _worker_seconds(candidate, engines, name) <= _worker_seconds(relieved_plan, engines, name):
            chosen = by_phase
            relieved_plan = candidate
    offloaded = [HELD[value].format(plan.graph.sharing(name)[0].name) for name, value in chosen.items()]
    note = PlanNote("offload", f"in host memory while others compute: {', '.join(offloaded)}; otherwise {why}")
    return replace(relieved_plan, notes=(*relieved_plan.notes, note))


def _worker_seconds(plan: Plan, engines: holdings.Engines, worker: str) -> float:
    """Return the seconds of an iteration in the nodes that share a worker's weights."""
    estimate = EstimateTime(engines)
    names = [node.name for node in plan.graph.sharing(worker)]
    return math.fsum(figure.value for name in names for figure in estimate.of_node(plan, name))


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


def _with_offloading(plan: Plan, values: Mapping[str, str]) -> Plan:
    """Return the plan with values of the option `offload`, which are given by worker."""
    how = {node.name: value for worker, value in values.items() for node in plan.graph.sharing(worker)}
    placements = (
        holdings.with_options(placement, {"offload": how[placement.node]}) if placement.node in how else placement
        for placement in plan.placements
    )
    return replace(plan, placements=tuple(placements))


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
