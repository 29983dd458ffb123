"""Checks of levels: which rows a node works on, and to which rows columns belong.

Invariant: the levels of a graph are a tree (ir/graph.py). A node works on the rows of the deepest level that it reads.
All columns that the node reads belong to these rows or to rows above them.
"""

from __future__ import annotations

from collections import Counter

from ..diagnostics import Diagnostic
from ..ir.graph import ELEMENTS, Column, Graph, Node
from .columns import Library


def no_common_row(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report nodes that read columns of two levels on different branches.

    The levels are on different branches of the tree of levels if neither level is above the other. So no row has values
    of columns from both levels.
    """
    diagnostics = []
    for node in graph.nodes:
        level = graph.level(node)
        for name in node.reads:
            other = graph.column(name).level
            if graph.common(level, other) == other:
                continue
            deepest = next(column for column in node.reads if graph.column(column).level == level)
            one, two, shared = (graph.row_column(row_level) for row_level in (level, other, graph.common(level, other)))
            both = " and ".join(
                f"`{column}`" if column == row else f"`{column}` of each `{row}`"
                for column, row in ((deepest, one), (name, two))
            )
            message = f"`{node.name}` reads {both}: no row has both"
            help = (
                f"reduce one of them to each `{shared}` first: a column `NUMBER : f32 per {shared}`, written with "
                f"`per = {shared}`"
            )
            diagnostics.append(Diagnostic("no-common-row", message, node.span, help))
            break
    return diagnostics


def value_of_row(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report columns whose writer cannot compute one value for each row of the column.

    For example, the writer reads no column of these rows. Another example is a value that must be computed from several
    rows, although one call of the writer gets only some of these rows.
    """
    diagnostics = []
    kinds = {worker.name: worker.kind for worker in graph.workers}
    twice = Counter(column for node in graph.nodes for column in node.writes)
    for node in graph.nodes:
        scattered: dict[str, list[Column]] = {}  # by the column whose rows the values belong to
        for column in map(graph.column, node.writes):
            if column.element not in ELEMENTS or twice[column.name] > 1:
                continue  # reported already
            level = column.level
            if not column.dims and not column.per and level == graph.unit_level(node) == graph.row_level(node):
                continue  # the case of nearly all columns
            row = graph.row_column(level)
            if column.per and graph.column(column.per).level != level:
                continue  # another mistake: the column after `per` is never written, or depends on this one
            if column.per and node.verb == "generate":
                message = (
                    f"`{node.name}` generates `{column.name}`, which is declared as one value for each `{column.per}`"
                )
                diagnostics.append(
                    Diagnostic("bad-scope", message, node.span, f"leave `per {column.per}` out of its type")
                )
            elif graph.common(level, graph.row_level(node)) != level:
                message = f"`{node.name}` writes `{column.name}`, one value for each `{row}`, but reads no such row"
                diagnostics.append(
                    Diagnostic("bad-scope", message, node.span, f"read a column of each `{row}`, or leave `per` out")
                )
            elif node.per != "batch" and graph.common(level, graph.unit_level(node)) != graph.unit_level(node):
                scattered.setdefault(column.per or row, []).append(column)
            if node.verb == "source" or kinds.get(node.worker) == "function":
                diagnostics += _check_lengths(graph, node, column.name)
        for row, columns in scattered.items():
            names = ", ".join(f"`{column.name}`" for column in columns)
            message = f"`{node.name}` writes {names}, one value for each `{row}`, but may get only some rows of one"
            help = f"add `per = {row}`"
            if kinds.get(node.worker) != "function":
                help = f"leave `per {row}` out of {'its type' if len(columns) == 1 else 'their types'}"
                help += f", or let it read only columns of each `{row}`"
            diagnostics.append(Diagnostic("bad-scope", message, node.span, help))
    return diagnostics


def _check_lengths(graph: Graph, node: Node, column: str) -> list[Diagnostic]:
    """Report a column whose length is not one number for each row.

    The type of a column can name another column: the values of both columns then have the same length. So each row of
    the first column must have exactly one value of the other column. For example, a column of prompts cannot be as long
    as `response`, since each prompt has several responses.
    """
    declared = graph.column(column)
    return [
        Diagnostic(
            "bad-scope",
            f"`{column}` is as long as `{dim.like}`, of which each row of `{node.name}` has several",
            declared.span,
            f"give it a bound of its own, or write it in a node whose rows have one `{dim.like}` each",
        )
        for dim in declared.dims
        if dim.like and graph.common(declared.level, graph.column(dim.like).level) != graph.column(dim.like).level
    ]
