"""What another user of the machine puts where a run looks for its own files: it is refused or left alone, and never
followed, unpickled or removed."""

import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from pathlib import Path

import numpy as np
import pytest
import stranger
from folders import ROOT
from place import EXAMPLE, SMALL, Place
from saved_checkpoints import lines, save

from msrl_graph import Fault, compile
from msrl_graph.builder.pickled_functions import ship
from msrl_graph.cli import run_main
from msrl_graph.files import private, urls
from msrl_graph.ir.run_options import RunOptions
from msrl_graph.runtime.data.columns import ColumnData, ColumnRows
from msrl_graph.runtime.dock.segments import LOCK, Room, Segments
from msrl_graph.runtime.dock.warehouse import Warehouse
from msrl_graph.runtime.driver import supervisor
from msrl_graph.runtime.driver.run_folder import check_links, check_own
from msrl_graph.runtime.driver.supervisor import PROGRAM
from msrl_graph.runtime.process import processes
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import RunError

SHARED = Path("/dev/shm")
TASK = Task("train", 3, 4)
MAKES = "os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], 0o777)"
LINKS = "os.symlink(sys.argv[1], sys.argv[2])"


class Harm:
    """What runs as soon as somebody unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def public(monkeypatch, tmp_path_factory):
    """A folder for temporary files that everybody can write to, as /tmp is."""
    tmp_path_factory.getbasetemp()  # is made now, and not below
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(folder)


@pytest.fixture
def name():
    """A room's name, of which nothing is left."""
    found = f"msrl-run-test{uuid.uuid4().hex[:4]}-rows-0-{uuid.uuid4().hex}"
    yield found
    for path in SHARED.glob(f"{found[:17]}*"):
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def old(path, seconds=3600):
    os.utime(path, (path.lstat().st_mtime - seconds,) * 2, follow_symlinks=False)


@stranger.needed
def test_a_room_that_somebody_else_made_is_refused(name):
    stranger.act(MAKES, SHARED / name)
    with pytest.raises(RunError, match=rf"{name}, belongs to another user \(id 65534\)"):
        Room.create(name, 1)
    assert not list((SHARED / name).iterdir())


@stranger.needed
def test_a_room_that_is_a_link_is_refused(name, tmp_path):
    stranger.act(LINKS, tmp_path, SHARED / name)
    with pytest.raises(RunError, match=f"{name}, is a link"):
        Room.create(name, 1)
    assert not list(tmp_path.iterdir())


def test_a_room_that_others_can_write_to_is_refused(name, tmp_path):
    (SHARED / name).mkdir()
    (SHARED / name).chmod(0o770)
    with pytest.raises(RunError, match=f"{name}, is open to other users"):
        Room.create(name, 1)
    room = Room(SHARED / name)
    with pytest.raises(RunError, match=f"{name}, is open to other users"):
        room.join()


def test_a_room_is_for_its_user_alone_whatever_the_umask(name):
    before = os.umask(0)
    try:
        room = Room.create(name, 1)
    finally:
        os.umask(before)
    Segments(room).write(TASK.key, "s", "node", {"c": ColumnRows(np.arange(1), ColumnData(np.arange(1)))})
    assert stat.S_IMODE(room.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) & 0o077 for p in room.path.rglob("*") if p.is_file()} == {0}
    os.close(room._lock_fd)


@pytest.mark.parametrize("where", ["rows", "task", "decided"])
def test_rows_and_notes_hold_no_pickle(where, tmp_path):
    """A pickle at each place that the dock reads is told of as damaged, and not loaded."""
    files = Segments(Room(tmp_path))
    harmed = tmp_path / "harmed"
    files.write(TASK.key, "s", "node", {"c": ColumnRows(np.arange(1), ColumnData(np.arange(1)))})
    files.write_note(TASK.key, "task", TASK)
    data = pickle.dumps(Harm(harmed))
    folder = tmp_path / TASK.key.replace("/", ":")
    planted = {"rows": folder / "s", "task": folder / ".task", "decided": folder / ".n.000000"}[where]
    planted.write_bytes(len(data).to_bytes(8, "little") + data if where == "rows" else data)
    with pytest.raises(RunError, match="is damaged"):
        Warehouse(0, Segments(Room(tmp_path)), 1 << 20)
    assert not harmed.exists()


