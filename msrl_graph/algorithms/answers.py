"""The answer that a text gives, and whether two answers are the same number or the same words.

Invariant: what is said here is exact or not said: None leaves a pair to computer algebra (judge.py). Every pattern
takes time linear in the text, since responses are long and whoever writes them is being trained on what this file makes
of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

LONGEST = 200  # characters of a number with its unit, or of words
TAIL = 4000  # characters at the end of a response that marks no answer, where others look for it
NESTED = 4  # marks in marks

_BRACES = re.compile(r"(?P<open>\\(?:boxed|fbox)\s*\{|\{)|(?P<close>\})|\\.", re.DOTALL)
_TAGS = re.compile(r"(?P<open><answer>)|(?P<close></answer>)", re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*((?:(?!####)[^\n])*)")
_THOUGHT = "</think>"
_SAID = re.compile(r"\banswer(?:\s+\w+){0,6}?[\s*]*(?:\bis\b|\bare\b|[:=])[\s:*]*", re.IGNORECASE)
# "I hope this answer is correct" tells of no answer what it is.
_REMARKS = frozenset(
    ("correct", "incorrect", "right", "wrong", "reasonable", "valid", "consistent", "plausible", "final")
)
_PROSE = re.compile(r"(?<![\\\w])[^\W\d_]{2,}\s+[^\W\d_]{2,}")
_SENTENCE = re.compile(r"[.;](?:\s|$)")
# Of several, math-verify would take one.
_SEVERAL = re.compile(r"(?:either |between |from )?-?[\d.]+%?(?:(?:,? (?:or|and|to) |, ?)-?[\d.]+%?)+")

_CHARACTERS = str.maketrans(dict.fromkeys("−–‐‑", "-") | dict.fromkeys("\u00a0\u2009\u202f~", " ") | {"％": "%"})  # noqa: RUF001
_CURRENCY = re.compile(r"\\?[$€£¥₹]")
_BETWEEN = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\}|,\\!|\\!,)(?=\d{3}(?!\d))")
_SPACE = re.compile(r"\\(?:[,!;: ()\[\]]|quad\b|left\b|right\b|displaystyle\b)")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")

_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?:(?P<whole>\d+)\s*)?\\[dt]?frac\s*(?:\{{\s*(?P<n>{_DECIMAL})\s*\}}|(?P<n1>\d))"
    rf"\s*(?:\{{\s*(?P<d>{_DECIMAL})\s*\}}|(?P<d1>\d))"
    rf"|(?P<mixed>\d+)\s+(?P<n2>\d+)\s*/\s*(?P<d2>\d+)"
    rf"|(?P<n3>{_DECIMAL})(?:\s*/\s*(?P<d3>{_DECIMAL})"
    rf"|[eE](?P<e>[+-]?\d{{1,3}})(?!\w)|\s*(?:\\times|\\cdot|[*×])\s*10\s*\^\s*\{{?(?P<e1>[+-]?\d{{1,3}})\}}?)?)"  # noqa: RUF001
)
_PERCENT = re.compile(r"\s*(?:\\?%|per\s?cent(?:age points?)?\b)")
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_UNIT = re.compile(
    r"\s*(?:(?:\^\s*\{?\s*\\circ\s*\}?|\\circ|°)(?:\s*[CFK]\b)?)?"
    r"(?P<words>[^\W\d_]*(?:[\s/.'-]+[^\W\d_]+)*)(?:(?<=[^\W\d_])\s*(?:\^?\s*\{?[23]\}?|[²³]))?[\s.]*"
)
# Units of two letters, which could be two variables otherwise.
_SHORT = frozenset(
    (
        "km",
        "cm",
        "mm",
        "nm",
        "kg",
        "mg",
        "ml",
        "mL",
        "ft",
        "lb",
        "oz",
        "hr",
        "mi",
        "yd",
        "MB",
        "GB",
        "TB",
        "Hz",
        "am",
        "pm",
    )
)
# What joins two answers, is a number itself or names a function: no unit.
_NO_UNITS = frozenset(
    (
        *("or", "and", "to", "half", "hundred", "pi", "alpha", "beta", "theta", "inf", "frac", "cdot", "mod"),
        *("sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp"),
    )
)
_LETTER = re.compile(r"\(?([A-Z])\)?")
_WORDS = re.compile(r"[^\W\d_](?:[^\W\d_]|[ '-])*")


@dataclass(frozen=True)
class ParsedNumber:
    """`value` as it is written, without a percent sign; a `rounded` one has a decimal point."""

    value: Fraction
    percent: bool = False
    rounded: bool = False

    def __str__(self) -> str:
        """LaTeX, a rounded one as a decimal."""
        n, d = self.value.as_integer_ratio()
        exact = str(n) if d == 1 else rf"{'-' * (n < 0)}\frac{{{abs(n)}}}{{{d}}}"
        return (f"{Decimal(n) / d:f}" if self.rounded else exact) + r"\%" * self.percent


@dataclass(frozen=True)
class Answer:
    """What a text answers: `text` is LaTeX or plain. Unless it is `marked`, the answer is somewhere in it."""

    text: str
    marked: bool
    number: ParsedNumber | None = None
    words: str = ""


def gold(text: str) -> Answer:
    """The answer of a data file's field: all of it, or what it marks."""
    return _in_marks(text) or _answer(text)


