"""Guesses of the intended writer of a column that has no writer or two writers.

Invariant: a function returns a single node only if nothing suggests that another node was meant. If several nodes are
possible, the function returns none of these nodes or all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..ir.attributes import CallAttributes
from ..ir.graph import Graph, Node


def is_named_after(graph: Graph, node: Node, column: str) -> bool:
    """Return whether a column seems to be named after a node.

    The column is named after the node if a word of one name begins with a word of the other name. Words of one or two
    letters do not count. If the node's worker is frozen, `reference` is added to the node's words, so that a column
    `ref_logp` matches. If the worker has weights and is not frozen, `old` is added to the node's words.
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
    """Return the writers of `column` that were probably meant to write `other`.

    `writers` are the nodes that write `column`. A writer that reads `other` is left out. If the names of the columns
    and nodes suggest exactly one of the remaining writers, the result is this writer. If not, the result is all
    remaining writers.
    """
    # A writer that reads `other` comes after the writer of `other`.
    able = [writer for writer in writers if other not in writer.reads]
    if len(able) < 2:
        return able
    rest = [writer for writer in able if not is_named_after(graph, writer, column)]
    fits = [writer for writer in able if is_named_after(graph, writer, other)]
    votes = {node.name: node for candidates in (rest, fits) if len(candidates) == 1 for node in candidates}
    return list(votes.values()) if len(votes) == 1 else able


def find_idle_writer(graph: Graph, column: str) -> Node | None:
    """Return the function node that was probably meant to write a column, or None.

    The candidates are the nodes that call a function, write nothing and do not read the column. Candidates whose names
    share a word with the column's name are kept, and all other candidates are left out. If no candidate's name shares a
    word with the column's name, the candidates with an edge to a reader of the column are kept. The result is None
    unless exactly one candidate is kept.
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
    """Return the words in the name of a node, in its worker's name and in its verb."""
    return {*re.split(r"[._]", node.name), *node.worker.split("_"), *node.verb.split("_")}
