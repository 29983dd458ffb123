"""Checks of `adapter`: which weights of a worker have an adapter."""

from __future__ import annotations

from collections.abc import Iterator

from ..diagnostics import Diagnostic, nearest
from ..ir.graph import Graph, Worker
from ..ir.plan import Plan
from ..model.lora import ALL_LINEAR, list_projections
from .columns import Library
from .stage import PlanContext


def check_workers(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report adapters that nothing trains, and settings that contradict them."""
    return [found for worker in graph.workers if worker.adapter for found in _check_worker(graph, worker)]


def _check_worker(graph: Graph, worker: Worker) -> Iterator[Diagnostic]:
    if not any(node.worker == worker.name for node in graph.verb("update")):
        message = f"`{worker.name}` has no update, so `adapter` has no effect"
        yield Diagnostic("bad-value", message, worker.span, "leave `adapter` out: none of its weights change")
    if worker.freeze:
        message = f"`{worker.name}` has an adapter, so all weights that `freeze` can name are frozen"
        yield Diagnostic("bad-value", message, worker.span, "leave `freeze` out")
    if worker.adapter and not worker.adapter.targets:
        message = f"the adapter of `{worker.name}` has no targets"
        yield Diagnostic("bad-value", message, worker.span, f"leave `targets` out: it is `{ALL_LINEAR}`")
    if worker.adapter and worker.adapter.dropout:
        message = f"`dropout` in the adapter of `{worker.name}` can be neither planned nor run"
        yield Diagnostic("not-yet", message, worker.span, "leave `dropout` out: it is 0")


def check_models(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report targets that a model does not have."""
    diagnostics: list[Diagnostic] = []
    for worker in plan.graph.workers:
        if worker.adapter is None or not (nodes := plan.graph.nodes_of(worker.name)):
            continue
        model = plan.model(nodes[0].name)
        if any(tensor.fused for tensor in model.weights):
            message = f"an adapter of `{model.name}`, whose files fuse projections, can be neither planned nor run"
            help = "leave `adapter` out, or freeze a part of the model: `freeze`"
            diagnostics.append(Diagnostic("not-yet", message, worker.span, help))
            continue
        known = list_projections(model)
        for target in [*worker.adapter.targets] if known else []:
            if target not in (ALL_LINEAR, *known):
                message = f"`targets` of `{worker.name}`: `{model.name}` has no projection `{target}`"
                help = nearest(target, (*known, ALL_LINEAR))
                diagnostics.append(Diagnostic("unknown-name", message, worker.span, help))
    return diagnostics
