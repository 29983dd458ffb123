"""The processes and temporary folders of a run, and their cleanup.

After a run, no process and no temporary folder of the run is left, whichever process was killed.

A *keeper* is a process that makes the run's temporary folder and later cleans up. A pipe connects the keeper with its
*starter*, the process that started the keeper. The pipe closes when the starter releases the keeper or dies. The keeper
then ends the remaining processes of the run and removes the folder. A keeper that died or is stopped is replaced. This
file is run as the keeper's program, so it imports little of msrl_graph.

A process *holds* a folder while it has a shared lock (`flock`) on the folder. A run's *mark* is the environment
variable MSRL_RUN, which every process of the run has. Its value is the path of the run's temporary folder.

Invariant: a process is ended only if it has the run's mark, or if it is in a process session that the run started. A
folder is removed only if it belongs to this user, has mode 0700 and the name of a run's folder, and no keeper holds it.
A folder is never removed through a link, and its name is never used as a pattern.
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
from typing import NamedTuple

import psutil

from ...files import private
from .heartbeat import read_stat
from .start_variables import MARK, PREFIX

NICENESS = "RAY_worker_niceness"  # Ray's setting
NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")  # the names that `tempfile` makes with this prefix
# Ray's own folder, below the run's, since Ray makes its folder accessible to all users. The name is short too.
RAY = "r"
SHARED = Path("/dev/shm")
NEW = 60.0  # seconds that a keeper may take to start, in which its folder may not be locked yet
ROWS = "rows"  # what a host's folder of rows in shared memory is called, after the run's folder
# Processes of Python, of torch and of the dock's rooms that remove the shared memory of killed processes as soon as
# no process holds it, and then end.
TIDY_PROCESSES = ("multiprocessing.resource_tracker", "torch_shm_manager", f"-{ROWS}-")
TIDY_SECONDS = 3.0  # seconds that these processes have for this
PROGRAM = "msrl_graph.runtime.process.processes"
START_TRIES = 3  # tries to start the first keeper: one may be killed while it starts
_ENDED = "ended"  # what a keeper prints at its end
STOPPED_LIMIT = 2.0  # seconds that a keeper may be stopped while its work is waited for
MOST = 10.0  # seconds that ending processes may take: one that waits for a dead disk cannot be ended


def worker_niceness(by: int) -> dict[str, str]:
    """Return the environment variable that sets the niceness of Ray's workers.

    The niceness of a worker is the niceness of the process that starts Ray, plus the value of this variable. The value
    is `by`. If `by` is 0, the variable keeps its present value, or becomes 0 if it is not set. Ray's own default is 15.
    With this default, a worker gets only a thirtieth of a core that other processes also use.
    """
    return {NICENESS: str(by or os.environ.get(NICENESS, 0))}


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    now = read_stat(pid)
    return now is not None and now.state == "T"


def wait_for_end(pids: Collection[int], seconds: float) -> None:
    """Wait at most `seconds` seconds until none of these processes is alive."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(map(is_alive, pids)):
        time.sleep(0.005)


class Sessions(NamedTuple):
    """The process sessions to end when a run's temporary folder is removed.

    A value of 0 means that there is no such session or process.

    - `driver`: the session of the driver.
    - `server`: the session of a preload server (preload.py). The number is also the process id of the server.
    - `owner`: the id of a process that could still use the preload server for another run. While this process is alive,
      the server itself is not ended.
    """

    driver: int = 0
    server: int = 0
    owner: int = 0

    def has(self, process: psutil.Process) -> bool:
        session = os.getsid(process.pid)
        if session == 0 or session not in (self.driver, self.server):
            return False
        return not (process.pid == self.server and is_alive(self.owner))


NO_SESSIONS = Sessions()


