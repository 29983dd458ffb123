"""The texts of programs, as files and callers have them.

Invariant: what is given is UTF-8 text whose lines end as the parser counts them.
"""

from __future__ import annotations

from pathlib import Path

from ..diagnostics import NOWHERE, Diagnostic, Fault, Span


def read(path: Path, name: str, span: Span = NOWHERE) -> str:
    """The text of a program's file, which messages call `name`. Raises Fault where it cannot be read, at `span` if
    another names it."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Fault(Diagnostic("missing-file", f"`{name}` cannot be read: {why.lower()}", span)) from None
    return decoded(data, name, span)


def decoded(data: bytes, name: str, span: Span = NOWHERE) -> str:
    """The text of a program's bytes. Raises Fault where they are not UTF-8."""
    try:
        return plain(data.decode(), name)
    except UnicodeDecodeError:
        raise _not_text(name, span) from None


def plain(text: str, name: str) -> str:
    """A text as the parser counts its lines, whatever an editor writes: without a byte order mark, each line ended by
    `\\n`."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
            raise _not_text(name) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _not_text(name: str, span: Span = NOWHERE) -> Fault:
    return Fault(Diagnostic("missing-file", f"`{name}` is not UTF-8 text", span))
