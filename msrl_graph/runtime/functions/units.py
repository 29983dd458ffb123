"""Calls of a user's function for one unit: a row, a group, or the batch.

Invariant: the result of a function for a unit depends on the unit alone, not on the time or on the process that calls
the function. Either the result fits the columns of the node, or BadResult says what was returned. The key of a
function's random generator is (seed, node, task, iteration, unit).
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ... import algorithms
from ...analysis.rowsets import Sieve, rowsets
from ...ir.attributes import CallAttributes
from ...ir.graph import Expr, Node
from ...ir.plan import Plan
from ..data.columns import Array
from ..dock.readers import NodeReads
from ..process.task import Task
from .crash_journal import CrashJournal, ProcessDied
from .instances import Failure
from .own_process import guarded_call
from .user_traceback import BadResult
from .values import (
    InjectedArguments,
    NotNumbers,
    ReturnChecker,
    by_row,
    describe_briefly,
    load_function,
    pure_numbers,
    signature_of,
)


class Unit(NamedTuple):
    """The input of one call of a function.

    The class is a NamedTuple, because each row may need a Unit, and a NamedTuple is built faster than a frozen
    dataclass.

    - `number`: the number of the row or group.
    - `where`: the name of the row or group in messages.
    - `arguments`: the arguments of the function, as (parameter, value) pairs.
    - `rows`: the positions of the unit's rows in the batch.
    - `targets`: for each column that the node writes, the rows that get a value from this unit.
    - `lengths`: for each column that the node writes, one dictionary per row in `targets`. The dictionary has the
      lengths that other columns have in this row. The written value must have the same length as these columns.
    - `most`: the maximum number of times that a filter may pass a row.
    """

    number: int
    where: str
    arguments: Sequence[tuple[str, Any]]
    rows: slice
    targets: Mapping[str, Sequence[int]]
    lengths: Mapping[str, Sequence[Mapping[str, int]]]
    most: int

    @property
    def size(self) -> int:
        return int(self.rows.stop - self.rows.start)


class UnitResult(NamedTuple):
    """The checked result of one unit.

    - `values`: (column, row, value) or (state, unit, value) triples.
    - `times`: for a filter, how many times each row passes.
    """

    values: Sequence[tuple[str, int, Any]] = ()
    times: Array | None = None


@dataclass(frozen=True)
class UnitFailure:
    """The reason why a unit has no result.

    `where` says in words which unit or row failed.
    """

    failure: Failure
    where: str


UnitOutcome = UnitResult | UnitFailure


class UnitFunction:
    """The user's function of a node. The first call imports the function.

    `reader` says which columns and rows the dock passes to the node. `note` is the crash journal, which records the
    call in progress.
    """

    def __init__(self, node: Node, plan: Plan, reader: NodeReads, note: CrashJournal | None = None) -> None:
        self.node = node
        self.note = note or CrashJournal()
        self.expr = CallAttributes.of(node).functions[0]
        self.scope = "row" if node.per == "row" else "the batch" if node.per == "batch" else node.per
        self.signature = signature_of(self.expr, "function")
        # A function of one row can be called for a group of one row: its value belongs to the row above.
        self.alone = node.per != "row" and self.signature.scope == "row" and ":" not in str(self.expr.value)
        self.single = node.per == "row" or self.alone
        self.returned = ReturnChecker(plan, node.writes)
        self.filled = InjectedArguments(self.signature, node, plan)
        self.options = options_of(self.expr)
        row_sets = rowsets(plan.graph)
        self.sieve = row_filter(row_sets.sieves.get(node.name))
        self.written = {column: row_sets.columns[column] for column in node.writes}  # the row set of each column
        # The columns that have one value for a unit. The other columns have one value for each row.
        self.one = {
            name
            for name, row_set in self.written.items()
            if node.per == "row" or self.alone or row_set == reader.unit != reader.rows
        }

    @cached_property
    def call(self) -> Any:
        return load_function(self.expr, "function")

    def __call__(self, unit: Unit, task: Task) -> UnitOutcome:
        """Call the function for a unit. If the function raises, return a UnitFailure."""
        try:
            self._check_size(unit)
            with self.note.record_call(f"{self.node.name}: {unit.where} of {task.key}"):
                result = self._invoke(unit, task)
                if inspect.iscoroutine(result) and self.signature.waits:
                    result = asyncio.run(result)
            return self._parse(unit, result)
        except (Exception, SystemExit) as error:  # an exit would end this process and each replacement
            return self._failure(unit, error)

    async def call_async(self, unit: Unit, task: Task) -> UnitOutcome:
        """Call the `async` function for a unit, in an event loop that other calls share."""
        try:
            self._check_size(unit)
            with guarded_call(os.getpid()):
                result = self._invoke(unit, task)
                if inspect.isawaitable(result):
                    result = await result
            return self._parse(unit, result)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # an exit would end the loop
            return self._failure(unit, error)

    def check_result(self, unit: Unit, result: Any) -> UnitOutcome:
        """Return the outcome of a unit from `result`, which the function has returned.

        The outcome is a UnitFailure if `result` does not fit the node's columns.
        """
        try:
            self._check_size(unit)
            return self._parse(unit, result)
        except Exception as error:
            return self._failure(unit, error)

    def _failure(self, unit: Unit, error: BaseException) -> UnitFailure:
        row = error.row if isinstance(error, BadResult) else None
        where = unit.where if row is None or self.single else f"{unit.where}, row {row}"
        return UnitFailure(Failure.from_error(error, "exited" if isinstance(error, ProcessDied) else None), where)

    def _check_size(self, unit: Unit) -> None:
        if self.alone and unit.size != 1:
            raise BadResult(f"`{self.signature.name}` takes one row, and the group has {unit.size}")

    def _invoke(self, unit: Unit, task: Task) -> Any:
        options = self.options | self.filled(task.name, task.number, unit.number)
        if self.signature.rest:  # Python requires that parameters before `*columns` are passed by position
            return self.call(*(value for _, value in unit.arguments), **options)
        return self.call(**dict(unit.arguments), **options)

    def _parse(self, unit: Unit, result: Any) -> UnitResult:
        """Assign the value that the function returned to columns and rows.

        Raises BadResult if the value does not fit the columns.
        """
        if self.sieve is not None:
            return UnitResult(times=self._row_counts(result, unit.size, unit.most))
        return UnitResult([*self._parse_values(unit, result)])

    def _parse_values(self, unit: Unit, result: Any) -> Iterator[tuple[str, int, Any]]:
        for name, value in self._by_column(result):
            if name not in self.written:
                if np.isfinite(number := self._next_value(name, value)):  # `on_nan = skip` leaves the state unchanged
                    yield name, unit.number, number
                continue
            rows = unit.targets[name]
            one = name in self.one
            items = [value] if one else by_row(name, value, len(rows))
            for row, item, lengths in zip(rows, items, unit.lengths[name], strict=True):
                try:
                    yield name, row, self.returned.check(name, item, lengths)
                except BadResult as error:
                    error.row = None if one else row
                    raise

    def _row_counts(self, result: Any, size: int, most: int) -> Array:
        """Return how many times a filter passes each row of a unit.

        `result` is the value that the filter's function returned, `size` is the number of rows, and `most` is the
        maximum for a row. Raises BadResult if the value cannot be used.
        """
        if CallAttributes.of(self.node).keep is not None:
            truths = _to_array(result)
            if truths.dtype != bool or truths.size != size or truths.ndim > (self.node.per != "row"):
                belongs = "one truth value belongs" if self.node.per == "row" else f"{size} truth values belong"
                raise BadResult(f"it returned {describe_briefly(result)}, where {belongs}")
            return truths.reshape(-1).astype(np.int32)
        places = _to_array(result)
        if places.shape == (0,):
            places = places.astype(np.int64)
        if (
            places.ndim != 1
            or places.dtype.kind not in "iu"
            or (len(places) and not 0 <= places.min() <= places.max() < size)
        ):
            shown = f"{describe_briefly(result)}: {result!r:.60}" if places.ndim else describe_briefly(result)
            raise BadResult(f"it returned {shown}, where places from 0 to {size - 1} belong")
        times = np.bincount(places, minlength=size).astype(np.int32)
        if size and times.max() > most:
            raise BadResult(
                f"it returned place {times.argmax()} {times.max():,} times, but a row may continue at most {most:,} "
                "times"
            )
        return times

    def _by_column(self, result: Any) -> list[tuple[str, Any]]:
        """Divide a result into (name of a column or state, value) pairs.

        Raises BadResult if the number of values is wrong.
        """
        gives = self.node.gives or self.node.writes
        if len(gives) == 1:
            return [(gives[0], result)]
        if not isinstance(result, tuple) or len(result) != len(gives):
            raise BadResult(
                f"it returned {describe_briefly(result)}, where a tuple of {len(gives)} belongs: {', '.join(gives)}"
            )
        return list(zip(gives, result, strict=True))

    def _next_value(self, name: str, value: Any) -> float:
        """Return the next value of a state as a float.

        Raises BadResult if `value` is not one number.
        """
        try:
            number = pure_numbers(value, np.float64)
        except NotNumbers:
            raise BadResult(
                f"it returned {describe_briefly(value)} for the state `{name}`, where one finite number belongs"
            ) from None
        if number.ndim or (self.returned.stops and not np.isfinite(number)):
            raise BadResult(
                f"it returned {describe_briefly(value)} for the state `{name}`, where one finite number belongs"
            )
        return float(number)


def options_of(call: Expr) -> dict[str, Any]:
    """Return the options that the program passes in a call, as Python values.

    If an option is itself a call, the call is made, and its result is the value.
    """
    arguments = {
        key: argument
        for key, argument in zip(call.keys, call.args, strict=True)
        if argument.kind not in ("column", "state")
    }
    return {
        key: algorithms.load("option", str(argument.value))(**options_of(argument))
        if argument.kind == "call"
        else argument.literal()
        for key, argument in arguments.items()
    }


def _to_array(result: Any) -> Array:
    """Convert the value that a function returned to an array.

    If the value is a masked array, or if NumPy cannot convert it, the result is an array that contains only None.
    """
    if np.ma.is_masked(result):
        return np.asarray(None)
    try:
        return np.asarray(result)
    except ValueError:  # lists of different lengths
        return np.asarray(None)


def row_filter(sieve: Sieve | None) -> Sieve | None:
    """Return `sieve` if it belongs to a filter of the program, or else None.

    A sieve describes a node at which rows leave the iteration. The node is a filter, or a node that drops only its
    failed rows. The result is None if the node is not a filter.
    """
    return None if sieve is None or sieve.failures else sieve


__all__ = ["Unit", "UnitFailure", "UnitFunction", "UnitOutcome", "UnitResult", "options_of", "row_filter"]
