"""Calls: functions of the package and of the user's files, loss terms, optimizers.

Invariant: a lowered call has a key for each argument, an option's name or a parameter's; user functions are read, never run. A call of
a function in a file is named `path/to/file.py:function`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ..diagnostics import Span, nearest
from ..functions import Kind, Option, Plain, Signature, classes, signatures
from ..graph import Expr
from . import ast, guesses
from .attributes import COUNT, TABLE, Number, Reduce, Type, Words, origin, shown
from .expressions import TOLD, Names, Problems, evaluate, fold, mistake, negate

T = TypeVar("T")
Folder = Callable[[Span], Path]  # of the file that a span is in
Library = Mapping[tuple[Kind, str], tuple[Signature, str]]
_ADAMW_OPTIONS = (Option("lr", required=True), Option("betas"), Option("eps"), Option("weight_decay"), Option("warmup"))
OPTIMIZERS = {"adamw": Signature("adamw", "function", (), options=_ADAMW_OPTIONS)}
# What an option of each plain type takes, in words.
TYPES = {"bool": "`true` or `false`", "int": "a whole number", "float": "a number", "str": "a string between double quotes"}
BOUNDED = {"Count": COUNT, "Positive": Number(0, above=True), "NotNegative": Number(0), "Share": Number(0, 1)}
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "==": "==", "!=": "!="}
ADAMW = {"lr": Number(0), "eps": Number(0, above=True), "weight_decay": Number(0), "warmup": COUNT}


@dataclass(frozen=True)
class Caller:
    """The node that calls: what it reads, of which `states` are states, and where its program lies. `used` gathers the functions of user
    files."""

    node: str
    reads: tuple[str, ...]
    columns: Collection[str]
    library: Library
    folder: Folder
    problems: Problems
    states: tuple[str, ...] = ()
    used: dict[tuple[Kind, str], tuple[Signature, str]] = field(default_factory=dict)

    def call(self, expr: ast.Call, signature: Signature, names: Names) -> Expr:
        """The call with a key for each argument; each wrong argument is told by itself."""
        args: list[Expr] = []
        keys: list[str] = []
        numbers: list[Expr] = []  # of the option that takes all of them
        given: dict[str, Span] = {}
        failed = False
        several = next((o.name for o in signature.options if o.several), "")
        for arg in expr.args:
            right = False
            with self.problems.catching():
                key, value = self._argument(arg, signature, given, names)
                if key == several and value.kind != "list":
                    numbers.append(value)
                else:
                    given[key] = arg.span
                    keys.append(key)
                    args.append(value)
                right = True
            failed = failed or not right
        if numbers and several in given:
            raise mistake("duplicate-name", f"`{several}` is given twice", given[several], related=((numbers[0].span, "given here first"),))
        if numbers:
            given[several] = numbers[0].span
            keys.append(several)
            args.append(Expr("list", args=tuple(numbers), span=numbers[0].span.to(numbers[-1].span)))
        missing = [o.name for o in signature.options if o.required and o.name not in given]
        if missing and not failed:
            name = f'"{expr.name.text}"' if expr.quoted else signature.name
            raise mistake("bad-value", f"`{signature.name}` needs `{missing[0]}`", expr.span, f"write `{name}({missing[0]} = …)`")
        call = self.bound(Expr("call", signature.name, tuple(args), tuple(keys), span=expr.span), signature)
        if not failed:
            self.rest(call, signature)
        return call

    def bound(self, call: Expr, signature: Signature) -> Expr:
        """The call, in which a function of one column names the one column that the node reads, whatever that is called; and where one
        parameter is left without a column, the one state that no other takes."""
        columns = call.columns()
        binds = {p: columns.get(p, p) for p in signature.columns}
        must = [p for p in signature.columns if p not in signature.optional]
        lacking = [p for p in must if binds[p] not in self.reads]
        if signature.kind != "function" or len(lacking) != 1:
            return call
        left = [c for c in self.reads if c not in binds.values()]
        alone = len(must) == 1 and len(self.reads) - len(self.states) == 1
        if len(left) != 1 or not (alone or left[0] in self.states):
            return call
        return replace(call, args=(*call.args, Expr("column", left[0], span=call.span)), keys=(*call.keys, lacking[0]))

    def rest(self, call: Expr, signature: Signature) -> None:
        """Of a function that takes all columns that are left: whether there are any, and one number for each."""
        if not signature.rest:
            return
        binds = [call.columns().get(p, p) for p in signature.columns]
        rest = [c for c in self.reads if c not in (*binds, *self.states)]
        if not rest:
            raise mistake("term-column", f"`{signature.name}` needs a column, and `{self.node}` reads none for it", call.span)
        for option, value in zip(call.keys, call.args, strict=True):
            if value.kind == "list" and len(value.args) != len(rest):
                message = f"`{signature.name}` has {len(value.args)} `{option}` for {len(rest)} column{'s' * (len(rest) > 1)}"
                raise mistake("bad-value", message, value.span, f"give one for each of {', '.join(f'`{c}`' for c in rest)}, in this order")

    def _argument(self, arg: ast.Arg, signature: Signature, given: Mapping[str, Span], names: Names) -> tuple[str, Expr]:
        column = isinstance(arg.value, ast.NameExpr) and arg.value.text in self.columns and arg.value.text not in names.params
        options = tuple(o.name for o in signature.options)
        known = (*signature.columns, *options)
        fitting, what = (signature.columns, "columns") if column else (options, "options")
        if arg.key is not None:
            key = arg.key.text
            if key not in known:
                close = nearest(key, known)
                close = close if close.startswith("did") else guesses.option(key, known)
                help = close or nearest(key, fitting) or ("" if fitting else f"it takes no {what}")
                raise mistake("unknown-option", f"`{signature.name}` has no parameter `{key}`", arg.key.span, help)
            if key in given:
                note = ((given[key], "given here first"),)
                raise mistake("duplicate-name", f"`{key}` is given twice", arg.key.span, related=note)
        else:
            free = [k for k in fitting if k not in given]
            if not free:
                help = f"its {what} are " + ", ".join(f"`{k}`" for k in fitting) if fitting else f"it takes no {what}"
                raise mistake("unknown-option", f"`{signature.name}` takes no more {what}", arg.span, help)
            key = free[0]
        if key in signature.columns:
            return key, self.column(arg.value, key)
        option = signature.option(key)
        assert option is not None
        return key, self._option(arg.value, signature, option, names)

    def column(self, expr: ast.Expr, key: str) -> Expr:
        if not isinstance(expr, ast.NameExpr):
            raise mistake("bad-value", f"`{key}` takes a column", expr.span)
        if expr.text not in self.columns:
            raise mistake("unknown-column", f"no column is called `{expr.text}`", expr.span, nearest(expr.text, self.columns))
        if expr.text not in self.reads:
            help = f"add `{expr.text}` to what `{self.node}` reads"
            raise mistake("term-column", f"`{self.node}` does not read `{expr.text}`", expr.span, help)
        return Expr("column", expr.text, span=expr.span)

    def _option(self, expr: ast.Expr, signature: Signature, option: Option, names: Names) -> Expr:
        if option.calls and isinstance(expr, ast.Call):
            if expr.name.text not in option.calls:
                help = nearest(expr.name.text, option.calls)
                raise mistake("unknown-function", f"`{option.name}` takes no call of `{expr.name.text}`", expr.name.span, help)
            return self.call(expr, self.library["option", expr.name.text][0], names)
        if isinstance(expr, ast.NameExpr) and expr.text in option.calls:
            raise mistake("bad-value", f"`{expr.text}` is a call", expr.span, f"write `{expr.text}()`")
        if option.words:
            return self._word(expr, signature, option, names)
        if isinstance(expr, ast.NameExpr) and expr.text not in names.params and expr.text not in names.others:
            words = [w for o in signature.options for w in o.words]
            known = [*names.params, *words]
            raise mistake("unknown-name", f"nothing is called `{expr.text}`", expr.span, nearest(expr.text, known))
        value = evaluate(expr, names)
        if measured := [v for v in (value, *value.args) if v.kind == "quantity"]:
            raise mistake("bad-unit", f"`{option.name}` takes a plain number, and this has a unit", measured[0].span)
        what = f"`{option.name}` of `{signature.name}`"
        if option.several and value.kind == "list":
            return replace(value, args=tuple(_typed("float", item, what, ()) for item in value.args))
        kind = "float" if option.several else option.kind
        return value if kind is None else _typed(kind, value, what, origin(expr, names))

    def _word(self, expr: ast.Expr, signature: Signature, option: Option, names: Names) -> Expr:
        if isinstance(expr, ast.NameExpr) and (expr.text in option.words or expr.text not in names.params):
            return Words(option.words).read(option.name, expr, names)
        value = evaluate(expr, names)
        if isinstance(expr, ast.NameExpr) and value.value in option.words:
            return Expr("word", value.value, span=expr.span)
        words = " or ".join(f"`{w}`" for w in option.words)
        help = f"write `{value.value}`, without quotes" if value.value in option.words else ""
        message = f"`{option.name}` of `{signature.name}` takes {words}, not {shown(value)}"
        raise mistake("bad-value", message, expr.span, help, origin(expr, names))


def _typed(kind: Plain, value: Expr, what: str, related: tuple[tuple[Span, str], ...]) -> Expr:
    """The value if it is of an option's type; a number without a fraction is a whole number however it is written."""
    if kind in BOUNDED:
        return BOUNDED[kind].fit(what, value, related)
    number = value.value if value.kind == "number" else None
    if kind == "int" and isinstance(number, int | float) and float(number).is_integer():
        return Expr("number", int(number), span=value.span)
    if value.kind != {"bool": "bool", "int": "", "float": "number", "str": "string"}[kind]:
        raise mistake("bad-value", f"{what} takes {TYPES[kind]}, not {shown(value)}", value.span, related=related)
    return value


