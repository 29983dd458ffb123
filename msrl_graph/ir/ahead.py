"""Which pools may be ahead of the updates, when they begin an iteration, and with which weights: what `staleness` and
`every` allow.

Invariant: iteration j generates with weights of iteration j - staleness at the oldest, so that no pool begins an
iteration more than so many before its update does. A pool that is ahead waits within an iteration for none that is in
step, nor for one that has not begun it: what comes between two iterations, as an evaluation does, may wait for it. A
run and its simulation both go by `Leading`, and the estimate by the `Sends` that it is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, combinations, count

from .attributes import ReshardingEdge
from .instruction import Instruction
from .plan import FUNCTIONS, Evaluation, Plan
from .rowsets import looping

Edge = tuple[str, str]  # of resharding, (src, dst)


def leads(plan: Plan) -> dict[str, int]:
    """By pool, how many iterations it may begin before the updates do; only pools that may."""
    behind = _staleness(plan)
    if not any(behind.values()):
        return {}
    pool_of, held, found = _pools(plan), hindered(plan), dict[str, int]()
    for pool in (p.name for p in plan.pools if p.name not in held):
        into = [n for (_, dst), n in behind.items() if pool_of[dst] == pool]
        found[pool] = min(into, default=max(behind.values()))
    return found


def fetched(plan: Plan) -> dict[Edge, int]:
    """The resharding edges, as (src, dst), over which weights are fetched by a pool that may be ahead, and how many
    versions these may be behind; where others state `staleness`, the two pools meet all the same."""
    if not (ahead := leads(plan)):
        return {}
    pool_of = _pools(plan)
    return {edge: n for edge, n in _staleness(plan).items() if n and pool_of[edge[1]] in ahead}


def sparse(plan: Plan) -> dict[Edge, int]:
    """Of the edges over which weights are fetched those that send every so many-th version. What was fetched over one
    stays on the devices until it is fetched again: an iteration may generate with what the one before had."""
    many = {(e.src, e.dst): ReshardingEdge.of(e).every for e in plan.graph.reshards()}
    return {edge: many[edge] for edge in fetched(plan) if many[edge] > 1}


def lanes(plan: Plan) -> int:
    """How many iterations may be under way at once."""
    return 1 + max(leads(plan).values(), default=0)


class Sends:
    """Which versions of the weights are sent over the edges over which they are fetched, in a run that begins with
    `first`, and what an iteration waits for so that its weights are not too old.

    A version is sent if `every` says so; and the first of the run, one that a checkpoint is made of, so that a run that
    goes on from it draws the same, and one that an evaluation takes, since the copy of the one before is gone then."""

    def __init__(self, plan: Plan, first: int = 0) -> None:
        self.run, self.first, self.leads = plan.deploy.run, first, leads(plan)
        self.behind, self.sparse = fetched(plan), sparse(plan)
        # By edge, of which numbers the versions that are sent are multiples.
        self.multiples: dict[Edge, tuple[int, ...]] = dict.fromkeys(self.behind, (1,))
        for edge, many in self.sparse.items():
            between = (self.run.save, *(e.every for e in evaluations(plan, edge)))
            self.multiples[edge] = (many, *filter(None, between))
        pool_of = _pools(plan)
        self.into = {pool: [edge for edge in self.behind if pool_of[edge[1]] == pool] for pool in self.leads}

    def sends(self, edge: Edge, version: int) -> bool:
        """Whether a version with which the updates begin an iteration is sent."""
        return version == self.first or any(version % many == 0 for many in self.multiples[edge])

    def newest(self, edge: Edge, now: int) -> int:
        """The version that a generation takes while the updates are in the iteration `now`: the newest of those that
        are sent with which they have begun one."""
        return next(v for v in count(now, -1) if self.sends(edge, v))

    def after(self, pool: str, number: int) -> int:
        """The iteration that the updates have begun when a pool may begin one: the first with a version that is sent,
        and not too old for any of its generations. With `deterministic` none from before the last checkpoint that a run
        which is in this iteration would be gone on from."""
        saved = number - number % self.run.save if self.run.deterministic and self.run.save else 0
        least = max(number - self.leads[pool], saved, self.first)
        of_edges = ((edge, max(number - self.behind[edge], saved, self.first)) for edge in self.into[pool])
        return max((next(v for v in count(old) if self.sends(edge, v)) for edge, old in of_edges), default=least)

    def share(self, edge: Edge) -> float:
        """Which share of the versions is sent in the long run: multiples of any of some numbers, by inclusion and
        exclusion."""
        many = self.multiples[edge]
        some = chain.from_iterable(combinations(many, size) for size in range(1, len(many) + 1))
        return sum((1 if len(of) % 2 else -1) / math.lcm(*of) for of in some)


class Leading(Sends, ABC):
    """How far the pools are that may be ahead: the iteration that each has `begun` last.

    A pool begins iteration j when it has ended j - 1 and the updates have begun one with weights that are new enough;
    its generations take the newest that are sent. With `deterministic` it begins with the oldest that they may be."""

    def __init__(self, plan: Plan, first: int = 0) -> None:
        super().__init__(plan, first)
        self.begun = dict.fromkeys(self.leads, first - 1)
        self.awaits = awaits(plan, self.leads)
        self.taken: dict[Edge, int] = {}  # the version that a generation was told to take last

    @abstractmethod
    def busy(self, pool: str) -> bool:
        """Whether a pool has yet to end something that it has begun."""

    def due(self, now: int, iterations: int, foreseen: Callable[[int], bool]) -> Iterator[tuple[str, int]]:
        """Pools that may begin an iteration, and which, while the updates are in the iteration `now`: of those that can
        be `foreseen`. Each is to be begun before the next is asked for."""
        known = -1
        while sum(self.begun.values()) > known or known < 0:
            known = sum(self.begun.values())
            for pool in self.leads:
                number = self.begun[pool] + 1
                if number < iterations and foreseen(number) and self._may(pool, number, now):
                    yield pool, number

    def _may(self, pool: str, number: int, now: int) -> bool:
        """Whether a pool may begin an iteration, and so may those that it waits for, if they have not."""
        return all(
            self.begun[other] >= number or (self.begun[other] == number - 1 and self._free(other, number, now))
            for other in (pool, *self.awaits[pool])
        )

    def _free(self, pool: str, number: int, now: int) -> bool:
        # With `deterministic` as soon as its weights are there, which may be before it has ended the one before.
        return now >= self.after(pool, number) and (self.run.deterministic or not self.busy(pool) or number <= now)

    def takes(self, edge: Edge, version: int) -> bool:
        """Has a generation take a version; whether it is to fetch it, or has it."""
        stays, self.taken[edge] = edge in self.sparse and self.taken.get(edge) == version, version
        return not stays


def evaluations(plan: Plan, edge: Edge) -> list[Evaluation]:
    """The evaluations that take the weights of an edge."""
    takes = {s.task for s in plan.schedule if Instruction("RESHARD", *edge) in s.instructions}
    return [e for e in plan.deploy.evaluations if e.data in takes]


def awaits(plan: Plan, ahead: Mapping[str, int]) -> dict[str, set[str]]:
    """By pool that may be ahead the others of these whose rows it waits for within an iteration."""
    pool_of = _pools(plan)
    found: dict[str, set[str]] = {pool: set() for pool in ahead}
    for node, pool in pool_of.items():
        if pool in found:
            found[pool] |= {pool_of[n] for n in plan.graph.flow.before(node) if n in pool_of} & found.keys()
    for through in ahead:  # and those that these wait for
        for some in found.values():
            some |= found[through] if through in some else set()
    return {pool: some - {pool} for pool, some in found.items()}


def hindered(plan: Plan) -> dict[str, str]:
    """By pool that has to be in step with the updates, why, as the end of a sentence that begins with the pool."""
    found, pool_of = dict[str, str](), _pools(plan)
    for (_, dst), behind in _staleness(plan).items():
        if not behind:
            found[pool_of[dst]] = f"gives `{dst}` the newest weights"
    for node in plan.graph.verb("update"):
        if node.name in pool_of:
            found[pool_of[node.name]] = f"runs `{node.name}`"
    filter, rounds = looping(plan.graph)
    if filter and plan.deploy.run.deterministic:
        why = (
            f"begins when it is known how often `{filter}` asks, and `deterministic` lets nothing hang on when that is"
        )
        found = dict.fromkeys(pool_of.values(), why) | found
    known = -1
    while len(found) > known:
        known = len(found)
        for node_name in [n for n, pool in pool_of.items() if pool in found]:
            after = plan.graph.flow.after(node_name)
            late = dict.fromkeys(after, "which")
            if filter in after:  # who makes rounds of prompts waits for it: it may ask for another one
                late |= dict.fromkeys(rounds - after, f"as often as `{filter}` asks, which")
            for other in (n for n in pool_of if n in late):
                why = f"runs `{other}`, {late[other]} waits for rows of `{node_name}`, and that is in step"
                found.setdefault(pool_of[other], why)
    return found


def _pools(plan: Plan) -> dict[str, str]:
    """By node on devices its pool, as far as nodes are placed: the planner places some at a time."""
    return {p.node: p.pool for p in plan.placements if p.pool != FUNCTIONS}


def _staleness(plan: Plan) -> dict[Edge, int]:
    pool_of = _pools(plan)
    edges = [e for e in plan.graph.reshards() if e.src in pool_of and e.dst in pool_of]
    return {(e.src, e.dst): ReshardingEdge.of(e).staleness for e in edges}
