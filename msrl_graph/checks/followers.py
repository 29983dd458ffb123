"""Workers that follow another one: which they may follow, and that both lie alike on the devices.

Invariant: what passes is an update of weights in place: each rank has the same part of both, so nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..backends.spec import EngineSpec
from ..cost import holdings
from ..diagnostics import Diagnostic, nearest
from ..ir.graph import Graph, Worker
from ..ir.plan import Plan
from .columns import Library


def stated(graph: Graph, library: Library) -> list[Diagnostic]:
    """What a program states of workers that follow."""
    return [d for worker in graph.workers for d in _stated(graph, worker)]


def _stated(graph: Graph, worker: Worker) -> Iterator[Diagnostic]:
    name = worker.name
    follows = worker.follows
    if not follows:
        if (worker.every, worker.decay) != (1, 0):
            what = f"`{name}` follows no worker, so `{'every' if worker.every != 1 else 'decay'}` means nothing here"
            yield Diagnostic("bad-value", what, worker.span, "add `follows = WORKER`, or leave it out")
        return
    trained = {n.worker: graph.worker(n.worker) for n in graph.verb("update")}
    if follows not in trained:
        known = any(w.name == follows for w in graph.workers)
        what = f"`{follows}`, which `{name}` follows, {'is not trained' if known else 'is no worker'}"
        yield Diagnostic("unknown-name", what, worker.span, nearest(follows, trained))
        return
    other = trained[follows]
    if not worker.frozen:
        yield Diagnostic(
            "bad-value", f"`{name}` follows `{follows}`, so it is not trained itself", worker.span, "add `frozen`"
        )
    elif (worker.kind, worker.model) != (other.kind, other.model):
        theirs = f"a {other.kind} of the model `{other.model}`"
        what = f"`{name}` is a {worker.kind} of the model `{worker.model}`, and follows `{follows}`, {theirs}"
        yield Diagnostic("bad-value", what, worker.span, f"let both be {theirs}")
    elif worker.decay == 1:
        what = f"`{name}` with `decay = 1` never changes"
        yield Diagnostic("bad-value", what, worker.span, "state less than 1, or leave `follows` out")
    for node in graph.verb("generate"):
        if node.worker == name:
            what = f"`{node.name}` generates with weights that follow `{follows}`"
            help = f"let `{name}` infer, which it can; what follows a worker cannot generate in this version"
            yield Diagnostic("not-yet", what, node.span, help)


def placed(plan: Plan, engines: Mapping[str, EngineSpec]) -> list[Diagnostic]:
    """Workers that do not lie as those that they follow do."""
    return [d for worker in plan.graph.workers if worker.follows for d in _placed(plan, engines, worker)]


def _placed(plan: Plan, engines: Mapping[str, EngineSpec], worker: Worker) -> Iterator[Diagnostic]:
    source = holdings.update_of(plan, worker.follows)
    if source is None:
        return
    theirs = plan.placement(source.name)
    for node in plan.graph.of(worker.name):
        own = plan.placement(node.name)
        if own.pool != theirs.pool:
            what = f"`{worker.name}` follows `{worker.follows}`, and their devices are not the same"
            help = f"keep them in one pool: place {node.name}, {source.name} together"
            yield Diagnostic("bad-place", what, worker.span, help)
            return
        kind = holdings.dtype(plan, node.name)
        wanted = holdings.dtype(plan, source.name)
        if kind != wanted:
            what = f"`{worker.name}` follows `{worker.follows}`, whose weights are {wanted}, and its own are {kind}"
            help = f"engine {node.name} = {theirs.engine.name} {{ dtype = {wanted} }}"
            yield Diagnostic("bad-layout", what, worker.span, help)
            return
        mine = (own.engine.name, holdings.side(plan, engines, node.name))
        if mine != (theirs.engine.name, holdings.side(plan, engines, source.name)):
            what = f"`{worker.name}` follows `{worker.follows}`, and `{node.name}` does not have its layout and engine"
            help = f"state no layout and no engine of `{node.name}`: it takes those of `{source.name}`"
            yield Diagnostic("bad-layout", what, worker.span, help)
            return


__all__ = ["placed", "stated"]
