"""Status of every host's dock, and detection of lost hosts.

Invariant: a query of a dead dock raises an error immediately. A host counts as lost if its dock does not answer and the
host does not accept a connection. Ray itself reports a cut link only after a minute or more; this check finds the lost
host much earlier. If a host accepts a connection but its dock does not answer, the driver continues to wait, because
the host may be slow, or stopped for a while.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..dock.messages import Status
from ..process.task_report import RunError
from . import wait_report

SILENT = 10.0  # seconds without an answer before a host's connection is tested
LOOKS = 3  # looks without an answer before that test, since this process itself may have been stopped
REACH = 3.0  # seconds until a connection attempt is given up
BEGIN = 40.0  # seconds that a process may always take to begin, however fast others were


class HostLost(RunError):
    """Error: a host cannot be reached any more."""


class DockMonitor:
    """Monitor of all docks; `statuses` has each dock's last status, in host order."""

    def __init__(self) -> None:
        self._heard: dict[int, Status] = {}
        self._asked: dict[int, tuple[Any, float, int]] = {}  # by dock: request, its time, and looks without an answer

    @property
    def statuses(self) -> list[Status]:
        return [self._heard[i] for i in sorted(self._heard)]

    def look(self, ray: Any, actors: Sequence[Any], patience: float, watched: bool = False) -> None:
        """Query the status of each dock, and wait up to `patience` seconds for answers.

        `actors` are the Ray actors of the docks. With `watched`, the docks also report the details that are shown to
        users who watch the run. A dock that has not answered the previous query is not queried again. Raises Ray's
        error if a dock is dead.
        """
        for i, actor in enumerate(actors):
            if i not in self._asked:
                self._asked[i] = (actor.status.remote(watched), time.monotonic(), 0)
        questions = [question for question, _, _ in self._asked.values()]
        answered, _ = ray.wait(questions, num_returns=len(questions), timeout=patience)
        for i, (question, since, looks) in [*self._asked.items()]:
            if question in answered:
                del self._asked[i]
                self._heard[i] = ray.get(question)
            else:
                self._asked[i] = (question, since, looks + 1)

    def silent_docks(self, seconds: float) -> list[int]:
        """Return the indices of docks that have not answered a query for over `seconds`.

        A dock is returned only if at least LOOKS calls of `look` have waited for the dock's answer.
        """
        now = time.monotonic()
        return [i for i, (_, since, looks) in self._asked.items() if looks >= LOOKS and now - since > seconds]

    def lost_hosts(self, nodes: Sequence[str]) -> list[str]:
        """Return the addresses of hosts whose docks are silent and that cannot be reached.

        `nodes` are the Ray node ids of the docks' hosts, in the order of the docks.
        """
        now = time.monotonic()
        silent = [i for i, (_, since, looks) in self._asked.items() if looks >= LOOKS and now - since > SILENT]
        return sorted(unreachable_hosts(nodes[i] for i in silent)) if silent else []


def wait_for_results(ray: Any, references: Sequence[Any], nodes: Sequence[str]) -> list[Any]:
    """Wait for all Ray references and return their results.

    Raises HostLost if a host cannot be reached in two successive checks. Without these checks, the wait might never
    end, because Ray sometimes does not report that a process cannot begin on a lost host. `nodes` are the hosts' node
    ids in Ray.
    """
    pending = list(references)
    unreachable = set[str]()
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=SILENT)
        ray.get(done)  # raises errors while others still work
        unreachable = _find_unreachable(nodes, unreachable) if pending else unreachable
    return list(ray.get(list(references)))


def wait_until_begun(ray: Any, references: Mapping[str, Any], nodes: Sequence[str]) -> None:
    """Wait until each process has answered or died.

    `references` has, by the name of each process, the Ray reference to a pending call of this process. If a process has
    died, the next call of the process raises Ray's error. `nodes` are the hosts' node ids in Ray.

    Raises HostLost in two cases: a host cannot be reached in two successive checks, or some processes take far longer
    to answer than all others. Without these checks, the wait might never end, because Ray sometimes does not report
    that a process cannot begin on a lost host.
    """
    pending = dict(references)
    unreachable = set[str]()
    start = time.monotonic()
    last = 0.0
    while pending:
        done, _ = ray.wait([*pending.values()], num_returns=len(pending), timeout=SILENT)
        pending = {name: reference for name, reference in pending.items() if reference not in done}
        unreachable = _find_unreachable(nodes, unreachable) if pending else unreachable
        elapsed = time.monotonic() - start
        last = elapsed if done else last
        if last and pending and elapsed > max(BEGIN, 3 * last):
            raise HostLost(f"{' and '.join(pending)} has not begun in {elapsed:.0f} s; all others had in {last:.0f} s")


def _find_unreachable(nodes: Sequence[str], before: set[str]) -> set[str]:
    """Return the addresses of hosts that cannot be reached.

    Raises HostLost if a host that cannot be reached is also in `before`, the result of the previous check.
    """
    unreachable = unreachable_hosts(nodes) if nodes else set[str]()
    if lost := sorted(unreachable & before):
        raise HostLost(wait_report.describe_lost_hosts(lost))
    return unreachable


def unreachable_hosts(nodes: Iterable[str]) -> set[str]:
    """Return the addresses of hosts that Ray reports as dead or that are unreachable.

    `nodes` are Ray node ids, not addresses, because another node can have the same address after a restart of Ray.
    """
    import ray

    known = {node["NodeID"]: node for node in ray.nodes()}
    addresses = set[str]()
    for node in (known[node] for node in nodes):
        address = node["NodeManagerAddress"]
        try:
            if not node["Alive"]:
                raise OSError
            socket.create_connection((address, node["NodeManagerPort"]), timeout=REACH).close()
        except OSError:
            addresses.add(address)
    return addresses
