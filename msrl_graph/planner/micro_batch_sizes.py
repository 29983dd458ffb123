"""What the planner tries for a micro-batch: sizes, and parts to recompute.

Invariant: the choices depend on the lengths of rows and on the model, not on memory or seconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..backends.spec import EngineSpec
from ..cost import holdings
from ..cost.batch_counts import BatchCounts
from ..ir.plan import MICRO_BATCH, Placement, Plan
from ..model.architecture import Model

# The most tokens of a micro-batch that is not stated, unless a row is longer.
MICRO_BATCH_TOKENS = 16384
# Numbers of tokens of a micro-batch that is not stated: powers of two, and multiples of 1,024.
TOKEN_SIZES = sorted(
    {1 << power for power in range(MICRO_BATCH_TOKENS.bit_length())} | {*range(1024, MICRO_BATCH_TOKENS, 1024)}
)


@dataclass(frozen=True)
class SizeChoices:
    """The sizes of a node's micro-batch to choose from.

    - `option`: the engine's option that limits a micro-batch.
    - `sizes`: its values, ascending.
    - `of_row`: the size of the longest row.
    - `stated`: whether the file states the size.
    """

    option: str
    sizes: Sequence[int]
    of_row: int
    stated: bool

    def count_rows(self, size: int) -> int:
        """Return the number of full rows in a micro-batch of a size."""
        return size // self.of_row

    def with_size(self, placement: Placement, size: int) -> Placement:
        return placement if self.stated else holdings.with_options(placement, {self.option: size})

    def with_least(self, placement: Placement) -> Placement:
        return self.with_size(placement, self.sizes[0])

    def with_largest(self, placement: Placement) -> Placement:
        return self.with_size(placement, self.sizes[-1])

    def select_doubling(self) -> list[int]:
        """Select numbers of full rows, each at least twice the one before.

        The greatest number is selected too.
        """
        numbers = [*map(self.count_rows, self.sizes)]
        selected = [numbers[0]]
        for number in numbers:
            if number >= 2 * selected[-1]:
                selected.append(number)
        return [*dict.fromkeys([*selected, numbers[-1]])]

    @classmethod
    def of(cls, plan: Plan, engines: holdings.Engines, placement: Placement) -> SizeChoices:
        """Return the sizes of a node's micro-batch.

        The smallest number of tokens is the length of the longest row. With the largest one, all rows are in one
        micro-batch, unless that exceeds MICRO_BATCH_TOKENS.
        """
        stated = not {*MICRO_BATCH}.isdisjoint(placement.engine.options)
        counts = BatchCounts(replace(plan, placements=(placement,)), placement.node)
        limit = counts.limit
        if "micro_batch_tokens" not in engines[placement.engine.name].capabilities.options:
            most_rows = max(1, min(counts.step_rows, MICRO_BATCH_TOKENS // limit.longest))
            return cls("micro_batch", range(1, most_rows + 1), 1, stated)
        least = limit.count_tokens(limit.longest)
        most = bisect_left(TOKEN_SIZES, counts.step_rows * least)
        larger = TOKEN_SIZES[bisect_right(TOKEN_SIZES, least) : most + 1]
        return cls("micro_batch_tokens", [least, *larger], least, stated)


def list_recomputed(model: Model, spec: EngineSpec) -> list[tuple[str, ...]]:
    """Return lists of parts that an update may recompute, the cheapest first."""
    lists = (("activation", "norms"), ("moe" if model.experts else "mlp", "norms"))
    known = spec.capabilities.recomputes
    supported = [tuple(part for part in parts if part in known) for parts in lists]
    return [parts for parts in supported if parts]