def given(text: str) -> Answer:
    """The answer of a response: what it marks last, else what stands behind the last "answer is", else all of it. Where
    something stands behind the last `</think>`, what stands before that counts only if it is marked, and nothing behind
    says an answer."""
    behind = text.rpartition(_THOUGHT)[2]
    behind = behind if behind.strip() else text
    return _in_marks(behind) or _said(behind) or _in_marks(text) or _anywhere(behind)


def same(response: Answer, answer: Answer) -> bool | None:
    """Whether two answers are equal; None where this file cannot say."""
    if response.number and answer.number:
        return _equal(response.number, answer.number)
    if answer.words and (response.words or not response.marked):
        return response.words == answer.words
    if response.marked and response.text == answer.text != "":
        return True
    return False if response.marked and not response.text else None


def number(text: str) -> ParsedNumber | None:
    """The number that a text is, its unit and currency aside; None where it is none, or something besides."""
    if len(text) > LONGEST:
        return None
    text = _TEXT.sub(lambda m: f" {' '.join(w for w in m[1].split() if len(w) > 1 or not w.isalpha())} ", tidy(text))
    text = " ".join(_SPACE.sub(" ", text).split())
    found = _NUMBER.match(text)
    if not found:
        return None
    parts = {k.rstrip("123"): v for k, v in found.groupdict().items() if v}
    n, d = (Fraction(parts.get(k, "1").replace(",", "").replace(" ", "").rstrip(".")) for k in "nd")
    if not d:
        return None
    value = (Fraction(parts.get("whole", parts.get("mixed", "0"))) + n / d) * Fraction(10) ** int(parts.get("e", "0"))
    end = found.end()
    percent = _PERCENT.match(text, end)
    if percent:
        end = percent.end()
    unit = _UNIT.fullmatch(text, end)
    if not unit:
        return None
    words = re.findall(r"[^\W\d_]+", unit["words"])
    if words and words[0].lower() in _SCALES:
        value *= 10 ** _SCALES[words.pop(0).lower()]
    apart = text[end : end + 1] in " -/°"
    if (
        not all(w.lower() not in _NO_UNITS and (w in _SHORT or (len(w) > 2 and apart)) for w in words[:1])
        or {*words} & _NO_UNITS
    ):
        return None
    return ParsedNumber(-value if parts.get("sign") == "-" else value, bool(percent), "." in found[0])


def tidy(text: str) -> str:
    """A text as mathematics, without what only sets it: dollar signs and other currencies, stars, a point at the end,
    digits apart."""
    return (
        _BETWEEN.sub("", _CURRENCY.sub("", text.translate(_CHARACTERS)))
        .strip()
        .lstrip("*: ")
        .rstrip("*.,;: ")
        .removesuffix("\\")
    )


