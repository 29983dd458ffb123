"""The allgather-swap (arXiv:2507.19017, figure 5): update weights become generation weights, and leave the device.

Invariant: after `run`, each rank holds exactly its boxes of the generation layout, bit for bit the values of the
update's; in mode swap the update's storages on the device are empty and their bytes lie in host buffers, and `swap_in`
brings them back bit for bit. An engine is known only by its shards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ...backends import devices
from ...backends.host_offload import HostOffload
from ...backends.spec import Shard
from ...ir.plan import Reshard
from ...model.architecture import Model
from ...sharding.layout import Side, Tensor
from .transfer_routes import Block, RouteLoad, TransferRoute


class HostSwap:
    """The update weights of a rank, on the device or in host buffers, which are there only as long as they are not."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.away = HostOffload(devices.of(shards[0].tensor), [s.tensor for s in shards])
        self._seconds = 0.0  # that copies in took, beside whatever ran, since they were last asked for
        self._thread: threading.Thread | None = None

    @property
    def host(self) -> list[torch.Tensor]:
        """The buffers of the shards; none where the weights are on the device."""
        return self.away.buffers

    def swap_out(self) -> None:
        """Device to host, and releases the device's storages."""
        self.away.store()
        self.away.leave()
        self.away.device.finish()

    def start_in(self) -> None:
        """Begins host to device, beside whatever runs."""
        if self.host and self._thread is None:
            self.away.take()  # here, so that the memory plan holds from this instant on
            self._thread = threading.Thread(target=self._copy_in)
            self._thread.start()

    def wait(self) -> None:
        """Returns when the weights are on the device."""
        self.start_in()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self.away.drop()

    def _copy_in(self) -> None:
        start = time.perf_counter()
        self.away.device.claim()  # each thread has a device of its own
        with torch.no_grad():
            self.away.fetch()
        self.away.back.mark().synchronize()
        self._seconds += time.perf_counter() - start

    def taken(self) -> float:
        """Seconds that copies in took since this was last asked."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


class Resharder:
    """One resharding edge on one rank; `blocks` are the neighbours that gather or exchange among themselves, by way."""

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
        for tensor in model.tensors:
            tensors[plan.way(tensor).of].append(tensor)
        routes = [TransferRoute(way, tensors[way.of], blocks[way.of], rank, sides) for way in plan.ways]
        self.loads: list[list[RouteLoad]] = []  # by bucket, of each way
        for bucket in plan.buckets:
            self.loads.append([])
            for route in routes:
                self.loads[-1].append(route.load(bucket, self.loads[-1][-1].stretch.stop if self.loads[-1] else 0))
        self.room = max(loads[-1].stretch.stop for loads in self.loads)  # elements of the temporary buffer
        item = swap.shards[0].tensor.element_size()
        # By way, bytes that a run receives from neighbours.
        self.received = {w.of: item * sum(loads[i].moved for loads in self.loads) for i, w in enumerate(plan.ways)}
        self.moved = sum(self.received.values())
        self.seconds: dict[str, float] = {}

    def run(self, allocate: Callable[[], list[Shard]]) -> None:
        """The five steps."""
        self.seconds = {}
        staged = self.plan.mode == "swap" and self.plan.order == "staged"

        def timed(name: str, since: float) -> None:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - since

        source = {s.name: s.tensor for s in self.swap.shards}
        place = next(iter(source.values())).device
        if staged:
            start = time.perf_counter()
            self.swap.swap_out()
            source = {s.name: h for s, h in zip(self.swap.shards, self.swap.host, strict=True)}
            timed("swap out", start)
        start = time.perf_counter()
        goal = {s.name: s.tensor for s in allocate()}
        buffer = torch.empty(self.room, dtype=next(iter(source.values())).dtype, device=place)
        timed("buffer", start)
        with torch.no_grad():
            for loads in self.loads:
                start = time.perf_counter()
                for load in loads:
                    load.fetch(source, buffer)
                timed("all-gather", start)
                start = time.perf_counter()
                for load in loads:
                    load.lay(source, buffer, goal)
                timed("select", start)
        start = time.perf_counter()
        devices.release(buffer)
        timed("release", start)
        if self.plan.mode == "swap" and not staged:
            start = time.perf_counter()
            self.swap.swap_out()
            timed("swap out", start)
