"""Readers of the attributes that state what a node computes.

The attributes name functions, filters, environments, agents, losses and optimizers. Each name refers to a function that
msrl_graph provides, or to a function or class in a user's file.

Invariant: a user's file is parsed, never executed. In the graph, the call of a function in a user's file has the name
`path/to/file.py:name`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NoReturn, TypeVar

from .. import algorithms
from ..diagnostics import nearest
from ..ir.graph import Expr
from ..ir.kinds import (
    AGENT,
    CALL,
    COUNT,
    ENVIRONMENT,
    KEEP,
    LOSS,
    OPTIMIZER,
    PER,
    REDUCE,
    TEMPERATURE,
    TOOL_CALLS,
    FormKind,
    NumericKind,
    WordsKind,
)
from ..ir.signatures import CallKind, Signature, read_signatures_as
from . import ast, foreign_names
from .attributes import FormReader, fit, origin, read_as, show_value
from .calls import CallingNode, Library
from .environments import AgentReader, EnvironmentReader, ToolCallsReader
from .expressions import ALREADY_REPORTED, Names, evaluate, fold, mistake, negate
from .user_functions import file_call, find_in_file, package_functions

T = TypeVar("T")
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}
# Names of the call kinds in messages.
KINDS: dict[CallKind, str] = {
    "function": "function",
    "loss": "loss term",
    "schedule": "schedule",
    "optimizer": "optimizer",
}
PLACES: dict[CallKind, str] = {
    "function": "it is a function, for `call`",
    "loss": "it is a term of a loss",
    "schedule": "it is a schedule, for `lr` of an optimizer",
    "optimizer": "it is an optimizer",
}


@dataclass(frozen=True)
class FunctionCallReader:
    """A reader of `call = NAME(…)` or `call = "file.py:function"`."""

    caller: CallingNode

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        caller = self.caller
        if quoted := file_call(expr):
            return _call_in_file(caller, quoted, "function", names, awaited=key != "weights")
        if not isinstance(expr, ast.Call):
            text = expr.text if isinstance(expr, ast.NameExpr) else ""
            help = foreign_names.called(text, package_functions(caller.library)) or (
                f"write `{text}()`" if text else ""
            )
            message = f'`{key}` takes a call, as in `math_verify()`, or a function, as in `"file.py:name"`'
            raise mistake("bad-value", message, expr.span, help)
        signature = _find_signature(caller.library, "function", expr.name)
        return caller.call(expr, signature, names)


@dataclass(frozen=True)
class PerReader:
    """A reader of `per`: `row`, `batch` or a column."""

    columns: Collection[str]
    above: str = ""  # a column of the source's rows

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if isinstance(expr, ast.NameExpr) and (expr.text in self.columns or expr.text in ("row", "batch")):
            return Expr("word", expr.text, span=expr.span)
        text = expr.text if isinstance(expr, ast.NameExpr) else ""
        help = foreign_names.groups(text, self.above) or nearest(text, (*self.columns, "row", "batch"))
        raise mistake(
            "unknown-column",
            f"`per` takes `row`, `batch` or a column{f', not `{text}`' if text else ''}",
            expr.span,
            help,
        )


@dataclass(frozen=True)
class TemperatureReader:
    """A reader of a temperature.

    The value is a number of 0 or more, or a column or state that the node reads.
    """

    caller: CallingNode

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.NameExpr) or expr.text in names.params or expr.text not in self.caller.columns:
            return read_as(NumericKind(0), key, expr, names)
        column = self.caller.column(expr, key)
        return replace(column, kind="state") if expr.text in self.caller.states else column


@dataclass(frozen=True)
class ReduceReader:
    """A reader of `reduce`: `tokens`, `sequences` or `constant(n)`."""

    WORDS: ClassVar = WordsKind(("tokens", "sequences", "constant"))

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.Call):
            bare = isinstance(expr, ast.NameExpr) and expr.text == "constant"
            return self._reject_constant(expr) if bare else read_as(self.WORDS, key, expr, names)
        if expr.name.text != "constant":
            help = nearest(expr.name.text, self.WORDS.words)
            raise mistake("unknown-option", f"`{expr.name.text}` is not a value of `reduce`", expr.name.span, help)
        if len(expr.args) != 1 or (expr.args[0].key is not None and expr.args[0].key.text != "n"):
            return self._reject_constant(expr)
        divisor = read_as(COUNT, "constant", expr.args[0].value, names)
        return Expr("call", "constant", (divisor,), ("n",), span=expr.span)

    def _reject_constant(self, expr: ast.Expr) -> NoReturn:
        raise mistake("bad-value", "`constant` takes one number", expr.span, "write `constant(1024)`")


def form_readers(caller: CallingNode, columns: Collection[str] = (), above: str = "") -> dict[FormKind, FormReader]:
    """Return the readers of the attributes whose possible values depend on the node.

    `columns` are the columns that `per` can name. `above` is a column that the node `source` writes. The help for a
    wrong `per` suggests this column.
    """
    return {
        CALL: FunctionCallReader(caller),
        KEEP: KeepReader(caller),
        PER: PerReader(columns, above),
        TEMPERATURE: TemperatureReader(caller),
        ENVIRONMENT: EnvironmentReader(caller),
        AGENT: AgentReader(caller),
        TOOL_CALLS: ToolCallsReader(caller),
        LOSS: LossReader(caller),
        OPTIMIZER: OptimizerReader(caller),
        REDUCE: ReduceReader(),
    }


def _call_in_file(caller: CallingNode, expr: ast.Call, kind: CallKind, names: Names, awaited: bool = False) -> Expr:
    """Lower the call of a function, loss term or schedule from a user's file.

    `awaited`: whether the function may be `async`.
    """
    read = partial(read_signatures_as, kind)
    path, name, signatures = find_in_file(
        caller.folder, expr.name.text, expr.name.span, "function", read, awaited, caller.library
    )
    called = f"{path}:{name}"
    caller.used[kind, called] = (signatures[name], str(path))
    return replace(caller.call(expr, signatures[name], names), value=called)


@dataclass(frozen=True)
class KeepReader:
    """A reader of `keep`: a call, or a comparison of a column or state with a number."""

    caller: CallingNode

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.Binary) or expr.op not in FLIPPED:
            if isinstance(expr, ast.Call) or (isinstance(expr, ast.Literal_) and expr.kind == "string"):
                return FunctionCallReader(self.caller).read(key, expr, names)
            named = expr.text if isinstance(expr, ast.NameExpr) and expr.text not in names.params else "reward"
            raise mistake(
                "bad-value", f"`{key}` takes a comparison or a call", expr.span, f"write `{key} = {named} > 0.5`"
            )
        sides = [self._is_column(side, names) for side in (expr.left, expr.right)]
        if sides.count(True) != 1:
            raise mistake(
                "bad-value", f"`{key}` compares a column with a number", expr.span, f"write `{key} = reward > 0.5`"
            )
        column, other = (expr.left, expr.right) if sides[0] else (expr.right, expr.left)
        value = evaluate(other, names)
        if value.kind == "quantity":
            raise mistake("bad-unit", "a column holds plain numbers, and this has a unit", other.span)
        if value.kind not in ("number", "bool"):
            raise mistake(
                "bad-value", f"`{key}` compares a column with a number, not with {show_value(value)}", other.span
            )
        operands = (self.caller.column(column, key), value)
        return Expr(expr.op if sides[0] else FLIPPED[expr.op], args=operands, span=expr.span)

    def _is_column(self, expr: ast.Expr, names: Names) -> bool:
        return isinstance(expr, ast.NameExpr) and expr.text not in names.params


@dataclass(frozen=True)
class LossReader:
    """A reader of a loss: arithmetic on loss terms, numbers and states."""

    caller: CallingNode

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        value = self._lower_part(expr, names)
        if not _has_term(value):
            raise mistake(
                "bad-value", "a loss has at least one term", expr.span, f"terms are {_list_terms(self.caller.library)}"
            )
        return value

    def _lower_part(self, expr: ast.Expr, names: Names) -> Expr:
        """Lower a subexpression of a loss.

        The result is a number, a state or a call, or an Expr that combines these by +, -, * or negation.
        """
        if quoted := file_call(expr):
            return _call_in_file(self.caller, quoted, "loss", names)
        if isinstance(expr, ast.Call):
            return self.caller.call(expr, _find_signature(self.caller.library, "loss", expr.name), names)
        if isinstance(expr, ast.Neg):
            inner = self._lower_part(expr.operand, names)
            return negate(inner, expr.span) if inner.kind == "number" else Expr("neg", args=(inner,), span=expr.span)
        if not isinstance(expr, ast.Binary):
            if (
                isinstance(expr, ast.NameExpr)
                and expr.text not in names.params
                and ("loss", expr.text) in self.caller.library
            ):
                raise mistake(
                    "bad-value", f"the loss term `{expr.text}` must be called", expr.span, f"write `{expr.text}()`"
                )
            if isinstance(expr, ast.NameExpr) and names.others.get(expr.text) == "state":
                if expr.text in self.caller.states:
                    return Expr("state", expr.text, span=expr.span)
                message = f"`{self.caller.node}` does not read the state `{expr.text}`"
                raise mistake(
                    "term-column", message, expr.span, f"add `{expr.text}` to what `{self.caller.node}` reads"
                )
            value = evaluate(expr, names)
            if value.kind == "quantity":
                raise mistake("bad-unit", "a loss takes plain numbers, and this has a unit", expr.span)
            if value.kind != "number":
                raise mistake(
                    "bad-value", f"a loss consists of terms and numbers, not of {show_value(value)}", expr.span
                )
            return value
        problems_before = len(self.caller.problems.diagnostics)
        sides: list[Expr] = []
        for side in (expr.left, expr.right):
            with self.caller.problems.catching():
                sides.append(self._lower_part(side, names))
        if len(sides) < 2 or len(self.caller.problems.diagnostics) > problems_before:
            raise ALREADY_REPORTED
        left, right = sides
        if left.kind == right.kind == "number":
            return fold(expr.op, left, right, expr.span)
        if expr.op == "/" and right.kind == "number":
            return Expr("*", args=(fold("/", Expr("number", 1), right, expr.span), left), span=expr.span)
        if expr.op not in ("+", "-", "*"):
            raise mistake(
                "bad-value", f"a loss uses only `+`, `-` and `*`; `{expr.op}` has no meaning between terms", expr.span
            )
        terms = _has_term(left), _has_term(right)
        if expr.op != "*" and terms[0] != terms[1]:
            alone = right if terms[0] else left
            help = "multiply a term by it, or leave it out: a constant changes no gradient"
            raise mistake("bad-value", f"`{alone}` is a number, not a loss term", alone.span, help)
        return Expr(expr.op, args=(left, right), span=expr.span)


def _has_term(expr: Expr) -> bool:
    return expr.kind == "call" or any(map(_has_term, expr.args))


@dataclass(frozen=True)
class OptimizerReader:
    """A reader of an update's optimizer, such as `adamw(lr = 1e-6)`."""

    caller: CallingNode

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.Call) or expr.quoted:
            raise mistake("bad-value", f"`{key}` takes a call", expr.span, "write `adamw(lr = 1e-6)`")
        signature = _find_signature(self.caller.library, "optimizer", expr.name)
        problems_before = len(self.caller.problems.diagnostics)
        call = replace(self.caller, kinds={"Rate": RateReader(self.caller)}).call(expr, signature, names)
        if len(self.caller.problems.diagnostics) > problems_before:
            return call
        arguments = dict(zip(call.keys, call.args, strict=True))
        if (
            "lr" in arguments and arguments["lr"].kind == "call" and "warmup" in arguments
        ):  # without `warmup` the missing argument is reported instead
            name = str(arguments["lr"].value).rpartition(":")[2]
            help = (
                f"write `{name}(…, warmup = {arguments['warmup']})`"
                if name == arguments["lr"].value
                else "leave it out"
            )
            raise mistake(
                "bad-value",
                f"`warmup` needs a constant rate, but `{name}` is a schedule",
                arguments["warmup"].span,
                help,
            )
        try:
            algorithms.optimizer(call)
        except ValueError as error:  # options that cannot be combined
            raise mistake("bad-value", f"`{signature.name}`: {error}", call.span) from None
        return call


