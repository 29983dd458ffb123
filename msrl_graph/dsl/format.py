"""The formatter of programs, and the rules of the canonical layout.

Invariant: the layout depends only on the program's tokens, its comments and the author's blank lines, so formatting is
idempotent. The tree and all comments, in order, do not change. The formatter checks both before it returns the text.

- Indentation is two spaces. Each statement starts on a line of its own. No line of code is longer than `WIDTH` if it
  can be broken. One blank line is kept where the author had one or more between statements, columns, attributes or
  comments. Blank lines at the start or end of a block are removed.
- Attributes are on the line of their statement, separated by commas, if the line is short enough and no comment or
  blank line is among them. Otherwise each attribute has its own line, without commas. Each column has its own line if
  there are several columns, without a comma unless the grammar needs one. The braces of an algorithm or a deploy are
  always on lines of their own.
- A run is a group of consecutive lines without a blank line or comment between them. The `=` are aligned in a run of
  params, sets, attributes, engines, or models and data. The `:` are aligned in a run of columns, states or workers. The
  `{` of attributes on the same line are aligned in these runs, and in runs of layouts and of nodes without parentheses.
- A comma is followed by a space. A binary operator, `->`, `=>`, `=` and `:` have a space on each side.
- A statement that is too long continues on lines that are indented by four more spaces. A line is broken before an
  arrow, after a comma or before an operator. Of these positions, the one at the operator or comma of lowest precedence
  is used. Of several positions of equal precedence, the last one that fits on the line is used.
- A comment is two spaces after the code, aligned with comments on adjacent lines, or on lines of its own. A comment in
  the middle of a statement moves above the statement. White space at the end of a comment is removed. Otherwise
  comments, strings and numbers do not change.
- Every line ends with LF, including the last line. A byte order mark is removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from lark import Token, Tree

from .ast import same_tree
from .parse import parse, parse_tokens

WIDTH = 120
INDENT = "  "
FURTHER = "    "
GAP = re.compile(r"#[^\n]*|\n")
# A comment, or a string, which cannot contain one.
COMMENT = re.compile(r'#[^\n]*|"(?:\\.|[^"\\\n])*"')
BLANK = " \t\f\v\r"
# By rule: the group of rules that are aligned together, and the token that is aligned in addition to `{`.
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
# Longer code before the `=` or `:` is left out of the alignment.
LONG = 40
# Where a line is broken, loosest first.
LOOSE = ("ARROW", "RESHARD", "COMMA", "COMPARE", "AT_MOST", "ADD", "MUL")
OPENING = ("LPAR", "LSQB")
CLOSING = ("RPAR", "RSQB")


def format(text: str, file: str) -> str:
    """Return the program in its canonical layout.

    `file` is the file name for diagnostics. Raises the same Faults as `parse`.
    """
    text = text.removeprefix("\ufeff")
    tree = parse(text, file)
    new = _join_lines(_layout_lines(_Reader(text, file).file(), ""))
    if not same_tree(tree, parse(new, file)) or _find_comments(text) != _find_comments(new):
        raise RuntimeError("the layout changed the program")
    return new


def _find_comments(text: str) -> list[str]:
    return [match.rstrip(BLANK) for match in COMMENT.findall(text) if match.startswith("#")]


@dataclass
class _Comment:
    text: str
    blank: bool
    """Whether a blank line is above the comment."""
    behind: bool
    """Whether code is before the comment on the same line."""


@dataclass
class _Piece:
    """A token, and the number of spaces before the token.

    `tears` is the rank of a line break before the token: smaller ranks are preferred, and None forbids a break.
    """

    text: str
    kind: str
    spaces: int
    tears: tuple[int, int] | None


@dataclass
class _Part:
    """An element that can have its own lines: an item, statement, column or attribute.

    An item is an import, an algorithm, a cluster or a deploy.
    """

    rule: str
    head: list[_Piece]
    above: list[_Comment]
    blank: bool
    """Whether a blank line is between the comments above and the code."""
    block: _Block | None
    comment: str = ""

    @property
    def separate(self) -> bool:
        """Whether a blank line or a comment is between this part and the previous part."""
        return self.blank or bool(self.above)


@dataclass
class _Block:
    """The contents of a pair of braces, or of the whole file."""

    open: bool
    """Whether each part of the block is on a line of its own."""
    parts: list[_Part] = field(default_factory=list)
    comment: str = ""
    """The comment after the opening brace."""
    below: list[_Comment] = field(default_factory=list)
    """The comments before the closing brace."""

    def closed(self) -> str:
        """Return the block, with its braces, as text on one line."""
        inner = ", ".join(_join_pieces(part.head) for part in self.parts)
        return f"{{ {inner} }}" if inner else "{ }"


# From the tree to parts


class _Reader:
    """A reader that builds parts from the tree, with their comments and blank lines."""

    def __init__(self, text: str, file: str) -> None:
        self.tree = parse_tokens(text, file)
        self.gaps: dict[int, tuple[list[_Comment], bool]] = {}
        """By token start: the comments before it, and whether a blank line follows them."""
        end = 0
        for token in _iter_tokens(self.tree.children):
            self.gaps[token.start_pos] = _read_gap(text, end, token.start_pos)
            end = token.end_pos
        self.end = len(text)
        self.gaps[self.end] = _read_gap(text, end, self.end)

    def file(self) -> _Block:
        return self.block(self.tree.children, "start", self.end)

    def block(self, children: Iterable[Any], rule: str, end: int) -> _Block:
        """Read the contents of a pair of braces; the closing brace begins at `end`.

        `children` are the subtrees between the braces, and `rule` is the grammar rule of the statement with the braces.
        """
        block = _Block(rule in ("algorithm", "deploy", "variant", "start"))
        comments = list[_Comment]()
        blank = False

        def arrive(position: int) -> None:
            """Collect the comments and the blank line before the token at a position.

            Commas are dropped, but the comments around them are kept.
            """
            nonlocal blank
            more, last = self.gaps[position]
            if more:
                more[0].blank |= blank
                blank = False
            comments.extend(more)
            blank |= last

        def settle() -> None:
            """Assign a comment at the end of a part's line to the part: the last one read.

            Also drops a blank line at the start of the block.
            """
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
            first = next(_iter_tokens([child]))
            arrive(first.start_pos)
            settle()
            if rule == "columns" and block.parts and first == "per":
                # Without the comma, the column `per` would belong to the type of the previous column.
                block.parts[-1].head.append(_Piece(",", "COMMA", 0, None))
            block.parts.append(self.part(child, comments, blank))
            comments = []
            blank = False
        arrive(end)
        settle()
        block.below = comments
        block.open |= rule == "columns" and len(block.parts) > 1
        block.open |= bool(block.comment or block.below) or any(part.comment or part.separate for part in block.parts)
        return block

    def part(self, tree: Any, above: list[_Comment], blank: bool) -> _Part:
        head, braces = _split_braces(tree)
        tokens = list(_iter_tokens(head))
        rule = "amended" if tree.data == "node" and not any(token.type == "LPAR" for token in tokens) else tree.data
        inside = [comment.text for token in [*tokens[1:], *braces[:1]] for comment in self.gaps[token.start_pos][0]]
        if inside:
            above = [*above, *(_Comment(text, blank and not i, False) for i, text in enumerate(inside))]
            blank = False
        block = self.block(braces[1:-1], rule, braces[-1].start_pos) if braces else None
        return _Part(rule, _make_pieces(tokens, rule), above, blank, block)


def _read_gap(text: str, start: int, end: int) -> tuple[list[_Comment], bool]:
    comments = list[_Comment]()
    breaks = 0
    for match in GAP.finditer(text, start, end):
        if match[0] == "\n":
            breaks += 1
        else:
            comments.append(_Comment(match[0].rstrip(BLANK), breaks > 1, start > 0 and not comments and not breaks))
            breaks = 0
    return comments, breaks > 1


def _iter_tokens(children: Iterable[Any]) -> Iterator[Any]:
    for child in children:
        if isinstance(child, Token):
            yield child
        elif child is not None:
            yield from _iter_tokens(child.children)


def _split_braces(tree: Any) -> tuple[list[Any], list[Any]]:
    """Return the part of a statement before the braces, and the braces with content."""
    children = [part for part in tree.children if part is not None]
    for i, child in enumerate(children):
        if isinstance(child, Token) and child.type == "LBRACE":
            return children[:i], children[i:]
    if isinstance(children[-1], Tree) and children[-1].data in ("attrs", "edge", "stated"):
        head, braces = _split_braces(children[-1])
        return [*children[:-1], *head], braces
    return children, []


def _make_pieces(tokens: list[Token], rule: str) -> list[_Piece]:
    pieces = list[_Piece]()
    depth = 0
    before = ""
    for token, after in zip(tokens, [*(next_token.type for next_token in tokens[1:]), ""], strict=True):
        kind = "DOTS" if token == ".." else token.type
        if kind == "COMMA" and after == "RPAR":
            continue  # after a call's last argument
        depth -= kind in CLOSING
        tight = (
            kind in ("COMMA", "DOT", "DOTS", *CLOSING)
            or before in ("", "DOT", "DOTS", "SUB_", *OPENING)
            or (kind in OPENING and before in ("NAME", "SOURCE"))
            or (kind == "COLON" and rule == "node")
        )
        # A break is after a comma, not before it. `<=` after a bracket or comma is not an operator.
        loose = "COMMA" if before == "COMMA" else "" if before in OPENING or kind == "COMMA" else kind
        pieces.append(
            _Piece(str(token), kind, 0 if tight else 1, (depth, LOOSE.index(loose)) if loose in LOOSE else None)
        )
        depth += kind in OPENING
        before = kind
    return pieces


# From parts to lines: pairs of code and the comment behind it


def _layout_lines(block: _Block, indent: str) -> Iterator[tuple[str, str]]:
    for run in _group_runs(block.parts):
        _align_run(run)
        width = _open_blocks(run, len(indent))
        for part in run:
            yield from _comment_lines(part.above, indent)
            if part.blank:
                yield "", ""
            if part.block and not part.block.open:
                yield f"{indent}{_join_pieces(part.head):<{width}} {part.block.closed()}", part.comment
                continue
            *lines, code = _wrap(part.head, len(indent), 2 if part.block else 0)
            yield from ((indent + line, "") for line in lines)
            code = indent + code
            if part.block:
                yield f"{code} {{", part.block.comment
                yield from _layout_lines(part.block, indent + INDENT)
                code = indent + "}"
            yield code, part.comment
    yield from _comment_lines(block.below, indent)


def _comment_lines(comments: list[_Comment], indent: str) -> Iterator[tuple[str, str]]:
    for comment in comments:
        if comment.blank:
            yield "", ""
        yield indent + comment.text, ""


def _group_runs(parts: list[_Part]) -> list[list[_Part]]:
    runs = list[list[_Part]]()
    for part in parts:
        group = ALIGNED.get(part.rule)
        if runs and group and not part.separate and ALIGNED.get(runs[-1][-1].rule) == group:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _align_run(run: list[_Part]) -> None:
    """Align the `=` or the `:` in the lines of a run (a group of consecutive lines)."""
    kind = ALIGNED.get(run[0].rule, ("", ""))[1]
    signs = [
        (part.head[index], _join_pieces(part.head[:index]))
        for part in run
        for index in [next((i for i, candidate in enumerate(part.head) if candidate.kind == kind), 0)]
        if index
    ]
    short = [(piece, lead) for piece, lead in signs if len(lead) <= LONG]
    width = max((len(lead) for _, lead in short), default=0)
    for piece, lead in short:
        piece.spaces = width + 1 - len(lead)


def _open_blocks(run: list[_Part], indent: int) -> int:
    """Mark the blocks of a run that do not fit on the line of their statement.

    A marked block is written on several lines. The `{` of all other blocks of the run are aligned. Returns the width of
    the code before these `{`.
    """
    blocks = [
        (part.block, len(_join_pieces(part.head)), len(part.block.closed()))
        for part in run
        if part.block and not part.block.open
    ]
    while True:
        width = max((head_length for _, head_length, _ in blocks), default=0)
        for block, _, length in blocks:
            block.open = indent + width + 1 + length > WIDTH
        fits = [entry for entry in blocks if not entry[0].open]
        if len(fits) == len(blocks):
            return width
        blocks = fits


def _join_pieces(pieces: list[_Piece]) -> str:
    return "".join(" " * piece.spaces + piece.text for piece in pieces)


def _wrap(pieces: list[_Piece], indent: int, tail: int) -> list[str]:
    """Break code into lines that fit in WIDTH columns after an indent of `indent`.

    The last line has room for `tail` more columns. Every line except the first is indented further, by FURTHER.
    """
    lines = list[str]()
    lead = ""
    while (index := _find_break(pieces, WIDTH - indent - len(lead), tail)) is not None:
        lines.append(lead + _join_pieces(pieces[:index]).lstrip(" "))
        pieces = pieces[index:]
        lead = FURTHER
    return [*lines, lead + _join_pieces(pieces).lstrip(" ")]


def _find_break(pieces: list[_Piece], room: int, tail: int) -> int | None:
    """Return the index of the piece that begins the next line.

    Returns None if the line cannot be broken, or if all pieces fit in `room` columns and `tail` columns remain after
    the last piece.
    """
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


def _join_lines(lines: Iterable[tuple[str, str]]) -> str:
    """Return lines as one text; the comments on consecutive lines are aligned.

    A line is a pair of code and comment.
    """
    text = list[str]()
    for commented, group in groupby(lines, lambda line: bool(line[1])):
        codes = list(group)
        width = max(len(code) for code, _ in codes) if commented else 0
        text += [f"{code:<{width}}  {comment}\n" if commented else f"{code}\n" for code, comment in codes]
    return "".join(text)
