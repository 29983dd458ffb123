"""The search for the layouts, engines and pools of a plan.

A candidate is one combination of all open choices. Only candidates that fit into memory are considered. Invariant: the
compiler's passes evaluate each candidate on a whole plan. The search first finds the fastest candidate. It skips a
candidate only if a lower bound of its seconds shows that it is not faster. The passes never estimate fewer seconds than
this bound. The bound adds up, along the critical path, each node's seconds at the best micro-batch that the node's own
memory allows. For resharding, the bound counts only the bytes that must enter a host or be swapped. Then the search
takes the simplest candidate within `MARGIN` of the fastest one (`planner/simplest.py`).

Therefore, by the cost formulas, either no plan is faster than the fastest plan that was found, or the search reports by
how much another plan could be faster. The result does not depend on the clock, unless a budget of seconds is given.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from ..analysis.async_schedule import fetched_edges, lead_of_pools
from ..ir.attributes import ReshardingEdgeAttributes
from ..ir.plan import Plan, PlanNote
from ..ir.search_record import MARGIN, NOTHING_FITS, Candidate, Rival, SearchRecord
from ..passes.estimate import EstimateTime
from ..passes.memory import CountMemory, describe_overflow
from ..passes.order import passes
from ..passes.place import PlacementPass, compare_rival
from ..passes.reshard import InsertResharding, least_seconds
from ..passes.spec import Passes
from .owners import engines, has_open_layout, owners
from .place import PlacementDecision, PlaceNodes
from .pools import Division, divisions, without_staleness
from .search_result import FoundPlan, describe_candidate, describe_choice
from .search_space import ChoiceLists, Space, SpaceBuilder
from .simplest import RoughPlan, SimplestSearch
from .simplicity import Simplicity, describe_difference, measure_plan

# The limit of a search, after which it reports a gap: in units of about a millisecond, the same on any machine.
EFFORT = 2500.0
RUNNERS = 5
# The limit of the search for the simplest plan within the margin of the fastest.
SIMPLEST = 600.0
# The limit of the search for runners-up.
FURTHER = 600.0
# The limit of the search for the best plan of the other kind, where a program allows staleness: it is only reported.
RIVALS = 150.0
# The number of bounded combinations that are still evaluated when the effort is spent.
DIVES = 8


@dataclass(frozen=True)
class Search(PlacementPass):
    """The pass that places nodes by a search.

    - `refuses`: a function that returns whether the checks would reject a placed plan.
    - `budget`: a time limit in seconds, after which the search returns the best plan that it has found.
    """

    refuses: Callable[[Plan], bool] = lambda plan: False
    budget: float | None = None

    def apply(self, plan: Plan) -> Plan:
        place = PlaceNodes(self.engines)
        open_divisions = divisions(plan)
        if len(open_divisions) == 1 and not self._has_choice(plan, place, open_divisions[0]):
            return place.apply(plan)
        steps = passes(self, self.engines).replace(InsertResharding(self.engines, compare=False))
        run = _Run(self, place, plan, steps, open_divisions)
        return self._compare_staleness(run, run.best())

    def _compare_staleness(self, run: _Run, plan: Plan) -> Plan:
        """Add a rival plan to the search record of a program that allows staleness.

        If `plan` uses staleness (some pools may be ahead of the updates), the rival is the best plan without staleness.
        Otherwise, the rival is the best plan with staleness. A program that states no staleness has no rival.
        """
        record = plan.search
        is_ahead = bool(lead_of_pools(plan))
        if (
            record is None
            or not record.seconds
            or not any(ReshardingEdgeAttributes.of(edge).staleness for edge in plan.graph.reshards())
        ):
            return plan
        placed = [
            (division, run.place.apply(run.plan, PlacementDecision(division), numbered=False))
            for division in run.divisions
        ]
        program = run.plan
        others = [division for division, other in placed if lead_of_pools(other)]
        if is_ahead:  # search all divisions if in some of them generations take turns with their updates
            program = without_staleness(program)
            others = [*run.divisions] if any(not fetched_edges(other) for _, other in placed) else []
        if not others:
            return plan
        rival = _Run(
            self, run.place, program, run.passes, others, RIVALS, RIVALS, 0.0, began=run.began, lists=run.lists
        ).best()
        assert rival.search is not None
        estimate = run.passes.after("place").apply(plan if is_ahead else rival).estimate
        stale = estimate.staleness if estimate is not None else None
        old = (stale.mean.value, stale.bound) if stale is not None else ()
        record = replace(record, rival=Rival(not is_ahead, rival.search.seconds, rival.search.best, *old))
        assert record.rival is not None
        note = f"{'' if is_ahead else 'not used: '}{compare_rival(record, record.rival)}"
        return replace(plan, search=record, notes=(*plan.notes, PlanNote("staleness", note)))

    def _has_choice(self, plan: Plan, place: PlaceNodes, division: Division) -> bool:
        """Return whether a division leaves more than one layout or engine to choose from.

        A choice of engines counts only if the checks accept at least one combination of engines.
        """
        open_owners = owners(plan, division)
        if any(has_open_layout(plan, owner) for owner in open_owners):
            return True
        choices = [
            dict(zip((owner.node for owner in open_owners), names, strict=True))
            for names in product(*([spec.name for spec in engines(plan, owner, self.engines)] for owner in open_owners))
        ]
        return len(choices) > 1 and any(
            not self.refuses(place.apply(plan, PlacementDecision(division, engines=choice))) for choice in choices
        )


@dataclass(order=True)
class _Item:
    """A combination in the search's queue, which is ordered by lower bounds.

    If bounds are equal, combinations closer to full evaluation come first. If two combinations are equally close, the
    one of the earlier division comes first, and within a division, the one with the earlier choices.
    """

    bound: float
    stage: int
    order: tuple[int, ...]
    space: Space = field(compare=False)
    position: tuple[int, ...] = field(compare=False)


@dataclass
class _Run:
    """One best-first search.

    A combination is evaluated in stages. Its lower bound never decreases from one stage to the next.
    """

    search: Search
    place: PlaceNodes
    plan: Plan
    passes: Passes
    divisions: Sequence[Division]
    effort: float = field(default_factory=lambda: EFFORT)
    simplest_effort: float = SIMPLEST
    runner_effort: float = FURTHER
    wide: bool = False  # whether layouts that span hosts are included
    began: float = field(default_factory=time.monotonic)
    spent: float = 0.0
    seen: set[tuple[int, ...]] = field(default_factory=set)
    evaluated: dict[tuple[int, tuple[int, ...]], FoundPlan | None] = field(default_factory=dict)
    placed: dict[tuple[int, tuple[int, ...]], RoughPlan] = field(default_factory=dict)
    lists: ChoiceLists = field(default_factory=dict)
    results: list[FoundPlan] = field(default_factory=list)
    rejected: list[FoundPlan] = field(default_factory=list)

    def best(self) -> Plan:
        """Return the simplest plan that is about as fast as the fastest.

        The second result is the record of the search.
        """
        heap: list[_Item] = []
        spaces: list[Space] = []
        builder = SpaceBuilder(self.plan, self.place, self.passes, self.wide, self.lists)
        skipped = 0
        for division in self.divisions:
            if spaces and self._over_budget():
                skipped += 1
                continue
            space = builder.build(division)
            spaces.append(space)
            if space.can_fit:
                self._push(heap, len(spaces), space, (0,) * len(space.lists))
                if not self.results and (start := space.start()):
                    self._evaluate(space, start)
        ended = f"the budget of {self.search.budget:g} s" if skipped else ""
        while heap and not ended and not (self.results and heap[0].bound >= self.results[0].seconds):
            ended = self._end_reason()
            if not ended:
                self._step(heap, heapq.heappop(heap))
        # Nothing is known of a division that was not searched.
        bound = 0.0 if skipped else heap[0].bound if heap else math.inf
        if ended and self.search.budget is None:
            self._dive(heap)
        candidates = sum(space.size for space in spaces)
        if not self.results and self.rejected and not ended and not self.wide:
            # Each choice fits alone but not with the others: layouts that span hosts hold less.
            return replace(
                self, wide=True, spent=0.0, seen=set(), evaluated={}, placed={}, lists={}, rejected=[]
            ).best()
        if not self.results:
            return self._plan_without_fit(spaces, candidates, ended)
        fastest = self.results[0]
        chosen, is_simplest = self._find_simplest(spaces)
        self._evaluate_more(heap)
        record = SearchRecord(
            candidates,
            len(self.evaluated),
            chosen.seconds,
            min(bound, fastest.seconds),
            not skipped and self._is_far_ahead(chosen, heap),
            ended,
            describe_candidate(chosen, chosen.plan),
            self._list_runners_up(heap, chosen),
            fastest=None if chosen is fastest else describe_candidate(fastest, chosen.plan),
            reason=describe_difference(self._measure(chosen), self._measure(fastest)),
            is_simplest=is_simplest,
        )
        decision = self._make_decision(chosen.space, chosen.position, describe_choice(record))
        return replace(self.place.apply(self.plan, decision), search=record)

    def _find_simplest(self, spaces: list[Space]) -> tuple[FoundPlan, bool]:
        """Return the simplest plan within `MARGIN` of the fastest.

        The second result is whether the search for it was complete.
        """
        most = self.spent + self.simplest_effort

        def spend(effort: float) -> bool:
            self.spent += effort
            return self.spent < most and not self._over_budget()

        limit = self.results[0].seconds * (1 + MARGIN)
        search = SimplestSearch(self.search.engines, spaces, limit, self._place_roughly, self._evaluate, spend)
        found, is_complete = search.find()
        if found is None:
            found = min((result for result in self.results if result.seconds <= limit), key=self._measure)
        return found, is_complete

    def _measure(self, found: FoundPlan) -> Simplicity:
        assert found.plan is not None
        return measure_plan(found.plan, found.space.owners, self.search.engines)

    def _is_far_ahead(self, chosen: FoundPlan, heap: list[_Item]) -> bool:
        """Return whether all other combinations are slower by more than `MARGIN`.

        They are compared with the chosen one.
        """
        limit = chosen.seconds * (1 + MARGIN)
        return not any(result.seconds <= limit for result in self.results if result is not chosen) and not any(
            item.bound <= limit and (item.stage == 2 or (id(item.space), item.position) not in self.evaluated)
            for item in heap
        )

    def _over_budget(self) -> bool:
        """Return whether the search must end because its budget of seconds is spent.

        If the search has found no plan by then, it continues up to its limit of work units (`effort`).
        """
        exceeded = self.search.budget is not None and time.monotonic() - self.began >= self.search.budget
        return exceeded and (bool(self.results) or self.spent >= self.effort)

    def _end_reason(self) -> str:
        """Return why the search must end before it is complete; "" if it may continue.

        If the caller states a budget of seconds, the budget replaces the limit of work units (`effort`).
        """
        if self.search.budget is not None:
            return f"the budget of {self.search.budget:g} s" if self._over_budget() else ""
        return "the search's limit" if self.spent >= self.effort else ""

    def _dive(self, heap: list[_Item]) -> None:
        """Evaluate a few combinations that may be the fastest.

        This is done after the limit of work units has ended the search.
        """
        for item in sorted(queued for queued in heap if queued.stage == 0)[:DIVES]:
            if not self.results or item.bound < self.results[0].seconds:
                self._evaluate(item.space, item.position)

    def _evaluate_more(self, heap: list[_Item]) -> None:
        """Evaluate further combinations, to find runners-up."""
        most = self.spent + self.runner_effort
        while heap and len(self.results) <= RUNNERS and self.spent < most and not self._over_budget():
            self._step(heap, heapq.heappop(heap))

    def _push(self, heap: list[_Item], number: int, space: Space, position: tuple[int, ...]) -> None:
        if (number, *position) not in self.seen and all(
            index < len(own) for index, own in zip(position, space.lists, strict=True)
        ):
            self.seen.add((number, *position))
            heapq.heappush(heap, _Item(space.bound_from(position), 2, (number, *position), space, position))

    def _step(self, heap: list[_Item], item: _Item) -> None:
        """Advance a combination by one stage.

        A queued combination passes three stages. First, the costs of its choices give a lower bound. Second, its nodes
        are placed, but its resharding is not planned; this gives a better bound. Third, all passes evaluate the
        combination.
        """
        space = item.space
        position = item.position
        if item.stage == 2:
            self.spent += 0.3
            for index in range(len(position)):
                self._push(heap, item.order[0], space, (*position[:index], position[index] + 1, *position[index + 1 :]))
            own = space.bound(position)
            if why := space.describe_overflow(position):
                self._refuse(own, space, position, why)
            else:
                heapq.heappush(heap, replace(item, bound=max(own, item.bound), stage=1))
        elif item.stage == 1:
            rough = self._place_roughly(space, position)
            if rough.overflow:
                self._refuse(item.bound, space, position, rough.overflow)
                return
            heapq.heappush(heap, replace(item, bound=max(item.bound, rough.bound), stage=0))
        else:
            self._evaluate(space, position)

    def _place_roughly(self, space: Space, position: tuple[int, ...]) -> RoughPlan:
        """Place the nodes of a combination, once, and count its memory without resharding."""
        key = (id(space), position)
        if key not in self.placed:
            self.placed[key] = self._place_anew(space, position)
        return self.placed[key]

    def _place_anew(self, space: Space, position: tuple[int, ...]) -> RoughPlan:
        self.spent += 3 + self.plan.cluster.devices * 0.01
        placed = self.place.apply(self.plan, self._make_decision(space, position))
        rough = replace(space.skeleton, placements=placed.placements, pools=placed.pools)
        rough = CountMemory(self.search.engines).apply(rough)
        if why := describe_overflow(rough.memory):
            return RoughPlan(rough, 0.0, why)
        time_of = EstimateTime(self.search.engines).of_node
        seconds = {
            ("RUN", node): math.fsum(figure.value for figure in time_of(rough, node))
            for owner in space.owners
            for node in owner.nodes
        }
        for edge in self.plan.graph.reshards():
            seconds |= least_seconds(rough, self.search.engines, edge)
        return RoughPlan(rough, space.least(seconds), "")

    def _evaluate(self, space: Space, position: tuple[int, ...]) -> FoundPlan | None:
        """Evaluate a combination with all passes, once; None if it cannot be used."""
        key = (id(space), position)
        if key not in self.evaluated:
            self.evaluated[key] = self._evaluate_anew(space, position)
        return self.evaluated[key]

    def _evaluate_anew(self, space: Space, position: tuple[int, ...]) -> FoundPlan | None:
        self.spent += 10 + self.plan.cluster.devices * 0.25
        plan = self.place.apply(self.plan, self._make_decision(space, position))
        if self.search.refuses(plan):
            return None
        plan = self.passes.after("place").apply(plan)
        assert plan.estimate is not None
        seconds = plan.estimate.iteration_seconds.value
        if why := describe_overflow(plan.memory):
            self._refuse(seconds, space, position, why)
            return None
        found = FoundPlan(seconds, space, position, plan)
        self.results.append(found)
        self.results.sort(key=lambda result: result.seconds)
        return found

    def _refuse(self, seconds: float, space: Space, position: tuple[int, ...], why: str) -> None:
        if len(self.rejected) < RUNNERS:
            self.rejected.append(FoundPlan(seconds, space, position, None, why))

    def _make_decision(self, space: Space, position: tuple[int, ...], why: str = "planned") -> PlacementDecision:
        chosen = list(zip(space.owners, space.chosen(position), strict=True))
        layouts = {owner.node: choice.layout for owner, choice in chosen if has_open_layout(self.plan, owner)}
        return PlacementDecision(space.division, layouts, {owner.node: choice.engine for owner, choice in chosen}, why)

    def _plan_without_fit(self, spaces: list[Space], candidates: int, ended: str) -> Plan:
        """Return a plan for a program of which no combination fits into memory.

        The plan has the first division and, for each owner, the choice with the lowest peak memory. The memory check
        then reports the overflow.
        """
        why = "planned: nothing that fits was found" if ended else "planned: no combination of devices and engines fits"
        space = spaces[0]
        position = tuple(
            min(enumerate(own), key=lambda choice: max(choice[1].peaks.values(), default=0))[0] for own in space.lists
        )
        best = describe_candidate(FoundPlan(0.0, space, position, None, ended or NOTHING_FITS), None)
        record = SearchRecord(
            candidates,
            len(self.evaluated),
            0.0,
            0.0,
            False,
            ended or NOTHING_FITS,
            best,
            self._list_runners_up([], None),
        )
        return replace(self.place.apply(self.plan, self._make_decision(space, position, why)), search=record)

    def _list_runners_up(self, heap: list[_Item], chosen: FoundPlan | None) -> tuple[Candidate, ...]:
        """Return the combinations to report besides the chosen and the fastest.

        The order of the result is: fully evaluated combinations, combinations of which only a bound is known, and the
        fastest combinations that do not fit.
        """
        runners = [result for result in self.results[1:] if result is not chosen][:RUNNERS]
        known = {(id(found.space), found.position) for found in (*self.results, *self.rejected)}
        waiting = [item for item in heap if item.stage < 2 and (id(item.space), item.position) not in known]
        bounded = heapq.nsmallest(RUNNERS - len(runners), waiting)
        runners = [*runners, *(FoundPlan(item.bound, item.space, item.position, None) for item in bounded)]
        rejected = sorted(self.rejected, key=lambda result: result.seconds)
        plan = chosen.plan if chosen is not None else None
        return tuple(describe_candidate(found, plan) for found in (*runners, *rejected))
