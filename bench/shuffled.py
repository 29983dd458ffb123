"""The driver of a run whose rows arrive in a shuffled order: what supervisor.py starts in place of msrl_graph.runtime.driver.driver.

Each warehouse keeps what it is given at once, but tells each controller of it in pieces, cut row by row at random, each after a delay of
its own: whatever order a slow network could make, with a seed.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import numpy as np
import ray

from msrl_graph.runtime.dock import actors
from msrl_graph.runtime.driver import driver

LONGEST = 0.1  # seconds


class Shuffled(actors.WarehouseHost.__ray_metadata__.modified_class):  # type: ignore[misc]
    def __init__(self, index: int, host: int) -> None:
        super().__init__(index, host)
        self.chance = random.Random(index)

    async def put(self, key: str, node: str, columns: dict[str, Any]) -> None:
        self.warehouse.put(key, node, columns)
        for handle, names in self.controllers:
            for name, (rows, column) in columns.items():
                if name not in names:
                    continue
                order = self.chance.sample(range(len(rows)), len(rows))
                cuts = sorted(self.chance.sample(range(1, len(rows)), min(len(rows) - 1, 4)))
                for piece in np.split(np.array(order), cuts):
                    news = {name: (rows[piece], column.lengths[piece])}
                    self.told.append(asyncio.ensure_future(self._tell(handle, key, news, self.chance.uniform(0, LONGEST))))

    async def _tell(self, handle: Any, key: str, news: dict[str, Any], delay: float) -> None:
        await asyncio.sleep(delay)
        await handle.heard.remote(key, self.warehouse.index, news)


if __name__ == "__main__":
    actors.WarehouseHost = ray.remote(num_cpus=0, max_concurrency=1000)(Shuffled)
    sys.exit(driver.main(sys.argv[1]))
