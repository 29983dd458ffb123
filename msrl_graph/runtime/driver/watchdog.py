"""Watchdog, with which the supervisor watches its driver and its keeper.

The keeper (processes.py) is the process that cleans up when the supervisor is gone.

Invariant: the supervisor never waits for a process that does not respond. The supervisor kills a driver that does not
respond, and replaces a keeper that does not respond.
"""

from __future__ import annotations

import codecs
import os
import select
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..process.heartbeat import DRIVER, HeartbeatWatch, Limits, killed_processes
from ..process.processes import Temporary

LOOK = 0.2  # seconds between two reads of the lines that a run has written


@contextmanager
def watch_driver(driver: int, temporary: Temporary, limits: Limits, say: Callable[[str], None]) -> Iterator[None]:
    """Kill a driver that does not respond, and replace a stopped or dead keeper.

    `driver` is the driver's process id. The watch lasts as long as the context.
    """
    finished = threading.Event()
    # The driver is watched by its heartbeat, and by its process id before it has a heartbeat.
    watch = HeartbeatWatch(temporary.folder, limits, lambda: {DRIVER: driver})

    def look() -> None:
        while not finished.wait(watch.often):
            with suppress(OSError):
                watch.look(watch.often)
            if message := temporary.replace_keeper(watch.often, limits.stopped):
                say(message)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def wait(driver: subprocess.Popen[bytes], write: Callable[[str], object], look: Callable[[], None]) -> int:
    """Wait for a driver's end and return its exit status.

    During the wait, `write` is called with the text that the driver prints, and `look` is called repeatedly.
    """
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


def describe_end(driver: subprocess.Popen[bytes], temporary: Temporary, status: int) -> str:
    """Describe why a driver has ended without a result."""
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return killed_processes(temporary.folder).get(driver.pid, ("", f"the driver {how}"))[1]


def handle_stopped_driver(
    driver: subprocess.Popen[bytes], again: bool, limits: Limits, say: Callable[[str], None]
) -> None:
    """Handle a signal to the supervisor while the driver is stopped and cannot react.

    The first signal prints a message. A repeated signal (`again`) kills the driver.
    """
    if again:
        driver.kill()
    else:
        state = f"the driver (process {driver.pid}) is stopped: it is killed in {limits.stopped:g} s"
        say(f"{state}, unless it continues; repeat the signal to end at once")


@contextmanager
def pipe() -> Iterator[int]:
    """Open a pipe and yield its read end; the write end closes when this process ends."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)
