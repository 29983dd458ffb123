"""The function hosts of a run, which the driver starts, calls and replaces.

Several iterations can be in progress at the same time. For each of these iterations, each host has one process. The
number of a process on its host is called the lane of the process. So the functions of an iteration are not delayed
while functions of the previous iteration wait for ranks. If a process dies, another process replaces it and has the
same lane.

Invariant: the calls in a lane run in the order of the requests, even if the lane's process is replaced. Ray keeps the
order of calls to one process, but not the order of calls that Ray retries after the process died. If a later call ran
before an earlier call, both would hang: the later call waits for the result of the earlier call, and the earlier call
waits for the process. So Ray retries no call. The driver replaces a process that died, and repeats the unanswered calls
of the process in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class ActorCall:
    """A method call that the driver has requested from a function host's process.

    `reference` is the Ray reference to the result. If the process died and the call is repeated, `reference` changes.
    """

    process: int
    method: str
    arguments: tuple[Any, ...]
    reference: Any = None


class FunctionHosts:
    """The processes of all function hosts; each can be replaced `restarts` times.

    A host has `lanes` processes; the number of a process on its host is its `lane`. `start(host, lane, again)` starts a
    process and returns its Ray actor. `again` means that the process replaces a process that died. `ended(references)`
    returns a dictionary whose keys are the references to ended calls. The value of a reference is Ray's error if the
    process died before the call ended, and None in all other cases.
    """

    def __init__(
        self,
        hosts: int,
        restarts: int,
        start: Callable[[int, int, bool], Any],
        ended: Callable[[Sequence[Any]], dict[Any, Exception | None]] | None = None,
        lanes: int = 1,
    ) -> None:
        self.start = start
        self.ended = ended or _find_ended
        self.lanes = lanes
        self.places = [(host, lane) for lane in range(lanes) for host in range(hosts)]
        self.restarts_left = [restarts for _ in self.places]
        self.open_calls: list[list[ActorCall]] = [[] for _ in self.places]
        self.actors = [start(host, lane, False) for host, lane in self.places]

    def ask(self, host: int, method: str, *arguments: Any, lane: int = 0) -> ActorCall:
        """Request a method call from a process, to run after the process's earlier calls.

        The process is number `lane` of the host (modulo the number of processes per host).
        """
        call = ActorCall(self.places.index((host, lane % self.lanes)), method, arguments)
        self.open_calls[call.process].append(call)
        self._send(call)
        return call

    def ask_all(self, method: str) -> list[ActorCall]:
        """Request a call of `method` from all processes.

        The calls of all hosts' first processes (lane 0) come first in the result.
        """
        return [self.ask(host, method, lane=lane) for host, lane in self.places]

    def replace_dead(self) -> list[str]:
        """Replace processes that died; return the names of these processes.

        The unanswered calls of a process are repeated in the new process. Raises Ray's error if a process died more
        than `restarts` times.
        """
        replaced = []
        outcomes = self.ended([call.reference for calls in self.open_calls for call in calls])
        for process, calls in enumerate(self.open_calls):
            died = next((error for call in calls if (error := outcomes.get(call.reference)) is not None), None)
            calls[:] = [
                call for call in calls if call.reference not in outcomes or outcomes[call.reference] is not None
            ]
            if died is None:
                continue
            if not self.restarts_left[process]:
                raise died
            self.restarts_left[process] -= 1
            self.actors[process] = self.start(*self.places[process], True)
            for call in calls:
                self._send(call)
            replaced.append(name(*self.places[process]))
        return replaced

    def _send(self, call: ActorCall) -> None:
        call.reference = getattr(self.actors[call.process], call.method).remote(*call.arguments)


def name(host: int, lane: int = 0) -> str:
    """Return a process's name for messages: its host, and its number on the host."""
    return f"functions of host {host}{f' lane {lane}' if lane else ''}"


def reference(item: Any) -> Any:
    """Return the current Ray reference of an ActorCall; return other items unchanged."""
    return item.reference if isinstance(item, ActorCall) else item


def _find_ended(references: Sequence[Any]) -> dict[Any, Exception | None]:
    import ray

    outcomes: dict[Any, Exception | None] = {}
    for reference in ray.wait(list(references), num_returns=len(references), timeout=0)[0] if references else ():
        outcomes[reference] = None
        try:
            ray.get(reference)
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            outcomes[reference] = error
        except ray.exceptions.RayError:
            pass  # an error in a call is raised where its result is awaited
    return outcomes
