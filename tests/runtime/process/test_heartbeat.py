"""Processes that hang: whoever does not move is killed after its limit, and it is told why; others are left alone."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

from msrl_graph.runtime.process import heartbeat
from msrl_graph.runtime.process.heartbeat import HeartbeatWatch, Limits, bytes_moved, killed_processes
from msrl_graph.runtime.process.processes import is_stopped

LIMITS = Limits(1.0, 2.0)
# A process with a heart that looks at nobody, and does something.
BEATS = """
import ctypes, sys, time
from msrl_graph.runtime.process.heartbeat import Heart, Limits
Heart(sys.argv[1], sys.argv[2], Limits(1e6, 1e6))
print("ready", flush=True)
{does}
"""
WAITS = "time.sleep(300)"
HOLDS_THE_LOCK = "ctypes.PyDLL(None).sleep(300)"  # as C code does that never returns
LOOPS = "while True: pass"
SPINS = "sum(range(10**15))"  # in C, without an end
WRITES = """
sys.setswitchinterval(1e6)  # as C code does that writes a large file: the heart's thread has no turn
libc = ctypes.PyDLL(None)
data = ctypes.c_char_p(b"x" * (1 << 20))
file = open(sys.argv[1] + "/large", "wb")
descriptor = file.fileno()
while True:
    libc.lseek(descriptor, 0, 0)
    libc.write(descriptor, data, 1 << 20)
    libc.usleep(1000)
"""


@contextmanager
def beating(folder, **does):
    """Processes with hearts, by name."""
    made = {
        name: subprocess.Popen(
            [sys.executable, "-c", BEATS.format(does=what), str(folder), name], stdout=subprocess.PIPE, text=True
        )
        for name, what in does.items()
    }
    try:
        for process in made.values():
            assert process.stdout.readline() == "ready\n"
        yield made
    finally:
        for process in made.values():
            process.kill()
            process.wait()
            process.stdout.close()


def look(watch, seconds, pause=0.25):
    found = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(pause)
        found += watch.look(pause)
    return found


def test_who_is_stopped_or_holds_the_interpreter_is_killed_and_who_moves_is_not(tmp_path):
    with beating(tmp_path, stopped=WAITS, holds=HOLDS_THE_LOCK, waits=WAITS, loops=LOOPS) as made:
        os.kill(made["stopped"].pid, signal.SIGSTOP)
        told = look(HeartbeatWatch(tmp_path, LIMITS), 4.5)
        assert made["stopped"].wait(5) == made["holds"].wait(5) == -signal.SIGKILL
        assert made["waits"].poll() is None and made["loops"].poll() is None
        assert sorted(told) == [
            "holds has not moved for 2 s (none of its Python code runs); killed",
            "stopped has not moved for 1 s (stopped); killed",
        ]
        assert killed_processes(tmp_path)[made["stopped"].pid] == (
            "stopped",
            "stopped has not moved for 1 s (stopped); killed",
        )


def test_who_writes_moves_though_no_python_code_runs(tmp_path):
    with beating(tmp_path, writes=WRITES) as made:
        before = bytes_moved(tmp_path)
        assert look(HeartbeatWatch(tmp_path, LIMITS), 3.5) == [] and made["writes"].poll() is None
        assert bytes_moved(tmp_path) > before + heartbeat.RATE


def test_hearts_look_at_each_other_and_one_tells(tmp_path):
    looks = BEATS.replace("Limits(1e6, 1e6)", "Limits(1.0, 2.0)")
    with beating(tmp_path, **{"rank 0": WAITS}) as made:
        others = [
            subprocess.Popen(
                [sys.executable, "-c", looks.format(does=WAITS), str(tmp_path), f"rank {n}"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for n in (1, 2)
        ]
        for other in others:
            other.stdout.readline()
        os.kill(made["rank 0"].pid, signal.SIGSTOP)
        assert made["rank 0"].wait(10) == -signal.SIGKILL
        assert [name for name, _ in killed_processes(tmp_path).values()] == ["rank 0"]
        # One that takes its place has a heart of its own, and the old one's death is not held against it.
        with beating(tmp_path, **{"rank 0": WAITS}) as again:
            time.sleep(2)
            assert again["rank 0"].poll() is None
        for other in others:
            assert other.poll() is None
            other.kill()
            other.wait()
            other.stdout.close()


def test_a_watch_that_stood_still_itself_kills_nobody(tmp_path):
    """As on a machine that was suspended: only looks of its own count, and they are few."""
    with beating(tmp_path, waits=WAITS) as made:
        watch = HeartbeatWatch(tmp_path, LIMITS)
        watch.look(0.25)
        os.kill(made["waits"].pid, signal.SIGSTOP)
        time.sleep(3)
        assert watch.look(0.25) == [] and watch.look(0.25) == []
        os.kill(made["waits"].pid, signal.SIGCONT)
        time.sleep(1.5)
        assert watch.look(0.25) == [] and made["waits"].poll() is None


def test_processes_without_a_heart_are_watched_for_being_stopped(tmp_path):
    """Ray's servers, and what ranks start: of others' programs nobody knows what stopping them is good for."""
    parent = f"""
import subprocess, sys, time
from msrl_graph.runtime.process.heartbeat import Heart, Limits
Heart({str(tmp_path)!r}, "rank 1", Limits(1e6, 1e6))
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
nest = subprocess.Popen([*sleep, "{heartbeat.OURS.decode()}.functions.nest"])
other = subprocess.Popen(sleep)
print(nest.pid, other.pid, flush=True)
time.sleep(300)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with process:
        nest, other = map(int, process.stdout.readline().split())
        for pid in (nest, other, server.pid):
            os.kill(pid, signal.SIGSTOP)
        told = look(HeartbeatWatch(tmp_path, LIMITS, lambda: {"Ray's raylet": server.pid}), 2)
        assert server.wait(5) == -signal.SIGKILL
        assert sorted(told) == [
            "Ray's raylet has not moved for 1 s (stopped); killed",
            "a process of rank 1 (nest) has not moved for 1 s (stopped); killed",
        ]
        assert is_stopped(other) and not is_stopped(nest)
        os.kill(other, signal.SIGKILL)
        process.kill()


def test_a_limit_passes_before_the_docks_deadline():
    for deadline in (60.0, 600.0, 36000.0):
        limits = Limits.for_deadline(deadline)
        assert limits.stopped <= 60 and limits.stopped < limits.silent < deadline
    assert Limits.for_deadline(3.0) == (5.0, 40.0)  # a wait for rows may be shorter than loading a library takes


def test_who_gets_no_processor_is_not_silent(tmp_path):
    """As on a machine with far more to do than it can: what it computed counts, not how long it was."""
    with beating(tmp_path, holds=SPINS, starved=SPINS) as made:
        pid = made["starved"].pid
        slow = f"import os, signal, time\nwhile True:\n    os.kill({pid}, 19)\n    time.sleep(0.19)\n"
        slow += f"    os.kill({pid}, 18)\n    time.sleep(0.01)"
        with subprocess.Popen([sys.executable, "-c", slow]) as holding:
            watch = HeartbeatWatch(tmp_path, Limits(3600, 1.0))
            told = []
            until = time.monotonic() + 60
            while not told and time.monotonic() < until:
                told = look(watch, 0.5)
            holding.kill()
        os.kill(pid, signal.SIGCONT)
        assert [words.split()[0] for words in told] == ["holds"]
        assert made["starved"].poll() is None
