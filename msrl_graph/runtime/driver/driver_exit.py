"""How a driver ends: it leaves its result with the supervisor, once, and is gone."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import NoReturn

import msgspec

from ..process.processes import MOST, hand_over
from .process_pool import ProcessPool
from .stalls import DeathReports
from .supervisor import Attempt, Result

LOOK = 0.5  # seconds between two looks at the processes
_leaving = threading.Lock()


def leave(attempt: Attempt, result: Result) -> NoReturn:
    """Ends this process, without a farewell to Ray, which would take a second: the supervisor's keeper ends what is
    left of the run. Who comes first is heard."""
    _leaving.acquire()
    with suppress(OSError):  # a full disk
        os.pwrite(attempt.answer, msgspec.json.encode(result), 0)
    os._exit(0)


def with_parent(attempt: Attempt) -> None:
    """Ends this process, and all of its run, when the supervisor is gone. The keeper does so, too; but both may have
    been killed, and a driver that goes on alone would write beside the next one."""
    os.set_inheritable(attempt.parent, False)
    with suppress(OSError):
        os.read(attempt.parent, 1)
    _leaving.acquire()
    # Not from here: when Ray's servers are killed, Ray ends this process, in the middle of it.
    hand_over(attempt.folder, os.getsid(0))
    time.sleep(2 * MOST)
    os._exit(1)


def watch(attempt: Attempt, pool: ProcessPool, over: threading.Event) -> None:
    """Ends this process when a server of Ray's is gone: Ray itself would take up to a minute, or hang."""
    while not over.wait(LOOK):
        if (gone := pool.look()) and not over.is_set():
            fates = DeathReports(attempt.folder)
            fates.hear(())
            why = fates.of(gone)
            leave(attempt, Result("died", "; ".join(why.values()) or f"{' and '.join(gone)} died"))
