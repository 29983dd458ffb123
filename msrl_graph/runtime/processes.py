"""The processes and temporary folders of a run, and how nothing of them is left.

Invariant: only what bears a run's mark, or is of its driver's session, is ended; only a folder that no live supervisor holds is removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

MARK = "MSRL_RUN"  # in the environment of every process of a run: its temporary folder
PREFIX = "msrl-run-"  # short: Ray's sockets lie in the folder, and their names are limited to 107 bytes
NEW = 60.0  # seconds in which a folder may not be locked yet by whoever made it
MOST = 10.0  # seconds that ending processes may take: one that waits for a dead disk cannot be ended


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def temporary() -> Iterator[Path]:
    """A temporary folder, held by a lock as long as it is in use: the lock goes with the process, however it ends."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def sweep() -> None:
    """Removes the temporary folders of runs of which every process was killed, and ends what may still be of them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = folder.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < NEW:
                continue
            handle = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end(str(folder))
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def end(folder: str, session: int = 0) -> None:
    """Kills every process of a run that still is: those of its driver's session (0: none), and those with the mark in their environment
    (Ray's processes change their titles, which may write over it)."""
    until = time.monotonic() + MOST
    while time.monotonic() < until:
        left = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                ours = (session and os.getsid(process.pid) == session) or process.environ().get(MARK) == folder
                if ours and process.pid != os.getpid() and alive(process.pid):
                    process.kill()
                    left.append(process)
        if not left:
            return
        psutil.wait_procs(left, timeout=2)
