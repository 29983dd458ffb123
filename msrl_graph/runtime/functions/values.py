"""Values of rows as Python of a user's sees them, and as it returns them.

Invariant: what is returned fits its column, or BadResult says what was returned and what belongs there.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ... import algorithms, noise
from ...ir.graph import Expr, Node
from ...ir.plan import Plan
from ...ir.signatures import GIVEN, CallKind, Signature, called_as
from ..data.columns import DTYPES, Array, Column, ragged, texts
from ..data.tokens import Tokens, of_node
from ..data.wrong import vocabulary
from ..process import shipped
from ..process.report import RunError
from .blame import BadResult, reason, steps

LARGEST = float(np.finfo(np.float32).max)


class Returned:
    """What is returned for the columns `names` of a plan."""

    def __init__(self, plan: Plan, names: tuple[str, ...]) -> None:
        self.graph = plan.graph
        self.stops = plan.deploy.run.on_nan == "stop"
        self.vocabularies = {c: vocabulary(plan, c) for c in names}
        self.numbers = {c.name for c in plan.graph.columns if DTYPES[c.element] is np.float32 and not c.dims}

    def checked(self, name: str, value: Any, lengths: Mapping[str, int]) -> Any:
        """A value as its column's type; BadResult where it is not. `lengths` are those of the row's other columns."""
        if type(value) is float and name in self.numbers and -LARGEST <= value <= LARGEST:  # most are
            return value
        column = self.graph.column(name)
        if column.element == "json":
            return json.dumps(value)
        if column.element == "text":
            if not isinstance(value, str):
                raise BadResult(f"it returned {brief(value)} for `{name}`, where text belongs")
            return value
        try:
            with np.errstate(invalid="ignore"):
                array: Array = np.asarray(value, DTYPES[column.element])
            given = np.asarray(value)
            if (
                value is None
                or given.dtype.kind in "SU"
                or (array.dtype.kind in "ib" and not np.array_equal(array, given))
            ):
                raise TypeError  # numpy makes nan of None, 3.5 of "3.5", and of 3.5 the whole number 3
        except (TypeError, ValueError, OverflowError):
            raise BadResult(f"it returned {brief(value)} for `{name}`, where {column.element} belongs") from None
        if array.ndim != len(column.dims):
            belongs = (
                "one number"
                if not column.dims
                else "one value a token"
                if len(column.dims) == 1
                else "a row of values a token"
            )
            raise BadResult(f"it returned {brief(value)} for `{name}`, where {belongs} belongs")
        for size, dim in zip(array.shape, column.dims, strict=True):
            if dim.like in lengths and size != lengths[dim.like]:
                raise BadResult(
                    f"it returned {size} values for `{name}`, where `{dim.like}` has {lengths[dim.like]} tokens"
                )
            if not dim.like and (size > dim.size if dim.ragged else size != dim.size):
                raise BadResult(
                    f"it returned {size} values for `{name}`, which holds {'at most ' if dim.ragged else ''}{dim.size}"
                )
        if self.stops and not np.isfinite(array).all():
            raise BadResult(f"it returned {array[~np.isfinite(array)].flat[0]} for `{name}`")
        size = self.vocabularies[name]
        if size and ((array < 0) | (array >= size)).any():
            raise BadResult(f"it returned {value} for `{name}`, where tokens from 0 to {size - 1} belong")
        return array

    def column(self, name: str, values: list[Any]) -> Column:
        column = self.graph.column(name)
        if column.element in ("text", "json"):
            return texts(values)
        dtype = DTYPES[column.element]
        return ragged(values, dtype) if column.dims else Column(np.asarray(values, dtype))


class Filled:
    """What a function of a node gets by the names of its parameters, beside columns and options (functions.GIVEN)."""

    def __init__(self, signature: Signature, node: Node, plan: Plan) -> None:
        self.names = tuple(name for name in signature.fills if name in GIVEN)
        self.seed, self.node = plan.deploy.run.seed, zlib.crc32(node.name.encode())
        # Its import costs seconds, which only those wait for who ask.
        self.tokenizer = of_node(plan, node).chat() if "tokenizer" in self.names else None

    def __call__(self, iteration: int, unit: int) -> dict[str, Any]:
        """For a unit of an iteration."""
        found: dict[str, Any] = {"iteration": iteration, "tokenizer": self.tokenizer}
        if "rng" in self.names:
            found["rng"] = noise.generator(self.seed, iteration, self.node, unit)
        return {name: found[name] for name in self.names}

    def seed_of(self, iteration: int, unit: int) -> int:
        """A seed for a unit of an iteration, of whoever makes generators of seeds."""
        return int(noise.generator(self.seed, iteration, self.node, unit).integers(2**31))


def seen(column: Column, element: str, rows: range, text: bool, tokens: Tokens | None) -> list[Any]:
    """What a function sees of rows of a column: text, or what JSON stands for, unless it wants `text` of that too;
    tokens as arrays, or decoded where a tokenizer is given."""
    if element in ("text", "json"):
        texts = [column.text(row) for row in rows]
        return texts if element == "text" or text else [json.loads(t) for t in texts]
    found = [column[row] for row in rows]
    return tokens.decode(found) if tokens else found


def called(call: Expr, kind: CallKind) -> tuple[Callable[..., Any], Signature]:
    """What a program calls: of the package, or of a file ("path.py:name")."""
    name = str(call.value)
    if ":" not in name:
        return algorithms.load(kind, name), algorithms.library()[kind, name][0]
    path, _, function = name.rpartition(":")
    return getattr(imported(path, call), function), called_as(
        kind, shipped.found(path).read_text(encoding="utf-8-sig")
    )[function]


def imported(path: str, call: Expr) -> Any:
    """The module of a file that a program names in a call."""
    try:
        return shipped.module(path)
    except (Exception, SystemExit) as error:
        what = f"{path} ({call.span.place}) cannot be imported: {reason(error)}"
        raise RunError("\n  ".join([what, *steps(error)])) from error


def brief(value: Any) -> str:
    """A value in few words."""
    if hasattr(value, "__len__") and not isinstance(value, str) and getattr(value, "ndim", None) != 0:
        return f"{type(value).__name__} of {len(value)}"
    plain = value.item() if isinstance(value, np.generic) else value
    return "None" if value is None else f"{type(value).__name__} {plain!r:.40}"
