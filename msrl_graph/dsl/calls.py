"""Lowering of calls: each argument is bound to a parameter and checked.

Invariant: a lowered call has a key for each argument. The key is the name of a parameter or of an option.
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
from .attributes import FormReader, fit, origin, read_as, show_value
from .expressions import Names, Problems, evaluate, mistake

Folder = Callable[[Span], Path]  # returns the folder of the file that contains a span
Library = Mapping[tuple[CallKind, str], tuple[Signature, str]]
# Expected values of each plain option type, for messages.
TYPES = {
    "bool": "`true` or `false`",
    "int": "a whole number",
    "float": "a number",
    "str": "a string between double quotes",
}


@dataclass(frozen=True)
class Below:
    """The type of an option that takes a number in [0, 1).

    If `pair` is true, the option takes a list of two numbers in [0, 1).
    """

    pair: bool = False

    def fit(self, subject: str, value: Expr, related: tuple[tuple[Span, str], ...] = ()) -> Expr:
        """Return the value if the option accepts it; otherwise raise a Fault.

        `subject` names the value in the error message.
        """
        numbers = value.args if self.pair and value.kind == "list" else (value,)
        right = [
            number
            for number in numbers
            if number.kind == "number" and isinstance(number.value, int | float) and 0 <= number.value < 1
        ]
        if not len(right) == len(numbers) == 1 + self.pair:
            if self.pair:
                raise mistake(
                    "bad-value",
                    f"{subject} takes two numbers from 0 to below 1",
                    value.span,
                    "write `[0.9, 0.999]`",
                    related,
                )
            raise mistake(
                "bad-value",
                f"{subject} takes a number from 0 to below 1, not {show_value(value)}",
                value.span,
                related=related,
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
    """A node that calls functions.

    - `reads`: the columns and states that the node reads.
    - `states`: the states that the node reads, a subset of `reads`.
    - `columns`: all columns and states that the algorithm declares.
    - `extra_columns`: columns that the calls can use although the node does not read them. A parameter is bound to one
      of these columns only if the parameter has the column's name, or if an argument names the column.
    - `folder`: returns the folder of the file that a span is in.
    - `kinds`: a reader for each option type that is not a plain value. The keys are the names of the types.
    - `used`: collects the signatures of the user functions that the node calls.
    """

    node: str
    reads: tuple[str, ...]
    columns: Collection[str]
    library: Library
    folder: Folder
    problems: Problems
    states: tuple[str, ...] = ()
    extra_columns: tuple[str, ...] = ()
    kinds: Mapping[str, FormReader] = field(default_factory=dict)
    used: dict[tuple[CallKind, str], tuple[Signature, str]] = field(default_factory=dict)

    def needs_mini_batch(self, loss: Expr) -> bool:
        """Return whether a term of a loss needs all rows of the mini-batch in one call.

        Unknown terms are skipped, because they are reported elsewhere.
        """
        return any(signature.scope == "mini_batch" for _, signature in self._terms(loss))

    def scores(self, loss: Expr) -> tuple[str, ...]:
        """Return the columns that a loss passes to parameters annotated with `Scores`."""
        scored = {
            call.columns().get(parameter, parameter)
            for call, signature in self._terms(loss)
            for parameter in signature.scores
        }
        return tuple(column for column in self.reads if column in scored)

    def _terms(self, loss: Expr) -> Iterator[tuple[Expr, Signature]]:
        for call in loss.calls():
            key: tuple[CallKind, str] = ("loss", str(call.value))
            yield from ((call, library[key][0]) for library in (self.library, self.used) if key in library)

    def call(self, expr: ast.Call, signature: Signature, names: Names) -> Expr:
        """Lower a call: give each argument a key, and report each wrong argument."""
        args: list[Expr] = []
        keys: list[str] = []
        numbers: list[Expr] = []  # arguments of the option that takes all of them
        bound: dict[str, Span] = {}
        failed = False
        several = next((option.name for option in signature.options if option.several), "")
        for arg in expr.args:
            right = False
            with self.problems.catching():
                key, value = self._lower_argument(arg, signature, bound, names)
                if key == several and value.kind != "list":
                    numbers.append(value)
                else:
                    bound[key] = arg.span
                    keys.append(key)
                    args.append(value)
                right = True
            failed = failed or not right
        if numbers and several in bound:
            raise mistake(
                "duplicate-name",
                f"`{several}` is given twice",
                bound[several],
                related=((numbers[0].span, "given here first"),),
            )
        if numbers:
            bound[several] = numbers[0].span
            keys.append(several)
            args.append(Expr("list", args=tuple(numbers), span=numbers[0].span.extend_to(numbers[-1].span)))
        missing = [option.name for option in signature.options if option.required and option.name not in bound]
        if missing and not failed:
            name = f'"{expr.name.text}"' if expr.quoted else signature.name
            raise mistake(
                "bad-value", f"`{signature.name}` needs `{missing[0]}`", expr.span, f"write `{name}({missing[0]} = …)`"
            )
        call = self.bind_remaining(Expr("call", signature.name, tuple(args), tuple(keys), span=expr.span), signature)
        if not failed:
            self.check_rest(call, signature)
        return call

    def bind_remaining(self, call: Expr, signature: Signature) -> Expr:
        """Bind a parameter that has no argument, if only one column or state is possible.

        - If the function has one required parameter and the node reads one column, the parameter is bound to this
          column, whatever the column's name is.
        - If one required parameter has no column, and one state is bound to no parameter, the parameter is bound to
          this state.
        """
        named = [
            parameter
            for parameter in signature.columns
            if parameter in self.extra_columns and parameter not in call.keys
        ]
        call = replace(
            call,
            args=(*call.args, *(Expr("column", parameter, span=call.span) for parameter in named)),
            keys=(*call.keys, *named),
        )
        columns = call.columns()
        binds = {parameter: columns.get(parameter, parameter) for parameter in signature.columns}
        required = [parameter for parameter in signature.columns if parameter not in signature.optional]
        missing = [parameter for parameter in required if binds[parameter] not in (*self.reads, *self.extra_columns)]
        if signature.kind != "function" or len(missing) != 1:
            return call
        unbound = [column for column in self.reads if column not in binds.values()]
        alone = len(required) == 1 and len(self.reads) - len(self.states) == 1
        if len(unbound) != 1 or not (alone or unbound[0] in self.states):
            return call
        return replace(
            call, args=(*call.args, Expr("column", unbound[0], span=call.span)), keys=(*call.keys, missing[0])
        )

    def check_rest(self, call: Expr, signature: Signature) -> None:
        """Check the call of a function whose `*` parameter takes all remaining columns.

        The remaining columns are the columns that the node reads and that are bound to no other parameter. There must
        be at least one remaining column. A list option, such as weights, must have one number per remaining column.
        Functions without a `*` parameter are not checked.
        """
        if not signature.rest:
            return
        binds = [call.columns().get(parameter, parameter) for parameter in signature.columns]
        rest = [column for column in self.reads if column not in (*binds, *self.states)]
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
                    f"give one for each of {', '.join(f'`{column}`' for column in rest)}, in this order",
                )

    def report_untaken(
        self, node: ast.NodeDecl, key: str, call: Expr, signature: Signature, only: Collection[str] | None = None
    ) -> None:
        """Report columns that a node reads, but that its function has no parameter for.

        `key` is the attribute that names the function. `only` limits the check to some columns (default: all). Usually
        the error is reported at each column. However, a patch (a statement that changes an inherited node) may have
        replaced the function after the columns were written. The error is then reported at the function.
        """
        takes = {*call.columns().values(), *(column for column in signature.columns if column not in call.keys)}
        takes |= {*self.reads} - {*self.states} if signature.rest else set()
        concerns = {*self.reads} if only is None else {*self.reads} & {*only}
        untaken = [name for name in node.reads or () if name.text in concerns - takes]
        if not untaken:
            return
        free = [column for column in signature.columns if column not in call.keys]
        help = self._taking_help(node, key, signature, free)
        if key not in node.patched:
            for name in untaken:
                self.problems.report(
                    "unknown-option",
                    f"`{signature.name}` does not take `{name.text}`, which the node reads",
                    name.span,
                    help,
                )
            return
        names = [name.text for name in untaken]
        read = [column_name.text for column_name in node.reads or () if column_name.text not in names]
        must = [column for column in free if column not in signature.optional]
        read += [column for column in must if column not in read and column in self.columns]
        if read and {*must} <= {*read} and not help.startswith("name the columns"):
            help = (
                f"let the node read its parameters: `{_node_head(node, read)} {{ "
                f"{', '.join(f'{attr.key.text} = …' for attr in node.attrs)} }}`"
            )
        message = (
            f"`{signature.name}` does not take "
            f"{', '.join(f'`{column_name}`' for column_name in names)}, which `{self.node}` reads"
        )
        note = ((untaken[0].span.extend_to(untaken[-1].span), "it is read here"),)
        self.problems.diagnostics += mistake("unknown-option", message, call.span, help, related=note).diagnostics

    def _taking_help(self, node: ast.NodeDecl, key: str, signature: Signature, free: Sequence[str]) -> str:
        """Return help for a node that reads more columns than its function takes.

        `free` are the parameters to which no argument of the call is bound.
        """
        call = next((attr.value for attr in node.attrs if attr.key.text == key), None)
        per = any(attr.key.text == "per" for attr in node.attrs)
        if isinstance(call, ast.Literal_) and (
            help := foreign_names.binding(f'"{call.value}"', signature, free, self.reads, per)
        ):
            return help
        if free:
            return f"its parameters are {', '.join(f'`{column}`' for column in free)}"
        if not signature.columns:
            return f"it has no parameters: write `def {signature.name}({', '.join(self.reads)})`"
        return "all its parameters have a column"

    def _lower_argument(
        self, arg: ast.Arg, signature: Signature, bound: Mapping[str, Span], names: Names
    ) -> tuple[str, Expr]:
        column = (
            isinstance(arg.value, ast.NameExpr)
            and arg.value.text in self.columns
            and arg.value.text not in names.params
        )
        column = column and signature.kind != "optimizer"
        options = tuple(known_option.name for known_option in signature.options)
        known = (*signature.columns, *options)
        fitting, kind = (signature.columns, "columns") if column else (options, "options")
        if arg.key is not None:
            key = arg.key.text
            if key not in known:
                close = nearest(key, known)
                close = close if close.startswith("did") else foreign_names.option(key, known)
                help = close or nearest(key, fitting) or ("" if fitting else f"it takes no {kind}")
                raise mistake("unknown-option", f"`{signature.name}` has no parameter `{key}`", arg.key.span, help)
            if key in bound:
                note = ((bound[key], "given here first"),)
                raise mistake("duplicate-name", f"`{key}` is given twice", arg.key.span, related=note)
        else:
            free = [name for name in fitting if name not in bound]
            if not free:
                help = (
                    f"its {kind} are " + ", ".join(f"`{name}`" for name in fitting)
                    if fitting
                    else f"it takes no {kind}"
                )
                raise mistake("unknown-option", f"`{signature.name}` takes no more {kind}", arg.span, help)
            key = free[0]
        if key in signature.columns:
            return key, self.column(arg.value, key)
        option = signature.option(key)
        assert option is not None
        return key, self._lower_option(arg.value, signature, option, names)

    def column(self, expr: ast.Expr, key: str) -> Expr:
        if not isinstance(expr, ast.NameExpr):
            raise mistake("bad-value", f"`{key}` takes a column", expr.span)
        if expr.text not in self.columns:
            raise mistake(
                "unknown-column", f"no column is called `{expr.text}`", expr.span, nearest(expr.text, self.columns)
            )
        if expr.text not in (*self.reads, *self.extra_columns):
            help = f"add `{expr.text}` to what `{self.node}` reads"
            if self.extra_columns:
                help = (
                    "row weights can use columns that the source fills, "
                    f"{', '.join(f'`{column}`' for column in self.extra_columns)}, and states"
                )
            raise mistake("term-column", f"`{self.node}` does not read `{expr.text}`", expr.span, help)
        return Expr("column", expr.text, span=expr.span)

    def _lower_option(self, expr: ast.Expr, signature: Signature, option: Option, names: Names) -> Expr:
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
            raise mistake("bad-value", f"`{expr.text}` must be called", expr.span, f"write `{expr.text}()`")
        if option.words:
            return self._lower_word(expr, signature, option, names)
        if isinstance(expr, ast.NameExpr) and expr.text not in names.params and expr.text not in names.others:
            words = [word for other in signature.options for word in other.words]
            known = [*names.params, *words]
            raise mistake("unknown-name", f"unknown name `{expr.text}`", expr.span, nearest(expr.text, known))
        value = evaluate(expr, names)
        if measured := [part for part in (value, *value.args) if part.kind == "quantity"]:
            raise mistake("bad-unit", f"`{option.name}` takes a plain number, and this has a unit", measured[0].span)
        subject = f"`{option.name}` of `{signature.name}`"
        if option.several and value.kind == "list":
            return replace(value, args=tuple(_check_type("float", item, subject, ()) for item in value.args))
        kind = "float" if option.several else option.kind
        return value if kind is None else _check_type(kind, value, subject, origin(expr, names))

    def _lower_word(self, expr: ast.Expr, signature: Signature, option: Option, names: Names) -> Expr:
        if isinstance(expr, ast.NameExpr) and (expr.text in option.words or expr.text not in names.params):
            return read_as(WordsKind(option.words), option.name, expr, names)
        value = evaluate(expr, names)
        if isinstance(expr, ast.NameExpr) and value.value in option.words:
            return Expr("word", value.value, span=expr.span)
        words = " or ".join(f"`{word}`" for word in option.words)
        help = f"write `{value.value}`, without quotes" if value.value in option.words else ""
        message = f"`{option.name}` of `{signature.name}` takes {words}, not {show_value(value)}"
        raise mistake("bad-value", message, expr.span, help, origin(expr, names))


def _node_head(node: ast.NodeDecl, reads: Sequence[str]) -> str:
    """Return the text of a node statement up to the attributes.

    In the text, the node reads the columns and states in `reads`. The statement `node` may read others.
    """
    label = f"{node.label.text}: " if node.label else ""
    writes = f" -> {', '.join(name.text for name in node.writes)}" if node.writes else ""
    return f"node {label}{node.worker.text}.{node.verb.text}({', '.join(reads)}){writes}"


def _check_type(kind: Plain, value: Expr, subject: str, related: tuple[tuple[Span, str], ...]) -> Expr:
    """Return the value if it has the option's type, or raise a Fault.

    A whole number that is written as a float, such as 2.0, counts as an int.
    """
    if kind in BOUNDED:
        bounds = BOUNDED[kind]
        return (
            bounds.fit(subject, value, related) if isinstance(bounds, Below) else fit(bounds, subject, value, related)
        )
    number = value.value if value.kind == "number" else None
    if kind == "int" and isinstance(number, int | float) and float(number).is_integer():
        return Expr("number", int(number), span=value.span)
    if value.kind != {"bool": "bool", "int": "", "float": "number", "str": "string"}[kind]:
        raise mistake(
            "bad-value", f"{subject} takes {TYPES[kind]}, not {show_value(value)}", value.span, related=related
        )
    return value
