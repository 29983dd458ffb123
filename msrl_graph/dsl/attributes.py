"""Conversion of a statement's attributes from the syntax tree to values.

For each of its attributes, a statement declares the kind of value that the attribute accepts (ir/attributes.py). Each
value is converted to that kind.

Invariant: no attribute is ignored. An attribute that the statement does not declare is rejected as unknown.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from ..diagnostics import Span, nearest
from ..ir.graph import Expr
from ..ir.kinds import (
    COUNT,
    MOST,
    UNIT_NAMES,
    CountsKind,
    DrawsKind,
    ExtentKind,
    FlagKind,
    FormKind,
    NameKind,
    NumericKind,
    QuantityKind,
    SettingsKind,
    StringKind,
    TrackersKind,
    ValueKind,
    VariablesKind,
    WordsKind,
)
from . import ast, foreign_names
from .expressions import Names, Problems, evaluate, mistake


class FormReader(Protocol):
    """A reader for attributes whose possible values depend on the node.

    `read` converts the expression of an attribute to a value, or raises a Fault.
    """

    def read(self, key: str, expr: ast.Expr, names: Names) -> Expr: ...


def read_as(kind: ValueKind, key: str, expr: ast.Expr, names: Names) -> Expr:
    """Convert an attribute's expression to a value of type `kind`, or raise a Fault.

    `key` is the name of the attribute, for error messages.
    """
    match kind:
        case NumericKind():
            return fit(kind, f"`{key}`", evaluate(expr, names), origin(expr, names))
        case WordsKind():
            return _read_word(kind, key, expr, names)
        case ExtentKind():
            return _read_extent(kind, key, expr, names)
        case FlagKind():
            value = evaluate(expr, names)
            if value.kind != "bool":
                raise mistake("bad-value", f"`{key}` takes {kind}", expr.span, related=origin(expr, names))
            return value
        case StringKind():
            return _read_string(kind, key, expr, names)
        case QuantityKind():
            return _read_quantity(kind, key, expr, names)
        case CountsKind():
            if not isinstance(expr, ast.List) or not expr.items:
                raise mistake("bad-value", f"`{key}` takes a list of whole numbers", expr.span)
            return Expr("list", args=tuple(read_as(COUNT, key, item, names) for item in expr.items), span=expr.span)
        case DrawsKind():
            return _read_draws(kind, key, expr, names)
        case SettingsKind():
            return _read_settings(kind, key, expr, names)
        case VariablesKind():
            return _read_variables(kind, key, expr, names)
        case NameKind():
            return _read_name(kind, key, expr)
        case TrackersKind():
            return _read_trackers(kind, key, expr)
    raise AssertionError(f"no way to read {kind!r}")


def fit(kind: NumericKind, subject: str, value: Expr, related: tuple[tuple[Span, str], ...] = ()) -> Expr:
    """Return `value` as a number if the number is in the range of `kind`.

    Raises a Fault for any other value. `subject` names the value in the error message. `related` are notes for the
    message.
    """
    if value.kind == "quantity":
        raise mistake("bad-unit", f"{subject} takes a plain number, and this has a unit", value.span, related=related)
    number = value.value
    if isinstance(number, int | float) and number > kind.high == MOST:
        raise mistake("bad-value", f"{subject} is too large", value.span, related=related)
    fits = value.kind == "number" and isinstance(number, int | float) and kind.low <= number <= kind.high
    if not fits or (kind.above and number == kind.low) or (kind.whole and not float(number).is_integer()):  # type: ignore[arg-type]
        raise mistake("bad-value", f"{subject} takes {kind}, not {show_value(value)}", value.span, related=related)
    assert isinstance(number, int | float)
    return Expr("number", int(number) if kind.whole else number, span=value.span)


def _read_word(kind: WordsKind, key: str, expr: ast.Expr, names: Names) -> Expr:
    if isinstance(expr, ast.NameExpr) and expr.text in kind.words:
        return Expr("word", expr.text, span=expr.span)
    if isinstance(expr, ast.NameExpr) and expr.text in names.params:
        value = evaluate(expr, names)
        if value.kind == "string" and value.value in kind.words:
            return Expr("word", value.value, span=expr.span)
    text = f"`{expr.text}`" if isinstance(expr, ast.NameExpr) else "this"
    help = foreign_names.word(expr.text if isinstance(expr, ast.NameExpr) else "", kind.words)
    raise mistake("unknown-option", f"{text} is not a value of `{key}`", expr.span, help)


def _read_extent(kind: ExtentKind, key: str, expr: ast.Expr, names: Names) -> Expr:
    """Read a word, a number or a list of parts; a param can have each of them."""
    if isinstance(expr, ast.List):
        parts = [(item.text if isinstance(item, ast.NameExpr) else "", item.span) for item in expr.items]
    elif isinstance(expr, ast.NameExpr) and expr.text not in names.params:
        if expr.text in kind.words:
            return Expr("word", expr.text, span=expr.span)
        alone = f"write `{key} = [{expr.text}]`" if expr.text in kind.parts else ""
        help = alone or foreign_names.word(expr.text, kind.words + kind.parts)
        raise mistake("unknown-option", f"`{expr.text}` is not a value of `{key}`", expr.span, help)
    else:
        value = evaluate(expr, names)
        if value.kind == "string" and value.value in kind.words:
            return Expr("word", value.value, span=expr.span)
        if value.kind == "number":
            return fit(COUNT, f"`{key}`", value, origin(expr, names))
        parts = [(str(item.value), item.span) for item in value.args]
    if not parts:
        raise mistake("bad-value", f"`{key}` takes {kind}", expr.span, related=origin(expr, names))
    seen: dict[str, Span] = {}
    for part, span in parts:
        if part not in kind.parts:
            help = foreign_names.word(part, kind.parts)
            raise mistake("unknown-option", f"`{part}` is not in the list that `{key}` takes", span, help)
        if part in seen:
            related = ((seen[part], "named here first"),)
            raise mistake("duplicate-name", f"`{part}` is named twice", span, related=related)
        seen[part] = span
    return Expr("list", args=tuple(Expr("word", part, span=span) for part, span in parts), span=expr.span)


def _read_string(kind: StringKind, key: str, expr: ast.Expr, names: Names) -> Expr:
    if isinstance(expr, ast.NameExpr) and expr.text not in names.params:
        close = difflib.get_close_matches(expr.text, kind.known, n=1)
        help = f'write `"{close[0] if close else expr.text}"`'
        raise mistake("bad-value", f"`{key}` takes a string between double quotes", expr.span, help)
    value = evaluate(expr, names)
    items = value.args if kind.several and value.kind == "list" else (value,)
    if any(item.kind != "string" for item in items):
        help = f'write `{key} = "{expr.text}"`' if isinstance(expr, ast.NameExpr) else ""
        raise mistake("bad-value", f"`{key}` takes a string between double quotes", expr.span, help)
    if kind.several and not all(item.value for item in items):
        raise mistake(
            "bad-value",
            f"`{key}` takes strings of one character or more",
            expr.span,
            "every text contains the empty string",
        )
    return value


def _read_quantity(kind: QuantityKind, key: str, expr: ast.Expr, names: Names) -> Expr:
    value = evaluate(expr, names)
    # `376 TFLOP` is how a datasheet writes TFLOP/s.
    if value.unit != kind.unit and not (kind.unit == "FLOP/s" and value.unit == "FLOP"):
        help = f"write a number and its unit, as in `{kind.example}`"
        message = f"`{key}` takes {UNIT_NAMES[kind.unit]}, not {UNIT_NAMES[value.unit]}"
        raise mistake("bad-unit", message, expr.span, help, origin(expr, names))
    if not isinstance(value.value, int | float) or value.value <= 0:
        raise mistake("bad-value", f"`{key}` must be above 0", expr.span, related=origin(expr, names))
    return Expr("quantity", value.value, unit=kind.unit, span=expr.span)


def _read_name(kind: NameKind, key: str, expr: ast.Expr) -> Expr:
    if kind.several and isinstance(expr, ast.List):
        return Expr("list", args=tuple(_read_name(NameKind(), key, item) for item in expr.items), span=expr.span)
    if not isinstance(expr, ast.NameExpr) or "." in expr.text:
        raise mistake("bad-value", f"`{key}` takes a name", expr.span)
    return Expr("word", expr.text, span=expr.span)


def _read_trackers(kind: TrackersKind, key: str, expr: ast.Expr) -> Expr:
    """Read a list of trackers; dsl/trackers.py checks that they exist."""
    items = expr.items if isinstance(expr, ast.List) else (expr,)
    values: dict[str, Expr] = {}
    for item in items:
        if isinstance(item, ast.Literal_) and item.kind == "string":
            value = Expr("string", str(item.value), span=item.span)
        elif isinstance(item, ast.NameExpr) and "." not in item.text:
            value = Expr("word", item.text, span=item.span)
        else:
            raise mistake("bad-value", f"`{key}` takes {kind}", item.span)
        if (first := values.setdefault(str(value.value), value)) is not value:
            related = ((first.span, "named here first"),)
            raise mistake("duplicate-name", f"`{value.value}` is named twice", item.span, related=related)
    return Expr("list", args=tuple(values.values()), span=expr.span)


def _read_draws(kind: DrawsKind, key: str, expr: ast.Expr, names: Names) -> Expr:
    calls = expr.items if isinstance(expr, ast.List) else (expr,)
    return Expr("list", args=tuple(_read_draw(kind, key, call, names) for call in calls), span=expr.span)


def _read_draw(kind: DrawsKind, key: str, expr: ast.Expr, names: Names) -> Expr:
    """Read one call in an evaluation's `draws`: `draw(actor.generate, samples = 1)`."""
    if not isinstance(expr, ast.Call) or expr.quoted or expr.name.text != "draw":
        raise mistake("bad-value", f"`{key}` takes {kind}", expr.span)
    first, rest = (expr.args[0], expr.args[1:]) if expr.args else (None, ())
    if first is None or first.key is not None or not isinstance(first.value, ast.NameExpr):
        span = first.span if first else expr.span
        raise mistake(
            "bad-value", "the first argument of `draw` is a generation", span, "as in `draw(actor.generate, …)`"
        )
    known: dict[str, ValueKind] = {"samples": COUNT, "temperature": NumericKind(0)}
    values = {"": Expr("word", first.value.text, span=first.value.span), **_read_keywords("draw", rest, known, names)}
    if len(values) == 1:
        raise mistake("bad-value", "this `draw` has no settings", expr.span, "add `samples = 1` or `temperature = 0`")
    return Expr("call", "draw", tuple(values.values()), tuple(values), span=expr.span)


