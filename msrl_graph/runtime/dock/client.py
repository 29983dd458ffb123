"""The way of ranks and function hosts into the dock, and through their streams.

Invariant: what is read or written is of the task at hand, and is forgotten with it. A share is asked for by its number,
so that who takes a dead process's place is given the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import ray

from ...ir.instruction import Instruction, Walk, Walker
from ...ir.rowsets import Numbers
from ..data.columns import Array, Column, Piece, concatenate, joined
from ..process import log, points
from ..process.task import Task
from .controller import Again, Question, Take
from .readers import Reader
from .wire import Batch, Share

T = TypeVar("T")


class Client:
    """A process's way into the dock: `process` is its name, `home` the warehouse that it writes to. Actors are named,
    by node the controllers."""

    def __init__(
        self,
        process: str,
        readers: list[Reader],
        controllers: dict[str, str],
        warehouses: list[str],
        host: int,
        home: int,
    ) -> None:
        self.process = process
        self.readers = {r.node: r for r in readers}
        hosts = {name: ray.get_actor(name) for name in sorted(set(controllers.values()))}
        self.controllers = {node: hosts[name] for node, name in controllers.items()}
        self.warehouses = [ray.get_actor(name) for name in warehouses]
        self._at = next(iter(hosts.values())).at.options(num_returns=0)
        self.host, self.home = host, home
        self.taken: dict[str, tuple[str, int]] = {}  # by node: the task, and how many of its shares were asked for
        self.known: dict[str, list[Piece]] = {}  # by column: the rows of the task that this process wrote or read
        self.here: dict[str, int] = {}  # by `node get here`: bytes that were read again from these
        self.pending: list[Any] = []
        self.waited = 0.0  # seconds spent waiting for shares
        self.moving = 0.0  # seconds spent fetching and writing rows

    def _reach(self, what: str, task: Task) -> None:
        points.reach(self.process, f"{what} in {task.key}")

    def at(self, what: str) -> None:
        """Tells what this process begins to do; nobody waits for it."""
        log.at(what)
        self._at.remote(self.process, what)

    def _ask(self, question: Question[T]) -> T:
        """The answer of a node's controller, as soon as it has one."""
        answer: T = ray.get(self.controllers[question.node].ask.remote(question))
        return answer

    def take(self, node: str, task: Task, group: int, at_once: bool = False) -> Batch:
        """The group's next share with its rows; `at_once`: this process begins with it now."""
        reader = self.readers[node]
        start = time.perf_counter()
        key, count = self.taken.get(node, ("", 0))
        count = count if key == task.key else 0
        share = self._ask(Take(node, task.key, group, count, self.process if at_once else ""))
        self._reach(f"share of {node}", task)
        self.taken[node] = (task.key, count + 1)
        taken = time.perf_counter()
        self.waited += taken - start
        numbers = reader.numbers(task)
        asked_of: dict[int, dict[str, Array]] = {}
        order: dict[str, list[Array]] = {}
        fetched, asked_for = {}, wanted(share, reader, numbers)
        for name, rows in asked_for.items():
            if (mine := _found(rows, self.known.get(name, []))) is not None:
                fetched[name] = mine
                self.here[f"{node} get here"] = self.here.get(f"{node} get here", 0) + mine.nbytes
                continue
            for warehouse, positions in split(share.where[name]):
                asked_of.setdefault(warehouse, {})[name] = rows[positions]
                order.setdefault(name, []).append(positions)
        asked = {
            w: self.warehouses[w].get.remote(task.key, node, self.host, columns) for w, columns in asked_of.items()
        }
        got = {w: ray.get(reference) for w, reference in asked.items()}
        for name, places in order.items():
            parts = [got[w][name] for w in sorted(got) if name in got[w]]
            column = concatenate(parts)
            if len(parts) > 1:
                back = np.empty(len(column), np.int64)
                back[np.concatenate(places)] = np.arange(len(column))
                column = column.take(back)
            fetched[name] = column
            self.known.setdefault(name, []).append(Piece(asked_for[name], column))
        self._reach(f"rows of {node}", task)
        batch = assemble(share, reader, numbers, asked_for, fetched)
        self.moving += time.perf_counter() - taken
        return batch

    def again(self, node: str, task: Task, rounds: int) -> bool:
        """Whether after so many rounds of prompts the filter `node` needs another one."""
        start = time.perf_counter()
        found = self._ask(Again(node, task.key, rounds))
        self.waited += time.perf_counter() - start
        return found

    def walk(
        self,
        pool: str,
        instructions: Sequence[Instruction],
        task: Task,
        walker: Walker,
        around: Callable[[Instruction], AbstractContextManager[None]] = lambda step: nullcontext(),
    ) -> None:
        """Goes through a pool's stream, each instruction within `around`."""
        walk = Walk({pool: instructions})
        while (step := walk.step(pool)) is not None:
            self._reach(f"{step.op} {step.node}", task)
            with around(step):
                walk.advance(pool, walker)

    def whole(self, task: Task) -> dict[str, Piece]:
        """All rows of a task by column, ascending."""
        parts: list[dict[str, Piece]] = ray.get([w.whole.remote(task.key) for w in self.warehouses])
        found = {}
        for name in {n for part in parts for n in part}:
            piece = joined([part[name] for part in parts if name in part])
            found[name] = piece.take(np.argsort(piece.rows))
        return found

    def put(self, node: str, task: Task, pieces: Mapping[str, Piece]) -> None:
        """Sends the rows that a node wrote, by column, to the home warehouse; does not wait for it."""
        start = time.perf_counter()
        self._reach(f"before put of {node}", task)
        for name, piece in pieces.items():
            self.known.setdefault(name, []).append(piece)
        self.pending.append(self.warehouses[self.home].put.remote(task.key, node, pieces))
        self.moving += time.perf_counter() - start
        self._reach(f"after put of {node}", task)

    def flush(self, task: Task) -> dict[str, int]:
        """Ends a task: raises what went wrong in its writes. By `node get here`, bytes that were read where they were
        known already."""
        self._reach("flush", task)
        ray.get(self.pending)
        self._reach("end", task)
        here, self.here = self.here, {}
        self.pending, self.known = [], {}
        return here


