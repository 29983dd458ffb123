"""Columns: who writes them, who reads them, and whether a path of sample edges joins the two.

Invariant: of mistakes that follow from one another the first alone is told: nothing is said of a path from a column
with two writers, nor to a node that nothing reaches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..diagnostics import Diagnostic, Span
from ..ir.graph import ELEMENTS, Graph, Node
from ..ir.likely_writers import choose_writer, without_arrow
from ..ir.plan import reported as is_metric
from ..ir.sequences import of_response
from ..ir.signatures import CallKind, Signature

Library = Mapping[tuple[CallKind, str], tuple[Signature, str]]


def never_written(graph: Graph, library: Library) -> list[Diagnostic]:
    """Columns that are read and that nobody writes, each told once, at its first reader."""
    found: dict[str, Diagnostic] = {}
    instead = {empty for _, empty in _swapped(graph).values()}
    for node in graph.nodes:
        for column in node.reads:
            if column not in graph.writers and column not in found and column not in instead:
                kind = graph.column(column)
                data = (
                    kind.element in ("text", "json")
                    or kind.element not in ELEMENTS
                    or (kind.element == "i32" and kind.dims)
                )
                help = (
                    f"write it in a node, or let the source give it: `source(…) -> …, {column}`"
                    if data
                    else "add a node that writes it"
                )
                message = f"`{node.name}` reads `{column}`, which nobody writes"
                related: tuple[tuple[Span, str], ...] = ()
                if (idle := without_arrow(graph, column)) is not None:
                    help = f"add `-> {column}` to `{idle.name}`, which has a `call` and writes nothing"
                    related = ((idle.span, f"`{idle.name}` writes nothing"),)
                found[column] = Diagnostic("never-written", message, node.span, help, related=related)
    return list(found.values())


def two_writers(graph: Graph, library: Library) -> list[Diagnostic]:
    found = []
    swapped = _swapped(graph)
    for column, writers in graph.writers.items():
        for other in writers[1:]:
            message = f"`{other.name}` writes `{column}`, which `{writers[0].name}` writes too"
            help = f"let one of them write another column, as in `raw_{column}`"
            if column in swapped:
                names, empty = swapped[column]
                who = " or ".join(f"`{name}`" for name in names)
                help = f"let {who} write `{empty}`, which is read and nobody writes"
            found.append(
                Diagnostic(
                    "two-writers",
                    message,
                    other.span,
                    help,
                    related=((writers[0].span, f"`{column}` is written here"),),
                )
            )
    return found


def _swapped(graph: Graph) -> dict[str, tuple[list[str], str]]:
    """Of a column with two writers, the one (both, where either may be) that is likely meant to write another of the
    same type, which is read and nobody writes."""
    found: dict[str, tuple[list[str], str]] = {}
    doubled = {c: w for c, w in graph.writers.items() if len(w) == 2}
    read = {c for n in graph.nodes for c in n.reads} if doubled else ()
    empty = [c for c in graph.columns if c.name in read and c.name not in graph.writers]
    for name, writers in doubled.items():
        column = graph.column(name)
        same = [c.name for c in empty if (c.element, c.dims) == (column.element, column.dims)]
        if len(same) == 1 and (meant := choose_writer(graph, writers, name, same[0])):
            found[name] = [w.name for w in meant], same[0]
    return found


def unreachable(graph: Graph, library: Library) -> list[Diagnostic]:
    """Nodes that no path from the source reaches, without those that only come after another such node; and a source
    with no node."""
    reached = _reached(graph)
    found = []
    if not [n for n in graph.nodes if n.verb != "source"]:
        message = f"`{graph.name}` has a source and no node, so nothing is computed"
        help = "add a node that reads what the source gives, and the edge `source -> NODE`"
        found.append(Diagnostic("unreachable", message, graph.span, help))
    for node in graph.nodes:
        if node.name in reached or any(e.src not in reached for e in graph.into(node.name)):
            continue
        writers = _nearest_writers(graph, node)
        help = f"add `{', '.join(writers)} -> {node.name}`" if writers else ""
        found.append(
            Diagnostic(
                "unreachable", f"no path of sample edges leads from the source to `{node.name}`", node.span, help
            )
        )
    return found


def no_path(graph: Graph, library: Library) -> list[Diagnostic]:
    """Reads of a column whose rows would never arrive."""
    reached = _reached(graph)
    found = []
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
                help = f"`{writer}` comes after `{node.name}`, so its columns cannot be there yet"
            found.append(Diagnostic("no-path", message, node.span, help))
    return found


def unused(graph: Graph, library: Library, reported: Collection[str] = ()) -> list[Diagnostic]:
    """Report columns that nothing reads: no node, no evaluation, and not a replay, which needs versions of tokens."""
    read = {c for n in graph.nodes for c in n.reads} | {d.like for c in graph.columns for d in c.dims} | set(reported)
    read |= {of_response(graph, n, "i32") for n in graph.verb("generate")}
    read |= {c for n in graph.verb("source") for c in n.weighs}
    writers = graph.writers
    found = []
    for column in graph.columns:
        if column.name not in read:
            what = (
                f"`{column.name}` is written by `{writers[column.name][0].name}`, and nobody reads it"
                if column.name in writers
                else ""
            )
            message = what or f"nobody writes or reads `{column.name}`"
            told = what and is_metric(graph, column.name)
            help = (
                "remove it, unless it is there for its mean in the metrics: `evaluate` reports it too"
                if told
                else "remove it"
            )
            found.append(Diagnostic("unused-column", message, column.span, help, "warning"))
    return found


def _reached(graph: Graph) -> set[str]:
    reached = dict.fromkeys(n.name for n in graph.verb("source"))
    left = list(reached)
    while left:
        after = [e.dst for e in graph.out_of(left.pop()) if e.dst not in reached]
        reached |= dict.fromkeys(after)
        left += after
    return set(reached)


def _nearest_writers(graph: Graph, node: Node) -> list[str]:
    """The writers of what a node reads, without those that another of them comes after."""
    writers = sorted({w.name for c in node.reads for w in graph.writers.get(c, [])[:1]} - {node.name})
    return [w for w in writers if not any(o != w and graph.flow.leads(w, o) for o in writers)]
