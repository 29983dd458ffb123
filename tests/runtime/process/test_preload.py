"""Workers that are forked from a process which has imported what they need: they are what Ray would have started."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import stranger

from msrl_graph.runtime.process import preload

# What Ray's two files do, as far as it is seen here.
WORKER = """
import json, os, sys
found = dict(arguments=sys.argv[1:], parent=os.getppid(), leads=os.getpgid(0) == os.getpid(),
    session=os.getsid(0), name=__name__, folder=os.getcwd(), nice=os.nice(0),
    environment=dict(os.environ), loaded="colorsys" in sys.modules, path=sys.path,
    oom=open("/proc/self/oom_score_adj").read())
print(json.dumps(found), flush=True)
sys.stdin.read()
"""
SETUP = """
import os, sys
os.environ["SET_UP"] = "by Ray"
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "default_worker.py").write_text(WORKER)
    (tmp_path / "setup_worker.py").write_text(SETUP)
    return tmp_path


def started(*modules, **environment):
    return preload.PreloadServer(modules, environment, "server-", "MSRL_MARK")


@pytest.fixture
def server(folder):
    server = started("colorsys", "there.is.no.such.module", MSRL_TEST="1")
    yield server
    server.close()
    assert not psutil.pid_exists(server.address.session)
    assert not list((folder / "temporary").iterdir())


