"""Requests of the driver to the function hosts, for each task in progress.

A task is one iteration of training, or one evaluation. The opening of a task is the part of its instructions before the
first function that reads an algorithm state.

Invariant: the functions of a task run in the order of the task's instructions. A function that reads an algorithm state
begins only after the previous iteration has set the value of this state. If the value is not known yet, the driver
requests only the opening of the task. The driver requests the rest of the task as soon as the functions of the previous
iteration have ended. The driver does not wait for the updates of the previous iteration.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ...analysis.pools_in_step import functions_with_states
from ...ir.plan import Plan
from ..process.task import Part, Tables, Task
from .function_hosts import ActorCall, FunctionHosts, reference
from .run_state import RunState


class FunctionTasks:
    def __init__(self, ray: Any, plan: Plan, hosts: FunctionHosts, carried: RunState) -> None:
        self.ray = ray
        self.hosts = hosts
        self.carried = carried
        self.numbers = range(plan.cluster.nodes)  # host numbers
        self.reads_states = bool(functions_with_states(plan))
        self.calls: dict[str, list[ActorCall]] = {}  # by task key
        self.openings: dict[int, Task] = {}  # by iteration, tasks whose rest is still to be requested
        self.ended = set[Any]()  # references to ended calls of training iterations

    def begin(self, task: Task) -> None:
        """Request the function calls of a task.

        If the values of the algorithm states are not known yet, only the calls before the first function that reads an
        algorithm state are requested.
        """
        part: Part = "opening" if task.trains and self.reads_states and not self.carried.knows(task.number) else "whole"
        self.calls[task.key] = []
        self._ask(task, part)
        if part == "opening":
            self.openings[task.number] = task

    def calls_of(self, task: Task) -> list[ActorCall]:
        """Return all function calls of a task; the driver waits for these calls.

        Raises RuntimeError if the driver has not requested all calls of the task, because values of algorithm states
        are not known yet.
        """
        self.request_ready()
        if task.number in self.openings and task.trains:
            raise RuntimeError(f"{task.key} was taken before all of it was requested")
        return self.calls[task.key]

    def end(self, task: Task) -> None:
        """Forget the function calls of a task that has ended."""
        self.ended -= {*map(reference, self.calls.pop(task.key))}

    def awaited_references(self) -> list[Any]:
        """Return Ray references to the unfinished calls for which the next task waits.

        If only the first calls of a task were requested, the task waits for the functions of the previous iteration.
        The result contains the unfinished calls of these functions. The result is empty if no task waits.
        """
        before = self.calls[f"train/{min(self.openings) - 1}"] if self.openings else []
        return [call_reference for call_reference in map(reference, before) if call_reference not in self.ended]

    def record_ended(self, ended: Collection[Any]) -> None:
        """Record which function calls have ended; request the work that waited for them.

        `ended` are Ray references. References to calls that are not function calls are ignored. Raises the error of a
        call that failed.
        """
        self.ended |= {*ended} & {reference(call) for calls in self.calls.values() for call in calls}
        self.request_ready()

    def request_ready(self) -> None:
        """Request the remaining calls of each task whose algorithm states are all known."""
        while self.openings:
            number = min(self.openings)
            if not self.carried.knows(number):
                before = [*map(reference, self.calls[f"train/{number - 1}"])]
                if not self.ended >= {*before}:
                    return
                self.carried.learn(number - 1, [self.ray.get(call_reference) for call_reference in before])
            self._ask(self.carried.task(number), "rest")
            del self.openings[number]

    def _ask(self, task: Task, part: Part) -> None:
        tables = self.carried.tables(task.number) if task.trains else Tables({}, {})
        request = replace(task, part=part)
        for host in self.numbers:  # host 0 has the source
            host_tables = Tables({}, {}) if host else tables
            self.calls[task.key].append(self.hosts.ask(host, "run", request, host_tables, lane=lane(task)))


def lane(task: Task) -> int:
    """Return a task's lane, which selects the process of each host for the task.

    Lanes are explained in function_hosts.py. An evaluation uses the process of the last iteration before the
    evaluation, because that iteration has ended.
    """
    return task.number if task.trains else task.number - 1
