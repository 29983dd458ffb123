"""Whether what a plan names is in it.

Invariant: in a plan of which `dangling` says nothing, each name of a node, column, worker, state, pool and model is that of one in the
plan, and each expression has the parts that its kind has. What the compiler makes is so; a file may have been edited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from .graph import KINDS, Expr, Graph
from .plan import Plan

FUNCTIONS = "functions"  # the stream of the hosts' functions, which have no pool
LITERALS = {"number": 0, "string": 0, "bool": 0, "quantity": 0, "word": 0, "column": 0, "state": 0, "neg": 1}


def dangling(plan: Plan) -> str:
    """What is not there, or not as it must be, first; empty where all is."""
    return next(chain(_in_graph(plan.graph), _in_plan(plan)), "")


def _missing(what: str, names: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    there = set(known)
    yield from (f"it has no {what} `{n}`" for n in names if n not in there)


def _twice(what: str, names: Iterable[str]) -> Iterator[str]:
    yield from (f"it has the {what} `{n}` more than once" for n, count in Counter(names).items() if count > 1)


def _in_graph(graph: Graph) -> Iterator[str]:
    columns, states, workers = ([x.name for x in part] for part in (graph.columns, graph.states, graph.workers))
    nodes = [n.name for n in graph.nodes]
    written = [c for n in graph.nodes for c in n.writes]
    yield from (*_twice("node", nodes), *_twice("column", columns), *_twice("worker", workers), *_twice("writer of the column", written))
    if not graph.nodes or [n.name for n in graph.nodes if n.verb == "source"] != nodes[:1]:
        yield "its first node is not the source, or another is"
    if len(graph.rows) != len(graph.under) or any(not -1 <= above < level for level, above in enumerate(graph.under)):
        yield "the levels of its rows are not one under another"
    for column in graph.columns:
        likes = [d.like for d in column.dims if d.like]
        yield from (
            *_missing("column", [*likes, *([column.per] if column.per else [])], columns),
            *_missing("writer of", [column.name], written),
        )
        if not 0 <= column.level < len(graph.rows):
            yield f"it has no rows of the level of `{column.name}`"
    for state in graph.states:
        yield from (*_missing("column", [state.per] if state.per else [], columns), *_parts(state.initial))
    for node in graph.nodes:
        yield from _missing("worker", [node.worker] if node.verb != "source" else [], workers)
        yield from _missing("column", [*node.reads, *node.writes], columns)
        yield from _missing("column or state", node.gives, [*columns, *states])
        yield from (*_missing("column", [node.per], [*columns, "row", "batch"]), *_missing("state", node.states, states))
        yield from (fault for expr in node.attributes.values() for fault in _parts(expr))
        kind = next((w.kind for w in graph.workers if w.name == node.worker), "")
        yield from (f"`{node.name}` is no state of a `{kind}`" for _ in [0] if node.verb not in KINDS.get(kind, (node.verb,)))
        if node.verb == "generate" and not any(c.element == "i32" for c in graph.columns if c.name in node.writes):
            yield f"`{node.name}` generates no tokens"
    order = {name: i for i, name in enumerate(nodes)}
    for edge in graph.edges:
        yield from (*_missing("node", [edge.src, edge.dst], nodes), *(fault for x in edge.attributes.values() for fault in _parts(x)))
        if edge.kind == "sample" and order.get(edge.src, 0) >= order.get(edge.dst, len(order)):
            yield f"`{edge.dst}` stands before `{edge.src}`, which it reads from"


def _parts(expr: Expr) -> Iterator[str]:
    """What an expression misses of what its kind has."""
    parts = {"call": len(expr.keys), "list": len(expr.args)} | LITERALS
    if len(expr.args) != parts.get(expr.kind, 2):
        yield f"an expression of the kind `{expr.kind}` has {len(expr.args)} parts"
    yield from (fault for part in expr.args for fault in _parts(part))


def _in_plan(plan: Plan) -> Iterator[str]:
    nodes, pools = [n.name for n in plan.graph.nodes], [p.name for p in plan.pools]
    yield from (*_missing("model", [w.model for w in plan.graph.workers if w.model], plan.deploy.models), *_twice("pool", pools))
    yield from _missing("pool", [*(p.pool for p in plan.placements), *(s.pool for s in plan.schedule)], [*pools, FUNCTIONS])
    named = [*(p.node for p in plan.placements), *(c.node for c in plan.docks.controllers)]
    named += (
        [n for p in plan.pools for n in p.nodes]
        + [n for r in plan.reshards for n in (r.src, r.dst)]
        + [n for t in plan.traffic for n in (t.src, t.dst)]
    )
    yield from _missing("node", [*named, *plan.deploy.layouts, *plan.deploy.engines], nodes)
    yield from _missing("column", [c for e in plan.deploy.evaluations for c in e.report], [c.name for c in plan.graph.columns])
