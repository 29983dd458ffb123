"""A server process that imports modules once, and forks Ray's worker processes.

Invariant: no run depends on this *preload server*. A Ray worker that the server cannot fork is started in Ray's usual
way.

- The server does not import modules that start threads, because a fork loses threads.
- The server does not import Ray, because Ray reads a worker's environment variables at import.
- The server ends when the process that started it ends, because the socket between the two processes then closes.
- A launcher and the server accept each other only if both belong to the same user. A launcher sends secrets of the run.
- This file is run as a program and imports nothing of msrl_graph.

Ray starts a worker with `python setup_worker.py default_worker.py ...`. After `PreloadAddress.use`, Ray runs this file
instead of setup_worker.py. The process that runs this file is called a *launcher*. The launcher sends its arguments,
environment and open files to the server. The server forks a process that continues as default_worker.py, and the
launcher waits until that process ends. `import torch` and `import transformers` take seconds of CPU time. A fork takes
milliseconds, and the forked processes share the memory of the loaded modules.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import subprocess

SOCKET = "MSRL_PRELOAD"  # in the environment of Ray's servers: the server's socket
PATIENCE = 60.0  # seconds that a launcher waits for the server, which may still be importing
TALK = 5.0  # seconds that the server waits for the request of a connected launcher
_OOM = "/proc/self/oom_score_adj"
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user, group


class PreloadAddress(NamedTuple):
    """The address of a preload server.

    - `socket`: the path of the server's socket; "" if there is no server.
    - `session`: the id of the process session that the server and its forked workers belong to.
    """

    socket: str = ""
    session: int = 0

    def use(self) -> None:
        """Make the Ray servers that this process starts later use the preload server.

        The preload server then forks the workers of these Ray servers. If `socket` is "", the method changes nothing.
        """
        from ray._private import ray_constants

        # Joined to the folder of Ray's own, and absolute.
        if self.socket and hasattr(ray_constants, "SETUP_WORKER_FILENAME"):
            ray_constants.SETUP_WORKER_FILENAME = __file__
            os.environ[SOCKET] = self.socket


class PreloadServer:
    """A preload server with a temporary folder of its own.

    - `modules`: the modules that the server imports when it starts. `load` adds more modules.
    - `environment`: variables that the server gets in addition to the environment of this process.
    - `prefix`: the beginning of the folder's name.
    - `mark`: the name of an environment variable that the server gets. The value of this variable is the path of the
      folder.

    The folder contains the server's socket, and files that packages write while they are imported.
    """

    def __init__(self, modules: Iterable[str], environment: Mapping[str, str], prefix: str, mark: str) -> None:
        import fcntl
        import tempfile

        self.folder = Path(tempfile.mkdtemp(prefix=prefix))
        self._held = os.open(self.folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)  # no sweep removes the folder
        self._control, control = socket.socketpair()
        variables = {**environment, "TMPDIR": str(self.folder), mark: str(self.folder)}
        try:
            with control:
                self._process = self._begin(control, variables)
        except OSError:
            self._leave()
            raise
        self.load(modules)

    def _begin(self, control: socket.socket, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        path = str(self.folder / "preload")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen(1024)  # launchers wait here until the modules are imported
            process = start_server(listening, control, self.folder, {**os.environ, **variables})
        self.address = PreloadAddress(path, process.pid)
        return process

    def load(self, modules: Iterable[str]) -> None:
        """Make the server import more modules before its next fork."""
        with suppress(OSError):  # it was killed
            self._control.sendall("".join(f"{module}\n" for module in modules).encode())

    def close(self) -> None:
        """End the server. The Ray workers that the server has forked continue."""
        if self._held >= 0:
            self._process.kill()
            self._process.wait()
            self._leave()

    def _leave(self) -> None:
        import shutil

        self._control.close()
        os.close(self._held)
        self._held = -1
        shutil.rmtree(self.folder, ignore_errors=True)


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user


def _check_user(connection: socket.socket) -> None:
    """Raise PermissionError if the other end belongs to another user."""
    if (user := peer_user(connection)) != os.geteuid():
        raise PermissionError(f"the other end is a process of user {user}")


def start_server(
    listening: socket.socket, control: socket.socket, folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process of a preload server, in a session of its own.

    The arguments are those of `serve`, and the environment variables of the process.
    """
    import subprocess

    return subprocess.Popen(
        [sys.executable, __file__, str(listening.fileno()), str(folder)],
        stdin=control.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        pass_fds=[listening.fileno()],
        start_new_session=True,
    )


def launch(arguments: list[str]) -> None:
    """Have the server fork a Ray worker, and wait until the worker ends.

    If the server cannot fork the worker, this process becomes the worker itself.
    """
    if (connection := _connected(arguments)) is not None:
        while connection.recv(1):  # until the worker's end, which closes its side
            pass
        return
    own = str(Path(next(a for a in arguments if a.endswith("default_worker.py"))).with_name("setup_worker.py"))
    os.execv(sys.executable, [sys.executable, own, *arguments])


