"""The end of a driver process, which first writes its result for the supervisor.

Invariant: a driver writes only one result, even if several of its threads want to end the process.
"""

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
    """Write the attempt's result and end this process; only the first result counts.

    The process does not disconnect from Ray, because disconnecting takes a second. The supervisor's keeper (its cleanup
    process, processes.py) ends the other processes of the run.
    """
    _leaving.acquire()
    with suppress(OSError):  # a full disk
        os.pwrite(attempt.answer, msgspec.json.encode(result), 0)
    os._exit(0)


def exit_with_supervisor(attempt: Attempt) -> None:
    """Wait until the supervisor is gone, then end this process and the run.

    When the supervisor is gone, its keeper (its cleanup process, processes.py) should end the run. But the keeper may
    have been killed together with the supervisor. A driver that continues alone would write into the same folder as the
    next driver.
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
    """End this process when one of Ray's servers is gone, unless `finished` is set.

    Ray itself would take up to a minute to notice the loss of the server, or would hang.
    """
    while not finished.wait(LOOK):
        if (gone := pool.look()) and not finished.is_set():
            fates = DeathReports(attempt.folder)
            fates.hear(())
            reasons = fates.take_reasons(gone)
            leave(attempt, Result("died", "; ".join(reasons.values()) or f"{' and '.join(gone)} died"))
