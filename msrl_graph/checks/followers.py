"""Checks of followers: frozen workers that take over weights of a trained worker.

Invariant: in a plan that passes these checks, each rank has the same shard of the follower's weights and of the trained
worker's weights. So each rank updates the follower's weights in place, and no weights are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..backends.spec import EngineSpec
from ..cost import holdings
from ..diagnostics import Diagnostic, nearest
from ..ir.graph import Graph, Worker
from ..ir.plan import Plan
from .columns import Library
from .stage import PlanContext


def check_followers(graph: Graph, library: Library) -> list[Diagnostic]:
    """Check the attributes of all workers that follow another worker."""
    return [diagnostic for worker in graph.workers for diagnostic in _check_worker(graph, worker)]


def _check_worker(graph: Graph, worker: Worker) -> Iterator[Diagnostic]:
    name = worker.name
    follows = worker.follows
    if not follows:
        if (worker.every, worker.decay) != (1, 0):
            message = f"`{name}` follows no worker, so `{'every' if worker.every != 1 else 'decay'}` has no effect"
            yield Diagnostic("bad-value", message, worker.span, "add `follows = WORKER`, or leave it out")
        return
    trained = {node.worker: graph.worker(node.worker) for node in graph.verb("update")}
    if follows not in trained:
        known = any(candidate.name == follows for candidate in graph.workers)
        message = f"`{follows}`, which `{name}` follows, {'is not trained' if known else 'is not a worker'}"
        yield Diagnostic("unknown-name", message, worker.span, nearest(follows, trained))
        return
    other = trained[follows]
    if not worker.frozen:
        yield Diagnostic(
            "bad-value", f"`{name}` follows `{follows}`, so it is not trained itself", worker.span, "add `frozen`"
        )
    elif (worker.kind, worker.model) != (other.kind, other.model):
        theirs = f"a {other.kind} of the model `{other.model}`"
        message = f"`{name}` is a {worker.kind} of the model `{worker.model}`, and follows `{follows}`, {theirs}"
        yield Diagnostic("bad-value", message, worker.span, f"let both be {theirs}")
    elif worker.decay == 1:
        message = f"`{name}` with `decay = 1` never changes"
        yield Diagnostic("bad-value", message, worker.span, "set `decay` below 1, or leave `follows` out")
    for node in graph.verb("generate"):
        if node.worker == name:
            what = f"`{node.name}`, which generates with weights that follow `{follows}`,"
            message = f"{what} can be neither planned nor run"
            help = f"a worker that follows another one cannot generate; `{name}` can infer"
            yield Diagnostic("not-yet", message, node.span, help)


def check_follower_placement(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report followers that are not placed like the workers that they follow.

    A follower must have the same pool, data type, engine and layout as the update of the worker that it follows.
    """
    return [
        diagnostic
        for worker in plan.graph.workers
        if worker.follows
        for diagnostic in _check_placement(plan, context.engines, worker)
    ]


def _check_placement(plan: Plan, engines: Mapping[str, EngineSpec], worker: Worker) -> Iterator[Diagnostic]:
    source = holdings.update_of(plan, worker.follows)
    if source is None:
        return
    theirs = plan.placement(source.name)
    for node in plan.graph.nodes_of(worker.name):
        own = plan.placement(node.name)
        if own.pool != theirs.pool:
            message = f"`{worker.name}` follows `{worker.follows}`, but they are on different devices"
            help = f"keep them in one pool: place {node.name}, {source.name} together"
            yield Diagnostic("bad-place", message, worker.span, help)
            return
        kind = holdings.dtype(plan, node.name)
        wanted = holdings.dtype(plan, source.name)
        if kind != wanted:
            message = f"`{worker.name}` follows `{worker.follows}`, whose weights are {wanted}, but its own are {kind}"
            help = f"engine {node.name} = {theirs.engine.name} {{ dtype = {wanted} }}"
            yield Diagnostic("bad-layout", message, worker.span, help)
            return
        mine = (own.engine.name, holdings.side(plan, engines, node.name))
        if mine != (theirs.engine.name, holdings.side(plan, engines, source.name)):
            message = f"`{worker.name}` follows `{worker.follows}`, but `{node.name}` has another layout or engine"
            help = f"leave out the layout and engine of `{node.name}`: it takes those of `{source.name}`"
            yield Diagnostic("bad-layout", message, worker.span, help)
            return


__all__ = ["check_follower_placement", "check_followers"]
