"""The dock on Ray: of each host a process with its warehouse and its part of the controllers; client.py is what ranks
and function hosts hold of it.

Invariant: a wait ends with rows, or with an error that says who waited how long for which rows of whom; it never polls.
No process sees samples but who writes or reads them, and the warehouse that hands them to another host. A process of
the dock may die at any moment and be started again: no row is lost or handed out twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import ray

from ..data.columns import ColumnRows
from ..process import fault_points, heartbeat
from ..process.heartbeat import Heart, Limits
from ..process.task import Task
from ..process.task_report import RunError
from .channel import Address
from .controller import Controller, ControllerRequest, ShareRequest
from .dock_status import look
from .messages import (
    CurrentActivity,
    DockAddress,
    Member,
    ProcessStatus,
    Round,
    RowsReady,
    Status,
    Wait,
    WarehouseInventory,
)
from .readers import NodeReads
from .rpc import AsyncRpcConnection, RpcServer
from .segments import Room, Segments
from .warehouse import SPLIT, Warehouse

T = TypeVar("T")
REACH = 3.0  # seconds that other hosts have to say when a row last moved there
SERVED = ("ask", "at", "folder", "free", "get", "heard", "known", "leave", "place", "promise", "put", "still", "whole")


class DockTimeout(RunError):
    """A wait passed its deadline."""


class DockFull(RunError):
    """Rows have no place, and no others will leave."""


# Every process of a run may wait at once, and news must get past them.
@ray.remote(num_cpus=0, max_concurrency=100_000)
class DockHost:
    """The dock's process of one host: the `index`-th of the `members`. Its controllers, one for each of the `readers`,
    hear of rows from all members; a process that takes a dead one's place begins with what the rooms of all hosts
    hold, and decides the rest again. Processes are named, not handed over: Ray starts one again with the arguments of
    its first start.

    Nothing is decided here: news and questions are passed on, and whoever asks waits here until its controller has an
    answer."""

    def __init__(
        self,
        members: Sequence[Member],
        index: int,
        readers: Sequence[NodeReads],
        deadline: float,
        way: DockAddress,
        room: str,
        size: int,
        folder: str = "",
    ) -> None:
        self.process = members[index].name
        self.host = members[index].host
        self.deadline = deadline
        self.run_folder = folder  # on this host; none where nobody watches who moves
        if folder:
            Heart(folder, self.process, Limits.of(deadline))
        self.controllers = {r.node: Controller(r) for r in readers}
        self.room = Room.made(room, size)
        self.warehouse = Warehouse(members[index].warehouse, Segments(self.room), way.capacity)
        self.hears = members[index].hears
        self.others = [
            (m, AsyncRpcConnection(m.name, _found, self.host, way.key)) for i, m in enumerate(members) if i != index
        ]
        self.server = RpcServer(self.process, self, SERVED, way.key)
        self.stale = ray.get_runtime_context().was_current_actor_reconstructed
        self.restoring = asyncio.Lock()
        self.changed = asyncio.Condition()
        self.looking = asyncio.Lock()
        self.waits: dict[ControllerRequest[Any], float] = {}  # since when somebody waits for the answer
        self.doing: dict[str, ProcessStatus] = {}  # by process of a host without a room
        self.told: list[asyncio.Future[Any]] = []
        self.left = 0  # how often rows have left a warehouse
        self.last = ""
        self.moves = 0  # news and shares so far
        self.moved = time.monotonic()

    async def address(self) -> Address:
        """Where it listens."""
        return self.server.address(self.host, str(self.room.path), ray.util.get_node_ip_address())

    async def _ready(self) -> None:
        if not self.stale:
            return
        async with self.restoring:
            if self.stale:
                asked = [post.send("known") for member, post in self.others if member.warehouse >= 0]
                here = await self.known()
                books: list[dict[str, WarehouseInventory]] = [here, *(await asyncio.gather(*asked))]
                for key, known in here.items():
                    news = [n for book in books if key in book for n in book[key].news]
                    for node, controller in self.controllers.items():
                        self._hand(key, node, controller.restore(known.task, news, known.rounds.get(node, [])))
                    self._tell(key, known.news)  # of which others may not have heard
                self.stale = False

    async def _spread(self, key: str, news: Sequence[RowsReady]) -> None:
        """Tells all controllers what they hear of."""
        self._tell(key, news)
        if some := [n for n in news if n.column in self.hears]:
            await self.heard(key, some)

    def _tell(self, key: str, news: Sequence[RowsReady]) -> None:
        """Tells the others."""
        for member, post in self.others:
            if some := [n for n in news if n.column in member.hears]:
                self.told.append(asyncio.ensure_future(post.send("heard", key, some)))

    def _hand(self, key: str, node: str, rounds: list[Round]) -> None:
        controller = self.controllers[node]
        if rounds and controller.keeps:
            self.warehouse.keep(key, node, rounds)
        for round in rounds:
            controller.hand(key, round)

    # What the driver calls.

    async def open(self, task: Task) -> None:
        await self._ready()
        fault_points.reach(self.process, f"open {task.key}")
        self.warehouse.open(task)
        for node, controller in self.controllers.items():
            self._hand(task.key, node, controller.open(task))

    async def drop(self, key: str) -> int:
        """Forgets a task; how many messages came since the last one was. Raises what went wrong in telling others of
        its rows."""
        await self._ready()
        told = self.told
        self.told = []
        await asyncio.gather(*told)
        fault_points.reach(self.process, f"drop {key}")
        for controller in self.controllers.values():
            controller.close(key)
        self.warehouse.drop(key)
        if self.warehouse.capacity:
            await self.leave()
            self.told += [asyncio.ensure_future(post.send("leave")) for _, post in self.others]
        came = self.server.messages
        self.server.messages = 0
        return came + 2  # the driver's own, to open and to drop it

    async def status(self, watched: bool = False) -> Status:
        """`watched`: with what only those ask for who watch a run."""
        now = time.monotonic()
        said = self._said()
        waits = tuple(self._wait(q) for q in sorted(self.waits, key=lambda q: (q.node, q.of_group, q.key)))
        doing = {p: CurrentActivity(s.what, now - s.since, s.progress(now)) for p, s in said.items()}
        has = self.warehouse.index >= 0
        place = self.warehouse
        seen = look(self.process, self.host, self.controllers, place if has else None, said) if watched else None
        ended = heartbeat.ended(self.run_folder) if self.run_folder else {}
        moved = heartbeat.moved(self.run_folder) if self.run_folder else 0
        # A row that is computed moves too: whoever looks for movement compares this number with the one before.
        moves = self.moves + sum(s.rows for s in said.values())
        return Status(self.last, moves, waits, doing, seen, ended, moved)

    # What ranks, function hosts and the other hosts' docks call.

    async def place(self, key: str, node: str, name: str, size: int, single: bool) -> int:
        """The warehouse that keeps place for a segment of so many bytes, as soon as one does: this one, or the emptiest
        other; SPLIT where all together have as much, unless the segment is a `single` row. DockFull where no task ends
        before this one."""
        posts = {m.warehouse: post for m, post in self.others if m.warehouse >= 0}
        begin = time.monotonic()
        while not self.warehouse.promise(key, name, size):
            left = self.left
            states = dict(
                zip(posts, await asyncio.gather(*(post.send("free") for post in posts.values())), strict=True)
            )
            emptiest = max(posts, key=lambda w: states[w][0], default=-1)
            if posts and states[emptiest][0] >= size:
                if await posts[emptiest].send("promise", key, name, size):
                    return emptiest
                continue
            if not single and self.warehouse.free + sum(free for free, _ in states.values()) >= size:
                return SPLIT
            what = (
                f"`{node}` has {size:,} bytes of rows more in {key}, and the {self.warehouse.capacity:,} bytes of the "
                "dock's `capacity` are full on every host"
            )
            turns = [turn for _, turn in (await self.free(), *states.values()) if turn]
            if min(turns) >= self.warehouse.tasks[key].turn:
                raise DockFull(f"{what}; nothing leaves before {key} ends, so raise `capacity`")
            try:
                async with self.changed:
                    wait = self.changed.wait_for(lambda left=left: self.left != left)  # type: ignore[misc]
                    await asyncio.wait_for(wait, begin + self.deadline - time.monotonic())
            except TimeoutError:
                raise DockTimeout(f"{what}; in {self.deadline:g} s no task has ended") from None
        return self.warehouse.index

    async def free(self) -> tuple[int, tuple[int, bool] | None]:
        """Bytes that the warehouse still takes, and the turn of the task that ends first of those that are open."""
        return self.warehouse.free, min((task.turn for task in self.warehouse.tasks.values()), default=None)

    async def promise(self, key: str, name: str, size: int) -> bool:
        return self.warehouse.promise(key, name, size)

    async def leave(self) -> None:
        """Rows have left a warehouse."""
        self.left += 1
        async with self.changed:
            self.changed.notify_all()

    async def put(self, key: str, node: str, segment: str, pieces: Mapping[str, ColumnRows] | None = None) -> None:
        """A process of this host has written a segment; `pieces` are of one without a warehouse."""
        fault_points.reach(self.process, f"put of {node} in {key}")
        if pieces is not None:
            self.warehouse.segments.write(key, segment, node, pieces)
        news = self.warehouse.put(key, segment)
        fault_points.reach(self.process, f"kept {node} in {key}")
        await self._spread(key, news)
        fault_points.reach(self.process, f"told {node} in {key}")

    async def heard(self, key: str, news: Sequence[RowsReady]) -> None:
        """A warehouse has got rows."""
        await self._ready()
        self._move()
        what = f"{', '.join(n.column for n in news)} of {key}"
        fault_points.reach(self.process, f"told of {what}")
        decided = {node: controller.heard(key, news) for node, controller in self.controllers.items()}
        fault_points.reach(self.process, f"decided on {what}")
        for node, rounds in decided.items():
            self._hand(key, node, rounds)
        async with self.changed:  # whoever waits, for whatever it asked, may have an answer now
            self.changed.notify_all()
        fault_points.reach(self.process, f"handed out {what}")

    async def ask(self, question: ControllerRequest[T]) -> T:
        """What the controller of a node answers, as soon as it does. A wait may last the deadline from when a row last
        moved or was computed, on any host: whoever asks ahead of time does not wait while others are at work."""
        await self._ready()
        answer = await self._answer(question, self.controllers[question.node])
        if isinstance(question, ShareRequest):
            self.last = question.node
            self._move()
            fault_points.reach(self.process, f"share of {question.node} in {question.key}")
        return answer

    async def _answer(self, question: ControllerRequest[T], controller: Controller) -> T:
        begin = self.waits[question] = time.monotonic()
        async with self.changed:
            while (answer := question.answer(controller)) is None:
                try:
                    await asyncio.wait_for(
                        self.changed.wait(), max(begin, self.moved) + self.deadline - time.monotonic()
                    )
                except TimeoutError:
                    if time.monotonic() < max(begin, self.moved) + self.deadline:
                        continue
                    self.changed.release()  # while others are asked, news must get past
                    try:
                        told = await self._looked()
                    finally:
                        await self.changed.acquire()
                    if time.monotonic() >= max(begin, self.moved) + self.deadline:
                        what = f"{self._wait(question)}, and for {self.deadline:g} s no row has moved"
                        raise DockTimeout(what + self._slow(told)) from None
        self.waits.pop(question, None)  # several may have asked it: ranks, and who takes a dead one's place
        return answer

    async def still(self) -> tuple[float, list[str]]:
        """For how many seconds no row has moved on this host, nor was one computed there; and of its processes that
        count their rows, how far they are."""
        now = time.monotonic()
        said = self._said()
        last = max([self.moved, *(s.moved for s in said.values())])
        rows = [f"{name} in {s.what}: {words}" for name, s in sorted(said.items()) if (words := s.progress(now))]
        return now - last, rows

    async def _looked(self) -> list[str]:
        """Looks on all hosts that answer when a row last moved, and keeps the latest time; how far those are that count
        their rows."""
        async with self.looking:  # all that wait here come to their end at once
            asked = [asyncio.ensure_future(post.send("still")) for _, post in self.others]
            found = [await self.still()]
            if asked:
                answered, left = await asyncio.wait(asked, timeout=min(REACH, self.deadline))
                found += [future.result() for future in answered if future.exception() is None]
                for future in left:  # of a process that does not answer: it is not waited for
                    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self.moved = max(self.moved, time.monotonic() - min(seconds for seconds, _ in found))
            return [line for _, rows in found for line in rows]

    def _slow(self, rows: list[str]) -> str:
        """Whose rows may only be slow, and what to state then."""
        if not rows:
            return ""
        longer = 2 * self.deadline
        stated = f"{longer / 60:g} min" if longer >= 60 and longer % 60 == 0 else f"{longer:g} s"
        fix = f"if a row may take that long, state it: `dock {{ deadline = {stated} }}`"
        return "".join(f"\n  {line}" for line in [*rows, fix])

    async def get(self, key: str, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Rows for a process of another host, by segment and column."""
        fault_points.reach(self.process, f"get in {key}")
        return self.warehouse.get(key, wanted)

    async def at(self, process: str, what: str, rows: int = 0, of: int = 0, where: str = "") -> None:
        """A process of a host without a room tells what it begins to do, or how far it is with that."""
        now = time.monotonic()
        before = self.doing.get(process)
        since = before.since if of and before else now
        self.doing[process] = ProcessStatus(what, since, rows=rows, of=of, moved=now if rows else 0.0, where=where)

    async def folder(self) -> str:
        """Where processes of this host write and read rows."""
        return str(self.room.path)

    async def known(self) -> dict[str, WarehouseInventory]:
        """For a controller to be rebuilt: what is known of each open task."""
        return {key: self.warehouse.known(task) for key, task in self.warehouse.tasks.items()}

    async def whole(self, key: str, columns: Collection[str] | None = None) -> dict[str, ColumnRows]:
        return self.warehouse.whole(key, columns)

    def _said(self) -> dict[str, ProcessStatus]:
        """What the processes of this host say of themselves."""
        return self.doing | self.room.said()

    def _move(self) -> None:
        self.moves += 1
        self.moved = time.monotonic()

    def _wait(self, question: ControllerRequest[Any]) -> Wait:
        missing = self.controllers[question.node].missing(question.key)
        return Wait(question.who, question.key, time.monotonic() - self.waits[question], missing)


async def _found(name: str) -> Address:
    address: Address = await ray.get_actor(name).address.remote()
    return address
