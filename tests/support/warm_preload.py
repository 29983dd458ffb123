"""A *warm process* has imported the modules of preload servers, and forks a preload server for each run of a test.

Each run saves the six seconds of CPU time that these imports take.

Invariant: a forked server runs the same program as a server that a run starts itself. It has a session of its own. Its
environment variables (also in /proc), its folder and its open files are the same.
"""

import atexit
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path

from msrl_graph.runtime.process import preload

LIBC = ctypes.CDLL(None)
ROOM = 120_000  # bytes for a server's variables; Linux allows 131,071 bytes for one variable
CHECKOUT = str(Path(__file__).parent.parent.parent)  # its package is tested, not another one that is installed


class Forked:
    """A server's process, as `subprocess.Popen` has it."""

    def __init__(self, pid):
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def kill(self):
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self):
        select.select([self._handle], [], [])
        os.close(self._handle)


@cache
def address():
    """The socket of this process's own warm process, which is started by the first call and ends with its caller."""
    folder = tempfile.mkdtemp(prefix="msrl-warm-")
    path = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        process = subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno())],
            stdin=subprocess.PIPE,
            env={**os.environ, "TMPDIR": folder, "PYTHONPATH": CHECKOUT, "ROOM": "x" * ROOM},
            pass_fds=[listening.fileno()],
        )

    @atexit.register
    def end():
        process.kill()
        process.wait()
        subprocess.run(["rm", "-rf", folder], check=True)

    return path


def use(path):
    """Has this process's preload servers forked by the warm process at the socket `path`."""
    preload.start_server = partial(fork_server, path)


def fork_server(path, listening, control, folder, environment, host=0):
    """Has the warm process at the socket `path` fork a preload server, which `preload.start_server` would start.

    `host` is the id of a process of a test host (hosts.py) that the server must run on; 0 stands for this machine.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [b" "], [listening.fileno(), control.fileno()])
        wanted = {"folder": str(folder), "at": str(Path.cwd()), "environment": {**environment}, "nice": os.nice(0)}
        connection.sendall(json.dumps(wanted | {"host": host}).encode())
        connection.shutdown(socket.SHUT_WR)
        return Forked(int(connection.recv(64)))


class HostServer:
    """A preload server on a test host. It ends with `close`, with this process, or with its host.

    `folder` is a folder that the host sees at the same path.
    """

    def __init__(self, folder):
        self._folder = tempfile.mkdtemp(prefix="p", dir=folder)
        self._listening = socket.socket(socket.AF_UNIX)
        self.socket = f"{self._folder}/preload"
        self._listening.bind(self.socket)
        self._listening.listen(1024)  # launchers wait here until the server is started

    def start(self, host, environment):
        """Starts the server with these environment variables, on the host to which the process `host` belongs."""
        self._control, control = socket.socketpair()
        with self._listening, control:
            self._server = fork_server(address(), self._listening, control, self._folder, environment, host)

    def close(self):
        self._control.close()
        self._server.wait()


def _serve(listening):
    """Forks servers until standard input is closed; returns in a fork, with the arguments of its program."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([0, listening], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listening.accept()
        files = socket.recv_fds(connection, 1, 2)[1]
        wanted = json.loads(b"".join(iter(lambda of=connection: of.recv(1 << 16), b"")))
        if (pid := os.fork()) == 0:
            listening.close()
            if wanted["host"]:
                _enter(wanted["host"], connection)
            return _become(wanted, *files, connection)
        if not wanted["host"]:
            connection.sendall(str(pid).encode())
        for file in files:
            os.close(file)
        connection.close()


def _enter(host, connection):
    """Continue in a fork on a test host, and tell the fork's id."""
    spaces = [os.open(f"/proc/{host}/ns/{kind}", os.O_RDONLY) for kind in ("net", "mnt", "pid")]
    for space in spaces:
        if LIBC.setns(space, 0):
            os._exit(1)
        os.close(space)
    if pid := os.fork():  # a process stays where it is: only its children are among a host's processes
        connection.sendall(str(pid).encode())
        os._exit(0)


def _become(wanted, listening, control, connection):
    connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(control, 0)
    os.close(control)
    silent = os.open(os.devnull, os.O_RDWR)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.close(silent)
    os.chdir(wanted["at"])
    os.nice(wanted["nice"] - os.nice(0))
    os.environ.clear()
    os.environ.update(wanted["environment"])
    _show(wanted["environment"])
    tempfile.tempdir = None
    return [preload.__file__, str(listening), wanted["folder"]]


def _show(variables):
    """Write variables to the memory from which Linux reads /proc/PID/environ of this process."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    start, end = (int(field) for field in fields[47:49])
    text = b"".join(f"{name}={value}\0".encode() for name, value in variables.items())
    assert len(text) <= end - start
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


if __name__ == "__main__":
    from msrl_graph.backends import ENGINES
    from msrl_graph.runtime.driver.preloading import COMMON
    from msrl_graph.runtime.process.start_variables import OFFLINE, waits

    os.environ.update(OFFLINE | waits())
    engines = {engine.build.partition(":")[0] for engine in ENGINES.values()} - {""}
    for module in (*COMMON, *sorted(engines), "transformers.models.qwen2.modeling_qwen2"):
        with suppress(ImportError):  # of an engine that is not installed
            import_module(module)
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_path(sys.argv[0], run_name="__main__")
