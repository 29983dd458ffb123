"""The driver of a run whose rows arrive in a shuffled order: what supervisor.py starts in place of
msrl_graph.runtime.driver.driver.

Each dock keeps what it is given at once, but tells its controllers of it in pieces, cut row by row at random, each
after a delay of its own: whatever order a slow network could make, with a seed.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from msrl_graph.runtime.dock import host
from msrl_graph.runtime.dock.messages import RowsReady
from msrl_graph.runtime.driver import driver

LONGEST = 0.1  # seconds


class Shuffled(host.DockHost.__ray_metadata__.modified_class):  # type: ignore[misc]
    def __init__(self, members: Any, index: int, *others: Any) -> None:
        super().__init__(members, index, *others)
        self.chance = random.Random(index)

    async def _announce(self, key: str, news: Sequence[RowsReady]) -> None:
        told = [(post.send, member.hears) for member, post in self.others]
        for tell, columns in [*told, (self._here, self.hears)]:
            for n in news:
                if n.column not in columns:
                    continue
                size = len(n.rows)
                order = self.chance.sample(range(size), size)
                cuts = sorted(self.chance.sample(range(1, size), min(size - 1, 4)))
                for some in np.split(np.array(order), cuts):
                    piece = replace(n, rows=n.rows[some], lengths=n.lengths[some])
                    delay = self.chance.uniform(0, LONGEST)
                    self.announcements.append(asyncio.ensure_future(self._later(tell, key, piece, delay)))

    async def _later(self, tell: Any, key: str, news: RowsReady, delay: float) -> None:
        await asyncio.sleep(delay)
        await tell("heard", key, [news])

    async def _here(self, _: str, key: str, news: Sequence[RowsReady]) -> None:
        await self.heard(key, news)


if __name__ == "__main__":
    host.DockHost = ray.remote(num_cpus=0, max_concurrency=100_000)(Shuffled)
    sys.exit(driver.main(sys.argv[1]))
