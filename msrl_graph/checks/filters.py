"""Checks of filters, which drop rows, and of the groups that remain after filters.

Invariant: a function that needs whole groups never gets a group from which an earlier node dropped single rows. A
filter may shorten a group only if one call of the filter gets the whole group (`per`). A node that drops single rows
breaks the groups for all nodes after that node.
"""

from __future__ import annotations

from itertools import pairwise

from ..analysis.rowsets import rowsets
from ..diagnostics import Diagnostic
from ..ir.attributes import CallAttributes, GenerateAttributes
from ..ir.graph import Graph
from .columns import Library
from .scope import known_calls


def broken_groups(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report functions that need whole groups, but come after a node that drops rows.

    The node drops single rows of a group because it is a filter, or because it drops the rows for which its call fails
    (`on_failure`).
    """
    diagnostics = []
    for node in graph.nodes:
        fails = node.fails
        if node.cuts:  # rows leave with their whole group
            continue
        if not node.filters or node.per != "row" or not (level := graph.row_level(node)):
            continue
        if GenerateAttributes.of(node).on_failure == "drop_group":
            continue
        if any(signature.scope != "row" for _, signature in known_calls(node, library)):
            continue  # the node must filter whole groups itself; `bad_scope` reports that
        above = next((column.name for column in graph.columns if column.level == graph.under[level]), "")
        for after in (graph.node(name) for name in sorted(graph.flow.after(node.name))):
            for call, signature in known_calls(after, library):
                # If all rows of a group are below one row that is dropped, the whole group is dropped.
                split = graph.common(level, graph.unit_level(after)) != level
                if signature.scope == "group" and after.per not in ("row", "batch") and split:
                    message = (
                        f"`{signature.name}` of `{after.name}` needs whole groups, and `{node.name}` before it "
                        f"drops single rows{' that fail' if fails else ''}"
                    )
                    help = f"filter whole groups, `per = {above}`, or filter after `{after.name}`"
                    if fails and node.verb == "generate":
                        help = "drop the whole group if one of its rows fails: `on_failure = drop_group`"
                    elif fails:
                        help = f"let one call get the whole group, so that a failure drops all of it: `per = {above}`"
                    span = call.span if call.span.line else after.span
                    drop_span = node.span_of("on_failure") if fails else node.span
                    diagnostics.append(
                        Diagnostic("bad-scope", message, span, help, related=((drop_span, "rows are dropped here"),))
                    )
    return diagnostics


def compared_columns(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report each `keep` whose compared column does not hold one number per row."""
    diagnostics = []
    columns = {column.name: column for column in graph.columns}
    for node in graph.nodes:
        keep = CallAttributes.of(node).keep
        column = columns.get(str(keep.args[0].value)) if keep is not None and keep.kind != "call" else None
        if keep is not None and column is not None and (column.dims or column.element in ("text", "json")):
            content = "text" if column.element in ("text", "json") else "several numbers"
            message = f"`keep` of `{node.name}` compares one number per row, but `{column.name}` is {content}"
            help = f"compute the number first: `node host.NAME({column.name}) -> NUMBER {{ call = … }}`"
            span = keep.args[0].span
            diagnostics.append(Diagnostic("bad-value", message, span if span.line else node.span, help))
    return diagnostics


def disjoint_filters(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report nodes that need rows from `select` filters on parallel branches.

    The rows after a `select` are a separate row set, since a `select` may repeat rows. A node is reported if it needs
    two row sets, and neither row set was made from the other.
    """
    if not any(CallAttributes.of(node).select is not None for node in graph.nodes):
        return []
    diagnostics = []
    rows = rowsets(graph)
    for name, sets in rows.disjoint.items():
        if any(edge.src in rows.disjoint for edge in graph.into(name)):
            continue  # follows from a mistake that is reported at an earlier node
        selects = [selection.node for selection in rows.passed[name] if selection.remaining in sets]
        for other in selects[1:] or selects:
            one = selects[0]
            position = f"comes after `{one}` and `{other}`" if one != other else f"comes after `{one}`"
            message = (
                f"`{name}` {position}, and no row {'passes both' if one != other else 'that it reads has passed it'}"
            )
            help = (
                f"let them follow each other: `{one} -> {other}`"
                if one != other
                else f"let what `{name}` reads come after `{one}` too"
            )
            diagnostics.append(
                Diagnostic(
                    "no-common-row",
                    message,
                    graph.node(name).span,
                    help,
                    related=((graph.node(one).span, "repeats rows"),),
                )
            )
    return diagnostics


def unfiltered_updates(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report updates that train on rows which a filter on another branch may drop.

    A dropped row leaves the iteration for all nodes. So a path of sample edges must lead from the filter to the update.
    """
    diagnostics = []
    for filter in (node for node in graph.nodes if node.filters):
        after = graph.flow.after(filter.name)
        for update in graph.verb("update"):
            one = graph.row_level(filter)
            other = graph.level(update)
            if update.name not in after and graph.common(one, other) in (one, other):
                message = (
                    f"`{update.name}` trains on rows that `{filter.name}` drops: no path of sample edges joins the two"
                )
                help = f"add the edge `{filter.name} -> {update.name}`"
                diagnostics.append(
                    Diagnostic(
                        "bad-scope", message, update.span, help, related=((filter.span, "rows are dropped here"),)
                    )
                )
    return diagnostics


def refilled_twice(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report each filter with `refill` that comes after another filter with `refill`.

    With two filters of this kind, each filter would wait for the prompts that the other filter requests.
    """
    refills = [node for node in graph.nodes if CallAttributes.of(node).refill]
    diagnostics = []
    for first, node in pairwise(refills):
        message = f"`{node.name}` and `{first.name}` both refill, but an iteration has one number of groups to reach"
        help = f"leave out `refill` of `{first.name}`: the last filter counts the groups that remain"
        diagnostics.append(Diagnostic("bad-scope", message, node.span_of("refill"), help))
    return diagnostics


def adaptive_refills(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report filters with `adaptive` that do not keep or drop whole prompts.

    `adaptive` needs the fraction of prompts that pass the filter. This fraction is known only if the filter makes one
    decision per prompt.
    """
    diagnostics = []
    for node in (
        candidate
        for candidate in graph.nodes
        if CallAttributes.of(candidate).adaptive and CallAttributes.of(candidate).refill
    ):
        if node.per in ("row", "batch") or graph.column(node.per).level != 0:
            message = f"`{node.name}` is `adaptive` but does not filter whole prompts, so no share of prompts passes"
            first = next(iter(graph.node("source").writes), "prompt")
            help = f"add `per = {first}`, or leave `adaptive` out"
            diagnostics.append(Diagnostic("bad-scope", message, node.span_of("adaptive"), help))
    return diagnostics


def refilled_batch(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report nodes with `per = batch` that come before a filter with `refill`.

    The batch of such a node is complete only when the filter requests no more prompts.
    """
    diagnostics = []
    for node in graph.nodes:
        if not CallAttributes.of(node).refill:
            continue
        for before in sorted(graph.flow.before(node.name)):
            if graph.node(before).per == "batch":
                message = f"`{before}` has `per = batch`, but `{node.name}` after it adds rows to the same batch"
                help = f"let `{node.name}` come before `{before}`, or leave `refill` out"
                diagnostics.append(Diagnostic("bad-scope", message, node.span_of("refill"), help))
    return diagnostics
