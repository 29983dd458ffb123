"""Kinds of attribute values: numbers, words, strings, quantities, special forms.

Invariant: `str(kind)` describes the values that a kind accepts. `kind.value(expr)` returns the Python value of an
expression that was read as this kind. For an expression of another kind, the result is None; only a plan that was
edited by hand has such an expression. dsl/attributes.py reads the text of a program as a kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from .evaluation import Draw
from .graph import Expr, Value

# The largest meaningful count. The product of two still fits the integers of every format.
MOST = 10**8
UNIT_NAMES = {
    "": "a plain number",
    "B": "bytes",
    "B/s": "bytes a second",
    "FLOP": "FLOP",
    "FLOP/s": "FLOP a second",
    "s": "a time",
}


class ValueKind(Protocol):
    """The kind of an attribute's values."""

    def value(self, expr: Expr) -> Any: ...


@dataclass(frozen=True)
class NumericKind:
    """A plain number from `low` to `high`; with `whole`, a whole number."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    above: bool = False  # `low` itself is excluded

    def value(self, expr: Expr) -> int | float | None:
        return _number(expr, self.whole)

    def __str__(self) -> str:
        noun = "a whole number" if self.whole else "a number"
        if self.low == -math.inf:
            return noun
        if self.high < MOST:
            return (
                f"{noun} {'above' if self.above else 'from'} {self.low:g} {'and at most' if self.above else 'to'} "
                f"{self.high:g}"
            )
        return f"{noun} above {self.low:g}" if self.above else f"{noun} of {self.low:g} or more"


@dataclass(frozen=True)
class FlagKind:
    """`true` or `false`."""

    def value(self, expr: Expr) -> bool | None:
        return expr.value if isinstance(expr.value, bool) else None

    def __str__(self) -> str:
        return join_words(("true", "false"))


@dataclass(frozen=True)
class WordsKind:
    """One word out of several fixed words."""

    words: tuple[str, ...]

    def value(self, expr: Expr) -> str | None:
        return _text(expr)

    def __str__(self) -> str:
        return join_words(self.words)


@dataclass(frozen=True)
class ExtentKind:
    """How much of something: a word, a number, or a list of parts.

    The words of a list have the order of `parts`.
    """

    words: tuple[str, ...]
    units: str
    parts: tuple[str, ...]

    def value(self, expr: Expr) -> str | int | tuple[str, ...] | None:
        if expr.kind == "list":
            return tuple(sorted(_texts(expr), key=self.parts.index))
        return int(expr.value) if isinstance(expr.value, int | float) else _text(expr)

    def __str__(self) -> str:
        words = ", ".join(f"`{word}`" for word in self.words)
        return f"{words}, a number of {self.units}, or a list of {join_words(self.parts, ' and ')}"


@dataclass(frozen=True)
class StringKind:
    """A string; with `several`, also a list of strings.

    `known` are strings that users are likely to write without quotes by mistake.
    """

    several: bool = False
    known: tuple[str, ...] = ()

    def value(self, expr: Expr) -> str | tuple[str, ...] | None:
        return _texts(expr) if self.several else _text(expr)

    def __str__(self) -> str:
        return "a string, or a list of strings" if self.several else "a string"


@dataclass(frozen=True)
class NameKind:
    """The name of something that the program declares, written without quotes.

    With `several`, a list of names is also accepted.
    """

    several: bool = False

    def value(self, expr: Expr) -> str | tuple[str, ...] | None:
        return _texts(expr) if self.several else _text(expr)

    def __str__(self) -> str:
        return "a name, or a list of names" if self.several else "a name"


@dataclass(frozen=True)
class TrackersKind:
    """A list of trackers: names without quotes, and classes in the user's files."""

    def value(self, expr: Expr) -> tuple[str, ...]:
        return _texts(expr)

    def __str__(self) -> str:
        return 'a list of names of trackers and of `"file.py:Class"`'


@dataclass(frozen=True)
class QuantityKind:
    """A number above 0 with a unit.

    With `whole`, the value in the base unit, such as bytes, is rounded down to a whole number.
    """

    unit: str
    example: str
    whole: bool = False

    def value(self, expr: Expr) -> int | float | None:
        return _number(expr, self.whole)

    def __str__(self) -> str:
        return f"{UNIT_NAMES[self.unit]} above 0, as `{self.example}`"


@dataclass(frozen=True)
class CountsKind:
    """A list of counts: whole numbers of 1 or more."""

    def value(self, expr: Expr) -> tuple[int, ...]:
        return tuple(int(part.value) for part in expr.args if isinstance(part.value, int | float))

    def __str__(self) -> str:
        return "a list of whole numbers of 1 or more"


