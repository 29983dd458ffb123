"""Checks of columns: their writers, their readers, and the paths between them.

Invariant: a mistake that is only a consequence of another mistake is not reported. So the path from a writer to a
reader is not checked if the column has two writers, or if no path leads from the program's `source` to the reader.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..analysis.likely_writers import choose_writer, find_idle_writer
from ..analysis.sequences import find_response_column
from ..diagnostics import Diagnostic, Span
from ..ir.graph import ELEMENTS, Graph, Node
from ..ir.plan import is_reported as is_metric
from ..ir.signatures import CallKind, Signature

Library = Mapping[tuple[CallKind, str], tuple[Signature, str]]


def never_written(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report columns that are read but never written, each at its first reader."""
    diagnostics: dict[str, Diagnostic] = {}
    instead = {empty for _, empty in _guess_swapped_columns(graph).values()}
    for node in graph.nodes:
        for column in node.reads:
            if column not in graph.writers and column not in diagnostics and column not in instead:
                kind = graph.column(column)
                data = (
                    kind.element in ("text", "json")
                    or kind.element not in ELEMENTS
                    or (kind.element == "i32" and kind.dims)
                )
                help = (
                    f"write it in a node, or add it to the source: `source(…) -> …, {column}`"
                    if data
                    else "add a node that writes it"
                )
                message = f"`{node.name}` reads `{column}`, which is never written"
                related: tuple[tuple[Span, str], ...] = ()
                if (idle := find_idle_writer(graph, column)) is not None:
                    help = f"add `-> {column}` to `{idle.name}`, which has a `call` and writes nothing"
                    related = ((idle.span, f"`{idle.name}` writes nothing"),)
                diagnostics[column] = Diagnostic("never-written", message, node.span, help, related=related)
    return list(diagnostics.values())


def two_writers(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report columns with several writers, at each writer except the first.

    The first writer is the first in the program's text.
    """
    diagnostics = []
    swapped = _guess_swapped_columns(graph)
    for column, writers in graph.writers.items():
        for other in writers[1:]:
            message = f"`{other.name}` writes `{column}`, which `{writers[0].name}` writes too"
            help = f"let one of them write another column, as in `raw_{column}`"
            if column in swapped:
                names, empty = swapped[column]
                who = " or ".join(f"`{name}`" for name in names)
                help = f"let {who} write `{empty}`, which is read but never written"
            diagnostics.append(
                Diagnostic(
                    "two-writers",
                    message,
                    other.span,
                    help,
                    related=((writers[0].span, f"`{column}` is written here"),),
                )
            )
    return diagnostics


def _guess_swapped_columns(graph: Graph) -> dict[str, tuple[list[str], str]]:
    """Guess, for columns with two writers, which writer should write another column.

    The keys of the result are the columns with two writers. Each value has two items:

    - the names of the writers that were probably meant to write another column: one name, or both if both are possible,
    - the name of this other column. It has the same type, and is read but never written.
    """
    guesses: dict[str, tuple[list[str], str]] = {}
    doubled = {name: writers for name, writers in graph.writers.items() if len(writers) == 2}
    read = {column for node in graph.nodes for column in node.reads} if doubled else ()
    empty = [column for column in graph.columns if column.name in read and column.name not in graph.writers]
    for name, writers in doubled.items():
        column = graph.column(name)
        same = [
            candidate.name
            for candidate in empty
            if (candidate.element, candidate.dims) == (column.element, column.dims)
        ]
        if len(same) == 1 and (meant := choose_writer(graph, writers, name, same[0])):
            guesses[name] = [writer.name for writer in meant], same[0]
    return guesses


def unreachable(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report nodes that no path from the source reaches, and a source without readers.

    If an unreachable node has an edge from another unreachable node, only the other node is reported.
    """
    reached = _list_reachable(graph)
    diagnostics = []
    if not [node for node in graph.nodes if node.verb != "source"]:
        message = f"`{graph.name}` has a source and no node, so nothing is computed"
        help = "add a node that reads what the source gives, and the edge `source -> NODE`"
        diagnostics.append(Diagnostic("unreachable", message, graph.span, help))
    for node in graph.nodes:
        if node.name in reached or any(edge.src not in reached for edge in graph.into(node.name)):
            continue
        writers = _nearest_writers(graph, node)
        help = f"add `{', '.join(writers)} -> {node.name}`" if writers else ""
        diagnostics.append(
            Diagnostic(
                "unreachable", f"no path of sample edges leads from the source to `{node.name}`", node.span, help
            )
        )
    return diagnostics


def no_path(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report nodes that read a column whose writer has no path to the node."""
    reached = _list_reachable(graph)
    diagnostics = []
    for node in graph.nodes:
        if node.name not in reached:
            continue
        for column in node.reads:
            writers = graph.writers.get(column, [])
            if len(writers) != 1 or graph.flow.arrives(column, node.name):
                continue
            writer = writers[0].name
            message = f"`{node.name}` reads `{column}`, but no path leads there from its writer `{writer}`"
            help = f"add `{writer} -> {node.name}`"
            if writer == node.name:
                message = f"`{node.name}` reads `{column}`, which it writes itself"
                help = "write another column"
            elif graph.flow.leads(node.name, writer):
                help = f"`{writer}` comes after `{node.name}`, so its columns do not exist yet"
            diagnostics.append(Diagnostic("no-path", message, node.span, help))
    return diagnostics


def unused(graph: Graph, evaluated: Collection[str]) -> list[Diagnostic]:
    """Warn of columns that nothing reads.

    - A column is read if a node, an evaluation (`evaluated`) or the sampling weights of the source read the column.
    - A column counts as read if the type of another column names this column as its length.
    - A column counts as read if it holds, for each token, the version of the weights that drew the token. A replay of a
      run needs this column.
    """
    read = (
        {column for node in graph.nodes for column in node.reads}
        | {dim.like for column in graph.columns for dim in column.dims}
        | set(evaluated)
    )
    read |= {find_response_column(graph, node, "i32") for node in graph.verb("generate")}
    read |= {column for node in graph.verb("source") for column in node.weight_columns}
    writers = graph.writers
    diagnostics = []
    for column in graph.columns:
        if column.name not in read:
            unread_message = (
                f"`{column.name}` is written by `{writers[column.name][0].name}` but never read"
                if column.name in writers
                else ""
            )
            message = unread_message or f"`{column.name}` is never written or read"
            in_metrics = unread_message and is_metric(graph, column.name)
            help = (
                "remove it, unless you want its mean in the metrics; `evaluate` can report it too"
                if in_metrics
                else "remove it"
            )
            diagnostics.append(Diagnostic("unused-column", message, column.span, help, "warning"))
    return diagnostics


def _list_reachable(graph: Graph) -> set[str]:
    reached = dict.fromkeys(node.name for node in graph.verb("source"))
    pending = list(reached)
    while pending:
        after = [edge.dst for edge in graph.out_of(pending.pop()) if edge.dst not in reached]
        reached |= dict.fromkeys(after)
        pending += after
    return set(reached)


def _nearest_writers(graph: Graph, node: Node) -> list[str]:
    """Return the nearest writers of the columns that a node reads.

    A writer is not among the nearest if a path of sample edges leads from this writer to another writer of these
    columns.
    """
    writers = sorted(
        {writer.name for column in node.reads for writer in graph.writers.get(column, [])[:1]} - {node.name}
    )
    return [
        writer
        for writer in writers
        if not any(other != writer and graph.flow.leads(writer, other) for other in writers)
    ]
