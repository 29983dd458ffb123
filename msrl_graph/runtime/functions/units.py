"""A function node's function, for one unit: a row, a group, or the batch.

Invariant: what a function makes of a unit depends on nothing but the unit, whatever process calls it, and when. What it
returns fits its columns, or BadResult says what was returned. A generator that it asks for is keyed by (seed, node,
iteration, unit).
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ... import algorithms
from ...ir.attributes import Call
from ...ir.graph import Expr, Node
from ...ir.plan import Plan
from ...ir.rowsets import Sieve, rowsets
from ..data.columns import Array
from ..dock.readers import Reader
from ..process.task import Task
from .blame import BadResult
from .instances import Failure
from .note import Note, ProcessDied
from .own_process import call_of
from .values import Filled, NotNumbers, Returned, brief, by_row, loaded, pure_numbers, signature_of


@dataclass(frozen=True)
class Unit:
    """What a function is called for at once: the `number` of its row or group, `where` that is in words, what the
    function is `given` by parameter, and the positions of its `rows` in the batch.

    - `targets`: by column that the node writes, the rows that the unit has values for.
    - `lengths`: by such a column, for each of these rows how long its other columns are, if a column is as long as one.
    - `most`: how often a filter may let a row pass.
    """

    number: int
    where: str
    given: Sequence[tuple[str, Any]]
    rows: slice
    targets: Mapping[str, Array]
    lengths: Mapping[str, Sequence[Mapping[str, int]]]
    most: int

    @property
    def size(self) -> int:
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class Made:
    """What was made of a unit: by name of a column or state the row or the unit, and the value. Of a filter, how often
    each row goes on."""

    values: Sequence[tuple[str, int, Any]] = ()
    times: Array | None = None


@dataclass(frozen=True)
class Failed:
    """Why nothing was made of a unit, and `where` in words."""

    failure: Failure
    where: str


class UnitFunction:
    """The function that a node of a plan calls; `reader` is what the dock knows of the node. It is imported when it is
    first asked for. `note` is where it tells which call it is in."""

    def __init__(self, node: Node, plan: Plan, reader: Reader, note: Note | None = None) -> None:
        self.node, self.note = node, note or Note()
        self.expr = Call.of(node).functions[0]
        self.scope = "row" if node.per == "row" else "the batch" if node.per == "batch" else node.per
        self.signature = signature_of(self.expr, "function")
        # A function of one row may have a group that is one: a value for the row above it.
        self.alone = node.per != "row" and self.signature.scope == "row" and ":" not in str(self.expr.value)
        self.single = node.per == "row" or self.alone
        self.returned, self.filled = Returned(plan, node.writes), Filled(self.signature, node, plan)
        self.options = options_of(self.expr)
        found = rowsets(plan.graph)
        self.sieve = passing(found.sieves.get(node.name))
        self.written = {c: found.columns[c] for c in node.writes}  # the set of the rows of each
        # The columns of which a unit has one value; of others it has one for each row.
        self.one = {
            name
            for name, of in self.written.items()
            if node.per == "row" or self.alone or of == reader.unit != reader.rows
        }

    @cached_property
    def call(self) -> Any:
        return loaded(self.expr, "function")

    def __call__(self, unit: Unit, task: Task) -> Made | Failed:
        """Calls it for a unit."""
        try:
            self._fits(unit)
            with self.note.at(f"{self.node.name}: {unit.where} of {task.key}"):
                found = self._begun(unit, task)
                if inspect.iscoroutine(found) and self.signature.waits:
                    found = asyncio.run(found)
            return self.made(unit, found)
        except (Exception, SystemExit) as error:  # an exit would end this process, and who takes its place
            return self.failed(unit, error)

    async def awaited(self, unit: Unit, task: Task) -> Made | Failed:
        """Calls it for a unit, in a loop that calls it for others too."""
        try:
            self._fits(unit)
            with call_of(os.getpid()):
                found = self._begun(unit, task)
                if inspect.isawaitable(found):
                    found = await found
            return self.made(unit, found)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # an exit would end the loop
            return self.failed(unit, error)

    def of(self, unit: Unit, result: Any) -> Made | Failed:
        """The same where the function has been called."""
        try:
            self._fits(unit)
            return self.made(unit, result)
        except Exception as error:
            return self.failed(unit, error)

    def failed(self, unit: Unit, error: BaseException) -> Failed:
        row = error.row if isinstance(error, BadResult) else None
        where = unit.where if row is None or self.single else f"{unit.where}, row {row}"
        return Failed(Failure.of(error, "exited" if isinstance(error, ProcessDied) else None), where)

    def _fits(self, unit: Unit) -> None:
        if self.alone and unit.size != 1:
            raise BadResult(f"`{self.signature.name}` is of one row, and there are {unit.size}")

    def _begun(self, unit: Unit, task: Task) -> Any:
        options = self.options | self.filled(task.name, task.number, unit.number)
        if self.signature.rest:  # what comes before `*columns` is given by order, as Python wants it
            return self.call(*(value for _, value in unit.given), **options)
        return self.call(**dict(unit.given), **options)

    def made(self, unit: Unit, result: Any) -> Made:
        """What was returned for a unit, by row. BadResult where it does not fit."""
        if self.sieve is not None:
            return Made(times=self._times(result, unit.size, unit.most))
        return Made([*self._values(unit, result)])

    def _values(self, unit: Unit, result: Any) -> Iterator[tuple[str, int, Any]]:
        for name, value in self._by_column(result):
            if name not in self.written:
                if np.isfinite(number := self._next(name, value)):  # under `on_nan = skip` a state stays as it is
                    yield name, unit.number, number
                continue
            rows, one = unit.targets[name], name in self.one
            items = [value] if one else by_row(name, value, len(rows))
            for row, item, lengths in zip(rows.tolist(), items, unit.lengths[name], strict=True):
                try:
                    yield name, row, self.returned.checked(name, item, lengths)
                except BadResult as error:
                    error.row = None if one else row
                    raise

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

    def _by_column(self, result: Any) -> list[tuple[str, Any]]:
        """The result for each name that the node writes."""
        gives = self.node.gives or self.node.writes
        if len(gives) == 1:
            return [(gives[0], result)]
        if not isinstance(result, tuple) or len(result) != len(gives):
            raise BadResult(f"it returned {brief(result)}, where a tuple of {len(gives)} belongs: {', '.join(gives)}")
        return list(zip(gives, result, strict=True))

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


def options_of(call: Expr) -> dict[str, Any]:
    """The options of a call; one that is a call itself is what that gives."""
    given = {k: a for k, a in zip(call.keys, call.args, strict=True) if a.kind not in ("column", "state")}
    return {
        k: algorithms.load("option", str(a.value))(**options_of(a)) if a.kind == "call" else a.literal()
        for k, a in given.items()
    }


def _array(result: Any) -> Array:
    """What numpy makes of a result, whatever it is."""
    if np.ma.is_masked(result):
        return np.asarray(None)
    try:
        return np.asarray(result)
    except ValueError:  # lists of unlike lengths
        return np.asarray(None)


def passing(sieve: Sieve | None) -> Sieve | None:
    """The filter that a node is, if it is one: none where rows leave only as they fail."""
    return None if sieve is None or sieve.failures else sieve


__all__ = ["Failed", "Made", "Unit", "UnitFunction", "options_of", "passing"]
