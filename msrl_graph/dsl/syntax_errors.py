"""What to say of a text that does not follow the grammar.

Invariant: one diagnostic, of the first place that cannot be right, in the user's words: what was found, and what could
stand there. Runs only after the parser has given up, so it may be slow; it reads the text again by a scanner of its own
that never fails.
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
    [f"{p}B" for p in ("", "K", "M", "G", "T", "P", "Ki", "Mi", "Gi", "Ti", "Pi")]
    + [f"{p}FLOP" for p in ("", "K", "M", "G", "T", "P")]
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
# What someone may write without quotes where a string belongs.
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
    """The diagnostic for an error of the parser."""
    pieces = _scan(text, file)
    if isinstance(error, UnexpectedCharacters):
        at = error.pos_in_stream or 0
        here = next((p for p in pieces if p.start >= at), pieces[-1])
        return _comment([p for p in pieces if p.start < at], here) or _character(text, here)
    assert isinstance(error, UnexpectedToken)
    at = error.token.start_pos if error.token.type != "$END" else len(text)
    here = next((p for p in pieces if p.start + len(p.text) > at), pieces[-1])
    before = [p for p in pieces if p.start < here.start]
    expected = set(error.accepts or error.expected)
    # Of `nodes 0.5` the parser took the 0, and gave up within the piece: no guess is made for that.
    if start != "start" or here.start < at:
        return _generic(here, expected, before)
    head, brackets = _brackets(before)
    guesses = (
        _comment(before, here),
        _imported(before, here, text),
        _quotes(before, here, text, expected),
        _joined(before, here, text),
        _unit(before, here, text),
        _ends(here, brackets),
        _frozen(before),
        _misplaced(here, before, head, brackets),
    )
    for told in guesses:
        if told:
            return told
    return _generic(here, expected, before)


def _scan(text: str, file: str) -> list[_Piece]:
    """The text in pieces, blanks and comments left out, with an `end` at its end."""
    starts = [0] + [m.end() for m in re.finditer("\n", text)]

    def place(at: int) -> tuple[int, int]:
        line = bisect_right(starts, at)
        return line, at - starts[line - 1] + 1

    pieces = []
    for match in SCAN.finditer(text):
        if match.lastgroup != "blank":
            kind = next(k for k in ("string", "name", "number", "sign") if match[k] is not None)
            pieces.append(_Piece(kind, match[0], match.start(), Span(file, *place(match.start()), *place(match.end()))))
    last = place(len(text))
    end = pieces[-1].span if pieces else Span(file, *last, *last)
    line = end.end_line
    column = end.end_column
    return [*pieces, _Piece("end", "", len(text), Span(file, line, column, line, column))]


def _brackets(before: list[_Piece]) -> tuple[str, list[_Piece]]:
    """The word that began the last item, and the brackets that are open."""
    head = ""
    brackets = list[_Piece]()
    for piece in before:
        if piece.kind == "name" and piece.text in ITEMS and not brackets:
            head = piece.text
        elif piece.kind == "sign" and piece.text in CLOSES.values():
            brackets.append(piece)
        elif piece.kind == "sign" and piece.text in CLOSES and brackets:
            brackets.pop()
    return head, brackets


def _character(text: str, here: _Piece) -> Diagnostic:
    span = here.span
    if here.text == '"':
        line = text[here.start :].split("\n", 1)[0].rstrip("\r")
        end = Span(span.file, span.line, span.column, span.line, span.column + len(line))
        return Diagnostic(
            "syntax", "the string is not closed", end, 'a string ends with `"` on the line that it begins on'
        )
    help = {
        "'": 'strings stand between double quotes, `"…"`',
        ";": "a statement ends where the next one begins, without a sign",
    }.get(here.text, "")
    return Diagnostic("syntax", f"{_quote(here.text)} is no sign of the language", span, help)


def _comment(before: list[_Piece], here: _Piece) -> Diagnostic | None:
    """`// words`: a comment of another language, whose words the parser takes for values at first."""
    row = [p for p in (*before, here) if p.span.line >= (before[-1] if before else here).span.line]
    for sign, word, after in zip(row, row[1:], row[2:], strict=False):
        if sign.text == "//" and word.kind == after.kind == "name" and sign.span.line == after.span.line:
            return Diagnostic("syntax", "`//` begins no comment", sign.span, COMMENTS)
    return None


def _quotes(before: list[_Piece], here: _Piece, text: str, expected: set[str]) -> Diagnostic | None:
    """A string without quotes where one belongs: `qwen2.5-7b`, `./model`."""
    match = BARE.match(text, here.start) if "STRING" in expected and here.text not in RESERVED else None
    return _unquoted(here, match[0]) if match and ("NAME" not in expected or "/" in match[0]) else None


def _imported(before: list[_Piece], here: _Piece, text: str) -> Diagnostic | None:
    """A file's name without quotes after `import`, of which the parser took the first part for an algorithm's."""
    if len(before) < 2 or before[-2].text != "import" or here.text not in (".", "/", "-"):
        return None
    match = BARE.match(text, before[-1].start)
    if match is None or match.end() <= here.start:
        return None
    return _unquoted(before[-1], match[0], "" if match[0].endswith(".rlg") else ".rlg")


def _joined(before: list[_Piece], here: _Piece, text: str) -> Diagnostic | None:
    """A string without quotes that was read as a difference, up to where its next part is no value: `ascend-910c`."""
    for equals, first in pairwise(before):
        match = BARE.match(text, first.start)
        if equals.text == "=" and match and "-" in match[0] and re.search(r"[0-9][A-Za-z]|\.", match[0]):
            last = max((p for p in before if p.start < match.end()), key=lambda p: p.start)
            # The parser stumbles on the part itself, or on what follows it.
            if here.start < match.end() or last is before[-1]:
                return _unquoted(first, match[0])
    return None


def _unquoted(first: _Piece, name: str, ending: str = "") -> Diagnostic:
    at = first.span
    span = Span(at.file, at.line, at.column, at.line, at.column + len(name))
    return Diagnostic("syntax", "a string stands between double quotes", span, f'write `"{name}{ending}"`')


def _frozen(before: list[_Piece]) -> Diagnostic | None:
    """`worker NAME : KIND word`: the parser takes the word for the start of an edge, and stumbles on what follows
    it."""
    if len(before) < 5:
        return None
    first, _, colon, kind, word = before[-5:]
    if first.text != "worker" or colon.text != ":" or word.kind != "name" or word.span.line != kind.span.line:
        return None
    return Diagnostic(
        "syntax", f"`{word.text}` cannot follow a worker's kind", word.span, nearest(word.text, ("frozen",))
    )


def _unit(before: list[_Piece], here: _Piece, text: str) -> Diagnostic | None:
    """A number and a word that is no unit: the parser stumbles on the word, or on what follows it."""
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
                help = "an expression has one comparison: let a function decide, or one filter follow another"
                return Diagnostic("syntax", f"`{word.text}` joins no comparisons", word.span, help)
            rate = re.match(r"/s\b", text[word.start + len(word.text) :])
            help = _of_bits(number.text, word.text + (rate[0] if rate else "")) or unit_help(word.text)
            return Diagnostic("unknown-unit", f"`{word.text}` is no unit", word.span, help)
    return None


def _of_bits(number: str, word: str) -> str:
    """What a network's number of bits is in bytes; nothing where the word means no bits (`mb` may be either)."""
    found = BITS.fullmatch(word)
    if found is None or not (found["bit"] or found["rate"] == "ps" or found["prefix"][0].isupper()):
        return ""
    rate = "/s" if found["rate"] else ""
    amount = float(number) / 8
    shown = f"{amount:.0f}" if amount.is_integer() else f"{amount:.12g}"
    help = f"bits are not bytes: {number} {word} are `{shown} {found['prefix'].capitalize()}B{rate}`"
    return help if rate else f"{help}, and a rate ends with `/s`"


