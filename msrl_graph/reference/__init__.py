"""The language reference: pages with blocks that are filled in from the sources.

Invariant: no machine-readable fact is written twice. Syntax comes from the grammar; attributes with their kinds,
defaults and meanings from their declarations (ir/attributes.py, ir/options.py); figures from the presets; functions
from their sources.

A page is Markdown. These code blocks are filled in:

    ```syntax           names of grammar rules; becomes their EBNF
    ```attributes NAME  empty; becomes a table of a statement's attributes
    ```list NAME        empty; becomes the text of `facts.LISTS`
    ```rlg algorithm    statements of an algorithm that extends `grpo`, or (```rlg deploy) of a deploy of it; tests
                        compile them

`python -m msrl_graph.reference` prints the whole document, docs/language.md; `msrl-compile --explain NAME` one entry.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from . import facts, syntax

FOLDER = Path(__file__).parent
PAGES = ("words", "algorithm", "nodes", "losses", "edges", "extends", "cluster", "deploy", "result", "library")
# Further names for a section, in addition to its statements and the words of its title.
_SECTION_ALIASES = {
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
    """Return a page as written."""
    return (FOLDER / f"{page}.md").read_text(encoding="utf-8")


def document() -> str:
    """Return the Markdown text of docs/language.md."""
    pages = [_fill_blocks(source(page)) for page in PAGES]
    titles = [title for page in pages for title in re.findall(r"^## (.+)$", page, re.MULTILINE)]
    contents = "\n".join(f"- [{heading}](#{anchor(heading)})" for heading in titles)
    return "\n".join([_HEAD, contents, "", *pages])


def anchor(title: str) -> str:
    """Return the anchor of a heading, as GitHub creates it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def entry(name: str) -> str:
    """Return the Markdown text of all entries with a name.

    A name is a statement, attribute, function, loss term, preset, engine … Raises KeyError for an unknown name.
    """
    return "\n\n".join([f"# {name}", *_entries()[name]]) + "\n"


def names() -> frozenset[str]:
    """Return all names that have an entry."""
    return frozenset(_entries())


@functools.cache
def _entries() -> dict[str, list[str]]:
    entries: dict[str, list[str]] = {}
    statements = {name for rule in ("item", "astmt", "dstmt") for name in syntax.known()[rule].split(" | ")}
    for section in (part for page in PAGES for part in re.split(r"^(?=##)", source(page), flags=re.MULTILINE)):
        title, _, text = section.partition("\n")
        rules = {name for kind, _, body in _BLOCK.findall(text) if kind == "syntax" for name in body.split()}
        # A section is the entry of the statements whose syntax it shows, and of the words of its title.
        title = title.lstrip("# ")
        words = {word for word in title.split(", ") if word.islower() and " " not in word}
        for name in sorted(statements & rules | words | {*_SECTION_ALIASES.get(title, ())}):
            entries.setdefault(name, []).append(_fill_blocks(text).strip())
    for kind, owner, _ in (block for page in PAGES for block in _BLOCK.findall(source(page))):
        if kind == "attributes":
            for row in facts.attributes(owner):
                entries.setdefault(row.name, []).append(row.text(owner))
    for name, text in facts.entries():
        entries.setdefault(name, []).append(text)
    return entries


def _fill_blocks(text: str) -> str:
    """Return a page or a part of one with its blocks filled in."""
    return _BLOCK.sub(lambda match: _fill_block(match[1], match[2] or "", match[3]), text)


def _fill_block(kind: str, name: str, body: str) -> str:
    match kind:
        case "syntax":
            return f"```text\n{syntax.rules(body.split())}\n```"
        case "attributes":
            return facts.table(facts.attributes(name))
        case "list":
            return facts.LISTS[name]()
    return f"```{kind}\n{body}```"


_HEAD = """\
# The language

This page is the complete reference of the `.rlg` language, for authors of programs. [tutorial.md](tutorial.md) is the
introduction, [codes.md](codes.md) explains the codes of messages, and [python.md](python.md) describes the Python API.
`msrl-compile --explain NAME` shows the entry of a statement, an attribute, a function, a preset or an engine.
(`make docs` generates this page from the tables of the compiler and from `msrl_graph/reference/`.)

A file describes *what* an algorithm is: a graph of worker states, connected by sample edges and resharding edges.
Separately, it describes *where and how* the algorithm runs. Placement, layouts and engines never change the result. If
this version cannot run a language feature, `msrl-run` rejects the program with an error that names the feature
(`not-yet`). Nothing is ignored.
"""
