"""What the language can say and this version cannot compile, where it takes the whole graph to see it.

Invariant: each construct is named once, with what to use meanwhile; when one is built its check goes.
"""

from __future__ import annotations

from ..diagnostics import Diagnostic, Span
from ..graph import Graph
from .columns import Library


def not_yet(graph: Graph, library: Library) -> list[Diagnostic]:
    found: list[Diagnostic] = []

    def tell(message: str, span: Span, help: str) -> None:
        found.append(Diagnostic("not-yet", message, span, help))

    for node in graph.verb("generate"):
        if node.number("partial", 1) > 1 and graph.level(node):
            span = node.attributes["partial"].span
            tell(f"`partial` of `{node.name}`, which generates from responses, cannot be compiled yet", span, "leave `partial` out")
    return found
