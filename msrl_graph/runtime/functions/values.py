"""Conversion of values between the columns of the dock and the user's Python code.

Invariant: a value that the user's code returns fits its column, or BadResult says what was returned and what is
expected.
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
from ...ir.signatures import GIVEN, CallKind, Signature, read_signatures_as
from ..data.columns import DTYPES, Array, ColumnData, ragged, texts
from ..data.numerics import vocabulary_size
from ..data.tokens import Tokens, node_tokenizer
from ..process import shipped_files
from ..process.task_report import RunError
from .own_process import guarded_call
from .user_traceback import BadResult, describe_reason, describe_steps

MAX_FLOAT32 = float(np.finfo(np.float32).max)


class NotNumbers(TypeError):
    """The error for a value that a numeric column cannot hold.

    If the value has several items, `item` describes the first item that is not allowed.
    """

    def __init__(self, item: str = "") -> None:
        super().__init__(item)
        self.item = item


class ReturnChecker:
    """A check of values that a user's code returns for the columns `names`."""

    def __init__(self, plan: Plan, names: tuple[str, ...]) -> None:
        self.graph = plan.graph
        self.stops = plan.deploy.run.on_nan == "stop"
        self.vocabularies = {column: vocabulary_size(plan, column) for column in names}
        self.numbers = {
            column.name for column in plan.graph.columns if DTYPES[column.element] is np.float32 and not column.dims
        }

    def check(self, name: str, value: Any, lengths: Mapping[str, int]) -> Any:
        """Return a value of the column `name`, converted to the column's type.

        `lengths` are the lengths of other columns of the row. Raises BadResult if the value does not fit the column.
        """
        if type(value) is float and name in self.numbers and -MAX_FLOAT32 <= value <= MAX_FLOAT32:  # the common case
            return value
        if value is None and name in self.graph.optional:
            return math.nan
        column = self.graph.column(name)
        if column.element == "json":
            return _to_json(name, value)
        if column.element == "text":
            return _check_text(name, value)
        try:
            array = pure_numbers(value, DTYPES[column.element])
        except NotNumbers as error:
            inside = f" with {error.item} in it" if error.item else ""
            hint = "; only a column that no node reads may lack a value" if value is None and not column.dims else ""
            raise BadResult(
                f"it returned {describe_briefly(value)}{inside} for `{name}`, where {column.element} belongs{hint}"
            ) from None
        if array.ndim != len(column.dims):
            expected = (
                "one number"
                if not column.dims
                else "one value a token"
                if len(column.dims) == 1
                else "a row of values a token"
            )
            raise BadResult(f"it returned {describe_briefly(value)} for `{name}`, where {expected} belongs")
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
    """The arguments that a function gets for parameters with fixed names (`GIVEN`).

    The names are `iteration`, `rng` and `tokenizer`. A function gets the arguments for these names in addition to
    columns and options.
    """

    def __init__(self, signature: Signature, node: Node, plan: Plan) -> None:
        self.names = tuple(name for name in signature.fills if name in GIVEN)
        self.seed = plan.deploy.run.seed
        self.node = node.name
        # Its import takes seconds, so it is made only for functions that use it.
        self.tokenizer = node_tokenizer(plan, node).chat() if "tokenizer" in self.names else None

    def __call__(self, task: str, iteration: int, unit: int) -> dict[str, Any]:
        """Return the arguments for one call of the function in an iteration.

        `task` is the name of the task, and `unit` is the number of the row or group.
        """
        values: dict[str, Any] = {"iteration": iteration, "tokenizer": self.tokenizer}
        if "rng" in self.names:
            values["rng"] = noise.RandomStream(self.seed, "function", self.node, task).generator(iteration, unit)
        return {name: values[name] for name in self.names}

    def episode_seed(self, task: str, iteration: int, unit: int) -> int:
        """Return a unit's seed, for an environment that makes its own random generator."""
        return int(noise.RandomStream(self.seed, "episode", self.node, task).keys(iteration, unit)) >> 33


def values_for_function(column: ColumnData, element: str, rows: range, text: bool, tokens: Tokens | None) -> list[Any]:
    """Return the values of some rows of a column, in the form that functions get.

    - The value of a text column is a string.
    - The value of a JSON column is the parsed JSON, or the JSON text if `text` is true.
    - The value of a column of tokens is an array, or the decoded string if a tokenizer (`tokens`) is passed.

    The caller owns each value and may change it.
    """
    if element in ("text", "json"):
        texts = [column.text(row) for row in rows]
        return texts if element == "text" or text else [json.loads(json_text) for json_text in texts]
    values = [column[row] for row in rows]
    return tokens.decode(values) if tokens else [row.copy() for row in values]


def load_with_signature(call: Expr, kind: CallKind) -> tuple[Callable[..., Any], Signature]:
    """Return the function that a program calls, with its signature.

    The function is defined in msrl_graph, or in a user's file ("path.py:name").
    """
    return load_function(call, kind), signature_of(call, kind)


def load_function(call: Expr, kind: CallKind) -> Callable[..., Any]:
    """Import the function that a program calls, and return the function."""
    path, _, function = str(call.value).rpartition(":")
    target: Callable[..., Any] = (
        getattr(import_user_file(path, call), function) if path else algorithms.load(kind, function)
    )
    return target


def signature_of(call: Expr, kind: CallKind) -> Signature:
    """Return the signature of the function that a program calls.

    The function itself is not imported.
    """
    path, _, function = str(call.value).rpartition(":")
    if not path:
        return algorithms.library()[kind, function][0]
    return read_signatures_as(kind, shipped_files.find_copy(path).read_text(encoding="utf-8-sig"))[function]


