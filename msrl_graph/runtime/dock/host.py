"""The dock on Ray: one process per host, with its warehouse and its controllers.

Ranks and function hosts call this process through client.py.

Invariant: a request for rows ends with rows, or with an error. The error says which node waited, how long it waited,
which rows were missing, and which node writes these rows. A waiting request never polls. The values of rows are only in
the processes that write or read these rows, and in the warehouses, which send the values between hosts. A process of
the dock may die at any moment and be restarted: no row is lost or handed out twice.
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
from .channel import Address
from .controller import Controller, ControllerRequest, ShareRequest
from .dock_status import take_snapshot
from .messages import (
    CurrentActivity,
    DockAddress,
    DockFull,
    DockTimeout,
    Member,
    ProcessStatus,
    Round,
    RowsReady,
    Status,
    Wait,
    WarehouseInventory,
)
from .methods import DOCK_METHODS
from .readers import NodeReads
from .rpc import AsyncRpcConnection, RpcServer
from .segments import Room, Segments
from .warehouse import SPLIT, Warehouse

T = TypeVar("T")
PEER_TIMEOUT = 3.0  # seconds within which other hosts must report when a row last moved on them


# Every process of a run may wait at the same time, and news must still get through.
@ray.remote(num_cpus=0, max_concurrency=100_000)
class DockHost:
    """The dock process of one host; `members[index]` describes the process.

    `members` describes the dock processes of all hosts. The process has one controller for each entry of `readers`, and
    each controller gets news of rows from all dock processes. A replacement of a dead process begins with the stored
    rows and decisions of all hosts, and makes the remaining decisions again. The arguments contain names of processes
    instead of handles, because Ray restarts a process with the arguments of its first start.

    This class decides nothing: it passes on news and requests. A request waits in this process until the controller has
    an answer.
    """

    def __init__(
        self,
        members: Sequence[Member],
        index: int,
        readers: Sequence[NodeReads],
        deadline: float,
        dock_address: DockAddress,
        room: str,
        size: int,
        folder: str = "",
    ) -> None:
        self.process = members[index].name
        self.host = members[index].host
        self.deadline = deadline
        self.run_folder = folder  # on this host; empty if nobody watches the heartbeats
        if folder:
            Heart(folder, self.process, Limits.for_deadline(deadline))
        self.controllers = {reader.node: Controller(reader) for reader in readers}
        self.room = Room.create(room, size)
        self.warehouse = Warehouse(members[index].warehouse, Segments(self.room), dock_address.capacity)
        self.hears = members[index].needed_columns
        self.others = [
            (member, AsyncRpcConnection(member.name, _look_up, self.host, dock_address.key, DOCK_METHODS))
            for i, member in enumerate(members)
            if i != index
        ]
        self.server = RpcServer(self.process, self, DOCK_METHODS, dock_address.key)
        self.stale = ray.get_runtime_context().was_current_actor_reconstructed
        self.restoring = asyncio.Lock()
        self.changed = asyncio.Condition()
        self.polling = asyncio.Lock()
        self.waits: dict[ControllerRequest[Any], float] = {}  # when the wait for the answer began
        self.doing: dict[str, ProcessStatus] = {}  # by process of a host without a room
        self.announcements: list[asyncio.Future[Any]] = []
        self.departures = 0  # how often rows left a warehouse
        self.last = ""
        self.moves = 0  # news and shares so far
        self.moved = time.monotonic()

    async def address(self) -> Address:
        """Return the address where this process listens."""
        return self.server.address(self.host, str(self.room.path), ray.util.get_node_ip_address())

    async def _ensure_restored(self) -> None:
        if not self.stale:
            return
        async with self.restoring:
            if self.stale:
                requests = [post.send("known") for member, post in self.others if member.warehouse >= 0]
                own_inventories = await self.known()
                inventories: list[dict[str, WarehouseInventory]] = [own_inventories, *(await asyncio.gather(*requests))]
                for key, own_inventory in own_inventories.items():
                    news = [entry for inventory in inventories if key in inventory for entry in inventory[key].news]
                    for node, controller in self.controllers.items():
                        self._hand_out(
                            key, node, controller.restore(own_inventory.task, news, own_inventory.rounds.get(node, []))
                        )
                    self._announce_to_others(key, own_inventory.news)  # other members may not have received it
                self.stale = False

    async def _announce(self, key: str, news: Sequence[RowsReady]) -> None:
        """Send news of rows to all controllers that need the news, on all hosts."""
        self._announce_to_others(key, news)
        if relevant := [entry for entry in news if entry.column in self.hears]:
            await self.heard(key, relevant)

    def _announce_to_others(self, key: str, news: Sequence[RowsReady]) -> None:
        """Send news of rows to the docks of other hosts whose controllers need the news."""
        for member, post in self.others:
            if relevant := [entry for entry in news if entry.column in member.needed_columns]:
                self.announcements.append(asyncio.ensure_future(post.send("heard", key, relevant)))

    def _hand_out(self, key: str, node: str, rounds: list[Round]) -> None:
        controller = self.controllers[node]
        if rounds and controller.keeps:
            self.warehouse.keep(key, node, rounds)
        for round in rounds:
            controller.hand_out(key, round)

    # What the driver calls.

    async def open(self, task: Task) -> None:
        await self._ensure_restored()
        fault_points.reach(self.process, f"open {task.key}")
        self.warehouse.open(task)
        for node, controller in self.controllers.items():
            self._hand_out(task.key, node, controller.open(task))

    async def drop(self, key: str) -> int:
        """Forget a task; return the number of messages that this process received.

        Messages are counted from the previous call of `drop`. Raises the errors that occurred when the dock sent news
        to the docks of other hosts.
        """
        await self._ensure_restored()
        announcements = self.announcements
        self.announcements = []
        await asyncio.gather(*announcements)
        fault_points.reach(self.process, f"drop {key}")
        for controller in self.controllers.values():
            controller.close(key)
        self.warehouse.drop(key)
        if self.warehouse.capacity:
            await self.leave()
            self.announcements += [asyncio.ensure_future(post.send("leave")) for _, post in self.others]
        message_count = self.server.messages
        self.server.messages = 0
        return message_count + 2  # plus the driver's two messages, which open and drop the task

    async def status(self, watched: bool = False) -> Status:
        """Return the status of this dock.

        If `watched` is true, the status includes a snapshot of the dock's rows and memory.
        """
        now = time.monotonic()
        statuses = self._collect_statuses()
        waits = tuple(
            self._describe_wait(request)
            for request in sorted(self.waits, key=lambda request: (request.node, request.group_index, request.key))
        )
        doing = {
            process: CurrentActivity(status.activity, now - status.since, status.progress(now))
            for process, status in statuses.items()
        }
        has_warehouse = self.warehouse.index >= 0
        warehouse = self.warehouse
        snapshot = (
            take_snapshot(self.process, self.host, self.controllers, warehouse if has_warehouse else None, statuses)
            if watched
            else None
        )
        ended = heartbeat.killed_processes(self.run_folder) if self.run_folder else {}
        moved = heartbeat.bytes_moved(self.run_folder) if self.run_folder else 0
        # A computed row counts as movement too: the stall check compares this number with the previous one.
        moves = self.moves + sum(status.rows for status in statuses.values())
        return Status(self.last, moves, waits, doing, snapshot, ended, moved)

    # What ranks, function hosts and the other hosts' docks call.

    async def place(self, key: str, node: str, name: str, size: int, single: bool) -> int:
        """Reserve space for a segment of `size` bytes; return the index of its warehouse.

        Chooses this process's warehouse if it has enough space, else the warehouse with the most free space. If no
        warehouse has enough space, but all warehouses together have enough, returns SPLIT: the rows must be split. In
        all other cases, waits until tasks end and release space. `single` means that the segment has only one row,
        which cannot be split. Raises DockFull if no other task ends before the task `key`.
        """
        posts = {member.warehouse: post for member, post in self.others if member.warehouse >= 0}
        begin = time.monotonic()
        while not self.warehouse.promise(key, name, size):
            departures = self.departures
            states = dict(
                zip(posts, await asyncio.gather(*(post.send("free") for post in posts.values())), strict=True)
            )
            emptiest = max(posts, key=lambda warehouse_index: states[warehouse_index][0], default=-1)
            if posts and states[emptiest][0] >= size:
                if await posts[emptiest].send("promise", key, name, size):
                    return emptiest
                continue
            if not single and self.warehouse.free + sum(free for free, _ in states.values()) >= size:
                return SPLIT
            message = (
                f"`{node}` has {size:,} more bytes of rows in {key}, and the dock's `capacity` of "
                f"{self.warehouse.capacity:,} bytes is full on every host"
            )
            turns = [turn for _, turn in (await self.free(), *states.values()) if turn]
            if min(turns) >= self.warehouse.tasks[key].turn:
                raise DockFull(f"{message}; no rows leave before {key} ends, so raise `capacity`")
            try:
                async with self.changed:
                    wait = self.changed.wait_for(lambda departures=departures: self.departures != departures)  # type: ignore[misc]
                    await asyncio.wait_for(wait, begin + self.deadline - time.monotonic())
            except TimeoutError:
                raise DockTimeout(f"{message}; no task has ended within {self.deadline:g} s") from None
        return self.warehouse.index

    async def free(self) -> tuple[int, tuple[int, bool] | None]:
        """Return the warehouse's free bytes, and which of its open tasks ends first.

        The second value is the sort key `Task.turn` of that task, or None if no task is open. Tasks end in the order of
        this key.
        """
        return self.warehouse.free, min((task.turn for task in self.warehouse.tasks.values()), default=None)

    async def promise(self, key: str, name: str, size: int) -> bool:
        return self.warehouse.promise(key, name, size)

    async def leave(self) -> None:
        """Note that rows were removed from a warehouse, so that waiting writers try again."""
        self.departures += 1
        async with self.changed:
            self.changed.notify_all()

    async def put(self, key: str, node: str, segment: str, pieces: Mapping[str, ColumnRows] | None = None) -> None:
        """Record that a segment was written, and announce its rows to controllers.

        `pieces` are the rows of a process that cannot write into this warehouse because the process is on another host.
        In this case, the dock process writes the segment.
        """
        fault_points.reach(self.process, f"put of {node} in {key}")
        if pieces is not None:
            self.warehouse.segments.write(key, segment, node, pieces)
        news = self.warehouse.put(key, segment)
        fault_points.reach(self.process, f"kept {node} in {key}")
        await self._announce(key, news)
        fault_points.reach(self.process, f"told {node} in {key}")

    async def heard(self, key: str, news: Sequence[RowsReady]) -> None:
        """Inform the controllers of this process that a warehouse has new rows."""
        await self._ensure_restored()
        self._record_move()
        label = f"{', '.join(entry.column for entry in news)} of {key}"
        fault_points.reach(self.process, f"told of {label}")
        decided = {node: controller.take_in_news(key, news) for node, controller in self.controllers.items()}
        fault_points.reach(self.process, f"decided on {label}")
        for node, rounds in decided.items():
            self._hand_out(key, node, rounds)
        async with self.changed:  # any waiting request may have an answer now
            self.changed.notify_all()
        fault_points.reach(self.process, f"handed out {label}")

    async def ask(self, question: ControllerRequest[T]) -> T:
        """Wait until a node's controller can answer the question; return the answer.

        The deadline of a wait is counted from the last time when a row arrived, was handed out or was computed on any
        host. Thus an early request does not time out while other processes work. Raises DockTimeout.
        """
        await self._ensure_restored()
        answer = await self._answer(question, self.controllers[question.node])
        if isinstance(question, ShareRequest):
            self.last = question.node
            self._record_move()
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
                    self.changed.release()  # news must get through while other hosts are asked
                    try:
                        progress_lines = await self._ask_for_last_move()
                    finally:
                        await self.changed.acquire()
                    if time.monotonic() >= max(begin, self.moved) + self.deadline:
                        message = f"{self._describe_wait(question)}, and for {self.deadline:g} s no row has moved"
                        raise DockTimeout(message + self._describe_slow_rows(progress_lines)) from None
        self.waits.pop(question, None)  # several ranks, or a replacement, may have sent the same request
        return answer

    async def still(self) -> tuple[float, list[str]]:
        """Return the seconds since the last progress on this host, and status lines.

        Progress means that a row arrived, was handed out or was computed. Each process that counts its computed rows
        has one status line, which describes how many rows it has computed.
        """
        now = time.monotonic()
        statuses = self._collect_statuses()
        last = max([self.moved, *(status.last_row_at for status in statuses.values())])
        rows = [
            f"{name} in {status.activity}: {progress}"
            for name, status in sorted(statuses.items())
            if (progress := status.progress(now))
        ]
        return now - last, rows

    async def _ask_for_last_move(self) -> list[str]:
        """Ask all hosts for their last progress, and return the status lines of all hosts.

        The method `still` explains what progress and a status line are. The field `moved` is set to the time of the
        latest progress on any host. A host that does not answer is left out.
        """
        async with self.polling:  # all waits reach their deadline at the same time
            requests = [asyncio.ensure_future(post.send("still")) for _, post in self.others]
            reports = [await self.still()]
            if requests:
                answered, unanswered = await asyncio.wait(requests, timeout=min(PEER_TIMEOUT, self.deadline))
                reports += [future.result() for future in answered if future.exception() is None]
                for future in unanswered:  # their processes did not answer in time
                    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            self.moved = max(self.moved, time.monotonic() - min(seconds for seconds, _ in reports))
            return [line for _, rows in reports for line in rows]

    def _describe_slow_rows(self, rows: list[str]) -> str:
        """Return the end of a timeout message: status lines, and the setting to increase.

        `rows` are the status lines. Returns "" if there are no status lines.
        """
        if not rows:
            return ""
        longer = 2 * self.deadline
        stated = f"{longer / 60:g} min" if longer >= 60 and longer % 60 == 0 else f"{longer:g} s"
        fix = f"if a row may take that long, raise the deadline: `dock {{ deadline = {stated} }}`"
        return "".join(f"\n  {line}" for line in [*rows, fix])

    async def get(self, key: str, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return rows of this host that a process of another host requests.

        `wanted` has the requested row numbers, and the result has the values, both by segment and column.
        """
        fault_points.reach(self.process, f"get in {key}")
        return self.warehouse.get(key, wanted)

    async def at(self, process: str, activity: str, rows: int = 0, total: int = 0, where: str = "") -> None:
        """Record the activity and the progress of a process.

        Only a process whose host has no warehouse makes this call. The process has computed `rows` of `total` rows.
        `where` is a text with more detail.
        """
        now = time.monotonic()
        before = self.doing.get(process)
        since = before.since if total and before else now
        self.doing[process] = ProcessStatus(
            activity, since, rows=rows, total_rows=total, last_row_at=now if rows else 0.0, where=where
        )

    async def folder(self) -> str:
        """Return the folder where processes of this host write and read rows."""
        return str(self.room.path)

    async def known(self) -> dict[str, WarehouseInventory]:
        """Return the inventories of all open tasks, for rebuilding controllers."""
        return {key: self.warehouse.known(task) for key, task in self.warehouse.tasks.items()}

    async def whole(self, key: str, columns: Collection[str] | None = None) -> dict[str, ColumnRows]:
        return self.warehouse.whole(key, columns)

    def _collect_statuses(self) -> dict[str, ProcessStatus]:
        """Return the last status that each process reported to this dock."""
        return self.doing | self.room.read_statuses()

    def _record_move(self) -> None:
        self.moves += 1
        self.moved = time.monotonic()

    def _describe_wait(self, question: ControllerRequest[Any]) -> Wait:
        missing = self.controllers[question.node].describe_missing_rows(question.key)
        return Wait(question.waiter, question.key, time.monotonic() - self.waits[question], missing)


async def _look_up(name: str) -> Address:
    address: Address = await ray.get_actor(name).address.remote()
    return address
