"""The generation of one data-parallel group, event by event.

Invariant: between two events the number of live sequences is constant, and the cache grows by one token per sequence
and step. A stretch takes its number of steps times the step in its middle, which is exact if a step is linear in the
cached tokens. A finished sequence leaves the batch at once. In a continuous engine the next sequence takes a slot as
soon as one is free; otherwise the next wave waits for the longest sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from ..cost.time import Costs


@dataclass(frozen=True)
class Sequence:
    """A sequence to generate: `context` tokens exist at its start; it adds `tokens`.

    `prefill` tokens of the context must be computed (0 if a sibling has computed the prompt).
    """

    row: int
    context: float
    prefill: float
    tokens: int


@dataclass
class Generated:
    """When each row ended, and how many sequences were live.

    `stretches` are (from, to, sequences); they include the prefill.
    """

    end: float
    ends: dict[int, float] = field(default_factory=dict)
    stretches: list[tuple[float, float, int]] = field(default_factory=list)


def generate(
    costs: Costs, sequences: Iterable[Sequence], slots: int, continuous: bool, slow: float, start: float
) -> Generated:
    """Generate sequences in order, at most `slots` at once.

    All computation is `slow` times slower than planned. The host takes its time for each row that ends.
    """
    host = costs.device.overheads.row.value
    result = Generated(start)
    waiting = list(sequences)[::-1]
    live: list[tuple[int, int, Sequence]] = []  # by the step at which each ends
    step = 0
    cached = 0.0
    now = start
    admitted = 0
    while waiting or live:
        begin = now
        if waiting and (not live or (continuous and len(live) < slots)):
            new = [waiting.pop() for _ in range(min(slots - len(live), len(waiting)))]
            if prefills := [sequence.prefill for sequence in new if sequence.prefill]:
                now += slow * costs.prefill(prefills).value
            for sequence in new:
                # The prefill gives the first token.
                heapq.heappush(live, (step + sequence.tokens - 1, admitted, sequence))
                admitted += 1
                cached += sequence.context
        steps = live[0][0] - step
        count = len(live)
        now += slow * steps * costs.decode_step(count, cached + count * steps / 2).value if steps else 0.0
        result.stretches.append((begin, now, count))
        step += steps
        cached += count * steps
        while live and live[0][0] == step:
            _, _, sequence = heapq.heappop(live)
            cached -= sequence.context + sequence.tokens - 1
            now += host
            result.ends[sequence.row] = now
    result.end = now
    return result


def tail_share(stretches: Iterable[tuple[float, float, int]]) -> float:
    """Return the share of the time in which fewer than half of the peak are live.

    Live are sequences; the time is from the first start to the last end.
    """
    changes: dict[float, int] = {}
    for begin, end, count in stretches:
        changes[begin] = changes.get(begin, 0) + count
        changes[end] = changes.get(end, 0) - count
    times = sorted(changes)
    lives = list(accumulate(changes[time] for time in times))
    if not times or times[-1] == times[0]:
        return 0.0
    peak = max(lives)
    few = sum(
        end_time - begin_time
        for (begin_time, end_time), live in zip(pairwise(times), lives, strict=False)
        if 2 * live < peak
    )
    return few / (times[-1] - times[0])
