"""The text of a program, which is read from a file or passed by a caller.

Invariant: the result is a text that can be encoded as UTF-8, and each of its lines ends with a line feed, as the parser
expects.
"""

from __future__ import annotations

from pathlib import Path

from ..diagnostics import NOWHERE, Diagnostic, Fault, Span


def read(path: Path, name: str, span: Span = NOWHERE) -> str:
    """Read the text of a program's file; `name` is the file's name in messages.

    Raises Fault if the file cannot be read. `span` is the position of the Fault, if another program file names this
    file.
    """
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Fault(Diagnostic("missing-file", f"`{name}` cannot be read: {reason.lower()}", span)) from None
    return decode(data, name, span)


def decode(data: bytes, name: str, span: Span = NOWHERE) -> str:
    """Decode the bytes of a program; `name` is the file's name in messages.

    Raises Fault if the bytes are not UTF-8. `span` is the position of the Fault.
    """
    try:
        return normalize(data.decode(), name)
    except UnicodeDecodeError:
        raise _not_text(name, span) from None


def normalize(text: str, name: str) -> str:
    r"""Remove the byte order mark of a text, and end each line with `\n`.

    `name` is the file's name in messages. Raises Fault if the text contains half of a surrogate pair, which UTF-8
    cannot encode.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
            raise _not_text(name) from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _not_text(name: str, span: Span = NOWHERE) -> Fault:
    return Fault(Diagnostic("missing-file", f"`{name}` is not UTF-8 text", span))