@dataclass(frozen=True)
class RateReader:
    """A reader of a learning rate.

    The value is a number of 0 or more, a state that the update reads, or the call of a schedule. A schedule is either
    provided by msrl_graph or defined in a user's file.
    """

    caller: CallingNode

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        caller = self.caller
        quoted = file_call(expr)
        if quoted is not None and (quoted is expr or ".py:" in quoted.name.text):
            return self._check_bound(_call_in_file(caller, quoted, "schedule", names))
        if isinstance(expr, ast.Call):
            problems_before = len(caller.problems.diagnostics)
            call = self._check_bound(caller.call(expr, _find_signature(caller.library, "schedule", expr.name), names))
            if len(caller.problems.diagnostics) == problems_before:
                try:
                    algorithms.check_schedule(call)
                except ValueError as error:  # options that cannot be combined
                    raise mistake("bad-value", f"`{call.value}`: {error}", call.span) from None
            return call
        if not isinstance(expr, ast.NameExpr) or expr.text in names.params:
            return fit(NumericKind(0), key, evaluate(expr, names), origin(expr, names))
        if expr.text in caller.states:
            return Expr("state", expr.text, span=expr.span)
        if ("schedule", expr.text) in caller.library:
            raise mistake(
                "bad-value", f"the schedule `{expr.text}` must be called", expr.span, f"write `{expr.text}(1e-6)`"
            )
        if names.others.get(expr.text) == "state":
            help = f"add `{expr.text}` to what `{caller.node}` reads"
            raise mistake("term-column", f"`{caller.node}` does not read the state `{expr.text}`", expr.span, help)
        if expr.text in names.others:
            message = f"{key} takes a number, a state or a schedule, and `{expr.text}` is a {names.others[expr.text]}"
            raise mistake("bad-value", message, expr.span)
        raise mistake(
            "unknown-name",
            f"unknown name `{expr.text}`",
            expr.span,
            nearest(expr.text, (*names.params, *caller.states)),
        )

    def _check_bound(self, call: Expr) -> Expr:
        """Check that each parameter of a schedule is bound.

        A parameter can be bound to a value that the optimizer fills in, or to a state that the update reads.
        Parameters with a default need no binding.
        """
        caller = self.caller
        name = str(call.value)
        signature = (caller.used if ("schedule", name) in caller.used else caller.library)["schedule", name][0]
        binds = {
            parameter_name: call.columns().get(parameter_name, parameter_name) for parameter_name in signature.columns
        }
        for parameter, state in binds.items():
            if state not in caller.states and parameter not in signature.optional:
                message = (
                    f"`{signature.name}` needs `{parameter}`, which is neither `step` nor `last` nor a state that "
                    f"`{caller.node}` reads"
                )
                help = f"read it, or make it an option: `def {signature.name}(step, *, {parameter})`"
                raise mistake("term-column", message, call.span, help)
        return call


def _find_signature(library: Library, kind: CallKind, name: ast.Name) -> Signature:
    if (kind, name.text) in library:
        return library[kind, name.text][0]
    other = next((other_kind for other_kind in PLACES if (other_kind, name.text) in library), None)
    if other is not None:
        help = PLACES[other]
    else:
        help = nearest(name.text, (known for known_kind, known in library if known_kind == kind))
        if kind == "loss" and (meant := foreign_names.term(name.text)):
            help = meant
        elif not help.startswith("did") and kind != "optimizer":
            help = "; ".join(filter(None, (help, f'your own function is `"file.py:{name.text}"`')))
    raise mistake("unknown-function", f"no {KINDS[kind]} is called `{name.text}`", name.span, help)


def _list_terms(library: Library) -> str:
    return ", ".join(f"`{name}`" for kind, name in sorted(library) if kind == "loss")