def unit_help(word: str) -> str:
    if word.startswith("_"):
        return "a number is written without `_`"
    if rate := re.fullmatch(r"([kmgtp]?i?)(b|flop)(?:ps|s|/s|psec)", word, re.IGNORECASE):
        base = "B" if rate[2].lower() == "b" else "FLOP"
        prefix = rate[1].upper().replace("I", "i")
        return f"did you mean `{prefix}{base}/s`?"
    same = [u for u in UNITS if u.lower() == word.lower()]
    known = "units are B KB MB GB TB KiB MiB GiB TiB and FLOP, each with `/s` for a rate, and us ms s min h"
    return f"did you mean `{same[0]}`?" if same else nearest(word, UNITS) or known


def _ends(here: _Piece, brackets: list[_Piece]) -> Diagnostic | None:
    if here.kind == "end" and brackets:
        closing = next(c for c, o in CLOSES.items() if o == brackets[-1].text)
        return Diagnostic(
            "syntax", f"this `{brackets[-1].text}` is never closed", brackets[-1].span, f"add `{closing}`"
        )
    depth = sum(b.text == "{" for b in brackets)
    if (
        here.kind == "name"
        and depth
        and (here.text in ITEMS or (here.text in ALGORITHM and depth > 1 and brackets[-1].text == "{"))
    ):
        opened = next(b for b in reversed(brackets) if b.text == "{")
        message = f"`{here.text}` cannot stand inside of {'a' if here.text in ITEMS else 'this'} block"
        return Diagnostic(
            "syntax",
            message,
            here.span,
            "close the block with `}` first",
            related=((opened.span, "the block that is open"),),
        )
    return None


