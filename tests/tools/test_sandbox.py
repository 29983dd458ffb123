"""Hostile code in the sandbox: what it tries, what comes of it, and that nothing is left of it."""

import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from msrl_graph.tools import SandboxUnavailable, run_python, sandbox

patient = partial(run_python, seconds=60)  # on a busy machine Python alone takes seconds
FORBIDDEN = "PermissionError: [Errno 1] Operation not permitted"
READ_ONLY = "OSError: [Errno 30] Read-only file system"
ABSENT = "FileNotFoundError: [Errno 2]"
HOSTILE = {
    "a fork bomb": ("import os\nwhile True: os.fork()", "raised", FORBIDDEN),
    "another program": ("import subprocess; subprocess.run(['/bin/sh', '-c', 'true'])", "raised", FORBIDDEN),
    "a child that goes on": ("import multiprocessing as m; m.Process(target=print).start()", "raised", FORBIDDEN),
    "a process in its place": ("import os; os.execv('/bin/sleep', ['sleep', '60'])", "time", ""),
    "memory": ("found = []\nwhile True: found.append(bytearray(10**6))", "memory", ""),
    "memory at once": ("bytearray(10**12)", "memory", ""),
    "memory that limits do not count": ("import os; os.memfd_create('a')", "raised", FORBIDDEN),
    "endless output": ("while True: print('x' * 1000)", "output", ""),
    "endless errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output", ""),
    "an endless loop": ("while True: pass", "time", ""),
    "sleep": ("import time; time.sleep(1000)", "time", ""),
    "deaf ears": ("import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); time.sleep(1000)", "time", ""),
    "a closed stdout": ("import os, time; os.close(1); os.close(2); time.sleep(1000)", "time", ""),
    "threads that go on": (
        "import threading, time\nfor i in range(20): threading.Thread(target=time.sleep, args=[1000]).start()",
        "time",
        "",
    ),
    "the users": ("open('/etc/passwd').read()", "raised", ABSENT),
    "the network": ("import socket; socket.create_connection(('1.1.1.1', 80), 1)", "raised", FORBIDDEN),
    "a socket of this host": ("import socket; socket.create_connection(('127.0.0.1', PORT), 1)", "raised", FORBIDDEN),
    "a socket of the system": ("import socket; socket.socket(socket.AF_UNIX)", "raised", FORBIDDEN),
    "Python's own files": ("open(__import__('os').__file__, 'a')", "raised", READ_ONLY),
    "the root": ("open('/a', 'w')", "raised", READ_ONLY),
    "memory of devices": ("open('/dev/shm/a', 'w')", "raised", READ_ONLY),
    "the kernel": ("open('/proc/sys/kernel/core_pattern', 'w')", "raised", READ_ONLY),
    "a disk": ("with open('a', 'wb') as f:\n  while True: f.write(bytes(10**6))", "raised", "File too large"),
    "many disks": (
        "for i in range(99):\n  with open(str(i), 'wb') as f: f.write(bytes(9 * 10**6))",
        "raised",
        "No space left on device",
    ),
    "open files": ("found = []\nwhile True: found.append(open('/dev/null'))", "raised", "Too many open files"),
    "another root": ("import ctypes; c = ctypes.CDLL(None); assert c.unshare(0x10000000) == 0", "raised", "Assertion"),
    "an address": ("import ctypes; ctypes.string_at(0)", "died", ""),
    "a deep stack": (
        "import sys; sys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(self): return repr([self])\nrepr(A())",
        *(("died", "") if sys.version_info < (3, 12) else ("raised", "RecursionError")),  # which bounds C's stack
    ),
    "an error": ("1 / 0", "raised", "ZeroDivisionError: division by zero"),
    "no Python": ("def", "raised", "SyntaxError: invalid syntax"),
    "a status": ("import sys; sys.exit(3)", "raised", ""),
}


def below(process=None):
    return {p.pid for p in (process or psutil.Process()).children(recursive=True)}


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_code_is_held_back_and_leaves_nothing(what, port):
    code, reason, told = HOSTILE[what]
    before = below()
    begin = time.monotonic()
    ran = run_python(code.replace("PORT", str(port)), seconds=3 if reason == "time" else 30)
    assert (ran.reason, bool(ran)) == (reason, False), ran
    assert told in ran.stderr
    assert len(ran.stdout) <= 2**16 and len(ran.stderr) <= 2**16
    assert time.monotonic() - begin < (25 if reason == "time" else 35)
    assert below() <= before


