"""Diagnostics for text that does not follow the grammar.

Invariant: there is one diagnostic, about the first place where the text is wrong. The diagnostic says in the user's
words what was found and what is expected. This code runs only after the parser has failed, so it may be slow. A
separate scanner, which never fails, splits the text into tokens again.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from lark import UnexpectedCharacters, UnexpectedInput
from lark.exceptions import UnexpectedToken

from ..diagnostics import Diagnostic, Span, nearest

ITEMS = ("import", "algorithm", "cluster", "deploy")
ALGORITHM = ("param", "columns", "state", "worker", "source", "node", "drop")
DEPLOY = ("set", "model", "data", "layout", "engine", "place", "apart", "dock", "reshard", "evaluate", "run", "drop")
RESERVED = (*ITEMS, *ALGORITHM, "true", "false")
UNITS = tuple(
    [f"{prefix}B" for prefix in ("", "K", "M", "G", "T", "P", "Ki", "Mi", "Gi", "Ti", "Pi")]
    + [f"{prefix}FLOP" for prefix in ("", "K", "M", "G", "T", "P")]
    + ["us", "ms", "s", "min", "h"]
)
VALUE = frozenset({"INT", "FLOAT", "QUANTITY", "STRING", "TRUE", "FALSE", "NAME", "LPAR", "LSQB", "SUB_"})
JOINING = ("and", "or", "not")
OPERATOR = frozenset({"ADD", "MUL", "COMPARE", "AT_MOST"})
WORDS = {
    "NAME": "a name",
    "STRING": "a string between double quotes",
    "INT": "a whole number",
    "ARROW": "`->`",
    "RESHARD": "`=>`",
    "AT_MOST": "`<=`",
    "LBRACE": "`{`",
    "RBRACE": "`}`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "EQUAL": "`=`",
    "COLON": "`:`",
    "COMMA": "`,`",
    "DOT": "`.`",
    "_TO": "`..`",
    "$END": "the end of the file",
}
SCAN = re.compile(
    r"""(?P<blank>[ \t\f\r\n]+|\#[^\n]*)|(?P<string>"(\\.|[^"\\\n])*")|(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<number>[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?)|(?P<sign><=|->|=>|==|!=|>=|//|\.\.|.)""",
    re.VERBOSE | re.DOTALL,
)
# Text that a user may write without quotes where a string belongs.
BARE = re.compile(r"\.{0,2}/?[A-Za-z_][\w./-]*")
# How a network's speed is written: `25 Gb/s`, `400 Gbit`, `300 mbps`.
BITS = re.compile(r"(?P<prefix>[KMGTPkmgtp]i?)b(?P<bit>its?)?(?P<rate>ps|/s)?")
COMMENTS = "comments begin with `#`"
CLOSES = {"}": "{", ")": "(", "]": "["}


@dataclass(frozen=True)
class _Piece:
    kind: str
    text: str
    start: int
    span: Span


def explain(text: str, file: str, error: UnexpectedInput, start: str) -> Diagnostic:
    """Create the diagnostic for an error of the parser."""
    pieces = _scan(text, file)
    if isinstance(error, UnexpectedCharacters):
        offset = error.pos_in_stream or 0
        here = next((piece for piece in pieces if piece.start >= offset), pieces[-1])
        return _guess_comment([piece for piece in pieces if piece.start < offset], here) or _character_diagnostic(
            text, here
        )
    assert isinstance(error, UnexpectedToken)
    offset = error.token.start_pos if error.token.type != "$END" else len(text)
    here = next((piece for piece in pieces if piece.start + len(piece.text) > offset), pieces[-1])
    before = [piece for piece in pieces if piece.start < here.start]
    expected = set(error.accepts or error.expected)
    # In `nodes 0.5` the parser accepted the 0 and failed within the piece; the guesses do not cover that.
    if start != "start" or here.start < offset:
        return _expected_diagnostic(here, expected, before)
    item, brackets = _open_brackets(before)
    guesses = (
        _guess_comment(before, here),
        _guess_import(before, here, text),
        _guess_quotes(before, here, text, expected),
        _guess_difference(before, here, text),
        _guess_unit(before, here, text),
        _guess_brackets(here, brackets),
        _guess_frozen(before),
        _guess_misplaced(here, before, item, brackets),
    )
    for diagnostic in guesses:
        if diagnostic:
            return diagnostic
    return _expected_diagnostic(here, expected, before)


