"""The verifier of names and expressions in a plan that was read from a file.

Invariant: it relies on nothing in the plan. The other parts of a plan are verified by the passes that fill them
(`Pass.verify`), which assume that all names are correct.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ..ir.graph import KINDS, Expr, Graph
from ..ir.plan import FUNCTIONS, Plan

LITERALS = {"number": 0, "string": 0, "bool": 0, "quantity": 0, "word": 0, "column": 0, "state": 0, "neg": 1}


def find_wrong_names(plan: Plan) -> Iterator[str]:
    """Verify names and expressions.

    Each name must be the name of a node, column, worker, pool or model of the plan. Each expression must have the
    number of operands that its kind needs. The checks of a program ensure this, but a plan file may have been edited by
    hand.
    """
    if not plan.pools:
        yield "it does not say which devices its states share"
        return
    yield from _check_graph(plan.graph)
    yield from _check_plan(plan)


def _list_missing(kind: str, names: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    existing = set(known)
    yield from (f"it has no {kind} `{name}`" for name in names if name not in existing)


def _list_duplicates(kind: str, names: Iterable[str]) -> Iterator[str]:
    yield from (f"it has the {kind} `{name}` more than once" for name, count in Counter(names).items() if count > 1)


def _check_graph(graph: Graph) -> Iterator[str]:
    columns, states, workers = ([item.name for item in part] for part in (graph.columns, graph.states, graph.workers))
    nodes = [node.name for node in graph.nodes]
    written = [column for node in graph.nodes for column in node.writes]
    yield from (
        *_list_duplicates("node", nodes),
        *_list_duplicates("column", columns),
        *_list_duplicates("worker", workers),
    )
    yield from _list_duplicates("writer of the column", written)
    if not graph.nodes or [node.name for node in graph.nodes if node.verb == "source"] != nodes[:1]:
        yield "its source is not the first node, or not the only source"
    levels = enumerate(graph.under)
    if len(graph.rows) != len(graph.under) or any(not -1 <= above < level for level, above in levels):
        yield "the levels of its rows are not one under another"
    for column in graph.columns:
        likes = [dim.like for dim in column.dims if dim.like]
        yield from _list_missing("column", [*likes, *([column.per] if column.per else [])], columns)
        yield from _list_missing("writer of", [column.name], written)
        if not 0 <= column.level < len(graph.rows):
            yield f"it has no rows of the level of `{column.name}`"
    for state in graph.states:
        yield from (
            *_list_missing("column", [state.per] if state.per else [], columns),
            *_check_operands(state.initial),
        )
    for node in graph.nodes:
        yield from _list_missing("worker", [node.worker] if node.verb != "source" else [], workers)
        yield from _list_missing("column", [*node.reads, *node.writes], columns)
        yield from _list_missing("column or state", node.gives, [*columns, *states])
        yield from _list_missing("column", [node.per], [*columns, "row", "batch"])
        yield from _list_missing("state", node.states, states)
        yield from (fault for expr in node.attributes.values() for fault in _check_operands(expr))
        kind = next((candidate.kind for candidate in graph.workers if candidate.name == node.worker), "")
        if node.verb not in KINDS.get(kind, (node.verb,)):
            yield f"`{node.name}` is not a node that a `{kind}` can have"
        if node.verb == "generate" and not any(
            column.element == "i32" for column in graph.columns if column.name in node.writes
        ):
            yield f"`{node.name}` generates no tokens"
    order = {name: index for index, name in enumerate(nodes)}
    for edge in graph.edges:
        yield from _list_missing("node", [edge.src, edge.dst], nodes)
        yield from (fault for expr in edge.attributes.values() for fault in _check_operands(expr))
        if edge.kind == "sample" and order.get(edge.src, 0) >= order.get(edge.dst, len(order)):
            yield f"`{edge.dst}` comes before `{edge.src}`, which it reads from"


def _check_operands(expr: Expr) -> Iterator[str]:
    """Yield a text for each subexpression with the wrong number of operands."""
    parts = {"call": len(expr.keys), "list": len(expr.args)} | LITERALS
    if len(expr.args) != parts.get(expr.kind, 2):
        yield f"an expression of the kind `{expr.kind}` has {len(expr.args)} parts"
    yield from (fault for part in expr.args for fault in _check_operands(part))


def _check_plan(plan: Plan) -> Iterator[str]:
    nodes, pools, columns = (
        [item.name for item in part] for part in (plan.graph.nodes, plan.pools, plan.graph.columns)
    )
    yield from _list_missing(
        "model", [worker.model for worker in plan.graph.workers if worker.model], plan.deploy.models
    )
    yield from _list_duplicates("pool", pools)
    placed = [*(placement.pool for placement in plan.placements), *(stream.pool for stream in plan.schedule)]
    yield from _list_missing("pool", placed, [*pools, FUNCTIONS])
    named = [
        *(placement.node for placement in plan.placements),
        *(controller.node for controller in plan.docks.controllers),
    ]
    named += [name for pool in plan.pools for name in pool.nodes]
    named += [name for reshard in plan.reshards for name in (reshard.src, reshard.dst)] + [
        name for traffic_item in plan.traffic for name in (traffic_item.src, traffic_item.dst)
    ]
    named += [draw.generation for evaluation in plan.deploy.evaluations for draw in evaluation.draws]
    named += [
        name
        for stream in plan.schedule
        for instruction in stream.instructions
        for name in (instruction.node, instruction.other)
        if name
    ]
    yield from _list_missing("node", [*named, *plan.deploy.layouts, *plan.deploy.engines], nodes)
    yield from _list_duplicates("evaluation", [evaluation.task for evaluation in plan.deploy.evaluations])
    yield from _list_missing("data", [evaluation.data for evaluation in plan.deploy.evaluations], plan.deploy.data)
    yield from _list_missing(
        "column", [column for evaluation in plan.deploy.evaluations for column in evaluation.columns], columns
    )
