"""Paths of a plan's files, rewritten so that the plan runs from any folder.

Invariant: nothing in a plan changes except the paths of data, models, files with functions, Python interpreters, and
the run to resume. A file at a URL has the same URL on all hosts; each process reads the copy of the file on its own
host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..diagnostics import Diagnostic, Fault, Span
from ..files import urls
from ..ir.graph import Expr, Node
from ..ir.plan import DataSource, Plan
from ..model.architecture import Model
from ..model.models import SHAPE
from . import data_files, hub

T = TypeVar("T", Model, DataSource)


def make_absolute(plan: Plan) -> Plan:
    """Make all paths absolute, since processes of Ray have another working directory."""
    return _map_paths(plan, lambda path: path if urls.is_url(path) else str(Path(path).absolute()))


def pin_urls(plan: Plan) -> Plan:
    """Append the current version of the content to each URL of a model or data file.

    So all processes read the same version of a file. Raises Fault.
    """
    return _replace_urls(
        plan,
        lambda folder, span: urls.pin_version(folder, True, span),
        lambda data: replace(
            data, path=hub.pin(data) if hub.is_hub(data.path) else urls.pin_version(data.path, span=data.span)
        ),
    )


def copy_to_host(plan: Plan, data: bool = True) -> Plan:
    """Replace URLs by paths of copies on this host; fetch a copy if it does not exist.

    URLs of models are always replaced. URLs of data are replaced if `data` is true. Raises Fault.
    """
    return _replace_urls(
        plan,
        lambda folder, span: str(urls.copy(folder, True, span=span)),
        lambda source: _copy_data(source) if data else source,
    )


def copy_model_heads(plan: Plan) -> Plan:
    """Replace URLs of models by paths of local copies that have no weight files.

    A copy has only the files that the compiler reads. Raises Fault.
    """
    return _replace_urls(plan, lambda folder, span: str(urls.copy(folder, True, SHAPE, span)), lambda data: data)


def has_urls(plan: Plan) -> bool:
    """Return whether a model or data file of the plan is at a URL."""
    folders = [folder for model in plan.deploy.models.values() for folder in model.folders]
    return any(map(urls.is_url, (*folders, *(data.path for data in plan.deploy.data.values()))))


def _copy_data(data: DataSource) -> DataSource:
    if hub.is_hub(data.path):
        return replace(data, files=hub.fetch(data))
    return replace(data, path=str(urls.copy(data.path, span=data.span)))


def _replace_urls(plan: Plan, folder: Callable[[str, Span], str], data: Callable[[DataSource], DataSource]) -> Plan:
    """Return the plan with other paths in place of URLs of models and data."""
    deploy = plan.deploy
    diagnostics = list[Diagnostic]()

    def moved(items: Mapping[str, T], to: Callable[[T], T]) -> dict[str, T]:
        moved_items = dict(items)
        for name, item in items.items():
            try:
                moved_items[name] = to(item)
            except Fault as fault:
                diagnostics.extend(fault.diagnostics)
        return moved_items

    def move_model(model: Model) -> Model:
        return _move_folders(model, lambda path: folder(path, model.span) if urls.is_url(path) else path)

    sources = moved(deploy.data, lambda source: data(source) if urls.is_url(source.path) else source)
    moved_deploy = replace(deploy, models=moved(deploy.models, move_model), data=sources)
    if diagnostics:
        raise Fault(*diagnostics)
    return replace(plan, deploy=moved_deploy)


def _move_folders(model: Model, to: Callable[[str], str]) -> Model:
    """Return a model with other paths of its folders."""
    if model.initial is not None:
        model = replace(model, initial=replace(model.initial, folder=to(model.initial.folder)))
    return replace(model, path=to(model.path)) if model.path else model


def make_existing_absolute(plan: Plan) -> Plan:
    """Make paths of existing files absolute.

    Files that are not on this machine yet keep their paths.
    """
    return _map_paths(
        plan, lambda path: str(Path(path).absolute()) if not urls.is_url(path) and data_files.exists(path) else path
    )


def _map_paths(plan: Plan, to: Callable[[str], str]) -> Plan:
    def expression(expr: Expr) -> Expr:
        path, colon, name = str(expr.value).rpartition(":")
        value = f"{to(path)}:{name}" if expr.kind == "call" and colon else expr.value
        return replace(expr, value=value, args=tuple(map(expression, expr.args)))

    def tracker(name: str) -> str:
        path, colon, class_name = name.rpartition(":")
        return f"{to(path)}:{class_name}" if colon else name

    def node(node: Node) -> Node:
        return replace(node, attributes={key: expression(expr) for key, expr in node.attributes.items()})

    deploy = plan.deploy
    data = {
        name: replace(source, path=to(source.path)) if source.path else source for name, source in deploy.data.items()
    }
    models = {name: _move_folders(model, to) for name, model in deploy.models.items()}
    run = replace(deploy.run, resume=to(deploy.run.resume)) if deploy.run.resume else deploy.run
    run = replace(run, track=tuple(map(tracker, run.track)))
    graph = replace(plan.graph, nodes=tuple(map(node, plan.graph.nodes)))
    environments = tuple(
        replace(environment, python=to(environment.python)) if environment.python else environment
        for environment in plan.surroundings
    )
    deploy = replace(deploy, data=data, models=models, run=run)
    return replace(plan, graph=graph, deploy=deploy, surroundings=environments)