def _found(rows: Array, pieces: Sequence[Piece]) -> Column | None:
    """Those rows, in this order, where one of these pieces has them all."""
    for piece in pieces:
        order = np.argsort(piece.rows)
        at = np.searchsorted(piece.rows[order], rows)
        if len(rows) and at.max() < len(order) and (piece.rows[order[at]] == rows).all():
            return piece.column.take(order[at])
    return None


def wanted(share: Share, reader: Reader, numbers: Numbers) -> dict[str, Array]:
    """The rows of each column that a share needs, ascending, each once."""
    return (
        {r.column: np.unique(numbers.above(share.rows, reader.rows, r.rows)) for r in reader.reads}
        if len(share.rows)
        else {}
    )


def assemble(
    share: Share, reader: Reader, numbers: Numbers, asked: Mapping[str, Array], fetched: Mapping[str, Column]
) -> Batch:
    """Lays fetched columns, of which these rows were `asked` for (`wanted`), out by the node's rows: of four responses
    to two prompts each prompt is there twice."""
    columns = {}
    for r in reader.reads if asked else ():
        place = np.searchsorted(asked[r.column], numbers.above(share.rows, reader.rows, r.rows))
        whole = np.array_equal(place, np.arange(len(asked[r.column])))
        columns[r.column] = fetched[r.column] if whole else fetched[r.column].take(place)
    return Batch(share, share.rows, columns)


def split(where: Array) -> Iterable[tuple[int, Array]]:
    """(warehouse, the positions of its rows) for each warehouse that holds some."""
    for warehouse in np.unique(where):
        yield int(warehouse), np.flatnonzero(where == warehouse)
