"""How a driver ends: it leaves its result with the supervisor, once, and is gone."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import NoReturn

import msgspec

from .pool import Pool
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


def watch(attempt: Attempt, pool: Pool, over: threading.Event) -> None:
    """Ends this process when a server of Ray's is gone: Ray itself would take up to a minute, or hang."""
    while not over.wait(LOOK):
        if (gone := pool.look()) and not over.is_set():
            leave(attempt, Result("died", f"{' and '.join(gone)} died"))
