"""Expressions of the syntax tree to values: params substituted, arithmetic done, units kept.

Invariant: `evaluate` gives an Expr without params (number, bool, string, quantity or list of them) whose numbers are
finite, or raises a Fault. A Fault without diagnostics means that the mistake was told where it was made, so that no
second one follows from it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

from ..diagnostics import Diagnostic, Fault, Severity, Span, nearest
from ..ir.graph import Expr
from ..ir.kinds import UNIT_NAMES
from . import ast

PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY = {f"{p}i": 1024 ** (i + 1) for i, p in enumerate("KMGTP")}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
RATED = {p + base for p in (*PREFIXES, *BINARY) for base in ("B", "FLOP")}
SECOND = ("s", "sec", "secs", "second", "seconds")
# What has a unit when two values with units meet.
PRODUCTS = {
    ("B", "/", "s"): "B/s",
    ("FLOP", "/", "s"): "FLOP/s",
    ("B/s", "*", "s"): "B",
    ("s", "*", "B/s"): "B",
    ("B", "/", "B/s"): "s",
    ("FLOP", "/", "FLOP/s"): "s",
}


@dataclass
class Problems:
    """The diagnostics of a compilation, in the order of their telling."""

    found: list[Diagnostic] = field(default_factory=list)

    def tell(self, code: str, message: str, span: Span, help: str = "", severity: Severity = "error") -> None:
        self.found.append(Diagnostic(code, message, span, help, severity))

    def catching(self) -> Self:
        """For `with`: keeps what the body raises, so that the next statement is looked at too."""
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if not isinstance(error, Fault):
            return False
        self.found.extend(error.diagnostics)
        return True


TOLD = Fault()


def mistake(code: str, message: str, span: Span, help: str = "", related: tuple[tuple[Span, str], ...] = ()) -> Fault:
    return Fault(Diagnostic(code, message, span, help, related=related))


@dataclass(frozen=True)
class Names:
    """What a bare word may mean: params with their values (None: its mistake was told already), and other names by what
    they are."""

    params: Mapping[str, Expr | None]
    others: Mapping[str, str] = field(default_factory=dict)

    def param(self, name: str, span: Span) -> Expr:
        if name in self.params:
            value = self.params[name]
            if value is None:
                raise TOLD
            return value
        if name in self.others:
            raise mistake("bad-value", f"`{name}` is a {self.others[name]}; a value stands here", span)
        raise mistake("unknown-name", f"nothing is called `{name}`", span, nearest(name, self.params))


def evaluate(expr: ast.Expr, names: Names) -> Expr:
    """The value of a constant expression."""
    match expr:
        case ast.Literal_():
            return literal(expr)
        case ast.NameExpr():
            value = names.param(expr.text, expr.span)
            return Expr(value.kind, value.value, value.args, value.keys, value.unit, expr.span)
        case ast.Neg():
            return negate(evaluate(expr.operand, names), expr.span)
        case ast.List():
            return Expr("list", args=tuple(evaluate(item, names) for item in expr.items), span=expr.span)
        case ast.Call():
            raise mistake("bad-value", f"a value stands here, and `{expr.name.text}(…)` is a call", expr.span)
    right = expr.right
    if isinstance(right, ast.NameExpr) and expr.op == "//" and right.text not in (*names.params, *names.others):
        help = nearest(right.text, names.params)
        help = help if help.startswith("did") else "comments begin with `#`"
        raise mistake("unknown-name", f"nothing is called `{right.text}`", right.span, help)
    left = evaluate(expr.left, names)
    if (
        isinstance(right, ast.NameExpr)
        and left.unit
        and expr.op == "/"
        and right.text not in (*names.params, *names.others)
    ):
        help = "a rate has the unit `B/s` or `FLOP/s`, as in `300 MB/s`"
        if isinstance(expr.left, ast.Literal_) and expr.left.unit in RATED and right.text.lower() in SECOND:
            help = f"did you mean `{expr.left.unit}/s`?"
        raise mistake("unknown-unit", f"`{right.text}` is no unit", right.span, help)
    return fold(expr.op, left, evaluate(expr.right, names), expr.span)


def literal(expr: ast.Literal_) -> Expr:
    if expr.kind == "quantity":
        assert isinstance(expr.value, int | float) and not isinstance(expr.value, bool)
        factor, unit = _unit(expr.unit)
        value = expr.value * factor
        if not math.isfinite(value):
            raise mistake("bad-value", "the number is too large", expr.span)
        whole = isinstance(value, float) and unit != "s" and value.is_integer() and value < 2**63
        return Expr("quantity", int(value) if whole else value, unit=unit, span=expr.span)
    kind = "number" if expr.kind in ("int", "float") else expr.kind
    return Expr(kind, expr.value, span=expr.span)


def negate(value: Expr, span: Span) -> Expr:
    return Expr(value.kind, -number_of(value), unit=value.unit, span=span)


def fold(op: str, left: Expr, right: Expr, span: Span) -> Expr:
    """`left op right`, both constant."""
    a = number_of(left)
    b = number_of(right)
    unit = _result_unit(op, left, right, span)
    if op in COMPARISONS:
        return Expr("bool", COMPARISONS[op](a, b), span=span)
    if op in ("/", "//", "%") and b == 0:
        raise mistake("division-by-zero", f"`{op}` divides by zero", right.span, _worth(right))
    try:
        value = ARITHMETIC[op](a, b)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or abs(value) > 1e300 or (isinstance(value, int) and abs(value) >= 2**63):
        raise mistake("bad-value", "the number is too large", span)
    return Expr("quantity" if unit else "number", value, unit=unit, span=span)


def number_of(value: Expr) -> float:
    """The number of a number or quantity."""
    if value.kind in ("number", "quantity") and isinstance(value.value, int | float):
        return value.value
    raise mistake("bad-value", f"arithmetic is for numbers, not for `{value}`", value.span)


def _result_unit(op: str, left: Expr, right: Expr, span: Span) -> str:
    a = left.unit
    b = right.unit
    if op in COMPARISONS or op in ("+", "-", "%"):
        if a == b:
            return a
    elif not b:
        return a
    elif op == "*" and not a:
        return b
    elif op in ("/", "//") and a == b:
        return ""
    elif (a, op, b) in PRODUCTS:
        return PRODUCTS[a, op, b]
    raise mistake("bad-unit", f"`{op}` cannot join {UNIT_NAMES[a]} and {UNIT_NAMES[b]}", span)


def _unit(text: str) -> tuple[float, str]:
    """What one of the unit is, in its base unit, and the base unit."""
    if text in SECONDS:
        return SECONDS[text], "s"
    head, rate = (text[:-2], "/s") if text.endswith("/s") else (text, "")
    for base in ("FLOP", "B"):
        if head.endswith(base):
            return {**PREFIXES, **BINARY}[head.removesuffix(base)], base + rate
    raise AssertionError(text)


def _worth(value: Expr) -> str:
    return "it is 0 with the params that stand here" if value.kind == "number" else ""
