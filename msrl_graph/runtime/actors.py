"""The dock on Ray: controllers and warehouses as processes, and the client that ranks and function hosts hold.

Invariant: a wait ends with rows, or with an error that says who waited how long for which rows of whom; it never polls. Samples go from
writer to warehouse to reader; no other process sees them. A controller may die at any moment and be started again: no row is lost or
handed out twice.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray

from ..plan import Instruction
from ..rowsets import VERDICT
from . import log
from .columns import Array, Column, concatenate
from .dock import Batch, Controller, Share, assemble, split, wanted
from .readers import Reader, Task
from .report import Report, RunError
from .warehouse import Round, Warehouse, told

T = TypeVar("T")
Question = tuple[str, int, str, int]  # a node, its group (-1: `again`), a task, and which share, or after how many rounds


def settle(folder: str, logs: str, process: str) -> None:
    """Sets up this process's environment; here and not by Ray's runtime_env, which starts an agent and takes seconds.

    Temporary files go to the run's `folder` (empty: stay where they are), since torch leaves a cache folder behind; what is printed goes
    to a file in `logs`.
    """
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
    log.divert(str(Path(logs) / f"{process.replace(' ', '-')}.log"), process)


class DockTimeout(RunError):
    """A wait passed its deadline."""


@dataclass(frozen=True)
class Wait:
    """A group of a node-state that waits for rows, in words that name the edges; group -1 waits to hear whether rows suffice."""

    node: str
    group: int
    key: str
    seconds: float
    missing: str

    def __str__(self) -> str:
        who = f" (group {self.group})" if self.group >= 0 else ""
        return f"`{self.node}`{who} has waited {self.seconds:.0f} s in {self.key} for {self.missing}"


@dataclass(frozen=True)
class Picture:
    """What the controllers of a host know of the run. `moves` grows while rows move; `doing` is what each process said last, and how
    many seconds ago."""

    last: str  # the node-state that took rows last
    moves: int
    waits: tuple[Wait, ...]
    doing: dict[str, tuple[str, float]]


# Every process of a run may wait at once, and news must get past them.
@ray.remote(num_cpus=0, max_concurrency=100_000)
class ControllerHost:
    """The controllers of one host, one for each node-state whose first rank is there. What depends on who came first is kept in the
    warehouse `near` before anybody hears of it; a process that takes a dead one's place begins with what the `warehouses` know, and
    decides the rest again. Actors are named, not handed over: Ray starts an actor again with the arguments of its first start."""

    def __init__(self, readers: list[Reader], deadline: float, near: str, warehouses: list[str]) -> None:
        self.controllers = {r.node: Controller(r) for r in readers}
        self.deadline = deadline
        self.names, self.near = warehouses, near
        self._near: Any = None
        self.stale = ray.get_runtime_context().was_current_actor_reconstructed
        self.order = asyncio.Lock()  # decisions are handed out in the order in which they were made
        self.changed = asyncio.Condition()
        self.waits: dict[Question, float] = {}  # since when somebody waits for the answer
        self.doing: dict[str, tuple[str, float]] = {}
        self.last = ""
        self.moves = 0  # news and shares so far
        self.moved = time.monotonic()

    async def _ready(self) -> None:
        if not self.stale:
            return
        async with self.order:
            if self.stale:
                known = {name: await ray.get_actor(name).known.remote() for name in self.names}
                for key, (task, _, kept) in known[self.near].items():
                    found = [segment for books in known.values() if key in books for segment in books[key][1]]
                    for node, controller in self.controllers.items():
                        await self._hand(key, node, controller.restore(task, found, kept.get(node, [])))
                self.stale = False

    async def _hand(self, key: str, node: str, rounds: list[Round]) -> None:
        controller = self.controllers[node]
        if rounds and controller.reader.by_arrival:
            self._near = self._near or ray.get_actor(self.near)
            await self._near.keep.remote(key, node, rounds)
        # An evaluation may be closed meanwhile: nobody asks for what its last rows would have led to.
        for round in rounds if key in controller.books else ():
            controller.hand(key, round)

    async def open(self, task: Task) -> None:
        await self._ready()
        async with self.order:
            for node, controller in self.controllers.items():
                if task.key not in controller.books:
                    await self._hand(task.key, node, controller.open(task))

    async def close(self, key: str) -> None:
        await self._ready()
        for controller in self.controllers.values():
            controller.close(key)

    async def heard(self, key: str, warehouse: int, columns: dict[str, tuple[Array, Array]]) -> None:
        """A warehouse has got rows: by column their numbers and what is told of them (warehouse.told)."""
        await self._ready()
        self._move()
        decided = {
            node: [r for column, (rows, lengths) in columns.items() for r in controller.heard(key, column, rows, lengths, warehouse)]
            for node, controller in self.controllers.items()
        }
        if any(decided.values()):
            async with self.order:
                for node, rounds in decided.items():
                    await self._hand(key, node, rounds)
        if any(decided.values()) or any(name.endswith(VERDICT) for name in columns):
            async with self.changed:
                self.changed.notify_all()

    async def take(self, node: str, key: str, group: int, index: int, process: str = "") -> Share:
        """The group's share number `index`, as soon as there is one. A wait may last the deadline from when a row last moved: whoever asks
        ahead of time does not wait while others are at work. `process` is who begins with the share as soon as it has it: were it to tell
        that itself, its word could die with it."""
        controller = await self._controller(node)
        share = await self._until((node, group, key, index), lambda: controller.take(key, group, index))
        self.last = node
        self._move()
        if process and len(share.units):
            await self.at(process, f"{node} in {key}")
        return share

    async def again(self, node: str, key: str, rounds: int) -> bool:
        """Whether after so many rounds of prompts the filter `node` needs another one, as soon as that is known."""
        controller = await self._controller(node)
        return await self._until((node, -1, key, rounds), lambda: controller.again(key, rounds))

    async def _controller(self, node: str) -> Controller:
        await self._ready()
        return self.controllers[node]

    async def _until(self, question: Question, ask: Callable[[], T | None]) -> T:
        """What a controller answers, as soon as it does."""
        begin = self.waits[question] = time.monotonic()
        async with self.changed:
            while (answer := ask()) is None:
                try:
                    await asyncio.wait_for(self.changed.wait(), max(begin, self.moved) + self.deadline - time.monotonic())
                except TimeoutError:
                    if time.monotonic() >= max(begin, self.moved) + self.deadline:
                        raise DockTimeout(f"{self._wait(question)}, and for {self.deadline:g} s no row has moved") from None
        self.waits.pop(question, None)  # several may have asked it: ranks, and who takes a dead one's place
        return answer

    def _move(self) -> None:
        self.moves += 1
        self.moved = time.monotonic()

    async def at(self, process: str, what: str) -> None:
        """A process tells what it begins to do."""
        self.doing[process] = (what, time.monotonic())

    def _wait(self, question: Question) -> Wait:
        node, group, key, _ = question
        return Wait(node, group, key, time.monotonic() - self.waits[question], self.controllers[node].missing(key))

    async def picture(self) -> Picture:
        now = time.monotonic()
        waits = tuple(map(self._wait, sorted(self.waits)))
        return Picture(self.last, self.moves, waits, {p: (what, now - since) for p, (what, since) in self.doing.items()})


@ray.remote
class RankHost:
    """The process of a worker.Rank. What a rank needs is loaded here: the driver, which makes the actors, starts without torch."""

    def __init__(self, plan: str, rank: int, threads: int, folder: str, logs: str) -> None:
        from .worker import Rank

        self.rank = Rank(plan, rank, threads, folder, logs)

    def address(self) -> tuple[str, int]:
        return self.rank.address()

    def start(self, address: tuple[str, int], controllers: dict[str, str], warehouses: list[str]) -> None:
        self.rank.start(address, controllers, warehouses)

    def run(self, task: Task, measure: bool) -> Report:
        return self.rank.run(task, measure)

    def checkpoint(self, folder: str, says: dict[str, str]) -> tuple[list[Any], dict[str, int], str]:
        return self.rank.checkpoint(folder, says)

    def resume(self, folder: str, steps: dict[str, int]) -> None:
        self.rank.resume(folder, steps)

    def replay(self, folder: str) -> None:
        self.rank.replay(folder)

    def save(self, worker: str, folder: str) -> None:
        self.rank.save(worker, folder)


@ray.remote(num_cpus=0, max_concurrency=1000)
class WarehouseHost:
    """A warehouse; tells the controllers of what comes in."""

    def __init__(self, index: int, host: int) -> None:
        self.warehouse = Warehouse(index, host)
        self.tasks: dict[str, Task] = {}  # those open
        self.controllers: list[tuple[Any, frozenset[str]]] = []
        self.told: list[Any] = []

    async def connect(self, controllers: list[Any], heard: list[list[str]]) -> None:
        """`heard` are the columns that some controller of each host reads: it hears of no others."""
        self.controllers = [(handle, frozenset(columns)) for handle, columns in zip(controllers, heard, strict=True)]

    async def open(self, task: Task) -> None:
        self.tasks[task.key] = task

    async def put(self, key: str, node: str, columns: dict[str, tuple[Array, Column]]) -> None:
        self.warehouse.put(key, node, columns)
        for handle, names in self.controllers:
            news = {n: (rows, told(n, column)) for n, (rows, column) in columns.items() if n in names}
            if news:
                self.told.append(handle.heard.remote(key, self.warehouse.index, news))

    async def get(self, key: str, node: str, host: int, wanted: dict[str, Array]) -> dict[str, Column]:
        return self.warehouse.get(key, node, host, wanted)

    async def keep(self, key: str, node: str, rounds: list[Round]) -> None:
        self.warehouse.keep(key, node, rounds)

    async def known(self) -> dict[str, Any]:
        """For a controller to be rebuilt: of each open task, the task and what Warehouse.known tells."""
        return {key: (task, *self.warehouse.known(key)) for key, task in self.tasks.items()}

    async def whole(self, key: str) -> dict[str, tuple[Array, Column]]:
        return self.warehouse.whole(key)

    async def drop(self, key: str) -> dict[str, int]:
        """Forgets an iteration; raises what went wrong in telling the controllers of its rows."""
        told, self.told = self.told, []
        # Not blocking: what a controller decides on these news, it keeps here.
        await asyncio.gather(*told)
        self.tasks.pop(key, None)
        return self.warehouse.drop(key)


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
        for name, (rows, column) in columns.items():
            self.known.setdefault(name, []).append((rows, column))
        self.pending.append(self.warehouses[self.home].put.remote(task.key, node, columns))
        self.moving += time.perf_counter() - start

    def flush(self) -> dict[str, int]:
        """Ends a task: raises what went wrong in its writes. By `node get here`, bytes that were read where they were known already."""
        ray.get(self.pending)
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
