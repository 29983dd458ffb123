"""Checks of `freeze`: which weights of a trained worker stay as they are."""

from __future__ import annotations

from collections.abc import Iterator

from ..diagnostics import Diagnostic, nearest
from ..ir.graph import Graph, Worker
from ..ir.plan import Plan
from ..model import freezing
from ..model.architecture import Model
from .columns import Library
from .stage import PlanContext


def check_workers(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report `freeze` of workers that are not trained, and unknown parts of models."""
    return [diagnostic for worker in graph.workers if worker.freeze for diagnostic in _check_worker(graph, worker)]


def _check_worker(graph: Graph, worker: Worker) -> Iterator[Diagnostic]:
    if not any(node.worker == worker.name for node in graph.verb("update")):
        message = f"`{worker.name}` has no update, so `freeze` has no effect"
        yield Diagnostic("bad-value", message, worker.span, "leave `freeze` out: none of its weights change")
    for word in worker.freeze:
        if word not in freezing.PARTS and not freezing.is_pattern(word):
            message = f"`freeze` of `{worker.name}`: `{word}` is not a part of a model"
            yield Diagnostic("unknown-name", message, worker.span, nearest(word, freezing.PARTS))


def check_models(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report `freeze` that matches none of a model's weights, or all of them."""
    diagnostics: list[Diagnostic] = []
    for node in plan.graph.verb("update"):
        worker = plan.graph.worker(node.worker)
        model = plan.model(node.name)
        if node not in plan.graph.sharing(worker.name)[:1] or not worker.freeze:
            continue
        if unmatched := freezing.list_unmatched(model, worker.freeze):
            message = f"`freeze` of `{worker.name}`: no weight of `{model.name}` matches `{unmatched[0]}`"
            diagnostics.append(Diagnostic("bad-value", message, worker.span, _suggest(model, unmatched[0])))
        elif not model.trained:
            message = f"`freeze` of `{worker.name}` leaves no weight to train"
            help = f"freeze less, or leave out `{node.name}` and make `{worker.name}` frozen"
            diagnostics.append(Diagnostic("bad-value", message, worker.span, help))
    return diagnostics


def _suggest(model: Model, word: str) -> str:
    if word == "head" and model.tied:
        return "its head shares the weights of the embedding: freeze `embeddings`"
    if word in freezing.PARTS:
        return f"leave `{word}` out"
    example = next(tensor.name for tensor in model.weights if tensor.layer >= 0)
    return f"names of weights are as in `{example}`; `*` stands for any characters"