@dataclass(frozen=True)
class DrawsKind:
    """A list of calls of `draw`, each with a generation and its sampling settings."""

    def value(self, expr: Expr) -> tuple[Draw, ...]:
        return tuple(self._draw(call) for call in expr.args if call.args)

    def expr(self, draws: tuple[Draw, ...]) -> Expr:
        """Return the expression of `draws`; the inverse of the method `value`."""
        calls = []
        for draw in draws:
            stated = {"samples": draw.samples or None, "temperature": draw.temperature}
            numbers = {key: Expr("number", number) for key, number in stated.items() if number is not None}
            args = (Expr("word", draw.generation), *numbers.values())
            calls.append(Expr("call", "draw", args, ("", *numbers)))
        return Expr("list", args=tuple(calls))

    def _draw(self, call: Expr) -> Draw:
        generation, *numbers = call.args
        stated = dict(zip(call.keys[1:], numbers, strict=True))
        samples = _number(stated["samples"], is_whole=True) if "samples" in stated else 0
        temperature = _number(stated["temperature"], is_whole=False) if "temperature" in stated else None
        return Draw(str(generation.value), int(samples or 0), temperature, call.span)

    def __str__(self) -> str:
        return "a list of `draw(GENERATION, samples = …, temperature = …)`"


@dataclass(frozen=True)
class SettingsKind:
    """A call with settings, all as keyword arguments.

    `declared` is a subclass of `DeclaredAttributes`, whose attributes are the arguments. A subclass says which Python
    value the call stands for.
    """

    name: str
    declared: Any

    def value(self, expr: Expr) -> Any:
        raise NotImplementedError

    def settings(self, value: Any) -> Any:
        """Return the object of the class `declared` that has the settings of a value."""
        raise NotImplementedError

    def __str__(self) -> str:
        first = next(iter(self.declared.kinds()))
        return f"`{self.name}({first} = …)`"


@dataclass(frozen=True)
class VariablesKind:
    """A call of the word `call`, whose arguments are named settings with plain values."""

    call: str

    def value(self, expr: Expr) -> tuple[tuple[str, Value], ...]:
        return tuple((key, item.value) for key, item in zip(expr.keys, expr.args, strict=True))

    def expr(self, settings: tuple[tuple[str, Value], ...]) -> Expr:
        """Return the expression of `settings`; the inverse of the method `value`."""
        args = tuple(
            Expr("bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number", value)
            for _, value in settings
        )
        return Expr("call", self.call, args, tuple(name for name, _ in settings))

    def __str__(self) -> str:
        return f"`{self.call}(NAME = VALUE, …)`"


@dataclass(frozen=True, eq=False)
class FormKind:
    """An expression whose meaning depends on its node (dsl/node_calls.py reads it).

    `takes` describes the expressions that are accepted. With `word`, the value is a word instead of an expression.
    """

    takes: str
    word: bool = False

    def value(self, expr: Expr) -> Expr | str | None:
        return _text(expr) if self.word else expr

    def __str__(self) -> str:
        return self.takes


COUNT = NumericKind(1, MOST, whole=True)
COUNT_OR_0 = NumericKind(0, MOST, whole=True)
SHARE = NumericKind(0, 1, above=True)
BYTES = QuantityKind("B", "64 GB")
SIZE = QuantityKind("B", "64 GB", whole=True)
RATE = QuantityKind("B/s", "25 GB/s")
FLOPS = QuantityKind("FLOP/s", "376 TFLOP/s")
TIME = QuantityKind("s", "10 min")
DTYPE = WordsKind(("f32", "bf16"))

CALL = FormKind('a call, `NAME(…)`, `"file.py:function"` or `"file.py:function"(…)`')
KEEP = FormKind("a comparison of a column or state with a number, or a call")
PER = FormKind("`row`, `batch` or a column", word=True)
TEMPERATURE = FormKind("a number of 0 or more, or a column or state that the node reads")
ENVIRONMENT = FormKind('`"file.py:Class"`')
AGENT = FormKind('`"file.py:function"` or `"file.py:function"(…)`')
TOOL_CALLS = FormKind('`hermes`, `mistral`, `llama3` or `"file.py:function"`')
LOSS = FormKind("an expression of loss terms")
OPTIMIZER = FormKind("a call of an optimizer")
REDUCE = FormKind("`tokens`, `sequences` or `constant(n)`")


def join_words(words: tuple[str, ...], last: str = " or ") -> str:
    """Return a text that lists words of the language: `a`, `b` or `c`."""
    quoted = [f"`{word}`" for word in words]
    return last.join([", ".join(quoted[:-1]), quoted[-1]]) if len(quoted) > 1 else "".join(quoted)


def _number(expr: Expr, is_whole: bool) -> int | float | None:
    return None if not isinstance(expr.value, int | float) else int(expr.value) if is_whole else float(expr.value)


def _text(expr: Expr) -> str | None:
    return expr.value if isinstance(expr.value, str) else None


def _texts(expr: Expr) -> tuple[str, ...]:
    return tuple(str(part.value) for part in (expr.args if expr.kind == "list" else (expr,)))
