"""A temporary folder's keeper: whoever is killed, it removes the folder and ends the run's processes; others it leaves
alone."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from msrl_graph.runtime.process import processes
from msrl_graph.runtime.process.processes import MARK, Temporary, is_alive

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
# Makes a folder and two processes of a run, one in a session of its own and one with the mark, says who they are, and
# waits.
OWNER = """
import os, subprocess, sys, time
from msrl_graph.runtime.process.processes import MARK, Temporary
kept = Temporary()
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
leader = subprocess.Popen(sleep, start_new_session=True)
kept.end_session_too(leader.pid)
marked = subprocess.Popen(sleep, env={**os.environ, MARK: str(kept.folder)}, start_new_session=True)
(kept.folder / "file").write_text("x")
print(kept.folder, kept.keeper, leader.pid, marked.pid, flush=True)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def owner():
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    folder, *pids = process.stdout.readline().split()
    return process, Path(folder), [int(p) for p in pids]


def test_the_folder_is_there_until_it_is_closed(here):
    with closing(Temporary()) as kept:
        assert kept.folder.parent == here and kept.folder.is_dir()
        keeper = kept.keeper
        bystander = subprocess.Popen(SLEEP)
        process = subprocess.Popen(SLEEP, env={**os.environ, MARK: str(kept.folder)})
    assert not kept.folder.exists() and not is_alive(keeper)
    assert process.wait(10) == -signal.SIGKILL and bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_an_owner_that_is_killed_leaves_nothing():
    process, folder, (keeper, leader, marked) = owner()
    assert all(map(is_alive, (keeper, leader, marked))) and (folder / "file").exists()
    with process:
        process.kill()
    assert until(lambda: not folder.exists() and not any(map(is_alive, (keeper, leader, marked))))


def test_a_keeper_that_is_killed_is_stood_in_for():
    kept = Temporary()
    process = subprocess.Popen(SLEEP, start_new_session=True)
    os.kill(kept.keeper, signal.SIGKILL)
    assert until(lambda: not is_alive(kept.keeper))
    kept.end_session_too(process.pid)
    kept.close()
    assert not is_alive(process.pid) and not kept.folder.exists()
    process.wait()


def test_shared_memory_of_what_is_killed_is_gone():
    made = """
import time
from multiprocessing.shared_memory import SharedMemory
kept = [SharedMemory(create=True, size=1000) for _ in range(20)]
print(*(k.name for k in kept), flush=True)
time.sleep(300)
"""
    kept = Temporary()
    process = subprocess.Popen(
        [sys.executable, "-c", made],
        env={**os.environ, MARK: str(kept.folder)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        files = [Path("/dev/shm") / name for name in process.stdout.readline().split()]
        assert len(files) == 20 and all(f.exists() for f in files)
        kept.end_session_too(process.pid)
        kept.close()
        left = [f for f in files if f.exists()]
        for file in left:
            file.unlink()
    assert not left and process.returncode == -signal.SIGKILL


def test_shared_memory_that_is_named_after_the_folder_is_gone():
    """Ranks that are killed before all have it open leave it: what one makes for others, no tracker knows of."""
    kept = Temporary()
    mine, other = (Path("/dev/shm") / name for name in (f"{kept.folder.name}-1", f"{kept.folder.name}x-1"))
    for file in (mine, other):
        file.write_bytes(b"x")
    kept.close()
    left = [file for file in (mine, other) if file.exists()]
    for file in left:
        file.unlink()
    assert left == [other]


def test_what_terminals_send_does_not_reach_the_keeper():
    with closing(Temporary()) as kept:
        assert os.getsid(kept.keeper) != os.getsid(0) and os.getpgid(kept.keeper) != os.getpgid(0)


def test_what_was_killed_altogether_is_swept_up_and_what_is_held_is_not():
    process, folder, (keeper, leader, marked) = owner()
    with process:
        for pid in (keeper, process.pid):
            os.kill(pid, signal.SIGKILL)
    assert until(lambda: not is_alive(keeper))
    os.utime(folder, (0, 0))
    with closing(Temporary()) as kept:
        os.utime(kept.folder, (0, 0))
        processes.sweep()
        assert not folder.exists() and kept.folder.exists()
        assert until(lambda: not is_alive(marked))
    psutil.Process(leader).kill()  # of a session that nobody knows any more


def test_where_no_folder_can_be_made_it_is_told(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))  # as a keeper ends that meets a full disk
    with pytest.raises(OSError, match="no temporary folder could be made in "), closing(Temporary()):
        pass


def test_a_keeper_that_is_stopped_is_not_waited_for():
    """Neither at the end nor while it is told something: `close` does its work."""
    kept = Temporary()
    process = subprocess.Popen(SLEEP, start_new_session=True)
    os.kill(kept.keeper, signal.SIGSTOP)
    kept.end_session_too(process.pid)
    begin = time.monotonic()
    keeper = kept.keeper
    kept.close()
    assert time.monotonic() - begin < 10
    assert not is_alive(process.pid) and not kept.folder.exists() and not is_alive(keeper)
    process.wait()


def test_a_keeper_is_killed_as_it_takes_over_and_the_next_one_does_its_work(monkeypatch):
    """Meanwhile this process takes what a keeper is told, and does its work if the run ends then."""
    for comes in (True, False):
        kept = Temporary()
        process = subprocess.Popen(SLEEP, start_new_session=True)
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", shutil.which("false"))
            os.kill(kept.keeper, signal.SIGKILL)
            assert until(lambda kept=kept: not is_alive(kept.keeper))
            assert kept.replace_keeper(0.1, 9.0) == kept.replace_keeper(0.1, 9.0) == "" and not kept.keeper
            kept.end_session_too(process.pid)
        assert not comes or kept.replace_keeper(0.1, 9.0) == "the keeper died; another one was started"
        assert is_alive(kept.keeper) == comes and is_alive(process.pid)
        kept.close()
        assert not is_alive(process.pid) and not kept.folder.exists() and not is_alive(kept.keeper)
        assert kept.replace_keeper(0.1, 9.0) == ""  # after the end there is nothing to keep
        process.wait()


@pytest.mark.parametrize("name", ["KILL", "STOP"])
def test_a_keeper_that_is_killed_or_stopped_as_it_begins_is_replaced(name, tmp_path, monkeypatch):
    """The first one of a run, and one that takes over."""
    met = tmp_path / "met"
    (once := tmp_path / "python").write_text(
        f'#!/bin/sh\n[ -e {met} ] && exec {sys.executable} "$@"\ntouch {met}\nkill -{name} $$\n'
    )
    once.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(once))
    with closing(Temporary()) as kept:
        assert met.exists() and is_alive(kept.keeper)
        met.unlink()
        os.kill(kept.keeper, signal.SIGKILL)
        assert until(lambda: not is_alive(kept.keeper))
        assert kept.replace_keeper(0.1, 9.0) == "" and met.exists() and not kept.keeper
        assert kept.replace_keeper(0.1, 9.0) == "the keeper died; another one was started"