def test_what_is_well_is_as_it_would_be_elsewhere():
    ran = patient("import sys, math\nprint(math.tau, sys.argv, input)\nprint('é', file=sys.stderr)")
    assert ran
    assert ran.stdout == "6.283185307179586 ['<code>'] <built-in function input>\n"
    assert ran.stderr == "é\n" and ran.status == 0
    assert patient("import threading as t; a = t.Thread(target=print, args=[1]); a.start(); a.join()").stdout == "1\n"
    assert patient("open('a', 'w').write('b'); print(open('/tmp/a').read())").stdout == "b\n"
    assert patient("import os; print(os.listdir('/tmp'))").stdout == "[]\n"  # nothing of a call before
    assert patient("import sys; print(sys.stdin.read())").stdout == "\n"
    assert patient("").reason == ""
    assert patient("print(1)" + " " * 10**6 + "\nprint(2)").stdout == "1\n2\n"  # more than a pipe holds
    assert patient("import sys; sys.exit(3)").status == 3


def test_an_error_is_told_with_the_lines_of_the_code():
    ran = patient("def f():\n    return 1 / 0\n\nf()")
    assert ran.stderr.splitlines()[:5] == [
        "Traceback (most recent call last):",
        '  File "<code>", line 4, in <module>',
        "    f()",
        '  File "<code>", line 2, in f',
        "    return 1 / 0",
    ]


def test_neither_the_environment_nor_files_of_the_run_are_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "12345")
    (tmp_path / "data.jsonl").write_text("secret")
    ran = patient(
        f"import os\nprint(os.environ.get('SECRET'), os.path.exists('{tmp_path}'), os.path.exists('{Path.cwd()}'))\n"
        "found = [open(f'/proc/{p}/environ').read() for p in os.listdir('/proc') if p.isdigit()]\n"
        "print(len(found), any('12345' in e for e in found))\n"
        "print(sorted(os.listdir('/')))"
    )
    assert ran.stdout.startswith("None False False\n2 False\n"), ran
    assert "etc" not in ran.stdout and "home" not in ran.stdout


def test_it_cannot_end_who_runs_it():
    ran = patient("import os\nfor pid in (os.getppid(), 1, -1, 0): \n  try: os.kill(pid, 9)\n  except OSError: pass")
    assert ran.reason in ("", "died")
    assert patient("import shutil; shutil.rmtree('/tmp', ignore_errors=True); print('gone')").stdout == "gone\n"
    assert patient("print('as before')").stdout == "as before\n"


def test_limits_are_those_that_are_given(tmp_path):
    (tmp_path / "tables.py").write_text("three = 3")
    assert run_python("bytearray(10**9)", memory=2 * 10**9, seconds=60)
    assert run_python("bytearray(10**9)", memory=10**9, seconds=60).reason == "memory"
    assert len(run_python("print('x' * 10**6)", output=2 * 10**6, seconds=60).stdout) == 10**6 + 1
    assert patient("print('é' * 10)", output=5).stdout == "éé\N{REPLACEMENT CHARACTER}"
    assert run_python("with open('a', 'wb') as f: f.write(bytes(10**8))", disk=2 * 10**8, seconds=60)
    assert patient("import tables; print(tables.three)", modules=[str(tmp_path)]).stdout == "3\n"
    assert run_python("import tables").reason == "raised"
    begin = time.monotonic()
    assert run_python("while True: pass", seconds=0.5).reason == "time"
    assert time.monotonic() - begin < 20


def test_many_run_side_by_side():
    found = {}

    def ran(i):
        found[i] = run_python(f"import time; time.sleep(1); print({i})", seconds=60).stdout

    threads = [threading.Thread(target=ran, args=[i]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: f"{i}\n" for i in range(8)}


def test_it_ends_with_who_runs_it(tmp_path):
    """Also where that is killed."""
    code = "from msrl_graph.tools import run_python; run_python('import time; time.sleep(600)', seconds=600)"
    runner = subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 60
    started = set()
    while not started:  # processes that the sandbox was tried with have ended after a second
        assert time.monotonic() < until and runner.poll() is None
        time.sleep(0.05)
        children = psutil.Process(runner.pid).children(recursive=True)
        started = {p.pid for p in children if time.time() - p.create_time() > 1}
    runner.kill()
    runner.wait()
    until = time.monotonic() + 10
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in started):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def forgotten():
    """What was found out of this system, before the test and after it."""
    yield
    sandbox.unavailable_reason.cache_clear()
    sandbox._bubblewrap.cache_clear()


def test_where_it_cannot_be_closed_nothing_is_run(tmp_path, monkeypatch, forgotten):
    sandbox.unavailable_reason.cache_clear()
    sandbox._bubblewrap.cache_clear()
    weak = tmp_path / "bwrap"
    weak.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1\n")
    weak.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(SandboxUnavailable, match="fails on this system: bwrap: No permissions to create new namespace"):
        run_python("print(1)")
