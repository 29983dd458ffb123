"""Environments: the user's class that answers a policy over several turns, one instance a row.

Invariant: an instance is asked by one thread at a time, turn after turn; instances are asked side by side, so that
their waits overlap. What they return fits the columns that the node writes, or the run ends with the node, its line,
the row, the turn and what was returned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from ...ir.attributes import Generate
from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.sequences import is_tokens, of_response
from ...ir.signatures import classes
from ..data import wrong
from ..data.columns import Array, Column
from ..data.tokens import of_column
from ..dock.wire import Batch
from ..process import shipped
from ..process.report import RunError
from ..process.task import Task
from .blame import BadResult, blame
from .values import Filled, Returned, brief, imported, seen

T = TypeVar("T")
Given = Callable[[int], Mapping[str, Any]]  # what the user's code was given for a row
AT_ONCE = 64  # instances that are asked side by side: they wait for networks and processes more than they compute


class Environment:
    """The class that a generation names. `columns` are those that it writes beside the response, its log-probabilities
    and its mask."""

    def __init__(self, node: Node, plan: Plan) -> None:
        self.node, self.graph = node, plan.graph
        said = Generate.of(node)
        call = said.environment
        assert call is not None
        path, _, name = str(call.value).rpartition(":")
        self.make = getattr(imported(path, call), name)
        self.signature = classes(shipped.found(path).read_text(encoding="utf-8-sig"))[name]["reset"]
        self.reads = [p for p in self.signature.columns if p in node.reads]
        self.tokens = {
            c: of_column(plan, c) for c in self.reads if c in self.signature.text and is_tokens(plan.graph, c)
        }
        self.filled = Filled(self.signature, node, plan)
        own = {*wrong.drawn(plan.graph, node), *(of_response(plan.graph, node, e) for e in ("bool", "i32"))}
        self.columns = tuple(c for c in node.writes if c not in own)
        self.returned = Returned(plan, self.columns)
        self.timeout = said.timeout
        self.threads = ThreadPoolExecutor(AT_ONCE, "environment")

    def begin(self, batch: Batch, rows: Array, task: Task) -> Episodes:
        """An instance for each of the rows, of which equally many belong to each row of the batch."""
        return Episodes(self, batch, rows, task)


class Episodes:
    """The instances of some rows, which are called by their positions."""

    def __init__(self, environment: Environment, batch: Batch, rows: Array, task: Task) -> None:
        self.environment, self.rows, self.iteration = environment, rows, task.number
        self.batch, self.fan = batch, len(rows) // len(batch.rows)
        self.instances: list[Any] = [None] * len(rows)
        self.values: list[tuple[Any, ...]] = [()] * len(
            rows
        )  # of the other columns, as each row's last step returned them

    def reset(self) -> list[str]:
        """What the environment says first in each row."""
        return self._ask(self._reset, self._given, range(len(self.rows)), "the beginning")

    def step(self, positions: Array, texts: list[str], turn: int) -> list[tuple[str, bool]]:
        """What the environment says to what the policy wrote in these rows in a turn, the first is 1, and whether that
        ends the episode."""
        told = dict(zip(positions.tolist(), texts, strict=True))
        return self._ask(lambda i: self._step(i, told[i]), lambda i: {"text": told[i]}, told, f"turn {turn}")

    def columns(self, lengths: dict[str, Array]) -> dict[str, Column]:
        """The other columns that the node writes, of all rows; `lengths` are those of what the generation wrote."""
        environment, found = self.environment, {}
        for place, name in enumerate(environment.columns):
            values = []
            for i, row in enumerate(self.rows):
                try:
                    own = {column: int(n[i]) for column, n in lengths.items()}
                    values.append(environment.returned.checked(name, self.values[i][place], own))
                except (BadResult, TypeError, ValueError) as error:
                    raise RunError(self._blame(error, int(row), "the last turn")) from error
            found[name] = environment.returned.column(name, values)
        return found

    def _given(self, position: int) -> dict[str, Any]:
        """What `reset` is given of the columns."""
        environment, row, given = self.environment, position // self.fan, {}
        for name in environment.reads:
            text = name in environment.signature.text
            element = environment.graph.column(name).element
            given[name] = seen(
                self.batch.columns[name], element, range(row, row + 1), text, environment.tokens.get(name)
            )[0]
        return given

    def _reset(self, position: int) -> str:
        environment, given = self.environment, self._given(position)
        given |= environment.filled(self.iteration, int(self.rows[position]))
        self.instances[position] = environment.make()
        return _said(self.instances[position].reset(**given))

    def _step(self, position: int, text: str) -> tuple[str, bool]:
        found, columns = self.instances[position].step(text), self.environment.columns
        if not isinstance(found, tuple) or len(found) != len(columns) + 2:
            belongs = ", ".join(("what it says", *columns, "whether the episode is over"))
            raise BadResult(f"`step` returned {brief(found)}, where a tuple of {len(columns) + 2} belongs: {belongs}")
        said, *values, over = found
        if not isinstance(over, bool | np.bool_):
            raise BadResult(
                f"`step` returned {brief(over)} at the end, where true or false belongs: whether the episode is over"
            )
        self.values[position] = tuple(values)
        return _said(said), bool(over)

    def _ask(self, call: Callable[[int], T], given: Given, positions: Iterable[int], when: str) -> list[T]:
        """What a call gives for each of these rows, with what they are `given`; the first that fails, or takes too
        long, ends the run."""
        began: dict[int, float] = {}
        spent: dict[int, float] = {}

        def ask(position: int) -> T:
            began[position] = time.monotonic()
            try:
                return call(position)
            finally:
                spent[position] = time.monotonic() - began[position]

        futures = {i: self.environment.threads.submit(ask, i) for i in positions}
        try:
            return [self._answer(i, future, began, spent, given, when) for i, future in futures.items()]
        except RunError:
            for future in futures.values():
                future.cancel()  # those that no thread has begun
            raise

    def _answer(
        self,
        position: int,
        future: Future[T],
        began: dict[int, float],
        spent: dict[int, float],
        given: Given,
        when: str,
    ) -> T:
        limit, row = self.environment.timeout, int(self.rows[position])
        while not future.done() and (left := began.get(position, time.monotonic()) + limit - time.monotonic()) > 0:
            wait([future], None if limit == math.inf else left)
        if not future.done() or spent[position] > limit:
            raise RunError(
                self._blame(
                    TimeoutError(f"it takes longer than {limit:g} s, its `timeout`"), row, when, given(position)
                )
            )
        if (error := future.exception()) is not None:
            raise RunError(self._blame(error, row, when, given(position))) from error
        return future.result()

    def _blame(self, error: BaseException, row: int, when: str, given: Mapping[str, Any] | None = None) -> str:
        return blame(
            self.environment.node, error, f"row {row}, {when} of iteration {self.iteration}", (given or {}).items()
        )


def _said(value: Any) -> str:
    """What an environment says; None is nothing."""
    if value is not None and not isinstance(value, str):
        raise BadResult(f"it returned {brief(value)}, where the text belongs that it says, or none")
    return value or ""
