"""The function hosts of a run, as its driver holds them.

Invariant: the calls of a host's lane are done in the order in which they were asked for, whoever does them. Ray keeps
the order of calls to one process, but not of those that it makes again after a death: a later task could wait in front
of the earlier one that it needs. So Ray makes none again. A process that died is replaced here, and what it had not
answered is asked for again, in the same order.

A host has a lane for each iteration that may be under way at once: the functions of one that is behind may wait for
ranks, and those of the next must not wait with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class ActorCall:
    """A call of a process; `reference` is to its result, another one after each time that it was made again."""

    process: int
    method: str
    arguments: tuple[Any, ...]
    reference: Any = None


class FunctionHosts:
    """A process for each lane of each host, each of which may die `restarts` times.

    `start(host, lane, again)` starts one and gives its actor; `again`: it takes the place of one that died.
    `ended(references)` tells which of some references have a result, each with None, or with what Ray raised where the
    process died before it had one.
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
        self.ended = ended or _ended
        self.lanes = lanes
        self.places = [(host, lane) for lane in range(lanes) for host in range(hosts)]
        self.left = [restarts for _ in self.places]
        self.open: list[list[ActorCall]] = [[] for _ in self.places]
        self.actors = [start(host, lane, False) for host, lane in self.places]

    def ask(self, host: int, method: str, *arguments: Any, lane: int = 0) -> ActorCall:
        """Asks for a call after all that its lane was asked for before."""
        call = ActorCall(self.places.index((host, lane % self.lanes)), method, arguments)
        self.open[call.process].append(call)
        self._send(call)
        return call

    def every(self, method: str) -> list[ActorCall]:
        """Asks all processes for a call, the first lane's first."""
        return [self.ask(host, method, lane=lane) for host, lane in self.places]

    def mend(self) -> list[str]:
        """Replaces whoever died; the names of those. Raises what Ray raised for a process that died once too often."""
        mended = []
        ended = self.ended([c.reference for calls in self.open for c in calls])
        for process, calls in enumerate(self.open):
            died = next((error for c in calls if (error := ended.get(c.reference)) is not None), None)
            calls[:] = [c for c in calls if c.reference not in ended or ended[c.reference] is not None]
            if died is None:
                continue
            if not self.left[process]:
                raise died
            self.left[process] -= 1
            self.actors[process] = self.start(*self.places[process], True)
            for call in calls:
                self._send(call)
            mended.append(name(*self.places[process]))
        return mended

    def _send(self, call: ActorCall) -> None:
        call.reference = getattr(self.actors[call.process], call.method).remote(*call.arguments)


def name(host: int, lane: int = 0) -> str:
    """What a person calls a process."""
    return f"functions of host {host}{f' lane {lane}' if lane else ''}"


def reference(item: Any) -> Any:
    """Of a call its reference, as it is now; of a reference itself."""
    return item.reference if isinstance(item, ActorCall) else item


def _ended(references: Sequence[Any]) -> dict[Any, Exception | None]:
    import ray

    found: dict[Any, Exception | None] = {}
    for reference in ray.wait(list(references), num_returns=len(references), timeout=0)[0] if references else ():
        found[reference] = None
        try:
            ray.get(reference)
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            found[reference] = error
        except ray.exceptions.RayError:
            pass  # what went wrong in a call, whoever waits for it hears
    return found
