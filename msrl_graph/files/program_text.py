"""The texts of programs, from files and callers.

Invariant: the result is UTF-8 text with lines that end as the parser counts them.
"""

from __future__ import annotations

from pathlib import Path

from ..diagnostics import NOWHERE, Diagnostic, Fault, Span


def read(path: Path, name: str, span: Span = NOWHERE) -> str:
    """Read the text of a program's file; messages call it `name`.

    Raises Fault if the file cannot be read, at `span` if another file names it.
    """
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Fault(Diagnostic("missing-file", f"`{name}` cannot be read: {reason.lower()}", span)) from None
    return decode(data, name, span)


def decode(data: bytes, name: str, span: Span = NOWHERE) -> str:
    """Decode a program's bytes. Raises Fault if they are not UTF-8."""
    try:
        return normalize(data.decode(), name)
    except UnicodeDecodeError:
        raise _not_text(name, span) from None


def normalize(text: str, name: str) -> str:
    r"""Normalize a text: no byte order mark, and each line ends with `\n`."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
            raise _not_text(name) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _not_text(name: str, span: Span = NOWHERE) -> Fault:
    return Fault(Diagnostic("missing-file", f"`{name}` is not UTF-8 text", span))
