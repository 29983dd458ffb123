"""A program's text in its one canonical layout.

Invariant: the layout depends on the program's tokens, its comments and the author's blank lines, on nothing else; so it
is its own layout. The tree stays the same and every comment stays, in order: both are looked at before the text is
given out.

- Two spaces an indentation, one statement, column or attribute a line, no line of code longer than `WIDTH` that can be
  broken. One blank line at most, where the author had one or more between statements, columns, attributes or comments;
  none at the ends of a block.
- Attributes stand on their statement's line, with commas, where all of it fits and there is neither a comment nor a
  blank line among them; else one a line, without commas. Columns stand one a line, unless there is only one, without
  commas but for one that is needed. An algorithm or a deploy is always open.
- A run is what follows line by line, with no blank line or comment between. In a run of params, sets, attributes,
  engines, or models and data, the `=` stand in one column; the `:` in one of columns, states or workers; and the `{` of
  attributes on the same line, in these and in layouts and nodes without parentheses. A comma has a space behind it, a
  binary operator, `->`, `=>`, `=` and `:` one on each side.
- A statement that is too long goes on four spaces further in: before an arrow, behind a comma, before an operator,
  whichever holds least together, the last that fits.
- A comment stands two spaces behind the code, in one column with those on the lines above and below, or on lines of its
  own. One in the midst of a statement moves above it. White space at a comment's end goes, else its text is untouched,
  like strings' and numbers'.
- Lines end with LF, the last one too; a byte order mark goes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from lark import Token, Tree

from .ast import same
from .parse import parse, parse_tokens

WIDTH = 120
INDENT = "  "
FURTHER = "    "
GAP = re.compile(r"#[^\n]*|\n")
# A comment, or a string in which there is none.
COMMENT = re.compile(r'#[^\n]*|"(?:\\.|[^"\\\n])*"')
BLANK = " \t\f\v\r"
# The statements that align with their like, and the token that they align, besides `{`.
ALIGNED = {
    "param": ("param", "EQUAL"),
    "set": ("set", "EQUAL"),
    "attr": ("attr", "EQUAL"),
    "engine": ("engine", "EQUAL"),
    "model": ("source of something", "EQUAL"),
    "data": ("source of something", "EQUAL"),
    "column": ("column", "COLON"),
    "state": ("state", "COLON"),
    "worker": ("worker", "COLON"),
    "layout": ("layout", ""),
    "amended": ("amended", ""),
}
# What code before the `=` or `:` must not exceed to stand in its run's column.
LONG = 40
# What a line is broken at, the loosest first.
LOOSE = ("ARROW", "RESHARD", "COMMA", "COMPARE", "AT_MOST", "ADD", "MUL")
OPENING = ("LPAR", "LSQB")
CLOSING = ("RPAR", "RSQB")


def format(text: str, file: str) -> str:
    """The program in its canonical layout; `file` is the name that diagnostics show. A Fault where `parse` has one."""
    text = text.removeprefix("\ufeff")
    tree = parse(text, file)
    new = _joined(_lines(_Reader(text, file).file(), ""))
    if not same(tree, parse(new, file)) or _comments(text) != _comments(new):
        raise RuntimeError("the layout changed the program")
    return new


def _comments(text: str) -> list[str]:
    return [found.rstrip(BLANK) for found in COMMENT.findall(text) if found.startswith("#")]


@dataclass
class _Comment:
    text: str
    blank: bool
    """Whether a blank line stands above."""
    behind: bool
    """Whether code stands before it on its line."""


@dataclass
class _Piece:
    """A token, the spaces before it, and what a line that is broken before it tears: the smaller the better, None for
    never."""

    text: str
    kind: str
    spaces: int
    tears: tuple[int, int] | None


@dataclass
class _Part:
    """An item, statement, column or attribute: what stands on lines of its own, or could."""

    rule: str
    head: list[_Piece]
    above: list[_Comment]
    blank: bool
    """Whether a blank line stands above the code, below the comments."""
    block: _Block | None
    comment: str = ""

    @property
    def apart(self) -> bool:
        """Whether it does not follow what is before it line by line."""
        return self.blank or bool(self.above)


@dataclass
class _Block:
    """What stands between braces, or in the file."""

    open: bool
    """Whether its parts stand on lines of their own."""
    parts: list[_Part] = field(default_factory=list)
    comment: str = ""
    """Behind the opening brace."""
    below: list[_Comment] = field(default_factory=list)
    """Before the closing one."""

    def closed(self) -> str:
        """All of it on one line."""
        inner = ", ".join(_text(p.head) for p in self.parts)
        return f"{{ {inner} }}" if inner else "{ }"


# From the tree to parts


class _Reader:
    """Gives each comment and blank line its place among the parts."""

    def __init__(self, text: str, file: str) -> None:
        self.tree = parse_tokens(text, file)
        self.gaps: dict[int, tuple[list[_Comment], bool]] = {}
        """By where a token begins: the comments before it, and whether a blank line stands between the last of them and
        the token."""
        end = 0
        for token in _leaves(self.tree.children):
            self.gaps[token.start_pos] = _gap(text, end, token.start_pos)
            end = token.end_pos
        self.end = len(text)
        self.gaps[self.end] = _gap(text, end, self.end)

    def file(self) -> _Block:
        return self.block(self.tree.children, "start", self.end)

    def block(self, children: Iterable[Any], rule: str, end: int) -> _Block:
        """What a statement of this rule holds between its braces; the closing one begins at `end`."""
        block = _Block(rule in ("algorithm", "deploy", "variant", "start"))
        comments = list[_Comment]()
        blank = False

        def arrive(at: int) -> None:
            """Takes what stands before the token there; commas go, what stands around them stays."""
            nonlocal blank
            more, last = self.gaps[at]
            if more:
                more[0].blank |= blank
                blank = False
            comments.extend(more)
            blank |= last

        def settle() -> None:
            """Ends what came last: a comment on its line is its own, and nothing blank follows an opening brace."""
            nonlocal blank
            last: _Part | _Block = block.parts[-1] if block.parts else block
            if comments and comments[0].behind:
                last.comment = comments.pop(0).text
            if not block.parts:
                if comments:
                    comments[0].blank = False
                else:
                    blank = False

        for child in children:
            if isinstance(child, Token):
                arrive(child.start_pos or 0)
                continue
            first = next(_leaves([child]))
            arrive(first.start_pos)
            settle()
            if rule == "columns" and block.parts and first == "per":
                # Without its comma it would belong to the type before.
                block.parts[-1].head.append(_Piece(",", "COMMA", 0, None))
            block.parts.append(self.part(child, comments, blank))
            comments = []
            blank = False
        arrive(end)
        settle()
        block.below = comments
        block.open |= rule == "columns" and len(block.parts) > 1
        block.open |= bool(block.comment or block.below) or any(p.comment or p.apart for p in block.parts)
        return block

    def part(self, tree: Any, above: list[_Comment], blank: bool) -> _Part:
        head, braces = _split(tree)
        tokens = list(_leaves(head))
        rule = "amended" if tree.data == "node" and not any(t.type == "LPAR" for t in tokens) else tree.data
        inside = [c.text for t in [*tokens[1:], *braces[:1]] for c in self.gaps[t.start_pos][0]]
        if inside:
            above = [*above, *(_Comment(text, blank and not i, False) for i, text in enumerate(inside))]
            blank = False
        block = self.block(braces[1:-1], rule, braces[-1].start_pos) if braces else None
        return _Part(rule, _pieces(tokens, rule), above, blank, block)


def _gap(text: str, start: int, end: int) -> tuple[list[_Comment], bool]:
    comments = list[_Comment]()
    breaks = 0
    for match in GAP.finditer(text, start, end):
        if match[0] == "\n":
            breaks += 1
        else:
            comments.append(_Comment(match[0].rstrip(BLANK), breaks > 1, start > 0 and not comments and not breaks))
            breaks = 0
    return comments, breaks > 1


def _leaves(children: Iterable[Any]) -> Iterator[Any]:
    for child in children:
        if isinstance(child, Token):
            yield child
        elif child is not None:
            yield from _leaves(child.children)


def _split(tree: Any) -> tuple[list[Any], list[Any]]:
    """What stands before a statement's braces, and what stands from the one to the other."""
    children = [c for c in tree.children if c is not None]
    for i, child in enumerate(children):
        if isinstance(child, Token) and child.type == "LBRACE":
            return children[:i], children[i:]
    if isinstance(children[-1], Tree) and children[-1].data in ("attrs", "edge", "stated"):
        head, braces = _split(children[-1])
        return [*children[:-1], *head], braces
    return children, []


