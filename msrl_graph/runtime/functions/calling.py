"""Function nodes made callable: from the rows of a batch to arguments, and from results to rows.

Invariant: a function sees the rows of its scope and nothing else; what it returns fits its columns, or the run ends
with the node, its line, the row and what was returned. A generator that it asks for is keyed by (seed, node, iteration,
unit), so that neither the host nor the order of arrival changes what it returns.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ... import algorithms
from ...ir.attributes import Call, Source
from ...ir.graph import Expr, Node
from ...ir.plan import Plan
from ...ir.rowsets import Sieve, rowsets
from ...ir.sequences import is_tokens
from ..data.columns import Array, Column, Piece, Verdicts, joined
from ..data.dataset import Dataset
from ..data.tokens import of_column
from ..data.wrong import not_finite
from ..dock.readers import Reader
from ..dock.wire import Batch
from ..process import row_progress
from ..process.report import NextValues, RunError
from ..process.task import Task
from .blame import BadResult, blame
from .instances import Failure
from .note import Note, ProcessDied
from .values import Filled, NotNumbers, Returned, brief, by_row, called, pure_numbers, seen

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

    columns: dict[str, Piece] = field(default_factory=dict)
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


class Function:
    """A function node of a plan. `reader` is what the dock knows of it, `note` where it tells which call it is in."""

    def __init__(self, node: Node, plan: Plan, reader: Reader, note: Note | None = None) -> None:
        self.node, self.graph, self.reader, self.note = node, plan.graph, reader, note or Note()
        self.returned = Returned(plan, node.writes)
        self.scope = "row" if node.per == "row" else "the batch" if node.per == "batch" else node.per
        found = rowsets(plan.graph)
        sieve: Sieve | None = found.sieves.get(node.name)
        self.drops = sieve.column if sieve is not None and sieve.failures else ""  # the dock's name for which rows stay
        self.sieve = None if self.drops else sieve
        self.written = {c: found.columns[c] for c in node.writes}  # the set of the rows of each
        self.per_row = {s.name for s in plan.graph.states if s.per}  # states that come with the rows, as columns do
        call = Call.of(node).functions[0]
        self.comparison = call if call.kind != "call" else None
        if self.comparison is None:
            self.call, self.signature = called(call, "function")
            # A function of one row may have a group that is one: a value for the row above it.
            self.alone = node.per != "row" and self.signature.scope == "row" and ":" not in str(call.value)
            self.filled = Filled(self.signature, node, plan)
            self.single = node.per == "row" or self.alone
            self.many = getattr(self.call, "many", None) if self.single else None
            self.options, renamed = options_of(call), call.columns()
            # Parameters and their columns or states, where the node reads them.
            known = (*node.reads, *node.states)
            self.bound = [(p, renamed.get(p, p)) for p in self.signature.columns if renamed.get(p, p) in known]
            if self.signature.rest:
                taken = {c for _, c in self.bound}
                self.bound += [(self.signature.rest, c) for c in node.reads if c not in taken]
            ids = {c.name for c in plan.graph.columns if c.element == "i32" and c.dims}
            self.tokens = {c: of_column(plan, c) for p, c in self.bound if p in self.signature.text and c in ids}

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
        grouped = self.node.per != "row"
        sizes = batch.share.sizes if grouped else np.ones(len(batch.rows), np.int64)
        numbers = self.reader.numbers(task)
        part, start, seen = _Part(self), 0, self._seen(batch, task)
        row_progress.report(0, len(batch.rows))
        results = self._at_once(batch, task, seen) if self.many and (sizes == 1).all() else None
        for unit, size in zip(batch.share.units if grouped else batch.rows, sizes, strict=True):
            if start > part.begin and time.monotonic() - part.since >= often:
                yield part.results(batch, start, last=False)
                part = _Part(self, start)
            rows = slice(start, start := start + int(size))
            where, given = f"{self.scope} {unit}", [(p, self._of_unit(values, rows)) for p, values in seen]
            mine: list[tuple[str, int, Any]] = []  # name, row or unit, value
            try:
                if self.alone and size != 1:
                    raise BadResult(f"`{self.signature.name}` is of one row, and there are {size}")
                result = next(results) if results else self._called(given, task, int(unit), where)
                if self.sieve is not None:
                    part.times.append(self._times(result, int(size), numbers.repeats[self.reader.rows]))
                    row_progress.report(start, len(batch.rows))
                    continue
                for name, value in self._by_column(result):
                    if name not in self.written:
                        if np.isfinite(
                            number := self._next(name, value)
                        ):  # under `on_nan = skip` a state stays as it is
                            mine.append((name, int(unit), number))
                        continue
                    wanted, first = batch.rows[rows], np.arange(int(size))
                    if self.written[name] != self.reader.rows:
                        wanted, first = np.unique(
                            numbers.above(wanted, self.reader.rows, self.written[name]), return_index=True
                        )
                    one = not grouped or self.alone or self.written[name] == self.reader.unit != self.reader.rows
                    for row, at, item in zip(
                        wanted, first, [value] if one else by_row(name, value, len(wanted)), strict=True
                    ):
                        where = where if one else f"{self.scope} {unit}, row {row}"
                        lengths = self._lengths(name, batch, rows.start + int(at))
                        mine.append((name, int(row), self.returned.checked(name, item, lengths)))
            except (Exception, SystemExit) as error:  # an exit would end this process, and who takes its place
                told = blame(self.node, error, f"{where} of iteration {task.number}", given)
                if not self.drops:
                    raise RunError(told) from error
                failure = Failure.of(error, "exited" if isinstance(error, ProcessDied) else None)
                part.fail(where, rows, failure)
                mine = []
            for name, of, value in mine:
                part.made[name][0].append(of)
                part.made[name][1].append(value)
            row_progress.report(start, len(batch.rows))
        yield part.results(batch, start, last=True)

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
        if not self.single and column.offsets is None:
            return column.values.copy()
        text = parameter in self.signature.text
        tokens = self.tokens.get(name) if text else None
        return seen(column, self.graph.column(name).element, range(len(column)), text, tokens)

    def _of_unit(self, values: Any, rows: slice) -> Any:
        """The argument for the rows of a unit: one value where the unit is a row, or where there is one."""
        if not isinstance(values, (list, np.ndarray)):
            return values
        return values[rows.start] if self.single or isinstance(values, _OfUnit) else values[rows]

    def _at_once(self, batch: Batch, task: Task, seen: list[tuple[str, Any]]) -> Iterator[Any]:
        """The results for all rows, of a function that takes many."""
        assert self.many is not None
        where = f"{len(batch.rows)} rows"
        options = {**(self.call.__kwdefaults__ or {}), **self.options}  # the defaults stand where a row's function is
        try:
            with self.note.at(f"{self.node.name}: {where} of {task.key}"):
                return iter(self.many(**dict(seen), **options))
        except (Exception, SystemExit) as error:
            raise RunError(blame(self.node, error, f"{where} of iteration {task.number}")) from error

    def _called(self, given: list[tuple[str, Any]], task: Task, unit: int, where: str) -> Any:
        """What the function returns for a unit."""
        options = self.options | self.filled(task.name, task.number, unit)
        with self.note.at(f"{self.node.name}: {where} of {task.key}"):
            # What comes before `*columns` is given by order, as Python wants it.
            return (
                self.call(*(v for _, v in given), **options)
                if self.signature.rest
                else self.call(**dict(given), **options)
            )

    def _compare(self, batch: Batch, task: Task) -> Array:
        assert self.comparison is not None
        side, number = self.comparison.args
        run_state = str(side.value) in self.node.states and str(side.value) not in self.per_row
        left = task.states[str(side.value)] if run_state else batch.columns[str(side.value)].values
        return np.broadcast_to(COMPARISONS[self.comparison.kind](left, number.literal()), len(batch.rows))

    def _times(self, result: Any, size: int, most: int) -> Array:
        """How often each row of a unit goes on; `most` times at most."""
        if Call.of(self.node).keep is not None:
            truths = _array(result)
            if truths.dtype != bool or truths.size != size or truths.ndim > (self.node.per != "row"):
                belongs = "one truth value belongs" if self.node.per == "row" else f"{size} truth values belong"
                raise BadResult(f"it returned {brief(result)}, where {belongs}")
            return truths.reshape(-1).astype(np.int32)
        places = _array(result)
        if places.shape == (0,):
            places = places.astype(np.int64)
        if (
            places.ndim != 1
            or places.dtype.kind not in "iu"
            or (len(places) and not 0 <= places.min() <= places.max() < size)
        ):
            shown = f"{brief(result)}: {result!r:.60}" if places.ndim else brief(result)
            raise BadResult(f"it returned {shown}, where places from 0 to {size - 1} belong")
        times = np.bincount(places, minlength=size).astype(np.int32)
        if size and times.max() > most:
            raise BadResult(
                f"it returned place {times.argmax()} {times.max():,} times, where a row may go on {most:,} "
                "times at most"
            )
        return times

    def _verdicts(self, rows: Array, times: Array) -> Results:
        assert self.sieve is not None
        return Results({self.sieve.column: Verdicts(rows, Column(times))}, rows=len(rows))

    def _by_column(self, result: Any) -> list[tuple[str, Any]]:
        """The result for each name that the node writes."""
        gives = self.node.gives or self.node.writes
        if len(gives) == 1:
            return [(gives[0], result)]
        if not isinstance(result, tuple) or len(result) != len(gives):
            raise BadResult(f"it returned {brief(result)}, where a tuple of {len(gives)} belongs: {', '.join(gives)}")
        return list(zip(gives, result, strict=True))

    def _lengths(self, name: str, batch: Batch, position: int) -> dict[str, int]:
        """How long those columns of a row are which a column has the length of."""
        return {
            d.like: len(batch.columns[d.like][position])
            for d in self.graph.column(name).dims
            if d.like in batch.columns
        }

    def _next(self, name: str, value: Any) -> float:
        """The next value of a state."""
        try:
            number = pure_numbers(value, np.float64)
        except NotNumbers:
            raise BadResult(
                f"it returned {brief(value)} for the state `{name}`, where one finite number belongs"
            ) from None
        if number.ndim or (self.returned.stops and not np.isfinite(number)):
            raise BadResult(f"it returned {brief(value)} for the state `{name}`, where one finite number belongs")
        return float(number)


class _Part:
    """What a function has made of the rows of a batch from the position `begin` on: by name rows or units and their
    values, how often each row goes on, and which rows failed."""

    def __init__(self, function: Function, begin: int = 0) -> None:
        self.function, self.begin, self.since = function, begin, time.monotonic()
        names = function.node.gives or function.node.writes
        self.made: dict[str, tuple[list[int], list[Any]]] = {name: ([], []) for name in names}
        self.times: list[Array] = []
        self.failed: dict[str, tuple[Failure, int]] = {}
        self.gone: list[slice] = []

    def fail(self, where: str, rows: slice, failure: Failure) -> None:
        self.failed[where] = (failure, rows.stop - rows.start)
        self.gone.append(rows)

    def results(self, batch: Batch, end: int, last: bool) -> Results:
        """As results, of the rows before the position `end`."""
        function, rows = self.function, batch.rows[self.begin : end]
        if function.sieve is not None:
            found = function._verdicts(rows, np.concatenate([*self.times, np.zeros(0, np.int32)]))
            return replace(found, last=last)
        columns = {
            c: Piece(np.asarray(self.made[c][0], np.int64), function.returned.column(c, self.made[c][1]))
            for c in function.node.writes
        }
        if function.drops:
            stay = np.ones(len(batch.rows), np.int32)
            for some in self.gone:
                stay[some] = 0
            columns[function.drops] = Verdicts(rows, Column(stay[self.begin : end]))
        states = {name: NextValues(*self.made[name]) for name in function.node.sets}
        return Results(columns, states, self.failed, len(rows), last)


def _array(result: Any) -> Array:
    """What numpy makes of a result, whatever it is."""
    if np.ma.is_masked(result):
        return np.asarray(None)
    try:
        return np.asarray(result)
    except ValueError:  # lists of unlike lengths
        return np.asarray(None)


class Weigher:
    """What draws prompts: from the states and the columns of all rows of the data to a weight for each."""

    def __init__(self, plan: Plan, data: Dataset) -> None:
        self.source = source = plan.graph.node("source")
        expr = Source.of(source).weights
        assert expr is not None
        self.call, signature = called(expr, "function")
        self.options, renamed = options_of(expr), expr.columns()
        self.filled, self.data, self.rows = Filled(signature, source, plan), data, len(data)
        self.bound = [(p, renamed.get(p, p)) for p in signature.columns]
        self.columns: dict[str, Callable[[], Any]] = {}  # of the data, by parameter: each call gets values of its own
        for parameter, name in self.bound:
            if name in source.weighs:
                text = parameter in signature.text
                tokens = data.tokens if text and is_tokens(plan.graph, name) else None
                column, element = data.columns[name].take(data.usable), plan.graph.column(name).element
                if column.offsets is None:
                    self.columns[parameter] = column.values.copy
                elif text or element == "text":  # what takes long to decode, and nobody can change
                    self.columns[parameter] = seen(column, element, range(self.rows), text, tokens).copy
                else:
                    self.columns[parameter] = partial(seen, column, element, range(self.rows), text, tokens)

    def __call__(self, tables: Mapping[str, Array], task: Task) -> Array:
        """The weights of an iteration, finite, none below 0 and some above it; `tables` are the states of each row."""
        states = {**task.draws, **{name: np.array(table) for name, table in tables.items()}}
        given = {p: states[name] for p, name in self.bound if name in states}
        given |= {parameter: values() for parameter, values in self.columns.items()}
        try:
            result = self.call(**given, **self.options, **self.filled(task.name, task.number, 0))
        except Exception as error:
            raise RunError(blame(self.source, error, "what `weights` reads", given.items())) from error
        try:
            found = pure_numbers(result, np.float64)
        except NotNumbers:
            found = np.zeros(0)
        what = f"`weights` of the source ({self.source.span.place})"
        if found.shape != (self.rows,):
            raise RunError(
                f"{what} returned {brief(result)}, where a number of 0 or more belongs for each of {self.rows} rows "
                "of the data"
            )
        if len(wrong := np.flatnonzero(~(np.isfinite(found) & (found >= 0)))):
            row, more = (
                self.data.where(int(wrong[0])),
                f", and so of {len(wrong) - 1} more of {self.rows}" if len(wrong) > 1 else "",
            )
            raise RunError(
                f"{what} returned {found[wrong[0]]:g} for {row}{more}, where a finite number of 0 or more belongs"
            )
        if not found.any():
            raise RunError(
                f"{what} returned 0 for each of {self.rows} rows of the data in iteration {task.number}: there is "
                "none to draw"
            )
        return found


def scarce(source: Node, task: Task, weights: Array, first: int) -> list[str]:
    """What to tell of an iteration whose prompts from `first` on are the first of it that only rows of weight 0 were
    left for."""
    some = np.count_nonzero(weights)
    if not first <= some < min(first + task.prompts, len(weights)):
        return []
    few = f"only {some} of {len(weights)} rows of the data have a weight above 0"
    return [
        f"`weights` of the source ({source.span.place}): {few}, so iteration {task.number} takes rows of weight 0 too"
    ]


def options_of(call: Expr) -> dict[str, Any]:
    """The options of a call; one that is a call itself is what that gives."""
    given = {k: a for k, a in zip(call.keys, call.args, strict=True) if a.kind not in ("column", "state")}
    return {
        k: algorithms.load("option", str(a.value))(**options_of(a)) if a.kind == "call" else a.literal()
        for k, a in given.items()
    }
