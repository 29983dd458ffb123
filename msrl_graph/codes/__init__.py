"""The codes of diagnostics, each with a page `CODE.md` in this folder.

`msrl-compile --explain CODE` shows the page. `python -m msrl_graph.codes` prints the catalogue, docs/codes.md.

Invariant: the pages are the only list of codes, and only the first paragraph of a page defines its code. Pages are read
on demand.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parent
# A link to a page or a part of one, which a terminal cannot follow.
_LINK = re.compile(r"\[([^\[\]]+)\]\((?:#|[\w./-]+\.md)[^()\s]*\)")


@functools.cache
def known() -> frozenset[str]:
    """Return all codes."""
    return frozenset(path.stem for path in FOLDER.glob("*.md"))


def page(code: str) -> str:
    """Return a code's page as Markdown: meaning, reason, an example and a correction.

    Raises KeyError for an unknown code.
    """
    if code not in known():
        raise KeyError(code)
    return (FOLDER / f"{code}.md").read_text(encoding="utf-8")


def meaning(code: str) -> str:
    """Return what a code means, on one line: the first paragraph of its page."""
    return " ".join(page(code).split("\n\n")[1].split())


def shown(text: str, width: int, colour: bool) -> str:
    """Return a page for the terminal, with links as plain words.

    With `colour` it is rendered in at most `width` columns.
    """
    text = _LINK.sub(r"\1", text)
    if not colour:
        return text
    import io

    from rich.console import Console
    from rich.markdown import Markdown

    # Lines of code must not be wrapped; lines of text must not be too long.
    console = Console(
        file=io.StringIO(), width=min(width, 120), force_terminal=True, force_jupyter=False, color_system="standard"
    )
    with console.capture() as written:
        console.print(Markdown(text, code_theme="ansi_dark"))
    return written.get()


def catalogue() -> str:
    """Return the Markdown text of docs/codes.md."""
    lines = [
        f"| [{code}](../msrl_graph/codes/{code}.md) | {meaning(code).replace('|', chr(92) + '|')} |"
        for code in sorted(known())
    ]
    return "\n".join([_HEAD, *lines, ""])


_HEAD = """\
# Codes

The diagnostics of the compiler and of runs, by the code in brackets. `msrl-compile --explain CODE` shows a code's page:
why it matters, an example and what to write instead. (Written by `make docs` from those pages.)

| code | what it means |
|---|---|"""