def _misplaced(here: _Piece, before: list[_Piece], head: str, brackets: list[_Piece]) -> Diagnostic | None:
    """A statement where another kind of statement belongs; a word that is nearly a statement's."""
    last = before[-1] if before else None
    if not brackets:
        if here.text == "{" and not before:
            return Diagnostic("syntax", "this is a plan, not a program", here.span, "run it with `msrl-run`")
        if here.text in ("}", ")", "]"):
            return Diagnostic(
                "syntax", f"this `{here.text}` closes nothing", here.span, "remove it, or open its block before"
            )
        if head and last and last.text != "}" and not _whole(before, head):
            return None
        if here.text in ALGORITHM or here.text in DEPLOY:
            owner = "algorithm NAME { … }" if here.text in ALGORITHM else "deploy ALGORITHM on CLUSTER { … }"
            return Diagnostic(
                "syntax",
                f"`{here.text}` stands outside of a block",
                here.span,
                f"it belongs between the braces of `{owner}`",
            )
        if here.kind == "name":
            help = nearest(here.text, ITEMS)
            return Diagnostic("syntax", f"`{here.text}` begins no statement that can stand here", here.span, help)
        return None
    if len(brackets) > 1:
        return None
    if head == "deploy" and here.text in ALGORITHM and here.text not in ("source", *DEPLOY):
        return Diagnostic("syntax", f"`{here.text}` belongs in an algorithm, not in a deploy", here.span)
    if last and last.kind == "name" and here.kind in ("name", "sign") and here.text not in ("}", ",", "."):
        words, other, name = (
            (ALGORITHM, DEPLOY, "a deploy, not in an algorithm") if head == "algorithm" else (DEPLOY, ALGORITHM, "")
        )
        if name and last.text in other and last.text not in words and head == "algorithm":
            return Diagnostic("syntax", f"`{last.text}` belongs in {name}", last.span)
        if (
            head in ("algorithm", "deploy")
            and last.text not in words
            and _begins(before)
            and here.text not in ("->", "=>")
        ):
            lead = "param" if head == "algorithm" else "set"
            help = f"write `{lead} {last.text} = …`" if here.text == "=" else nearest(last.text, words)
            return Diagnostic("syntax", f"no statement begins with `{last.text}`", last.span, help)
    return None


def _begins(before: list[_Piece]) -> bool:
    """Whether the last piece is where a statement would begin: at the start of its line, or behind a brace."""
    if len(before) < 2 or before[-2].text in ("{", "}"):
        return True
    return before[-2].span.end_line < before[-1].span.line and before[-2].text not in (",", "->", "=>", ".", "=", ":")


def _whole(before: list[_Piece], head: str) -> bool:
    """Whether an import, the one item without braces, is complete."""
    return head == "import" and len(before) > 1 and before[-2].text == "import"


def _generic(here: _Piece, expected: set[str], before: list[_Piece]) -> Diagnostic:
    found = "the end" if here.kind == "end" else _quote(here.text)
    help = ""
    if here.text in RESERVED and "NAME" in expected:
        found = f"the reserved word {found}"
        help = "" if "_EXTENDS" in expected else "choose another name"
    elif here.text == "." and expected >= VALUE:
        help = "a number has a digit before its point, as in `0.5`"
    elif here.text == "//":
        help = COMMENTS
    elif here.text == "]" and len(before) > 1 and before[-1].text == "[" and before[-2].kind == "name":
        help = f"write the bound, as in `{before[-2].text}[<= n]`"
    elif here.text == "=" and "COLON" in expected and before[-1].kind == "name":
        name = before[-1].text
        help = {
            "state": f"a state has a type, as in `state {name} : f32 = …`",
            "worker": f"a worker has a kind, as in `worker {name} : policy`",
            "node": f"a label stands before a colon, `node {name}: WORKER.VERB`",
        }.get(before[-2].text if len(before) > 1 else "", f"a column has a type, as in `{name} : f32`")
    elif here.text == "(" and [p.text for p in before[-4:-1:2]] == ["=", "."]:
        help = f'a function of a file is written `"{before[-3].text}.py:{before[-1].text}"`'
    elif here.text == "." and before and before[-1].kind == "number":
        help = "a number has digits on both sides of its point"
    return Diagnostic("syntax", f"expected {_expected(expected)}, found {found}", here.span, help)


def _expected(names: set[str]) -> str:
    left = set(names)
    words = list[str]()
    if {"_EXTENDS", "_SET"} <= left:
        left = {n for n in left if n in WORDS and n != "NAME"}
        words.append("an attribute")
    elif {"_PARAM", "_NODE"} <= left:
        left -= {n for n in left if n[1:].lower() in ALGORITHM} | {"NAME", "SOURCE"}
        words.append("a statement of an algorithm")
    elif {"_SET", "_LAYOUT"} <= left:
        left -= {n for n in left if n.strip("_").lower() in DEPLOY} | {"NAME", "SOURCE", "RESHARD_WORD"}
        words.append("a statement of a deploy")
    elif {"_ALGORITHM", "_DEPLOY"} <= left:
        left -= {"_ALGORITHM", "_DEPLOY", "_IMPORT", "_CLUSTER"}
        words.append("`import`, `algorithm`, `cluster`, `deploy`")
    if left >= VALUE:
        left -= VALUE
        words.append("a value")
    if left & OPERATOR:
        left -= OPERATOR if "ADD" in left else set()
        words += ["an operator"] if "ADD" in names else []
    words += sorted(WORDS.get(n) or f"`{n.strip('_').removesuffix('_WORD').lower()}`" for n in left)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}" if words else "nothing more"


def _quote(text: str) -> str:
    shown = text if len(text) <= 40 else text[:39] + "…"
    return f"`{shown}`" if shown.isprintable() else f"character {shown!a}"
