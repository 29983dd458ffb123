"""Conversion of values in a data file to the types of a program's columns.

Invariant: a value is accepted as it is, or rejected with a message. The message says what the value is, and what is
expected. No value is rounded, truncated or guessed. NumPy is imported only for columns of numbers, since the compiler
also reads the first rows of a file.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..ir.graph import Column
from .characters import half_character, half_character_within
from .chat import Messages, are_messages, messages

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class NumberField:
    """The numbers that columns of an element type, such as `f32`, accept.

    - `dtype`: the NumPy dtype of the column.
    - `types`: the Python types that a value in a file can have.
    - `one`, `several`: the description of one value and of several values, for messages.
    """

    dtype: str
    types: frozenset[type]
    one: str
    several: str


_FINITE = NumberField("float32", frozenset((int, float)), "a finite number", "finite numbers")
NUMBERS = {
    "i16": NumberField("int16", frozenset((int,)), "a whole number of 16 bits", "whole numbers of 16 bits"),
    "i32": NumberField("int32", frozenset((int,)), "a whole number of 32 bits", "whole numbers of 32 bits"),
    "i64": NumberField("int64", frozenset((int,)), "a whole number of 64 bits", "whole numbers of 64 bits"),
    "f32": _FINITE,
    "bf16": _FINITE,
    "bool": NumberField("bool", frozenset((bool,)), "true or false", "true and false"),
}


class Cell(str):
    """The text of a cell in a CSV file, which may be a number or a truth value."""


class Misfit(ValueError):
    """An error for a field whose value does not fit its column.

    `found` describes the value, such as "a number". `wanted` is a clause about what is expected, such as "text
    belongs". A message joins the two: "a number, where text belongs".
    """

    def __init__(self, found: str, wanted: str) -> None:
        super().__init__(f"{found}, where {wanted}")
        self.found = found
        self.wanted = wanted


def take(value: Any, column: Column) -> str | Messages | Array:
    """Convert the value of a field for the column that reads it. Raises Misfit.

    The type of the result depends on the type of the column:

    - `json`: JSON text.
    - `text`: text. Messages become JSON text.
    - Tokens (see `holds_tokens`): text, messages, or a flat array of token ids.
    - Other numbers: a flat array of the numbers of the row, in the dtype of the column's element.
    """
    if type(value) in (str, Cell) and value.isascii() and column.element == "text":
        text: str = value
        return text
    if column.element == "json":
        return as_json(value)
    if column.element == "text":
        if are_messages(value):
            return as_json(_drop_nulls(value))
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return str(value)
        return _take_text(value, "text, a number or messages belong")
    if not holds_tokens(column):
        return _take_numbers(value, column)
    if isinstance(value, str) and (parsed := messages(value)) is not None:
        value = parsed  # `text` columns and Parquet files with JSON hold messages as text
    wanted = "text, messages or token ids belong"
    if are_messages(value):
        if half := half_character_within(value):
            raise Misfit(half, wanted)
        return _drop_nulls(value)
    return _take_numbers(value, column, wanted) if isinstance(value, list) else _take_text(value, wanted)


def as_prompt(value: Any, system: str, is_text: bool) -> Any:
    """Return a prompt as messages, as JSON text if `is_text`.

    Text becomes a message of the user. The message `system` is put before messages that have none. Token ids are
    rejected with Misfit, because they cannot follow a message.
    """
    if isinstance(value, str):
        conversation = messages(value) or [{"role": "user", "content": value}]
    elif are_messages(value):
        conversation = value
    else:
        raise Misfit("token ids", "text or messages belong, because of `system` or `chat`")
    if system and conversation[0]["role"] not in ("system", "developer"):
        conversation = [{"role": "system", "content": system}, *conversation]
    return json.dumps(conversation, ensure_ascii=False) if is_text else conversation


def _parse_cell(cell: Cell, kind: NumberField, wanted: str) -> int | float | bool:
    """Return the number or the truth value that a cell consists of. Raises Misfit."""
    parsed: Any = None
    with suppress(ValueError):
        parsed = json.loads(cell.strip().lower())
    if type(parsed) not in kind.types:
        raise Misfit(f"`{cell[:20]}`", wanted)
    number: int | float | bool = parsed
    return number


def holds_tokens(column: Column) -> bool:
    """Return whether a column holds tokens, so that a file can have text for it.

    A column of tokens has one dimension of integers, and the number of integers may differ from row to row.
    """
    return column.element in ("i32", "i64") and len(column.dims) == 1 and column.dims[0].ragged


def _take_text(value: Any, wanted: str) -> str:
    if not isinstance(value, str):
        is_not_finite = isinstance(value, float) and not math.isfinite(value)
        raise Misfit(str(value) if is_not_finite else type_name(type(value)), wanted)
    if half := half_character(value):
        raise Misfit(half, wanted)
    return value


def type_name(kind: type) -> str:
    """Return the name of the type of a JSON value: `null`, or the name in Python."""
    return "null" if kind is type(None) else kind.__name__


def as_json(value: Any) -> str:
    """Encode a value as JSON. Raises Misfit for a value that JSON cannot represent."""
    try:
        return _take_text(json.dumps(value, ensure_ascii=False, allow_nan=False), "JSON belongs")
    except (TypeError, ValueError) as error:
        raise (
            error
            if isinstance(error, Misfit)
            else Misfit(f"a value that JSON does not know ({str(error).split(':')[0]})", "JSON belongs")
        ) from None


def _drop_nulls(value: Messages) -> Messages:
    """Return messages without the keys whose value is null.

    A chat template would treat null as a value that the message states.
    """
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _take_numbers(value: Any, column: Column, wanted: str = "") -> Array:
    import numpy as np

    kind = NUMBERS[column.element]
    sizes = " x ".join(str(size.size) for size in column.dims if size.size and not size.ragged)
    wanted = wanted or (
        f"a list of {sizes + ' ' if sizes else ''}{kind.several} belongs" if column.dims else f"{kind.one} belongs"
    )
    flat = [value]
    for dim in column.dims:
        if wrong_types := {type_name(type(item)) for item in flat if not isinstance(item, list)}:
            raise Misfit(min(wrong_types), wanted)
        if dim.size and not dim.ragged and (lengths := {len(item) for item in flat} - {dim.size}):
            raise Misfit(f"a list of {min(lengths)}", wanted)
        flat = list(chain.from_iterable(flat))
    if isinstance(value, Cell):
        flat = [_parse_cell(value, kind, wanted)]
    context = "a list with " if column.dims else ""
    if wrong_types := {type_name(kind_of_item) for kind_of_item in set(map(type, flat)) - kind.types}:
        raise Misfit(context + min(wrong_types), wanted)
    try:
        with np.errstate(over="ignore"):
            array: Array = np.asarray(flat, kind.dtype)
    except OverflowError:
        raise Misfit(f"{context}{max(flat, key=abs):.3g}", wanted) from None
    if not np.isfinite(array).all():
        raise Misfit(
            f"{context}{next(item for item, finite in zip(flat, np.isfinite(array), strict=True) if not finite):.3g}",
            wanted,
        )
    return array