def _pieces(tokens: list[Token], rule: str) -> list[_Piece]:
    pieces = list[_Piece]()
    depth = 0
    before = ""
    for token, after in zip(tokens, [*(t.type for t in tokens[1:]), ""], strict=True):
        kind = "DOTS" if token == ".." else token.type
        if kind == "COMMA" and after == "RPAR":
            continue  # behind a call's last argument
        depth -= kind in CLOSING
        tight = (
            kind in ("COMMA", "DOT", "DOTS", *CLOSING)
            or before in ("", "DOT", "DOTS", "SUB_", *OPENING)
            or (kind in OPENING and before in ("NAME", "SOURCE"))
            or (kind == "COLON" and rule == "node")
        )
        # Behind a comma, not before it; `<=` behind a bracket or comma is no operator.
        loose = "COMMA" if before == "COMMA" else "" if before in OPENING or kind == "COMMA" else kind
        pieces.append(
            _Piece(str(token), kind, 0 if tight else 1, (depth, LOOSE.index(loose)) if loose in LOOSE else None)
        )
        depth += kind in OPENING
        before = kind
    return pieces


# From parts to lines: pairs of code and the comment behind it


def _lines(block: _Block, indent: str) -> Iterator[tuple[str, str]]:
    for run in _runs(block.parts):
        _align(run)
        width = _brace(run, len(indent))
        for part in run:
            yield from _above(part.above, indent)
            if part.blank:
                yield "", ""
            if part.block and not part.block.open:
                yield f"{indent}{_text(part.head):<{width}} {part.block.closed()}", part.comment
                continue
            *lines, code = _wrapped(part.head, len(indent), 2 if part.block else 0)
            yield from ((indent + line, "") for line in lines)
            code = indent + code
            if part.block:
                yield f"{code} {{", part.block.comment
                yield from _lines(part.block, indent + INDENT)
                code = indent + "}"
            yield code, part.comment
    yield from _above(block.below, indent)


