"""The codes of diagnostics: a page each, `CODE.md` in this folder, which `msrl-compile --explain CODE` shows.

Invariant: a code is its page: there is no other list of codes, and what a code means stands in its page's first
paragraph alone. Nothing is read before somebody asks. `python -m msrl_graph.codes` prints the catalogue, docs/codes.md.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parent
_LINK = re.compile(
    r"\[([^\[\]]+)\]\((?:#|[\w./-]+\.md)[^()\s]*\)"
)  # to a page or a part of one, where a terminal cannot go


@functools.cache
def known() -> frozenset[str]:
    """All codes."""
    return frozenset(p.stem for p in FOLDER.glob("*.md"))


def page(code: str) -> str:
    """The Markdown text of a code's page: what it means, why it matters, an example and what to write instead. KeyError
    without such."""
    if code not in known():
        raise KeyError(code)
    return (FOLDER / f"{code}.md").read_text(encoding="utf-8")


def meaning(code: str) -> str:
    """What a code means, on one line: the first paragraph of its page."""
    return " ".join(page(code).split("\n\n")[1].split())


def shown(text: str, width: int, colour: bool) -> str:
    """A page as it is written, links as their words, or, where a terminal has `colour`, laid out for it in at most
    `width` columns."""
    text = _LINK.sub(r"\1", text)
    if not colour:
        return text
    import io

    from rich.console import Console
    from rich.markdown import Markdown

    # Lines of a program are not to be broken, lines of text not to be too long.
    console = Console(
        file=io.StringIO(), width=min(width, 120), force_terminal=True, force_jupyter=False, color_system="standard"
    )
    with console.capture() as written:
        console.print(Markdown(text, code_theme="ansi_dark"))
    return written.get()


def catalogue() -> str:
    """The Markdown text of docs/codes.md."""
    lines = [
        f"| [{code}](../msrl_graph/codes/{code}.md) | {meaning(code).replace('|', chr(92) + '|')} |"
        for code in sorted(known())
    ]
    return "\n".join([_HEAD, *lines, ""])


_HEAD = """\
# Codes

What the compiler and a run may tell, by the code in brackets. `msrl-compile --explain CODE` shows a code's page: why it
matters, an example and what to write instead. (Written by `make docs` from those pages.)

| code | what it means |
|---|---|"""
