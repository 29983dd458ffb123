"""TransferQueue, used through its key-value interface.

There is one unit on the first host, or one on each. The driver knows when all responses are ready and then calls the
rest of the graph, as in TransferQueue's own single-controller recipe: its controller is not polled. A worker reads
consecutive rows, as its sequential sampler hands them out; they are spread over all units by number. `init` supports
one queue per cluster; here the same actors are started by hand, since two queues run at the same time.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import ray
import torch
from side import COLUMNS, NODES, Rows, Setup, Side, Times, actor_options, check, elapsed, memory, pids, serve
from tensordict import TensorDict
from transfer_queue import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from transfer_queue.utils.zmq_utils import process_zmq_server_info


def first(values: Any) -> Any:
    """Return the first element of each row; rows are one tensor, or nested."""
    return values.values()[values.offsets()[:-1]] if values.is_nested else values[:, 0]


@ray.remote
class Worker:
    """All nodes of the graph on one host."""

    def __init__(self, process: int, samples: int, length: int, controller: Any, units: Any) -> None:
        self.rows = Rows(process, samples, length)
        self.client = TransferQueueClient(f"worker {process}", controller)
        self.client.initialize_storage_manager("SimpleStorage", {"zmq_info": units})

    def ready(self) -> None:
        pass

    def _put(self, task: str, rows: Any, columns: dict[str, Any]) -> None:
        fields = TensorDict(
            {name: torch.from_numpy(values.reshape(len(rows), -1)) for name, values in columns.items()}, len(rows)
        )
        metadata = self.client.kv_retrieve_meta([str(row) for row in rows], task, create=True)
        self.client.put(fields, metadata=metadata)

    def _get(self, task: str, rows: Any, columns: Any) -> dict[str, Any]:
        metadata = self.client.kv_retrieve_meta([str(row) for row in rows], task)
        data = self.client.get_data(metadata.select_fields(list(columns)))
        return {column: data[column] for column in columns}

    def generate(self, task: str, rows: Any, compute: float) -> Times:
        start = time.perf_counter()
        time.sleep(compute / len(NODES))
        self._put(task, rows, self.rows.make_columns(rows, NODES["actor.generate"][1]))
        return start, time.perf_counter()

    def rest(self, task: str, rows: Any, compute: float) -> Times:
        start = time.perf_counter()
        for node, (reads, writes) in NODES.items():
            if node != "actor.generate":
                check(rows, {column: first(values) for column, values in self._get(task, rows, reads).items()})
                time.sleep(compute / len(NODES))
                if writes:
                    self._put(task, rows, self.rows.make_columns(rows, writes))
        return start, time.perf_counter()

    def write(self, task: str, rows: Any) -> Times:
        columns = self.rows.make_columns(rows, COLUMNS)
        start = time.perf_counter()
        self._put(task, rows, columns)
        return start, time.perf_counter()

    def read(self, task: str, rows: Any) -> Times:
        """Read what the update reads, and touch every page of it."""
        start = time.perf_counter()
        self.held = self._get(task, rows, COLUMNS)
        for values in self.held.values():
            (values.values() if values.is_nested else values.reshape(-1))[::1024].sum()
        end = time.perf_counter()
        check(rows, {column: first(data) for column, data in self.held.items()})
        return start, end

    def clear(self, task: str) -> None:
        self.held = {}
        self.client.clear_partition(task)


class Queue(Side):
    def __init__(self, setup: Setup, workers: int = 1) -> None:
        self.setup = setup
        count = len(setup.hosts) if setup.name == "tq_sharded" else 1
        self.controller = TransferQueueController.options(**actor_options(setup.hosts[0])).remote()
        controller = process_zmq_server_info(self.controller)
        self.units = {
            f"unit {index}": SimpleStorageUnit.options(**actor_options(setup.hosts[index])).remote(
                {"num_data_storage_units": count}
            )
            for index in range(count)
        }
        units = process_zmq_server_info(self.units)
        kind = Worker
        self.workers = [
            kind.options(**actor_options(address)).remote(
                host * workers + worker, setup.samples, setup.length, controller, units
            )
            for host, address in enumerate(setup.hosts)
            for worker in range(workers)
        ]
        ray.get([started.ready.remote() for started in self.workers])

    def iteration(self, number: int, compute: float) -> dict[str, Any]:
        task = f"train/{number}"
        setup = self.setup
        times = ray.get(
            [worker.generate.remote(task, rows, compute) for worker, rows in zip(self.workers, setup.own, strict=True)]
        )
        times += ray.get(
            [worker.rest.remote(task, rows, compute) for worker, rows in zip(self.workers, setup.own, strict=True)]
        )
        ray.get(self.workers[0].clear.remote(task))
        return {"seconds": elapsed(times)}


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
        memory_used = memory(self.pids) - self.before
        ray.get(reader.clear.remote(task))
        return {"put": put[1] - put[0], "get": get[1] - get[0], "held": memory_used}


if __name__ == "__main__":
    serve(lambda setup: Local(setup) if setup.name == "local" else Queue(setup))
