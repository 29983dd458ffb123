"""Calls of functions, loss terms and optimizers: which argument is which parameter's, and whether it fits.

Invariant: a lowered call has a key for each argument, an option's name or a parameter's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..diagnostics import Span, nearest
from ..ir.graph import Expr
from ..ir.kinds import COUNT, NumericKind, WordsKind
from ..ir.signatures import CallKind, Option, Plain, Signature
from . import ast, foreign_names
from .attributes import FormReader, fit, origin, read_as, shown
from .expressions import Names, Problems, evaluate, mistake

Folder = Callable[[Span], Path]  # of the file that a span is in
Library = Mapping[tuple[CallKind, str], tuple[Signature, str]]
# What an option of each plain type takes, in words.
TYPES = {
    "bool": "`true` or `false`",
    "int": "a whole number",
    "float": "a number",
    "str": "a string between double quotes",
}


@dataclass(frozen=True)
class Below:
    """Of a call's option: a number from 0 to below 1; with `pair`, a list of two."""

    pair: bool = False

    def fit(self, what: str, value: Expr, related: tuple[tuple[Span, str], ...] = ()) -> Expr:
        """The value as this number or list, or a Fault that calls it `what`."""
        numbers = value.args if self.pair and value.kind == "list" else (value,)
        right = [n for n in numbers if n.kind == "number" and isinstance(n.value, int | float) and 0 <= n.value < 1]
        if not len(right) == len(numbers) == 1 + self.pair:
            if self.pair:
                raise mistake(
                    "bad-value",
                    f"{what} takes two numbers from 0 to below 1",
                    value.span,
                    "write `[0.9, 0.999]`",
                    related,
                )
            raise mistake(
                "bad-value", f"{what} takes a number from 0 to below 1, not {shown(value)}", value.span, related=related
            )
        return value


BOUNDED: dict[str, NumericKind | Below] = {
    "Count": COUNT,
    "Positive": NumericKind(0, above=True),
    "NotNegative": NumericKind(0),
    "Share": NumericKind(0, 1),
}
BOUNDED |= {"Below": Below(), "Betas": Below(pair=True)}


