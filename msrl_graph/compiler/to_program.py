"""Conversion of a plan's graph and deploy back to a program.

Invariant: for every plan that the compiler makes, lowering `restore_program(plan)` gives the same graph and deploy.
Therefore the checks of programs can also check a plan from a file. The statements `place` and `apart`, which only the
search for placements reads, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ..data.data_files import HUB
from ..diagnostics import NOWHERE
from ..dsl import ast
from ..dsl.data_sources import MIX
from ..hardware.device_kinds import HOST
from ..ir.attribute_schema import DeclaredAttributes
from ..ir.data_options import DataOptions
from ..ir.evaluate_options import EvaluateOptions
from ..ir.graph import Edge, Expr, Graph, Node
from ..ir.kinds import (
    CountsKind,
    DrawsKind,
    ExtentKind,
    FlagKind,
    NameKind,
    QuantityKind,
    SettingsKind,
    StringKind,
    TrackersKind,
    ValueKind,
    VariablesKind,
    WordsKind,
)
from ..ir.options import DockOptions, EngineOptions, LayoutOptions, ReshardOptions, Run
from ..ir.plan import DataSource, Deployment, EngineChoice, Plan
from ..ir.worker_attributes import WorkerAttributes
from ..sharding.layout import Layout
from ..trackers import is_file


def restore_program(plan: Plan) -> ast.File:
    """Return a program with the graph and the deploy of a plan.

    The models have the names that the workers use. The cluster has only a name and a device, not the other attributes
    of the plan's cluster.
    """
    graph = plan.graph
    deploy = plan.deploy
    items = (
        _algorithm(graph),
        ast.ClusterDecl(_name(plan.cluster.name), (ast.Attr(_name("device"), _string(HOST.name), NOWHERE),), NOWHERE),
        _deploy(graph, deploy, plan.cluster.name),
    )
    return ast.File("", items, NOWHERE)


def _name(text: str) -> ast.Name:
    return ast.Name(text, NOWHERE)


def _names(texts: tuple[str, ...]) -> tuple[ast.Name, ...]:
    return tuple(map(_name, texts))


def _algorithm(graph: Graph) -> ast.AlgorithmDecl:
    body: list[ast.AlgorithmStatement] = []
    body += [ast.ParamDecl(_name(key), literal(value), NOWHERE) for key, value in graph.params.items()]
    body.append(ast.ColumnsDecl(tuple(_column(graph, declared.name) for declared in graph.columns), NOWHERE))
    for state in graph.states:
        per = _name(state.per) if state.per else None
        column = ast.ColumnDecl(_name(state.name), ast.Type(_name(state.element), (), per, NOWHERE), NOWHERE)
        body.append(ast.StateDecl(column, expression(state.initial), NOWHERE))
    for worker in graph.workers:
        stated = {"model": Expr("word", worker.model)} if worker.model else {}
        if worker.follows:
            stated["follows"] = Expr("word", worker.follows)
        if worker.every != 1:
            stated["every"] = Expr("number", worker.every)
        if worker.decay:
            stated["decay"] = Expr("number", worker.decay)
        if worker.freeze:
            stated["freeze"] = Expr("list", args=tuple(Expr("string", word) for word in worker.freeze))
        if worker.adapter:
            stated["adapter"] = _value(WorkerAttributes.kinds()["adapter"], worker.adapter)
        attrs = _attrs(stated)
        body.append(ast.WorkerDecl(_name(worker.name), _name(worker.kind), worker.frozen, attrs, NOWHERE))
    body += [_source(node) if node.verb == "source" else _node(node) for node in graph.nodes]
    body += [_edge(edge) for edge in graph.edges]
    return ast.AlgorithmDecl(_name(graph.name), None, tuple(body), NOWHERE)


def _column(graph: Graph, name: str) -> ast.ColumnDecl:
    column = graph.column(name)
    dims = tuple(
        ast.Dim(dim.ragged, ast.NameExpr(dim.like, NOWHERE) if dim.like else literal(dim.size), NOWHERE)
        for dim in column.dims
    )
    per = _name(column.per) if column.per else None
    return ast.ColumnDecl(_name(name), ast.Type(_name(column.element), dims, per, NOWHERE), NOWHERE)


def _source(node: Node) -> ast.SourceDecl:
    stated = dict(node.attributes)
    count = stated.pop("count")  # written before the block; may be wrong in a plan from a file
    return ast.SourceDecl(expression(count), _names(node.writes), _attrs(stated), NOWHERE)


def _node(node: Node) -> ast.NodeDecl:
    worker = node.named_worker
    label = None if node.name == f"{worker}.{node.verb}" else _name(node.name)
    stated = dict(node.attributes) | ({"per": Expr("word", node.per)} if node.per != Node.per else {})
    reads = _names((*node.reads, *node.states))
    writes = _names(node.gives or node.writes)
    return ast.NodeDecl(label, _name(worker), _name(node.verb), reads, writes, _attrs(stated), NOWHERE, NOWHERE)


def _edge(edge: Edge) -> ast.EdgeDecl:
    groups = ((ast.Ref(edge.src, NOWHERE),), (ast.Ref(edge.dst, NOWHERE),))
    return ast.EdgeDecl(edge.kind, groups, _attrs(edge.attributes), NOWHERE)


def _attrs(stated: Mapping[str, Expr]) -> tuple[ast.Attr, ...]:
    return tuple(ast.Attr(_name(key), expression(value), NOWHERE) for key, value in stated.items())


# The deploy.


def _deploy(graph: Graph, deploy: Deployment, cluster: str) -> ast.DeployDecl:
    body: list[ast.DeployStatement] = []
    body += [ast.ModelDecl(_name(name), _string(name), (), NOWHERE) for name in deploy.models]
    for data in deploy.data.values():
        fields = {column: Expr("string", name) for column, name in data.fields.items()}
        stated = {key: value for key, value in _list_stated(DataOptions, data.options) if key not in fields}
        body.append(ast.DataDecl(_name(data.name), _data_target(data), _attrs(fields | stated), NOWHERE))
    body += [_layout(node, layout) for node, layout in deploy.layouts.items()]
    body += [_engine(node, engine) for node, engine in deploy.engines.items()]
    options: tuple[tuple[Literal["dock", "reshard", "run"], DockOptions | ReshardOptions | Run], ...]
    options = (("dock", deploy.dock), ("reshard", deploy.reshard), ("run", deploy.run))
    body += [ast.OptionsDecl(kind, _attrs(dict(_list_stated(type(value), value))), NOWHERE) for kind, value in options]
    for evaluation in deploy.evaluations:
        stated = dict(_list_stated(EvaluateOptions, evaluation))
        if not evaluation.name:
            del stated["data"]
        body.append(ast.EvaluateDecl(_name(evaluation.task), _attrs(stated), NOWHERE))
    return ast.DeployDecl(_name(graph.name), _name(cluster), _name(deploy.name), tuple(body), NOWHERE)


def _data_target(data: DataSource) -> ast.Expr:
    if not data.parts:
        return _string(data.path.removeprefix(HUB))
    weights = tuple(Expr("number", weight) for weight in data.parts.values())
    return expression(Expr("call", MIX, weights, tuple(data.parts)))


def _layout(node: str, layout: Layout) -> ast.LayoutDecl:
    return ast.LayoutDecl((ast.Ref(node, NOWHERE),), _attrs(dict(_list_stated(LayoutOptions, layout))), NOWHERE)


def _engine(node: str, engine: EngineChoice) -> ast.EngineDecl:
    # Options at their defaults are left out: no engine has all of these options.
    stated = {key: _value(EngineOptions.kinds()[key], value) for key, value in engine.options.items()}
    return ast.EngineDecl((ast.Ref(node, NOWHERE),), _name(engine.name), _attrs(stated), NOWHERE)


def _list_stated(declared: type[DeclaredAttributes], values: Any) -> Iterator[tuple[str, Expr]]:
    """Yield the key and value of each attribute that a program must state.

    A program must state an attribute if it is required, or if its value in `values` differs from the default in
    `declared`.
    """
    for key, attribute in declared.declared().items():
        if (value := getattr(values, key)) != attribute.default or attribute.must:
            yield key, _value(attribute.kind, value)


def _value(kind: ValueKind, value: Any) -> Expr:
    if isinstance(kind, DrawsKind | VariablesKind):
        return kind.expr(value)
    if isinstance(kind, SettingsKind):
        stated = dict(_list_stated(kind.declared, kind.settings(value)))
        return Expr("call", kind.name, tuple(stated.values()), tuple(stated))
    if isinstance(value, tuple):
        if isinstance(kind, TrackersKind):
            return Expr("list", args=tuple(Expr("string" if is_file(part) else "word", part) for part in value))
        one = (
            NameKind()
            if isinstance(kind, NameKind | ExtentKind)
            else StringKind()
            if isinstance(kind, StringKind)
            else CountsKind()
        )
        return Expr("list", args=tuple(_value(one, part) for part in value))
    if isinstance(kind, WordsKind | NameKind) or (isinstance(kind, ExtentKind) and isinstance(value, str)):
        return Expr("word", value)
    if isinstance(kind, QuantityKind):
        return Expr("quantity", value, unit=kind.unit)
    return Expr({FlagKind: "bool", StringKind: "string"}.get(type(kind), "number"), value)


# Expressions.


def expression(expr: Expr) -> ast.Expr:
    """Return the syntax tree of an expression of a plan."""
    if expr.kind in ("word", "column", "state"):
        return ast.NameExpr(str(expr.value), NOWHERE)
    if expr.kind == "list":
        return ast.List(tuple(map(expression, expr.args)), NOWHERE)
    if expr.kind == "call":
        return _call(expr)
    if expr.kind == "neg":
        return ast.Neg(expression(expr.args[0]), NOWHERE)
    if expr.args:
        left, right = map(expression, expr.args)
        return ast.Binary(expr.kind, left, right, NOWHERE)
    return literal(expr.value, expr.unit)


def _call(expr: Expr) -> ast.Expr:
    name = str(expr.value)
    quoted = ":" in name
    if quoted and not expr.args:
        return _string(name)
    args = tuple(
        ast.Arg(_name(key) if key else None, expression(value), NOWHERE)
        for key, value in zip(expr.keys, expr.args, strict=True)
    )
    return ast.Call(_name(name), args, NOWHERE, quoted=quoted)


def literal(value: Any, unit: str = "") -> ast.Expr:
    """Return the syntax tree of a number, a text or a truth value."""
    if isinstance(value, bool):
        return ast.Literal_("bool", value, NOWHERE)
    if isinstance(value, str):
        return _string(value)
    number = 0 if value is None else value
    kind: Any = "quantity" if unit else "float" if isinstance(number, float) else "int"
    plain = ast.Literal_(kind, abs(number), NOWHERE, unit)
    return ast.Neg(plain, NOWHERE) if number < 0 else plain


def _string(text: str) -> ast.Literal_:
    return ast.Literal_("string", text, NOWHERE)
