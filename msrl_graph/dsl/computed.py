"""Attributes that say what a node computes: functions, filters, environments, losses and optimizers, of the package or of a file.

Invariant: what stands in a user's file is read, never run; a call of it is named `path/to/file.py:name`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from ..diagnostics import Span, nearest
from ..functions import Kind, Option, Signature, classes, loss_terms, signatures
from ..graph import Expr
from . import ast, guesses
from .attributes import COUNT, TABLE, Number, Reduce, Type, shown
from .calls import Caller, Library
from .expressions import TOLD, Names, evaluate, fold, mistake, negate

T = TypeVar("T")
_ADAMW_OPTIONS = (Option("lr", required=True), Option("betas"), Option("eps"), Option("weight_decay"), Option("warmup"))
OPTIMIZERS = {"adamw": Signature("adamw", "function", (), options=_ADAMW_OPTIONS)}
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}
ADAMW = {"lr": Number(0), "eps": Number(0, above=True), "weight_decay": Number(0), "warmup": COUNT}


@dataclass(frozen=True)
class FunctionCall:
    """`call = NAME(…)` or `"file.py:function"`."""

    caller: Caller

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        caller = self.caller
        if quoted := _quoted(expr):
            return _call_in_file(caller, quoted, "function", names)
        if not isinstance(expr, ast.Call):
            text = expr.text if isinstance(expr, ast.NameExpr) else ""
            help = guesses.called(text, _functions(caller.library)) or (f"write `{text}()`" if text else "")
            message = f'`{key}` takes a call, as in `math_verify()`, or a function, as in `"file.py:name"`'
            raise mistake("bad-value", message, expr.span, help)
        signature = _find(caller.library, "function", expr.name)
        return caller.call(expr, signature, names)


@dataclass(frozen=True)
class Per:
    """`per`: `row`, `batch` or a column."""

    columns: Collection[str]
    above: str = ""  # a column of the source's rows

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if isinstance(expr, ast.NameExpr) and (expr.text in self.columns or expr.text in ("row", "batch")):
            return Expr("word", expr.text, span=expr.span)
        text = expr.text if isinstance(expr, ast.NameExpr) else ""
        help = guesses.groups(text, self.above) or nearest(text, (*self.columns, "row", "batch"))
        raise mistake("unknown-column", f"`per` takes `row`, `batch` or a column{f', not `{text}`' if text else ''}", expr.span, help)


@dataclass(frozen=True)
class Environment:
    """`environment = "file.py:Class"`."""

    caller: Caller

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.Literal_) or expr.kind != "string":
            raise mistake("bad-value", f"`{key}` takes a class of a file", expr.span, f'write `{key} = "file.py:Name"`')
        path, name, found = _in_file(self.caller, str(expr.value), expr.span, "class", classes)
        for method in ("reset", "step"):
            if method not in found[name]:
                help = "an environment has `reset(columns)` and `step(text)`"
                raise mistake("unknown-function", f"`{name}` of `{path.name}` has no method `{method}`", expr.span, help)
        step = found[name]["step"]
        must = [p for p in step.columns if p not in step.optional] + [o.name for o in step.options if o.required]
        if step.fills or not step.columns or must not in ([], [*step.columns[:1]]):
            help = "write `def step(self, text)`; `rng`, `tokenizer` and `iteration` are for `reset`"
            raise mistake("unknown-function", f"`{step.name}` takes something else than one text", expr.span, help)
        call = Expr("call", f"{path}:{name}", span=expr.span)
        self.caller.used["function", str(call.value)] = (found[name]["reset"], str(path))
        return call


@dataclass(frozen=True)
class Temperature:
    """A number of 0 or more, or a column or state that the node reads."""

    caller: Caller

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.NameExpr) or expr.text in names.params or expr.text not in self.caller.columns:
            return Number(0).read(key, expr, names)
        found = self.caller.column(expr, key)
        return replace(found, kind="state") if expr.text in self.caller.states else found


def types(statement: str, caller: Caller, columns: Collection[str] = (), above: str = "") -> dict[str, Type]:
    """The attributes of a source or a node by its verb (a function's is `function`): those of the table, and those that need the node."""
    call = FunctionCall(caller)
    own: dict[str, dict[str, Type]] = {
        "source": {"weights": call},
        "generate": {"environment": Environment(caller), "temperature": Temperature(caller)},
        "update": {"loss": Loss(caller), "optimizer": Optimizer(caller), "reduce": Reduce()},
        "function": {"call": call, "keep": Keep(caller), "select": call, "per": Per(columns, above)},
    }
    return {**TABLE[statement], **own.get(statement, {})}


def _quoted(expr: ast.Expr) -> ast.Call | None:
    """The call of something in a file, `"file.py:name"(…)`, also where its brackets are left out."""
    if isinstance(expr, ast.Literal_) and expr.kind == "string":
        return ast.Call(ast.Name(str(expr.value), expr.span), (), expr.span, quoted=True)
    return expr if isinstance(expr, ast.Call) and expr.quoted else None


def _call_in_file(caller: Caller, expr: ast.Call, kind: Kind, names: Names) -> Expr:
    """The call of a function of a user's file, or of a term of a loss."""
    path, name, found = _in_file(caller, expr.name.text, expr.name.span, "function", loss_terms if kind == "loss" else signatures)
    called = f"{path}:{name}"
    caller.used[kind, called] = (found[name], str(path))
    return replace(caller.call(expr, found[name], names), value=called)


def _in_file(caller: Caller, target: str, span: Span, what: str, read: Callable[[str], dict[str, T]]) -> tuple[Path, str, dict[str, T]]:
    """The file and the name of `"file.py:name"`, and all of its kind that `read` finds there."""
    file, colon, name = target.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        help = guesses.called(target, _functions(caller.library) if what == "function" else ()) or f'write `"file.py:{what}"`'
        # Without its class an environment is none, and nothing can be said of what it writes.
        raise mistake("bad-value" if what == "function" else "unknown-function", f'`"{target}"` names no {what}', span, help)
    path = caller.folder(span) / file
    try:
        found = read(path.read_text(encoding="utf-8-sig"))
    except OSError:
        raise mistake("missing-file", f"`{file}` cannot be read", span, "the path is relative to the program's folder") from None
    except SyntaxError as error:
        where = f" at its line {error.lineno}" if error.lineno else ""
        raise mistake("unknown-function", f"`{file}` is not Python{where}: {error.msg}", span) from None
    except (ValueError, RecursionError, MemoryError):
        raise mistake("unknown-function", f"`{file}` is not Python", span) from None
    if name not in found:
        raise mistake("unknown-function", f"`{file}` has no {what} `{name}`", span, nearest(name, found))
    return path, name, found


@dataclass(frozen=True)
class Keep:
    """A comparison of a column or state with a number, or a call."""

    caller: Caller

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.Binary) or expr.op not in FLIPPED:
            if isinstance(expr, ast.Call) or (isinstance(expr, ast.Literal_) and expr.kind == "string"):
                return FunctionCall(self.caller).read(key, expr, names)
            named = expr.text if isinstance(expr, ast.NameExpr) and expr.text not in names.params else "reward"
            raise mistake("bad-value", f"`{key}` takes a comparison or a call", expr.span, f"write `{key} = {named} > 0.5`")
        sides = [self._is_column(side, names) for side in (expr.left, expr.right)]
        if sides.count(True) != 1:
            raise mistake("bad-value", "a column is compared with a number here", expr.span, f"write `{key} = reward > 0.5`")
        column, other = (expr.left, expr.right) if sides[0] else (expr.right, expr.left)
        value = evaluate(other, names)
        if value.kind == "quantity":
            raise mistake("bad-unit", "a column holds plain numbers, and this has a unit", other.span)
        if value.kind not in ("number", "bool"):
            raise mistake("bad-value", f"a column is compared with a number here, not with {shown(value)}", other.span)
        operands = (self.caller.column(column, key), value)
        return Expr(expr.op if sides[0] else FLIPPED[expr.op], args=operands, span=expr.span)

    def _is_column(self, expr: ast.Expr, names: Names) -> bool:
        return isinstance(expr, ast.NameExpr) and expr.text not in names.params