def _scan(text: str, file: str) -> list[_Piece]:
    """Split the text into tokens, without blanks and comments; add an `end` token."""
    starts = [0] + [newline.end() for newline in re.finditer("\n", text)]

    def place(offset: int) -> tuple[int, int]:
        line = bisect_right(starts, offset)
        return line, offset - starts[line - 1] + 1

    pieces = []
    for match in SCAN.finditer(text):
        if match.lastgroup != "blank":
            kind = next(name for name in ("string", "name", "number", "sign") if match[name] is not None)
            pieces.append(_Piece(kind, match[0], match.start(), Span(file, *place(match.start()), *place(match.end()))))
    last = place(len(text))
    end = pieces[-1].span if pieces else Span(file, *last, *last)
    line = end.end_line
    column = end.end_column
    return [*pieces, _Piece("end", "", len(text), Span(file, line, column, line, column))]


def _open_brackets(before: list[_Piece]) -> tuple[str, list[_Piece]]:
    """Return the keyword of the last item before an error, and the open brackets.

    An item is an import, an algorithm, a cluster or a deploy.
    """
    item = ""
    brackets = list[_Piece]()
    for piece in before:
        if piece.kind == "name" and piece.text in ITEMS and not brackets:
            item = piece.text
        elif piece.kind == "sign" and piece.text in CLOSES.values():
            brackets.append(piece)
        elif piece.kind == "sign" and piece.text in CLOSES and brackets:
            brackets.pop()
    return item, brackets


def _character_diagnostic(text: str, here: _Piece) -> Diagnostic:
    span = here.span
    if here.text == '"':
        line = text[here.start :].split("\n", 1)[0].rstrip("\r")
        end = Span(span.file, span.line, span.column, span.line, span.column + len(line))
        return Diagnostic(
            "syntax", "the string is not closed", end, 'a string ends with `"` on the line that it begins on'
        )
    help = {
        "'": 'strings use double quotes, `"…"`',
        ";": "remove it: statements need no separator",
    }.get(here.text, "")
    return Diagnostic("syntax", f"{_quote(here.text)} is not valid here", span, help)


def _guess_comment(before: list[_Piece], here: _Piece) -> Diagnostic | None:
    """Detect `// words`, a comment of another language.

    The parser first reads such a comment as a division of values.
    """
    row = [piece for piece in (*before, here) if piece.span.line >= (before[-1] if before else here).span.line]
    for sign, word, after in zip(row, row[1:], row[2:], strict=False):
        if sign.text == "//" and word.kind == after.kind == "name" and sign.span.line == after.span.line:
            return Diagnostic("syntax", "`//` does not start a comment", sign.span, COMMENTS)
    return None


def _guess_quotes(before: list[_Piece], here: _Piece, text: str, expected: set[str]) -> Diagnostic | None:
    """Detect a string without quotes: `qwen2.5-7b`, `./model`."""
    match = BARE.match(text, here.start) if "STRING" in expected and here.text not in RESERVED else None
    return _unquoted_string(here, match[0]) if match and ("NAME" not in expected or "/" in match[0]) else None


def _guess_import(before: list[_Piece], here: _Piece, text: str) -> Diagnostic | None:
    """Detect a file name without quotes after `import`."""
    if len(before) < 2 or before[-2].text != "import" or here.text not in (".", "/", "-"):
        return None
    match = BARE.match(text, before[-1].start)
    if match is None or match.end() <= here.start:
        return None
    return _unquoted_string(before[-1], match[0], "" if match[0].endswith(".rlg") else ".rlg")


def _guess_difference(before: list[_Piece], here: _Piece, text: str) -> Diagnostic | None:
    """Detect a string without quotes that was parsed as a difference: `ascend-910c`."""
    for equals, first in pairwise(before):
        match = BARE.match(text, first.start)
        if equals.text == "=" and match and "-" in match[0] and re.search(r"[0-9][A-Za-z]|\.", match[0]):
            last = max((piece for piece in before if piece.start < match.end()), key=lambda piece: piece.start)
            # The parser fails at the part itself or after it.
            if here.start < match.end() or last is before[-1]:
                return _unquoted_string(first, match[0])
    return None


def _unquoted_string(first: _Piece, name: str, ending: str = "") -> Diagnostic:
    place = first.span
    span = Span(place.file, place.line, place.column, place.line, place.column + len(name))
    return Diagnostic("syntax", "a string needs double quotes", span, f'write `"{name}{ending}"`')


def _guess_frozen(before: list[_Piece]) -> Diagnostic | None:
    """Detect a wrong word after a worker's kind: `worker NAME : KIND word`.

    The parser reads the word as the start of an edge, and fails after the word.
    """
    if len(before) < 5:
        return None
    first, _, colon, kind, word = before[-5:]
    if first.text != "worker" or colon.text != ":" or word.kind != "name" or word.span.line != kind.span.line:
        return None
    return Diagnostic(
        "syntax", f"`{word.text}` cannot follow a worker's kind", word.span, nearest(word.text, ("frozen",))
    )


