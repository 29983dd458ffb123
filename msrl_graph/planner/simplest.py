"""The search for the simplest plan that is about as fast as the fastest one.

It takes combinations in the order of their simplicity (`planner/simplicity.py`), over all divisions into pools, and
ends at the first one that fits and whose seconds are within the limit. Invariant: a combination is skipped only if a
lower bound of its seconds exceeds the limit, or if it does not fit. So no simpler plan is within the limit, unless the
effort was spent before.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..cost import holdings
from ..ir.plan import Plan
from .search_result import FoundPlan
from .search_space import Space
from .simplicity import Simplicity, measure_choice, measure_plan


class RoughPlan(NamedTuple):
    """A plan whose nodes are placed, with a lower bound of its seconds.

    `overflow` says why it does not fit.
    """

    plan: Plan
    bound: float
    overflow: str


class _Queued(NamedTuple):
    """A combination in the queue.

    `simplicity` is at most that of the combination and, at the stage `_NEW`, of all combinations that follow it.
    `places` has, for each owner, an index of its choices in the order of simplicity. It is () for a whole division.
    """

    simplicity: Simplicity
    division: int
    places: tuple[int, ...]
    stage: int


# The stages of a combination: not looked at, not placed, and placed.
_NEW, _BOUNDED, _PLACED = range(3)


@dataclass
class SimplestSearch:
    """The search among `spaces` for the simplest plan of at most `limit` seconds.

    - `place`, `evaluate`: functions that place the nodes of a combination, and that evaluate it with all passes.
      `evaluate` returns None if the combination cannot be used.
    - `spend`: a function that counts work, in the units of the search's limit, and returns whether the search may
      continue.
    """

    engines: holdings.Engines
    spaces: Sequence[Space]
    limit: float
    place: Callable[[Space, tuple[int, ...]], RoughPlan]
    evaluate: Callable[[Space, tuple[int, ...]], FoundPlan | None]
    spend: Callable[[float], bool]
    _sorted: dict[int, list[list[tuple[Simplicity, int]]]] = field(default_factory=dict)

    def find(self) -> tuple[FoundPlan | None, bool]:
        """Return the simplest plan, and whether the search was complete.

        The plan is None if the search ended before it found one.
        """
        heap = [
            _Queued(Simplicity(pools=len(space.division.pools)), number, (), _NEW)
            for number, space in enumerate(self.spaces)
            if space.can_fit and space.bound_from((0,) * len(space.lists)) <= self.limit
        ]
        heapq.heapify(heap)
        seen: set[tuple[int, tuple[int, ...]]] = set()
        while heap:
            if not self.spend(0.3):
                return None, False
            item = heapq.heappop(heap)
            if item.stage == _PLACED:
                found = self.evaluate(self.spaces[item.division], self._position(item))
                if found is not None and found.seconds <= self.limit:
                    return found, True
                continue
            if item.stage == _NEW:
                for places in self._following(item):
                    if (item.division, places) not in seen and self._exists(item.division, places):
                        seen.add((item.division, places))
                        least = self._least(item.division, places)
                        heapq.heappush(heap, _Queued(least, item.division, places, _NEW))
            if item.places and (following := self._advance(item)) is not None:
                heapq.heappush(heap, following)
        return None, True

    def _advance(self, item: _Queued) -> _Queued | None:
        """Return a combination at its next stage; None if it does not fit or is too slow."""
        space = self.spaces[item.division]
        position = self._position(item)
        if item.stage == _NEW:
            if space.bound(position) > self.limit or space.describe_overflow(position):
                return None
            offloaded = int(space.must_offload(position))
            return item._replace(simplicity=item.simplicity._replace(offloaded=offloaded), stage=_BOUNDED)
        rough = self.place(space, position)
        if rough.overflow or rough.bound > self.limit:
            return None
        return item._replace(simplicity=measure_plan(rough.plan, space.owners, self.engines), stage=_PLACED)

    def _following(self, item: _Queued) -> list[tuple[int, ...]]:
        if not item.places:
            return [(0,) * len(self.spaces[item.division].lists)]
        return [(*item.places[:index], place + 1, *item.places[index + 1 :]) for index, place in enumerate(item.places)]

    def _least(self, division: int, places: tuple[int, ...]) -> Simplicity:
        """Return the simplicity of a combination without offloading and recomputation."""
        total = Simplicity(pools=len(self.spaces[division].division.pools))
        for own, place in zip(self._list_choices(division), places, strict=True):
            total = total.plus(own[place][0])
        return total

    def _exists(self, division: int, places: tuple[int, ...]) -> bool:
        return all(place < len(own) for place, own in zip(places, self._list_choices(division), strict=True))

    def _position(self, item: _Queued) -> tuple[int, ...]:
        choices = self._list_choices(item.division)
        return tuple(choices[owner][place][1] for owner, place in enumerate(item.places))

    def _list_choices(self, division: int) -> list[list[tuple[Simplicity, int]]]:
        """Return each owner's choices that may be within the limit.

        They are indices of the space, the simplest first.
        """
        if division not in self._sorted:
            space = self.spaces[division]
            self._sorted[division] = [
                sorted(
                    (
                        measure_choice(space.skeleton, owner, self.engines, choice.layout, choice.engine),
                        index,
                    )
                    for index, choice in enumerate(own)
                    if self._may_be_fast(space, number, index)
                )
                for number, (owner, own) in enumerate(zip(space.owners, space.lists, strict=True))
            ]
        return self._sorted[division]

    def _may_be_fast(self, space: Space, owner: int, index: int) -> bool:
        """Return whether a choice may be within the limit.

        The other owners have their fastest choices.
        """
        seconds: dict[tuple[str, str], float] = {}
        for number, own in enumerate(space.lists):
            least = own[index].seconds if number == owner else space.least_later[number][0]
            seconds |= {("RUN", node): value for node, value in least.items()}
        return space.least(seconds) <= self.limit
