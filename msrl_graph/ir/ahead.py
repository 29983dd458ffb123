"""Which pools may be ahead of the updates: what `staleness` allows, and when they begin an iteration.

Invariant: iteration j generates with weights of iteration j - staleness at the oldest, so that no pool begins an
iteration more than so many before its update does. A pool that is ahead waits within an iteration for none that is in
step, nor for one that has not begun it: what comes between two iterations, as an evaluation does, may wait for it. A
run and its simulation both go by `Leading`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping

from .attributes import ReshardingEdge
from .options import Run
from .plan import FUNCTIONS, Plan
from .rowsets import looping


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


def fetched(plan: Plan) -> dict[tuple[str, str], int]:
    """The resharding edges, as (src, dst), over which weights are fetched by a pool that may be ahead, and how many
    versions these may be behind; where others state `staleness`, the two pools meet all the same."""
    if not (ahead := leads(plan)):
        return {}
    pool_of = _pools(plan)
    return {edge: n for edge, n in _staleness(plan).items() if n and pool_of[edge[1]] in ahead}


def lanes(plan: Plan) -> int:
    """How many iterations may be under way at once."""
    return 1 + max(leads(plan).values(), default=0)


class Leading(ABC):
    """How far the pools are that may be ahead: the iteration that each has `begun` last, of a run that begins with
    `first`.

    A pool begins iteration j when it has ended j - 1 and the updates have begun one of j - staleness or later; its
    generations take the weights with which the updates began the one that they are in. With `deterministic` they are
    the oldest that they may be, but of no version before the last checkpoint."""

    def __init__(self, plan: Plan, first: int = 0) -> None:
        self.run, self.first, self.leads = plan.deploy.run, first, leads(plan)
        self.begun = dict.fromkeys(self.leads, first - 1)
        self.awaits = awaits(plan, self.leads)

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
        if self.run.deterministic:
            # As soon as its weights are there, which may be before it has ended the one before.
            return now >= oldest(self.run, self.leads[pool], number, self.first)
        return number <= now + self.leads[pool] and (not self.busy(pool) or number <= now)


def oldest(run: Run, lead: int, number: int, first: int = 0) -> int:
    """The oldest version that an iteration may generate with; with `deterministic` none from before the last checkpoint
    that a run which is in this iteration, and begins with `first`, would be gone on from."""
    saved = number - number % run.save if run.deterministic and run.save else 0
    return max(number - lead, saved, first)


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


def _staleness(plan: Plan) -> dict[tuple[str, str], int]:
    pool_of = _pools(plan)
    edges = [e for e in plan.graph.reshards() if e.src in pool_of and e.dst in pool_of]
    return {(e.src, e.dst): ReshardingEdge.of(e).staleness for e in edges}
