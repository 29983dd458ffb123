"""Stalls of a run: how long they last, why, and which processes were killed.

A wait for rows stalls while no row moves between processes. A wait for a disk stalls while no byte is read or written.

Invariant: where moved rows or bytes can be counted, a wait is never limited by its total time, but only by the time
since the last row or byte has moved.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

from ...ir.graph import Node
from ...ir.plan import FUNCTIONS, Plan
from ..dock.messages import Status
from ..process import heartbeat
from ..process.task_report import RunError

LOADING = 3600.0  # seconds for loading functions and data, whose progress cannot be counted


class ProcessStuck(RunError):
    """Error: work outside the user's code does not end. The attempt can be retried."""


class StallClock:
    """Clock that measures the time since the last row (or, with `disk`, byte) moved."""

    def __init__(self, disk: bool) -> None:
        self.disk = disk
        self.since = time.monotonic()
        self._rows = -1
        self._bytes = -1
        self._bytes_time = self.since

    def note_progress(self) -> None:
        """Record progress: a call has ended, or a process was replaced."""
        self.since = time.monotonic()

    def hear(self, statuses: Sequence[Status]) -> None:
        """Update the clock from the counts of rows and bytes in the docks' statuses."""
        now = time.monotonic()
        rows = sum(status.moves for status in statuses)
        if rows != self._rows:
            self._rows = rows
            self.since = now
        if self.disk:
            moved = sum(status.bytes for status in statuses)
            if moved - self._bytes > heartbeat.RATE * (now - self._bytes_time):
                self.since = now
            self._bytes = moved
            self._bytes_time = now

    def seconds(self, since: float = 0.0) -> float:
        """Return the seconds since the later of two times: the last progress and `since`.

        `since` is a time of the monotonic clock.
        """
        return time.monotonic() - max(self.since, since)


class DeathReports:
    """Reasons why processes of a run were killed; each reason is reported once.

    `folder` is the temporary folder of the attempt on the driver's host.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._heard: dict[tuple[int, int], tuple[str, str]] = {}  # by host (-1: the driver's) and process id
        self._reported: set[tuple[str, str]] = set()

    def hear(self, statuses: Sequence[Status]) -> None:
        """Record deaths that the docks report, and deaths recorded on the driver's host."""
        for host, ended in enumerate(
            [heartbeat.killed_processes(self.folder) if self.folder else {}, *(status.ended for status in statuses)], -1
        ):
            self._heard |= {(host, pid): fate for pid, fate in ended.items()}

    def take_reasons(self, names: Iterable[str]) -> dict[str, str]:
        """Return, by process name, the reasons why the processes in `names` were killed.

        A process is killed if it does not respond. A reason that an earlier call has returned is left out.
        """
        reasons: dict[str, str] = {}
        for (_, pid), (name, reason) in self._heard.items():
            if name in names and (str(pid), name) not in self._reported:
                reasons[name] = reason
        self._reported |= {(str(pid), name) for (_, pid), (name, _) in self._heard.items() if name in reasons}
        return reasons

    def take_reasons_by_prefix(self, *words: str) -> dict[str, str]:
        """Return, by name, why the processes whose names begin with a prefix were killed.

        `words` are the possible prefixes. A reason that an earlier call has returned is left out.
        """
        return self.take_reasons([name for name, _ in self._heard.values() if name.startswith(words)])


def processes_in_user_code(plan: Plan, statuses: Sequence[Status], busy: Collection[str]) -> list[str]:
    """Return the processes in `busy` that run the user's code.

    `busy` are processes that have not answered a call. `statuses` are the docks' statuses, which say what each process
    does. A function host that waits for rows is left out.
    """
    waiting = {wait.who for status in statuses for wait in status.waits}
    processes = []
    for status in statuses:
        for process, activity in status.doing.items():
            words = activity.activity.split(" in ")[0].split()
            node = next((candidate for candidate in plan.graph.nodes if words and candidate.name == words[-1]), None)
            if process not in busy or node is None or node.name == "source":
                continue
            if process.startswith("functions") and plan.placement(node.name).pool == FUNCTIONS:
                host = process.split()[3]
                if f"`{node.name}` (group {host})" not in waiting:
                    processes.append(process)
            elif _has_partner(node):
                processes.append(process)
    return processes


def _has_partner(node: Node) -> bool:
    """Return whether a node is a generation whose ranks call an environment or agent."""
    from ...ir.attributes import GenerateAttributes

    return node.verb == "generate" and GenerateAttributes.of(node).partner is not None