@dataclass(frozen=True)
class FunctionCall:
    """`call = NAME(…)` or `"file.py:function"`."""

    caller: Caller

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        caller = self.caller
        if isinstance(expr, ast.Literal_) and expr.kind == "string":
            expr = ast.Call(ast.Name(str(expr.value), expr.span), (), expr.span, quoted=True)
        if isinstance(expr, ast.Call) and expr.quoted:
            path, name, found = _in_file(caller, expr.name.text, expr.name.span, "function", signatures)
            called = f"{path}:{name}"
            caller.used["function", called] = (found[name], str(path))
            return replace(caller.call(expr, found[name], names), value=called)
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
        if step.rng or not step.columns or must not in ([], [*step.columns[:1]]):
            help = "write `def step(self, text)`; a generator, `rng`, is for `reset`"
            raise mistake("unknown-function", f"`{step.name}` takes something else than one text", expr.span, help)
        call = Expr("call", f"{path}:{name}", span=expr.span)
        self.caller.used["function", str(call.value)] = (found[name]["reset"], str(path))
        return call


def types(statement: str, caller: Caller, columns: Collection[str] = (), above: str = "") -> dict[str, Type]:
    """The attributes of a source or a node by its verb (a function's is `function`): those of the table, and those that need the node."""
    call = FunctionCall(caller)
    own: dict[str, dict[str, Type]] = {
        "source": {"weights": call},
        "generate": {"environment": Environment(caller)},
        "update": {"loss": Loss(caller), "optimizer": Optimizer(caller), "reduce": Reduce()},
        "function": {"call": call, "keep": Keep(caller), "select": call, "per": Per(columns, above)},
    }
    return {**TABLE[statement], **own.get(statement, {})}


