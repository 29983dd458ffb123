"""What stands still in a run: for how long, which processes were killed for it, and whose fault a wait is.

Invariant: nothing is decided by a fixed time where rows or bytes can be counted: a wait for rows lasts from when a row
last moved, one for a disk from when it last moved bytes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

from ...ir.graph import Node
from ...ir.plan import FUNCTIONS, Plan
from ..dock.messages import Status
from ..process import heartbeat
from ..process.task_report import RunError

LOADING = 3600.0  # seconds that functions and data may take to be loaded, which nobody can count


class ProcessStuck(RunError):
    """Work that does not end, in a process that is not the user's function: it may be tried again."""


class StallClock:
    """For how long nothing has moved; `disk`: where bytes count, too."""

    def __init__(self, disk: bool) -> None:
        self.disk = disk
        self.since = time.monotonic()
        self._rows = -1
        self._bytes = -1
        self._at = self.since

    def moved(self) -> None:
        """Something has ended, or was mended."""
        self.since = time.monotonic()

    def hear(self, statuses: Sequence[Status]) -> None:
        """Hears what the docks say."""
        now = time.monotonic()
        rows = sum(s.moves for s in statuses)
        if rows != self._rows:
            self._rows = rows
            self.since = now
        if self.disk:
            moved = sum(s.bytes for s in statuses)
            if moved - self._bytes > heartbeat.RATE * (now - self._at):
                self.since = now
            self._bytes = moved
            self._at = now

    def seconds(self, since: float = 0.0) -> float:
        """How long nothing has moved, at most since a moment."""
        return time.monotonic() - max(self.since, since)


class DeathReports:
    """Why processes of a run were killed, each told once; `folder` is the run's on the driver's host."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._heard: dict[tuple[int, int], tuple[str, str]] = {}  # by host (-1: the driver's) and process id
        self._told: set[tuple[str, str]] = set()

    def hear(self, statuses: Sequence[Status]) -> None:
        """Hears what the docks say, and what is known on this host."""
        for host, ended in enumerate(
            [heartbeat.ended(self.folder) if self.folder else {}, *(s.ended for s in statuses)], -1
        ):
            self._heard |= {(host, pid): fate for pid, fate in ended.items()}

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """Of these processes those that were killed since they did not move, and why; those of whom it was told
        before, left out."""
        found: dict[str, str] = {}
        for (_, pid), (name, why) in self._heard.items():
            if name in names and (str(pid), name) not in self._told:
                found[name] = why
        self._told |= {(str(pid), name) for (_, pid), (name, _) in self._heard.items() if name in found}
        return found

    def beginning(self, *words: str) -> dict[str, str]:
        """The same, of processes whose names begin so."""
        return self.of([name for name, _ in self._heard.values() if name.startswith(words)])


def of_the_user(plan: Plan, statuses: Sequence[Status], busy: Collection[str]) -> list[str]:
    """Of the processes that are `busy` with a call those that are in the user's code, and wait for nobody."""
    waiting = {wait.who for status in statuses for wait in status.waits}
    found = []
    for status in statuses:
        for process, doing in status.doing.items():
            words = doing.what.split(" in ")[0].split()
            node = next((n for n in plan.graph.nodes if words and n.name == words[-1]), None)
            if process not in busy or node is None or node.name == "source":
                continue
            if process.startswith("functions") and plan.placement(node.name).pool == FUNCTIONS:
                host = process.split()[3]
                if f"`{node.name}` (group {host})" not in waiting:
                    found.append(process)
            elif _partner(node):
                found.append(process)
    return found


def _partner(node: Node) -> bool:
    """Whether a rank that computes a node waits for the user's code."""
    from ...ir.attributes import GenerateAttributes

    return node.verb == "generate" and GenerateAttributes.of(node).partner is not None
