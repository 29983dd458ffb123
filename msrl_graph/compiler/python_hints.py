"""Additional help for programs built in Python.

In a notebook, a corrected statement may not replace the wrong statement. Invariant: messages are only extended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..diagnostics import Diagnostic, Span
from ..dsl import ast
from ..dsl.derive import node_name


def add_undo_help(diagnostic: Diagnostic, tree: ast.File) -> Diagnostic:
    """Add to a message how to undo an attribute that a statement added to a node.

    Statements that change a node add up. In a notebook, the wrong attribute remains when the user executes the
    corrected cell.
    """
    name = dict(_list_changes(tree)).get(diagnostic.span)
    if diagnostic.code != "unknown-attribute" or name is None:
        return diagnostic
    undo = f'in a notebook, undo it, too, since changes add up: `drop("{name}")`'
    return replace(diagnostic, help="\n".join(filter(None, (diagnostic.help, undo))))


def _list_changes(tree: ast.File) -> Iterator[tuple[Span, str]]:
    """Yield the span and name of each attribute in the statements that change a node."""
    for item in tree.items:
        for statement in item.body if isinstance(item, ast.AlgorithmDecl) else ():
            if isinstance(statement, ast.NodeDecl) and statement.reads is None:
                yield from (
                    (attribute.key.span, f"{node_name(statement)}.{attribute.key.text}")
                    for attribute in statement.attrs
                )