@stranger.needed
def test_a_sweep_leaves_links_and_names_of_strangers_alone(public, name):
    """Names with `*` in them matched the rows of runs that were on, and links led elsewhere."""
    live = SHARED / name
    mine = public / "mine"
    live.mkdir(mode=0o700)
    (live / "row").write_text("x")
    mine.mkdir(mode=0o700)
    (mine / "file").write_text("x")
    (mine / LOCK).write_text("")
    elsewhere = public / f"{processes.PREFIX}abcdefgh"
    stranger.act(LINKS, mine, public / f"{processes.PREFIX}{name[9:16]}*")
    stranger.act(LINKS, mine, elsewhere)
    room = SHARED / f"{name}x"
    stranger.act(LINKS, mine, room)
    stranger.act(MAKES, public / f"{processes.PREFIX}bcdefghi")
    old(mine, 7200)
    old(mine / LOCK, 7200)
    for path in public.iterdir():
        old(path)
    processes.sweep()
    made = Room.create(f"{name}y", 1)
    assert (live / "row").exists() and (mine / "file").exists()
    assert len(list(public.glob(f"{processes.PREFIX}*"))) == 3 and room.is_symlink()
    os.close(made._lock_fd)


def test_a_sweep_leaves_an_own_folder_alone_whose_name_a_run_does_not_give(public, name):
    """A person may have called it so; as a pattern the name means other folders."""
    live = SHARED / name
    live.mkdir(mode=0o700)
    for called in (f"{processes.PREFIX}{name[9:16]}*", f"{processes.PREFIX}results"):
        (public / called).mkdir(mode=0o700)
        old(public / called)
    processes.sweep()
    assert live.exists() and len(list(public.iterdir())) == 2


@stranger.needed
def test_the_end_of_a_run_removes_nothing_of_others(public):
    """They see the folder's name, and may give one that begins alike to what is theirs, or lead it elsewhere."""
    with tempfile.TemporaryDirectory() as mine:
        Path(mine, "file").write_text("x")
        kept = processes.Temporary()
        theirs, link = (SHARED / f"{kept.folder.name}-{n}" for n in ("theirs", "link"))
        stranger.act(MAKES, theirs)
        stranger.act(LINKS, mine, link)
        kept.close()
        left = theirs.is_dir(), link.is_symlink(), Path(mine, "file").exists()
        link.unlink(missing_ok=True)
        shutil.rmtree(theirs, ignore_errors=True)
    assert left == (True, True, True)


PLANTED = ("msgspec", "numpy", "psutil", "ray", "rich", "safetensors", "torch", "transformers")
PLANTS = """
for name in sys.argv[2:]:
    Path(sys.argv[1], name + ".py").write_text(f"open({str(Path(sys.argv[1], 'harmed'))!r}, 'a').write(__name__)")
"""


@stranger.needed
@pytest.mark.parametrize("program", [PROGRAM, ("-P", "-m", processes.PROGRAM)])
def test_no_module_comes_from_the_folder_in_which_a_run_is_started(public, program):
    stranger.act(PLANTS, public, *PLANTED)
    subprocess.run([sys.executable, *program, str(public)], cwd=public, stdin=subprocess.DEVNULL, capture_output=True)
    assert not (public / "harmed").exists()


# What another user finds below some paths: what can be read, written to, entered or connected to.
WALKS = """
found = []
def walk(path):
    try:
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            if os.access(path, os.W_OK):
                found.append(["written", str(path)])
            for below in list(path.iterdir()):
                found.append(["listed", str(below)])
                walk(below)
        elif stat.S_ISREG(mode):
            for way, how in ("read", os.O_RDONLY), ("written", os.O_WRONLY):
                try:
                    os.close(os.open(path, how))
                    found.append([way, str(path)])
                except OSError:
                    pass
        elif stat.S_ISSOCK(mode):
            socket.socket(socket.AF_UNIX).connect(str(path))
            found.append(["connected", str(path)])
    except OSError:
        pass
for path in sys.argv[1:]:
    walk(Path(path))
print(json.dumps(found))
"""


def opened(pids):
    """The files of /tmp and /dev/shm that processes have open or mapped, and that have a name."""
    found = set()
    for pid in pids:
        try:
            of = Path(f"/proc/{pid}")
            lines = (of / "maps").read_text().splitlines()
            named = [line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6]
            named += [str(fd.readlink()) for fd in (of / "fd").iterdir()]
        except OSError:  # it has ended
            continue
        found |= {n for n in named if n.startswith(("/tmp/", "/dev/shm/", "/var/tmp/")) and Path(n).exists()}
    return found