def _in_marks(text: str) -> Answer | None:
    """The answer in the last whole box, between the last `<answer>` and `</answer>` or behind the last four hashes,
    whichever comes last; marks may stand in marks. Tags may hold sentences."""
    inner = None
    tags = False
    for _ in range(NESTED):
        boxed = _last(_BRACES.finditer(text))
        tagged = _last(_TAGS.finditer(text))
        marks = [(span[1], span, span is tagged) for span in (boxed, tagged) if span]
        if hashes := [*_HASHES.finditer(text)][-1:]:
            marks.append((hashes[0].start(), hashes[0].span(1), False))
        if not marks:
            break
        _, span, tags = max(marks)
        text = inner = text[slice(*span)]
    if inner is None or not tags:
        return None if inner is None else _answer(inner)
    found = _answer(inner)
    if found.number or found.words:
        return found
    return _said(inner) or (_anywhere(inner) if _PROSE.search(_TEXT.sub("", inner)) else found)


def _last(tokens: Iterable[re.Match[str]]) -> tuple[int, int] | None:
    """What the last mark holds that is closed, by tokens that open something, a mark or not, or close what was opened
    last."""
    opened: list[tuple[int, bool]] = []
    last: tuple[int, int] | None = None
    for found in tokens:
        if found["open"]:
            opened.append((found.end(), len(found[0]) > 1))
        elif found["close"] and opened:
            start, mark = opened.pop()
            last = (start, found.start()) if mark else last
    return last


def _said(text: str) -> Answer | None:
    """The answer behind the last "answer is" which does not tell what that answer is worth."""
    said, end = [*_SAID.finditer(text)], len(text)
    for m in reversed(said):
        part = text[m.end() : end].partition("\n")[0]
        end = m.start()
        for piece in (_SENTENCE.split(part, maxsplit=1)[0], part):
            found = number(piece)
            words = _words(piece)
            if words in _REMARKS and m is not said[0]:
                break
            if found or words:
                return Answer(text[-TAIL:], False, found, words)
            if len(piece) <= LONGEST and _SEVERAL.fullmatch(tidy(piece)):
                return _answer(piece)
        else:
            break
    return Answer(text[-TAIL:].translate(_CHARACTERS), False) if said else None


def _anywhere(text: str) -> Answer:
    """The answer of a text that marks none: all of it, or somewhere in it."""
    if len(text) <= LONGEST and _SEVERAL.fullmatch(tidy(text)):
        return _answer(text)
    return Answer(text[-TAIL:].translate(_CHARACTERS), False, number(text), _words(text))


def _answer(text: str) -> Answer:
    found = number(text)
    return Answer(str(found) if found else tidy(text), True, found, "" if found else _words(text))


def _words(text: str) -> str:
    """A text of words only, in lower case, or the letter of a choice; "" where it may be mathematics."""
    plain = " ".join(_TEXT.sub(r" \1 ", tidy(text)).split()) if len(text) <= LONGEST else ""
    if letter := _LETTER.fullmatch(plain):
        return letter[1]
    if (
        not _WORDS.fullmatch(plain)
        or {*plain.lower().split()} & _NO_UNITS
        or not any(len(w) > 2 for w in plain.split())
    ):
        return ""
    return plain.lower()


def _equal(a: ParsedNumber, b: ParsedNumber) -> bool:
    """Percent may be left out, or taken as hundredths; a rounded number is equal to what it may have been rounded
    from."""
    pairs = [(a.value, b.value)]
    if a.percent != b.percent:
        pairs.append((a.value / 100, b.value) if a.percent else (a.value, b.value / 100))
    return any(x == y or ((a.rounded or b.rounded) and _close(x, y)) for x, y in pairs)


def _close(x: Fraction, y: Fraction) -> bool:
    """As math-verify, to six decimals; of small numbers, to five digits."""
    return abs(x - y) <= min(Fraction(1, 2_000_000), max(abs(x), abs(y)) / 100_000)
