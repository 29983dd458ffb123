"""The dock on Ray: controllers and warehouses as processes, and the client that ranks and function hosts hold.

Invariant: a wait ends with rows, or with an error that says who waited how long for which rows of whom; it never polls. Samples go from
writer to warehouse to reader; no other process sees them.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from .columns import Array, Column, concatenate
from .dock import Batch, Controller, Reader, Share, Warehouse, assemble, rows_of, split
from .report import RunError


def settle(folder: str) -> None:
    """Sets up this process's environment; here and not by Ray's runtime_env, which starts an agent and takes seconds.

    Temporary files go to the run's `folder` (empty: stay where they are), since torch leaves a cache folder behind.
    """
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder


class DockTimeout(RunError):
    """A wait passed its deadline."""


@dataclass(frozen=True)
class Task:
    """One pass over the graph: iteration `number` of `train`, or of an evaluation. `fan` responses a prompt."""

    name: str
    number: int
    prompts: int
    fan: int

    @property
    def key(self) -> str:
        return f"{self.name}/{self.number}"


@ray.remote(num_cpus=0, max_concurrency=1000)
class ControllerHost:
    """The controllers of one host, one for each node-state whose first rank is there."""

    def __init__(self, readers: list[Reader], deadline: float) -> None:
        self.controllers = {r.node: Controller(r) for r in readers}
        self.deadline = deadline
        self.changed = asyncio.Condition()
        self.last = ""  # the node-state that took rows last
        self.moves = 0  # news and shares so far

    async def open(self, task: Task) -> None:
        for controller in self.controllers.values():
            controller.open(task.key, task.number, task.prompts, task.fan)

    async def close(self, key: str) -> None:
        for controller in self.controllers.values():
            controller.close(key)

    async def heard(self, key: str, warehouse: int, columns: dict[str, tuple[Array, Array]]) -> None:
        """A warehouse has got rows: (row numbers, lengths) by column."""
        self.moves += 1
        for controller in self.controllers.values():
            for column, (rows, lengths) in columns.items():
                controller.heard(key, column, rows, lengths, warehouse)
        async with self.changed:
            self.changed.notify_all()

    async def take(self, node: str, key: str, group: int) -> Share:
        """The group's next share, as soon as there is one."""
        controller = self.controllers[node]
        until = time.monotonic() + self.deadline
        async with self.changed:
            while (share := controller.take(key, group)) is None:
                try:
                    await asyncio.wait_for(self.changed.wait(), until - time.monotonic())
                except TimeoutError:
                    waited = f"`{node}` (group {group}) waited {self.deadline:g} s in {key} for {controller.missing(key)}"
                    raise DockTimeout(waited) from None
        self.last = node
        self.moves += 1
        return share

    async def progress(self) -> tuple[str, int]:
        """The node-state that took rows last, and a count that grows while rows move."""
        return self.last, self.moves


@ray.remote(num_cpus=0)
class WarehouseHost:
    """The warehouse of one host; tells the controllers of what comes in."""

    def __init__(self, index: int, host: int, controllers: list[Any], heard: list[list[str]]) -> None:
        self.warehouse = Warehouse(index, host)
        # The columns that some controller of each host reads: it hears of no others.
        self.controllers = [(handle, frozenset(columns)) for handle, columns in zip(controllers, heard, strict=True)]
        self.told: list[Any] = []

    def put(self, key: str, node: str, columns: dict[str, tuple[Array, Column]]) -> None:
        self.warehouse.put(key, node, columns)
        for handle, names in self.controllers:
            news = {n: (rows, column.lengths) for n, (rows, column) in columns.items() if n in names}
            if news:
                self.told.append(handle.heard.remote(key, self.warehouse.index, news))

    def get(self, key: str, node: str, host: int, wanted: dict[str, Array]) -> dict[str, Column]:
        return self.warehouse.get(key, node, host, wanted)

    def drop(self, key: str) -> dict[str, int]:
        """Forgets an iteration; raises what went wrong in telling the controllers of its rows."""
        ray.get(self.told)
        self.told = []
        return self.warehouse.drop(key)


class Client:
    """A process's way into the dock. `home` is the warehouse that it writes to."""

    def __init__(self, readers: list[Reader], controllers: dict[str, Any], warehouses: list[Any], host: int, home: int) -> None:
        self.readers = {r.node: r for r in readers}
        self.controllers, self.warehouses = controllers, warehouses
        self.host, self.home = host, home
        self.pending: list[Any] = []
        self.waited = 0.0  # seconds spent waiting for shares
        self.moving = 0.0  # seconds spent fetching and writing rows

    def take(self, node: str, task: Task, group: int) -> Batch:
        """The group's next share with its rows."""
        reader = self.readers[node]
        start = time.perf_counter()
        share: Share = ray.get(self.controllers[node].take.remote(node, task.key, group))
        taken = time.perf_counter()
        self.waited += taken - start
        wanted: dict[int, dict[str, Array]] = {}
        order: dict[str, list[Array]] = {}
        for name, level, _ in reader.reads:
            rows = rows_of(share.units, reader, level, task.fan, task.prompts)
            for warehouse, positions in split(share.where[name]):
                wanted.setdefault(warehouse, {})[name] = rows[positions]
                order.setdefault(name, []).append(positions)
        asked = {w: self.warehouses[w].get.remote(task.key, node, self.host, columns) for w, columns in wanted.items()}
        got = {w: ray.get(reference) for w, reference in asked.items()}
        fetched = {}
        for name, places in order.items():
            parts = [got[w][name] for w in sorted(got) if name in got[w]]
            column = concatenate(parts)
            if len(parts) > 1:
                back = np.empty(len(column), np.int64)
                back[np.concatenate(places)] = np.arange(len(column))
                column = column.take(back)
            fetched[name] = column
        batch = assemble(share, reader, task.fan, task.prompts, fetched) if len(share.units) else Batch(share, share.units, {})
        self.moving += time.perf_counter() - taken
        return batch

    def put(self, node: str, task: Task, columns: dict[str, tuple[Array, Column]]) -> None:
        """Sends rows to the home warehouse; does not wait for it."""
        start = time.perf_counter()
        self.pending.append(self.warehouses[self.home].put.remote(task.key, node, columns))
        self.moving += time.perf_counter() - start

    def flush(self) -> None:
        """Raises what went wrong in earlier writes."""
        ray.get(self.pending)
        self.pending = []