def _guess_unit(before: list[_Piece], here: _Piece, text: str) -> Diagnostic | None:
    """Detect a number with an unknown unit.

    The parser fails at the unit or at the word after the unit.
    """
    row = [*before, here]
    for number, word in (
        ((row[-2], row[-1]),)
        if len(row) == 2
        else tuple(zip(row[-3:-1], row[-2:], strict=True))
        if len(row) > 2
        else ()
    ):
        between = text[number.start + len(number.text) : word.start]
        if number.kind == "number" and word.kind == "name" and not between.strip(" \t") and word.text not in RESERVED:
            if word.text in JOINING:
                help = "an expression has one comparison: use a function, or several filters in sequence"
                return Diagnostic("syntax", f"`{word.text}` cannot combine comparisons", word.span, help)
            rate = re.match(r"/s\b", text[word.start + len(word.text) :])
            help = _bits_help(number.text, word.text + (rate[0] if rate else "")) or unit_help(word.text)
            return Diagnostic("unknown-unit", f"unknown unit `{word.text}`", word.span, help)
    return None


def _bits_help(number: str, word: str) -> str:
    """Return help that converts a network speed in bits to bytes.

    Returns "" if the word does not mean bits. The result is also "" for a word such as `mb`, which can mean bits or
    bytes.
    """
    match = BITS.fullmatch(word)
    if match is None or not (match["bit"] or match["rate"] == "ps" or match["prefix"][0].isupper()):
        return ""
    rate = "/s" if match["rate"] else ""
    amount = float(number) / 8
    shown = f"{amount:.0f}" if amount.is_integer() else f"{amount:.12g}"
    help = f"bits are not bytes: {number} {word} are `{shown} {match['prefix'].capitalize()}B{rate}`"
    return help if rate else f"{help}, and a rate ends with `/s`"


def unit_help(word: str) -> str:
    if word.startswith("_"):
        return "numbers cannot contain `_`"
    if rate := re.fullmatch(r"([kmgtp]?i?)(b|flop)(?:ps|s|/s|psec)", word, re.IGNORECASE):
        base = "B" if rate[2].lower() == "b" else "FLOP"
        prefix = rate[1].upper().replace("I", "i")
        return f"did you mean `{prefix}{base}/s`?"
    same = [unit for unit in UNITS if unit.lower() == word.lower()]
    known = "units are B KB MB GB TB KiB MiB GiB TiB and FLOP, each with `/s` for a rate, and us ms s min h"
    return f"did you mean `{same[0]}`?" if same else nearest(word, UNITS) or known


def _guess_brackets(here: _Piece, brackets: list[_Piece]) -> Diagnostic | None:
    if here.kind == "end" and brackets:
        closing = next(close for close, opening in CLOSES.items() if opening == brackets[-1].text)
        return Diagnostic(
            "syntax", f"this `{brackets[-1].text}` is never closed", brackets[-1].span, f"add `{closing}`"
        )
    depth = sum(bracket.text == "{" for bracket in brackets)
    if (
        here.kind == "name"
        and depth
        and (here.text in ITEMS or (here.text in ALGORITHM and depth > 1 and brackets[-1].text == "{"))
    ):
        opened = next(bracket for bracket in reversed(brackets) if bracket.text == "{")
        message = f"`{here.text}` cannot be inside {'a' if here.text in ITEMS else 'this'} block"
        return Diagnostic(
            "syntax",
            message,
            here.span,
            "close the block with `}` first",
            related=((opened.span, "this block is open"),),
        )
    return None


def _guess_misplaced(here: _Piece, before: list[_Piece], item: str, brackets: list[_Piece]) -> Diagnostic | None:
    """Detect a statement in the wrong kind of block, or a misspelt keyword."""
    last = before[-1] if before else None
    if not brackets:
        if here.text == "{" and not before:
            return Diagnostic("syntax", "this is a plan, not a program", here.span, "run it with `msrl-run`")
        if here.text in ("}", ")", "]"):
            return Diagnostic(
                "syntax", f"this `{here.text}` closes nothing", here.span, "remove it, or open a block before it"
            )
        if item and last and last.text != "}" and not _is_complete_import(before, item):
            return None
        if here.text in ALGORITHM or here.text in DEPLOY:
            owner = "algorithm NAME { … }" if here.text in ALGORITHM else "deploy ALGORITHM on CLUSTER { … }"
            return Diagnostic(
                "syntax",
                f"`{here.text}` is outside a block",
                here.span,
                f"it belongs between the braces of `{owner}`",
            )
        if here.kind == "name":
            help = nearest(here.text, ITEMS)
            return Diagnostic("syntax", f"`{here.text}` does not start a statement", here.span, help)
        return None
    if len(brackets) > 1:
        return None
    if item == "deploy" and here.text in ALGORITHM and here.text not in ("source", *DEPLOY):
        return Diagnostic("syntax", f"`{here.text}` belongs in an algorithm, not in a deploy", here.span)
    if last and last.kind == "name" and here.kind in ("name", "sign") and here.text not in ("}", ",", "."):
        words, other, name = (
            (ALGORITHM, DEPLOY, "a deploy, not in an algorithm") if item == "algorithm" else (DEPLOY, ALGORITHM, "")
        )
        if name and last.text in other and last.text not in words and item == "algorithm":
            return Diagnostic("syntax", f"`{last.text}` belongs in {name}", last.span)
        if (
            item in ("algorithm", "deploy")
            and last.text not in words
            and _begins_statement(before)
            and here.text not in ("->", "=>")
        ):
            lead = "param" if item == "algorithm" else "set"
            help = f"write `{lead} {last.text} = …`" if here.text == "=" else nearest(last.text, words)
            return Diagnostic("syntax", f"no statement begins with `{last.text}`", last.span, help)
    return None


