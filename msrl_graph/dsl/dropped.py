"""Notes about names that a derived algorithm drops, added to diagnostics.

Invariant: only notes and help are added to a diagnostic. The diagnostic's message and span do not change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..diagnostics import Diagnostic, Span


@dataclass(frozen=True)
class Dropped:
    """The position of a `drop` statement, and what the statement drops.

    - `span`: the span of the name in the `drop` statement.
    - `writer`: the dropped node that wrote a column, if the column itself is still declared.
    - `attribute`: the node and the key of a dropped attribute.
    """

    span: Span
    writer: str = ""
    attribute: tuple[str, str] | None = None

    def is_missed(self, name: str, diagnostic: Diagnostic) -> bool:
        """Return whether a diagnostic is probably caused by this drop of `name`."""
        if diagnostic.span == self.span:
            return False
        if self.attribute is not None:
            node, key = self.attribute
            words = f"{diagnostic.message} {diagnostic.help}"
            return f"`{node}`" in diagnostic.message and re.search(rf"`[^`]*\b{key}\b[^`]*`", words) is not None
        return f"`{name}`" in diagnostic.message and (not self.writer or diagnostic.code == "never-written")


def add_drop_notes(diagnostic: Diagnostic, dropped: Mapping[str, Dropped]) -> Diagnostic:
    """Add a note to a diagnostic for each dropped name that may have caused it."""
    for name, gone in dropped.items():
        if not gone.is_missed(name, diagnostic):
            continue
        note = f"`{name}` is dropped here"
        help = diagnostic.help
        if gone.writer:
            note = f"its writer `{gone.writer}` is dropped here"
            help = f"`drop {name}` too, or {diagnostic.help}"
        elif gone.attribute:
            help = f"leave `drop {name}` out, or {diagnostic.help}"
        elif f" needs `{name}`" in diagnostic.message:
            call = diagnostic.message.split("`")[1]
            help = f"leave `{call}(…)` out, or {diagnostic.help}"
        diagnostic = replace(diagnostic, help=help, related=(*diagnostic.related, (gone.span, note)))
    return diagnostic
