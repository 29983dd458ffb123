"""Guesses of the node that was meant to write a column with no writer or with two.

Invariant: a single node is returned only if nothing speaks for another. Otherwise the result is no node, or all
possible ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .attributes import CallAttributes
from .graph import Graph, Node


def is_named_after(graph: Graph, node: Node, column: str) -> bool:
    """Return whether a column seems to be named after a node.

    That is: a word of one name begins with a word of the other. Columns of a frozen worker are often called `ref_…`,
    and those of the trained one `old_…`.
    """
    words = _words(node)
    worker = next((candidate for candidate in graph.workers if candidate.name == node.worker), None)
    if worker is not None and worker.kind != "function":
        words.add("reference" if worker.frozen else "old")
    parts = column.split("_")
    return any(
        min(len(part), len(word)) > 2 and (word.startswith(part) or part.startswith(word))
        for part in parts
        for word in words
    )


def choose_writer(graph: Graph, writers: Iterable[Node], column: str, other: str) -> list[Node]:
    """Choose the writers of `column` that may be meant to write `other`.

    It is one of the two, or both if nothing tells them apart.
    """
    # A writer that reads the other column comes after it.
    able = [writer for writer in writers if other not in writer.reads]
    if len(able) < 2:
        return able
    rest = [writer for writer in able if not is_named_after(graph, writer, column)]
    fits = [writer for writer in able if is_named_after(graph, writer, other)]
    votes = {node.name: node for candidates in (rest, fits) if len(candidates) == 1 for node in candidates}
    return list(votes.values()) if len(votes) == 1 else able


def find_idle_writer(graph: Graph, column: str) -> Node | None:
    """Find the function node without outputs that should likely write a column.

    It calls a function and writes nothing. It is named after the column, or its rows go to a node that reads it.
    """
    idle = [
        node
        for node in graph.nodes
        if CallAttributes.of(node).call is not None and not node.writes and not node.sets and column not in node.reads
    ]
    named = [node for node in idle if _words(node) & {*column.split("_")}]
    readers = {node.name for node in graph.nodes if column in node.reads}
    candidates = named or [node for node in idle if any(edge.dst in readers for edge in graph.out_of(node.name))]
    return candidates[0] if len(candidates) == 1 else None


def _words(node: Node) -> set[str]:
    """Return the words of a node's label, worker and verb."""
    return {*re.split(r"[._]", node.name), *node.worker.split("_"), *node.verb.split("_")}
