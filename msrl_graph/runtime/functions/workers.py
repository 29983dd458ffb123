"""Worker processes that call a user's function for rows or groups in parallel.

Invariant: results are returned in the order of the units, and are equal to the results of a single process. A call that
ended its own process is not repeated. A call during which its process was killed once is repeated (crash_journal.py).
When the caller stops iterating over the results, no call remains in progress.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
import weakref
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

from ...algorithms.registry import take_amounts, tell
from ...analysis.concurrency import concurrent_calls
from ...ir.attributes import CallAttributes
from ...ir.graph import Node
from ...ir.plan import from_json
from ..dock.readers import NodeReads
from ..process.task import Task
from ..process.task_report import RunError
from .crash_journal import CrashJournal
from .fork_client import Nest
from .fork_server import Serve, receive, send
from .units import Unit, UnitFunction, UnitOutcome
from .values import signature_of

MESSAGE_SECONDS = 0.02  # seconds of work in one message, so that sending it costs little in comparison
MAX_UNITS = 256  # maximum number of units in one message
MAX_DEATHS = 5  # deaths of a worker in a row without an answer
Request = tuple[str, Task, list[Unit]]  # the node's name, the task, the units
# The outcomes, the metrics that the functions reported (registry.py), and the seconds that the calls took.
Reply = tuple[list[UnitOutcome], dict[str, float], float]


def uses_workers(node: Node) -> bool:
    """Return whether a node's function may be called by worker processes.

    If the result is false, the function host itself calls the function.
    """
    call = CallAttributes.of(node).functions[0]
    signature = signature_of(call, "function") if call.kind == "call" else None
    return concurrent_calls(node, 2, signature) == 2


@dataclass(frozen=True)
class WorkerSpec:
    """The functions that the fork server loads for the workers.

    Each worker has a crash journal (crash_journal.py) in a file whose name begins with `note`.
    """

    folder: str
    plan: str  # as JSON
    readers: Mapping[str, NodeReads]  # by node
    note: str

    def load(self) -> Serve:
        plan = from_json(self.plan)
        functions = {name: UnitFunction(plan.graph.node(name), plan, reader) for name, reader in self.readers.items()}
        for function in functions.values():
            _ = function.call
        return partial(_serve, functions, self.note)


def _serve(functions: Mapping[str, UnitFunction], note_path: str, line: socket.socket) -> None:
    number, again = receive(line)
    note = CrashJournal(Path(f"{note_path}{number}"), again)
    for function in functions.values():
        function.note = note
    while (request := receive(line)) is not None:
        name, task, units = request
        start = time.perf_counter()
        outcomes = [functions[name](unit, task) for unit in units]
        send(line, (outcomes, take_amounts(), time.perf_counter() - start))


@dataclass(eq=False)
class _Process:
    """A worker process and the request that it is answering."""

    number: int
    nest: Nest[WorkerSpec]
    request: Request | None = None
    positions: range = range(0)  # positions of the request's units among all units
    deaths: int = 0  # since its last reply
    pid: int = 0
    line: socket.socket = field(init=False)

    def submit(self, request: Request, positions: range) -> None:
        if not self.pid:
            self._start(again=False)
        self.request = request
        self.positions = positions
        self._send()

    def _send(self) -> None:
        with suppress(OSError):  # the process has died: `reply` notices
            send(self.line, self.request)

    def _start(self, again: bool) -> None:
        self.pid, self.line = self.nest.fork(0)
        with suppress(OSError):
            send(self.line, (self.number, again))

    def reply(self) -> Reply | None:
        """Return the reply of the worker; None if the worker has died.

        A worker that has died is replaced by a new worker, which gets the same request. Raises RunError if workers die
        too often.
        """
        with suppress(OSError, EOFError):
            reply: Reply = receive(self.line)
            self.request = None
            self.deaths = 0
            return reply
        self.deaths += 1
        if self.deaths > MAX_DEATHS:
            raise RunError(f"a function worker died {self.deaths} times before it finished a call; see its log")
        self.end()
        self._start(again=True)
        self._send()
        return None

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.line.close()
        self.nest.status(self.pid)
        self.pid = 0


class Workers:
    """A set of `count` worker processes.

    Each worker process starts with its first request, and ends when this process ends.
    """

    def __init__(self, count: int, spec: WorkerSpec) -> None:
        self.nest = Nest(spec)
        self.processes = [_Process(number, self.nest) for number in range(count)]
        self.seconds: dict[str, float] = {}  # of one unit, by node
        weakref.finalize(self, _close_lines, self.processes)

    def map_units(self, node: str, units: Iterable[Unit], task: Task) -> Generator[tuple[Unit, UnitOutcome]]:
        """Call a node's function for its units; yield each unit and its outcome in order."""
        all_units = [*units]
        key = Task(task.name, task.number, task.prompts)  # the parts of a task that a call depends on
        outcomes: dict[int, UnitOutcome] = {}
        submitted = 0
        yielded = 0
        try:
            while yielded < len(all_units):
                for process in self.processes:
                    if process.request is None and submitted < len(all_units):
                        size = self._message_size(node, len(all_units) - submitted)
                        positions = range(submitted, submitted + size)
                        process.submit((node, key, all_units[positions.start : positions.stop]), positions)
                        submitted = positions.stop
                self._collect(node, outcomes)
                while yielded in outcomes:
                    yield all_units[yielded], outcomes.pop(yielded)
                    yielded += 1
        finally:
            for process in self.processes:
                if process.request is not None:
                    process.end()
                    process.request = None

    def _message_size(self, node: str, remaining: int) -> int:
        """Return how many units to send to a worker in one message.

        `remaining` is the number of units that are not sent yet. The result is large enough to be worth the cost of a
        message, and small enough to leave units for other workers.
        """
        enough = min(MESSAGE_SECONDS / max(self.seconds.get(node, math.inf), 1e-9), MAX_UNITS)
        return max(1, min(int(enough), math.ceil(remaining / (2 * len(self.processes)))))

    def _collect(self, node: str, outcomes: dict[int, UnitOutcome]) -> None:
        """Wait until at least one worker replies, and add the replies to `outcomes`."""
        lines = {process.line: process for process in self.processes if process.request is not None}
        for line in wait([*lines]):
            assert isinstance(line, socket.socket)
            process = lines[line]
            if (reply := process.reply()) is not None:
                results, metrics, seconds = reply
                outcomes |= dict(zip(process.positions, results, strict=True))
                self.seconds[node] = seconds / len(results)
                for name, amount in metrics.items():
                    tell(name, amount)


def _close_lines(processes: list[_Process]) -> None:
    """Close the connections of the workers; the fork server then ends the workers."""
    for process in processes:
        if process.pid:
            process.line.close()
