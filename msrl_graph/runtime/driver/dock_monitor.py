"""What the driver hears of the docks of all hosts, and which hosts it has lost.

Invariant: a dock that is dead fails at once. A host that does not answer and cannot be reached is lost, long before Ray
says so: of a link that was cut it tells after a minute or more. One that can be reached is slow, or stopped for a
while: it is waited for.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..dock.messages import Status
from ..process.task_report import RunError
from . import wait_report

SILENT = 10.0  # seconds without an answer after which it is looked whether a host can be reached
LOOKS = 3  # answers that lack by then: this process may have stood still itself
REACH = 3.0  # seconds until a connection is given up
BEGIN = 40.0  # seconds that a process may take to begin, however fast others were


class HostLost(RunError):
    """A host cannot be reached any more."""


class DockMonitor:
    """`statuses` are the last that were heard, in the order of the hosts."""

    def __init__(self) -> None:
        self._heard: dict[int, Status] = {}
        self._asked: dict[int, tuple[Any, float, int]] = {}  # what was asked, since when, and looks in vain

    @property
    def statuses(self) -> list[Status]:
        return [self._heard[i] for i in sorted(self._heard)]

    def look(self, ray: Any, actors: Sequence[Any], patience: float, watched: bool = False) -> None:
        """Asks those that owe no answer, and waits for so many seconds. Raises Ray's error of a dock that is dead."""
        for i, actor in enumerate(actors):
            if i not in self._asked:
                self._asked[i] = (actor.status.remote(watched), time.monotonic(), 0)
        asked = [question for question, _, _ in self._asked.values()]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=patience)
        for i, (question, since, looks) in [*self._asked.items()]:
            if question in answered:
                del self._asked[i]
                self._heard[i] = ray.get(question)
            else:
                self._asked[i] = (question, since, looks + 1)

    def silent(self, seconds: float) -> list[int]:
        """The docks that owe an answer for longer than so many seconds, though they were looked at."""
        now = time.monotonic()
        return [i for i, (_, since, looks) in self._asked.items() if looks >= LOOKS and now - since > seconds]

    def lost(self, nodes: Sequence[str]) -> list[str]:
        """Of the hosts, by the ids that their nodes have in Ray, those that are silent and out of reach."""
        now = time.monotonic()
        silent = [i for i, (_, since, looks) in self._asked.items() if looks >= LOOKS and now - since > SILENT]
        return sorted(missing(nodes[i] for i in silent)) if silent else []


def results(ray: Any, asked: Sequence[Any], nodes: Sequence[str]) -> list[Any]:
    """What Ray was asked for, once all of it is there. Raises HostLost where one of these hosts, by the ids that their
    nodes have in Ray, is out of reach at two looks in a row: of what is to begin on a lost host Ray itself may never
    tell."""
    left = list(asked)
    out = set[str]()
    while left:
        done, left = ray.wait(left, num_returns=len(left), timeout=SILENT)
        ray.get(done)  # what went wrong, while others still work
        out = _lost(nodes, out) if left else out
    return list(ray.get(list(asked)))


def begun(ray: Any, asked: Mapping[str, Any], nodes: Sequence[str]) -> None:
    """Waits until all processes of these names have answered, or have died, of which the next call tells. Raises
    HostLost as `results` does, and where some take far longer than all others: of what was to begin while a host was
    out of reach and has come back, Ray may hear nothing more."""
    left = dict(asked)
    out = set[str]()
    start = time.monotonic()
    last = 0.0
    while left:
        done, _ = ray.wait([*left.values()], num_returns=len(left), timeout=SILENT)
        left = {name: reference for name, reference in left.items() if reference not in done}
        out = _lost(nodes, out) if left else out
        took = time.monotonic() - start
        last = took if done else last
        if last and left and took > max(BEGIN, 3 * last):
            raise HostLost(f"{' and '.join(left)} has not begun in {took:.0f} s; all others had in {last:.0f} s")


def _lost(nodes: Sequence[str], before: set[str]) -> set[str]:
    """The hosts that are out of reach; HostLost where one was so `before`."""
    out = missing(nodes) if nodes else set[str]()
    if lost := sorted(out & before):
        raise HostLost(wait_report.silent(lost))
    return out


def missing(nodes: Iterable[str]) -> set[str]:
    """The addresses of those hosts that Ray knows to be dead, or to which no connection can be made. They are known by
    the ids of their nodes: where Ray was started again, another node has the address."""
    import ray

    known = {node["NodeID"]: node for node in ray.nodes()}
    found = set[str]()
    for node in (known[node] for node in nodes):
        address = node["NodeManagerAddress"]
        try:
            if not node["Alive"]:
                raise OSError
            socket.create_connection((address, node["NodeManagerPort"]), timeout=REACH).close()
        except OSError:
            found.add(address)
    return found