@dataclass(frozen=True)
class Loss:
    """Arithmetic over terms, of the package or of a file, numbers, and states that the node reads."""

    caller: Caller

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        value = self._part(expr, names)
        if not _has_term(value):
            raise mistake("bad-value", "a loss has at least one term", expr.span, f"terms are {_terms(self.caller.library)}")
        return value

    def _part(self, expr: ast.Expr, names: Names) -> Expr:
        """A number, or an Expr of + - * neg over numbers and calls."""
        if quoted := _quoted(expr):
            return _call_in_file(self.caller, quoted, "loss", names)
        if isinstance(expr, ast.Call):
            return self.caller.call(expr, _find(self.caller.library, "loss", expr.name), names)
        if isinstance(expr, ast.Neg):
            inner = self._part(expr.operand, names)
            return negate(inner, expr.span) if inner.kind == "number" else Expr("neg", args=(inner,), span=expr.span)
        if not isinstance(expr, ast.Binary):
            if isinstance(expr, ast.NameExpr) and expr.text not in names.params and ("loss", expr.text) in self.caller.library:
                raise mistake("bad-value", f"the loss term `{expr.text}` is a call", expr.span, f"write `{expr.text}()`")
            if isinstance(expr, ast.NameExpr) and names.others.get(expr.text) == "state":
                if expr.text in self.caller.states:
                    return Expr("state", expr.text, span=expr.span)
                what = f"`{self.caller.node}` does not read the state `{expr.text}`"
                raise mistake("term-column", what, expr.span, f"add `{expr.text}` to what `{self.caller.node}` reads")
            value = evaluate(expr, names)
            if value.kind == "quantity":
                raise mistake("bad-unit", "a loss takes plain numbers, and this has a unit", expr.span)
            if value.kind != "number":
                raise mistake("bad-value", f"a loss is made of terms and numbers, not of {shown(value)}", expr.span)
            return value
        found = len(self.caller.problems.found)
        sides: list[Expr] = []
        for side in (expr.left, expr.right):
            with self.caller.problems.catching():
                sides.append(self._part(side, names))
        if len(sides) < 2 or len(self.caller.problems.found) > found:
            raise TOLD
        left, right = sides
        if left.kind == right.kind == "number":
            return fold(expr.op, left, right, expr.span)
        if expr.op == "/" and right.kind == "number":
            return Expr("*", args=(fold("/", Expr("number", 1), right, expr.span), left), span=expr.span)
        if expr.op not in ("+", "-", "*"):
            raise mistake("bad-value", f"a loss is made of `+`, `-` and `*`; `{expr.op}` has no meaning between terms", expr.span)
        terms = _has_term(left), _has_term(right)
        if expr.op != "*" and terms[0] != terms[1]:
            alone = right if terms[0] else left
            help = "multiply a term by it, or leave it out: a constant changes no gradient"
            raise mistake("bad-value", f"`{alone}` is a number, which is no term of a loss", alone.span, help)
        return Expr(expr.op, args=(left, right), span=expr.span)