def _read_settings(kind: SettingsKind, key: str, expr: ast.Expr, names: Names) -> Expr:
    """Read a call with settings, such as `lora(rank = 16)`.

    The name alone stands for the call without arguments.
    """
    bare = isinstance(expr, ast.NameExpr) and expr.text == kind.name
    if not bare and (not isinstance(expr, ast.Call) or expr.quoted or expr.name.text != kind.name):
        raise mistake("bad-value", f"`{key}` takes {kind}", expr.span)
    arguments = expr.args if isinstance(expr, ast.Call) else ()
    values = _read_keywords(kind.name, arguments, kind.declared.kinds(), names)
    return Expr("call", kind.name, tuple(values.values()), tuple(values), span=expr.span)


def _read_keywords(
    call: str, arguments: tuple[ast.Arg, ...], kinds: Mapping[str, ValueKind], names: Names
) -> dict[str, Expr]:
    """Read the keyword arguments of a call."""
    values: dict[str, Expr] = {}
    for argument in arguments:
        name = argument.key.text if argument.key else ""
        if name not in kinds:
            message = (
                f"`{call}` has no argument `{name}`" if name else f"`{call}` takes its settings as keyword arguments"
            )
            raise mistake("bad-value", message, argument.span, nearest(name, kinds))
        if name in values:
            raise mistake("duplicate-name", f"`{name}` is given twice", argument.span)
        values[name] = read_as(kinds[name], name, argument.value, names)
    return values


