"""The processes and temporary folders of a run, and how nothing of them is left, whoever is killed.

Invariant: only what bears a run's mark, or is of its driver's session, is ended. Only a folder that no keeper holds is
removed, and only one of this user's, of mode 0700, under a name that a run gives: never through a link, and a name is
never a pattern. A *keeper* is a process that makes a temporary folder, waits until whoever started it lets go of it or
is dead (the system closes the pipe between them), and then ends what is left of the run and removes the folder. A
keeper that died, or is stopped, is replaced. This file is run as its program, so it imports little of the package.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from ...files import private
from .heartbeat import stat

MARK = "MSRL_RUN"  # in the environment of every process of a run: its temporary folder
NICENESS = "RAY_worker_niceness"  # Ray's setting
PREFIX = "msrl-run-"  # short: Ray's sockets lie in the folder, and their names are limited to 107 bytes
NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")  # what `tempfile` makes of it
# Ray's own folder, below the run's, since Ray opens the folder that it is given to all users. The name is short too.
RAY = "r"
SHARED = Path("/dev/shm")
NEW = 60.0  # seconds that a keeper may take to start, in which its folder may not be locked yet
ROWS = "rows"  # what a host's folder of rows in shared memory is called, after the run's folder
# Processes of Python's, of torch's and of the dock's rooms that remove the shared memory of whoever was killed, as soon
# as nobody holds it, and then end.
TIDY = ("multiprocessing.resource_tracker", "torch_shm_manager", f"-{ROWS}-")
TIDIES = 3.0  # seconds that they are left
PROGRAM = "msrl_graph.runtime.process.processes"
BEGINS = 3  # tries to start the first keeper: one may be killed while it starts
_ENDED = "ended"  # what a keeper says at its end
HELD_UP = 2.0  # seconds that a keeper may be stopped, when its work is waited for
MOST = 10.0  # seconds that ending processes may take: one that waits for a dead disk cannot be ended


def nicer(by: int) -> dict[str, str]:
    """The environment in which Ray's servers begin, so that its workers are nicer than these by so much; these are as
    nice as who starts them. Ray's own default is 15: a thirtieth of a core that others want too. What the caller has
    set stays, unless `by` is more."""
    return {NICENESS: str(by or os.environ.get(NICENESS, 0))}


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    now = stat(pid)
    return now is not None and now.state == "T"


def wait_for_end(pids: Collection[int], seconds: float) -> None:
    """Wait until none of these processes is alive, at most so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(map(alive, pids)):
        time.sleep(0.005)


class Temporary:
    """A temporary folder and its keeper; `keeper` is its process, 0 while there is none. This process holds the folder,
    too, so that nobody sweeps it up while a keeper is replaced."""

    def __init__(self) -> None:
        self.keeper = 0
        self._session = 0
        self._standing = 0.0
        self._closed = False
        self._turn = threading.Lock()
        if not (folder := next(filter(None, (self._begin() for _ in range(BEGINS))), "")):
            raise OSError(f"no temporary folder could be made in {tempfile.gettempdir()}")
        self.folder = Path(folder)
        self._held = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _begin(self, *folder: str) -> str:
        """Starts a keeper, of a folder that is there or of a new one; the folder, where that could be done."""
        made = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, *folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert made.stdin is not None and made.stdout is not None
        pid, _, found = _said(made).partition(" ")
        made.wait()  # the keeper itself is a child of its, which has left it
        if not found:
            made.stdin.close()
            made.stdout.close()
            return ""
        self._stdin = made.stdin
        self._stdout = made.stdout
        self.keeper = int(pid)
        self._tell()  # from now on it keeps
        return found

    def ends(self, session: int) -> None:
        """The processes of this session are to be ended with the folder."""
        with self._turn:
            self._session = session
            self._tell()

    def _tell(self) -> None:
        if self.keeper:
            with suppress(OSError):  # it was killed: this process does its work
                self._stdin.write(f"{self._session}\n")
                self._stdin.flush()

    def tend(self, seconds: float, limit: float) -> str:
        """Replaces a keeper that died, or is stopped for `limit` seconds; called every so many `seconds`. What was
        done, in words; nothing where the keeper is well."""
        with self._turn:
            if self._closed:
                return ""
            well = alive(self.keeper)
            self._standing = self._standing + seconds if stopped(self.keeper) else 0.0
            if well and self._standing < limit:
                return ""
            how = f"has not moved for {self._standing:.0f} s (stopped); killed" if well else "died"
            self._drop()
            try:
                begun = self._begin(str(self.folder))
            except OSError:
                begun = ""
            if not begun:
                return ""  # it was killed as it began, or no process can be started now: the next call tries again
            self._standing = 0.0
            return f"the keeper {how}; another one was started"

    def _drop(self) -> None:
        """Ends the keeper, where there is one, without the work that it is for."""
        if not self.keeper:
            return
        with suppress(ProcessLookupError):
            os.kill(self.keeper, signal.SIGKILL)
        wait_for_end([self.keeper], 2.0)
        with suppress(OSError):
            self._stdin.close()
        self._stdout.close()
        self.keeper = 0

    def close(self) -> None:
        """Ends what is left of the run, and removes the folder."""
        with self._turn:
            self._closed = True
            if self.keeper and self._ended():
                self._stdout.close()
            else:  # there is none, it was killed, or does not move
                self._drop()
                end(str(self.folder), self._session)
            os.close(self._held)
        wait_for_end([self.keeper], 2.0)

    def _ended(self) -> bool:
        """Lets go of the keeper, and waits until it has done its work; whether it has."""
        with suppress(OSError):
            self._stdin.close()
        said = ""
        standing = 0.0
        until = time.monotonic() + 4 * MOST
        while standing < HELD_UP and time.monotonic() < until:
            if select.select([self._stdout], [], [], 0.1)[0]:
                piece = os.read(self._stdout.fileno(), 16)
                said += piece.decode()
                if not piece:
                    return said == _ENDED
            standing = standing + 0.1 if stopped(self.keeper) else 0.0
        return said == _ENDED


