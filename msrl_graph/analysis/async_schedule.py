"""Asynchronous schedule: which pools may run ahead of the updates, and how far.

The attributes `staleness` and `every` of resharding edges decide three things: which pools of devices may run ahead of
the updates, when such a pool begins an iteration, and with which version of the weights it generates. The words of this
module:

- A pool is ahead of the updates if it may begin an iteration before the updates begin that iteration. Every other pool
  is in step with the updates.
- A pool is pipelined if it is ahead although it has both nodes of a resharding edge with `staleness`. Such a pool
  generates for the next iteration, and then runs its other nodes for the current iteration. While the pool generates,
  functions and other pools compute the rows that the pool's other nodes read.
- An instruction stream is the list of instructions that a pool executes in one iteration. Its opening consists of the
  first instructions, which may be executed before the updates begin the same iteration.
- The functions' stream has the instructions of the processes that call Python functions.

Invariant: iteration j generates with the weights of iteration j - staleness or newer weights. So a pool begins
iteration j only when the updates have begun iteration j - staleness. Within an iteration, a pool that is ahead never
waits for a pool in step, nor for a pool that has not begun the iteration. So a pool that is ahead always ends the
iteration that it has begun. Work between two iterations, such as an evaluation, can therefore wait for this end.

A run and its simulation both use `PoolProgress`. The estimate of the iteration time uses the base class `Sends`.

A function that reads a state waits for the state's value from the previous iteration. So the opening of the functions'
stream ends before the first function that reads a state. A generation that needs the result of such a function cannot
run ahead.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, combinations, count, takewhile

from ..ir.attributes import GenerateAttributes, ReshardingEdgeAttributes
from ..ir.evaluation import Evaluation
from ..ir.instruction import Instruction, InstructionStream
from ..ir.plan import FUNCTIONS, Plan
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
    """Return by how many iterations each pool may run ahead of the updates.

    Pools in step with the updates are left out. A pipelined pool runs ahead by at most one iteration: its update and
    its generation are in the same pool, so no other pool waits for the weights. With `deterministic`, a pipelined pool
    runs ahead by its full `staleness`, since rows must then be generated with the oldest weights that are allowed.
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
    """Return, for each resharding edge into a pool that is ahead, its staleness bound.

    The keys are edges, as (src, dst). The bounds are in versions. An edge into a pool in step is left out, since such
    an edge always sends the newest weights, even if the program states `staleness` for the edge.
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
    """Return the largest age, in versions, of the rows that an update trains on.

    The age of a token is the number of versions between the weights that drew the token and the trainer's weights. The
    age of a row is the age of its oldest token. With partial rollout (`partial`), the generation of a row is
    interrupted at most `cuts` times. Each interruption can make the row one version older.
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
    """Return the staleness bound of each resharding edge between two pools.

    Only edges into a pool that is ahead are returned. The update is in another pool than the generation, so the
    generation fetches the weights over the edge. The keys are edges, as (src, dst), and the bounds are in versions.
    """
    pool_of = pools_of_nodes(plan)
    return {
        (src, dst): staleness
        for (src, dst), staleness in staleness_bounds(plan).items()
        if pool_of[src] != pool_of[dst]
    }


def pipelined_openings(plan: Plan) -> dict[str, frozenset[str]]:
    """Return, for each pipelined pool, the nodes that the pool runs in its opening.

    A pool that must be in step with the updates is not pipelined and is left out.
    """
    openings, _ = find_openings(plan)
    hindrances = reasons_in_step(plan) if openings else {}
    return {pool: nodes for pool, nodes in openings.items() if pool not in hindrances}


