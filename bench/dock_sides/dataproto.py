"""verl: the driver scatters a DataProto over a worker group for each node.

It then collects the workers' results. Only the columns that a node reads are sent, and the two inferences and the
reward run at the same time. Arrays are sent as numpy, verl's faster way.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import ray
import torch
from side import NODES, Rows, Setup, Side, check, serve
from verl import DataProto
from verl.single_controller.base import Worker as Base
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

NUMPY = {"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy"}


class Worker(Base):  # type: ignore[misc]
    """All nodes of the graph on one host."""

    def __init__(self, samples: int, length: int) -> None:
        super().__init__()
        self.rows = Rows(self.rank, samples, length)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)  # type: ignore[untyped-decorator]
    def run(self, data: Any) -> Any:
        node = data.meta_info["node"]
        rows = data.batch["row"].numpy()
        reads, writes = NODES[node]
        check(rows, {column: data.batch[column][:, 0] for column in reads})
        time.sleep(data.meta_info["compute"] / len(NODES))
        tensors = {name: torch.from_numpy(values) for name, values in self.rows.make_columns(rows, writes).items()}
        return DataProto.from_dict(tensors={"row": data.batch["row"], **tensors})


class Dispatched(Side):
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        # One process on each host: each host offers Ray one processor.
        pool = RayResourcePool([1] * len(setup.hosts), use_gpu=False, max_colocate_count=1)
        worker = RayClassWithInitArgs(ray.remote(Worker), samples=setup.samples, length=setup.length)
        self.group = RayWorkerGroup(pool, worker, device_name="cpu")

    def iteration(self, number: int, compute: float) -> dict[str, Any]:
        start = time.perf_counter()
        rows = torch.from_numpy(np.arange(self.setup.samples * len(self.setup.hosts)))
        batch = DataProto.from_dict(tensors={"row": rows})
        for nodes in (("actor.generate",), ("actor.infer", "reference.infer", "host.reward"), ("actor.update",)):
            requests = []
            for node in nodes:
                part = batch.select(["row", *NODES[node][0]])
                part.meta_info = {"node": node, "compute": compute}
                requests.append(self.group.run(part))
            for answer in requests:
                output = answer.get()
                output.meta_info = {}
                batch = batch.union(output)
        return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    os.environ |= NUMPY
    serve(Dispatched, **NUMPY)