class Temporary:
    """The temporary folder of a run, and its keeper.

    `keeper` is the process id of the keeper, or 0 while no keeper runs. The process that has this object also holds the
    folder, so that `sweep` in another process does not remove the folder while a keeper is replaced.
    """

    def __init__(self) -> None:
        self.keeper = 0
        self._sessions = NO_SESSIONS
        self._stopped_seconds = 0.0
        self._closed = False
        self._lock = threading.Lock()
        if not (folder := next(filter(None, (self._start_keeper() for _ in range(START_TRIES))), "")):
            raise OSError(f"no temporary folder could be made in {tempfile.gettempdir()}")
        self.folder = Path(folder)
        self._held = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _start_keeper(self, *folder: str) -> str:
        """Start a keeper, and return the path of its folder.

        If no folder is passed, the keeper makes a new folder. Returns "" if the keeper could not start.
        """
        starter = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, *folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert starter.stdin is not None and starter.stdout is not None
        pid, _, folder_name = _read_first_line(starter).partition(" ")
        starter.wait()  # the keeper is a child of the starter, and now an orphan
        if not folder_name:
            starter.stdin.close()
            starter.stdout.close()
            return ""
        self._stdin = starter.stdin
        self._stdout = starter.stdout
        self.keeper = int(pid)
        self._send_sessions()  # from now on, the keeper cleans up when the pipe closes
        return folder_name

    def end_session_too(self, session: int, server: int = 0) -> None:
        """Make the keeper's cleanup also end the processes of the session `session`.

        `server` is the session of this process's preload server; 0 if there is none. The cleanup also ends the
        processes that the preload server has forked.
        """
        with self._lock:
            self._sessions = Sessions(session, server, os.getpid())
            self._send_sessions()

    def _send_sessions(self) -> None:
        if self.keeper:
            with suppress(OSError):  # the keeper was killed: this process then cleans up itself
                self._stdin.write(f"{' '.join(map(str, self._sessions))}\n")
                self._stdin.flush()

    def replace_keeper(self, seconds: float, limit: float) -> str:
        """Replace the keeper if it died, or if it was stopped for `limit` seconds.

        The caller calls this method every `seconds` seconds. Returns a sentence about what was done, or "" if nothing
        was done.
        """
        with self._lock:
            if self._closed:
                return ""
            well = is_alive(self.keeper)
            self._stopped_seconds = self._stopped_seconds + seconds if is_stopped(self.keeper) else 0.0
            if well and self._stopped_seconds < limit:
                return ""
            reason = f"has not moved for {self._stopped_seconds:.0f} s (stopped); killed" if well else "died"
            self._kill_keeper()
            try:
                folder_name = self._start_keeper(str(self.folder))
            except OSError:
                folder_name = ""
            if not folder_name:
                return ""  # killed at its start, or no process can be started now: the next call tries again
            self._stopped_seconds = 0.0
            return f"the keeper {reason}; another one was started"

    def _kill_keeper(self) -> None:
        """Kill the keeper, if one runs, before it can clean up."""
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
        """End the remaining processes of the run, and remove the folder."""
        with self._lock:
            self._closed = True
            if self.keeper and self._end_keeper():
                self._stdout.close()
            else:  # there is no keeper, it was killed, or it is stopped
                self._kill_keeper()
                end_run(str(self.folder), self._sessions)
            os.close(self._held)
        wait_for_end([self.keeper], 2.0)

    def _end_keeper(self) -> bool:
        """Release the keeper, and wait until it has cleaned up.

        Returns whether the keeper has finished. A keeper that is stopped does not finish.
        """
        with suppress(OSError):
            self._stdin.close()
        output = ""
        stopped_seconds = 0.0
        until = time.monotonic() + 4 * MOST
        while stopped_seconds < STOPPED_LIMIT and time.monotonic() < until:
            if select.select([self._stdout], [], [], 0.1)[0]:
                piece = os.read(self._stdout.fileno(), 16)
                output += piece.decode()
                if not piece:
                    return output == _ENDED
            stopped_seconds = stopped_seconds + 0.1 if is_stopped(self.keeper) else 0.0
        return output == _ENDED


def _read_first_line(process: subprocess.Popen[str]) -> str:
    """Return the first line that a process prints, or "" if it prints none.

    If a signal has stopped the process, or if it prints no line within `NEW` seconds, the process is killed, and the
    result is "".
    """
    assert process.stdout is not None
    stopped_seconds = 0.0
    until = time.monotonic() + NEW
    while stopped_seconds < STOPPED_LIMIT and time.monotonic() < until:
        ended = process.poll() is not None
        if select.select([process.stdout], [], [], 0.0 if ended else 0.1)[0]:
            return process.stdout.readline().rstrip("\n")
        if ended:
            return ""
        stopped_seconds = stopped_seconds + 0.1 if is_stopped(process.pid) else 0.0
    process.kill()
    return ""


