"""The driver of a run whose rows arrive in a shuffled order.

supervisor.py starts it instead of msrl_graph.runtime.driver.driver. Each dock stores its rows at once, but reports them
to its controllers in pieces, cut row by row at random, each after its own delay: any order that a slow network could
cause, with a seed.
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
        posts = [(post.send, member.hears) for member, post in self.others]
        for tell, columns in [*posts, (self._here, self.hears)]:
            for item in news:
                if item.column not in columns:
                    continue
                size = len(item.rows)
                order = self.chance.sample(range(size), size)
                cuts = sorted(self.chance.sample(range(1, size), min(size - 1, 4)))
                for indices in np.split(np.array(order), cuts):
                    piece = replace(item, rows=item.rows[indices], lengths=item.lengths[indices])
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
