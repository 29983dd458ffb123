"""Filters: rows that leave the iteration, and what still holds of those that stay.

Invariant: a group is whole or was made smaller as a whole (`per` kept it together); single rows that leave break the groups after them.
"""

from __future__ import annotations

import networkx as nx

from ..diagnostics import Diagnostic
from ..graph import Graph
from .columns import Library
from .scope import calls


def broken_groups(graph: Graph, library: Library) -> list[Diagnostic]:
    """Statistics over groups of which a filter before them may have taken single rows."""
    found = []
    for node in graph.nodes:
        if not node.filters or node.per != "row" or not graph.level(node):
            continue
        above = next((c.name for c in graph.columns if c.level == graph.under[graph.level(node)]), "")
        for after in (graph.node(n) for n in sorted(nx.descendants(graph.flow, node.name))):
            for call, signature in calls(after, library):
                if signature.scope == "group" and after.per not in ("row", "batch"):
                    message = f"`{signature.name}` of `{after.name}` needs whole groups, and `{node.name}` before it drops single rows"
                    help = f"filter whole groups, `per = {above}`, or filter after `{after.name}`"
                    span = call.span if call.span.line else after.span
                    found.append(Diagnostic("bad-scope", message, span, help, related=((node.span, "rows are dropped here"),)))
    return found


def compared(graph: Graph, library: Library) -> list[Diagnostic]:
    """Comparisons of what is no number of the row."""
    found, columns = [], {c.name: c for c in graph.columns}
    for node in graph.nodes:
        keep = node.attributes.get("keep")
        column = columns.get(str(keep.args[0].value)) if keep is not None and keep.kind != "call" else None
        if keep is not None and column is not None and (column.dims or column.element in ("text", "json")):
            what = "text" if column.element in ("text", "json") else "several numbers"
            message = f"`keep` of `{node.name}` compares one number of each row, and `{column.name}` is {what}"
            help = f"compute the number first: `node host.NAME({column.name}) -> NUMBER {{ call = … }}`"
            span = keep.args[0].span
            found.append(Diagnostic("bad-value", message, span if span.line else node.span, help))
    return found


def refilled_batch(graph: Graph, library: Library) -> list[Diagnostic]:
    """`per = batch` before a refill: its batch is not whole until the rows are there that the refill brings."""
    found = []
    for node in graph.nodes:
        if "refill" not in node.attributes:
            continue
        for before in sorted(nx.ancestors(graph.flow, node.name)):
            if graph.node(before).per == "batch":
                message = f"`{before}` has `per = batch`, and `{node.name}` after it brings more rows of the same batch"
                help = f"let `{node.name}` come before `{before}`, or leave `refill` out"
                span = node.attributes["refill"].span
                found.append(Diagnostic("bad-scope", message, span if span.line else node.span, help))
    return found
