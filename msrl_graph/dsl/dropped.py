"""What an algorithm that extends another one drops of it, and what to add to a message of what is missed then.

Invariant: a message is only added to: what is wrong, and where, stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..diagnostics import Diagnostic, Span


@dataclass(frozen=True)
class Dropped:
    """Where a name is dropped, or of a column that stays, where its `writer`, a node, is."""

    span: Span
    writer: str = ""


def missed(told: Diagnostic, dropped: Mapping[str, Dropped]) -> Diagnostic:
    """What is told, with a note for each name in it that is dropped."""
    for name, gone in dropped.items():
        if told.span == gone.span or f"`{name}`" not in told.message or (gone.writer and told.code != "never-written"):
            continue
        what, help = f"`{name}` is dropped here", told.help
        if gone.writer:
            what, help = f"its writer `{gone.writer}` is dropped here", f"`drop {name}` too, or {told.help}"
        elif f" needs `{name}`" in told.message:
            call = told.message.split("`")[1]
            help = f"leave `{call}(…)` out, or {told.help}"
        told = replace(told, help=help, related=(*told.related, (gone.span, what)))
    return told
