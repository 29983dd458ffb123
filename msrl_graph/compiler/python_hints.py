"""Additional help for programs built in Python.

In a notebook, a wrong statement can remain in a program after the user has corrected the statement and executed the
cell again.

Invariant: help is only added to a diagnostic. The diagnostic's message and span do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..diagnostics import Diagnostic, Span
from ..dsl import ast
from ..dsl.derive import node_name


def add_undo_help(diagnostic: Diagnostic, tree: ast.File) -> Diagnostic:
    """Add help to a diagnostic: how to remove a wrong attribute from a node.

    If several statements change a node, all their attributes are kept. So in a notebook, a wrong attribute remains when
    the user corrects a cell and executes the cell again.
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