def _has_term(expr: Expr) -> bool:
    return expr.kind == "call" or any(map(_has_term, expr.args))


@dataclass(frozen=True)
class Optimizer:
    caller: Caller

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        if not isinstance(expr, ast.Call):
            raise mistake("bad-value", "`optimizer` takes a call", expr.span, "write `adamw(lr = 1e-6)`")
        if expr.name.text not in OPTIMIZERS:
            help = nearest(expr.name.text, OPTIMIZERS)
            raise mistake("unknown-function", f"no optimizer is called `{expr.name.text}`", expr.name.span, help)
        call = self.caller.call(expr, OPTIMIZERS[expr.name.text], names)
        args: list[Expr] = []
        for option, value in zip(call.keys, call.args, strict=True):
            with self.caller.problems.catching():
                if option == "betas":
                    betas = [v.value for v in value.args if v.kind == "number" and isinstance(v.value, int | float) and 0 <= v.value < 1]
                    if not len(value.args) == len(betas) == 2:
                        help = "write `betas = [0.9, 0.999]`"
                        raise mistake("bad-value", "`betas` takes two numbers from 0 to below 1", value.span, help)
                    args.append(value)
                else:
                    args.append(ADAMW[option].fit(f"`{option}` of `{expr.name.text}`", value))
        return replace(call, args=tuple(args) if len(args) == len(call.args) else call.args)


def _find(library: Library, kind: Kind, name: ast.Name) -> Signature:
    if (kind, name.text) in library:
        return library[kind, name.text][0]
    other: Kind = "loss" if kind == "function" else "function"
    if (other, name.text) in library:
        help = "it is a term of a loss" if other == "loss" else "it is a function, for `call`"
    else:
        help = nearest(name.text, (n for k, n in library if k == kind))
        if not help.startswith("did"):
            help = "; ".join(filter(None, (help, f'one of your own is `"file.py:{name.text}"`')))
    what = "loss term" if kind == "loss" else "function"
    raise mistake("unknown-function", f"no {what} is called `{name.text}`", name.span, help)


def _functions(library: Library) -> list[str]:
    return [n for k, n in library if k == "function"]


def _terms(library: Library) -> str:
    return ", ".join(f"`{n}`" for k, n in sorted(library) if k == "loss")
