"""Filters: rows that leave the iteration, and what still holds of those that stay.

Invariant: a group is whole or was made smaller as a whole (`per` kept it together); single rows that leave break the
groups after them.
"""

from __future__ import annotations

from itertools import pairwise

from ..diagnostics import Diagnostic
from ..ir.attributes import CallAttributes, GenerateAttributes
from ..ir.graph import Graph
from ..ir.rowsets import rowsets
from .columns import Library
from .scope import calls


def broken_groups(graph: Graph, library: Library) -> list[Diagnostic]:
    """Statistics over groups of which a filter, or a failure, before them may have taken single rows."""
    found = []
    for node in graph.nodes:
        fails = node.fails
        if node.cuts:  # which leave with their whole group
            continue
        if not node.filters or node.per != "row" or not (level := graph.row_level(node)):
            continue
        if GenerateAttributes.of(node).on_failure == "drop_group":
            continue
        if any(s.scope != "row" for _, s in calls(node, library)):
            continue  # it must filter whole groups itself, which is told of it
        above = next((c.name for c in graph.columns if c.level == graph.under[level]), "")
        for after in (graph.node(n) for n in sorted(graph.flow.after(node.name))):
            for call, signature in calls(after, library):
                # Where each group is of one of the rows that leave, or of one under it, it leaves as a whole.
                split = graph.common(level, graph.unit_level(after)) != level
                if signature.scope == "group" and after.per not in ("row", "batch") and split:
                    message = (
                        f"`{signature.name}` of `{after.name}` needs whole groups, and `{node.name}` before it "
                        f"drops single rows{' that fail' if fails else ''}"
                    )
                    help = f"filter whole groups, `per = {above}`, or filter after `{after.name}`"
                    if fails and node.verb == "generate":
                        help = "let the whole group go with a row that fails: `on_failure = drop_group`"
                    elif fails:
                        help = f"let one call see the whole group, which goes as one where it fails: `per = {above}`"
                    span = call.span if call.span.line else after.span
                    at = node.at("on_failure") if fails else node.span
                    found.append(Diagnostic("bad-scope", message, span, help, related=((at, "rows are dropped here"),)))
    return found


def compared(graph: Graph, library: Library) -> list[Diagnostic]:
    """Comparisons of what is no number of the row."""
    found = []
    columns = {c.name: c for c in graph.columns}
    for node in graph.nodes:
        keep = CallAttributes.of(node).keep
        column = columns.get(str(keep.args[0].value)) if keep is not None and keep.kind != "call" else None
        if keep is not None and column is not None and (column.dims or column.element in ("text", "json")):
            what = "text" if column.element in ("text", "json") else "several numbers"
            message = f"`keep` of `{node.name}` compares one number of each row, and `{column.name}` is {what}"
            help = f"compute the number first: `node host.NAME({column.name}) -> NUMBER {{ call = … }}`"
            span = keep.args[0].span
            found.append(Diagnostic("bad-value", message, span if span.line else node.span, help))
    return found


def rows_apart(graph: Graph, library: Library) -> list[Diagnostic]:
    """Nodes after two filters that may repeat rows, neither of which chooses from what the other left: no row has
    passed both."""
    if not any(CallAttributes.of(n).select is not None for n in graph.nodes):
        return []
    found = []
    rows = rowsets(graph)
    for name, sets in rows.apart.items():
        if any(e.src in rows.apart for e in graph.into(name)):
            continue  # what follows from another's
        selects = [s.node for s in rows.passed[name] if s.left in sets]
        for other in selects[1:] or selects:
            one = selects[0]
            what = f"comes after `{one}` and `{other}`" if one != other else f"comes after `{one}`"
            message = f"`{name}` {what}, and no row has passed {'both' if one != other else 'it and what it reads'}"
            help = (
                f"let them follow each other: `{one} -> {other}`"
                if one != other
                else f"let what `{name}` reads come after `{one}` too"
            )
            found.append(
                Diagnostic(
                    "no-common-row",
                    message,
                    graph.node(name).span,
                    help,
                    related=((graph.node(one).span, "repeats rows"),),
                )
            )
    return found


def unfiltered(graph: Graph, library: Library) -> list[Diagnostic]:
    """Updates that train on rows which a filter beside them drops: such a row leaves the iteration everywhere."""
    found = []
    for filter in (n for n in graph.nodes if n.filters):
        after = graph.flow.after(filter.name)
        for update in graph.verb("update"):
            one = graph.row_level(filter)
            other = graph.level(update)
            if update.name not in after and graph.common(one, other) in (one, other):
                message = (
                    f"`{update.name}` trains on rows that `{filter.name}` drops: no path of sample edges leads from it"
                )
                help = f"add the edge `{filter.name} -> {update.name}`"
                found.append(
                    Diagnostic(
                        "bad-scope", message, update.span, help, related=((filter.span, "rows are dropped here"),)
                    )
                )
    return found


def refilled_twice(graph: Graph, library: Library) -> list[Diagnostic]:
    """Two refills: each would wait for the prompts that the other asks for."""
    refills = [n for n in graph.nodes if CallAttributes.of(n).refill]
    found = []
    for first, node in pairwise(refills):
        message = f"`{node.name}` refills, and `{first.name}` does too: there is one number of groups to reach"
        help = f"leave the `refill` of `{first.name}` out: the last filter counts what is left"
        found.append(Diagnostic("bad-scope", message, node.at("refill"), help))
    return found


def adaptive(graph: Graph, library: Library) -> list[Diagnostic]:
    """A share of prompts that pass is known where each prompt has one verdict."""
    found = []
    for node in (n for n in graph.nodes if CallAttributes.of(n).adaptive and CallAttributes.of(n).refill):
        if node.per in ("row", "batch") or graph.column(node.per).level != 0:
            message = f"`{node.name}` is `adaptive`, and does not choose whole prompts: no share of them passes"
            first = next(iter(graph.node("source").writes), "prompt")
            help = f"add `per = {first}`, or leave `adaptive` out"
            found.append(Diagnostic("bad-scope", message, node.at("adaptive"), help))
    return found


def refilled_batch(graph: Graph, library: Library) -> list[Diagnostic]:
    """`per = batch` before a refill: its batch is not whole until the rows are there that the refill brings."""
    found = []
    for node in graph.nodes:
        if not CallAttributes.of(node).refill:
            continue
        for before in sorted(graph.flow.before(node.name)):
            if graph.node(before).per == "batch":
                message = f"`{before}` has `per = batch`, and `{node.name}` after it brings more rows of the same batch"
                help = f"let `{node.name}` come before `{before}`, or leave `refill` out"
                found.append(Diagnostic("bad-scope", message, node.at("refill"), help))
    return found
