"""Where the files of a plan are, said so that it runs from anywhere.

Invariant: nothing but paths changes: of data, models, functions in files, interpreters, and the run that is gone on
with. What lies
at a URL is said by it wherever the plan is; each process reads the copy of its own host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..diagnostics import Diagnostic, Fault
from ..files import urls
from ..files.paths import is_file, is_folder
from ..model.architecture import Model
from ..model.models import SHAPE
from .graph import Expr, Node
from .plan import DataSource, Plan

T = TypeVar("T", Model, DataSource)


def absolute(plan: Plan) -> Plan:
    """With absolute paths: Ray's processes have a working directory of their own."""
    return _moved(plan, lambda path: path if urls.is_url(path) else str(Path(path).absolute()))


def pinned(plan: Plan) -> Plan:
    """With the version in each URL that lies there now, so that all who read take the same. Raises Fault."""
    return _fetched(plan, lambda m: urls.pinned(m.path, True, m.span), lambda d: urls.pinned(d.path, span=d.span))


def here(plan: Plan, data: bool = True) -> Plan:
    """With this host's copies in place of URLs, of models or of `data` too; they are fetched where they are not there
    yet. Raises Fault."""
    return _fetched(
        plan,
        lambda m: str(urls.copy(m.path, True, span=m.span)),
        lambda d: str(urls.copy(d.path, span=d.span)) if data else d.path,
    )


def at_hand(plan: Plan) -> Plan:
    """With copies of what the compiler has read of models at URLs."""
    return _fetched(plan, lambda m: str(urls.copy(m.path, True, SHAPE, m.span)), lambda d: d.path)


def remote(plan: Plan) -> bool:
    """Whether something of the plan lies at a URL."""
    paths = [*(m.path for m in plan.deploy.models.values()), *(d.path for d in plan.deploy.data.values())]
    return any(map(urls.is_url, paths))


def _fetched(plan: Plan, model: Callable[[Model], str], data: Callable[[DataSource], str]) -> Plan:
    deploy = plan.deploy
    told = list[Diagnostic]()

    def moved(items: Mapping[str, T], to: Callable[[T], str]) -> dict[str, T]:
        found = dict(items)
        for name, item in items.items():
            try:
                if urls.is_url(item.path):
                    found[name] = replace(item, path=to(item))
            except Fault as fault:
                told.extend(fault.diagnostics)
        return found

    moved_deploy = replace(deploy, models=moved(deploy.models, model), data=moved(deploy.data, data))
    if told:
        raise Fault(*told)
    return replace(plan, deploy=moved_deploy)


def located(plan: Plan) -> Plan:
    """With absolute paths of what is there; what is not yet on this machine keeps the path that was written."""
    return _moved(
        plan, lambda path: str(Path(path).absolute()) if is_file(Path(path)) or is_folder(Path(path)) else path
    )


def _moved(plan: Plan, to: Callable[[str], str]) -> Plan:
    def expression(e: Expr) -> Expr:
        path, colon, name = str(e.value).rpartition(":")
        value = f"{to(path)}:{name}" if e.kind == "call" and colon else e.value
        return replace(e, value=value, args=tuple(map(expression, e.args)))

    def node(n: Node) -> Node:
        return replace(n, attributes={key: expression(e) for key, e in n.attributes.items()})

    deploy = plan.deploy
    data = {name: replace(d, path=to(d.path)) for name, d in deploy.data.items()}
    models = {name: replace(m, path=to(m.path)) if m.path else m for name, m in deploy.models.items()}
    run = replace(deploy.run, resume=to(deploy.run.resume)) if deploy.run.resume else deploy.run
    graph = replace(plan.graph, nodes=tuple(map(node, plan.graph.nodes)))
    around = tuple(replace(s, python=to(s.python)) if s.python else s for s in plan.surroundings)
    deploy = replace(deploy, data=data, models=models, run=run)
    return replace(plan, graph=graph, deploy=deploy, surroundings=around)
