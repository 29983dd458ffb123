"""Pools that are ahead of the updates, where `staleness` lets them be.

Invariant: a pool begins what `Leading` says is due, with the newest weights that are sent of those that the updates
have begun with at that moment. So no row is older than it may be, whoever is slow, and where every version is sent, a
generation that is slower than the updates is behind by one only. With `deterministic` what an iteration generates
follows from the program. A pipelined pool does as it is asked, one after the other: all that is due of it is asked for
before the rest of an iteration is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...ir.async_schedule import PoolProgress, pipelined
from ...ir.plan import Plan
from ..process.task import Part, Task, WeightFetch
from ..process.task_report import Report


class AsyncPools(PoolProgress):
    """`ranks` are the actors of all ranks, by number; `first` the iteration that the run begins with."""

    def __init__(self, plan: Plan, ranks: Sequence[Any], first: int) -> None:
        super().__init__(plan, first)
        each = plan.cluster.devices_per_node
        found = {p.name: [p.device(r, each) for r in range(p.devices)] for p in plan.pools if p.name in self.leads}
        self.ranks = {pool: [ranks[device] for device in devices] for pool, devices in found.items()}
        self.pipelined = [*pipelined(plan)]
        self.others = [pool for pool in self.leads if pool not in self.pipelined]  # with devices of their own
        away = {device for pool in self.others for device in found[pool]}
        self.in_step = [rank for device, rank in enumerate(ranks) if device not in away]
        self.names = {(r.src, r.dst): r.name for r in plan.reshards if (r.src, r.dst) in self.behind}
        # By pool and task the edges whose weights it fetches.
        self.edges = {
            (s.pool, s.task): [(x.node, x.other) for x in s.instructions if (x.node, x.other) in self.behind]
            for s in plan.schedule
            if s.pool in self.leads
        }
        self.at_work: dict[str, dict[Any, Task]] = {pool: {} for pool in self.leads}  # by reference to a report
        self.reports: dict[str, list[Any]] = {}  # by key of the task
        self.fetches: dict[str, WeightFetch] = {}  # by edge, what was to be fetched last
        self.drawn: dict[tuple[str, int], int] = {}  # by edge and iteration, the version that its rows are drawn with

    def busy(self, pool: str) -> bool:
        return bool(self.at_work[pool]) and pool not in self.pipelined

    def begin(self, pool: str, task: Task, now: int, measure: bool) -> None:
        """Has a pool begin a task when it has ended what it is at, while the updates are in the iteration `now`, or
        about to begin it."""
        for edge in self.edges[pool, task.name]:
            name = self.names[edge]
            version = self.newest(edge, now) if task.trains else now
            before = self.fetches[name].told if name in self.fetches else 0
            self.fetches[name] = WeightFetch(version, before + self.takes(edge, version))
            if task.trains:
                self.drawn[name, task.number] = version
        told = replace(task, fetches=dict(self.fetches), part="opening" if pool in self.pipelined else "whole")
        asked = [rank.run.remote(told, measure) for rank in self.ranks[pool]]
        if task.trains:
            self.begun[pool] = task.number
        self.at_work[pool] |= dict.fromkeys(asked, task)
        self.reports.setdefault(task.key, []).extend(asked)

    def told(self, task: Task) -> Task:
        """A task as the pools in step begin it: what they send, how many fetches there were so far, and the version
        that its own rows are drawn with, which is the newest where that is yet to be fetched."""
        number = task.number
        self.drawn = {key: version for key, version in self.drawn.items() if key[1] >= number}
        sent = [edge for edge in self.names if not task.trains or self.sends(edge, number)]
        fetches = {
            name: WeightFetch(
                self.drawn.get((name, number if task.trains else -1), self.newest(edge, number)),
                self.fetches[name].told,
            )
            for edge, name in self.names.items()
            if name in self.fetches
        }
        part: Part = "rest" if task.trains and self.pipelined else "whole"
        return replace(task, fetches=fetches, sends=tuple(self.names[edge] for edge in sent), part=part)

    def under_way(self) -> list[Any]:
        """References to what is not known to have ended."""
        return [reference for asked in self.at_work.values() for reference in asked]

    def ended(self, ray: Any, references: Collection[Any]) -> Iterator[tuple[Task, Report]]:
        """These have: tasks of training, and what they tell. Raises what went wrong in one."""
        for asked in self.at_work.values():
            for reference in [r for r in asked if r in references]:
                task = asked.pop(reference)
                report = ray.get(reference)
                if task.trains:
                    yield task, report
