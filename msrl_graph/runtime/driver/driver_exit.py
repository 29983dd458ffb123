"""End of a driver: it leaves its result with the supervisor once, and exits."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import NoReturn

import msgspec

from ..process.processes import MOST, Sessions, hand_over
from .attempt_messages import Attempt, Result
from .process_pool import ProcessPool
from .stalls import DeathReports

LOOK = 0.5  # seconds between two looks at the processes
_leaving = threading.Lock()


def leave(attempt: Attempt, result: Result) -> NoReturn:
    """End this process with a result; the first result wins.

    It does not disconnect from Ray, which would take a second: the supervisor's keeper ends the rest of the run.
    """
    _leaving.acquire()
    with suppress(OSError):  # a full disk
        os.pwrite(attempt.answer, msgspec.json.encode(result), 0)
    os._exit(0)


def exit_with_supervisor(attempt: Attempt) -> None:
    """End this process and its run when the supervisor is gone.

    The keeper does so too. But both may have been killed, and a driver that continues alone would write next to its
    successor.
    """
    os.set_inheritable(attempt.parent, False)
    with suppress(OSError):
        os.read(attempt.parent, 1)
    _leaving.acquire()
    # Not killed from here: when Ray's servers are killed, Ray ends this process in the middle of it.
    hand_over(attempt.folder, Sessions(os.getsid(0), attempt.preload.session))
    time.sleep(2 * MOST)
    os._exit(1)


def watch_ray_servers(attempt: Attempt, pool: ProcessPool, finished: threading.Event) -> None:
    """End this process when one of Ray's servers is gone.

    Ray itself would take up to a minute, or hang.
    """
    while not finished.wait(LOOK):
        if (gone := pool.look()) and not finished.is_set():
            fates = DeathReports(attempt.folder)
            fates.hear(())
            reasons = fates.take_reasons(gone)
            leave(attempt, Result("died", "; ".join(reasons.values()) or f"{' and '.join(gone)} died"))
