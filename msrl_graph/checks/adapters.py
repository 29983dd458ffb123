"""Checks of `adapter`: the weights that have an adapter, and its settings."""

from __future__ import annotations

from collections.abc import Iterator

from ..diagnostics import Diagnostic, Span, nearest
from ..ir.graph import Graph, Worker
from ..ir.plan import Plan
from ..model.architecture import Model
from ..model.lora import ALL_LINEAR, format_setting, list_adapted, list_left_out, list_projections, list_targets
from ..model.lora_settings import Lora
from .columns import Library
from .stage import PlanContext


def check_workers(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report adapters that nothing trains, and settings that contradict them."""
    return [found for worker in graph.workers if worker.adapter for found in _check_worker(graph, worker)]


def _check_worker(graph: Graph, worker: Worker) -> Iterator[Diagnostic]:
    if not any(node.worker == worker.name for node in graph.verb("update")):
        message = f"`{worker.name}` has no update, so `adapter` has no effect"
        yield Diagnostic("bad-value", message, worker.span, "leave `adapter` out: none of its weights change")
    if worker.adapter and worker.adapter.targets == ():
        message = f"the adapter of `{worker.name}` has no targets"
        yield Diagnostic("bad-value", message, worker.span, f"leave `targets` out: it is `{ALL_LINEAR}`")
    if worker.adapter and worker.adapter.dropout >= 1:
        message = f"with `dropout = 1`, the adapter of `{worker.name}` gets no inputs and learns nothing"
        yield Diagnostic("bad-value", message, worker.span, "state a share below 1, such as `dropout = 0.05`")


def check_models(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report adapters that do not fit their models, or the folders they start from."""
    diagnostics: list[Diagnostic] = []
    for worker in plan.graph.workers:
        nodes = plan.graph.nodes_of(worker.name)
        model = plan.model(nodes[0].name) if nodes and worker.kind != "function" else None
        if model is None or model.lora is None:
            continue
        trained = any(node.verb == "update" for node in nodes)
        if trained and worker.freeze:
            message = f"`{worker.name}` has an adapter, so all weights that `freeze` can name are frozen"
            diagnostics.append(Diagnostic("bad-value", message, worker.span, "leave `freeze` out"))
        diagnostics += _check_dropout(model, model.lora, worker.span)
        if model.initial is None:
            diagnostics += _check_targets(worker, model)
            continue
        if worker.adapter:
            diagnostics += _check_agreement(worker, model, model.initial)
        if trained and model.initial.dropout != model.lora.dropout:
            diagnostics.append(_report_dropout(worker, model.initial, model))
    return diagnostics


def _check_dropout(model: Model, adapter: Lora, span: Span) -> Iterator[Diagnostic]:
    experts = {pair.weight.name.split(".")[-2] for pair in list_adapted(model) if pair.weight.experts}
    if adapter.dropout and experts:
        message = f"`dropout` in adapters of experts of `{model.name}` can be neither planned nor run"
        others = [name for name in list_projections(model) if name not in experts]
        help = f"leave `dropout` out, or name other projections: `targets = [{', '.join(others)}]`"
        yield Diagnostic("not-yet", message, span, help)


def _check_targets(worker: Worker, model: Model) -> Iterator[Diagnostic]:
    known = list_projections(model)
    stated = (worker.adapter and worker.adapter.targets) or ()
    left_out = list_left_out(model)
    includes_all = not stated or ALL_LINEAR in stated
    if refused := [name for name in left_out if includes_all or name in stated]:
        names = " and ".join(f"`{name}`" for name in refused)
        message = f"an adapter of the projections {names} of `{model.name}` can be neither planned nor run"
        help = "train a part of the model instead: `freeze`"
        if known:
            help = f"`{ALL_LINEAR}` includes them: " * includes_all + f"write `targets = {format_setting(known)}`"
        yield Diagnostic("not-yet", message, worker.span, help)
    for target in stated if known else ():
        if target not in (ALL_LINEAR, *known, *left_out):
            message = f"`targets` of `{worker.name}`: `{model.name}` has no projection `{target}`"
            yield Diagnostic("unknown-name", message, worker.span, nearest(target, (*known, ALL_LINEAR)))


def _check_agreement(worker: Worker, model: Model, initial: Lora) -> Iterator[Diagnostic]:
    """Report stated settings that differ from those of the adapter's folder."""
    stated = worker.adapter
    assert stated is not None
    folder_targets = list_targets(model, initial.targets)
    pairs = (
        ("rank", stated.rank, initial.rank),
        ("alpha", stated.alpha, initial.alpha),
        ("targets", stated.targets and list_targets(model, stated.targets), folder_targets),
    )
    for name, own, theirs in pairs:
        if own and own != theirs:
            has = format_setting(theirs)
            shown = format_setting(stated.targets or ()) if name == "targets" else format_setting(own)
            message = f"`{name} = {shown}` in the adapter of `{worker.name}`, but the adapter in {initial.folder} has "
            message += f"`{name} = {has}`"
            help = f"leave `{name}` out, or write `{name} = {has}`"
            yield Diagnostic("bad-value", message, worker.span, help)


def _report_dropout(worker: Worker, initial: Lora, model: Model) -> Diagnostic:
    message = f"the updates of `{worker.name}` do not use `lora_dropout = {initial.dropout:g}` of {initial.folder}"
    help = "a program states `dropout` in its own adapter; without it, it is 0"
    return Diagnostic("unused-setting", message, model.span, help, "hint")
