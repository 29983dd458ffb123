"""The dock on Ray: controllers and warehouses as processes; client.py is what ranks and function hosts hold of it.

Invariant: a wait ends with rows, or with an error that says who waited how long for which rows of whom; it never polls. Samples go from
writer to warehouse to reader; no other process sees them. A controller may die at any moment and be started again: no row is lost or
handed out twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from ...ir.rowsets import VERDICT
from ..data.columns import Array, Column
from ..process import points
from ..process.report import RunError
from ..process.task import Task
from .controller import Controller, Share
from .readers import Reader
from .warehouse import Round, Warehouse, told

T = TypeVar("T")
Question = tuple[str, int, str, int]  # a node, its group (-1: `again`), a task, and which share, or after how many rounds


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
        self.names, self.near, self.process = warehouses, near, f"controllers beside {near}"
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
        points.reach(self.process, f"open {task.key}")
        async with self.order:
            for node, controller in self.controllers.items():
                if task.key not in controller.books:
                    await self._hand(task.key, node, controller.open(task))

    async def close(self, key: str) -> None:
        await self._ready()
        points.reach(self.process, f"close {key}")
        for controller in self.controllers.values():
            controller.close(key)

    async def heard(self, key: str, warehouse: int, columns: dict[str, tuple[Array, Array]]) -> None:
        """A warehouse has got rows: by column their numbers and what is told of them (warehouse.told)."""
        await self._ready()
        self._move()
        news = f"{', '.join(columns)} of {key}"
        points.reach(self.process, f"told of {news}")
        decided = {
            node: [r for column, (rows, lengths) in columns.items() for r in controller.heard(key, column, rows, lengths, warehouse)]
            for node, controller in self.controllers.items()
        }
        points.reach(self.process, f"decided on {news}")
        if any(decided.values()):
            async with self.order:
                for node, rounds in decided.items():
                    await self._hand(key, node, rounds)
        if any(decided.values()) or any(name.endswith(VERDICT) for name in columns):
            async with self.changed:
                self.changed.notify_all()
        points.reach(self.process, f"handed out {news}")

    async def take(self, node: str, key: str, group: int, index: int, process: str = "") -> Share:
        """The group's share number `index`, as soon as there is one. A wait may last the deadline from when a row last moved: whoever asks
        ahead of time does not wait while others are at work. `process` is who begins with the share as soon as it has it: were it to tell
        that itself, its word could die with it."""
        controller = await self._controller(node)
        share = await self._until((node, group, key, index), lambda: controller.take(key, group, index))
        self.last = node
        self._move()
        points.reach(self.process, f"share of {node} in {key}")
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


@ray.remote(num_cpus=0, max_concurrency=1000)
class WarehouseHost:
    """A warehouse; tells the controllers of what comes in."""

    def __init__(self, index: int, host: int) -> None:
        self.warehouse, self.process = Warehouse(index, host), f"warehouse {index}"
        self.tasks: dict[str, Task] = {}  # those open
        self.controllers: list[tuple[Any, frozenset[str]]] = []
        self.told: list[Any] = []

    async def connect(self, controllers: list[Any], heard: list[list[str]]) -> None:
        """`heard` are the columns that some controller of each host reads: it hears of no others."""
        self.controllers = [(handle, frozenset(columns)) for handle, columns in zip(controllers, heard, strict=True)]

    async def open(self, task: Task) -> None:
        points.reach(self.process, f"open {task.key}")
        self.tasks[task.key] = task

    async def put(self, key: str, node: str, columns: dict[str, tuple[Array, Column]]) -> None:
        points.reach(self.process, f"put of {node} in {key}")
        self.warehouse.put(key, node, columns)
        points.reach(self.process, f"kept {node} in {key}")
        for handle, names in self.controllers:
            news = {n: (rows, told(n, column)) for n, (rows, column) in columns.items() if n in names}
            if news:
                self.told.append(handle.heard.remote(key, self.warehouse.index, news))
        points.reach(self.process, f"told {node} in {key}")

    async def get(self, key: str, node: str, host: int, wanted: dict[str, Array]) -> dict[str, Column]:
        points.reach(self.process, f"get of {node} in {key}")
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
        points.reach(self.process, f"drop {key}")
        self.tasks.pop(key, None)
        return self.warehouse.drop(key)
