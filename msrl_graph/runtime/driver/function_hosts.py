"""The function hosts of a run, as its driver holds them.

Invariant: a host's calls are done in the order in which they were asked for, whoever does them. Ray keeps the order of
calls to one process, but not of those that it makes again after a death: a later task could wait in front of the
earlier one that it needs. So Ray makes none again. A process that died is replaced here, and what it had not answered
is asked for again, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Call:
    """A call of a function host; `reference` is to its result, another one after each time that it was made again."""

    host: int
    method: str
    arguments: tuple[Any, ...]
    reference: Any = None


class FunctionHosts:
    """One process for each host, each of which may die `restarts` times.

    `start(host, again)` starts the process of a host and gives its actor; `again`: it takes the place of one that
    died. `ended(references)` tells which of some references have a result, each with None, or with what Ray raised
    where the process died before it had one.
    """

    def __init__(
        self,
        hosts: int,
        restarts: int,
        start: Callable[[int, bool], Any],
        ended: Callable[[Sequence[Any]], dict[Any, Exception | None]] | None = None,
    ) -> None:
        self.start, self.ended = start, ended or _ended
        self.left = [restarts] * hosts
        self.open: list[list[Call]] = [[] for _ in range(hosts)]
        self.actors = [start(host, False) for host in range(hosts)]

    def ask(self, host: int, method: str, *arguments: Any) -> Call:
        """Asks for a call after all that were asked for before."""
        call = Call(host, method, arguments)
        self.open[host].append(call)
        self._send(call)
        return call

    def mend(self) -> list[int]:
        """Replaces whoever died; the hosts of those. Raises what Ray raised for a process that died once too often."""
        mended = []
        ended = self.ended([c.reference for calls in self.open for c in calls])
        for host, calls in enumerate(self.open):
            died = next((error for c in calls if (error := ended.get(c.reference)) is not None), None)
            calls[:] = [c for c in calls if c.reference not in ended or ended[c.reference] is not None]
            if died is None:
                continue
            if not self.left[host]:
                raise died
            self.left[host] -= 1
            self.actors[host] = self.start(host, True)
            for call in calls:
                self._send(call)
            mended.append(host)
        return mended

    def _send(self, call: Call) -> None:
        call.reference = getattr(self.actors[call.host], call.method).remote(*call.arguments)


def reference(item: Any) -> Any:
    """Of a call its reference, as it is now; of a reference itself."""
    return item.reference if isinstance(item, Call) else item


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
