"""The way of ranks and function hosts into the dock, and through their streams.

Invariant: what is read or written is of the task at hand, and is forgotten with it. A share is asked for by its number, so that who takes a
dead process's place is given the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import ray

from ...ir.plan import Instruction
from ..data.columns import Array, Column, concatenate
from ..process import log, points
from ..process.task import Task
from .controller import Batch, Share, assemble, split, wanted
from .readers import Reader


class Client:
    """A process's way into the dock: `process` is its name, `home` the warehouse that it writes to. Actors are named, by node the
    controllers."""

    def __init__(
        self, process: str, readers: list[Reader], controllers: dict[str, str], warehouses: list[str], host: int, home: int
    ) -> None:
        self.process = process
        self.readers = {r.node: r for r in readers}
        boards = {name: ray.get_actor(name) for name in sorted(set(controllers.values()))}
        self.controllers = {node: boards[name] for node, name in controllers.items()}
        self.warehouses = [ray.get_actor(name) for name in warehouses]
        self._at = next(iter(boards.values())).at.options(num_returns=0)
        self.host, self.home = host, home
        self.taken: dict[str, tuple[str, int]] = {}  # by node: the task, and how many of its shares were asked for
        self.known: dict[str, list[tuple[Array, Column]]] = {}  # by column: the rows of the task that this process wrote or read
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

    def take(self, node: str, task: Task, group: int, at_once: bool = False) -> Batch:
        """The group's next share with its rows; `at_once`: this process begins with it now."""
        reader = self.readers[node]
        start = time.perf_counter()
        key, count = self.taken.get(node, ("", 0))
        count = count if key == task.key else 0
        process = self.process if at_once else ""
        share: Share = ray.get(self.controllers[node].take.remote(node, task.key, group, count, process))
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
        asked = {w: self.warehouses[w].get.remote(task.key, node, self.host, columns) for w, columns in asked_of.items()}
        got = {w: ray.get(reference) for w, reference in asked.items()}
        for name, places in order.items():
            parts = [got[w][name] for w in sorted(got) if name in got[w]]
            column = concatenate(parts)
            if len(parts) > 1:
                back = np.empty(len(column), np.int64)
                back[np.concatenate(places)] = np.arange(len(column))
                column = column.take(back)
            fetched[name] = column
            self.known.setdefault(name, []).append((asked_for[name], column))
        self._reach(f"rows of {node}", task)
        batch = assemble(share, reader, numbers, asked_for, fetched)
        self.moving += time.perf_counter() - taken
        return batch

    def again(self, node: str, task: Task, rounds: int) -> bool:
        """Whether after so many rounds of prompts the filter `node` needs another one."""
        start = time.perf_counter()
        found: bool = ray.get(self.controllers[node].again.remote(node, task.key, rounds))
        self.waited += time.perf_counter() - start
        return found

    def walk(self, instructions: Sequence[Instruction], task: Task) -> Iterator[Instruction]:
        """A stream in the order in which it is done: the instructions of a round of prompts again while the filter asks for more."""
        at, rounds = 0, 1
        while at < len(instructions):
            found = instructions[at]
            self._reach(f"{found.op} {found.node}", task)
            if found.op != "AGAIN":
                yield found
            elif self.again(found.node, task, rounds):
                at, rounds = _back(instructions, at) - 1, rounds + 1
            at += 1

    def whole(self, task: Task) -> dict[str, tuple[Array, Column]]:
        """Every column of a task: the numbers of its rows, ascending, and the data."""
        parts = ray.get([w.whole.remote(task.key) for w in self.warehouses])
        found = {}
        for name in {n for part in parts for n in part}:
            pieces = [part[name] for part in parts if name in part]
            numbers = np.concatenate([rows for rows, _ in pieces])
            order = np.argsort(numbers)
            found[name] = (numbers[order], concatenate([column for _, column in pieces]).take(order))
        return found

    def put(self, node: str, task: Task, columns: dict[str, tuple[Array, Column]]) -> None:
        """Sends rows to the home warehouse; does not wait for it."""
        start = time.perf_counter()
        self._reach(f"before put of {node}", task)
        for name, (rows, column) in columns.items():
            self.known.setdefault(name, []).append((rows, column))
        self.pending.append(self.warehouses[self.home].put.remote(task.key, node, columns))
        self.moving += time.perf_counter() - start
        self._reach(f"after put of {node}", task)

    def flush(self, task: Task) -> dict[str, int]:
        """Ends a task: raises what went wrong in its writes. By `node get here`, bytes that were read where they were known already."""
        self._reach("flush", task)
        ray.get(self.pending)
        self._reach("end", task)
        here, self.here = self.here, {}
        self.pending, self.known = [], {}
        return here


def _back(instructions: Sequence[Instruction], at: int) -> int:
    """Where a round begins that the AGAIN at a place repeats: with its first state, whose weights are there unless they were released."""
    other = instructions[at].other
    begin = [i for i, x in enumerate(instructions[:at]) if (x.op, x.node) == ("RUN", other)]
    weights = [i for i, x in enumerate(instructions[:at]) if (x.op, x.other) == ("RESHARD", other)]
    released = not begin or Instruction("RELEASE", other) in instructions[begin[0] : at]
    return weights[0] if weights and released else begin[0]


def _found(rows: Array, written: list[tuple[Array, Column]]) -> Column | None:
    """Those rows, in this order, where one of these holds them all."""
    for numbers, column in written:
        order = np.argsort(numbers)
        at = np.searchsorted(numbers[order], rows)
        if len(rows) and at.max() < len(order) and (numbers[order[at]] == rows).all():
            return column.take(order[at])
    return None