def _read_variables(kind: VariablesKind, key: str, expr: ast.Expr, names: Names) -> Expr:
    """Read named settings: `template(enable_thinking = false)`."""
    if not isinstance(expr, ast.Call) or expr.quoted or expr.name.text != kind.call:
        raise mistake("bad-value", f"`{key}` takes {kind}", expr.span)
    values: dict[str, Expr] = {}
    for argument in expr.args:
        name = argument.key.text if argument.key else ""
        if not name:
            message = f"`{kind.call}` takes its settings as keyword arguments"
            raise mistake("bad-value", message, argument.span, f"as in `{kind.call}(enable_thinking = false)`")
        if name in values:
            raise mistake("duplicate-name", f"`{name}` is given twice", argument.span)
        value = evaluate(argument.value, names)
        if value.kind not in ("bool", "number", "string"):
            raise mistake("bad-value", f"`{name}` takes a number, a string, `true` or `false`", argument.span)
        values[name] = value
    return Expr("call", kind.call, tuple(values.values()), tuple(values), span=expr.span)


def read_attributes(
    attrs: tuple[ast.Attr, ...],
    statement: str,
    kinds: Mapping[str, ValueKind],
    names: Names,
    problems: Problems,
    form_readers: Mapping[FormKind, FormReader] = MappingProxyType({}),
) -> dict[str, Expr]:
    """Read the attributes of a statement; report mistakes to `problems`.

    - `kinds`: for each attribute that the statement declares, the kind of value that the attribute accepts.
    - `form_readers`: the readers for attributes whose possible values depend on the node.
    """
    values: dict[str, Expr] = {}
    seen: dict[str, Span] = {}
    for attr in attrs:
        key = attr.key.text
        with problems.catching():
            if key in seen:
                raise mistake(
                    "duplicate-name",
                    f"`{key}` is given twice",
                    attr.key.span,
                    related=((seen[key], "given here first"),),
                )
            seen[key] = attr.key.span
            if key not in kinds:
                help = foreign_names.attribute(statement, key, kinds)
                raise mistake(
                    "unknown-attribute", f"{_with_article(statement)} has no attribute `{key}`", attr.key.span, help
                )
            kind = kinds[key]
            values[key] = (
                form_readers[kind].read(key, attr.value, names)
                if isinstance(kind, FormKind)
                else read_as(kind, key, attr.value, names)
            )
    return values


def origin(expr: ast.Expr, names: Names) -> tuple[tuple[Span, str], ...]:
    """Return a note with the position at which a param gets its value.

    `expr` is the name of the param. For any other expression, the result is empty.
    """
    value = names.params.get(expr.text) if isinstance(expr, ast.NameExpr) else None
    return ((value.span, f"`{value}` comes from here"),) if value is not None and value.span.line else ()


def show_value(value: Expr) -> str:
    return "a list" if value.kind == "list" else f"`{value}`"


def _with_article(statement: str) -> str:
    return f"a {statement}" if statement.endswith(" edge") else f"`{statement}`"
