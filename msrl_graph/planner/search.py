"""search: the open layouts, engines and pools of the fastest iteration that fits.

Invariant: the passes evaluate a candidate on the plan that it would be. A candidate that is skipped is not faster than
a bound that the passes cannot go below: each node's seconds at the best micro-batch that its own memory allows, along
the critical path, plus only the resharding that must enter a host or be swapped. The best plan is then optimal in the
plan's own model, or the search reports its gap to the lowest remaining bound. Nothing depends on the clock, unless a
budget of seconds is given.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from ..backends.spec import EngineSpec
from ..cost import holdings
from ..cost.transfers import function
from ..emit.humanize import laid, versus
from ..ir.async_schedule import fetched, leads
from ..ir.attributes import ReshardingEdgeAttributes
from ..ir.plan import FUNCTIONS, Plan, PlanNote
from ..ir.search_record import NOTHING_FITS, Candidate, Rival, SearchRecord
from ..passes.estimate import EstimateTime
from ..passes.memory import CountMemory, over
from ..passes.order import passes
from ..passes.reshard import least_seconds
from ..passes.spec import Passes
from .candidates import Choice, Choices, undominated
from .owners import Owner, engines, has_open_layout, owners
from .place import PlacementDecision, PlacementPass, PlaceNodes
from .pools import Division, divisions, in_step
from .search_space import Space

# The limit of a search, after which it reports a gap: in units of about a millisecond, the same on any machine.
EFFORT = 2500.0
RUNNERS = 5
# The limit of the search for runners-up.
FURTHER = 600.0
# The limit of the search for the best plan of the other kind, where a program allows staleness: it is only reported.
RIVALS = 150.0
# The number of bounded combinations that are still evaluated when the effort is spent.
DIVES = 8


@dataclass(frozen=True)
class Search(PlacementPass):
    """The pass that places nodes by a search.

    `engines` are the specs by name. `refuses` says whether the checks would reject a placed plan. After `budget`
    seconds the best plan so far is taken.
    """

    engines: Mapping[str, EngineSpec]
    refuses: Callable[[Plan], bool] = lambda plan: False
    budget: float | None = None

    def apply(self, plan: Plan) -> Plan:
        place = PlaceNodes(self.engines)
        some = divisions(plan)
        if len(some) == 1 and not self._open(plan, place, some[0]):
            return place.apply(plan)
        run = _Run(self, place, plan, passes(self, self.engines, compare=False), some)
        return self._compared(run, run.best())

    def _compared(self, run: _Run, plan: Plan) -> Plan:
        """Add the best plan of the other kind to a plan whose program allows staleness.

        One kind has pools that may be ahead of the updates, or of themselves; the other is the same program without
        staleness.
        """
        found = plan.search
        ahead = bool(leads(plan))
        if (
            found is None
            or not found.seconds
            or not any(ReshardingEdgeAttributes.of(e).staleness for e in plan.graph.reshards())
        ):
            return plan
        placed = [(d, run.place.apply(run.plan, PlacementDecision(d), numbered=False)) for d in run.some]
        whole = run.plan
        others = [d for d, other in placed if leads(other)]
        if ahead:  # search all divisions if in some of them generations take turns with their updates
            whole, others = in_step(whole), [*run.some] if any(not fetched(other) for _, other in placed) else []
        if not others:
            return plan
        rival = _Run(self, run.place, whole, run.passes, others, RIVALS, 0.0, began=run.began, lists=run.lists).best()
        assert rival.search is not None
        estimate = run.passes.after("place").apply(plan if ahead else rival).estimate
        stale = estimate.staleness if estimate is not None else None
        old = (stale.mean.value, stale.bound) if stale is not None else ()
        found = replace(found, rival=Rival(not ahead, rival.search.seconds, rival.search.best, *old))
        assert found.rival is not None
        note = f"{'' if ahead else 'not used: '}{versus(found, found.rival)}"
        return replace(plan, search=found, notes=(*plan.notes, PlanNote("staleness", note)))

    def _open(self, plan: Plan, place: PlaceNodes, division: Division) -> bool:
        """Return whether there is a choice: of layouts, or of engines for stated layouts.

        Engines count only if one of them can be right.
        """
        found = owners(plan, division)
        if any(has_open_layout(plan, o) for o in found):
            return True
        ways = [
            dict(zip((o.node for o in found), way, strict=True))
            for way in product(*([e.name for e in engines(plan, o, self.engines)] for o in found))
        ]
        return len(ways) > 1 and any(
            not self.refuses(place.apply(plan, PlacementDecision(division, engines=w))) for w in ways
        )


@dataclass(order=True)
class _Item:
    """A combination to evaluate; ties go to the later stage, then the earlier entry."""

    bound: float
    stage: int
    order: tuple[int, ...]
    space: Space = field(compare=False)
    at: tuple[int, ...] = field(compare=False)


class _Found(NamedTuple):
    """A combination with its plan; without a plan, the reason why not."""

    seconds: float
    space: Space
    at: tuple[int, ...]
    plan: Plan | None
    wrong: str = ""


@dataclass
class _Run:
    """One best-first search; bounds only rise as more of a combination is evaluated."""

    search: Search
    place: PlaceNodes
    plan: Plan
    passes: Passes
    some: Sequence[Division]
    effort: float = field(default_factory=lambda: EFFORT)
    further: float = FURTHER
    wide: bool = False  # whether layouts that span hosts are included
    began: float = field(default_factory=time.monotonic)
    spent: float = 0.0
    seen: set[tuple[int, ...]] = field(default_factory=set)
    evaluated: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    lists: dict[tuple[tuple[str, ...], int, int, int], list[Choice]] = field(default_factory=dict)
    found: list[_Found] = field(default_factory=list)
    wrong: list[_Found] = field(default_factory=list)

    def best(self) -> Plan:
        """Return the best plan, with the record of the search."""
        heap: list[_Item] = []
        spaces: list[Space] = []
        left = 0
        for division in self.some:
            if spaces and self._late():
                left += 1
                continue
            space = self._space(division)
            spaces.append(space)
            if all(c.over <= 0 for own in space.lists for c in own[:1]):
                self._push(heap, len(spaces), space, (0,) * len(space.lists))
                if not self.found and (start := space.start()):
                    self._evaluate(space, start)
        ended = f"the budget of {self.search.budget:g} s" if left else ""
        while heap and not ended and not (self.found and heap[0].bound >= self.found[0][0]):
            ended = self._enough()
            if not ended:
                self._step(heap, heapq.heappop(heap))
        # Nothing is known of a division that was not searched.
        bound = 0.0 if left else heap[0].bound if heap else math.inf
        self._more(heap, ended)
        candidates = sum(s.size for s in spaces)
        if not self.found and self.wrong and not ended and not self.wide:
            # Each choice fits alone but not with the others: layouts that span hosts hold less.
            return replace(self, wide=True, spent=0.0, seen=set(), evaluated=set(), lists={}, wrong=[]).best()
        if not self.found:
            return self._nothing(spaces, candidates, ended)
        seconds, space, at = self.found[0][:3]
        bound = min(bound, seconds)
        best = self._candidate(self.found[0])
        record = SearchRecord(
            candidates, len(self.evaluated), seconds, bound, bound >= seconds, ended, best, self._runners(heap)
        )
        return replace(self.place.apply(self.plan, self._decision(space, at, _why(record))), search=record)

    def _late(self) -> bool:
        """Return whether the budget is spent.

        Until a plan is found, the search goes on to its limit.
        """
        over = self.search.budget is not None and time.monotonic() - self.began >= self.search.budget
        return over and (bool(self.found) or self.spent >= self.effort)

    def _enough(self) -> str:
        """Return what ends the search early, "" if nothing does.

        A search with a budget ends by it, whether that is shorter or longer than the limit.
        """
        if self.search.budget is not None:
            return f"the budget of {self.search.budget:g} s" if self._late() else ""
        return "the search's limit" if self.spent >= self.effort else ""

    def _more(self, heap: list[_Item], ended: str) -> None:
        """Evaluate bounded combinations that may still be the best, then runners-up.

        The former happens only if the effort was spent.
        """
        if ended and self.search.budget is None:
            for item in sorted(i for i in heap if i.stage == 0)[:DIVES]:
                if not self.found or item.bound < self.found[0][0]:
                    self._evaluate(item.space, item.at)
        most = self.spent + self.further
        while heap and 0 < len(self.found) <= RUNNERS and self.spent < most and not self._late():
            self._step(heap, heapq.heappop(heap))

    def _space(self, division: Division) -> Space:
        skeleton = self.place.apply(self.plan, PlacementDecision(division), numbered=False)
        skeleton = self.passes.only("dock", "schedule", "traffic").apply(skeleton)
        found = owners(self.plan, division)
        lists = [self._choices(skeleton, division, o) for o in found]
        later = []
        for own in lists:
            least: list[dict[str, float]] = []
            for choice in reversed(own):
                least.append({n: min(s, least[-1][n]) if least else s for n, s in choice.seconds.items()})
            later.append(least[::-1])
        hosted = [
            n.name for n in skeleton.graph.nodes if n.verb != "source" and skeleton.placement(n.name).pool == FUNCTIONS
        ]
        functions = {("RUN", n): function(skeleton, holdings.row_count(skeleton, n)).value for n in hosted}
        return Space(division, skeleton, found, lists, functions, later)

    def _choices(self, skeleton: Plan, division: Division, owner: Owner) -> list[Choice]:
        """Return the choices of an owner.

        Pools of equal size and equal position on their hosts share them.
        """
        pool = division.pool_of(owner.node)
        key = (owner.nodes, pool.devices, pool.first % self.plan.cluster.devices_per_node, pool.each)
        if key not in self.lists:
            found = Choices(self.place, self.wide)(skeleton, division, owner)
            moved = {n for e in self.plan.graph.reshards() for n in (e.src, e.dst)}
            self.lists[key] = found if moved & set(owner.nodes) else undominated(found)
        return self.lists[key]

    def _push(self, heap: list[_Item], number: int, space: Space, at: tuple[int, ...]) -> None:
        if (number, *at) not in self.seen and all(i < len(own) for i, own in zip(at, space.lists, strict=True)):
            self.seen.add((number, *at))
            heapq.heappush(heap, _Item(space.bound_from(at), 2, (number, *at), space, at))

    def _step(self, heap: list[_Item], item: _Item) -> None:
        """Advance a combination by one stage.

        The stages are: queued, its own bound, placed without resharding, all passes.
        """
        space = item.space
        at = item.at
        if item.stage == 2:
            self.spent += 0.3
            for i in range(len(at)):
                self._push(heap, item.order[0], space, (*at[:i], at[i] + 1, *at[i + 1 :]))
            own = space.bound(at)
            if why := space.over(at):
                self._refuse(own, space, at, why)
            else:
                heapq.heappush(heap, replace(item, bound=max(own, item.bound), stage=1))
        elif item.stage == 1:
            self.spent += 3 + self.plan.cluster.devices * 0.01
            placed = self.place.apply(self.plan, self._decision(space, at))
            rough = replace(space.skeleton, placements=placed.placements, pools=placed.pools)
            rough = CountMemory(self.search.engines).apply(rough)
            if why := over(rough.memory):
                self._refuse(item.bound, space, at, why)
                return
            time_of = EstimateTime(self.search.engines).of_node
            seconds = {("RUN", n): math.fsum(f.value for f in time_of(rough, n)) for o in space.owners for n in o.nodes}
            for edge in self.plan.graph.reshards():
                seconds |= least_seconds(rough, self.search.engines, edge)
            bounded = replace(item, bound=max(item.bound, space.least(seconds)), stage=0)
            heapq.heappush(heap, bounded)
        else:
            self._evaluate(space, at)

    def _evaluate(self, space: Space, at: tuple[int, ...]) -> None:
        if (id(space), at) in self.evaluated:
            return
        self.evaluated.add((id(space), at))
        self.spent += 10 + self.plan.cluster.devices * 0.25
        plan = self.place.apply(self.plan, self._decision(space, at))
        if self.search.refuses(plan):
            return
        plan = self.passes.after("place").apply(plan)
        assert plan.estimate is not None
        seconds = plan.estimate.iteration_seconds.value
        if why := over(plan.memory):
            self._refuse(seconds, space, at, why)
            return
        self.found.append(_Found(seconds, space, at, plan))
        self.found.sort(key=lambda f: f.seconds)

    def _refuse(self, seconds: float, space: Space, at: tuple[int, ...], why: str) -> None:
        if len(self.wrong) < RUNNERS:
            self.wrong.append(_Found(seconds, space, at, None, why))

    def _decision(self, space: Space, at: tuple[int, ...], why: str = "planned") -> PlacementDecision:
        chosen = list(zip(space.owners, space.chosen(at), strict=True))
        layouts = {o.node: c.layout for o, c in chosen if has_open_layout(self.plan, o)}
        return PlacementDecision(space.division, layouts, {o.node: c.engine for o, c in chosen}, why)

    def _nothing(self, spaces: list[Space], candidates: int, ended: str) -> Plan:
        """Return the plan if nothing fits: the least overflow in the first division.

        The memory check then reports it.
        """
        why = "planned: nothing that fits was found" if ended else "planned: no combination of devices and engines fits"
        space = spaces[0]
        at = tuple(
            min(enumerate(own), key=lambda choice: max(choice[1].peaks.values(), default=0))[0] for own in space.lists
        )
        best = self._candidate(_Found(0.0, space, at, None, ended or NOTHING_FITS))
        record = SearchRecord(
            candidates, len(self.evaluated), 0.0, 0.0, False, ended or NOTHING_FITS, best, self._runners([])
        )
        return replace(self.place.apply(self.plan, self._decision(space, at, why)), search=record)

    def _runners(self, heap: list[_Item]) -> tuple[Candidate, ...]:
        """Return the runners-up.

        First the next best that were evaluated, then those with only a bound, then the fastest that do not fit.
        """
        runners = self.found[1 : RUNNERS + 1]
        bounded = heapq.nsmallest(RUNNERS - len(runners), [i for i in heap if i.stage < 2])
        runners = [*runners, *(_Found(i.bound, i.space, i.at, None) for i in bounded)]
        return tuple(map(self._candidate, [*runners, *sorted(self.wrong, key=lambda w: w.seconds)]))

    def _candidate(self, found: _Found) -> Candidate:
        space = found.space
        layouts = {
            o.node: f"{laid(c.layout)}, {c.engine}" for o, c in zip(space.owners, space.chosen(found.at), strict=True)
        }
        pools = (
            tuple(f"{p.name}: {', '.join(p.nodes)}" for p in space.division.pools)
            if len(space.division.pools) > 1
            else ()
        )
        loses = {}
        if found.plan is not None and self.found[0].plan is not None:
            mine = _phases(self.found[0].plan)
            theirs = _phases(found.plan)
            loses = {n: theirs.get(n, 0.0) - mine.get(n, 0.0) for n in {**mine, **theirs}}
        return Candidate(
            pools, layouts, found.seconds, found.plan is not None, {n: s for n, s in loses.items() if s}, found.wrong
        )


def _phases(plan: Plan) -> dict[str, float]:
    assert plan.estimate is not None
    return {p.name: p.seconds.value for p in plan.estimate.phases}


def _why(record: SearchRecord) -> str:
    best = (
        f"planned: the best of {record.candidates:,}" if record.candidates > 1 else "planned: the only possible choice"
    )
    if record.optimal:
        return f"{best}, optimal in the plan's own model" if record.candidates > 1 else best
    return f"{best} that was found; no other is better by more than {record.percent}"
