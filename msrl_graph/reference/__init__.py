"""The language reference: pages with blocks that are filled in from source code.

Each page of this folder is written to docs/reference/language/ under the same name. Two more pages are generated
there: README.md lists the pages with their first sentences, and names.md lists all names.

Invariant: no machine-readable fact is written twice. Syntax comes from the grammar. Attributes, with their kinds,
defaults and meanings, come from their declarations (ir/attributes.py, ir/options.py). Figures come from the presets,
and functions from their source code.

A page is Markdown. These code blocks are filled in:

    ```syntax           names of grammar rules; becomes the EBNF of these rules
    ```attributes NAME  empty; becomes a table of the attributes of the statement NAME
    ```list NAME        empty; becomes the text of `facts.LISTS[NAME]`

These code blocks are examples that the tests compile:

    ```rlg algorithm    statements of an algorithm that extends `grpo`
    ```rlg deploy       statements of a deploy of such an algorithm

Links are relative to docs/reference/language/, also in the meanings of attributes.

`python -m msrl_graph.reference FOLDER` writes all pages. `msrl-compile --explain NAME` shows the entries of one name.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from . import facts, syntax

FOLDER = Path(__file__).parent
PAGES = (
    "lexical_structure",
    "algorithms",
    "columns",
    "tokens",
    "workers",
    "nodes",
    "losses",
    "edges",
    "clusters",
    "deploys",
    "placement",
    "reproducibility",
    "package_algorithms",
    "package_functions",
)
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
    "Workers that follow another one": ("follows",),
    "Function nodes": ("function",),
    "Filters": ("filter",),
    "Deploys that extend others": ("extends", "drop"),
}
_BLOCK = re.compile(r"^```(\w+)(?: ([^\n]+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@functools.cache
def source(page: str) -> str:
    """Return the text of a page, before its code blocks are filled in."""
    return (FOLDER / f"{page}.md").read_text(encoding="utf-8")


def documents() -> dict[str, str]:
    """Return the text of each file of docs/reference/language/, by file name."""
    filled = {page: _fill_blocks(source(page)) for page in PAGES}
    rows = [f"| [{_title(text)}]({page}.md) | {_first_sentence(text)} |" for page, text in filled.items()]
    pages = {"README": "\n".join([_HEAD, *rows, _FOOT]), "names": "\n".join([_NAMES, *_name_rows()]) + "\n"}
    return {f"{page}.md": text for page, text in (pages | filled).items()}


def anchor(title: str) -> str:
    """Return the anchor of a heading, as GitHub creates it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def entry(name: str) -> str:
    """Return the Markdown text of all entries that describe a name.

    `name` is the name of a statement, attribute, function, loss term, preset, engine … Raises KeyError for an unknown
    name.
    """
    return "\n\n".join([f"# {name}", *(text for _, text in _entries()[name])]) + "\n"


def names() -> frozenset[str]:
    """Return all names that have an entry."""
    return frozenset(_entries())


@dataclass(frozen=True)
class _Section:
    """A section of a page, without its heading; its code blocks are not yet filled in."""

    page: str
    title: str
    text: str

    @property
    def blocks(self) -> list[tuple[str, str, str]]:
        """The kind, the name and the body of each code block of the section."""
        return _BLOCK.findall(self.text)

    @property
    def link(self) -> str:
        return f"[{self.title}]({self.page}.md#{anchor(self.title)})"


@functools.cache
def _sections() -> list[_Section]:
    parts = [(page, part) for page in PAGES for part in re.split(r"^## ", source(page), flags=re.MULTILINE)[1:]]
    return [_Section(page, title, text) for page, part in parts for title, _, text in [part.partition("\n")]]


@functools.cache
def _entries() -> dict[str, list[tuple[_Section, str]]]:
    """Return, for each name, the entries that describe it: (section, Markdown text)."""
    entries: dict[str, list[tuple[_Section, str]]] = {}
    statements = {name for rule in ("item", "astmt", "dstmt") for name in syntax.known()[rule].split(" | ")}
    for section in _sections():
        rules = {name for kind, _, body in section.blocks if kind == "syntax" for name in body.split()}
        # A section is the entry of the statements whose syntax it shows, and of the words of its title.
        words = {word for word in section.title.split(", ") if word.islower() and " " not in word}
        for name in sorted(statements & rules | words | {*_SECTION_ALIASES.get(section.title, ())}):
            entries.setdefault(name, []).append((section, _fill_blocks(section.text).strip()))
    for section in _sections():
        for owner in (name for kind, name, _ in section.blocks if kind == "attributes"):
            for row in facts.attributes(owner):
                entries.setdefault(row.name, []).append((section, row.text(owner)))
    lists = {name: section for section in _sections() for kind, name, _ in section.blocks if kind == "list"}
    for list_name, name, text in facts.entries():
        entries.setdefault(name, []).append((lists[list_name], text))
    return entries


def _name_rows() -> list[str]:
    """Return the table rows of names.md: each name, with links to sections about it."""
    entries = sorted(_entries().items(), key=lambda item: (item[0].casefold(), item[0]))
    return [
        f"| `{name}` | {', '.join(dict.fromkeys(section.link for section, _ in found))} |" for name, found in entries
    ]


def _title(page: str) -> str:
    return page.partition("\n")[0].removeprefix("# ")


def _first_sentence(page: str) -> str:
    paragraph = " ".join(page.split("\n\n")[1].split())
    return re.split(r"(?<=\.) ", paragraph, maxsplit=1)[0]


def _fill_blocks(text: str) -> str:
    """Return the text of a page or section with its code blocks filled in."""
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

The complete reference of the `.rlg` language, for authors of programs. The
[tutorial](../../getting_started/tutorial.md) is the introduction, [Codes](../codes.md) explains the codes of messages,
and [Programs in Python](../../guides/python.md) describes the Python API.

A file describes *what* an algorithm is: a graph of worker states, connected by sample edges and resharding edges.
Separately, it describes *where and how* the algorithm runs. Placement, layouts and engines never change the result. If
this version cannot run a language feature, `msrl-run` rejects the program with an error that names the feature
(`not-yet`). Nothing is ignored.

| page | content |
|---|---|"""

_FOOT = """\

To find one word, use the [index of names](names.md), or `msrl-compile --explain NAME`, which shows the entry of a
statement, an attribute, a function, a preset or an engine.

`make docs` generates these pages from the tables of the compiler and from `msrl_graph/reference/`.
"""

_NAMES = """\
# Index of names

All statements, attributes, functions, presets and engines, with the sections that describe them.
`msrl-compile --explain NAME` shows the same entries.

| name | described in |
|---|---|"""
