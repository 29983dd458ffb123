"""The dock on Ray: controllers and warehouses as processes; client.py is what ranks and function hosts hold of it.

Invariant: a wait ends with rows, or with an error that says who waited how long for which rows of whom; it never polls.
Samples go from writer to warehouse to reader; no other process sees them. A controller may die at any moment and be
started again: no row is lost or handed out twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import ray

from ..data.columns import Array, Column, Piece
from ..process import points
from ..process.report import RunError
from ..process.task import Task
from .controller import Controller, Question, Take
from .readers import Reader
from .warehouse import Warehouse
from .wire import Doing, Known, News, Round, Share, Status, Wait

T = TypeVar("T")


class DockTimeout(RunError):
    """A wait passed its deadline."""


# Every process of a run may wait at once, and news must get past them.
@ray.remote(num_cpus=0, max_concurrency=100_000)
class ControllerHost:
    """The controllers of one host, one for each node whose first rank is there. What a controller `keeps` is kept in
    the warehouse `near` before anybody hears of it; a process that takes a dead one's place begins with what the
    `warehouses` know, and decides the rest again. Actors are named, not handed over: Ray starts an actor again with the
    arguments of its first start.

    Nothing is decided here: news and questions are passed on, and whoever asks waits here until its controller has an
    answer."""

    def __init__(self, readers: list[Reader], deadline: float, near: str, warehouses: list[str]) -> None:
        self.controllers = {r.node: Controller(r) for r in readers}
        self.deadline = deadline
        self.names, self.near, self.process = warehouses, near, f"controllers beside {near}"
        self._near: Any = None
        self.stale = ray.get_runtime_context().was_current_actor_reconstructed
        self.order = asyncio.Lock()  # decisions are handed out in the order in which they were made
        self.changed = asyncio.Condition()
        self.waits: dict[Question[Any], float] = {}  # since when somebody waits for the answer
        self.doing: dict[str, tuple[str, float]] = {}  # what each process does, and since when
        self.last = ""
        self.moves = 0  # news and shares so far
        self.moved = time.monotonic()

    async def _ready(self) -> None:
        if not self.stale:
            return
        async with self.order:
            if self.stale:
                known: dict[str, dict[str, Known]] = {
                    name: await ray.get_actor(name).known.remote() for name in self.names
                }
                for key, kept in known[self.near].items():
                    news = [n for books in known.values() if key in books for n in books[key].news]
                    for node, controller in self.controllers.items():
                        await self._hand(key, node, controller.restore(kept.task, news, kept.rounds.get(node, [])))
                self.stale = False

    async def _hand(self, key: str, node: str, rounds: list[Round]) -> None:
        controller = self.controllers[node]
        if rounds and controller.keeps:
            self._near = self._near or ray.get_actor(self.near)
            await self._near.keep.remote(key, node, rounds)
        for round in rounds:
            controller.hand(key, round)

    async def open(self, task: Task) -> None:
        await self._ready()
        points.reach(self.process, f"open {task.key}")
        async with self.order:
            for node, controller in self.controllers.items():
                await self._hand(task.key, node, controller.open(task))

    async def close(self, key: str) -> None:
        await self._ready()
        points.reach(self.process, f"close {key}")
        for controller in self.controllers.values():
            controller.close(key)

    async def heard(self, key: str, news: Sequence[News]) -> None:
        """A warehouse has got rows."""
        await self._ready()
        self._move()
        what = f"{', '.join(n.column for n in news)} of {key}"
        points.reach(self.process, f"told of {what}")
        decided = {node: controller.heard(key, news) for node, controller in self.controllers.items()}
        points.reach(self.process, f"decided on {what}")
        if any(decided.values()):
            async with self.order:
                for node, rounds in decided.items():
                    await self._hand(key, node, rounds)
        async with self.changed:  # whoever waits, for whatever it asked, may have an answer now
            self.changed.notify_all()
        points.reach(self.process, f"handed out {what}")

    async def ask(self, question: Question[T]) -> T:
        """What the controller of a node answers, as soon as it does. A wait may last the deadline from when a row last
        moved: whoever asks ahead of time does not wait while others are at work."""
        await self._ready()
        answer = await self._answer(question, self.controllers[question.node])
        if isinstance(answer, Share):
            self.last = question.node
            self._move()
            points.reach(self.process, f"share of {question.node} in {question.key}")
            if isinstance(question, Take) and question.process and len(answer.units):
                await self.at(question.process, f"{question.node} in {question.key}")
        return answer

    async def _answer(self, question: Question[T], controller: Controller) -> T:
        begin = self.waits[question] = time.monotonic()
        async with self.changed:
            while (answer := question.answer(controller)) is None:
                try:
                    await asyncio.wait_for(
                        self.changed.wait(), max(begin, self.moved) + self.deadline - time.monotonic()
                    )
                except TimeoutError:
                    if time.monotonic() >= max(begin, self.moved) + self.deadline:
                        raise DockTimeout(
                            f"{self._wait(question)}, and for {self.deadline:g} s no row has moved"
                        ) from None
        self.waits.pop(question, None)  # several may have asked it: ranks, and who takes a dead one's place
        return answer

    def _move(self) -> None:
        self.moves += 1
        self.moved = time.monotonic()

    async def at(self, process: str, what: str) -> None:
        """A process tells what it begins to do."""
        self.doing[process] = (what, time.monotonic())

    def _wait(self, question: Question[Any]) -> Wait:
        missing = self.controllers[question.node].missing(question.key)
        return Wait(question.who, question.key, time.monotonic() - self.waits[question], missing)

    async def status(self) -> Status:
        now = time.monotonic()
        waits = tuple(self._wait(q) for q in sorted(self.waits, key=lambda q: (q.node, q.of_group, q.key)))
        return Status(
            self.last, self.moves, waits, {p: Doing(what, now - since) for p, (what, since) in self.doing.items()}
        )


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

    async def put(self, key: str, node: str, pieces: Mapping[str, Piece]) -> None:
        points.reach(self.process, f"put of {node} in {key}")
        self.warehouse.put(key, node, pieces)
        points.reach(self.process, f"kept {node} in {key}")
        for handle, names in self.controllers:
            if news := [News.of(name, piece, self.warehouse.index) for name, piece in pieces.items() if name in names]:
                self.told.append(handle.heard.remote(key, news))
        points.reach(self.process, f"told {node} in {key}")

    async def get(self, key: str, node: str, host: int, wanted: dict[str, Array]) -> dict[str, Column]:
        points.reach(self.process, f"get of {node} in {key}")
        return self.warehouse.get(key, node, host, wanted)

    async def keep(self, key: str, node: str, rounds: list[Round]) -> None:
        self.warehouse.keep(key, node, rounds)

    async def known(self) -> dict[str, Known]:
        """For a controller to be rebuilt: what is known of each open task."""
        return {key: self.warehouse.known(task) for key, task in self.tasks.items()}

    async def whole(self, key: str) -> dict[str, Piece]:
        return self.warehouse.whole(key)

    async def drop(self, key: str) -> dict[str, int]:
        """Forgets an iteration; raises what went wrong in telling the controllers of its rows."""
        told, self.told = self.told, []
        # Not blocking: what a controller decides on these news, it keeps here.
        await asyncio.gather(*told)
        points.reach(self.process, f"drop {key}")
        self.tasks.pop(key, None)
        return self.warehouse.drop(key)
