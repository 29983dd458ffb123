"""The generation of one data-parallel group, event by event.

An event is the start or the end of a sequence.

Invariant: between two events, the number of live sequences is constant, and each decoding step adds one token per
sequence to the KV cache. The time between two events is the number of steps times the time of the middle step. This is
exact if the time of a step is linear in the number of cached tokens. A sequence that ends leaves the batch immediately.
In a continuous engine, the next sequence starts as soon as a slot is free. In other engines, the next sequences start
when all live sequences have ended.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from ..cost.time import Costs


@dataclass(frozen=True)
class Sequence:
    """A sequence to generate: `context` tokens exist, and `tokens` are generated.

    `prefill` is the number of tokens of the context that the prefill must compute. It is 0 if the prefill of another
    response has computed the same prompt.
    """

    row: int
    context: float
    prefill: float
    tokens: int


@dataclass
class Generated:
    """The times at which rows ended, and the numbers of live sequences.

    - `end`: the time at which the last row ended.
    - `ends`: the time at which each row ended.
    - `stretches`: intervals as (begin, end, number of live sequences). An interval begins with the prefill of the
      sequences that start in it.
    """

    end: float
    ends: dict[int, float] = field(default_factory=dict)
    stretches: list[tuple[float, float, int]] = field(default_factory=list)


def generate(
    costs: Costs, sequences: Iterable[Sequence], slots: int, continuous: bool, slow: float, start: float
) -> Generated:
    """Simulate the generation of sequences in order, at most `slots` at a time.

    The devices compute `slow` times slower than planned. Each row that ends also costs a constant time on the host.
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
    """Return the share of a generation's time in which few sequences are live.

    "Few" means fewer than half of the largest number of live sequences. The generation's time begins with the first
    start of a sequence, and ends with the last end of a sequence.
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