def secret(pid):
    """The values in a process's environment that nobody else is to know."""
    try:
        lines = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return []
    return [line.partition(b"=")[2] for line in lines if line.startswith(b"RAY_AUTH_TOKEN=")]


@pytest.mark.slow
@stranger.needed
def test_another_user_finds_nothing_of_a_run_that_is_on(public):
    """Its temporary folder, its rows, its sockets, its tokens; and modules in the folder where it was started, which
    is open to all, are not taken by any of its processes."""
    place = Place(public)
    place.temporary.chmod(0o1777)
    place.write()
    stranger.act(PLANTS, public, *PLANTED)
    command = [Path(sysconfig.get_path("scripts"), "msrl-run"), "p.rlg", *SMALL, "--out", "out", "--iterations", "500"]
    variables = {**os.environ, "TMPDIR": str(place.temporary)}
    log = public / "log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            [*command, "--watch", "--metrics-port", "0"], cwd=public, env=variables, stdout=output, stderr=output
        )
    try:
        place.wait_for_lines("out", 1)
        folders = [*place.temporary.iterdir()]  # the run's, and its preload server's
        (folder,) = (folder for folder in folders if (folder / "attempt.json").exists())
        rooms = [p for p in SHARED.iterdir() if p.name.startswith(f"{folder.name}-")]
        token = re.search(r"[?]token=(\S+)", log.read_text())[1]
        pids = place.processes()
        mine = (str(public), str(ROOT), sys.prefix)  # a checkout, too, may be in /tmp
        reached = stranger.act(WALKS, *folders, *rooms, *(p for p in opened(pids) if not p.startswith(mine)))
        told = [p for p in (public / "out").rglob("*") if p.is_file() and token.encode() in p.read_bytes()]
        theirs = stranger.act(WALKS, public / "out")
        secrets = {token.encode(), *(v for pid in pids for v in secret(pid))}
        shown = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if Path(f"/proc/{pid}").exists())
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (*folders, *rooms, folder / "attempt.json")}
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(180)
    assert reached.strip() == "[]"
    assert len(folders) == 2 and len(rooms) == 1
    assert modes == {**{p.name: 0o700 for p in (*folders, *rooms)}, "attempt.json": 0o600}
    assert re.fullmatch(rf"{folder.name}-rows-0-[0-9a-f]{{32}}", rooms[0].name)
    assert not told and "written" not in theirs
    assert len(secrets) == 2 and not any(value in shown for value in secrets)
    assert not (public / "harmed").exists()
    place.assert_clean()
    assert not [p for p in rooms if p.exists()]


@stranger.needed
@pytest.mark.parametrize("theirs", ["folder", "link"])
def test_results_do_not_go_to_a_folder_of_another_user(public, theirs, tmp_path):
    out = public / "out"
    stranger.act(*((MAKES, out) if theirs == "folder" else (LINKS, tmp_path, out)))
    with pytest.raises(Fault, match="another user") as fault:
        check_own(out)
    assert fault.value.diagnostics[0].help == "name another with --out"


def test_results_do_not_go_to_a_folder_that_others_can_write_to(tmp_path, capsys):
    """Refused before anything is written; with what the message says it is taken."""
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(0o777)
    assert run_main([str(EXAMPLE / "grpo.rlg"), "--out", str(out)]) == 1
    told = capsys.readouterr().err
    assert f"the output folder {out} is open to other users (mode 0777)" in told and not list(out.iterdir())
    subprocess.run(re.search("help: (chmod .*)", told)[1], shell=True, check=True)
    check_own(out)
    (tmp_path / "link").symlink_to(out)
    check_own(tmp_path / "link")


def test_results_do_not_go_through_links_of_a_folder_that_came_from_a_stranger(tmp_path):
    """The fix that the message names is applied; links that stay inside, or that nobody writes at, are left alone."""
    out = tmp_path / "out"
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("checkpoints/000002", "weights/actor", "logs"):
        (out / name).mkdir(parents=True)
    (out / "checkpoints" / "best").symlink_to(outside)
    (out / "weights" / "best").symlink_to("actor")
    (out / "notes").symlink_to(outside)
    check_links(out)
    for name in (
        "plan.json",
        "trace.json",
        "metrics.jsonl",
        "weights/actor/model.safetensors",
        "logs/it's.log",
        "rows",
    ):
        link = out / name
        link.symlink_to(outside / "file")
        with pytest.raises(Fault, match=f"{re.escape(name)} is a link to .*, where the run would write") as fault:
            check_links(out)
        subprocess.run(
            re.search("remove the link: (rm .*);", fault.value.diagnostics[0].help)[1], shell=True, check=True
        )
        check_links(out)


