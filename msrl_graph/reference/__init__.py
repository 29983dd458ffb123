"""The language reference: pages of prose in this folder, whose blocks are filled from the sources that they describe.

Invariant: what a machine can know is written nowhere twice: syntax comes from the grammar, attributes with their kinds,
defaults and meanings from their declarations (ir/attributes.py, ir/options.py), figures from the presets, functions
from their sources.

A page is Markdown. Of its code blocks these are filled in:

    ```syntax           names of the grammar's rules; gives them in EBNF
    ```attributes NAME  nothing; gives a table of what a statement declares
    ```list NAME        nothing; gives what `facts.LISTS` makes
    ```rlg algorithm    statements of an algorithm that extends `grpo`, or (```rlg deploy) of a deploy of it; tests
                        compile them

`python -m msrl_graph.reference` prints all of it, docs/language.md; `msrl-compile --explain NAME` an entry.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from . import facts, syntax

FOLDER = Path(__file__).parent
PAGES = ("words", "algorithm", "nodes", "losses", "edges", "extends", "cluster", "deploy", "result", "library")
# What people look a section up by, beside the names of its statements and the words of its title.
_ALSO = {
    "Rows": ("rows",),
    "Units": ("units",),
    "Losses": ("loss",),
    "Loss terms": ("loss",),
    "Optimizers": ("optimizer",),
    "Learning rates": ("lr", "warmup", "schedule"),
    "Changing an algorithm": ("extends", "drop"),
    "Sample edges": ("->",),
    "Resharding edges": ("=>",),
    "Function nodes": ("function", "filter"),
    "Deploys that extend others": ("extends", "drop"),
}
_BLOCK = re.compile(r"^```(\w+)(?: ([^\n]+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@functools.cache
def source(page: str) -> str:
    """A page as it is written."""
    return (FOLDER / f"{page}.md").read_text(encoding="utf-8")


def document() -> str:
    """The Markdown text of docs/language.md."""
    pages = [_whole(source(page)) for page in PAGES]
    titles = [title for page in pages for title in re.findall(r"^## (.+)$", page, re.MULTILINE)]
    contents = "\n".join(f"- [{t}](#{anchor(t)})" for t in titles)
    return "\n".join([_HEAD, contents, "", *pages])


def anchor(title: str) -> str:
    """The address of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def entry(name: str) -> str:
    """The Markdown text of all that bears a name: statement, attribute, function, loss term, preset, engine … KeyError
    without such."""
    return "\n\n".join([f"# {name}", *_entries()[name]]) + "\n"


def names() -> frozenset[str]:
    """All names that have an entry."""
    return frozenset(_entries())


@functools.cache
def _entries() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    statements = {name for rule in ("item", "astmt", "dstmt") for name in syntax.known()[rule].split(" | ")}
    for section in (part for page in PAGES for part in re.split(r"^(?=##)", source(page), flags=re.MULTILINE)):
        title, _, text = section.partition("\n")
        rules = {name for kind, _, body in _BLOCK.findall(text) if kind == "syntax" for name in body.split()}
        # A section is the entry of the statement whose syntax it shows, and of the words that are its title.
        title = title.lstrip("# ")
        words = {t for t in title.split(", ") if t.islower() and " " not in t}
        for name in sorted(statements & rules | words | {*_ALSO.get(title, ())}):
            found.setdefault(name, []).append(_whole(text).strip())
    for kind, of, _ in (block for page in PAGES for block in _BLOCK.findall(source(page))):
        if kind == "attributes":
            for row in facts.attributes(of):
                found.setdefault(row.name, []).append(row.text(of))
    for name, text in facts.entries():
        found.setdefault(name, []).append(text)
    return found


def _whole(text: str) -> str:
    """A page or a part of one with its blocks filled in."""
    return _BLOCK.sub(lambda m: _filled(m[1], m[2] or "", m[3]), text)


def _filled(kind: str, of: str, body: str) -> str:
    match kind:
        case "syntax":
            return f"```text\n{syntax.rules(body.split())}\n```"
        case "attributes":
            return facts.table(facts.attributes(of))
        case "list":
            return facts.LISTS[of]()
    return f"```{kind}\n{body}```"


_HEAD = """\
# The language

What an `.rlg` file may say, complete; for a beginning see [tutorial.md](tutorial.md). What the codes of messages mean
stands in [codes.md](codes.md), the same in Python in [python.md](python.md). `msrl-compile --explain NAME` shows the
entry of a statement, an attribute, a function, a preset or an engine. (Written by `make docs` from the compiler's own
tables and from `msrl_graph/reference/`.)

A file says *what* an algorithm is, a graph of worker states joined by sample edges and resharding edges, and apart from
that *where and how* it runs. The second half never changes the result. What the language has and this version does not
run is refused by name when a run begins (`not-yet`); nothing is ignored.
"""
