"""The attributes of every statement: one table, from statement and name to type.

Invariant: what is not in the table is refused as unknown; nothing is ignored.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..diagnostics import Span, nearest
from ..hardware.cluster import DEVICES
from ..ir.graph import Expr
from . import ast, guesses
from .expressions import UNIT_NAMES, Names, Problems, evaluate, mistake

# Beyond this no count means anything, and products of two still fit the integers of every format.
MOST = 10**8


class Type(Protocol):
    """What an attribute takes; `read` gives its value or raises a Fault."""

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr: ...


@dataclass(frozen=True)
class Number:
    """A plain number from `low` to `high`; `whole` for a count."""

    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    above: bool = False  # `low` itself is out

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        return self.fit(f"`{key}`", evaluate(expr, names), origin(expr, names))

    def fit(self, what: str, value: Expr, related: tuple[tuple[Span, str], ...] = ()) -> Expr:
        """The value as this number, or a Fault that calls it `what`."""
        if value.kind == "quantity":
            raise mistake("bad-unit", f"{what} takes a plain number, and this has a unit", value.span, related=related)
        number = value.value
        if isinstance(number, int | float) and number > self.high == MOST:
            raise mistake("bad-value", f"{what} is too large", value.span, related=related)
        fits = value.kind == "number" and isinstance(number, int | float) and self.low <= number <= self.high
        if not fits or (self.above and number == self.low) or (self.whole and not float(number).is_integer()):  # type: ignore[arg-type]
            raise mistake("bad-value", f"{what} takes {self}, not {shown(value)}", value.span, related=related)
        assert isinstance(number, int | float)
        return Expr("number", int(number) if self.whole else number, span=value.span)

    def __str__(self) -> str:
        what = "a whole number" if self.whole else "a number"
        if self.low == -math.inf:
            return what
        if self.high < MOST:
            return f"{what} {'above' if self.above else 'from'} {self.low:g} {'and at most' if self.above else 'to'} {self.high:g}"
        return f"{what} above {self.low:g}" if self.above else f"{what} of {self.low:g} or more"


COUNT = Number(1, MOST, whole=True)


@dataclass(frozen=True)
class Below:
    """A number from 0 to below 1; with `pair`, a list of two."""

    pair: bool = False

    def fit(self, what: str, value: Expr, related: tuple[tuple[Span, str], ...] = ()) -> Expr:
        """The value as this number or list, or a Fault that calls it `what`."""
        numbers = value.args if self.pair and value.kind == "list" else (value,)
        right = [n for n in numbers if n.kind == "number" and isinstance(n.value, int | float) and 0 <= n.value < 1]
        if not len(right) == len(numbers) == 1 + self.pair:
            if self.pair:
                raise mistake("bad-value", f"{what} takes two numbers from 0 to below 1", value.span, "write `[0.9, 0.999]`", related)
            raise mistake("bad-value", f"{what} takes a number from 0 to below 1, not {shown(value)}", value.span, related=related)
        return value


@dataclass(frozen=True)
class Words:
    """One of some words."""

    words: tuple[str, ...]

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if isinstance(expr, ast.NameExpr) and expr.text in self.words:
            return Expr("word", expr.text, span=expr.span)
        if isinstance(expr, ast.NameExpr) and expr.text in names.params:
            value = evaluate(expr, names)
            if value.kind == "string" and value.value in self.words:
                return Expr("word", value.value, span=expr.span)
        what = f"`{expr.text}`" if isinstance(expr, ast.NameExpr) else "this"
        help = nearest(expr.text if isinstance(expr, ast.NameExpr) else "", self.words)
        raise mistake("unknown-option", f"{what} is no word for `{key}`", expr.span, help)


@dataclass(frozen=True)
class String:
    """A string; with `several`, a list of them too. `known` are those that someone may write without quotes by mistake."""

    several: bool = False
    known: tuple[str, ...] = ()

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if isinstance(expr, ast.NameExpr) and expr.text not in names.params:
            close = difflib.get_close_matches(expr.text, self.known, n=1)
            help = f'write `"{close[0] if close else expr.text}"`'
            raise mistake("bad-value", f"`{key}` takes a string between double quotes", expr.span, help)
        value = evaluate(expr, names)
        items = value.args if self.several and value.kind == "list" else (value,)
        if any(item.kind != "string" for item in items):
            help = f'write `{key} = "{expr.text}"`' if isinstance(expr, ast.NameExpr) else ""
            raise mistake("bad-value", f"`{key}` takes a string between double quotes", expr.span, help)
        if self.several and not all(item.value for item in items):
            raise mistake("bad-value", f"`{key}` takes strings of one character or more", expr.span, "every text holds the empty one")
        return value


@dataclass(frozen=True)
class Quantity:
    """A number above 0 with a unit."""

    unit: str
    example: str

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        value = evaluate(expr, names)
        # `376 TFLOP` is how a datasheet writes TFLOP/s.
        if value.unit != self.unit and not (self.unit == "FLOP/s" and value.unit == "FLOP"):
            help = f"write a number and its unit, as in `{self.example}`"
            raise mistake(
                "bad-unit", f"`{key}` takes {UNIT_NAMES[self.unit]}, not {UNIT_NAMES[value.unit]}", expr.span, help, origin(expr, names)
            )
        if not isinstance(value.value, int | float) or value.value <= 0:
            raise mistake("bad-value", f"`{key}` is above 0", expr.span, related=origin(expr, names))
        return Expr("quantity", value.value, unit=self.unit, span=expr.span)


BYTES = Quantity("B", "64 GB")
RATE = Quantity("B/s", "25 GB/s")
FLOPS = Quantity("FLOP/s", "376 TFLOP/s")
TIME = Quantity("s", "10 min")


@dataclass(frozen=True)
class Counts:
    """A list of counts."""

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.List) or not expr.items:
            raise mistake("bad-value", f"`{key}` takes a list of whole numbers", expr.span)
        return Expr("list", args=tuple(COUNT.read(key, item, names) for item in expr.items), span=expr.span)


@dataclass(frozen=True)
class AnyName:
    """A bare word that the statement looks up itself; with `several`, a list of them too."""

    several: bool = False

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if self.several and isinstance(expr, ast.List):
            return Expr("list", args=tuple(AnyName().read(key, item, names) for item in expr.items), span=expr.span)
        if not isinstance(expr, ast.NameExpr) or "." in expr.text:
            raise mistake("bad-value", f"`{key}` takes a name", expr.span)
        return Expr("word", expr.text, span=expr.span)


@dataclass(frozen=True)
class Reduce:
    """`tokens`, `sequences` or `constant(n)`."""

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.Call):
            return Words(("tokens", "sequences", "constant")).read(key, expr, names) if not _bare(expr) else _no_constant(expr)
        if expr.name.text != "constant":
            help = nearest(expr.name.text, ("tokens", "sequences", "constant"))
            raise mistake("unknown-option", f"`{expr.name.text}` is no word for `reduce`", expr.name.span, help)
        if len(expr.args) != 1 or (expr.args[0].key is not None and expr.args[0].key.text != "n"):
            return _no_constant(expr)
        n = COUNT.read("constant", expr.args[0].value, names)
        return Expr("call", "constant", (n,), ("n",), span=expr.span)


def _bare(expr: ast.Expr) -> bool:
    return isinstance(expr, ast.NameExpr) and expr.text == "constant"


def _no_constant(expr: ast.Expr) -> Expr:
    raise mistake("bad-value", "`constant` takes one number", expr.span, "write `constant(1024)`")


# Those that need the node have types of their own (`types` of calls.py). What each means stands in the pages of ../reference.
TABLE: dict[str, dict[str, Type]] = {
    "worker": {"model": AnyName()},
    "source": {},
    "generate": {
        "samples": COUNT,
        "top_p": Number(0, 1, above=True),
        "top_k": COUNT,
        "stop": String(several=True),
        "max_tokens": COUNT,
        "partial": COUNT,
        "turns": COUNT,
        "timeout": TIME,
    },
    "infer": {},
    "update": {
        "epochs": COUNT,
        "mini_batch": COUNT,
        "clip_grad": Number(0, above=True),
        "after": Number(0, MOST, whole=True),
        "every": COUNT,
    },
    "function": {"refill": COUNT},
    "sample edge": {"stream": COUNT, "balance": Words(("tokens",))},
    "resharding edge": {
        "staleness": Number(0, MOST, whole=True),
        "every": COUNT,
    },
    "cluster": {
        "device": String(known=tuple(DEVICES)),
        "nodes": COUNT,
        "devices_per_node": COUNT,
        "network": RATE,
        "memory": BYTES,
        "memory_bandwidth": RATE,
        "host_link": RATE,
        "device_link": RATE,
        "fabric": RATE,
        "host_memory": BYTES,
        "flops_bf16": FLOPS,
        "flops_f32": FLOPS,
        "launch": TIME,
    },
    "model": {"dtype": Words(("f32", "bf16"))},
    "layout": {
        **dict.fromkeys(("tp", "cp", "dp", "ep", "etp"), COUNT),
        # Chunks of layers are counted one by one, before it is known whether there are as many.
        "pp": Number(1, 10_000, whole=True),
        "vpp": Number(1, 100, whole=True),
        "stages": Counts(),
        "zero": Number(0, 3, whole=True),
        "cp_kind": Words(("ring", "ulysses")),
    },
    "dock": {
        "mode": Words(("distributed", "central")),
        "deadline": TIME,
        "replicas": COUNT,
        "capacity": BYTES,
        "imbalance": Number(1),
    },
    "reshard": {"mode": Words(("swap", "naive")), "order": Words(("direct", "staged")), "bucket": BYTES},
    "evaluate": {
        "every": COUNT,
        "report": AnyName(several=True),
        "samples": COUNT,
        "temperature": Number(0),
        "label": String(),
    },
    "run": {
        "iterations": COUNT,
        "seed": Number(0, 2**53, whole=True),
        "save": COUNT,
        "keep": COUNT,
        "resume": String(),
        "restarts": Number(0, MOST, whole=True),
        "on_nan": Words(("stop", "skip")),
        "warn_flat": Number(0, MOST, whole=True),
        "warn_truncated": Number(0, 1),
        "warn_entropy": Number(0, 1),
        "warn_kl": Number(0),
    },
}


def read(attrs: tuple[ast.Attr, ...], statement: str, types: Mapping[str, Type], names: Names, problems: Problems) -> dict[str, Expr]:
    """The attributes of a statement by name; what is wrong with each goes to `problems`."""
    values: dict[str, Expr] = {}
    seen: dict[str, Span] = {}
    for attr in attrs:
        key = attr.key.text
        with problems.catching():
            if key in seen:
                raise mistake("duplicate-name", f"`{key}` is given twice", attr.key.span, related=((seen[key], "given here first"),))
            seen[key] = attr.key.span
            if key not in types:
                help = guesses.attribute(statement, key) or nearest(key, types) or ("" if types else "it has none")
                raise mistake("unknown-attribute", f"{_article(statement)} has no attribute `{key}`", attr.key.span, help)
            values[key] = types[key].read(key, attr.value, names)
    return values


def origin(expr: ast.Expr, names: Names) -> tuple[tuple[Span, str], ...]:
    """Where a value comes from that a param brought here."""
    value = names.params.get(expr.text) if isinstance(expr, ast.NameExpr) else None
    return ((value.span, f"`{value}` comes from here"),) if value is not None and value.span.line else ()


def shown(value: Expr) -> str:
    return "a list" if value.kind == "list" else f"`{value}`"


def _article(statement: str) -> str:
    return f"a {statement}" if statement.endswith(" edge") else f"`{statement}`"
