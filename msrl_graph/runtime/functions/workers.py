"""Processes that call functions of the user's for single rows or groups, side by side.

Invariant: what is made of the units comes in their order, and is what one process would make of them. A call that
ended its process is not made again; one whose process was killed once is (note.py). Who stops asking leaves no call
under way.
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

from ...algorithms.registry import tell, told
from ...ir.at_once import at_once
from ...ir.attributes import Call
from ...ir.graph import Node
from ...ir.plan import from_json
from ..dock.readers import Reader
from ..process.report import RunError
from ..process.task import Task
from .forked import Nest
from .nest import Serve, receive, send
from .note import Note
from .units import Failed, Made, Unit, UnitFunction
from .values import signature_of

ENOUGH = 0.02  # seconds of work that are worth a message
MOST = 256  # units in one message
DEATHS = 5  # of a worker, one after another, that no call is to blame for
Calls = tuple[str, Task, list[Unit]]  # of a node
Answers = tuple[list[Made | Failed], dict[str, float], float]  # with what functions told (registry.py), and seconds


def shared(node: Node) -> bool:
    """Whether workers call what a node calls, if there are any."""
    call = Call.of(node).functions[0]
    signature = signature_of(call, "function") if call.kind == "call" else None
    return at_once(node, 2, signature) == 2


@dataclass(frozen=True)
class WorkerSpec:
    """What a nest is told of the workers of a process. Each has a note, whose name begins with `note`."""

    folder: str
    plan: str  # as JSON
    readers: Mapping[str, Reader]  # of the nodes that they call for
    note: str

    def load(self) -> Serve:
        plan = from_json(self.plan)
        functions = {n: UnitFunction(plan.graph.node(n), plan, r) for n, r in self.readers.items()}
        for function in functions.values():
            _ = function.call
        return partial(_serve, functions, self.note)


def _serve(functions: Mapping[str, UnitFunction], note: str, asking: socket.socket) -> None:
    number, again = receive(asking)
    kept = Note(Path(f"{note}{number}"), again)
    for function in functions.values():
        function.note = kept
    while (asked := receive(asking)) is not None:
        name, task, units = asked
        begun = time.perf_counter()
        answers = [functions[name](unit, task) for unit in units]
        send(asking, (answers, told(), time.perf_counter() - begun))


@dataclass(eq=False)
class _Process:
    """A worker, and what it is asked for."""

    number: int
    nest: Nest[WorkerSpec]
    asked: Calls | None = None
    places: range = range(0)  # of the units among all
    deaths: int = 0  # since it last answered
    pid: int = 0
    line: socket.socket = field(init=False)

    def ask(self, calls: Calls, places: range) -> None:
        if not self.pid:
            self._begin(again=False)
        self.asked, self.places = calls, places
        self._send()

    def _send(self) -> None:
        with suppress(OSError):  # it is gone: who listens hears it
            send(self.line, self.asked)

    def _begin(self, again: bool) -> None:
        self.pid, self.line = self.nest.fork(0)
        with suppress(OSError):
            send(self.line, (self.number, again))

    def answers(self) -> Answers | None:
        """None where it has died; it is replaced then, and asked again."""
        with suppress(OSError, EOFError):
            found: Answers = receive(self.line)
            self.asked, self.deaths = None, 0
            return found
        self.deaths += 1
        if self.deaths > DEATHS:
            raise RunError(
                f"a worker of functions died {self.deaths} times before it had made a call; its log says more"
            )
        self.end()
        self._begin(again=True)
        self._send()
        return None

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.line.close()
        self.nest.status(self.pid)
        self.pid = 0


class Workers:
    """So many processes; they begin as they are first asked, and end with this one."""

    def __init__(self, count: int, spec: WorkerSpec) -> None:
        self.nest = Nest(spec)
        self.processes = [_Process(number, self.nest) for number in range(count)]
        self.seconds: dict[str, float] = {}  # of a unit, by node
        weakref.finalize(self, _over, self.processes)

    def made(self, node: str, units: Iterable[Unit], task: Task) -> Generator[tuple[Unit, Made | Failed]]:
        """What they make of each unit of a node."""
        all_, known = [*units], Task(task.name, task.number, task.prompts)  # what a call depends on
        found: dict[int, Made | Failed] = {}
        begun = given = 0
        try:
            while given < len(all_):
                for process in self.processes:
                    if process.asked is None and begun < len(all_):
                        places = range(begun, begun := begun + self._size(node, len(all_) - begun))
                        process.ask((node, known, all_[places.start : places.stop]), places)
                self._hear(node, found)
                while given in found:
                    yield all_[given], found.pop(given)
                    given += 1
        finally:
            for process in self.processes:
                if process.asked is not None:
                    process.end()
                    process.asked = None

    def _size(self, node: str, left: int) -> int:
        """How many units to ask a process for, so that a message is worth it, and others have work too."""
        worth = min(ENOUGH / max(self.seconds.get(node, math.inf), 1e-9), MOST)
        return max(1, min(int(worth), math.ceil(left / (2 * len(self.processes)))))

    def _hear(self, node: str, found: dict[int, Made | Failed]) -> None:
        """Waits for answers."""
        lines = {process.line: process for process in self.processes if process.asked is not None}
        for line in wait([*lines]):
            assert isinstance(line, socket.socket)
            process = lines[line]
            if (heard := process.answers()) is not None:
                answers, figures, seconds = heard
                found |= dict(zip(process.places, answers, strict=True))
                self.seconds[node] = seconds / len(answers)
                for name, amount in figures.items():
                    tell(name, amount)


def _over(processes: list[_Process]) -> None:
    """Nobody asks them any more: their nest ends them."""
    for process in processes:
        if process.pid:
            process.line.close()
