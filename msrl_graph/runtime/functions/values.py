"""Values of rows as Python of a user's sees them, and as it returns them.

Invariant: what is returned fits its column, or BadResult says what was returned and what belongs there.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from ... import algorithms, noise
from ...data.characters import half_character
from ...data.fields import Misfit, as_json
from ...ir.graph import Expr, Node
from ...ir.plan import Plan
from ...ir.signatures import GIVEN, CallKind, Signature, called_as
from ..data.columns import DTYPES, Array, ColumnData, ragged, texts
from ..data.numerics import vocabulary
from ..data.tokens import Tokens, of_node
from ..process import shipped_files
from ..process.task_report import RunError
from .own_process import call_of
from .user_traceback import BadResult, reason, steps

LARGEST = float(np.finfo(np.float32).max)


class NotNumbers(TypeError):
    """A value that a numeric column cannot hold; `item` says which of several values is the first odd one."""

    def __init__(self, item: str = "") -> None:
        super().__init__(item)
        self.item = item


class ReturnChecker:
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
        if value is None and name in self.graph.optional:
            return math.nan
        column = self.graph.column(name)
        if column.element == "json":
            return _json(name, value)
        if column.element == "text":
            return _text(name, value)
        try:
            array = pure_numbers(value, DTYPES[column.element])
        except NotNumbers as error:
            inside = f" with {error.item} in it" if error.item else ""
            hint = "; only a column that no node reads may lack a value" if value is None and not column.dims else ""
            raise BadResult(
                f"it returned {brief(value)}{inside} for `{name}`, where {column.element} belongs{hint}"
            ) from None
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

    def column(self, name: str, values: list[Any]) -> ColumnData:
        column = self.graph.column(name)
        if column.element in ("text", "json"):
            return texts(values)
        dtype = DTYPES[column.element]
        return ragged(values, dtype) if column.dims else ColumnData(np.asarray(values, dtype))


class InjectedArguments:
    """What a function of a node gets by the names of its parameters, beside columns and options (functions.GIVEN)."""

    def __init__(self, signature: Signature, node: Node, plan: Plan) -> None:
        self.names = tuple(name for name in signature.fills if name in GIVEN)
        self.seed = plan.deploy.run.seed
        self.node = node.name
        # Its import costs seconds, which only those wait for who ask.
        self.tokenizer = of_node(plan, node).chat() if "tokenizer" in self.names else None

    def __call__(self, task: str, iteration: int, unit: int) -> dict[str, Any]:
        """For a unit of an iteration of a task, by its name."""
        found: dict[str, Any] = {"iteration": iteration, "tokenizer": self.tokenizer}
        if "rng" in self.names:
            found["rng"] = noise.RandomStream(self.seed, "function", self.node, task).generator(iteration, unit)
        return {name: found[name] for name in self.names}

    def seed_of(self, task: str, iteration: int, unit: int) -> int:
        """A seed for a unit of an iteration of a task, for an environment that makes its own generator of it."""
        return int(noise.RandomStream(self.seed, "episode", self.node, task).keys(iteration, unit)) >> 33


def seen(column: ColumnData, element: str, rows: range, text: bool, tokens: Tokens | None) -> list[Any]:
    """What a function sees of rows of a column: text, or what JSON stands for, unless it wants `text` of that too;
    tokens as arrays, or decoded where a tokenizer is given. Each value is the caller's own, to be changed as it
    pleases."""
    if element in ("text", "json"):
        texts = [column.text(row) for row in rows]
        return texts if element == "text" or text else [json.loads(t) for t in texts]
    found = [column[row] for row in rows]
    return tokens.decode(found) if tokens else [row.copy() for row in found]


def called(call: Expr, kind: CallKind) -> tuple[Callable[..., Any], Signature]:
    """What a program calls: of the package, or of a file ("path.py:name")."""
    return loaded(call, kind), signature_of(call, kind)


def loaded(call: Expr, kind: CallKind) -> Callable[..., Any]:
    """What a program calls, without its signature."""
    path, _, function = str(call.value).rpartition(":")
    found: Callable[..., Any] = getattr(imported(path, call), function) if path else algorithms.load(kind, function)
    return found


def signature_of(call: Expr, kind: CallKind) -> Signature:
    """The signature of what a program calls, which is not imported for it."""
    path, _, function = str(call.value).rpartition(":")
    if not path:
        return algorithms.library()[kind, function][0]
    return called_as(kind, shipped_files.found(path).read_text(encoding="utf-8-sig"))[function]


def imported(path: str, call: Expr) -> Any:
    """The module of a file that a program names in a call."""
    try:
        with call_of(os.getpid()):
            return shipped_files.module(path)
    except (Exception, SystemExit) as error:
        what = f"{path} ({call.span.place}) cannot be imported: {reason(error)}"
        raise RunError("\n  ".join([what, *steps(error)])) from error


def brief(value: Any) -> str:
    """A value in few words."""
    if hasattr(value, "__len__") and not isinstance(value, str) and getattr(value, "ndim", None) != 0:
        return f"{type(value).__name__} of {len(value)}"
    plain = value.item() if isinstance(value, np.generic) else value
    return "None" if value is None else f"{type(value).__name__} {plain!r:.40}"


def by_row(name: str, values: Any, size: int) -> Any:
    """What is returned for the `size` rows of a group, in their order: a sequence, or an array of any library.

    Raises BadResult for anything else, as a dict, a set or a generator: what these give when they are iterated over is
    not a value for each row.
    """
    rows = values
    hint = ""
    if not isinstance(values, Sequence) and hasattr(values, "__array__"):
        rows = _array(values) if not _masked(values) else None
    if isinstance(rows, str | bytes | bytearray | memoryview) or not isinstance(rows, Sequence | np.ndarray):
        hint = ", in their order: return a list, a tuple or an array"
    elif getattr(rows, "ndim", 1) > 0 and len(rows) == size:
        return rows
    raise BadResult(f"it returned {brief(values)} for `{name}`, where one value for each of {size} rows belongs{hint}")


def pure_numbers(value: Any, dtype: Any) -> Array:
    """A number, or a sequence of numbers, as an array of `dtype`.

    Rounding to the precision of `dtype` is allowed. Raises NotNumbers where anything else would be lost: text, None,
    complex numbers, masked values, a fraction in a whole number, or a finite number beyond the range of `dtype`.
    """
    if _masked(value):
        raise NotNumbers("masked values")
    try:
        given = _array(value)
        kind = given.dtype.kind
        if given.dtype == dtype:  # nothing can be lost; a copy, since the function may change its array later
            return given.copy()
        # The common case: finite floats in the range of `dtype`. NaN fails the comparison and is judged below.
        if kind == "f" and np.dtype(dtype).kind == "f" and np.abs(given).max(initial=0) <= np.finfo(dtype).max:
            return given.astype(dtype)
        wrong = np.zeros(given.shape, bool)
        if kind == "O":
            wrong = np.reshape([not isinstance(item, Real | Decimal) for item in given.flat], given.shape)
        elif kind not in "biuf" and not (kind == "V" and np.can_cast(given.dtype, np.float32)):  # V: bfloat16 of jax
            wrong[...] = True
        if not wrong.any():
            with np.errstate(invalid="ignore", over="ignore"):
                array: Array = given.astype(dtype)
                if array.dtype.kind in "ib":
                    wrong = array != given
                elif (lost := ~np.isfinite(array)).any():
                    wrong[lost] = np.isfinite(given[lost].astype(np.float64))
            if not wrong.any():
                return array
    except (TypeError, ValueError, OverflowError):
        raise NotNumbers from None
    raise NotNumbers(brief(given[wrong][0]) if given.ndim else "")


def _array(value: Any) -> Array:
    """What numpy makes of a value, torch's tensors on any device too."""
    if isinstance(value, list | tuple) and len(value) and hasattr(value[0], "detach"):
        value = [_array(item) for item in value]
    elif hasattr(value, "detach"):  # without an import of torch, which takes seconds
        value = value.detach().cpu()
        value = value.float() if "bfloat16" in str(value.dtype) else value
    return np.asarray(value)


def _masked(value: Any) -> bool:
    return isinstance(value, np.ma.MaskedArray) and bool(np.ma.is_masked(value))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadResult(f"it returned {brief(value)} for `{name}`, where text belongs")
    if half := half_character(value):
        fix = 'whole text is `text.encode("utf-8", "replace").decode()`'
        raise BadResult(f"it returned {half} for `{name}`, where text belongs; {fix}")
    return value


def _json(name: str, value: Any) -> str:
    """A value as JSON from which the same value is read, but for tuples, which become lists."""
    try:
        text = as_json(value)
        if (key := _odd_key(value)) is not None:
            raise Misfit(f"a key that is not text: {brief(key)}", "JSON belongs")
    except Misfit as misfit:
        raise BadResult(f"it returned {brief(value)} for `{name}`: {misfit}") from None
    return text


def _odd_key(value: Any) -> Any:
    """A key of a dictionary, however deep, that is not text: JSON would make it text, and of two keys one."""
    if isinstance(value, dict):
        odd = next((key for key in value if not isinstance(key, str)), None)
        return odd if odd is not None else _odd_key(list(value.values()))
    if isinstance(value, list | tuple):
        return next((odd for item in value if (odd := _odd_key(item)) is not None), None)
    return None