def late_states(plan: Plan) -> dict[str, int]:
    """Return, for states that affect how rows are drawn, the maximum age of the value.

    The sampling weights of the source, or the temperature of a generation, depends on such a state. The age of a
    state's value is in iterations. Its maximum is the largest number of iterations by which any pool may run ahead of
    the updates. If no pool may run ahead, the result is empty.
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

    The opening is the part of a stream that may be executed before the updates begin the iteration.

    - The opening of a pipelined pool's stream ends after the last node that the pool runs in its opening, and after the
      RELEASE and SWAP_IN instructions that follow this node directly.
    - The opening of the functions' stream has all instructions before the first function that reads a state. If no pool
      may run ahead, or if no function reads a state, the result is 0.
    - All other streams, and all streams of evaluations, have no opening, so the result is 0.
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
    """Return the `every` of each resharding edge that skips versions.

    Such an edge leads from one pool to another pool that is ahead, and sends only each `every`-th version. Weights that
    a generation fetched over the edge remain on the generation's devices until the next fetch. So an iteration may
    generate with the same weights as the previous iteration.
    """
    many = {(reshard.src, reshard.dst): ReshardingEdgeAttributes.of(reshard).every for reshard in plan.graph.reshards()}
    return {edge: many[edge] for edge in fetched_edges(plan) if many[edge] > 1}


def count_lanes(plan: Plan) -> int:
    """Return the largest number of iterations that are in progress at the same time."""
    return 1 + max(lead_of_pools(plan).values(), default=0)


class Sends:
    """The versions of weights that resharding edges send in a run.

    The run begins with the iteration `first`. The class also computes which iteration the updates must have begun
    before a pool begins an iteration. This order prevents the pool's weights from being too old.

    An edge sends these versions:

    - each `every`-th version,
    - the first version of the run,
    - each version for which a checkpoint is written, so that a resumed run draws the same rows,
    - each version that an evaluation uses, since this version replaces the generation's copy of the previously sent
      version.
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
        """Return whether an edge sends a version.

        Version n is the version with which the updates begin iteration n.
        """
        return version == self.first or any(version % many == 0 for many in self.multiples[edge])

    def newest(self, edge: Edge, now: int) -> int:
        """Return the newest version that an edge has sent up to iteration `now`.

        `now` is the iteration that the updates are in. A generation that begins in this iteration uses the returned
        version. The result is at most `now`, since version n exists for the edge only when the updates have begun
        iteration n.
        """
        return next(version for version in count(now, -1) if self.sends(edge, version))

    def update_iteration(self, pool: str, number: int) -> int:
        """Return which iteration the updates must begin before a pool begins `number`.

        `number` is the iteration that the pool is to begin. The result is the first iteration whose version of the
        weights is sent and is not too old for any generation of the pool. With `deterministic`, the version must also
        not be older than the last checkpoint up to iteration `number`. A run that is resumed in this iteration has no
        weights older than the checkpoint.
        """
        saved = max((number - number % interval for interval in self.saves), default=0) if self.run.deterministic else 0
        least = max(number - self.leads[pool], saved, self.first)
        of_edges = ((edge, max(number - self.staleness_of[edge], saved, self.first)) for edge in self.into[pool])
        return max(
            (next(version for version in count(old) if self.sends(edge, version)) for edge, old in of_edges),
            default=least,
        )

    def share(self, edge: Edge) -> float:
        """Return which fraction of all versions an edge sends, in the long run.

        An edge sends every version that is a multiple of `every`, of the interval of checkpoints or of the interval of
        evaluations. The fraction of these versions is computed by inclusion and exclusion.
        """
        many = self.multiples[edge]
        subsets = chain.from_iterable(combinations(many, size) for size in range(1, len(many) + 1))
        return sum((1 if len(subset) % 2 else -1) / math.lcm(*subset) for subset in subsets)


class PoolProgress(Sends, ABC):
    """The progress of pools that may run ahead of the updates.

    `begun` maps each pool to the last iteration that the pool has begun. A pool begins iteration j when two conditions
    hold: the pool has ended iteration j - 1, and the updates have begun an iteration whose weights are new enough for
    the pool. The generations of the pool use the newest version that was sent. With `deterministic`, the pool begins as
    soon as the updates have the oldest version that is allowed, and uses this version.
    """

    def __init__(self, plan: Plan, first: int = 0) -> None:
        super().__init__(plan, first)
        self.begun = dict.fromkeys(self.leads, first - 1)
        self.awaits = awaited_pools(plan, self.leads)
        self.last_version: dict[Edge, int] = {}  # the version that a generation used last

    @abstractmethod
    def busy(self, pool: str) -> bool:
        """Return whether a pool has begun work that it has not ended."""

    def due(
        self, now: int, iterations: int, foreseen: Callable[[int], bool], pools: Collection[str]
    ) -> Iterator[tuple[str, int]]:
        """Yield each pool that may begin an iteration, with the number of this iteration.

        - `now`: the iteration that the updates are in.
        - `iterations`: only iterations with a smaller number are yielded.
        - `foreseen`: returns whether the data with which an iteration begins is known. Only iterations for which it
          returns True are yielded.
        - `pools`: the pools to consider.

        The caller must begin each yielded iteration before it asks for the next one.
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
        """Return whether the updates must wait until one of `pools` begins an iteration.

        `now` is the iteration that the updates are in. The result is True only with `deterministic`, and only if a pool
        may begin an iteration with the weights of `now`. If the pool began its iteration later, the iteration would
        have newer weights. With `partial`, the pool needs the responses that its previous iteration interrupted. So
        with `partial`, the updates also wait until the pool has ended its previous iteration.
        """
        following = {pool: self.begun[pool] + 1 for pool in pools}
        return self.run.deterministic and any(
            number < self.run.iterations and self._may(pool, number, now) for pool, number in following.items()
        )

    def _may(self, pool: str, number: int, now: int) -> bool:
        """Return whether a pool can begin iteration `number`; the updates are in `now`.

        If the pool waits for rows of other pools, each of these other pools must have begun the iteration, or must
        itself be able to begin it.
        """
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
        """Record which version a generation uses; return whether to fetch this version.

        `edge` is the resharding edge that leads to the generation. If the edge skips versions, the version that the
        generation used last is still on the devices and is not fetched again.
        """
        stays = edge in self.sparse and self.last_version.get(edge) == version
        self.last_version[edge] = version
        return not stays


def evaluations_of_edge(plan: Plan, edge: Edge) -> list[Evaluation]:
    """Return the evaluations whose generation gets its weights over an edge."""
    takes = {stream.task for stream in plan.schedule if Instruction("RESHARD", *edge) in stream.instructions}
    return [evaluation for evaluation in plan.deploy.evaluations if evaluation.task in takes]


def awaited_pools(plan: Plan, pools_ahead: Mapping[str, int]) -> dict[str, set[str]]:
    """Return, for each pool that runs ahead, the other pools whose rows it waits for.

    The keys of `pools_ahead` are the pools that run ahead. Pools in step and rows of other iterations are not
    considered. If a pool waits for a second pool, and the second pool waits for a third pool, the first pool also waits
    for the third pool.
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
