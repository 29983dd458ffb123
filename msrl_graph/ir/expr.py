"""Expressions of a program, in which each param is replaced by its value.

Invariant: an expression is immutable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..diagnostics import NOWHERE, Span

Value = bool | int | float | str | None
OptionValue = Value | tuple[str, ...]  # of an engine's option; a tuple is a list of words


def format_option(value: OptionValue) -> str:
    """Format the value of an engine's option as a program states it."""
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Expr:
    """An expression of a program, in which each param is replaced by its value.

    - `kind`: `number`, `string`, `bool`, `quantity`, `word` (an option's word), `column`, `state`, `call`, `list`,
      `neg` (a negated number) or an operator sign.
    - `value`: the literal, or the name of the column, state or function.
    - `unit`: the unit of a quantity's value: bytes, bytes/s, FLOP/s or seconds.
    - `args`: the operands of an operator, the items of a list, or the arguments of a call.
    - `keys`: the argument names of a call; "" for a positional argument.
    """

    kind: str
    value: Value = None
    args: tuple[Expr, ...] = ()
    keys: tuple[str, ...] = ()
    unit: str = ""
    span: Span = NOWHERE

    def literal(self) -> Any:
        """Return the Python value of a literal, a word, or a list of literals and words."""
        if self.kind == "list":
            return [part.literal() for part in self.args]
        return -self.args[0].literal() if self.kind == "neg" else self.value

    def calls(self) -> tuple[Expr, ...]:
        """Return the outermost calls in the expression.

        If the expression is itself a call, the result has only this call.
        """
        return (self,) if self.kind == "call" else tuple(call for part in self.args for call in part.calls())

    def options(self) -> dict[str, Any]:
        """Return the options of a call: the arguments that are not columns, by name."""
        return {
            key: argument.literal()
            for key, argument in zip(self.keys, self.args, strict=True)
            if argument.kind != "column"
        }

    def columns(self) -> dict[str, str]:
        """Return the columns that a call passes as named arguments, by parameter.

        For example, the result for `f(reward = score)` is `{"reward": "score"}` if `score` is a column.
        """
        return {
            key: str(argument.value)
            for key, argument in zip(self.keys, self.args, strict=True)
            if argument.kind == "column"
        }

    def __str__(self) -> str:
        if self.kind == "call":
            inner = (
                f"{key} = {argument}" if key else str(argument)
                for key, argument in zip(self.keys, self.args, strict=True)
            )
            return f"{self.value}({', '.join(inner)})"
        if self.kind == "list":
            return f"[{', '.join(map(str, self.args))}]"
        if self.kind == "neg":
            return f"-{self.args[0]}"
        if self.kind == "string":
            return f'"{self.value}"'
        if self.kind == "bool":
            return "true" if self.value else "false"
        if self.args:
            left, right = (
                f"({operand})" if operand.kind in ("+", "-") and self.kind not in ("+", "-") else str(operand)
                for operand in self.args
            )
            return f"{left} {self.kind} {right}"
        if isinstance(self.value, float):
            return f"{self.value:g}{self.unit and ' ' + self.unit}"
        return f"{self.value}{self.unit and ' ' + self.unit}"
