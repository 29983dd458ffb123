"""What helps add for a program that was built in Python, where a corrected statement may not replace the wrong one.

Invariant: a message is only added to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..diagnostics import Diagnostic, Span
from ..dsl import ast
from ..dsl.derive import node_name


def correctable(told: Diagnostic, tree: ast.File) -> Diagnostic:
    """A message, and of an attribute that a change of a node adds, how to take it back: changes add up, so that in a
    notebook the corrected cell alone leaves it there."""
    name = dict(_changed(tree)).get(told.span)
    if told.code != "unknown-attribute" or name is None:
        return told
    undo = f'in a notebook take it back, too, since changes add up: `drop("{name}")`'
    return replace(told, help="\n".join(filter(None, (told.help, undo))))


def _changed(tree: ast.File) -> Iterator[tuple[Span, str]]:
    """The attributes of changes of nodes: where each stands, and its name."""
    for item in tree.items:
        for statement in item.body if isinstance(item, ast.AlgorithmDecl) else ():
            if isinstance(statement, ast.NodeDecl) and statement.reads is None:
                yield from ((a.key.span, f"{node_name(statement)}.{a.key.text}") for a in statement.attrs)
