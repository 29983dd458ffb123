"""Function nodes: calls of the user's functions for the rows of a batch.

A function node divides the rows of a batch into units, calls the function for each unit, and assigns the results to
rows.

Invariant: a function sees the rows of its unit and no other rows. A value that a function returns fits its column, or
the run ends with a message that has the node, its line, the row and the returned value. The results do not depend on
the host, on the order in which rows arrive, or on the number of concurrent calls.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...analysis.rowsets import rowsets
from ...ir.attributes import CallAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ..data.columns import Array, ColumnData, ColumnRows, Verdicts, concatenate_rows
from ..data.numerics import rows_not_finite
from ..data.tokens import column_tokenizer
from ..dock.messages import Batch
from ..dock.readers import NodeReads
from ..process import row_progress
from ..process.task import Task
from ..process.task_report import NextValues, RunError
from .async_caller import AsyncCaller
from .crash_journal import CrashJournal
from .instances import Failure
from .units import Unit, UnitFailure, UnitFunction, UnitOutcome, UnitResult, row_filter
from .user_traceback import describe_failure
from .values import ReturnChecker, values_for_function
from .workers import Workers, uses_workers

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass
class Results:
    """The results of a function node for a batch, or for a part of a batch.

    - `columns`: for each written column, row numbers and the values of these rows. If the node is a filter, the only
      column is the column of the filter's verdicts.
    - `states`: for each state that the function computes, its values for the next iteration.
    - `failed`: for each unit that failed and leaves the iteration, the failure and how many rows the unit has. The keys
      say in words which unit or row failed.
    - `rows`: how many rows the batch or the part has.
    - `last`: true if no other part of the batch comes after this part.
    """

    columns: dict[str, ColumnRows] = field(default_factory=dict)
    states: dict[str, NextValues] = field(default_factory=dict)
    failed: dict[str, tuple[Failure, int]] = field(default_factory=dict)
    rows: int = 0
    last: bool = True

    @classmethod
    def joined(cls, parts: Sequence[Results]) -> Results:
        """Merge the results of all parts of one batch."""
        merged = cls(rows=sum(part.rows for part in parts))
        for name in parts[0].columns:
            merged.columns[name] = concatenate_rows([part.columns[name] for part in parts])
        for part in parts:
            merged.failed |= part.failed
            for name, next_values in part.states.items():
                values = merged.states.setdefault(name, NextValues())
                values.units += next_values.units
                values.values += next_values.values
        return merged


class _OfUnit(list[Any]):
    """A list with one value per row, in which all rows of a unit have the same value."""


class FunctionNode:
    """A function node of a plan, which can be called.

    - `reader`: the columns and rows that the dock passes to the node (NodeReads).
    - `note`: the crash journal, which records the node's current call.
    - `workers`: worker processes that call the function for rows or groups in parallel. They are not used if the
      function must run in this process.
    """

    def __init__(
        self,
        node: Node,
        plan: Plan,
        reader: NodeReads,
        note: CrashJournal | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.node = node
        self.graph = plan.graph
        self.reader = reader
        self.note = note or CrashJournal()
        self.return_checker = ReturnChecker(plan, node.writes)
        sieve = rowsets(plan.graph).sieves.get(node.name)
        # The dock's column for which rows stay.
        self.drops = sieve.column if sieve is not None and sieve.failures else ""
        self.sieve = row_filter(sieve)
        # States that come with the rows, as columns do.
        self.per_row = {state.name for state in plan.graph.states if state.per}
        call = CallAttributes.of(node).functions[0]
        self.comparison = call if call.kind != "call" else None
        if self.comparison is None:
            self.of_unit = of_unit = UnitFunction(node, plan, reader, self.note)
            self.signature = signature = of_unit.signature
            self.workers = workers if workers is not None and uses_workers(node) else None
            self.async_caller = AsyncCaller(of_unit) if signature.waits and node.per != "batch" else None
            self.many = None
            if self.workers is None:
                self.many = getattr(of_unit.call, "many", None) if of_unit.single else None
            renamed = call.columns()
            # Parameters and their columns or states, where the node reads them.
            known = (*node.reads, *node.states)
            self.parameters = [
                (parameter, renamed.get(parameter, parameter))
                for parameter in signature.columns
                if renamed.get(parameter, parameter) in known
            ]
            if signature.rest:
                bound_columns = {column for _, column in self.parameters}
                self.parameters += [(signature.rest, column) for column in node.reads if column not in bound_columns]
            ids = {column.name for column in plan.graph.columns if column.element == "i32" and column.dims}
            self.tokens = {
                column: column_tokenizer(plan, column)
                for parameter, column in self.parameters
                if parameter in signature.text and column in ids
            }
            # For each written column, the columns whose length it must have.
            self.like = {
                column: [dim.like for dim in self.graph.column(column).dims if dim.like] for column in node.writes
            }

    def find_spoilt_rows(self, batch: Batch) -> Array:
        """Return which rows may get a wrong result because of infinite or NaN inputs.

        If a unit has several rows, an infinite or NaN input of one row spoils all rows of the unit.
        """
        spoilt_rows = np.zeros(len(batch.rows), bool)
        for name in self.node.reads:
            spoilt_rows |= rows_not_finite(batch.columns[name])
        if self.node.per == "row" or not len(spoilt_rows):
            return spoilt_rows
        return np.repeat(
            np.logical_or.reduceat(spoilt_rows, np.cumsum(batch.share.sizes) - batch.share.sizes), batch.share.sizes
        )

    def __call__(self, batch: Batch, task: Task) -> Results:
        """Return the results for a batch."""
        return Results.joined([*self.parts(batch, task)])

    def parts(self, batch: Batch, task: Task, part_seconds: float = math.inf) -> Iterator[Results]:
        """Yield the results for a batch in parts, each computed in about `part_seconds`.

        So finished rows do not wait for the other rows of the batch. The division into parts changes no value.
        """
        if self.comparison is not None:
            yield self._make_verdicts(batch.rows, self._compare(batch, task).astype(np.int32))
            return
        part = _Part(self)
        done = 0
        row_count = len(batch.rows)
        row_progress.report(0, row_count)
        with closing(self._call_units(batch, task)) as outcomes:  # an error leaves no call in progress
            for unit, outcome in outcomes:
                if isinstance(outcome, UnitFailure):
                    message = describe_failure(
                        self.node,
                        outcome.failure.summary,
                        f"{outcome.where} of iteration {task.number}",
                        unit.arguments,
                    )
                    if not self.drops:
                        raise RunError(message)
                    part.fail(outcome.where, unit.rows, outcome.failure)
                else:
                    part.add(outcome)
                row_progress.report(done := unit.rows.stop, row_count)
                if done < row_count and time.monotonic() - part.since >= part_seconds:
                    yield part.results(batch, done, last=False)
                    part = _Part(self, done)
        yield part.results(batch, row_count, last=True)

    def _call_units(self, batch: Batch, task: Task) -> Generator[tuple[Unit, UnitOutcome]]:
        """Call the function for each unit, and yield each unit with its outcome, in order."""
        units = self._units(batch, task, arguments := self._arguments(batch, task))
        if self.workers is not None:
            return self.workers.map_units(self.node.name, units, task)
        if self.async_caller is not None:
            return self.async_caller.map_units(units, task)
        if self.many and (self.node.per == "row" or (batch.share.sizes == 1).all()):
            results = self._call_many(batch, task, arguments)
            return (
                (unit, self.of_unit.check_result(unit, result)) for unit, result in zip(units, results, strict=True)
            )
        return ((unit, self.of_unit(unit, task)) for unit in units)

    def _units(self, batch: Batch, task: Task, arguments: list[tuple[str, Any]]) -> Iterator[Unit]:
        grouped = self.node.per != "row"
        numbers = self.reader.numbers(task)
        start = 0
        sizes = batch.share.sizes.tolist() if grouped else [1] * len(batch.rows)
        units = (batch.share.units if grouped else batch.rows).tolist()
        most = numbers.repeats[self.reader.rows]
        scope = self.of_unit.scope
        batch_rows = batch.rows.tolist()
        for unit, size in zip(units, sizes, strict=True):
            rows = slice(start, start := start + size)
            targets: dict[str, list[int]] = {}
            lengths: dict[str, list[dict[str, int]]] = {}
            for name, row_set in self.of_unit.written.items():
                positions: Sequence[int] = range(rows.start, rows.stop)
                if row_set == self.reader.rows:
                    targets[name] = batch_rows[rows]
                else:
                    wanted, first = np.unique(
                        numbers.above(batch.rows[rows], self.reader.rows, row_set), return_index=True
                    )
                    targets[name] = wanted.tolist()
                    positions = (rows.start + first).tolist()
                like = self.like[name]
                lengths[name] = [self._lengths(like, batch, position) if like else {} for position in positions]
            unit_arguments = [(parameter, self._unit_argument(values, rows)) for parameter, values in arguments]
            yield Unit(unit, f"{scope} {unit}", unit_arguments, rows, targets, lengths, most)

    def _arguments(self, batch: Batch, task: Task) -> list[tuple[str, Any]]:
        """Return the arguments of the function for a batch, as (name, values) pairs.

        A name is a parameter of the function. If the function has a parameter `*columns`, each column that this
        parameter binds has a pair of its own, with the column's name. The values are a list or an array with one value
        per row, or one number if the parameter is a state.
        """
        return [
            (column if parameter == self.signature.rest else parameter, self._argument(batch, task, column, parameter))
            for parameter, column in self.parameters
        ]

    def _argument(self, batch: Batch, task: Task, name: str, parameter: str) -> Any:
        if name in self.node.states and name not in self.per_row:
            return task.states[name]
        column = batch.columns[name]
        if name in self.node.states:
            return column.values.copy() if self.node.per == "batch" else _OfUnit(column.values.tolist())
        if not self.of_unit.single and column.offsets is None:
            return column.values.copy()
        text = parameter in self.signature.text
        tokens = self.tokens.get(name) if text else None
        as_text = text and parameter not in self.signature.answers
        return values_for_function(column, self.graph.column(name).element, range(len(column)), as_text, tokens)

    def _unit_argument(self, values: Any, rows: slice) -> Any:
        """Return the value that a parameter has for one unit.

        `values` are the values of the parameter for the batch, and `rows` are the positions of the unit's rows. The
        result is a single value if the unit is one row, or if all rows of the unit share the value. In all other cases,
        the result has one value per row.
        """
        if not isinstance(values, (list, np.ndarray)):
            return values
        return values[rows.start] if self.of_unit.single or isinstance(values, _OfUnit) else values[rows]

    def _call_many(self, batch: Batch, task: Task, arguments: list[tuple[str, Any]]) -> Iterator[Any]:
        """Call the variant of the function that takes many rows at a time (`many`).

        `arguments` are the arguments for all rows of the batch. Returns the results of all rows.
        """
        assert self.many is not None
        where = f"{len(batch.rows)} rows"
        # The defaults are those of the function for one row.
        options = {
            **(self.of_unit.call.__kwdefaults__ or {}),
            **self.of_unit.options,
        }
        try:
            with self.note.record_call(f"{self.node.name}: {where} of {task.key}"):
                return iter(self.many(**dict(arguments), **options))
        except (Exception, SystemExit) as error:
            raise RunError(describe_failure(self.node, error, f"{where} of iteration {task.number}")) from error

    def _compare(self, batch: Batch, task: Task) -> Array:
        assert self.comparison is not None
        side, number = self.comparison.args
        run_state = str(side.value) in self.node.states and str(side.value) not in self.per_row
        left = task.states[str(side.value)] if run_state else batch.columns[str(side.value)].values
        return np.broadcast_to(COMPARISONS[self.comparison.kind](left, number.literal()), len(batch.rows))

    def _make_verdicts(self, rows: Array, times: Array) -> Results:
        assert self.sieve is not None
        return Results({self.sieve.column: Verdicts(rows, ColumnData(times))}, rows=len(rows))

    def _lengths(self, columns: Sequence[str], batch: Batch, position: int) -> dict[str, int]:
        """Return the lengths that the values of `columns` have in one row of the batch.

        `position` is the position of the row. Columns that the batch does not have are left out.
        """
        return {name: len(batch.columns[name][position]) for name in columns if name in batch.columns}


class _Part:
    """The outcomes for one part of a batch, which begins with the row at `begin`.

    - `values`: for each column or state, the numbers of its rows or units, and their values.
    - `times`: for a filter, how many times each row passes.
    - `failed`: maps the name of a unit or row that failed to the failure and the number of rows that it removes.
    - `dropped`: the positions of the rows that failed.
    """

    def __init__(self, function: FunctionNode, begin: int = 0) -> None:
        self.function = function
        self.begin = begin
        self.since = time.monotonic()
        names = function.node.gives or function.node.writes
        self.values: dict[str, tuple[list[int], list[Any]]] = {name: ([], []) for name in names}
        self.times: list[Array] = []
        self.failed: dict[str, tuple[Failure, int]] = {}
        self.dropped: list[slice] = []

    def add(self, result: UnitResult) -> None:
        if result.times is not None:
            self.times.append(result.times)
        for name, number, value in result.values:
            numbers, values = self.values[name]
            numbers.append(number)
            values.append(value)

    def fail(self, where: str, rows: slice, failure: Failure) -> None:
        self.failed[where] = (failure, rows.stop - rows.start)
        self.dropped.append(rows)

    def results(self, batch: Batch, end: int, last: bool) -> Results:
        """Return the results of the rows from position `begin` up to position `end`.

        `last` is true if no other part of the batch follows.
        """
        function = self.function
        rows = batch.rows[self.begin : end]
        if function.sieve is not None:
            filter_results = function._make_verdicts(rows, np.concatenate([*self.times, np.zeros(0, np.int32)]))
            return replace(filter_results, last=last)
        columns = {
            column: ColumnRows(
                np.asarray(self.values[column][0], np.int64),
                function.return_checker.column(column, self.values[column][1]),
            )
            for column in function.node.writes
        }
        if function.drops:
            stay = np.ones(len(batch.rows), np.int32)
            for dropped_rows in self.dropped:
                stay[dropped_rows] = 0
            columns[function.drops] = Verdicts(rows, ColumnData(stay[self.begin : end]))
        states = {name: NextValues(*self.values[name]) for name in function.node.sets}
        return Results(columns, states, self.failed, len(rows), last)
