"""What the hosts' functions are asked for of each task that is under way.

Invariant: they do a task in the order of its stream, and no function that reads a state begins before the iteration
before has left its value. Where that is not known yet, they are asked for the opening of the task, and for the rest as
soon as the functions of the iteration before have ended: they wait for no update.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ...ir.async_schedule import waiting
from ...ir.plan import Plan
from ..process.task import Part, Tables, Task
from .function_hosts import ActorCall, FunctionHosts, reference
from .run_state import RunState


class FunctionTasks:
    def __init__(self, ray: Any, plan: Plan, hosts: FunctionHosts, carried: RunState) -> None:
        self.ray = ray
        self.hosts = hosts
        self.carried = carried
        self.numbers = range(plan.cluster.nodes)  # of the hosts
        self.reads_states = bool(waiting(plan))
        self.calls: dict[str, list[ActorCall]] = {}  # by key of a task
        self.openings: dict[int, Task] = {}  # by iteration, those of which the rest is to be asked for
        self.ended = set[Any]()  # references to calls that have, of iterations of training

    def begin(self, task: Task) -> None:
        """Asks for a task, or its opening."""
        part: Part = "opening" if task.trains and self.reads_states and not self.carried.knows(task.number) else "whole"
        self.calls[task.key] = []
        self._ask(task, part)
        if part == "opening":
            self.openings[task.number] = task

    def take(self, task: Task) -> list[ActorCall]:
        """The calls of a task whose turn has come: all of it has been asked for."""
        self.go_on()
        if task.number in self.openings and task.trains:
            raise RuntimeError(f"{task.key} is taken before all of it was asked for")
        return self.calls[task.key]

    def end(self, task: Task) -> None:
        """The task has ended."""
        self.ended -= {*map(reference, self.calls.pop(task.key))}

    def watched(self) -> list[Any]:
        """References to calls that the rest of a later iteration waits for."""
        before = self.calls[f"train/{min(self.openings) - 1}"] if self.openings else []
        return [x for x in map(reference, before) if x not in self.ended]

    def heard(self, ended: Collection[Any]) -> None:
        """These calls have ended, some perhaps of functions. Raises what went wrong in one."""
        self.ended |= {*ended} & {reference(call) for calls in self.calls.values() for call in calls}
        self.go_on()

    def go_on(self) -> None:
        """Asks for what can be begun now."""
        while self.openings:
            number = min(self.openings)
            if not self.carried.knows(number):
                before = [*map(reference, self.calls[f"train/{number - 1}"])]
                if not self.ended >= {*before}:
                    return
                self.carried.learn(number - 1, [self.ray.get(x) for x in before])
            self._ask(self.carried.task(number), "rest")
            del self.openings[number]

    def _ask(self, task: Task, part: Part) -> None:
        tables = self.carried.tables(task.number) if task.trains else Tables({}, {})
        asked = replace(task, part=part)
        for host in self.numbers:  # host 0 has the source
            of_rows = Tables({}, {}) if host else tables
            self.calls[task.key].append(self.hosts.ask(host, "run", asked, of_rows, lane=lane(task)))


def lane(task: Task) -> int:
    """The lane of the functions of a task: of an evaluation, that of the iteration before, which has ended."""
    return task.number if task.trains else task.number - 1
