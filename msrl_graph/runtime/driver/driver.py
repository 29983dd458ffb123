"""The driver process of one attempt of a run.

Invariant: the supervisor always gets a result, even after an unexpected error. When the supervisor is gone, this
process and all processes that it started are killed (processes.py).
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from ...diagnostics import Fault
from ...diagnostics.surface import show_on
from ...diagnostics.text_page import WIDTH
from ..dock.messages import DockTimeout
from ..metrics.display import Display, Screen, Tail
from ..metrics.http_server import StatusServer
from ..process.heartbeat import DRIVER, Heart, Limits
from ..process.task_report import ProcessLost, RankFailed, RanksNotJoined, RunError
from ..weights import checkpoint
from . import wait_report
from .attempt_messages import Attempt, Result
from .cluster_probe import HostsSilent
from .device_reservation import NotEnoughHosts
from .dock_monitor import HostLost
from .driver_exit import exit_with_supervisor, leave, watch_ray_servers
from .iterations import Driver
from .process_pool import ProcessPool
from .signals import HANDLED, Signals
from .stalls import ProcessStuck


def main(folder: str) -> NoReturn:
    """Run the attempt that the supervisor described in `folder`/attempt.json."""
    attempt = msgspec.json.decode((Path(folder) / "attempt.json").read_bytes(), type=Attempt)
    with show_on(attempt.surface):
        _drive(attempt)


def _drive(attempt: Attempt) -> NoReturn:
    """Run the attempt, and end this process with its result."""
    folder = attempt.folder
    # Ray's own threads write to stderr: it goes to stdout, the driver's log. Text for a person goes to the old stderr.
    screen = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(1, 2)
    console = Screen(file=screen)
    console = console if console.is_terminal else Screen(file=screen, width=WIDTH)
    display = Display(attempt.plan, console, attempt.options.watch)
    display.facts.restarts["run"] = attempt.restarts
    watching = StatusServer(attempt.plan, display.facts, attempt.ports)
    signals = Signals(display.say)
    pool = ProcessPool(attempt, display.say)
    if attempt.parent >= 0:
        os.set_inheritable(attempt.lock, False)
        threading.Thread(target=exit_with_supervisor, args=(attempt,), daemon=True).start()
    Heart(folder, DRIVER, Limits.for_deadline(attempt.plan.docks.deadline), pool.ray_process_ids)
    finished = threading.Event()
    threading.Thread(target=watch_ray_servers, args=(attempt, pool, finished), daemon=True).start()
    tail = Tail(Path(attempt.out) / "logs", display.say) if attempt.options.verbose else None
    try:
        (Path(folder) / "ready").touch()
        result = _run_attempt(attempt, pool, display, signals)
    except KeyboardInterrupt:
        result = Result("interrupted", status=128 + signals.last)
    except Exception as error:
        traceback.print_exc(file=sys.stdout)  # which is the driver's log
        result = Result("failed", f"{type(error).__name__}: {error}; see logs/driver.log")
    if tail is not None:
        tail.close()
    display.close()
    watching.end(result.kind, result.message)
    finished.set()
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    if pool.attached:
        pool.close()
    for stream in (sys.stdout, sys.stderr, screen):
        with suppress(OSError):
            stream.flush()
    leave(attempt, result)


def _run_attempt(attempt: Attempt, pool: ProcessPool, display: Display, signals: Signals) -> Result:
    import ray

    driver = Driver(attempt, pool, display, signals)
    try:
        return driver.run()
    # RayError first: Ray wraps the Fault or RunError of a process in an error of both classes, with its own text.
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, Fault):
            return Result("fault", diagnostics=list(cause.diagnostics))
        # An engine that raised in a collective may have lost its partner; any other error is the reason itself.
        joint = isinstance(cause, RankFailed) and cause.joint
        if (
            isinstance(cause, RunError)
            and not isinstance(cause, DockTimeout | ProcessLost | RanksNotJoined)
            and not joint
        ):
            return Result("failed", str(cause))
        waits = driver.describe_waits(str(cause))
        if isinstance(cause, DockTimeout):
            return Result("failed" if driver.processes_in_user_code() else "died", f"{cause}{waits}")
        if isinstance(cause, ProcessLost):
            return Result("died", f"{cause}{waits}")
        # A rank notices a lost partner before Ray does, and long before if a whole host is lost.
        dead = pool.dead_processes(20.0 if joint or isinstance(cause, RuntimeError | RanksNotJoined) else 2.0)
        if dead or isinstance(error, ray.exceptions.RayActorError):
            gone = pool.unreachable_hosts()
            lost = f"; {wait_report.describe_lost_hosts(gone)}" if gone else ""
            return Result("died", f"{driver.describe_deaths(dead) if dead else 'a process of Ray died'}{lost}{waits}")
        if isinstance(cause, RanksNotJoined):
            return Result("died", str(cause))
        if joint:
            return Result("failed", str(cause))
        message = f"{type(cause).__name__}: {cause}" if cause is not None else str(error).strip().splitlines()[-1]
        return Result("failed", f"{message}{waits}")
    except HostsSilent as fault:
        message = fault.diagnostics[0].message
        return Result("died", message) if attempt.restarts else Result("fault", diagnostics=list(fault.diagnostics))
    except Fault as fault:
        hosts = fault.hosts if isinstance(fault, NotEnoughHosts) else 0
        return Result("fault", diagnostics=list(fault.diagnostics), hosts=hosts)
    except ProcessStuck as error:
        return Result("died", str(error))
    except HostLost as error:
        return Result("died", f"{error}{driver.describe_waits()}")
    except (RunError, OSError, checkpoint.CorruptCheckpoint) as error:
        # Descriptors are limited, and any connection to Ray's ports takes one.
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            return Result("died", f"the driver cannot open more files: {error}")
        return Result("failed", str(error))


if __name__ == "__main__":
    main(sys.argv[1])
