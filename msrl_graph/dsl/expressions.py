"""Evaluation of constant expressions, with params and units.

Invariant: `evaluate` returns an Expr without params, or raises a Fault. The Expr is a number, bool, string or
quantity, or a list of these, and its numbers are finite. A Fault without diagnostics means that the mistake is already
reported at its origin.
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
BINARY = {f"{prefix}i": 1024 ** (power + 1) for power, prefix in enumerate("KMGTP")}
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
RATED = {prefix + base for prefix in (*PREFIXES, *BINARY) for base in ("B", "FLOP")}
SECOND = ("s", "sec", "secs", "second", "seconds")
# The unit of a product or quotient of two values with units.
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
    """The diagnostics of a compilation, in the order in which they are reported."""

    diagnostics: list[Diagnostic] = field(default_factory=list)

    def report(self, code: str, message: str, span: Span, help: str = "", severity: Severity = "error") -> None:
        self.diagnostics.append(Diagnostic(code, message, span, help, severity))

    def catching(self) -> Self:
        """Return a context manager that collects the diagnostics of a Fault.

        If the block raises a Fault, execution continues after the `with` block.
        """
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if not isinstance(error, Fault):
            return False
        self.diagnostics.extend(error.diagnostics)
        return True


ALREADY_REPORTED = Fault()


def mistake(code: str, message: str, span: Span, help: str = "", related: tuple[tuple[Span, str], ...] = ()) -> Fault:
    return Fault(Diagnostic(code, message, span, help, related=related))


@dataclass(frozen=True)
class Names:
    """The meanings of the names that an expression can use.

    - `params`: the value of each param. The value is None for a param with a mistake, which is already reported.
    - `others`: the other declared names, each with its kind.
    """

    params: Mapping[str, Expr | None]
    others: Mapping[str, str] = field(default_factory=dict)

    def param(self, name: str, span: Span) -> Expr:
        if name in self.params:
            value = self.params[name]
            if value is None:
                raise ALREADY_REPORTED
            return value
        if name in self.others:
            raise mistake("bad-value", f"`{name}` is a {self.others[name]}, not a value", span)
        raise mistake("unknown-name", f"unknown name `{name}`", span, nearest(name, self.params))


def evaluate(expr: ast.Expr, names: Names) -> Expr:
    """Evaluate a constant expression, or raise a Fault."""
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
            raise mistake("bad-value", f"expected a value, not the call `{expr.name.text}(…)`", expr.span)
    right = expr.right
    if isinstance(right, ast.NameExpr) and expr.op == "//" and right.text not in (*names.params, *names.others):
        help = nearest(right.text, names.params)
        help = help if help.startswith("did") else "comments begin with `#`"
        raise mistake("unknown-name", f"unknown name `{right.text}`", right.span, help)
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
        raise mistake("unknown-unit", f"unknown unit `{right.text}`", right.span, help)
    return fold(expr.op, left, evaluate(expr.right, names), expr.span)


def literal(expr: ast.Literal_) -> Expr:
    if expr.kind == "quantity":
        assert isinstance(expr.value, int | float) and not isinstance(expr.value, bool)
        factor, unit = _parse_unit(expr.unit)
        value = expr.value * factor
        if not math.isfinite(value):
            raise mistake("bad-value", "the number is too large", expr.span)
        is_integer = isinstance(value, float) and unit != "s" and value.is_integer() and value < 2**63
        return Expr("quantity", int(value) if is_integer else value, unit=unit, span=expr.span)
    kind = "number" if expr.kind in ("int", "float") else expr.kind
    return Expr(kind, expr.value, span=expr.span)


def negate(value: Expr, span: Span) -> Expr:
    return Expr(value.kind, -number_of(value), unit=value.unit, span=span)


def fold(op: str, left: Expr, right: Expr, span: Span) -> Expr:
    """Evaluate `left op right`, where both operands are constant."""
    left_number = number_of(left)
    right_number = number_of(right)
    unit = _result_unit(op, left, right, span)
    if op in COMPARISONS:
        return Expr("bool", COMPARISONS[op](left_number, right_number), span=span)
    if op in ("/", "//", "%") and right_number == 0:
        raise mistake("division-by-zero", f"`{op}` divides by zero", right.span, _zero_help(right))
    try:
        value = ARITHMETIC[op](left_number, right_number)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or abs(value) > 1e300 or (isinstance(value, int) and abs(value) >= 2**63):
        raise mistake("bad-value", "the number is too large", span)
    return Expr("quantity" if unit else "number", value, unit=unit, span=span)


def number_of(value: Expr) -> float:
    """Return the number in a value, or raise a Fault if the value is not numeric."""
    if value.kind in ("number", "quantity") and isinstance(value.value, int | float):
        return value.value
    raise mistake("bad-value", f"arithmetic is for numbers, not for `{value}`", value.span)


def _result_unit(op: str, left: Expr, right: Expr, span: Span) -> str:
    left_unit = left.unit
    right_unit = right.unit
    if op in COMPARISONS or op in ("+", "-", "%"):
        if left_unit == right_unit:
            return left_unit
    elif not right_unit:
        return left_unit
    elif op == "*" and not left_unit:
        return right_unit
    elif op in ("/", "//") and left_unit == right_unit:
        return ""
    elif (left_unit, op, right_unit) in PRODUCTS:
        return PRODUCTS[left_unit, op, right_unit]
    raise mistake("bad-unit", f"`{op}` cannot combine {UNIT_NAMES[left_unit]} and {UNIT_NAMES[right_unit]}", span)


def _parse_unit(text: str) -> tuple[float, str]:
    """Return a unit's factor to its base unit, and the base unit, such as `B` or `s`."""
    if text in SECONDS:
        return SECONDS[text], "s"
    amount, rate = (text[:-2], "/s") if text.endswith("/s") else (text, "")
    for base in ("FLOP", "B"):
        if amount.endswith(base):
            return {**PREFIXES, **BINARY}[amount.removesuffix(base)], base + rate
    raise AssertionError(text)


def _zero_help(value: Expr) -> str:
    return "it is 0 with the current params" if value.kind == "number" else ""