def _in_file(caller: Caller, target: str, span: Span, what: str, read: Callable[[str], dict[str, T]]) -> tuple[Path, str, dict[str, T]]:
    """The file and the name of `"file.py:name"`, and all of its kind that `read` finds there."""
    file, colon, name = target.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        help = guesses.called(target, _functions(caller.library) if what == "function" else ()) or f'write `"file.py:{what}"`'
        raise mistake("bad-value", f'`"{target}"` names no {what}', span, help)
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
            raise mistake("bad-value", f"`{key}` takes a comparison or a call", expr.span, f"write `{key} = reward > 0.5`")
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
    """Arithmetic over named terms, numbers, and states that the node reads."""

    caller: Caller

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr:
        value = self._part(expr, names)
        if not _has_term(value):
            raise mistake("bad-value", "a loss has at least one term", expr.span, f"terms are {_terms(self.caller.library)}")
        return value

    def _part(self, expr: ast.Expr, names: Names) -> Expr:
        """A number, or an Expr of + - * neg over numbers and calls."""
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
    what = "loss term" if kind == "loss" else "function"
    raise mistake("unknown-function", f"no {what} is called `{name.text}`", name.span, help)


def _functions(library: Library) -> list[str]:
    return [n for k, n in library if k == "function"]


def _terms(library: Library) -> str:
    return ", ".join(f"`{n}`" for k, n in sorted(library) if k == "loss")
