"""The allgather-swap, which turns update weights into generation weights.

Source: arXiv:2507.19017, figure 5.

Invariant: after `Resharder.run`, each rank holds exactly its boxes of the generation layout. Their values are bit for
bit the values of the update's weights. In mode `swap`, the update's storages on the device are empty after the run, and
their bytes are in host buffers. `HostSwap` copies these bytes back to the device bit for bit. This module uses nothing
of an engine except the engine's shards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from ...backends import devices
from ...backends.engine_protocols import Shard
from ...backends.host_offload import HostOffload
from ...ir.resharding_plan import Reshard
from ...model.architecture import Model
from ...sharding.layout import Side
from ...sharding.tensors import Tensor
from .transfer_routes import Block, RouteLoad, TransferRoute


class HostSwap:
    """The update weights of a rank, on the device or in host buffers.

    The host buffers exist only while the weights are not on the device. Those of `frozen` weights are kept.
    """

    def __init__(self, shards: Sequence[Shard], frozen: Collection[str] = ()) -> None:
        self.shards = shards
        constant = [i for i, shard in enumerate(shards) if shard.name in frozen]
        self.offload = HostOffload(devices.device_of(shards[0].tensor), [shard.tensor for shard in shards], constant)
        self._seconds = 0.0  # of copies to the device since the last call of `taken`
        self._thread: threading.Thread | None = None

    @property
    def host(self) -> list[torch.Tensor]:
        """The host buffers of the shards; empty while the weights are on the device."""
        return self.offload.buffers

    def swap_out(self) -> None:
        """Copy the weights to host buffers, and release their storages on the device."""
        self.offload.store()
        self.offload.leave()
        self.offload.device.finish()

    def start_in(self) -> None:
        """Begin to copy the weights from host to device, in parallel with other work."""
        if self.host and self._thread is None:
            self.offload.take()  # here, so that the memory plan is right from now on
            self._thread = threading.Thread(target=self._copy_in)
            self._thread.start()

    def wait(self) -> None:
        """Wait until the weights are on the device."""
        self.start_in()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self.offload.drop()

    def _copy_in(self) -> None:
        start = time.perf_counter()
        self.offload.device.claim()  # the current device is a setting of each thread
        with torch.no_grad():
            self.offload.fetch()
        self.offload.back.mark().synchronize()
        self._seconds += time.perf_counter() - start

    def take_seconds(self) -> float:
        """Return the seconds that copies to the device have taken since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


class Resharder:
    """The allgather-swap of one resharding edge on one rank.

    `sides` are the layouts of update and generation. `swap` has the update weights of this rank. A *way* is the
    transfer of one kind of tensors, such as experts (transfer_routes.py). `blocks` has, for each way, the ranks that
    gather or exchange these tensors with each other.
    """

    def __init__(
        self,
        plan: Reshard,
        model: Model,
        rank: int,
        sides: tuple[Side, Side],
        blocks: Mapping[str, Block],
        swap: HostSwap,
    ) -> None:
        self.name = plan.name
        self.plan = plan
        self.swap = swap
        tensors: dict[str, list[Tensor]] = {way.of: [] for way in plan.ways}
        for tensor in model.weights:
            tensors[plan.route_of(tensor).of].append(tensor)
        routes = [TransferRoute(way, tensors[way.of], blocks[way.of], rank, sides) for way in plan.ways]
        self.loads: list[list[RouteLoad]] = []  # by bucket, of each way
        self.begun = False  # whether frozen weights were moved
        for bucket in (*plan.first_buckets, *plan.buckets):
            self.loads.append([])
            for route in routes:
                self.loads[-1].append(route.load(bucket, self.loads[-1][-1].stretch.stop if self.loads[-1] else 0))
        self.buffer_elements = max(loads[-1].stretch.stop for loads in self.loads)  # elements of the temporary buffer
        item = swap.shards[0].tensor.element_size()
        self.later_loads = self.loads[len(plan.first_buckets) :]
        # By way, bytes that a run receives from other ranks, except the first run.
        self.received = {
            way.of: item * sum(loads[i].moved for loads in self.later_loads) for i, way in enumerate(plan.ways)
        }
        self.moved = 0  # bytes that the last run has received from other ranks
        self.first_moved = item * sum(load.moved for loads in self.loads for load in loads)
        self.seconds: dict[str, float] = {}

    def run(self, allocate: Callable[[], list[Shard]]) -> None:
        """Run the five steps of the allgather-swap.

        The steps allocate a buffer, gather the weights, select what the generation needs, release the buffer, and swap
        the update weights out (only in mode `swap`). With the order `staged`, the swap comes first. `allocate` returns
        the generation's shards, which this method fills. In later runs the shards of frozen weights have values
        already. Afterwards, the attribute `seconds` has the time of each step.
        """
        self.seconds = {}
        self.moved = sum(self.received.values()) if self.begun else self.first_moved
        staged = self.plan.mode == "swap" and self.plan.order == "staged"

        def timed(name: str, since: float) -> None:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - since

        source = {shard.name: shard.tensor for shard in self.swap.shards}
        place = next(iter(source.values())).device
        if staged:
            start = time.perf_counter()
            self.swap.swap_out()
            source = {
                shard.name: host_buffer for shard, host_buffer in zip(self.swap.shards, self.swap.host, strict=True)
            }
            timed("swap out", start)
        start = time.perf_counter()
        goal = {shard.name: shard.tensor for shard in allocate()}
        buffer = torch.empty(self.buffer_elements, dtype=next(iter(source.values())).dtype, device=place)
        timed("buffer", start)
        with torch.no_grad():
            for loads in self.later_loads if self.begun else self.loads:
                start = time.perf_counter()
                for load in loads:
                    load.fetch(source, buffer)
                timed("all-gather", start)
                start = time.perf_counter()
                for load in loads:
                    load.unpack(source, buffer, goal)
                timed("select", start)
        start = time.perf_counter()
        devices.release(buffer)
        timed("release", start)
        self.begun = True
        if self.plan.mode == "swap" and not staged:
            start = time.perf_counter()
            self.swap.swap_out()
            timed("swap out", start)