def _said(made: subprocess.Popen[str]) -> str:
    """The first line of a process; nothing where it ends without one, or is stopped, and then it is killed."""
    assert made.stdout is not None
    standing = 0.0
    until = time.monotonic() + NEW
    while standing < HELD_UP and time.monotonic() < until:
        ended = made.poll() is not None
        if select.select([made.stdout], [], [], 0.0 if ended else 0.1)[0]:
            return made.stdout.readline().rstrip("\n")
        if ended:
            return ""
        standing = standing + 0.1 if stopped(made.pid) else 0.0
    made.kill()
    return ""


def lent() -> Path:
    """A temporary folder that goes with the last process that holds it, beginning with this one."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    hold(folder)
    go_with(folder, folder)
    return folder


def go_with(lock: Path, folder: Path) -> None:
    """Has a folder removed when nobody holds this lock any more."""
    # In a session of its own and no child of this process: Ray ends those with it.
    subprocess.run(
        ["setsid", "--fork", "flock", "--exclusive", str(lock), "rm", "-rf", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )


def hold(folder: Path) -> None:
    """Keeps a folder that was lent for as long as this process lives."""
    handle = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)


def sweep() -> None:
    """Remove this user's temporary folders of runs of which every process was killed, and end what is left of them."""
    for folder in Path(tempfile.gettempdir()).iterdir():
        if not NAME.fullmatch(folder.name):
            continue
        with suppress(OSError):
            if time.time() - folder.lstat().st_mtime < NEW:
                continue
            handle = private.open_folder(folder)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end(str(folder))
            finally:
                os.close(handle)


def end(folder: str, session: int = 0) -> None:
    """Kills every process of a run that still is: those of its driver's session (0: none), and those with the mark in
    their environment (Ray's processes change their titles, which may write over it). Those that tidy up after others
    end by themselves, or last. Then removes its folder, and what they shared memory by under the folder's name."""
    begin = time.monotonic()
    until = begin + MOST
    while time.monotonic() < until:
        left = []
        tidying = False
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                ours = (session and os.getsid(process.pid) == session) or process.environ().get(MARK) == folder
                if not ours or process.pid == os.getpid() or not alive(process.pid):
                    continue
                if time.monotonic() < begin + TIDIES and any(
                    word in part for part in process.cmdline() for word in TIDY
                ):
                    tidying = True
                    continue
                process.kill()
                left.append(process)
        if not left and not tidying:
            break
        if not left:
            time.sleep(0.02)
        # Dead is enough: who is nobody's child here stays a zombie until the system's first process has time for it.
        wait_for_end([process.pid for process in left], min(2.0, until - time.monotonic()))
    _remove_shared(Path(folder).name)
    shutil.rmtree(folder, ignore_errors=True)


def hand_over(folder: str, session: int) -> None:
    """Has a keeper of its own end a run at once: what a process of the run asks for that is ended itself."""
    command = [sys.executable, "-P", "-m", PROGRAM, folder]
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    made = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    made.communicate(f"{session}\n".encode())


def _remove_shared(run: str) -> None:
    """Remove this user's files and private folders in shared memory whose names begin with that of a run's folder."""
    for path in SHARED.iterdir() if SHARED.is_dir() else ():
        if path.name.startswith(f"{run}-"):
            with suppress(OSError):
                if path.is_dir() and not path.is_symlink():
                    private.check_folder(path)
                    shutil.rmtree(path)
                else:
                    private.check_file(path, mode=0)
                    path.unlink()


def _keep() -> None:
    """The keeper: says who it is and which folder it made or took over, and hears of sessions until the pipe ends. It
    is nobody's child, and not in the session of who started it: neither what a terminal sends to all of its processes
    reaches it, nor what `ray job stop` sends to all below the one that it started. One that takes a folder over and
    hears nothing has a maker that gave it up, and leaves the run alone."""
    takes_over = len(sys.argv) > 1
    folder = sys.argv[1] if takes_over else tempfile.mkdtemp(prefix=PREFIX)
    handle = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    if keeper := os.fork():
        # The parent says it: a keeper that is stopped before it does anything is known too, and can be killed.
        with suppress(OSError):  # who asked is dead already
            os.write(sys.stdout.fileno(), f"{keeper} {folder}\n".encode())
        os._exit(0)
    session = 0
    told = False
    for line in sys.stdin:
        session = int(line)
        told = True
    if takes_over and not told:
        return
    end(folder, session)
    with suppress(OSError):
        sys.stdout.write(_ENDED)
        sys.stdout.flush()


if __name__ == "__main__":
    _keep()
