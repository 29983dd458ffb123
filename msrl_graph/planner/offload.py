"""offload: what moves to host memory if a plan does not fit.

Invariant: a plan that fits stays as it is, and so does one that fits in neither case. Weights of frozen states are
offloaded before optimizer states, and nothing without need. What the file states stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..backends.spec import BYTES
from ..cost import holdings
from ..ir.graph import Node, Worker
from ..ir.plan import Plan, PlanNote
from ..passes.memory import CountMemory, over
from ..passes.reshard import GIB, InsertResharding


def relieved(plan: Plan, engines: holdings.Engines, complete: Callable[[Plan], Plan]) -> Plan:
    """Complete a placed plan with `complete`, offloading what it must to fit."""
    placed = complete(plan)
    workers = [w for w in plan.graph.workers if offers(plan, engines, w)]
    if not workers or not (why := _over(placed, engines)):
        return placed
    chosen: list[Worker] = []
    for worker in sorted(workers, key=lambda w: holdings.update_of(plan, w.name) is not None):
        chosen.append(worker)
        if not _over(complete(_offloading(plan, chosen)), engines):
            break
    else:
        return placed
    for worker in chosen[:-1]:
        fewer = [w for w in chosen if w != worker]
        if not _over(complete(_offloading(plan, fewer)), engines):
            chosen = fewer
    found = complete(_offloading(plan, chosen))
    what = [
        f"{'the weights' if n.verb == 'infer' else 'the optimizer states'} of {n.name}"
        for n in (kept_by(plan, w)[0] for w in chosen)
    ]
    note = PlanNote("offload", f"in host memory while others compute: {', '.join(what)}; otherwise {why}")
    return replace(found, notes=(*found.notes, note))


def offers(plan: Plan, engines: holdings.Engines, worker: Worker) -> bool:
    """Return whether a worker's weights or optimizer states may be offloaded.

    It must be open in the file, the engine must support it, and host memory must be separate.
    """
    if plan.cluster.device.kind.shares_host_memory:
        return False
    found = [plan.placement(n.name).engine for n in kept_by(plan, worker)[:1]]
    return any("offload" in engines[e.name].options and "offload" not in e.options for e in found)


def kept_by(plan: Plan, worker: Worker) -> tuple[Node, ...]:
    """Return the nodes whose engine decides where a worker's state is stored."""
    return plan.graph.sharing(worker.name) if worker.kind != "function" else ()


def _offloading(plan: Plan, workers: Sequence[Worker]) -> Plan:
    """Offload these workers: the optimizer states with an update, else the weights."""
    how = {
        n.name: "weights" if holdings.update_of(plan, w.name) is None else "optimizer"
        for w in workers
        for n in kept_by(plan, w)
    }

    found = (holdings.with_options(p, {"offload": how[p.node]}) if p.node in how else p for p in plan.placements)
    return replace(plan, placements=tuple(found))


def _over(plan: Plan, engines: holdings.Engines) -> str:
    """Describe what does not fit a device; "" if all fits.

    Reshards are only planned where they might not fit.
    """
    counted = CountMemory(engines).devices(plan)
    if (why := over(counted)) or not any(_near(plan, engines, e.src, e.dst) for e in plan.graph.reshards()):
        return why
    return over(CountMemory(engines).devices(InsertResharding(engines, compare=False).apply(plan)))


def _near(plan: Plan, engines: holdings.Engines, source: str, target: str) -> bool:
    """Return whether a reshard might not fit, whatever its buckets are."""
    options = plan.deploy.reshard
    item = BYTES[holdings.dtype(plan, source)]
    model = plan.model(source)
    arriving = holdings.weights(plan, engines, target) + max(options.bucket or GIB, item * model.largest)
    leaving = 0
    pools = {plan.placement(n).pool for n in (source, target)}
    if len(pools) == 1 and options.mode == "swap" and options.order != "direct":
        leaving = min(arriving, holdings.weights(plan, engines, source))
    most = max(sum(holdings.resident(plan, engines, p).values()) for p in pools)
    return most + arriving - leaving > holdings.capacity(plan.cluster).value