def import_user_file(path: str, call: Expr) -> Any:
    """Import the file at `path`, which the program names in `call`; return the module.

    Raises RunError if the import fails.
    """
    try:
        with guarded_call(os.getpid()):
            return shipped_files.import_file(path)
    except (Exception, SystemExit) as error:
        message = f"{path} ({call.span.place}) cannot be imported: {describe_reason(error)}"
        raise RunError("\n  ".join([message, *describe_steps(error)])) from error


def describe_briefly(value: Any) -> str:
    """Describe a value in a few words."""
    if hasattr(value, "__len__") and not isinstance(value, str) and getattr(value, "ndim", None) != 0:
        return f"{type(value).__name__} of {len(value)}"
    plain = value.item() if isinstance(value, np.generic) else value
    return "None" if value is None else f"{type(value).__name__} {plain!r:.40}"


def by_row(name: str, values: Any, size: int) -> Any:
    """Return the values that a function returned for the `size` rows of a group.

    The values must be a sequence, or an array of any library, with one value for each row in order. Raises BadResult
    for any other value, such as a dict, a set or a generator, because the items of such an object are not one value for
    each row.
    """
    rows = values
    hint = ""
    if not isinstance(values, Sequence) and hasattr(values, "__array__"):
        rows = _to_array(values) if not _is_masked(values) else None
    if isinstance(rows, str | bytes | bytearray | memoryview) or not isinstance(rows, Sequence | np.ndarray):
        hint = ", in their order: return a list, a tuple or an array"
    elif getattr(rows, "ndim", 1) > 0 and len(rows) == size:
        return rows
    raise BadResult(
        f"it returned {describe_briefly(values)} for `{name}`, where one value for each of {size} rows belongs{hint}"
    )


def pure_numbers(value: Any, dtype: Any) -> Array:
    """Convert a number, or a sequence of numbers, to an array of `dtype`.

    Rounding to the precision of `dtype` is allowed. Raises NotNumbers if anything else would be lost: text, None,
    complex numbers, masked values, a fraction in a whole number, or a finite number beyond the range of `dtype`.
    """
    if _is_masked(value):
        raise NotNumbers("masked values")
    try:
        source = _to_array(value)
        kind = source.dtype.kind
        if source.dtype == dtype:  # nothing can be lost; a copy, since the function may change its array later
            return source.copy()
        # The common case: finite floats in the range of `dtype`. NaN fails the comparison and is handled below.
        if kind == "f" and np.dtype(dtype).kind == "f" and np.abs(source).max(initial=0) <= np.finfo(dtype).max:
            return source.astype(dtype)
        wrong = np.zeros(source.shape, bool)
        if kind == "O":
            wrong = np.reshape([not isinstance(item, Real | Decimal) for item in source.flat], source.shape)
        elif kind not in "biuf" and not (kind == "V" and np.can_cast(source.dtype, np.float32)):  # V: bfloat16 of jax
            wrong[...] = True
        if not wrong.any():
            with np.errstate(invalid="ignore", over="ignore"):
                array: Array = source.astype(dtype)
                if array.dtype.kind in "ib":
                    wrong = array != source
                elif (lost := ~np.isfinite(array)).any():
                    wrong[lost] = np.isfinite(source[lost].astype(np.float64))
            if not wrong.any():
                return array
    except (TypeError, ValueError, OverflowError):
        raise NotNumbers from None
    raise NotNumbers(describe_briefly(source[wrong][0]) if source.ndim else "")


def _to_array(value: Any) -> Array:
    """Convert a value to a NumPy array. Torch tensors may be on any device."""
    if isinstance(value, list | tuple) and len(value) and hasattr(value[0], "detach"):
        value = [_to_array(item) for item in value]
    elif hasattr(value, "detach"):  # without importing torch, which takes seconds
        value = value.detach().cpu()
        value = value.float() if "bfloat16" in str(value.dtype) else value
    return np.asarray(value)


def _is_masked(value: Any) -> bool:
    return isinstance(value, np.ma.MaskedArray) and bool(np.ma.is_masked(value))


def _check_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadResult(f"it returned {describe_briefly(value)} for `{name}`, where text belongs")
    if half := half_character(value):
        fix = 'to replace it, return `text.encode("utf-8", "replace").decode()`'
        raise BadResult(f"it returned {half} for `{name}`, where text belongs; {fix}")
    return value


def _to_json(name: str, value: Any) -> str:
    """Serialize a value as JSON. Raises BadResult if JSON would change the value.

    The JSON text parses to the same value again, except that tuples become lists.
    """
    try:
        text = as_json(value)
        if (key := _find_odd_key(value)) is not None:
            raise Misfit(f"a key that is not text: {describe_briefly(key)}", "JSON belongs")
    except Misfit as misfit:
        raise BadResult(f"it returned {describe_briefly(value)} for `{name}`: {misfit}") from None
    return text


def _find_odd_key(value: Any) -> Any:
    """Find a dictionary key that is not a string, at any depth of a value.

    Returns None if there is no such key. JSON would turn such a key into a string, and might make two keys equal.
    """
    if isinstance(value, dict):
        odd = next((key for key in value if not isinstance(key, str)), None)
        return odd if odd is not None else _find_odd_key(list(value.values()))
    if isinstance(value, list | tuple):
        return next((odd for item in value if (odd := _find_odd_key(item)) is not None), None)
    return None
