"""The order of iterations in a simulation.

A pool is in step if it begins an iteration only when the previous iteration has ended completely. If staleness allows
it, a pool can be ahead: it begins an iteration before the updates have ended the previous iteration. Before an
evaluation or a checkpoint, the pools that are ahead finish their iterations. Evaluations and checkpoints themselves
take no time.

Invariant: `PoolProgress` (analysis/async_schedule.py) decides when each pool begins an iteration and with which version
of the weights. A run and a simulation use the same `PoolProgress`. This module only computes the times at which
iterations end.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..analysis.async_schedule import (
    PoolProgress,
    count_lanes,
    count_opening,
    evaluations_of_edge,
    fetched_edges,
    pipelined_openings,
)
from ..analysis.rowsets import find_refill
from ..cost import transfers as costs
from ..ir.instruction import Instruction, Walk, Walker
from ..ir.plan import FUNCTIONS, Plan
from .iteration import Turn
from .lanes import Lanes

Edge = tuple[str, str]  # of resharding, (src, dst)
IN_STEP = "in step"


@dataclass
class SimulatedPublication:
    """The versions of weights that are copied and fetched over one resharding edge.

    The pool of the update copies a version, and the pool of the generation fetches it.

    - `evaluations`: the intervals, in iterations, of the evaluations that use the weights of the edge. Each of these
      evaluations copies and fetches the weights before an iteration begins.
    - `copy_times`: the time at which the copy of each version was complete.
    - `fetch_times`: the time at which each fetch ended.
    - `ordered_fetches`: the number of fetches that the driver has requested from generations.
    """

    evaluations: list[int]
    copy_times: dict[int, float] = field(default_factory=dict)
    fetch_times: list[float] = field(default_factory=list)
    ordered_fetches: int = 0

    def is_copied(self, version: int) -> bool:
        """Return whether a version was already copied for an evaluation.

        All evaluations run before the first iteration, so version 0 is copied if there is any evaluation.
        """
        return any(not version or (interval and version % interval == 0) for interval in self.evaluations)


@dataclass
class _Job:
    """Instructions that pools execute in an iteration, and when the pools begin."""

    turn: Turn
    walk: Walk
    steps: Walker
    begin: float
    ends: bool = True  # whether it is these pools' last job of the iteration
    begun: bool = False


class SimulatedDriver(PoolProgress):
    """The driver of a simulation.

    - `pools`: the devices of each pool, as `Lanes`.
    - `opened`: a function from an iteration's number and the current time to a new `Turn` (an iteration in progress).
    - `steps`: a function from a `Turn` to the walker that runs the instructions of the iteration.
    """

    def __init__(
        self,
        plan: Plan,
        iterations: int,
        pools: dict[str, Lanes],
        opened: Callable[[int, float], Turn],
        steps: Callable[[Turn], Walker],
    ) -> None:
        super().__init__(plan)
        self.plan = plan
        self.iterations = iterations
        self.pools = pools
        self.open_turn = opened
        self.steps = steps
        training = [stream for stream in plan.schedule if stream.task == "train"]
        first = {stream.pool: count_opening(plan, stream) for stream in training}
        # `openings` is what a pipelined pool runs while the updates are in an earlier iteration, `streams` is the rest.
        self.openings = {stream.pool: stream.instructions[: first[stream.pool]] for stream in training}
        self.streams = {stream.pool: stream.instructions[first[stream.pool] :] for stream in training}
        self.pipelined = [*pipelined_openings(plan)]
        self.others = [pool for pool in self.leads if pool not in self.pipelined]
        self.lanes = count_lanes(plan)
        self.published = {
            edge: SimulatedPublication([evaluation.every for evaluation in evaluations_of_edge(plan, edge)])
            for edge in fetched_edges(plan)
        }
        self.turns: dict[int, Turn] = {}
        # By iteration: the time at which its functions had ended, so that the states of the algorithm were known.
        self.functions_ended_at = {-1: 0.0}
        self.jobs: dict[tuple[str, int], deque[_Job]] = defaultdict(deque)
        # By pool: the time at which the driver knows that the pool has ended all iterations that it began.
        self.ended_at = dict.fromkeys(self.others, 0.0)
        self.time = 0.0
        # The overhead of an iteration for the ranks. On a CPU cluster it includes functions, which use the same cores.
        functions = [
            node.name
            for node in plan.graph.nodes
            if plan.placement(node.name).pool == FUNCTIONS and node.verb != "source"
        ]
        self.overhead = costs.iteration_overhead(plan).value + costs.function_seconds_of_ranks(plan, functions).value
        self.refills = bool(find_refill(plan.graph)[0])
        self.refilling_pools = [
            pool for pool in self.others if any(instruction.op == "AGAIN" for instruction in self.streams.get(pool, ()))
        ]

    def busy(self, pool: str) -> bool:
        return pool in self.ended_at and self.ended_at[pool] > self.time

    def iteration(self, number: int, begin: float) -> tuple[Turn, float]:
        """Simulate iteration `number` until its updates have ended.

        Returns the iteration's record (`Turn`) and the time of its end. The updates begin at the time `begin`. While
        the updates run, other pools can begin later iterations if staleness allows it.
        """
        self.time = begin
        turn = self._get_turn(number)
        for pool, due in self.due(
            number, self.iterations, lambda later: self._prompts_known(later, number), self.pipelined
        ):
            self._begin_pool(pool, due, number)
        turn.fetches_before = {edge: publication.ordered_fetches for edge, publication in self.published.items()}
        self._queue_job((IN_STEP, 0), turn, [pool.name for pool in self.plan.pools if pool.name not in self.others])
        while True:
            for pool, due in self.due(
                number, self.iterations, lambda later: self._prompts_known(later, number), self.others
            ):
                self._begin_pool(pool, due, number)
            while any(self._advance_queue(queue) for queue in self.jobs.values() if queue):
                pass
            end = max(turn.ends.values()) + self.overhead if len(turn.ends) > len(self.plan.pools) else math.inf
            # A pool that ends with the iteration continues first, as in a run.
            coming = min((time for time in self.ended_at.values() if time > self.time), default=math.inf)
            if end < coming or coming == math.inf:
                if end == math.inf:
                    raise RuntimeError("two pools wait for each other")
                return self.turns.pop(number), end
            self.time = coming

    def next_begin(self, number: int, end: float) -> float:
        """Return when the next iteration may begin, if iteration `number` ended at `end`.

        Before a checkpoint or an evaluation, all pools must first end the iterations that they have begun.
        """
        waits = [self.run.save, *(evaluation.every for evaluation in self.plan.deploy.evaluations)]
        between = any(interval and (number + 1) % interval == 0 for interval in waits)
        return max(end, *self.ended_at.values()) if between and self.ended_at else end

    def _get_turn(self, number: int) -> Turn:
        if number not in self.turns:
            turn = self.turns[number] = self.open_turn(number, self.time)
            who = (FUNCTIONS, number % self.lanes)
            self._queue_job(who, turn, [FUNCTIONS], self.openings)
            self._queue_job(who, turn, [FUNCTIONS])
        return self.turns[number]

    def _queue_job(
        self,
        who: tuple[str, int],
        turn: Turn,
        pools: list[str],
        streams: Mapping[str, Sequence[Instruction]] | None = None,
    ) -> None:
        walk = Walk({pool: (self.streams if streams is None else streams).get(pool, ()) for pool in pools})
        self.jobs[who].append(_Job(turn, walk, self.steps(turn), self.time, ends=streams is None))

    def _begin_pool(self, pool: str, number: int, now: int) -> None:
        turn = self._get_turn(number)
        for edge in self.into[pool]:
            turn.version[edge] = version = self.newest(edge, now)
            if pool in self.pipelined:
                continue
            publication = self.published[edge]
            if self.use_version(edge, version) and not (edge in self.sparse and publication.is_copied(version)):
                turn.fetches.add(edge)
                publication.ordered_fetches += 1
        self.begun[pool] = number
        if pool in self.pipelined:
            self._queue_job((IN_STEP, 0), turn, [pool], self.openings)
            return
        self.ended_at[pool] = math.inf
        self._queue_job((pool, 0), turn, [pool])

    def _prompts_known(self, number: int, now: int) -> bool:
        """Return whether the first prompt of the iteration `number` is known.

        `now` is the iteration that the updates run. In a program with a refill, the number of prompts that an iteration
        draws is known only when the iteration has ended. So the iteration before `number` must have ended.
        """
        ended = (self.begun[pool] - self.busy(pool) for pool in self.refilling_pools)
        return not self.refills or number <= now or any(last >= number - 1 for last in ended)

    def _advance_queue(self, queue: deque[_Job]) -> bool:
        """Run the first job of a queue as far as possible.

        Returns True if an instruction of the job ran, or if the job ended.
        """
        job = queue[0]
        moved = False
        if not job.begun:
            # If there is an opening, functions after it read the states that the previous iteration set.
            late = job.ends and FUNCTIONS in job.walk.streams and self.openings[FUNCTIONS]
            if late and job.turn.number - 1 not in self.functions_ended_at:
                return False
            begin = max(job.begin, self.functions_ended_at[job.turn.number - 1]) if late else job.begin
            job.begun = True
            for pool in job.walk.streams:
                self._lanes(job.turn, pool).begin(begin)
        while any(job.walk.advance(pool, job.steps) for pool in job.walk.streams):
            moved = True
        if any(job.walk.step(pool) for pool in job.walk.streams):
            return moved
        queue.popleft()
        for pool in job.walk.streams if job.ends else ():
            job.turn.ends[pool] = self._lanes(job.turn, pool).last
            if pool == FUNCTIONS:
                self.functions_ended_at = {job.turn.number: job.turn.ends[pool]}
            if pool in self.ended_at and not queue:
                self.ended_at[pool] = job.turn.ends[pool] + self.overhead
        return True

    def _lanes(self, turn: Turn, pool: str) -> Lanes:
        return turn.hosts if pool == FUNCTIONS else self.pools[pool]
