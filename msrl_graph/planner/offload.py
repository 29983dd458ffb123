"""Offloading to host memory, for plans that do not fit into device memory.

Invariant: a plan that fits without offloading is unchanged. A plan that does not fit even with offloading is unchanged.
Weights of frozen workers are offloaded before optimizer states. Only as much is offloaded as is necessary for the plan
to fit. Options that the file states are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..backends.spec import BYTES
from ..cost import holdings
from ..ir.graph import Node, Worker
from ..ir.plan import Plan, PlanNote
from ..passes.buckets import GIB
from ..passes.memory import CountMemory, describe_overflow
from ..passes.reshard import InsertResharding


def complete_with_offloading(plan: Plan, engines: holdings.Engines, complete: Callable[[Plan], Plan]) -> Plan:
    """Complete a placed plan, and offload what is necessary to make the plan fit.

    `complete` is the function that fills in the open values of the placements.
    """
    placed = complete(plan)
    workers = [candidate for candidate in plan.graph.workers if can_offload(plan, engines, candidate)]
    if not workers or not (why := _describe_overflow(placed, engines)):
        return placed
    chosen: list[Worker] = []
    for worker in sorted(workers, key=lambda candidate: holdings.update_of(plan, candidate.name) is not None):
        chosen.append(worker)
        if not _describe_overflow(complete(_with_offloading(plan, chosen)), engines):
            break
    else:
        return placed
    for worker in chosen[:-1]:
        fewer = [other for other in chosen if other != worker]
        if not _describe_overflow(complete(_with_offloading(plan, fewer)), engines):
            chosen = fewer
    relieved_plan = complete(_with_offloading(plan, chosen))
    offloaded = [
        f"{'the weights' if node.verb == 'infer' else 'the optimizer states'} of {node.name}"
        for node in (offloading_nodes(plan, chosen_worker)[0] for chosen_worker in chosen)
    ]
    note = PlanNote("offload", f"in host memory while others compute: {', '.join(offloaded)}; otherwise {why}")
    return replace(relieved_plan, notes=(*relieved_plan.notes, note))


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


def _with_offloading(plan: Plan, workers: Sequence[Worker]) -> Plan:
    """Return the plan after the weights or optimizer states of workers are offloaded.

    If a worker has an update, its optimizer states are offloaded. Otherwise, its weights are offloaded.
    """
    how = {
        node.name: "weights" if holdings.update_of(plan, worker.name) is None else "optimizer"
        for worker in workers
        for node in offloading_nodes(plan, worker)
    }

    placements = (
        holdings.with_options(placement, {"offload": how[placement.node]}) if placement.node in how else placement
        for placement in plan.placements
    )
    return replace(plan, placements=tuple(placements))


def _describe_overflow(plan: Plan, engines: holdings.Engines) -> str:
    """Describe what does not fit on a device; "" if everything fits.

    Resharding is planned only if some reshard might not fit.
    """
    counted = CountMemory(engines).devices(plan)
    if (why := describe_overflow(counted)) or not any(
        _may_overflow(plan, engines, edge.src, edge.dst) for edge in plan.graph.reshards()
    ):
        return why
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
