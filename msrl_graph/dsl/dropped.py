"""What an algorithm that extends another one drops of it, and what to add to a message of what is missed then.

Invariant: a message is only added to: what is wrong, and where, stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..diagnostics import Diagnostic, Span


@dataclass(frozen=True)
class Dropped:
    """Where a name is dropped, or of a column that stays, where its `writer`, a node, is. Of an `attribute` also its
    node and its own name."""

    span: Span
    writer: str = ""
    attribute: tuple[str, str] | None = None

    def is_missed(self, name: str, told: Diagnostic) -> bool:
        """Whether a message is of what is dropped under this name."""
        if told.span == self.span:
            return False
        if self.attribute is not None:
            node, key = self.attribute
            words = f"{told.message} {told.help}"
            return f"`{node}`" in told.message and re.search(rf"`[^`]*\b{key}\b[^`]*`", words) is not None
        return f"`{name}`" in told.message and (not self.writer or told.code == "never-written")


def missed(told: Diagnostic, dropped: Mapping[str, Dropped]) -> Diagnostic:
    """What is told, with a note for each name in it that is dropped."""
    for name, gone in dropped.items():
        if not gone.is_missed(name, told):
            continue
        what = f"`{name}` is dropped here"
        help = told.help
        if gone.writer:
            what = f"its writer `{gone.writer}` is dropped here"
            help = f"`drop {name}` too, or {told.help}"
        elif gone.attribute:
            help = f"leave `drop {name}` out, or {told.help}"
        elif f" needs `{name}`" in told.message:
            call = told.message.split("`")[1]
            help = f"leave `{call}(…)` out, or {told.help}"
        told = replace(told, help=help, related=(*told.related, (gone.span, what)))
    return told