@dataclass(frozen=True)
class CallingNode:
    """The node that calls: what it reads, of which `states` are states, what it has beside, which only a parameter of
    its name binds, or one that names it, and where its program lies. `kinds` read the options that take more than a
    plain value, by their kind. `used` gathers the functions of user files."""

    node: str
    reads: tuple[str, ...]
    columns: Collection[str]
    library: Library
    folder: Folder
    problems: Problems
    states: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    kinds: Mapping[str, FormReader] = field(default_factory=dict)
    used: dict[tuple[CallKind, str], tuple[Signature, str]] = field(default_factory=dict)

    def whole(self, loss: Expr) -> bool:
        """Whether a term of a loss needs all rows of the mini-batch at once. One that nobody knows is told
        elsewhere."""
        return any(signature.scope == "mini_batch" for _, signature in self._terms(loss))

    def scores(self, loss: Expr) -> tuple[str, ...]:
        """The columns that the node reads of which terms of a loss take the score of each row."""
        taken = {call.columns().get(p, p) for call, signature in self._terms(loss) for p in signature.scores}
        return tuple(c for c in self.reads if c in taken)

    def _terms(self, loss: Expr) -> Iterator[tuple[Expr, Signature]]:
        for call in loss.calls():
            key: tuple[CallKind, str] = ("loss", str(call.value))
            yield from ((call, of[key][0]) for of in (self.library, self.used) if key in of)

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
            raise mistake(
                "duplicate-name",
                f"`{several}` is given twice",
                given[several],
                related=((numbers[0].span, "given here first"),),
            )
        if numbers:
            given[several] = numbers[0].span
            keys.append(several)
            args.append(Expr("list", args=tuple(numbers), span=numbers[0].span.to(numbers[-1].span)))
        missing = [o.name for o in signature.options if o.required and o.name not in given]
        if missing and not failed:
            name = f'"{expr.name.text}"' if expr.quoted else signature.name
            raise mistake(
                "bad-value", f"`{signature.name}` needs `{missing[0]}`", expr.span, f"write `{name}({missing[0]} = …)`"
            )
        call = self.bound(Expr("call", signature.name, tuple(args), tuple(keys), span=expr.span), signature)
        if not failed:
            self.rest(call, signature)
        return call

    def bound(self, call: Expr, signature: Signature) -> Expr:
        """The call, in which a function of one column names the one column that the node reads, whatever that is
        called; and where one parameter is left without a column, the one state that no other takes."""
        named = [p for p in signature.columns if p in self.beside and p not in call.keys]
        call = replace(
            call, args=(*call.args, *(Expr("column", p, span=call.span) for p in named)), keys=(*call.keys, *named)
        )
        columns = call.columns()
        binds = {p: columns.get(p, p) for p in signature.columns}
        must = [p for p in signature.columns if p not in signature.optional]
        lacking = [p for p in must if binds[p] not in (*self.reads, *self.beside)]
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
            raise mistake(
                "term-column", f"`{signature.name}` needs a column, and `{self.node}` reads none for it", call.span
            )
        for option, value in zip(call.keys, call.args, strict=True):
            if value.kind == "list" and len(value.args) != len(rest):
                message = (
                    f"`{signature.name}` has {len(value.args)} `{option}` for {len(rest)} column{'s' * (len(rest) > 1)}"
                )
                raise mistake(
                    "bad-value",
                    message,
                    value.span,
                    f"give one for each of {', '.join(f'`{c}`' for c in rest)}, in this order",
                )

    def taken(
        self, node: ast.NodeDecl, key: str, call: Expr, signature: Signature, only: Collection[str] | None = None
    ) -> None:
        """Whether the function that is the attribute `key` has a parameter for each column that the node reads, of
        these if some are given. Where a patch brought the function, it is to blame, not what the node read before."""
        takes = {*call.columns().values(), *(c for c in signature.columns if c not in call.keys)}
        takes |= {*self.reads} - {*self.states} if signature.rest else set()
        concerns = {*self.reads} if only is None else {*self.reads} & {*only}
        over = [name for name in node.reads or () if name.text in concerns - takes]
        if not over:
            return
        free = [c for c in signature.columns if c not in call.keys]
        help = self._taking(node, key, signature, free)
        if key not in node.patched:
            for name in over:
                self.problems.tell(
                    "unknown-option",
                    f"`{signature.name}` does not take `{name.text}`, which the node reads",
                    name.span,
                    help,
                )
            return
        names = [name.text for name in over]
        read = [n.text for n in node.reads or () if n.text not in names]
        must = [c for c in free if c not in signature.optional]
        read += [c for c in must if c not in read and c in self.columns]
        if read and {*must} <= {*read} and not help.startswith("name the columns"):
            help = (
                f"let the node read what it takes: `{_head(node, read)} {{ "
                f"{', '.join(f'{a.key.text} = …' for a in node.attrs)} }}`"
            )
        message = f"`{signature.name}` does not take {', '.join(f'`{n}`' for n in names)}, which `{self.node}` reads"
        note = ((over[0].span.to(over[-1].span), "it is read here"),)
        self.problems.found += mistake("unknown-option", message, call.span, help, related=note).diagnostics

    def _taking(self, node: ast.NodeDecl, key: str, signature: Signature, free: Sequence[str]) -> str:
        """Help for a function that has no parameter for a column that the node reads."""
        call = next((a.value for a in node.attrs if a.key.text == key), None)
        per = any(a.key.text == "per" for a in node.attrs)
        if isinstance(call, ast.Literal_) and (
            help := foreign_names.binding(f'"{call.value}"', signature, free, self.reads, per)
        ):
            return help
        if free:
            return f"its parameters are {', '.join(f'`{c}`' for c in free)}"
        if not signature.columns:
            return f"it names no parameter: write `def {signature.name}({', '.join(self.reads)})`"
        return "all its parameters have a column"

    def _argument(
        self, arg: ast.Arg, signature: Signature, given: Mapping[str, Span], names: Names
    ) -> tuple[str, Expr]:
        column = (
            isinstance(arg.value, ast.NameExpr)
            and arg.value.text in self.columns
            and arg.value.text not in names.params
        )
        column = column and signature.kind != "optimizer"
        options = tuple(o.name for o in signature.options)
        known = (*signature.columns, *options)
        fitting, what = (signature.columns, "columns") if column else (options, "options")
        if arg.key is not None:
            key = arg.key.text
            if key not in known:
                close = nearest(key, known)
                close = close if close.startswith("did") else foreign_names.option(key, known)
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
            raise mistake(
                "unknown-column", f"no column is called `{expr.text}`", expr.span, nearest(expr.text, self.columns)
            )
        if expr.text not in (*self.reads, *self.beside):
            help = f"add `{expr.text}` to what `{self.node}` reads"
            if self.beside:
                help = (
                    f"rows are drawn by columns that the source fills, {', '.join(f'`{c}`' for c in self.beside)}, "
                    "and by states"
                )
            raise mistake("term-column", f"`{self.node}` does not read `{expr.text}`", expr.span, help)
        return Expr("column", expr.text, span=expr.span)

    def _option(self, expr: ast.Expr, signature: Signature, option: Option, names: Names) -> Expr:
        if option.kind is not None and option.kind in self.kinds:
            return self.kinds[option.kind].read(f"`{option.name}` of `{signature.name}`", expr, names)
        if option.calls and isinstance(expr, ast.Call):
            if expr.name.text not in option.calls:
                help = nearest(expr.name.text, option.calls)
                raise mistake(
                    "unknown-function", f"`{option.name}` takes no call of `{expr.name.text}`", expr.name.span, help
                )
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
            return read_as(WordsKind(option.words), option.name, expr, names)
        value = evaluate(expr, names)
        if isinstance(expr, ast.NameExpr) and value.value in option.words:
            return Expr("word", value.value, span=expr.span)
        words = " or ".join(f"`{w}`" for w in option.words)
        help = f"write `{value.value}`, without quotes" if value.value in option.words else ""
        message = f"`{option.name}` of `{signature.name}` takes {words}, not {shown(value)}"
        raise mistake("bad-value", message, expr.span, help, origin(expr, names))


def _head(node: ast.NodeDecl, reads: Sequence[str]) -> str:
    """The statement of a node without its attributes, reading something else."""
    label = f"{node.label.text}: " if node.label else ""
    writes = f" -> {', '.join(n.text for n in node.writes)}" if node.writes else ""
    return f"node {label}{node.worker.text}.{node.verb.text}({', '.join(reads)}){writes}"


def _typed(kind: Plain, value: Expr, what: str, related: tuple[tuple[Span, str], ...]) -> Expr:
    """The value if it is of an option's type; a number without a fraction is a whole number however it is written."""
    if kind in BOUNDED:
        bounds = BOUNDED[kind]
        return bounds.fit(what, value, related) if isinstance(bounds, Below) else fit(bounds, what, value, related)
    number = value.value if value.kind == "number" else None
    if kind == "int" and isinstance(number, int | float) and float(number).is_integer():
        return Expr("number", int(number), span=value.span)
    if value.kind != {"bool": "bool", "int": "", "float": "number", "str": "string"}[kind]:
        raise mistake("bad-value", f"{what} takes {TYPES[kind]}, not {shown(value)}", value.span, related=related)
    return value