def _connected(arguments: list[str]) -> socket.socket | None:
    """Have the server fork a worker, and return the connection to the worker.

    `arguments` are the arguments with which Ray starts a worker. Returns None if the server does not answer or cannot
    start this kind of worker.
    """
    import json

    context, rest = "{}", []
    language = "PYTHON"
    for argument in arguments:  # setup_worker.py takes two of them
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            context = value
        elif name == "--language":
            language = value
        else:
            rest.append(argument)
    wanted = json.loads(context or "{}")
    is_plain = not any(wanted.get(key) for key in ("command_prefix", "override_worker_entrypoint", "java_jars"))
    if language != "PYTHON" or not is_plain or wanted.get("py_executable", sys.executable) != sys.executable:
        return None
    with suppress(OSError, ValueError):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        connection.connect(os.environ.get(SOCKET, ""))
        _check_user(connection)  # the folder of a server that has ended may be another user's by now
        score = ""
        with suppress(OSError):
            score = Path(_OOM).read_text()
        request = {
            "arguments": rest,
            "environment": {**os.environ, **wanted.get("env_vars", {})},
            "folder": str(Path.cwd()),
            "niceness": os.nice(0),
            "oom": score,
        }
        # The files are with the first byte, and the request ends where the connection is shut.
        socket.send_fds(connection, [b" "], [0, 1, 2])
        connection.sendall(json.dumps(request).encode())
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1):
            connection.settimeout(None)
            return connection
    return None


def serve(listening: socket.socket, folder: str) -> list[str]:
    """Import requested modules and fork Ray workers, until standard input is closed.

    The names of the modules arrive at standard input. The requests for workers arrive at `listening`. `folder` is the
    temporary folder of this server. The function returns only in a forked worker. The result is the arguments of the
    program that the worker must run.
    """
    import gc
    import select
    import signal

    control = socket.socket(fileno=os.dup(0))
    look = _end_with_parent(control, folder)
    gc.disable()  # imports make little garbage, and a collection in a worker would copy the memory that it shares
    names = ""
    while True:
        ready, _, _ = select.select([control, listening], [], [])
        if control in ready:
            *modules, names = (names + control.recv(1 << 16).decode()).split("\n")
            look()  # there was no signal if the socket was closed before this process asked for signals
            _load(modules, folder)
            gc.freeze()
            continue  # launchers that are waiting may need the next modules too
        connection, _ = listening.accept()
        files: list[int] = []
        is_worker = False
        try:
            with suppress(OSError, ValueError):  # a launcher whose request fails starts its worker itself
                request = _request(connection, files)
                is_worker = os.fork() == 0
            if is_worker:  # an error here ends the worker before it answers
                signal.signal(signal.SIGIO, signal.SIG_DFL)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                control.close()
                gc.enable()
                return _begin(connection, request, files)
        finally:
            connection.close()
            for file in files:
                os.close(file)


def _end_with_parent(control: socket.socket, folder: str) -> Callable[[], None]:
    """End this process when the other end of the socket `control` closes.

    The process ends even during an import. Before it ends, the process removes `folder`. Returns a function that ends
    the process if the other end is closed and everything that it sent was read.
    """
    import fcntl
    import shutil
    import signal

    def look(*_: object) -> None:
        with suppress(BlockingIOError):
            if not control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(0)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no worker stays a zombie
    signal.signal(signal.SIGIO, look)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) | os.O_ASYNC)
    look()
    return look


def _load(modules: list[str], folder: str) -> None:
    """Import modules, and remove the temporary folders that their imports make."""
    import shutil
    from importlib import import_module

    for module in modules:
        with suppress(Exception):  # a worker that needs it raises the error where a person reads it
            import_module(module)
    for path in Path(folder).iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _request(connection: socket.socket, files: list[int]) -> dict[str, Any]:
    """Return a launcher's request, and append the launcher's open files to `files`.

    The open files are standard input, standard output and standard error.
    """
    import json

    _check_user(connection)
    connection.settimeout(TALK)
    files += socket.recv_fds(connection, 1, 3)[1]
    pieces = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    request: dict[str, Any] = json.loads(b"".join(pieces))
    return request


def _begin(connection: socket.socket, request: dict[str, Any], files: list[int]) -> list[str]:
    """Turn this forked process into the worker that a launcher requested.

    `files` are the launcher's open files. Returns the arguments of the program that the worker must run.
    """
    import tempfile

    os.setpgid(0, 0)  # Ray kills the process group of a worker that ends
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # it may be the server's
    os.chdir(request["folder"])
    with suppress(OSError):
        os.nice(request["niceness"] - os.nice(0))
    with suppress(OSError):
        Path(_OOM).write_text(request["oom"])
    kept = connection.dup()  # open until this process ends
    kept.settimeout(None)
    kept.send(b"1")
    kept.detach()
    arguments: list[str] = request["arguments"]
    return arguments


def main() -> None:
    # The script's folder comes first in a program's path, and holds modules of the package by their bare names.
    sys.path.pop(0)
    if sys.argv[1].endswith("default_worker.py"):
        launch(sys.argv[1:])
    else:
        import runpy

        sys.argv = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
