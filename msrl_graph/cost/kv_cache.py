"""The KV cache of a generation: how many sequences it holds, and preemption.

A sequence is a prompt and a response. At its bound, it has the greatest length that its columns allow.

An engine that pages its cache preempts sequences when the cache is full, and computes them again later. So its cache
only needs room for one sequence at its bound. Other engines generate only as many sequences at one time as the cache
holds at their bounds.

The model of a full cache is simple, since the order of preemptions depends on lengths that are not known:

- Sequences begin at different times. So a running sequence has on average its prompt and half of its response, and the
  cache has room for `running` sequences of this length.
- Each of these sequences for which the cache would have no room at its whole length is preempted once, at half of its
  response. Its tokens so far are then computed again, like a prompt.

Invariant: with a smaller cache, fewer sequences run, and no fewer are preempted.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from ..backends.spec import EngineSpec
from ..ir.options import EngineOptions
from ..ir.plan import Plan
from ..ir.workload import Workload
from . import holdings

ROUNDING = 1e-3  # of a number of sequences, whose cache is a whole number of bytes


def kv_room(plan: Plan, engines: holdings.Engines, node: str) -> int:
    """Return the bytes that remain on a device for the KV cache; may be negative."""
    part = plan.placement(node).engine.options.get("memory")
    part = part if isinstance(part, (int, float)) and part > 0 else EngineOptions.memory
    return int(holdings.capacity(plan.cluster).value * part) - sum(
        holdings.generation_items(plan, engines, node).values()
    )


@dataclass(frozen=True)
class KvCache:
    """The KV cache of a generate node, for the sequences of one data-parallel group."""

    plan: Plan
    engines: holdings.Engines
    node: str

    @cached_property
    def work(self) -> Workload:
        return holdings.work(self.plan, self.engines, self.node)

    @cached_property
    def spec(self) -> EngineSpec:
        return holdings.spec(self.plan, self.engines, self.node)

    @cached_property
    def sequences(self) -> int:
        """The number of sequences that a data-parallel group generates in an iteration."""
        return holdings.group_rows(self.plan, self.node) * holdings.samples(self.plan, self.node)

    @cached_property
    def bound(self) -> int:
        """The tokens of a sequence at its bound."""
        return self.work.prompt + self.work.response

    @cached_property
    def middle(self) -> float:
        """The tokens of a sequence with half of its longest response."""
        return self.work.prompt + self.work.response / 2

    @property
    def at_once(self) -> int:
        """The most sequences of an iteration that run at one time."""
        return min(self.work.at_once, self.slots)

    @property
    def slots(self) -> int:
        """The most sequences of an iteration that the engine gets at one time."""
        samples = holdings.samples(self.plan, self.node)
        most = holdings.prompts_at_once(self.plan, self.node) * samples
        return most if self.spec.memory.paged is not None else min(most, self.work.at_once)

    def count_sequences(self, tokens: float) -> float:
        """Return the number of sequences of `tokens` tokens for which the cache has room.

        The number is a fraction, and infinite if the cache has room for all sequences at their bounds.
        """
        paged = self.spec.memory.paged
        if paged is None or not self.work.cache_bytes:
            return math.inf
        empty = paged(self.work, 0, tokens)
        return (self.work.cache_bytes - empty) / (paged(self.work, 1, tokens) - empty)

    @cached_property
    def is_full(self) -> bool:
        """Whether the cache lacks room for `at_once` sequences at their bounds."""
        return self.count_sequences(self.bound) < self.at_once - ROUNDING

    def running(self, prompt: float, response: float) -> float:
        """Return how many sequences run at one time on average.

        The number is infinite if as many run as the engine gets.
        `prompt` and `response` are the mean numbers of tokens.
        """
        count = self.count_sequences(prompt + response / 2)
        return count if math.isinf(count) else max(1.0, min(count, self.work.at_once))

    def preempted_share(self, sequences: float, prompt: float, response: float) -> float:
        """Return the share of `sequences` sequences that are preempted once.

        The other arguments are those of `running`.
        """
        together = min(sequences, self.running(prompt, response))
        return 1 - min(1.0, max(1.0, self.count_sequences(prompt + response)) / max(1.0, together))

    def waves(self) -> Counter[tuple[int, int]]:
        """Return the waves of an iteration: (sequences, prompts that begin), counted.

        A wave has the sequences that the engine gets at one time. All of them have ended before the next wave begins,
        if all responses have the same length.
        """
        samples = holdings.samples(self.plan, self.node)
        starts = range(0, self.sequences, self.slots)
        ends = [min(start + self.slots, self.sequences) for start in starts]
        return Counter(
            (end - start, -(-end // samples) - -(-start // samples)) for start, end in zip(starts, ends, strict=True)
        )

    def describe(self) -> str:
        """Describe how many sequences run at one time."""
        whole = f"of a group's {self.sequences:,} sequences at once"
        most = holdings.most_samples(self.plan, self.node)
        draws = f"where an evaluation draws {most:,} a prompt"
        more = f", {self.work.at_once:,} {draws}" if self.work.at_once > self.at_once else ""
        if self.is_full:
            room = [
                min(int(self.count_sequences(tokens) + ROUNDING), self.at_once) for tokens in (self.middle, self.bound)
            ]
            return (
                f"at most {self.at_once:,} {whole}{more}; the KV cache holds {room[0]:,} with half of the longest "
                f"response, {room[1]:,} with the longest; if it is full, sequences are preempted"
            )
        times = -(-self.sequences // self.at_once)
        return f"{self.at_once:,} {whole}, {times} wave{'s' * (times > 1)}{more}"
