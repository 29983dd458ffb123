"""Asynchronous pools, which run ahead of the updates as far as `staleness` allows.

A task is one iteration of training, or one evaluation. A pipelined pool computes both an update and the generation that
uses the update's weights. A task of a pipelined pool has two parts: the opening (the generation, which runs before the
previous iteration has ended) and the rest.

Invariant: a pool begins a task only when `PoolProgress` (analysis/async_schedule.py) reports that the pool may begin
this task. The pool then generates with the newest version of the weights that has been sent. The number of this version
is never greater than the number of the iteration that the updates currently compute. So no row exceeds its age bound,
even if a process is slow. If the updates send every version, and a generation is slower than the updates, the
generation is only one version behind the updates. With `deterministic`, the rows of an iteration depend only on the
program.

A pipelined pool executes requests in the order in which the driver makes the requests. So the driver first requests all
openings that the pool may begin, and then the rest of an iteration.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...analysis.async_schedule import PoolProgress, pipelined_openings
from ...ir.plan import Plan
from ..process.task import Part, Task, WeightFetch
from ..process.task_report import Report


class AsyncPools(PoolProgress):
    """Progress of the asynchronous pools, and their requested tasks.

    The argument `ranks` has the Ray actors of all ranks of the run, by rank number. `first` is the first iteration that
    the run computes.
    """

    def __init__(self, plan: Plan, ranks: Sequence[Any], first: int) -> None:
        super().__init__(plan, first)
        devices_per_node = plan.cluster.devices_per_node
        pool_devices = {
            pool.name: [pool.device(index, devices_per_node) for index in range(pool.devices)]
            for pool in plan.pools
            if pool.name in self.leads
        }
        self.ranks = {pool: [ranks[device] for device in devices] for pool, devices in pool_devices.items()}
        self.pipelined = [*pipelined_openings(plan)]
        self.others = [pool for pool in self.leads if pool not in self.pipelined]  # with devices of their own
        own_devices = {device for pool in self.others for device in pool_devices[pool]}
        self.in_step = [rank for device, rank in enumerate(ranks) if device not in own_devices]
        self.names = {
            (edge.src, edge.dst): edge.name for edge in plan.reshards if (edge.src, edge.dst) in self.staleness_of
        }
        # By pool and task, the edges whose weights the task fetches.
        self.edges = {
            (stream.pool, stream.task): [
                (instruction.node, instruction.other)
                for instruction in stream.instructions
                if (instruction.node, instruction.other) in self.staleness_of
            ]
            for stream in plan.schedule
            if stream.pool in self.leads
        }
        # By pool, then by reference to a report.
        self.running: dict[str, dict[Any, Task]] = {pool: {} for pool in self.leads}
        self.reports: dict[str, list[Any]] = {}  # by task key
        self.fetches: dict[str, WeightFetch] = {}  # by edge, the last requested fetch
        self.drawn: dict[tuple[str, int], int] = {}  # by edge and iteration, the version that draws its rows

    def busy(self, pool: str) -> bool:
        return bool(self.running[pool]) and pool not in self.pipelined

    def begin(self, pool: str, task: Task, now: int, measure: bool) -> None:
        """Request a task from the ranks of a pool, to start after the pool's current work.

        `now` is the iteration that the updates compute, or are about to begin. `measure` says whether the ranks measure
        memory.
        """
        for edge in self.edges[pool, task.name]:
            name = self.names[edge]
            version = self.newest(edge, now) if task.trains else now
            fetched = self.fetches[name].fetch_count if name in self.fetches else 0
            self.fetches[name] = WeightFetch(version, fetched + self.use_version(edge, version))
            if task.trains:
                self.drawn[name, task.number] = version
        request = replace(task, fetches=dict(self.fetches), part="opening" if pool in self.pipelined else "whole")
        references = [rank.run.remote(request, measure) for rank in self.ranks[pool]]
        if task.trains:
            self.begun[pool] = task.number
        self.running[pool] |= dict.fromkeys(references, task)
        self.reports.setdefault(task.key, []).extend(references)

    def task_for_ranks(self, task: Task) -> Task:
        """Return a copy of `task`, which the driver sends to the ranks in `in_step`.

        `in_step` has two kinds of ranks: those that compute in step with the updates, and the ranks of pipelined pools.
        For a rank of a pipelined pool, the copy requests the rest of the task (the part after the generation). In the
        copy, two fields are set for the resharding edges that have a `staleness`:

        - `sends`: the edges over which the updates send weights at the beginning of the task.
        - `fetches`: two numbers for each edge: how many fetches of weights the driver has requested so far, and the
          version of the weights with which the task's rows are sampled. If the driver has not requested a fetch for
          this task, the version is the newest sent version.
        """
        number = task.number
        self.drawn = {key: version for key, version in self.drawn.items() if key[1] >= number}
        sent_edges = [edge for edge in self.names if not task.trains or self.sends(edge, number)]
        fetches = {
            name: WeightFetch(
                self.drawn.get((name, number if task.trains else -1), self.newest(edge, number)),
                self.fetches[name].fetch_count,
            )
            for edge, name in self.names.items()
            if name in self.fetches
        }
        part: Part = "rest" if task.trains and self.pipelined else "whole"
        return replace(task, fetches=fetches, sends=tuple(self.names[edge] for edge in sent_edges), part=part)

    def pending_references(self) -> list[Any]:
        """Return Ray references to the requested tasks that `take_ended` has not removed."""
        return [reference for tasks in self.running.values() for reference in tasks]

    def take_ended(self, ray: Any, references: Collection[Any]) -> Iterator[tuple[Task, Report]]:
        """Remove ended tasks; yield (task, report of a rank) for each training task.

        `references` are the Ray references that have ended. Tasks of evaluations are removed too, but are not yielded.
        Raises the error of a task that failed.
        """
        for tasks in self.running.values():
            for reference in [candidate for candidate in tasks if candidate in references]:
                task = tasks.pop(reference)
                report = ray.get(reference)
                if task.trains:
                    yield task, report
