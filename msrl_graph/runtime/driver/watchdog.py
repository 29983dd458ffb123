"""What the supervisor does beside waiting for a driver: it looks at it, and at the keeper.

Invariant: the supervisor does not wait for a process that does not move: it kills a driver and replaces a keeper.
"""

from __future__ import annotations

import codecs
import os
import select
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..process.heartbeat import DRIVER, HeartbeatWatch, Limits, ended
from ..process.processes import Temporary

LOOK = 0.2  # seconds between two reads of the lines that a run has written


@contextmanager
def watched(driver: int, kept: Temporary, limits: Limits, say: Callable[[str], None]) -> Iterator[None]:
    """Meanwhile a driver that does not move is killed, and a keeper that does not move or died is replaced."""
    over = threading.Event()
    # By its heart, and before it has one by its id.
    watch = HeartbeatWatch(kept.folder, limits, lambda: {DRIVER: driver})

    def look() -> None:
        while not over.wait(watch.often):
            with suppress(OSError):
                watch.look(watch.often)
            if told := kept.tend(watch.often, limits.stopped):
                say(told)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def wait(driver: subprocess.Popen[bytes], write: Callable[[str], object], look: Callable[[], None]) -> int:
    """Wait for a driver's end and return its status; meanwhile `write` what it prints, and `look` again and again."""
    if driver.stderr is not None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        poll = select.poll()
        with driver.stderr as stream:
            poll.register(stream, select.POLLIN)
            while True:
                if poll.poll(LOOK * 1000):
                    data = os.read(stream.fileno(), 65536)
                    write(decoder.decode(data, final=not data))
                    if not data:
                        break
                look()
    while True:
        with suppress(subprocess.TimeoutExpired):
            status = driver.wait(LOOK)
            look()
            return status
        look()


def why(driver: subprocess.Popen[bytes], kept: Temporary, status: int) -> str:
    """Why a driver has ended without a word."""
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return ended(kept.folder).get(driver.pid, ("", f"the driver {how}"))[1]


def deaf(driver: subprocess.Popen[bytes], again: bool, limits: Limits, say: Callable[[str], None]) -> None:
    """What a signal does where the driver is stopped, and hears none; `again`: it is not the first."""
    if again:
        driver.kill()
    else:
        what = f"the driver (process {driver.pid}) is stopped: in {limits.stopped:g} s it is killed"
        say(f"{what}, unless it goes on; ask once more to end at once")


@contextmanager
def pipe() -> Iterator[int]:
    """A pipe's end to be read from; the other one closes with this process."""
    here, there = os.pipe()
    try:
        yield here
    finally:
        os.close(here)
        os.close(there)
