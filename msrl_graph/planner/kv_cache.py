"""The size of a KV cache, and the number of sequences at one time.

Invariant: the cache has at least room for one sequence at its bound, even if the device does not, and at most for all
sequences that the engine gets at one time. More memory never gives a smaller cache or fewer sequences.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from ..analysis.async_schedule import skipping_edges
from ..cost import holdings
from ..cost.kv_cache import kv_room
from ..ir.plan import Placement, Plan

# Sequences generated at once where memory holds more than an iteration has: an evaluation may have more.
AT_ONCE = 1024
# Most responses are shorter than their bound. An engine that preempts runs as many sequences at one time as its cache
# holds when each has this share of the longest response.
SHORT = 1 / 8


def give_cache(
    plan: Plan, engines: holdings.Engines, placement: Placement, count_bytes: Callable[[Placement], int]
) -> Placement:
    """Return a generation's placement with its KV cache and its number of sequences.

    `count_bytes` returns the bytes of a node's peak, in addition to resident items, by placement.
    """
    node = placement.node
    paged = engines[placement.engine.name].memory.paged
    room = kv_room(plan, engines, node)
    most = holdings.prompts_at_once(plan, node) * holdings.most_samples(plan, node)
    if paged is None:
        stated = "micro_batch" in placement.engine.options
        numbers = range(1, 1 + (most if stated else max(most, AT_ONCE)))
        held = bisect_right(numbers, room, key=lambda number: count_bytes(replace(placement, sequences=number)))
        return replace(placement, sequences=max(1, held))
    work = holdings.work(replace(plan, placements=(placement,)), engines, node)
    bound = work.prompt + work.response
    least, whole = (round(paged(work, number, bound)) for number in (1, most))

    def count_rest(number: int) -> int:
        """Return the bytes that `number` sequences need in addition to the cache."""
        return count_bytes(replace(placement, sequences=number, cache_bytes=least)) - least

    def count_with_cache(number: int) -> int:
        short: float = paged(work, number, work.prompt + SHORT * work.response)
        return count_rest(number) + max(least, math.ceil(short))

    if _keeps_cache(plan, engines, node):  # these get half of what is left
        room -= max(0, room - count_rest(1) - least) // 2
    sequences = most
    if count_rest(most) + whole > room:
        sequences = max(1, bisect_right(range(1, most + 1), room, key=count_with_cache))
    cache = max(least, min(whole, room - count_rest(sequences)))
    return replace(placement, sequences=sequences, cache_bytes=cache)


def _keeps_cache(plan: Plan, engines: holdings.Engines, node: str) -> bool:
    """Return whether a cache stays while other nodes compute on its devices."""
    placement = plan.placement(node)
    if engines[placement.engine.name].memory.building is None or node not in {dst for _, dst in skipping_edges(plan)}:
        return False
    return any(other.pool == placement.pool and other.node != node for other in plan.placements)