def test_a_keeper_that_was_given_up_as_it_took_over_leaves_the_run_alone():
    """Its pipe ends before it hears anything: its maker took it for dead."""
    with closing(Temporary()) as kept:
        marked = subprocess.Popen(SLEEP, env=os.environ | {MARK: str(kept.folder)})
        command = [sys.executable, "-P", "-m", processes.PROGRAM, str(kept.folder)]
        said, _ = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE).communicate()
        other, _, folder = said.decode().strip().partition(" ")
        assert folder == str(kept.folder) and until(lambda: not is_alive(int(other)))
        assert kept.folder.exists() and is_alive(marked.pid)
    assert not is_alive(marked.pid)  # its own keeper does not
    marked.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_keeper_that_is_gone_is_replaced_and_the_next_one_ends_the_run(number):
    script = OWNER.replace("time.sleep(300)\n", "pass\n").replace(
        "print(kept.folder", "import signal, select\nprint(kept.folder"
    )
    script += """
while True:
    time.sleep(0.1)
    if told := kept.replace_keeper(0.1, 0.5):
        print(told, kept.keeper, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    folder, *pids = process.stdout.readline().split()
    keeper, leader, marked = map(int, pids)
    os.kill(keeper, number)
    told = process.stdout.readline()
    what = "died" if number == signal.SIGKILL else "has not moved for 0 s (stopped); killed"
    assert told.startswith(f"the keeper {what}; another one was started "), told
    other = int(told.split()[-1])
    assert not is_alive(keeper) and is_alive(other) and all(map(is_alive, (leader, marked))) and Path(folder).is_dir()
    os.utime(folder, (0, 0))
    processes.sweep()  # of another run
    assert Path(folder).is_dir() and is_alive(marked)
    with process:
        process.kill()
    assert until(lambda: not Path(folder).exists() and not any(map(is_alive, (other, leader, marked))))


@pytest.mark.parametrize("owned", [True, False])
def test_a_preload_servers_forks_end_with_the_folder_and_it_does_without_its_owner(owned):
    code = """
import os, time
if not os.fork():
    print(os.getpid(), flush=True)
time.sleep(300)
"""
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    fork = int(server.stdout.readline())
    kept = Temporary()
    kept.end_session_too(0, server.pid)
    if not owned:  # as if another process had started it, which is dead
        dead = subprocess.Popen(["true"])
        dead.wait()
        kept._sessions = kept._sessions._replace(owner=dead.pid)
        kept._send_sessions()
    kept.close()
    assert not is_alive(fork) and is_alive(server.pid) == owned
    server.kill()
    server.communicate()


def test_a_preload_server_without_its_owner_has_time_to_remove_its_folder(here):
    code = """
import os, sys, time
print(os.getpid(), flush=True)
sys.stdin.read()
time.sleep(1)
os.rmdir(sys.argv[1])
"""
    (folder := here / "server").mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen([sys.executable, "-c", code, folder], text=True, start_new_session=True, **pipes)
    server.stdout.readline()
    kept = Temporary()
    kept.end_session_too(0, server.pid)
    dead = subprocess.Popen(["true"])
    dead.wait()
    kept._sessions = kept._sessions._replace(owner=dead.pid)
    kept._send_sessions()
    server.stdin.close()
    kept.close()
    assert not folder.exists() and server.wait(10) == 0