def _above(comments: list[_Comment], indent: str) -> Iterator[tuple[str, str]]:
    for comment in comments:
        if comment.blank:
            yield "", ""
        yield indent + comment.text, ""


def _runs(parts: list[_Part]) -> list[list[_Part]]:
    runs = list[list[_Part]]()
    for part in parts:
        group = ALIGNED.get(part.rule)
        if runs and group and not part.apart and ALIGNED.get(runs[-1][-1].rule) == group:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _align(run: list[_Part]) -> None:
    """Gives the run's `=` or `:` one column."""
    kind = ALIGNED.get(run[0].rule, ("", ""))[1]
    found = [
        (p.head[at], _text(p.head[:at]))
        for p in run
        for at in [next((i for i, x in enumerate(p.head) if x.kind == kind), 0)]
        if at
    ]
    short = [(piece, lead) for piece, lead in found if len(lead) <= LONG]
    width = max((len(lead) for _, lead in short), default=0)
    for piece, lead in short:
        piece.spaces = width + 1 - len(lead)


def _brace(run: list[_Part], indent: int) -> int:
    """Opens the blocks that do not fit on their lines; gives how wide the code before the others' `{` is."""
    blocks = [(p.block, len(_text(p.head)), len(p.block.closed())) for p in run if p.block and not p.block.open]
    while True:
        width = max((head for _, head, _ in blocks), default=0)
        for block, _, length in blocks:
            block.open = indent + width + 1 + length > WIDTH
        fits = [b for b in blocks if not b[0].open]
        if len(fits) == len(blocks):
            return width
        blocks = fits


def _text(pieces: list[_Piece]) -> str:
    return "".join(" " * p.spaces + p.text for p in pieces)


def _wrapped(pieces: list[_Piece], indent: int, tail: int) -> list[str]:
    """The code in lines that fit behind `indent` columns, with room for `tail` more behind the last; FURTHER leads all
    but the first."""
    lines = list[str]()
    lead = ""
    while (at := _break(pieces, WIDTH - indent - len(lead), tail)) is not None:
        lines.append(lead + _text(pieces[:at]).lstrip(" "))
        pieces = pieces[at:]
        lead = FURTHER
    return [*lines, lead + _text(pieces).lstrip(" ")]


def _break(pieces: list[_Piece], room: int, tail: int) -> int | None:
    """The piece that begins the next line; None where there is room for all, or nowhere to break."""
    column = -pieces[0].spaces
    best = None
    least = (0, 0)
    for i, piece in enumerate(pieces):
        if i and piece.tears is not None and (best is None or piece.tears <= least):
            best = i
            least = piece.tears
        column += piece.spaces + len(piece.text)
        if best is not None and column + (tail if i == len(pieces) - 1 else 0) > room:
            return best
    return None


def _joined(lines: Iterable[tuple[str, str]]) -> str:
    """Lines as text; comments behind lines that follow each other stand in one column."""
    text = list[str]()
    for commented, group in groupby(lines, lambda line: bool(line[1])):
        codes = list(group)
        width = max(len(code) for code, _ in codes) if commented else 0
        text += [f"{code:<{width}}  {comment}\n" if commented else f"{code}\n" for code, comment in codes]
    return "".join(text)
