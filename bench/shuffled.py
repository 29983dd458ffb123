"""The driver of a run whose rows arrive in a shuffled order: what supervisor.py starts in place of
msrl_graph.runtime.driver.driver.

Each warehouse keeps what it is given at once, but tells each controller of it in pieces, cut row by row at random, each
after a delay of its own: whatever order a slow network could make, with a seed.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray

from msrl_graph.runtime.data.columns import Piece
from msrl_graph.runtime.dock import actors
from msrl_graph.runtime.dock.wire import News
from msrl_graph.runtime.driver import driver

LONGEST = 0.1  # seconds


class Shuffled(actors.WarehouseHost.__ray_metadata__.modified_class):  # type: ignore[misc]
    def __init__(self, index: int, host: int) -> None:
        super().__init__(index, host)
        self.chance = random.Random(index)

    async def put(self, key: str, node: str, pieces: Mapping[str, Piece]) -> None:
        self.warehouse.put(key, node, pieces)
        for handle, names in self.controllers:
            for name, piece in pieces.items():
                if name not in names:
                    continue
                size = len(piece.rows)
                order = self.chance.sample(range(size), size)
                cuts = sorted(self.chance.sample(range(1, size), min(size - 1, 4)))
                for some in np.split(np.array(order), cuts):
                    news = [News.of(name, piece.take(some), self.warehouse.index)]
                    self.told.append(
                        asyncio.ensure_future(self._tell(handle, key, news, self.chance.uniform(0, LONGEST)))
                    )

    async def _tell(self, handle: Any, key: str, news: list[News], delay: float) -> None:
        await asyncio.sleep(delay)
        await handle.heard.remote(key, news)


if __name__ == "__main__":
    actors.WarehouseHost = ray.remote(num_cpus=0, max_concurrency=1000)(Shuffled)
    sys.exit(driver.main(sys.argv[1]))