def test_results_do_not_go_where_another_run_was_quicker(tmp_path):
    made = supervisor.prepare(compile(EXAMPLE / "grpo.rlg"), RunOptions(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("theirs")
    with pytest.raises(Fault, match="another run has written into"):
        supervisor.Supervisor(made, None).run()
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == "theirs"


def test_a_run_that_goes_on_writes_through_no_link(tmp_path):
    plan = compile(EXAMPLE / "grpo.rlg")
    save(tmp_path / "out", plan, 4)
    (tmp_path / "out" / "metrics.jsonl").write_bytes(lines(4))
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out" / "plan.json").symlink_to(tmp_path / "mine")
    made = supervisor.prepare(plan, RunOptions(resume=tmp_path / "out"))
    with pytest.raises(Fault, match=r"plan.json is a link to .*mine, where the run would write"):
        supervisor.Supervisor(made, None).run()
    assert (tmp_path / "mine").read_text() == "mine"


@stranger.needed
def test_a_log_is_not_written_through_a_link_or_into_a_folder_of_others(public):
    """On a host that does not see the run's folder anybody may have made one at its path."""
    mine = public / "mine"
    mine.write_text("")
    stranger.act(MAKES, public / "logs")
    stranger.act(LINKS, mine, public / "logs" / "rank-0.log")
    (public / "own").mkdir()
    (public / "own" / "rank-0.log").symlink_to(mine)
    for folder in ("logs", "own"):
        says = (
            "import sys; from msrl_graph.runtime.process import log; "
            "log.redirect_output(sys.argv[1], 'rank 0'); print('x')"
        )
        subprocess.run([sys.executable, "-c", says, public / folder / "rank-0.log"], check=True, capture_output=True)
    assert mine.read_text() == "" and len(list((public / "logs").iterdir())) == 1


@stranger.needed
@pytest.mark.parametrize("theirs", ["file", "folder"])
def test_the_parser_loads_no_pickle_of_another_user(public, theirs):
    """lark's tables are one; a shared XDG_CACHE_HOME is enough to be given another's."""
    parses = "import sys; from msrl_graph.dsl.parse import parse; parse('algorithm a { }', 'a.rlg')"
    cache = public / "msrl_graph"
    environment = {**os.environ, "XDG_CACHE_HOME": str(public)}
    subprocess.run([sys.executable, "-c", parses], env=environment, capture_output=True)
    (table,) = cache.iterdir()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (cache, table)]
    table.write_bytes(pickle.dumps(Harm(public / "harmed")))
    os.chown(table if theirs == "file" else cache, stranger.NOBODY, stranger.NOBODY)
    subprocess.run([sys.executable, "-c", parses], env=environment, capture_output=True)
    assert not (public / "harmed").exists() and modes == [0o700, 0o600]


@stranger.needed
def test_functions_and_copies_are_not_kept_in_a_cache_of_another_user(public, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(public))
    source = public / "source.txt"
    source.write_text("x")
    stranger.act(MAKES, public / "msrl_graph")
    with pytest.raises(ValueError, match=r"belongs to another user \(id 65534\); name a folder of your own: XDG_CACHE"):
        ship(lambda response: 1.0)
    with pytest.raises(Fault, match="belongs to another user") as fault:
        urls.copy(source.as_uri())
    assert fault.value.diagnostics[0].help.startswith("set XDG_CACHE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(public / "own"))
    path, _ = ship(lambda response: 1.0)
    assert stat.S_IMODE(path.with_suffix(".pickle").stat().st_mode) == 0o600
    assert urls.copy(source.as_uri()).read_text() == "x"


@stranger.needed
def test_a_copy_that_another_user_laid_down_is_not_taken(public, monkeypatch):
    """Its name follows from the URL, so anybody can make it first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(public))
    source = public / "source.txt"
    source.write_text("x")
    place = urls.copy(source.as_uri()).parent
    os.chown(place, stranger.NOBODY, stranger.NOBODY)
    with pytest.raises(Fault, match=f"{place.name} belongs to another user"):
        urls.copy(source.as_uri())


def test_a_cache_that_a_loose_umask_opened_is_closed(public, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(public))
    (public / "msrl_graph").mkdir()
    (public / "msrl_graph").chmod(0o775)
    assert private.cache("urls") == public / "msrl_graph" / "urls"
    assert stat.S_IMODE((public / "msrl_graph").stat().st_mode) == 0o755
