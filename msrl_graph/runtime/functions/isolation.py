"""Environment instances in processes that are separate from the rank's process.

The processes run on the same host as the rank that uses the instances.

Invariant: if a process ends, hangs or uses up its memory, only the rows of its instances fail. The reason of such a
failure says what happened to the process. No process outlives the episodes of its rows.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import wait
from typing import Literal

from ...ir.graph import Expr
from ..process import row_progress
from .fork_client import PROCESS_GONE, Nest, death_reason, exits_within
from .fork_server import Serve, receive, send
from .instances import Ask, ClassSignature, EnvironmentReply, Failure, Instances
from .user_traceback import BadResult, ErrorSummary
from .values import InjectedArguments, import_user_file

MAX_PROCESSES = 64  # concurrent processes of a rank
PATIENCE = 5.0  # extra seconds for a process to report the timeouts of its instances


@dataclass(frozen=True)
class EnvironmentSpec:
    """The environment class that a fork server loads.

    - `folder`: the folder with the run's shipped files.
    - `path`, `name`: the user's file, and the name of the class in this file.
    - `call`: the expression that names the class in the program.

    The other fields are the fields of `ClassSignature`.
    """

    folder: str
    path: str
    name: str
    call: Expr
    filled: InjectedArguments
    columns: tuple[str, ...]
    timeout: float
    gym: Literal["", "sum", "each"]

    def load(self) -> Serve:
        make = getattr(import_user_file(self.path, self.call), self.name)
        return partial(_serve, ClassSignature(make, self.filled, self.columns, self.timeout, self.gym))


def _serve(called: ClassSignature, connection: socket.socket) -> None:
    instances = Instances(called, receive(connection))
    while requests := receive(connection):
        answers = instances.answers(requests, stops=False)
        try:
            send(connection, answers)
        except OSError:
            raise
        except Exception:
            send(connection, {position: _sendable(answer) for position, answer in answers.items()})
    instances.end()


def _sendable(answer: EnvironmentReply | Failure) -> EnvironmentReply | Failure:
    """Return `answer` if it can be pickled, or else a failure that says why not."""
    try:
        pickle.dumps(answer)
    except Exception as error:
        return Failure.from_error(BadResult(f"what `step` returned cannot leave its process: {error}"))
    return answer


class _Process:
    """A process with the environment instances of some rows.

    `memory` is the number of bytes that the process may use beyond what it uses after the import of the user's code.
    `why` is the reason why the process ended, or None.
    """

    def __init__(self, nest: Nest[EnvironmentSpec], memory: int, rows: Iterable[int]) -> None:
        self.nest = nest
        self.rows = {*rows}
        self.pid, self.line = nest.fork(memory)
        self.why: Failure | None = None
        self.line.settimeout(PATIENCE)
        with suppress(OSError):
            send(self.line, len(self.rows))

    def kill(self, why: Failure | None = None) -> None:
        """End the process and all processes that it has started, and store the reason.

        If `why` is None, the reason is derived from the exit status of the process.
        """
        alone = why is None and exits_within(self.pid, PATIENCE)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.line.close()
        status = self.nest.status(self.pid)
        self.why = why or (death_reason(status) if alone else PROCESS_GONE)


class IsolatedInstances:
    """Environment instances in several processes.

    `parts` has the positions of the rows for each process. `memory` is the number of bytes that a process may use
    beyond what it uses after the import of the user's code.
    """

    def __init__(self, nest: Nest[EnvironmentSpec], parts: Sequence[Iterable[int]], memory: int) -> None:
        self.timeout = nest.spec.timeout
        self.processes = [_Process(nest, memory, part) for part in parts]
        self.process_of = {position: process for process in self.processes for position in process.rows}

    def answers(
        self, requests: Mapping[int, Ask], stops: bool = False, where: str = ""
    ) -> dict[int, EnvironmentReply | Failure]:
        """Call the instances, and return the instances' replies.

        The keys of `requests` and of the result are the positions of the rows. If the process of a row has ended, the
        reply is the reason why the process ended. `stops` has no effect. `where` is the text that progress reports
        show.
        """
        parts: dict[_Process, dict[int, Ask]] = {}
        for position, request in requests.items():
            parts.setdefault(self.process_of[position], {})[position] = request
        replies: dict[int, EnvironmentReply | Failure] = {}
        waiting: dict[socket.socket, _Process] = {}
        for process, part in parts.items():
            if process.why is None:
                try:
                    send(process.line, part)
                    waiting[process.line] = process
                except OSError:
                    process.kill()
        deadline = time.monotonic() + self.timeout + PATIENCE
        while waiting:
            row_progress.report(len(replies), len(requests), where)
            seconds_left = deadline - time.monotonic()
            ready = wait([*waiting], None if seconds_left == math.inf else max(seconds_left, 0))
            if not ready and seconds_left <= 0:
                for process in waiting.values():
                    message = (
                        f"it took longer than its `timeout` of {self.timeout:g} s, and its process does not answer"
                    )
                    process.kill(Failure("timeout", ErrorSummary(f"TimeoutError: {message}")))
                break
            for process in [waiting.pop(line) for line in ready if isinstance(line, socket.socket)]:
                replies |= self._receive_replies(process)
        for process, part in parts.items():
            if process.why is not None:
                replies |= {position: process.why for position in part if position not in replies}
        return {position: replies[position] for position in requests}

    def _receive_replies(self, process: _Process) -> dict[int, EnvironmentReply | Failure]:
        """Receive the replies of a process whose connection is readable.

        Returns {} if the process has ended.
        """
        try:
            answers: dict[int, EnvironmentReply | Failure] = receive(process.line)
            return answers
        except (OSError, EOFError):
            process.kill()
        except Exception as error:  # an object of a class that only the user's file knows
            message = f"what `step` returned cannot leave its process: {type(error).__name__}: {error}"
            process.kill(Failure("rubbish", ErrorSummary(f"BadResult: {message}")))
        return {}

    def lose(self, positions: Iterable[int]) -> None:
        """Drop rows that need no more calls, and end each process that has no rows left."""
        for process in {self.process_of[position] for position in positions}:
            process.rows.difference_update(positions)
            if not process.rows and process.why is None:
                process.kill(PROCESS_GONE)

    def end(self) -> None:
        """End all processes."""
        living = [process for process in self.processes if process.why is None]
        for process in living:
            with suppress(OSError):
                send(process.line, None)
        deadline = time.monotonic() + PATIENCE
        for process in living:  # each closes its connection when it has released its instances
            wait([process.line], max(deadline - time.monotonic(), 0))
            process.kill(PROCESS_GONE)


def split_rows(rows: int, unit: int) -> list[range]:
    """Divide `rows` rows among processes, and return the range of each process.

    `unit` consecutive rows are always in the same process.
    """
    units = rows // unit
    processes = min(units, MAX_PROCESSES)
    cuts = [i * units // processes * unit for i in range(processes + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


__all__ = ["EnvironmentSpec", "IsolatedInstances", "split_rows"]
