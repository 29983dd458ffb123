"""Asynchronous schedule: pools that run ahead of the updates, and their weights.

`staleness` and `every` decide which pools may be ahead, when they begin an iteration, and with which version.

Invariant: iteration j generates with weights of iteration j - staleness at the oldest, so no pool begins an iteration
more than `staleness` iterations before its update. Within an iteration, a pool that is ahead does not wait for a pool
in step, nor for one that has not begun the iteration. So work between two iterations, such as an evaluation, may wait
for it. A run and its simulation both use `PoolProgress`; the estimate uses its base class `Sends`.

A pool with both ends of an edge is ahead of itself (`pipelined`). It generates for the next iteration and then computes
the rest of the current one, whose rows have arrived meanwhile. The part that it begins early is its `opening`.

A state has one value per iteration: a function that reads it waits for the value of the previous iteration. So the part
that functions begin early ends before the first one that reads a state, and no generation that needs such a function is
ahead.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, combinations, count, takewhile

from .attributes import GenerateAttributes, ReshardingEdgeAttributes
from .evaluation import Evaluation
from .instruction import Instruction, InstructionStream
from .plan import FUNCTIONS, Plan
from .pools_in_step import (
    Edge,
    find_openings,
    functions_with_states,
    once_per_placement,
    pools_of_nodes,
    reasons_in_step,
    staleness_of_edges,
)
from .sequences import temperature_states


@once_per_placement
def lead_of_pools(plan: Plan) -> dict[str, int]:
    """Return how many iterations each pool ahead may begin before the updates.

    A pipelined pool begins at most the next iteration, since no pool waits for its weights. Only with `deterministic`,
    where rows are as old as allowed, it begins more.
    """
    staleness_of = staleness_of_edges(plan)
    if not any(staleness_of.values()):
        return {}
    pool_of = pools_of_nodes(plan)
    hindrances = reasons_in_step(plan)
    turns = find_openings(plan)[0]
    lead_of_pool = dict[str, int]()
    for pool in (placed_pool.name for placed_pool in plan.pools if placed_pool.name not in hindrances):
        into = [staleness for (_, dst), staleness in staleness_of.items() if staleness and pool_of[dst] == pool]
        lead_of_pool[pool] = min(into, default=max(staleness_of.values()))
        if pool in turns and not plan.deploy.run.deterministic:
            lead_of_pool[pool] = 1
    return lead_of_pool


def staleness_bounds(plan: Plan) -> dict[Edge, int]:
    """Return the staleness bound of each edge into a pool ahead, in versions.

    The edges are resharding edges, as (src, dst). Other edges always send the newest weights, even if they state
    `staleness`.
    """
    if not (lead_of_pool := lead_of_pools(plan)):
        return {}
    pool_of = pools_of_nodes(plan)
    turns = find_openings(plan)[0]
    bounds = dict[Edge, int]()
    for edge, staleness in staleness_of_edges(plan).items():
        if staleness and (pool := pool_of[edge[1]]) in lead_of_pool:
            bounds[edge] = lead_of_pool[pool] if pool in turns else staleness
    return bounds


def row_age_bound(plan: Plan) -> int:
    """Return the largest age that a row can have when it is trained on, in versions.

    The age of a token is the number of versions that the trainer's weights are newer than the weights that drew it. The
    age of a row is that of its oldest token. A row that is cut `cuts` times (`partial`) is that much older.
    """
    lags = staleness_bounds(plan)
    return max(
        (
            max((staleness for (_, dst), staleness in lags.items() if dst == node.name), default=0)
            + (GenerateAttributes.of(node).cuts if node.cuts else 0)
            for node in plan.graph.verb("generate")
        ),
        default=0,
    )


def fetched_edges(plan: Plan) -> dict[Edge, int]:
    """Return the edges of `aged` over which weights come from another pool."""
    pool_of = pools_of_nodes(plan)
    return {
        (src, dst): staleness
        for (src, dst), staleness in staleness_bounds(plan).items()
        if pool_of[src] != pool_of[dst]
    }


def pipelined_openings(plan: Plan) -> dict[str, frozenset[str]]:
    """Return the opening of each pool that generates ahead of its own updates."""
    openings, _ = find_openings(plan)
    hindrances = reasons_in_step(plan) if openings else {}
    return {pool: nodes for pool, nodes in openings.items() if pool not in hindrances}


def late_states(plan: Plan) -> dict[str, int]:
    """Return the states used for drawing rows, with their largest age in iterations.

    These are weights of the source and temperatures. The age is how early a pool may begin an iteration.
    """
    most = max(lead_of_pools(plan).values(), default=0)
    graph = plan.graph
    read = (
        state
        for node in graph.nodes
        for state in (node.states if node.verb == "source" else temperature_states(graph, node))
    )
    return dict.fromkeys(read, most) if most else {}


def count_opening(plan: Plan, stream: InstructionStream) -> int:
    """Return the number of instructions in the opening of a stream.

    It is 0 if there is no opening, as in a stream of an evaluation. If an iteration may begin early, the opening of the
    functions' stream has all instructions before the first function that reads a state.
    """
    if stream.pool == FUNCTIONS and stream.task == "train":
        late = functions_with_states(plan) if lead_of_pools(plan) else {}
        return next(
            (
                index
                for index, instruction in enumerate(stream.instructions)
                if instruction.op == "RUN" and instruction.node in late
            ),
            0,
        )
    nodes = pipelined_openings(plan).get(stream.pool, frozenset()) if stream.task == "train" else frozenset()
    ran = [
        index
        for index, instruction in enumerate(stream.instructions)
        if instruction.op == "RUN" and instruction.node in nodes
    ]
    rest = stream.instructions[ran[-1] + 1 :] if ran else ()
    return (
        (1 + ran[-1] + len([*takewhile(lambda instruction: instruction.op in ("RELEASE", "SWAP_IN"), rest)]))
        if ran
        else 0
    )


def skipping_edges(plan: Plan) -> dict[Edge, int]:
    """Return the edges of `fetched` that skip versions, with their `every`.

    Weights fetched over such an edge stay on the devices until the next fetch: an iteration may generate with the
    weights of the previous one.
    """
    many = {(reshard.src, reshard.dst): ReshardingEdgeAttributes.of(reshard).every for reshard in plan.graph.reshards()}
    return {edge: many[edge] for edge in fetched_edges(plan) if many[edge] > 1}


def count_lanes(plan: Plan) -> int:
    """Return how many iterations may be in progress at once."""
    return 1 + max(lead_of_pools(plan).values(), default=0)


class Sends:
    """The versions of weights that edges send in a run.

    The run begins with the iteration `first`. The class also knows which iteration the updates must have begun, so that
    the weights of a pool are not too old.

    A version is sent if `every` says so. Three other versions are sent, too: the first of the run; one of which a
    checkpoint is written, so that a resumed run draws the same rows; and one that an evaluation uses, since the copy of
    the previous version is then gone.
    """

    def __init__(self, plan: Plan, first: int = 0) -> None:
        self.run = plan.deploy.run
        self.first = first
        self.leads = lead_of_pools(plan)
        self.staleness_of = staleness_bounds(plan)
        self.sparse = skipping_edges(plan)
        self.saves = plan.deploy.saves
        # By edge: a version is sent if it is a multiple of one of these numbers.
        self.multiples: dict[Edge, tuple[int, ...]] = dict.fromkeys(self.staleness_of, (1,))
        for edge, many in self.sparse.items():
            between = (*self.saves, *(evaluation.every for evaluation in evaluations_of_edge(plan, edge)))
            self.multiples[edge] = (many, *filter(None, between))
        pool_of = pools_of_nodes(plan)
        self.into = {pool: [edge for edge in self.staleness_of if pool_of[edge[1]] == pool] for pool in self.leads}

    def sends(self, edge: Edge, version: int) -> bool:
        """Return whether a version with which the updates begin an iteration is sent."""
        return version == self.first or any(version % many == 0 for many in self.multiples[edge])

    def newest(self, edge: Edge, now: int) -> int:
        """Return the version that a generation uses while the updates are in `now`.

        It is the newest version that was sent, of those with which the updates have begun an iteration.
        """
        return next(version for version in count(now, -1) if self.sends(edge, version))

    def update_iteration(self, pool: str, number: int) -> int:
        """Return the iteration that updates must begin before a pool begins `number`.

        It is the first with a version that is sent and is not too old for any generation of the pool. With
        `deterministic`, no version from before the last checkpoint is used: a run that is resumed in this iteration
        would resume from that checkpoint.
        """
        saved = max((number - number % interval for interval in self.saves), default=0) if self.run.deterministic else 0
        least = max(number - self.leads[pool], saved, self.first)
        of_edges = ((edge, max(number - self.staleness_of[edge], saved, self.first)) for edge in self.into[pool])
        return max(
            (next(version for version in count(old) if self.sends(edge, version)) for edge, old in of_edges),
            default=least,
        )

    def share(self, edge: Edge) -> float:
        """Return the share of versions that is sent in the long run.

        These are the multiples of any of some numbers, counted by inclusion and exclusion.
        """
        many = self.multiples[edge]
        subsets = chain.from_iterable(combinations(many, size) for size in range(1, len(many) + 1))
        return sum((1 if len(subset) % 2 else -1) / math.lcm(*subset) for subset in subsets)


class PoolProgress(Sends, ABC):
    """The progress of pools that may be ahead.

    `begun` is the iteration that each has begun last. A pool begins iteration j when it has ended j - 1 and the updates
    have begun an iteration with weights that are new enough. Its generations use the newest version that is sent. With
    `deterministic` it begins with the oldest version that is allowed.
    """

    def __init__(self, plan: Plan, first: int = 0) -> None:
        super().__init__(plan, first)
        self.begun = dict.fromkeys(self.leads, first - 1)
        self.awaits = awaited_pools(plan, self.leads)
        self.last_version: dict[Edge, int] = {}  # the version that a generation used last

    @abstractmethod
    def busy(self, pool: str) -> bool:
        """Return whether a pool has begun something that it has not ended."""

    def due(
        self, now: int, iterations: int, foreseen: Callable[[int], bool], pools: Collection[str]
    ) -> Iterator[tuple[str, int]]:
        """Yield pools that may begin an iteration while the updates are in `now`.

        Only iterations that can be `foreseen` are yielded. The caller must begin each one before it asks for the next.
        """
        more = True
        while more:
            more = False
            for pool in pools:
                number = self.begun[pool] + 1
                if number < iterations and foreseen(number) and self._may(pool, number, now):
                    more = True
                    yield pool, number

    def must_begin(self, now: int, pools: Collection[str]) -> bool:
        """Return whether a pool must still begin an iteration with the weights of `now`.

        `now` is the iteration of the updates. With `deterministic` the updates wait for such a pool: if it began later,
        its iteration would have newer weights. With `partial` a pool cannot begin an iteration before it has ended the
        previous one.
        """
        following = {pool: self.begun[pool] + 1 for pool in pools}
        return self.run.deterministic and any(
            number < self.run.iterations and self._may(pool, number, now) for pool, number in following.items()
        )

    def _may(self, pool: str, number: int, now: int) -> bool:
        """Return whether a pool, and those that it waits for, may begin an iteration."""
        return all(
            self.begun[other] >= number or (self.begun[other] == number - 1 and self._free(other, number, now))
            for other in (pool, *self.awaits[pool])
        )

    def _free(self, pool: str, number: int, now: int) -> bool:
        # With `deterministic` it begins as soon as it has its weights, perhaps before it has ended the previous one.
        return now >= self.update_iteration(pool, number) and (
            self.run.deterministic or not self.busy(pool) or number <= now
        )

    def use_version(self, edge: Edge, version: int) -> bool:
        """Record that a generation uses a version; return whether it must fetch it."""
        stays = edge in self.sparse and self.last_version.get(edge) == version
        self.last_version[edge] = version
        return not stays


def evaluations_of_edge(plan: Plan, edge: Edge) -> list[Evaluation]:
    """Return the evaluations that use the weights of an edge."""
    takes = {stream.task for stream in plan.schedule if Instruction("RESHARD", *edge) in stream.instructions}
    return [evaluation for evaluation in plan.deploy.evaluations if evaluation.task in takes]


def awaited_pools(plan: Plan, pools_ahead: Mapping[str, int]) -> dict[str, set[str]]:
    """Return the pools whose rows each pool ahead waits for in an iteration.

    Only pools that may be ahead are considered.
    """
    pool_of = pools_of_nodes(plan)
    turns = find_openings(plan)[0]
    awaited: dict[str, set[str]] = {pool: set() for pool in pools_ahead}
    for node, pool in pool_of.items():
        if pool in awaited and node in turns.get(pool, (node,)):
            awaited[pool] |= {
                pool_of[before] for before in plan.graph.flow.before(node) if before in pool_of
            } & awaited.keys()
    for through in pools_ahead:  # add the pools that these wait for
        for others in awaited.values():
            others |= awaited[through] if through in others else set()
    return {pool: others - {pool} for pool, others in awaited.items()}