def _begins_statement(before: list[_Piece]) -> bool:
    """Return whether a statement can begin at the last token of `before`.

    A statement begins at the start of a line or after a brace.
    """
    if len(before) < 2 or before[-2].text in ("{", "}"):
        return True
    return before[-2].span.end_line < before[-1].span.line and before[-2].text not in (",", "->", "=>", ".", "=", ":")


def _is_complete_import(before: list[_Piece], item: str) -> bool:
    """Return whether the text before the error ends with a complete import.

    An import is the only item without braces. `item` is the keyword of the item in which the error is.
    """
    return item == "import" and len(before) > 1 and before[-2].text == "import"


def _expected_diagnostic(here: _Piece, expected: set[str], before: list[_Piece]) -> Diagnostic:
    actual = "the end" if here.kind == "end" else _quote(here.text)
    help = ""
    if here.text in RESERVED and "NAME" in expected:
        actual = f"the reserved word {actual}"
        help = "" if "_EXTENDS" in expected else "choose another name"
    elif here.text == "." and expected >= VALUE:
        help = "a number needs a digit before its point, as in `0.5`"
    elif here.text == "//":
        help = COMMENTS
    elif here.text == "]" and len(before) > 1 and before[-1].text == "[" and before[-2].kind == "name":
        help = f"write the bound, as in `{before[-2].text}[<= n]`"
    elif here.text == "=" and "COLON" in expected and before[-1].kind == "name":
        name = before[-1].text
        help = {
            "state": f"a state has a type, as in `state {name} : f32 = …`",
            "worker": f"a worker has a kind, as in `worker {name} : policy`",
            "node": f"a label is followed by a colon, `node {name}: WORKER.VERB`",
        }.get(before[-2].text if len(before) > 1 else "", f"a column has a type, as in `{name} : f32`")
    elif here.text == "(" and [piece.text for piece in before[-4:-1:2]] == ["=", "."]:
        help = f'a function from a file is written `"{before[-3].text}.py:{before[-1].text}"`'
    elif here.text == "." and before and before[-1].kind == "number":
        help = "a number needs digits on both sides of its point"
    return Diagnostic("syntax", f"expected {_format_expected(expected)}, found {actual}", here.span, help)


def _format_expected(names: set[str]) -> str:
    remaining = set(names)
    words = list[str]()
    if {"_EXTENDS", "_SET"} <= remaining:
        remaining = {token for token in remaining if token in WORDS and token != "NAME"}
        words.append("an attribute")
    elif {"_PARAM", "_NODE"} <= remaining:
        remaining -= {token for token in remaining if token[1:].lower() in ALGORITHM} | {"NAME", "SOURCE"}
        words.append("a statement of an algorithm")
    elif {"_SET", "_LAYOUT"} <= remaining:
        remaining -= {token for token in remaining if token.strip("_").lower() in DEPLOY} | {
            "NAME",
            "SOURCE",
            "RESHARD_WORD",
        }
        words.append("a statement of a deploy")
    elif {"_ALGORITHM", "_DEPLOY"} <= remaining:
        remaining -= {"_ALGORITHM", "_DEPLOY", "_IMPORT", "_CLUSTER"}
        words.append("`import`, `algorithm`, `cluster`, `deploy`")
    if remaining >= VALUE:
        remaining -= VALUE
        words.append("a value")
    if remaining & OPERATOR:
        remaining -= OPERATOR if "ADD" in remaining else set()
        words += ["an operator"] if "ADD" in names else []
    words += sorted(WORDS.get(token) or f"`{token.strip('_').removesuffix('_WORD').lower()}`" for token in remaining)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}" if words else "nothing more"


def _quote(text: str) -> str:
    shown = text if len(text) <= 40 else text[:39] + "…"
    return f"`{shown}`" if shown.isprintable() else f"character {shown!a}"
