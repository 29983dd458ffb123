"""The generation of one data-parallel group, event by event.

An event is the start or the end of a sequence.

Invariant: between two events, the number of live sequences is constant, and each decoding step adds one token per
sequence to the KV cache. The time between two events is the number of steps times the time of the middle step. This is
exact if the time of a step is linear in the number of cached tokens. A sequence that ends leaves the batch immediately.
In a continuous engine, the next sequence starts as soon as a slot is free. In other engines, the next sequences start
when all live sequences have ended.

If the KV cache is full, the sequence that started last is preempted. It waits until another sequence has ended and the
cache has room for its tokens, which are then computed again. A cache is counted in tokens, as if each token needed the
same bytes as in a sequence at its bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
    costs: Costs,
    sequences: Iterable[Sequence],
    slots: int,
    continuous: bool,
    slow: float,
    start: float,
    room: float = math.inf,
) -> Generated:
    """Simulate the generation of sequences in order, at most `slots` at a time.

    `room` is the number of tokens for which the KV cache has room.

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
    blocked = False  # whether a sequence was preempted, and none has ended since
    while waiting or live:
        begin = now
        if waiting and not blocked and (not live or (continuous and len(live) < slots)):
            new = _admit(waiting, slots - len(live), room - cached, not live)
            if prefills := [sequence.prefill for sequence in new if sequence.prefill]:
                now += slow * costs.prefill(prefills).value
            for sequence in new:
                # The prefill gives the first token.
                heapq.heappush(live, (step + sequence.tokens - 1, admitted, sequence))
                admitted += 1
                cached += sequence.context
        steps = live[0][0] - step
        count = len(live)
        full = count > 1 and cached + count * steps > room
        if full:
            steps = max(0, int((room - cached) // count))
        now += slow * steps * costs.decode_step(count, cached + count * steps / 2).value if steps else 0.0
        result.stretches.append((begin, now, count))
        step += steps
        cached += count * steps
        if full:
            last = max(range(count), key=lambda index: live[index][1])
            end, _, sequence = live.pop(last)
            heapq.heapify(live)
            rest = end - step  # the tokens that it has yet to generate
            length = sequence.context + sequence.tokens - rest  # the last of these is not in the cache yet
            cached -= length - 1
            waiting.append(replace(sequence, context=length, prefill=length, tokens=rest))
            blocked = True
            continue
        blocked = False
        while live and live[0][0] == step:
            _, _, sequence = heapq.heappop(live)
            cached -= sequence.context + sequence.tokens - 1
            now += host
            result.ends[sequence.row] = now
    result.end = now
    return result


def _admit(waiting: list[Sequence], slots: int, room: float, alone: bool) -> list[Sequence]:
    """Remove from the end of `waiting`, and return, the sequences that start.

    They are at most `slots`, and their contexts fit into `room` tokens. If `alone` is true, at least one sequence
    starts.
    """
    new: list[Sequence] = []
    while waiting and len(new) < slots:
        room -= waiting[-1].context
        if room < 0 and (new or not alone):
            break
        new.append(waiting.pop())
    return new


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
