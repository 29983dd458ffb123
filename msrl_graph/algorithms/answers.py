"""Extraction of the final answer from a text, and comparison of two answers.

Invariant: a comparison in this file is either exact or returns None. If a comparison returns None, the caller compares
the answers by computer algebra (judge.py). Every regular expression takes time linear in the length of the text.
Otherwise a long response would be slow to check, and a model that is rewarded by these comparisons could learn to write
text that makes a regular expression slow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

LONGEST = 200  # characters of a number with its unit, or of words
TAIL = 4000  # characters at the end of a response without a marked answer, where an answer is looked for
NESTED = 4  # levels of marks within marks

_BRACES = re.compile(r"(?P<open>\\(?:boxed|fbox)\s*\{|\{)|(?P<close>\})|\\.", re.DOTALL)
_TAGS = re.compile(r"(?P<open><answer>)|(?P<close></answer>)", re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*((?:(?!####)[^\n])*)")
_THOUGHT = "</think>"
_SAID = re.compile(r"\banswer(?:\s+\w+){0,6}?[\s*]*(?:\bis\b|\bare\b|[:=])[\s:*]*", re.IGNORECASE)
# "I hope this answer is correct" does not state an answer.
_REMARKS = frozenset(
    ("correct", "incorrect", "right", "wrong", "reasonable", "valid", "consistent", "plausible", "final")
)
_PROSE = re.compile(r"(?<![\\\w])[^\W\d_]{2,}\s+[^\W\d_]{2,}")
_SENTENCE = re.compile(r"[.;](?:\s|$)")
# Several numbers, of which math-verify would take one.
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
# Units of two letters, which could otherwise be two variables.
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
# Words that join two answers, are a number or name a function: they are not units.
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
    """A number that was found in a text.

    - `value`: the number as written, without a percent sign.
    - `percent`: whether a percent sign follows the number.
    - `rounded`: whether the number was written with a decimal point.
    """

    value: Fraction
    percent: bool = False
    rounded: bool = False

    def __str__(self) -> str:
        """Format the number as LaTeX: as a decimal if `rounded`, otherwise as a fraction."""
        numerator, denominator = self.value.as_integer_ratio()
        exact = (
            str(numerator)
            if denominator == 1
            else rf"{'-' * (numerator < 0)}\frac{{{abs(numerator)}}}{{{denominator}}}"
        )
        return (f"{Decimal(numerator) / denominator:f}" if self.rounded else exact) + r"\%" * self.percent


@dataclass(frozen=True)
class Answer:
    """The final answer that was found in a text.

    - `text`: LaTeX or plain text. If `marked` is true, `text` is exactly the answer. Otherwise `text` contains the
      answer at an unknown position.
    - `marked`: whether it is known where the answer begins and ends, for example because `<answer>` tags enclose it.
    - `number`: the answer as a number, if the answer is a number.
    - `words`: the answer in lower case if the answer consists of words, or the letter of a multiple-choice answer.
    """

    text: str
    marked: bool
    number: ParsedNumber | None = None
    words: str = ""


def parse_gold(text: str) -> Answer:
    """Return the expected answer from a field of the data.

    The answer is the last marked part of the field. A mark is for example a pair of `<answer>` tags. If no part is
    marked, the answer is the whole field.
    """
    return _find_marked_answer(text) or _parse_answer(text)


def parse_response(text: str) -> Answer:
    """Return the final answer of a response.

    The answer is the last answer that the response marks, for example with `<answer>` tags. If no answer is marked, the
    answer is the text after the last "answer is". If "answer is" does not occur, the answer is somewhere in the whole
    text.

    If there is text after the last `</think>`, the answer is taken from that text. The text before `</think>` is used
    only if it has a marked answer and the text after `</think>` states no answer.
    """
    final_text = text.rpartition(_THOUGHT)[2]
    final_text = final_text if final_text.strip() else text
    return (
        _find_marked_answer(final_text)
        or _find_stated_answer(final_text)
        or _find_marked_answer(text)
        or _answer_without_mark(final_text)
    )


def same(response: Answer, answer: Answer) -> bool | None:
    """Return whether two answers are equal, or None if this file cannot decide.

    If the result is None, the caller compares the answers by computer algebra.
    """
    if response.number and answer.number:
        return _equal_numbers(response.number, answer.number)
    if answer.words and (response.words or not response.marked):
        return response.words == answer.words
    if response.marked and response.text == answer.text != "":
        return True
    return False if response.marked and not response.text else None


def number(text: str) -> ParsedNumber | None:
    """Return the number that a text consists of, ignoring a unit or currency.

    Returns None if the text is not a number, or if it contains more than one number.
    """
    if len(text) > LONGEST:
        return None
    text = _TEXT.sub(
        lambda match: f" {' '.join(word for word in match[1].split() if len(word) > 1 or not word.isalpha())} ",
        tidy(text),
    )
    text = " ".join(_SPACE.sub(" ", text).split())
    number_match = _NUMBER.match(text)
    if not number_match:
        return None
    parts = {group.rstrip("123"): part for group, part in number_match.groupdict().items() if part}
    numerator, denominator = (
        Fraction(parts.get(group, "1").replace(",", "").replace(" ", "").rstrip(".")) for group in "nd"
    )
    if not denominator:
        return None
    value = (Fraction(parts.get("whole", parts.get("mixed", "0"))) + numerator / denominator) * Fraction(10) ** int(
        parts.get("e", "0")
    )
    end = number_match.end()
    percent = _PERCENT.match(text, end)
    if percent:
        end = percent.end()
    unit = _UNIT.fullmatch(text, end)
    if not unit:
        return None
    words = re.findall(r"[^\W\d_]+", unit["words"])
    if words and words[0].lower() in _SCALES:
        value *= 10 ** _SCALES[words.pop(0).lower()]
    separated = text[end : end + 1] in " -/°"
    if (
        not all(
            word.lower() not in _NO_UNITS and (word in _SHORT or (len(word) > 2 and separated)) for word in words[:1]
        )
        or {*words} & _NO_UNITS
    ):
        return None
    return ParsedNumber(-value if parts.get("sign") == "-" else value, bool(percent), "." in number_match[0])


def tidy(text: str) -> str:
    """Remove typesetting from a mathematical text.

    Removes dollar signs and other currency signs, stars, a full stop at the end, and spaces between digits.
    """
    return (
        _BETWEEN.sub("", _CURRENCY.sub("", text.translate(_CHARACTERS)))
        .strip()
        .lstrip("*: ")
        .rstrip("*.,;: ")
        .removesuffix("\\")
    )


def _find_marked_answer(text: str) -> Answer | None:
    r"""Return the answer in the last mark of a text, or None if the text has no mark.

    A mark is a complete `\boxed{}` or `\fbox{}`, a pair of `<answer>` and `</answer>`, or the text after four hashes.
    If marks are nested, the innermost mark has the answer. If the text between two tags is a whole sentence, the answer
    is extracted from that sentence.
    """
    inner = None
    tags = False
    for _ in range(NESTED):
        boxed = _last_mark(_BRACES.finditer(text))
        tagged = _last_mark(_TAGS.finditer(text))
        marks = [(span[1], span, span is tagged) for span in (boxed, tagged) if span]
        if hashes := [*_HASHES.finditer(text)][-1:]:
            marks.append((hashes[0].start(), hashes[0].span(1), False))
        if not marks:
            break
        _, span, tags = max(marks)
        text = inner = text[slice(*span)]
    if inner is None or not tags:
        return None if inner is None else _parse_answer(inner)
    answer = _parse_answer(inner)
    if answer.number or answer.words:
        return answer
    return _find_stated_answer(inner) or (
        _answer_without_mark(inner) if _PROSE.search(_TEXT.sub("", inner)) else answer
    )


def _last_mark(tokens: Iterable[re.Match[str]]) -> tuple[int, int] | None:
    """Return the start and end of the text inside the last closed mark.

    `tokens` are the matches of opening and closing brackets in a text, in order. A mark begins with an opening bracket
    of more than one character, such as `<answer>`. A plain `{` begins no mark, but is matched with its closing `}`, so
    that this `}` does not end a mark.
    """
    opened: list[tuple[int, bool]] = []
    last: tuple[int, int] | None = None
    for token in tokens:
        if token["open"]:
            opened.append((token.end(), len(token[0]) > 1))
        elif token["close"] and opened:
            start, mark = opened.pop()
            last = (start, token.start()) if mark else last
    return last


def _find_stated_answer(text: str) -> Answer | None:
    """Return the answer after the last "answer is" of a text.

    Phrases that only rate an answer, such as "the answer is correct", are skipped. Returns None if the text has no
    "answer is".
    """
    matches, end = [*_SAID.finditer(text)], len(text)
    for match in reversed(matches):
        part = text[match.end() : end].partition("\n")[0]
        end = match.start()
        for piece in (_SENTENCE.split(part, maxsplit=1)[0], part):
            parsed = number(piece)
            words = _parse_words(piece)
            if words in _REMARKS and match is not matches[0]:
                break
            if parsed or words:
                return Answer(text[-TAIL:], False, parsed, words)
            if len(piece) <= LONGEST and _SEVERAL.fullmatch(tidy(piece)):
                return _parse_answer(piece)
        else:
            break
    return Answer(text[-TAIL:].translate(_CHARACTERS), False) if matches else None


def _answer_without_mark(text: str) -> Answer:
    """Return the answer of a text that has no marks such as `<answer>`.

    If the text consists of several numbers, the whole text is the answer. Otherwise the result's `text` is the end of
    the text, and `marked` is false, because the answer may be anywhere in that end.
    """
    if len(text) <= LONGEST and _SEVERAL.fullmatch(tidy(text)):
        return _parse_answer(text)
    return Answer(text[-TAIL:].translate(_CHARACTERS), False, number(text), _parse_words(text))


def _parse_answer(text: str) -> Answer:
    parsed = number(text)
    return Answer(str(parsed) if parsed else tidy(text), True, parsed, "" if parsed else _parse_words(text))


def _parse_words(text: str) -> str:
    """Return the words of a text in lower case, or a multiple-choice answer's letter.

    Returns "" if the text contains anything except words, because such a text may be mathematics.
    """
    plain = " ".join(_TEXT.sub(r" \1 ", tidy(text)).split()) if len(text) <= LONGEST else ""
    if letter := _LETTER.fullmatch(plain):
        return letter[1]
    if (
        not _WORDS.fullmatch(plain)
        or {*plain.lower().split()} & _NO_UNITS
        or not any(len(word) > 2 for word in plain.split())
    ):
        return ""
    return plain.lower()


def _equal_numbers(a: ParsedNumber, b: ParsedNumber) -> bool:
    """Return whether two numbers are equal.

    If only one of the numbers has a percent sign, two readings of the sign are tried: 50% is 0.5, and 50% is 50. The
    numbers are equal if they are equal in one of these readings. If one of the numbers has a decimal point, the numbers
    are also equal if they agree to about six decimals.
    """
    pairs = [(a.value, b.value)]
    if a.percent != b.percent:
        pairs.append((a.value / 100, b.value) if a.percent else (a.value, b.value / 100))
    return any(x == y or ((a.rounded or b.rounded) and _close_numbers(x, y)) for x, y in pairs)


def _close_numbers(x: Fraction, y: Fraction) -> bool:
    """Return whether two numbers agree to six decimals, as in math-verify.

    Numbers below 0.05 must agree to five significant digits, which is stricter.
    """
    return abs(x - y) <= min(Fraction(1, 2_000_000), max(abs(x), abs(y)) / 100_000)
