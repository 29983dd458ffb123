"""TransferQueue: its controller, storage units and clients, by keys, as its key-value interface has it.

One unit lies on the first host, or one on each. The driver knows when all responses are there and calls the rest of the
graph then, as in TransferQueue's own single-controller recipe: nobody polls its controller. A worker reads rows that
follow each other, as its sequential sampler hands them out; they lie on all units, dealt by number. `init` knows one
queue a cluster; the same actors are started here by hand, since two queues stand side by side.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import ray
import torch
from side import COLUMNS, NODES, Rows, Setup, Side, Times, check, memory, on, pids, serve, spent
from tensordict import TensorDict
from transfer_queue import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from transfer_queue.utils.zmq_utils import process_zmq_server_info


def first(values: Any) -> Any:
    """The first element of each row: rows come as one tensor, or nested."""
    return values.values()[values.offsets()[:-1]] if values.is_nested else values[:, 0]


@ray.remote
class Worker:
    """All nodes of the graph on one host."""

    def __init__(self, process: int, samples: int, length: int, controller: Any, units: Any) -> None:
        self.made = Rows(process, samples, length)
        self.client = TransferQueueClient(f"worker {process}", controller)
        self.client.initialize_storage_manager("SimpleStorage", {"zmq_info": units})

    def ready(self) -> None:
        pass

    def _put(self, task: str, rows: Any, columns: dict[str, Any]) -> None:
        fields = TensorDict({n: torch.from_numpy(v.reshape(len(rows), -1)) for n, v in columns.items()}, len(rows))
        found = self.client.kv_retrieve_meta([str(r) for r in rows], task, create=True)
        self.client.put(fields, metadata=found)

    def _get(self, task: str, rows: Any, columns: Any) -> dict[str, Any]:
        found = self.client.kv_retrieve_meta([str(r) for r in rows], task)
        data = self.client.get_data(found.select_fields(list(columns)))
        return {c: data[c] for c in columns}

    def generate(self, task: str, rows: Any, compute: float) -> Times:
        start = time.perf_counter()
        time.sleep(compute / len(NODES))
        self._put(task, rows, self.made.made(rows, NODES["actor.generate"][1]))
        return start, time.perf_counter()

    def rest(self, task: str, rows: Any, compute: float) -> Times:
        start = time.perf_counter()
        for node, (reads, writes) in NODES.items():
            if node != "actor.generate":
                check(rows, {c: first(v) for c, v in self._get(task, rows, reads).items()})
                time.sleep(compute / len(NODES))
                if writes:
                    self._put(task, rows, self.made.made(rows, writes))
        return start, time.perf_counter()

    def write(self, task: str, rows: Any) -> Times:
        made = self.made.made(rows, COLUMNS)
        start = time.perf_counter()
        self._put(task, rows, made)
        return start, time.perf_counter()

    def read(self, task: str, rows: Any) -> Times:
        """What the update reads, every page of it touched."""
        start = time.perf_counter()
        self.held = self._get(task, rows, COLUMNS)
        for values in self.held.values():
            (values.values() if values.is_nested else values.reshape(-1))[::1024].sum()
        end = time.perf_counter()
        check(rows, {c: first(v) for c, v in self.held.items()})
        return start, end

    def clear(self, task: str) -> None:
        self.held = {}
        self.client.clear_partition(task)


class Queue(Side):
    def __init__(self, setup: Setup, workers: int = 1) -> None:
        self.setup = setup
        count = len(setup.hosts) if setup.name == "tq_sharded" else 1
        self.controller = TransferQueueController.options(**on(setup.hosts[0])).remote()
        controller = process_zmq_server_info(self.controller)
        self.units = {
            f"unit {u}": SimpleStorageUnit.options(**on(setup.hosts[u])).remote({"num_data_storage_units": count})
            for u in range(count)
        }
        units = process_zmq_server_info(self.units)
        kind = Worker
        self.workers = [
            kind.options(**on(address)).remote(h * workers + w, setup.samples, setup.length, controller, units)
            for h, address in enumerate(setup.hosts)
            for w in range(workers)
        ]
        ray.get([w.ready.remote() for w in self.workers])

    def iteration(self, number: int, compute: float) -> dict[str, Any]:
        task = f"train/{number}"
        setup = self.setup
        times = ray.get([w.generate.remote(task, r, compute) for w, r in zip(self.workers, setup.own, strict=True)])
        times += ray.get([w.rest.remote(task, r, compute) for w, r in zip(self.workers, setup.own, strict=True)])
        ray.get(self.workers[0].clear.remote(task))
        return {"seconds": spent(times)}


class Local(Queue):
    """A writer and a reader on one host, and one unit."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, workers=2)
        self.pids = pids([*self.workers, *self.units.values()])
        self.before = memory(self.pids)

    def iteration(self, number: int, compute: float) -> dict[str, Any]:
        task = f"train/{number}"
        rows = np.arange(self.setup.samples)
        writer, reader = self.workers
        put = ray.get(writer.write.remote(task, rows))
        get = ray.get(reader.read.remote(task, rows))
        held = memory(self.pids) - self.before
        ray.get(reader.clear.remote(task))
        return {"put": put[1] - put[0], "get": get[1] - get[0], "held": held}


if __name__ == "__main__":
    serve(lambda setup: Local(setup) if setup.name == "local" else Queue(setup))
