"""Function nodes made callable: from the rows of a batch to units, and from what is made of these to rows.

Invariant: a function sees the rows of its scope and nothing else; what it returns fits its columns, or the run ends
with the node, its line, the row and what was returned. Neither the host, nor the order of arrival, nor how many units
are at work at once changes what comes out.
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

from ...ir.attributes import CallAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.rowsets import rowsets
from ..data.columns import Array, ColumnData, ColumnRows, Verdicts, joined
from ..data.numerics import not_finite
from ..data.tokens import of_column
from ..dock.messages import Batch
from ..dock.readers import NodeReads
from ..process import row_progress
from ..process.task import Task
from ..process.task_report import NextValues, RunError
from .async_caller import AsyncCaller
from .crash_journal import CrashJournal
from .instances import Failure
from .units import Unit, UnitFailure, UnitFunction, UnitOutcome, UnitResult, row_filter
from .user_traceback import blame
from .values import ReturnChecker, seen
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
    """What a node made of a batch, or of a part of its `rows`: rows by column (of a filter its verdicts), and next
    values by state; by the unit what failed and left, and its rows. `last`: nothing comes after it."""

    columns: dict[str, ColumnRows] = field(default_factory=dict)
    states: dict[str, NextValues] = field(default_factory=dict)
    failed: dict[str, tuple[Failure, int]] = field(default_factory=dict)
    rows: int = 0
    last: bool = True

    @classmethod
    def joined(cls, parts: Sequence[Results]) -> Results:
        """The results of all parts of a batch."""
        found = cls(rows=sum(part.rows for part in parts))
        for name in parts[0].columns:
            found.columns[name] = joined([part.columns[name] for part in parts])
        for part in parts:
            found.failed |= part.failed
            for name, some in part.states.items():
                values = found.states.setdefault(name, NextValues())
                values.units += some.units
                values.values += some.values
        return found


class _OfUnit(list[Any]):
    """Values of which all rows of a unit have the same."""


class FunctionNode:
    """A function node of a plan. `reader` is what the dock knows of it, `note` where it tells which call it is in;
    `workers` call it for single rows or groups side by side, unless it wants to be called here."""

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
        self.returned = ReturnChecker(plan, node.writes)
        sieve = rowsets(plan.graph).sieves.get(node.name)
        self.drops = sieve.column if sieve is not None and sieve.failures else ""  # the dock's name for which rows stay
        self.sieve = row_filter(sieve)
        self.per_row = {s.name for s in plan.graph.states if s.per}  # states that come with the rows, as columns do
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
            self.bound = [(p, renamed.get(p, p)) for p in signature.columns if renamed.get(p, p) in known]
            if signature.rest:
                taken = {c for _, c in self.bound}
                self.bound += [(signature.rest, c) for c in node.reads if c not in taken]
            ids = {c.name for c in plan.graph.columns if c.element == "i32" and c.dims}
            self.tokens = {c: of_column(plan, c) for p, c in self.bound if p in signature.text and c in ids}
            # For each written column, the columns whose length it must have.
            self.like = {c: [d.like for d in self.graph.column(c).dims if d.like] for c in node.writes}

    def spoilt(self, batch: Batch) -> Array:
        """The rows whose result may be wrong because something that the function saw was."""
        bad = np.zeros(len(batch.rows), bool)
        for name in self.node.reads:
            bad |= not_finite(batch.columns[name])
        if self.node.per == "row" or not len(bad):
            return bad
        return np.repeat(
            np.logical_or.reduceat(bad, np.cumsum(batch.share.sizes) - batch.share.sizes), batch.share.sizes
        )

    def __call__(self, batch: Batch, task: Task) -> Results:
        """What it makes of a batch."""
        return Results.joined([*self.parts(batch, task)])

    def parts(self, batch: Batch, task: Task, often: float = math.inf) -> Iterator[Results]:
        """What it makes of a batch, in parts of so many seconds: rows that are done do not wait for those that are not.
        How a batch is parted changes no value."""
        if self.comparison is not None:
            yield self._verdicts(batch.rows, self._compare(batch, task).astype(np.int32))
            return
        part = _Part(self)
        done = 0
        all_ = len(batch.rows)
        row_progress.report(0, all_)
        with closing(self._call_units(batch, task)) as outcomes:  # an error leaves no call in progress
            for unit, outcome in outcomes:
                if isinstance(outcome, UnitFailure):
                    told = blame(
                        self.node, outcome.failure.told, f"{outcome.where} of iteration {task.number}", unit.given
                    )
                    if not self.drops:
                        raise RunError(told)
                    part.fail(outcome.where, unit.rows, outcome.failure)
                else:
                    part.add(outcome)
                row_progress.report(done := unit.rows.stop, all_)
                if done < all_ and time.monotonic() - part.since >= often:
                    yield part.results(batch, done, last=False)
                    part = _Part(self, done)
        yield part.results(batch, all_, last=True)

    def _call_units(self, batch: Batch, task: Task) -> Generator[tuple[Unit, UnitOutcome]]:
        """Yield each unit with its outcome, in order."""
        units = self._units(batch, task, seen := self._seen(batch, task))
        if self.workers is not None:
            return self.workers.map_units(self.node.name, units, task)
        if self.async_caller is not None:
            return self.async_caller.map_units(units, task)
        if self.many and (self.node.per == "row" or (batch.share.sizes == 1).all()):
            results = self._at_once(batch, task, seen)
            return (
                (unit, self.of_unit.check_result(unit, result)) for unit, result in zip(units, results, strict=True)
            )
        return ((unit, self.of_unit(unit, task)) for unit in units)

    def _units(self, batch: Batch, task: Task, seen: list[tuple[str, Any]]) -> Iterator[Unit]:
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
            for name, of in self.of_unit.written.items():
                positions: Sequence[int] = range(rows.start, rows.stop)
                if of == self.reader.rows:
                    targets[name] = batch_rows[rows]
                else:
                    wanted, first = np.unique(numbers.above(batch.rows[rows], self.reader.rows, of), return_index=True)
                    targets[name] = wanted.tolist()
                    positions = (rows.start + first).tolist()
                like = self.like[name]
                lengths[name] = [self._lengths(like, batch, p) if like else {} for p in positions]
            given = [(p, self._of_unit(values, rows)) for p, values in seen]
            yield Unit(unit, f"{scope} {unit}", given, rows, targets, lengths, most)

    def _seen(self, batch: Batch, task: Task) -> list[tuple[str, Any]]:
        """Each parameter, or column of `*columns`, with what the function sees there: a value for each row, or one
        number, a state's."""
        return [(c if p == self.signature.rest else p, self._argument(batch, task, c, p)) for p, c in self.bound]

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
        return seen(column, self.graph.column(name).element, range(len(column)), text, tokens)

    def _of_unit(self, values: Any, rows: slice) -> Any:
        """The argument for the rows of a unit: one value where the unit is a row, or where there is one."""
        if not isinstance(values, (list, np.ndarray)):
            return values
        return values[rows.start] if self.of_unit.single or isinstance(values, _OfUnit) else values[rows]

    def _at_once(self, batch: Batch, task: Task, seen: list[tuple[str, Any]]) -> Iterator[Any]:
        """The results for all rows, of a function that takes many."""
        assert self.many is not None
        where = f"{len(batch.rows)} rows"
        options = {
            **(self.of_unit.call.__kwdefaults__ or {}),
            **self.of_unit.options,
        }  # the defaults stand where a row's function is
        try:
            with self.note.at(f"{self.node.name}: {where} of {task.key}"):
                return iter(self.many(**dict(seen), **options))
        except (Exception, SystemExit) as error:
            raise RunError(blame(self.node, error, f"{where} of iteration {task.number}")) from error

    def _compare(self, batch: Batch, task: Task) -> Array:
        assert self.comparison is not None
        side, number = self.comparison.args
        run_state = str(side.value) in self.node.states and str(side.value) not in self.per_row
        left = task.states[str(side.value)] if run_state else batch.columns[str(side.value)].values
        return np.broadcast_to(COMPARISONS[self.comparison.kind](left, number.literal()), len(batch.rows))

    def _verdicts(self, rows: Array, times: Array) -> Results:
        assert self.sieve is not None
        return Results({self.sieve.column: Verdicts(rows, ColumnData(times))}, rows=len(rows))

    def _lengths(self, columns: Sequence[str], batch: Batch, position: int) -> dict[str, int]:
        """Return the lengths of some columns in one row, without those that the batch lacks."""
        return {name: len(batch.columns[name][position]) for name in columns if name in batch.columns}


class _Part:
    """The outcomes of the rows of a batch from position `begin` on.

    - `values`: for each name, the rows or units and their values.
    - `times`: for a filter, how many times each row passes.
    - `failed`: the failures, by where they occurred; `dropped`: their rows.
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
        """As results, of the rows before the position `end`."""
        function = self.function
        rows = batch.rows[self.begin : end]
        if function.sieve is not None:
            found = function._verdicts(rows, np.concatenate([*self.times, np.zeros(0, np.int32)]))
            return replace(found, last=last)
        columns = {
            c: ColumnRows(np.asarray(self.values[c][0], np.int64), function.returned.column(c, self.values[c][1]))
            for c in function.node.writes
        }
        if function.drops:
            stay = np.ones(len(batch.rows), np.int32)
            for some in self.dropped:
                stay[some] = 0
            columns[function.drops] = Verdicts(rows, ColumnData(stay[self.begin : end]))
        states = {name: NextValues(*self.values[name]) for name in function.node.sets}
        return Results(columns, states, self.failed, len(rows), last)