def make_shared_folder() -> Path:
    """Make a temporary folder that is removed when no process holds it any more.

    A process holds the folder while it has a lock on the folder. This process holds the folder from the beginning.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    hold_folder(folder)
    remove_after(folder, folder)
    return folder


def remove_after(lock: Path, folder: Path) -> None:
    """Have `folder` removed when no process holds a lock on the path `lock` any more."""
    # In a session of its own and not a child of this process: Ray ends children with it.
    subprocess.run(
        ["setsid", "--fork", "flock", "--exclusive", str(lock), "rm", "-rf", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )


def hold_folder(folder: Path) -> None:
    """Lock a folder until this process ends, so that no process removes the folder."""
    handle = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)


def sweep() -> None:
    """Clean up after this user's runs that ended without a cleanup.

    No process has a lock on the temporary folder of such a run. The function ends the remaining processes of the run,
    and removes the folder.
    """
    for folder in Path(tempfile.gettempdir()).iterdir():
        if not NAME.fullmatch(folder.name):
            continue
        with suppress(OSError):
            if time.time() - folder.lstat().st_mtime < NEW:
                continue
            handle = private.open_folder(folder)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end_run(str(folder))
            finally:
                os.close(handle)


def end_run(folder: str, sessions: Sessions = NO_SESSIONS) -> None:
    """Kill the remaining processes of a run, and remove the run's temporary folder.

    A process belongs to the run if it is in one of `sessions`, or if the environment variable MSRL_RUN of the process
    is `folder`. The variable alone is not enough: Ray's processes change their title, and the new title may overwrite
    the environment. Some processes of the run remove the shared memory of killed processes. These processes have a few
    seconds to end by themselves, and are killed last. The function also removes the shared memory whose name begins
    with the folder's name.
    """
    begin = time.monotonic()
    until = begin + MOST
    while time.monotonic() < until:
        killed = []
        tidying = False
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                ours = sessions.has(process) or process.environ().get(MARK) == folder
                if not ours or process.pid == os.getpid() or not is_alive(process.pid):
                    continue
                # A preload server whose owner is dead removes its folder, and ends.
                if time.monotonic() < begin + TIDY_SECONDS and (
                    process.pid == sessions.server
                    or any(word in part for part in process.cmdline() for word in TIDY_PROCESSES)
                ):
                    tidying = True
                    continue
                process.kill()
                killed.append(process)
        if not killed and not tidying:
            break
        if not killed:
            time.sleep(0.02)
        # A zombie counts as dead: an orphan stays one until the system's first process has time for it.
        wait_for_end([process.pid for process in killed], min(2.0, until - time.monotonic()))
    _remove_shared(Path(folder).name)
    shutil.rmtree(folder, ignore_errors=True)


def hand_over(folder: str, sessions: Sessions) -> None:
    """Start a separate keeper that immediately ends the run to which `folder` belongs.

    `sessions` are the process sessions to end. Even a process of this run can call the function.
    """
    command = [sys.executable, "-P", "-m", PROGRAM, folder]
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    keeper = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    keeper.communicate(f"{' '.join(map(str, sessions))}\n".encode())


def _remove_shared(run: str) -> None:
    """Remove a run's shared memory, if this user owns it.

    The shared memory is the files and private folders in /dev/shm whose names begin with the name of the run's
    temporary folder (`run`).
    """
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
    """Run the keeper's program.

    The program prints the process id of the keeper, and the folder that the keeper made or took over. The keeper then
    reads sessions from standard input until the pipe closes, and ends the run.

    No process of the run is the keeper's parent, and the keeper has a session of its own. So the keeper gets no signal
    that a terminal sends to all processes of its session, and no signal that `ray job stop` sends to the processes of a
    job. If the keeper took over a folder but read no sessions, its starter has given up this keeper. The keeper then
    ends without any cleanup.
    """
    takes_over = len(sys.argv) > 1
    folder = sys.argv[1] if takes_over else tempfile.mkdtemp(prefix=PREFIX)
    handle = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    if keeper := os.fork():
        # The parent prints the id. So the starter can kill even a keeper that is stopped before it does anything.
        with suppress(OSError):  # the reader is dead already
            os.write(sys.stdout.fileno(), f"{keeper} {folder}\n".encode())
        os._exit(0)
    sessions = NO_SESSIONS
    has_heard = False
    for line in sys.stdin:
        sessions = Sessions(*map(int, line.split()))
        has_heard = True
    if takes_over and not has_heard:
        return
    end_run(folder, sessions)
    with suppress(OSError):
        sys.stdout.write(_ENDED)
        sys.stdout.flush()


if __name__ == "__main__":
    _keep()
