"""Levels: in which rows a node works, and in which its columns have their values.

Invariant: the levels of a graph are a tree (graph.py); a node works on the deepest level that it reads, and all that it
reads belongs to those rows or to rows above them.
"""

from __future__ import annotations

from collections import Counter

from ..diagnostics import Diagnostic
from ..ir.graph import ELEMENTS, Column, Graph, Node
from .columns import Library


def no_common_row(graph: Graph, library: Library) -> list[Diagnostic]:
    """Nodes that read columns of two generations of which neither belongs to the other's rows."""
    found = []
    for node in graph.nodes:
        level = graph.level(node)
        for name in node.reads:
            other = graph.column(name).level
            if graph.common(level, other) == other:
                continue
            deepest = next(c for c in node.reads if graph.column(c).level == level)
            one, two, shared = (graph.made(at) for at in (level, other, graph.common(level, other)))
            both = " and ".join(
                f"`{c}`" if c == row else f"`{c}` of each `{row}`" for c, row in ((deepest, one), (name, two))
            )
            message = f"`{node.name}` reads {both}: no row has both"
            help = (
                f"bring one of them to each `{shared}` first: a column `NUMBER : f32 per {shared}`, written with "
                f"`per = {shared}`"
            )
            found.append(Diagnostic("no-common-row", message, node.span, help))
            break
    return found


def value_of_row(graph: Graph, library: Library) -> list[Diagnostic]:
    """Columns that their writer cannot give one value for each row that they belong to."""
    found = []
    kinds = {w.name: w.kind for w in graph.workers}
    twice = Counter(c for n in graph.nodes for c in n.writes)
    for node in graph.nodes:
        scattered: dict[str, list[Column]] = {}  # by what their values are of
        for column in map(graph.column, node.writes):
            if column.element not in ELEMENTS or twice[column.name] > 1:
                continue  # told already
            level = column.level
            if not column.dims and not column.per and level == graph.unit_level(node) == graph.row_level(node):
                continue  # as for nearly all columns
            row = graph.made(level)
            if column.per and graph.column(column.per).level != level:
                continue  # its own mistake: written nowhere, or in a circle
            if column.per and node.verb == "generate":
                message = (
                    f"`{node.name}` generates `{column.name}`, which is declared as one value for each `{column.per}`"
                )
                found.append(Diagnostic("bad-scope", message, node.span, f"leave `per {column.per}` out of its type"))
            elif graph.common(level, graph.row_level(node)) != level:
                message = f"`{node.name}` writes `{column.name}`, one value for each `{row}`, and reads no row of it"
                found.append(
                    Diagnostic("bad-scope", message, node.span, f"read a column of each `{row}`, or leave `per` out")
                )
            elif node.per != "batch" and graph.common(level, graph.unit_level(node)) != graph.unit_level(node):
                scattered.setdefault(column.per or row, []).append(column)
            if node.verb == "source" or kinds.get(node.worker) == "function":
                found += _as_long(graph, node, column.name)
        for row, columns in scattered.items():
            names = ", ".join(f"`{c.name}`" for c in columns)
            message = f"`{node.name}` writes {names}, one value for each `{row}`, and may get any of the rows under one"
            help = f"add `per = {row}`"
            if kinds.get(node.worker) != "function":
                help = f"leave `per {row}` out of {'its type' if len(columns) == 1 else 'their types'}"
                help += f", or let it read columns of each `{row}` alone"
            found.append(Diagnostic("bad-scope", message, node.span, help))
    return found


def _as_long(graph: Graph, node: Node, column: str) -> list[Diagnostic]:
    """Columns as long as one of which their row has several."""
    found = graph.column(column)
    return [
        Diagnostic(
            "bad-scope",
            f"`{column}` is as long as `{dim.like}`, of which each row of `{node.name}` has several",
            found.span,
            f"give it a bound of its own, or write it where there is one `{dim.like}`",
        )
        for dim in found.dims
        if dim.like and graph.common(found.level, graph.column(dim.like).level) != graph.column(dim.like).level
    ]
