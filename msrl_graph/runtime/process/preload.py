"""A process that imports what ranks need once, and forks Ray's workers.

Invariant: no run depends on it. A worker that cannot be forked is started as Ray starts it. The server imports nothing
that starts threads which a fork would lose: not Ray, whose gRPC does. It ends when the process that started it ends:
its end of a pipe closes. This file is run as a program and imports nothing of the package.

Ray starts a worker with `python setup_worker.py default_worker.py ...`. After `use`, this file takes the place of
setup_worker.py: it sends its arguments, environment and open files to the server. The server forks a process that
continues as default_worker.py, and this file waits until that process ends. `import torch` and `import transformers`
take seconds of CPU time. A fork takes milliseconds, and the processes share the memory of the loaded modules.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

SOCKET = "MSRL_PRELOAD"  # in the environment of Ray's servers: the server's socket
PATIENCE = 60.0  # seconds that a launcher waits for the server, which may still be importing
TALK = 5.0  # seconds that the server waits for the request of a connected launcher
_OOM = "/proc/self/oom_score_adj"


class PreloadServer:
    """A server with a socket in `folder`.

    It imports `modules`; `environment` is added to the environment of this process.
    """

    def __init__(self, folder: Path, modules: Iterable[str], environment: Mapping[str, str]) -> None:
        import subprocess

        self.socket = str(folder / "preload")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.socket)
            listening.listen(1024)  # launchers wait here until the modules are imported
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno()), *modules],
                stdin=subprocess.PIPE,  # never written to: the server ends when it is closed
                env={**os.environ, **environment},
                pass_fds=[listening.fileno()],
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def use(self) -> None:
        """Let Ray servers that this process starts later fork their workers."""
        from ray._private import ray_constants

        if hasattr(ray_constants, "SETUP_WORKER_FILENAME"):  # joined to the folder of Ray's own, and absolute
            ray_constants.SETUP_WORKER_FILENAME = __file__
            os.environ[SOCKET] = self.socket


def launch(arguments: list[str]) -> None:
    """Fork a Ray worker and wait until it ends.

    Without a server, this process becomes the worker.
    """
    if (connection := _connected(arguments)) is not None:
        while connection.recv(1):  # until the worker's end, which closes its side
            pass
        return
    own = str(Path(next(a for a in arguments if a.endswith("default_worker.py"))).with_name("setup_worker.py"))
    os.execv(sys.executable, [sys.executable, own, *arguments])


def _connected(arguments: list[str]) -> socket.socket | None:
    """Fork a worker; return the connection to it, or None."""
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


def serve(listening: socket.socket, modules: list[str]) -> list[str]:
    """Fork workers until standard input is closed.

    Returns in each worker, with the arguments of the program that it runs.
    """
    import gc
    import select
    import signal
    from importlib import import_module

    for module in modules:
        with suppress(Exception):  # a worker that needs it raises the error where a person reads it
            import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a worker would copy the memory that it shares
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no worker stays a zombie
    while True:
        ready, _, _ = select.select([0, listening.fileno()], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listening.accept()
        files: list[int] = []
        is_worker = False
        try:
            with suppress(OSError, ValueError):  # a launcher whose request fails starts its worker itself
                request = _request(connection, files)
                is_worker = os.fork() == 0
            if is_worker:  # an error here ends the worker before it answers
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return _begin(connection, request, files)
        finally:
            connection.close()
            for file in files:
                os.close(file)


def _request(connection: socket.socket, files: list[int]) -> dict[str, Any]:
    """Read the request of a launcher, and add its standard files to `files`."""
    import json

    connection.settimeout(TALK)
    files += socket.recv_fds(connection, 1, 3)[1]
    pieces = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    request: dict[str, Any] = json.loads(b"".join(pieces))
    return request


def _begin(connection: socket.socket, request: dict[str, Any], files: list[int]) -> list[str]:
    """Become the process that a launcher describes."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(request["environment"])
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

        sys.argv = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
