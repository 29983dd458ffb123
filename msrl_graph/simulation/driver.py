"""The order of iterations in a simulation.

Pools in step begin an iteration when the one before has ended completely; pools that may be ahead begin it when a run's
driver would let them. Invariant: `PoolProgress` decides what begins when, and with which weights, here as in a run;
this module only computes when something ends. Before an evaluation and a checkpoint the pools that are ahead finish
their iteration; evaluations and checkpoints take no time.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..cost import transfers as costs
from ..ir.async_schedule import (
    PoolProgress,
    count_lanes,
    count_opening,
    evaluations_of_edge,
    fetched_edges,
    pipelined_openings,
)
from ..ir.instruction import Instruction, Walk, Walker
from ..ir.plan import FUNCTIONS, Plan
from ..ir.rowsets import find_refill
from .iteration import Turn
from .lanes import Lanes

Edge = tuple[str, str]  # of resharding, (src, dst)
IN_STEP = "in step"


@dataclass
class SimulatedPublication:
    """The weights of an edge over which generations fetch them.

    `copied` has the time of each version's copy, `fetched` the end of each fetch, `told` the number of fetches that
    were ordered. `evaluations` are the intervals, in iterations, of the evaluations that copy and fetch the weights
    before an iteration begins.
    """

    evaluations: list[int]
    copy_times: dict[int, float] = field(default_factory=dict)
    fetch_times: list[float] = field(default_factory=list)
    ordered_fetches: int = 0

    def is_copied(self, version: int) -> bool:
        """Return whether an evaluation has caused the copy of a version.

        There is one before the first iteration.
        """
        return any(not version or (interval and version % interval == 0) for interval in self.evaluations)


@dataclass
class _Job:
    """The work of some pools in an iteration, from a time on."""

    turn: Turn
    walk: Walk
    steps: Walker
    begin: float
    ends: bool = True  # whether it is these pools' last job of the iteration
    begun: bool = False


class SimulatedDriver(PoolProgress):
    """The driver of a simulation.

    `pools` are the lanes of each pool, `opened` opens an iteration at a time, `steps` returns its instructions.
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
        # What a pipelined pool runs while the updates are in an earlier iteration; and the rest of all instructions.
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
        self.functions_ended_at = {-1: 0.0}  # by iteration: when its functions had ended and its states were known
        self.jobs: dict[tuple[str, int], deque[_Job]] = defaultdict(deque)
        # By pool: when the driver knows that it has ended all that it began.
        self.ended_at = dict.fromkeys(self.others, 0.0)
        self.time = 0.0
        # The overhead of an iteration for the ranks: on a CPU cluster functions share their cores.
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
        """Simulate the updates of an iteration; return its turn and when all of it ended."""
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
        """Return when the iteration after one that has ended may begin."""
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
        """Return whether an iteration's first prompts are known.

        With a refill, the number of prompts that the iteration before took must be known.
        """
        ended = (self.begun[pool] - self.busy(pool) for pool in self.refilling_pools)
        return not self.refills or number <= now or any(last >= number - 1 for last in ended)

    def _advance_queue(self, queue: deque[_Job]) -> bool:
        """Advance the first job of a queue as far as possible; return whether it moved."""
        job = queue[0]
        moved = False
        if not job.begun:
            # Functions after the opening, if there is one, read the states that the iteration before left.
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