def launched(folder, *arguments, nice=0, **variables):
    """What Ray starts, with what its worker printed first."""
    worker = subprocess.Popen(
        [sys.executable, preload.__file__, str(folder / "default_worker.py"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, preload.SOCKET: next(map(str, folder.glob("temporary/*/preload")), ""), **variables},
        preexec_fn=lambda: os.nice(nice),
    )
    return worker, json.loads(worker.stdout.readline())


def test_a_forked_worker_is_what_ray_asked_for(folder, server):
    ray = ("--language=PYTHON", "--serialized-runtime-env-context={}")
    for i in range(3):
        worker, found = launched(folder, "--node-id=a b", *ray, f"--token={i}", nice=3, OWN="x", PYTHONHASHSEED="0")
        assert found["parent"] == server.address.session and found["loaded"]
        assert found["leads"] and found["session"] == server.address.session
        assert found["arguments"] == ["--node-id=a b", f"--token={i}"]
        assert found["name"] == "__main__" and found["folder"] == str(folder)
        assert found["nice"] == os.nice(0) + 3
        assert found["oom"] == Path("/proc/self/oom_score_adj").read_text()
        assert found["environment"]["OWN"] == "x" and "MSRL_TEST" not in found["environment"]
        assert Path(preload.__file__).parent not in map(Path, found["path"])
        assert worker.poll() is None
        worker.communicate(timeout=20)  # its standard input is closed: the worker ends, and with it what Ray started
        assert worker.returncode == 0


def test_the_end_of_a_killed_worker_is_seen(folder, server):
    worker, _ = launched(folder)
    (forked,) = psutil.Process(server.address.session).children()
    forked.kill()
    worker.communicate(timeout=20)
    assert worker.returncode == 0
    forked.wait(20)  # no zombie stays
    assert psutil.Process(server.address.session).children() == []


@pytest.mark.parametrize(
    "context",
    [{"py_executable": "/usr/bin/another"}, {"command_prefix": ["nice"]}, {"override_worker_entrypoint": "/x.py"}],
)
def test_a_worker_with_an_environment_of_its_own_is_not_forked(folder, server, context):
    worker, found = launched(folder, f"--serialized-runtime-env-context={json.dumps(context)}")
    assert found["environment"]["SET_UP"] == "by Ray"
    worker.communicate()


def test_the_interpreter_of_this_process_is_no_other(folder, server):
    context = {"py_executable": sys.executable, "env_vars": {"MORE": "y"}}
    worker, found = launched(folder, f"--serialized-runtime-env-context={json.dumps(context)}")
    assert found["parent"] == server.address.session and found["environment"]["MORE"] == "y"
    worker.communicate()


def test_without_a_server_workers_start_as_ray_starts_them(folder):
    worker, found = launched(folder, "--language=PYTHON", "--token=1")
    assert found["environment"]["SET_UP"] == "by Ray" and not found["loaded"]
    assert found["arguments"] == ["--language=PYTHON", "--token=1"]
    worker.communicate()


def test_a_server_that_is_killed_while_workers_wait_costs_nothing(folder):
    (folder / "slow.py").write_text("import time\ntime.sleep(60)")
    server = started("slow", PYTHONPATH=str(folder))
    ask = [sys.executable, preload.__file__, str(folder / "default_worker.py")]
    variables = {**os.environ, preload.SOCKET: server.address.socket}
    worker = subprocess.Popen(ask, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
    time.sleep(0.5)
    os.kill(server.address.session, signal.SIGKILL)
    said, _ = worker.communicate(timeout=30)
    assert json.loads(said)["environment"]["SET_UP"] == "by Ray"
    server.load(["colorsys"])  # is no error
    server.close()
    server.close()
    assert not list((folder / "temporary").iterdir())


def test_a_stranger_that_says_nothing_keeps_no_worker_waiting_for_long(folder, server):
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as rubbish:
        silent.connect(server.address.socket)
        rubbish.connect(server.address.socket)
        socket.send_fds(rubbish, [b" "], [0])
        rubbish.sendall(b"{")
        rubbish.shutdown(socket.SHUT_WR)
        worker, found = launched(folder)
        assert found["parent"] == server.address.session
        worker.communicate()


def test_a_launcher_that_cannot_read_its_own_score_is_served_all_the_same(folder, server):
    """As on a system without /proc."""
    arguments = [preload.__file__, str(folder / "default_worker.py")]
    code = f"import runpy, sys; sys.path.insert(0, ''); sys.argv = {arguments!r}; "
    code += "names = runpy.run_path(sys.argv[0]); names['launch'].__globals__['_OOM'] = '/there/is/none'; "
    code += "names['launch'](sys.argv[1:])"
    variables = {**os.environ, preload.SOCKET: server.address.socket}
    worker = subprocess.run(
        [sys.executable, "-c", code], input="", capture_output=True, text=True, env=variables, timeout=30
    )
    assert json.loads(worker.stdout)["parent"] == server.address.session, worker.stderr


def test_a_worker_whose_folder_is_gone_starts_as_ray_starts_it(folder, server):
    """The forked process ends before it answers, and no second server comes of it."""
    gone = folder / "gone"
    gone.mkdir()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server.address.socket)
        with (folder / "errors").open("w") as errors:
            socket.send_fds(connection, [b" "], [errors.fileno()] * 3)
        request = {"arguments": ["x"], "environment": {}, "folder": str(gone / "none"), "niceness": 0, "oom": ""}
        connection.sendall(json.dumps(request).encode())
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    worker, found = launched(folder)
    assert found["parent"] == server.address.session
    worker.communicate()


def test_modules_that_are_named_later_are_loaded_before_the_next_fork(folder):
    """Though the launcher has come while the server was importing the first ones."""
    (folder / "slow.py").write_text("import time\ntime.sleep(3)")
    server = started("slow", PYTHONPATH=str(folder))
    ask = [sys.executable, preload.__file__, str(folder / "default_worker.py")]
    variables = {**os.environ, preload.SOCKET: server.address.socket}
    worker = subprocess.Popen(ask, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
    time.sleep(0.5)
    server.load(["colorsys"])
    found = json.loads(worker.stdout.readline())
    assert found["parent"] == server.address.session and found["loaded"]
    worker.communicate(timeout=20)
    server.close()


def test_what_a_module_writes_as_it_is_imported_goes_with_the_server(folder):
    (folder / "writes.py").write_text("import tempfile; tempfile.mkdtemp()")
    server = started("writes", "colorsys", PYTHONPATH=str(folder))
    worker, found = launched(folder)
    assert found["loaded"] and found["environment"]["TMPDIR"] == str(folder / "temporary")
    worker.communicate()
    assert [path.name for path in server.folder.iterdir()] == ["preload"]
    assert list((folder / "temporary").iterdir()) == [server.folder]
    server.close()


OWNER = """
import sys, time
from msrl_graph.runtime.process.preload import PreloadServer
server = PreloadServer(sys.argv[1:], {}, "server-", "MSRL_MARK")
print(server.address.session, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("module", ["slow", "colorsys"])
def test_a_server_whose_parent_is_killed_ends_at_once_even_during_an_import(folder, module):
    (folder / "slow.py").write_text("import time\nwhile True:\n    time.sleep(60)")
    command = [sys.executable, "-c", OWNER, module]
    variables = {**os.environ, "PYTHONPATH": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as owner:
        server = psutil.Process(int(owner.stdout.readline()))
        assert server.environ()["MSRL_MARK"] == server.environ()["TMPDIR"]  # a sweep finds its forks by it
        time.sleep(0.5)
        owner.kill()
    psutil.wait_procs([server], timeout=20)
    assert not server.is_running() and not list((folder / "temporary").iterdir())


@pytest.mark.parametrize("module", ["slow", "colorsys"])
def test_a_server_whose_parent_was_killed_before_it_began_ends_at_once(tmp_path, module):
    """Modules that it is to import are still to be read then."""
    (folder := tmp_path / "folder").mkdir()
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(100)")
    ours, control = socket.socketpair()
    with ours:
        ours.sendall(f"{module}\n".encode())
    with control, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "preload"))
        process = preload.start_server(listening, control, folder, {**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        assert process.wait(20) == 0 and not folder.exists()
    finally:
        process.kill()
        process.wait()


def test_no_server_starts_where_its_socket_has_no_room(folder, monkeypatch):
    deep = folder / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(OSError):
        started()
    assert not list(deep.iterdir())


SERVES = """
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
connection = server.accept()[0]
connection.settimeout(20)
print(len(connection.recv(1 << 16)), flush=True)
"""
ASKS = """
line = socket.socket(socket.AF_UNIX)
line.settimeout(20)
line.connect(sys.argv[1])
try:
    socket.send_fds(line, [b" "], [1, 1, 1])
    line.sendall(sys.argv[2].encode())
    line.shutdown(socket.SHUT_WR)
    print(line.recv(1))
except OSError:
    print(b"")
"""


@pytest.fixture
def public(monkeypatch):
    """A folder for temporary files that other users can enter, as /tmp is."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o1777)
        monkeypatch.setattr("tempfile.tempdir", name)
        yield Path(name)


@stranger.needed
def test_a_server_of_another_user_is_told_nothing(folder, public):
    """It may stand where the server of the run was: a worker's environment has the run's secrets."""
    path = public / "preload"
    command = [sys.executable, "-I", "-S", "-c", stranger.BECOME + SERVES, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as false:
        assert false.stdout.readline() == "ready\n"
        worker, found = launched(folder, **{preload.SOCKET: str(path)})
        assert false.stdout.readline() == "0\n"
    assert found["environment"]["SET_UP"] == "by Ray"
    worker.communicate()


@stranger.needed
def test_a_launcher_of_another_user_is_not_served(folder, public):
    """Even where the folder lets it in, by whatever mistake."""
    server = started()
    try:
        server.folder.chmod(0o755)
        Path(server.address.socket).chmod(0o777)
        (public / "default_worker.py").write_text("open('harm', 'w').close()")
        request = {"arguments": [str(public / "default_worker.py")], "environment": {}, "folder": str(public)}
        asked = json.dumps({**request, "niceness": 0, "oom": ""})
        assert stranger.act(ASKS, server.address.socket, asked).strip() == "b''"
        assert psutil.Process(server.address.session).children() == []
        assert not (public / "harm").exists()
    finally:
        server.close()
