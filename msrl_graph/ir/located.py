"""Where the files of a plan are, said so that it runs from anywhere.

Invariant: nothing but paths changes: of data, models, functions in files, and the run that is gone on with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..files.paths import is_file, is_folder
from .graph import Expr, Node
from .plan import Plan


def absolute(plan: Plan) -> Plan:
    """With absolute paths: Ray's processes have a working directory of their own."""
    return _moved(plan, lambda path: str(Path(path).absolute()))


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
    return replace(plan, graph=graph, deploy=replace(deploy, data=data, models=models, run=run))
