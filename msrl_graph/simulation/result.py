"""The result of a simulation: its iterations, intervals of work, and figures.

Invariant: the classes are plain data. Every figure is computed from iterations and intervals of work, and no figure is
rounded.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property

from ..analysis import async_schedule
from ..ir.plan import FUNCTIONS, Plan
from .assumptions import Specs
from .lanes import LaneSpan

RESHARD = "reshard"


@dataclass(frozen=True)
class Iteration:
    """An iteration of a simulation.

    - `begin`: the end of the previous iteration.
    - `prompt_tokens`: the number of tokens of all prompts. A prompt counts once per response.
    - `response_tokens`: the number of tokens of all responses.
    - `tail`: the share of the generation's time in which fewer than half of the peak number of sequences are live.
    - `staleness`: the number of versions by which the generation's weights were behind the update's weights; the mean
      over the prompts. `most_stale` is the maximum over the prompts.
    - `path`: the critical path, a chain of nodes in which each node waited for the previous node.
    """

    number: int
    begin: float
    end: float
    prompt_tokens: int
    response_tokens: int
    tail: float
    staleness: float
    most_stale: int
    path: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class NodeWork:
    """The work of a node, or of resharding, in a pool: averages over all iterations.

    - `span`: the seconds per iteration from the first start to the last end.
    - `mean`: the seconds per iteration that a device of the pool works, averaged over the devices.
    - `most`: the seconds per iteration that the busiest data-parallel group works.
    - `share`: the fraction of the pool's device time that is spent on this work.
    """

    pool: str
    name: str
    span: float
    mean: float
    most: float
    share: float


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation of a plan.

    `lengths` has one entry per iteration: the number of tokens of each row, by column.
    """

    plan: Plan
    specs: Specs
    iterations: tuple[Iteration, ...]
    spans: tuple[LaneSpan, ...]
    lengths: tuple[dict[str, tuple[int, ...]], ...]

    @property
    def seconds(self) -> float:
        """The mean seconds of an iteration."""
        return self.iterations[-1].end / len(self.iterations)

    def quantile(self, share: float) -> float:
        """Return a quantile of the seconds that an iteration takes.

        The fraction `share` of the iterations takes no longer than the returned seconds.
        """
        ordered = sorted(iteration.seconds for iteration in self.iterations)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices together; a prompt counts once per response."""
        tokens = sum(iteration.prompt_tokens + iteration.response_tokens for iteration in self.iterations)
        return tokens / self.iterations[-1].end if self.iterations[-1].end else 0.0

    @property
    def throughput(self) -> float:
        """Tokens per second and device at the simulated lengths (arXiv:2507.19017, eq. 5)."""
        return self.tokens_per_second / self.plan.cluster.devices

    @property
    def tail(self) -> float:
        """The mean share of a generation's time in which few sequences are live.

        This is the mean of `Iteration.tail` over the iterations.
        """
        tails = [iteration.tail for iteration in self.iterations]
        return sum(tails) / len(tails)

    @property
    def path(self) -> tuple[str, ...]:
        """The critical path that occurs in the most iterations."""
        return Counter(iteration.path for iteration in self.iterations).most_common(1)[0][0]

    @cached_property
    def work(self) -> tuple[NodeWork, ...]:
        """The work of each node in each pool, in the order in which nodes first began."""
        elapsed = self.iterations[-1].end
        sizes = self.sizes
        node_work = []
        for pool, name in dict.fromkeys((span.pool, span.name) for span in self.spans):
            spans = [span for span in self.spans if (span.pool, span.name) == (pool, name)]
            lanes: Counter[int] = Counter()
            stretch: dict[int, tuple[float, float]] = {}
            for span in spans:
                lanes[span.lane] += span.end - span.begin  # type: ignore[assignment]
                begin, end = stretch.get(span.iteration, (span.begin, span.end))
                stretch[span.iteration] = (min(begin, span.begin), max(end, span.end))
            busy = sum((span.end - span.begin) * span.width for span in spans)
            iterations = len(self.iterations)
            length = sum(last - first for first, last in stretch.values()) / iterations
            share = busy / (sizes[pool] * elapsed) if elapsed else 0.0
            node_work.append(
                NodeWork(pool, name, length, busy / sizes[pool] / iterations, max(lanes.values()) / iterations, share)
            )
        order = list(sizes)
        return tuple(sorted(node_work, key=lambda work: order.index(work.pool)))

    @property
    def sizes(self) -> dict[str, int]:
        """The number of lanes of each pool: its devices, or the processes for functions.

        Functions have one process per host for each iteration that can be in progress at the same time.
        """
        return {
            **{pool.name: pool.devices for pool in self.plan.pools},
            FUNCTIONS: self.plan.cluster.nodes * async_schedule.count_lanes(self.plan),
        }

    def idle(self, pool: str) -> float:
        """Return the share of a pool's device time in which no device work is done.

        Device work is computing and resharding.
        """
        return max(0.0, 1 - sum(work.share for work in self.work if work.pool == pool))

    def to_json(self) -> str:
        """Return the figures of the simulation and of each iteration as JSON.

        Units are seconds, tokens, and shares from 0 to 1.
        """
        figures = {
            "seconds": self.seconds,
            "seconds_half": self.quantile(0.5),
            "seconds_95": self.quantile(0.95),
            "throughput": self.throughput,
            "tokens_per_second": self.tokens_per_second,
            "tail": self.tail,
            "path": self.path,
            "work": [asdict(work) for work in self.work],
            "idle": {pool: self.idle(pool) for pool in self.sizes},
            "iterations": [{**asdict(iteration), "seconds": iteration.seconds} for iteration in self.iterations],
        }
        return json.dumps(figures, indent=2) + "\n"

    def trace(self) -> str:
        """Return a trace in Chrome's format.

        Each pool is a process of the trace. Each data-parallel group of a node is a thread, whose number is the number
        of the group's first device.
        """
        pools = list(self.sizes)
        events: list[dict[str, object]] = [
            {
                "name": "process_name",
                "ph": "M",
                "pid": index,
                "args": {"name": f"pool {pool_name}" if pool_name != FUNCTIONS else "hosts"},
            }
            for index, pool_name in enumerate(pools)
        ]
        for pool, lane in sorted({(pools.index(span.pool), span.lane) for span in self.spans}):
            name = f"device {lane}"
            if pools[pool] == FUNCTIONS:
                number, host = divmod(lane, self.plan.cluster.nodes)
                name = f"host {host}{f' lane {number}' if number else ''}"
            events.append({"name": "thread_name", "ph": "M", "pid": pool, "tid": lane, "args": {"name": name}})
        for span in self.spans:
            where = {"pid": pools.index(span.pool), "tid": span.lane}
            times = {"ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6}
            events.append(
                {
                    "name": span.name,
                    "ph": "X",
                    **times,
                    **where,
                    "args": {"iteration": span.iteration, "devices": span.width},
                }
            )
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
