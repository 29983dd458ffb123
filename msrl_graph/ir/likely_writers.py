"""Which node is likely meant to write a column: what helps say of columns with no writer, or with two.

Invariant: one node is named only where nothing speaks for another; else there is none, or all that may be meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .attributes import CallAttributes
from .graph import Graph, Node


def is_named_after(graph: Graph, node: Node, column: str) -> bool:
    """Whether a word of a column's name begins a word of the node's name, or the other way round.

    What a frozen worker writes is often called `ref_…`, and what the trained one does `old_…`.
    """
    words = _words(node)
    worker = next((w for w in graph.workers if w.name == node.worker), None)
    if worker is not None and worker.kind != "function":
        words.add("reference" if worker.frozen else "old")
    parts = column.split("_")
    return any(
        min(len(part), len(word)) > 2 and (word.startswith(part) or part.startswith(word))
        for part in parts
        for word in words
    )


def choose_writer(graph: Graph, writers: Iterable[Node], column: str, other: str) -> list[Node]:
    """Of two writers of `column`, the one that is meant to write `other`; both where nothing tells them apart."""
    # The one that reads the other column comes after it.
    able = [w for w in writers if other not in w.reads]
    if len(able) < 2:
        return able
    rest = [w for w in able if not is_named_after(graph, w, column)]
    fits = [w for w in able if is_named_after(graph, w, other)]
    votes = {n.name: n for some in (rest, fits) if len(some) == 1 for n in some}
    return list(votes.values()) if len(votes) == 1 else able


def without_arrow(graph: Graph, column: str) -> Node | None:
    """The function node that computes something and writes nothing, and is likely meant to write this column: it is
    named after it, or hands its rows to a node that reads it."""
    idle = [
        n
        for n in graph.nodes
        if CallAttributes.of(n).call is not None and not n.writes and not n.sets and column not in n.reads
    ]
    named = [n for n in idle if _words(n) & {*column.split("_")}]
    readers = {n.name for n in graph.nodes if column in n.reads}
    some = named or [n for n in idle if any(e.dst in readers for e in graph.out_of(n.name))]
    return some[0] if len(some) == 1 else None


def _words(node: Node) -> set[str]:
    """The words of a node's label, worker and verb."""
    return {*re.split(r"[._]", node.name), *node.worker.split("_"), *node.verb.split("_")}
