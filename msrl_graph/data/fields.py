"""What a field of a data file can hold, by the type of its column.

Invariant: a value is taken as it is, or refused with what it is and what belongs in its place. Nothing is rounded, cut
or guessed. NumPy is imported for columns of numbers only, since the compiler reads the first rows of a file too.
"""

from __future__ import annotations

import json
import math
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
    """The numbers of an element: their NumPy `dtype`, the Python `types` that a file may have, and words for them."""

    dtype: str
    types: frozenset[type]
    one: str
    several: str


_FINITE = NumberField("float32", frozenset((int, float)), "a finite number", "finite numbers")
NUMBERS = {
    "i32": NumberField("int32", frozenset((int,)), "a whole number of 32 bits", "whole numbers of 32 bits"),
    "i64": NumberField("int64", frozenset((int,)), "a whole number of 64 bits", "whole numbers of 64 bits"),
    "f32": _FINITE,
    "bf16": _FINITE,
    "bool": NumberField("bool", frozenset((bool,)), "true or false", "true and false"),
}


class Misfit(ValueError):
    """`found` is in a field where `wanted` belongs."""

    def __init__(self, found: str, wanted: str) -> None:
        super().__init__(f"{found}, where {wanted}")
        self.found = found
        self.wanted = wanted


def take(value: Any, column: Column) -> str | Messages | Array:
    """A field's value for a column: text, which for `json` and for messages in a `text` column is JSON; messages, for
    tokens; or the numbers of a row, flat, in the dtype of the column's element. Raises Misfit."""
    if column.element == "json":
        return as_json(value)
    if column.element == "text":
        if are_messages(value):
            return as_json(_stated(value))
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return str(value)
        return _text(value, "text, a number or messages belong")
    if not holds_tokens(column):
        return _numbers(value, column)
    if isinstance(value, str) and (parsed := messages(value)) is not None:
        value = parsed  # as a `text` column has them, and a Parquet file of JSON
    wanted = "text, messages or token ids belong"
    if are_messages(value):
        if half := half_character_within(value):
            raise Misfit(half, wanted)
        return _stated(value)
    return _numbers(value, column, wanted) if isinstance(value, list) else _text(value, wanted)


def holds_tokens(column: Column) -> bool:
    """Whether a column may be written as text: tokens, each row as many as it has."""
    return column.element in ("i32", "i64") and len(column.dims) == 1 and column.dims[0].ragged


def _text(value: Any, wanted: str) -> str:
    if not isinstance(value, str):
        odd = isinstance(value, float) and not math.isfinite(value)
        raise Misfit(str(value) if odd else called(type(value)), wanted)
    if half := half_character(value):
        raise Misfit(half, wanted)
    return value


def called(kind: type) -> str:
    """The type of a JSON value in a word."""
    return "null" if kind is type(None) else kind.__name__


def as_json(value: Any) -> str:
    """A value as JSON. Raises Misfit for what JSON does not know."""
    try:
        return _text(json.dumps(value, ensure_ascii=False, allow_nan=False), "JSON belongs")
    except (TypeError, ValueError) as error:
        raise (
            error
            if isinstance(error, Misfit)
            else Misfit(f"what JSON does not know ({str(error).split(':')[0]})", "JSON belongs")
        ) from None


def _stated(value: Messages) -> Messages:
    """Drop the keys of messages that are null: a chat template takes a null for a value."""
    return [{k: v for k, v in message.items() if v is not None} for message in value]


def _numbers(value: Any, column: Column, wanted: str = "") -> Array:
    import numpy as np

    kind = NUMBERS[column.element]
    sizes = " x ".join(str(d.size) for d in column.dims if d.size and not d.ragged)
    wanted = wanted or (
        f"a list of {sizes + ' ' if sizes else ''}{kind.several} belongs" if column.dims else f"{kind.one} belongs"
    )
    flat = [value]
    for dim in column.dims:
        if odd := {called(type(v)) for v in flat if not isinstance(v, list)}:
            raise Misfit(min(odd), wanted)
        if dim.size and not dim.ragged and (lengths := {len(v) for v in flat} - {dim.size}):
            raise Misfit(f"a list of {min(lengths)}", wanted)
        flat = list(chain.from_iterable(flat))
    within = "a list with " if column.dims else ""
    if odd := {called(t) for t in set(map(type, flat)) - kind.types}:
        raise Misfit(within + min(odd), wanted)
    try:
        with np.errstate(over="ignore"):
            array: Array = np.asarray(flat, kind.dtype)
    except OverflowError:
        raise Misfit(f"{within}{max(flat, key=abs):.3g}", wanted) from None
    if not np.isfinite(array).all():
        raise Misfit(
            f"{within}{next(v for v, fine in zip(flat, np.isfinite(array), strict=True) if not fine):.3g}", wanted
        )
    return array
