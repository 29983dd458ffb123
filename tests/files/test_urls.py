"""What lies at URLs: copied once a host, by the version that is there, and told where it cannot be read."""

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from place import EXAMPLE, ONE_RANK, SMALL, metrics
from sample import examples
from saved_checkpoints import save

from msrl_graph import compile
from msrl_graph.cli import compile_main, run_main
from msrl_graph.diagnostics import Fault
from msrl_graph.files import urls
from msrl_graph.runtime.driver.distributed_checkpoint import HERE, DistributedCheckpoint
from msrl_graph.runtime.weights.checkpoint import find_newest, verify

PROGRAM = (EXAMPLE / "grpo.rlg").read_text()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "msrl_graph" / "urls"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Files of a folder; what is asked for, `asked` has. Some are not for everybody."""

    def do_GET(self):
        self.server.asked.append((self.command, self.path))
        if self.path.startswith("/secret"):
            self.send_error(403)
        else:
            super().do_GET()

    def do_HEAD(self):
        if self.path.startswith("/secret"):
            self.send_error(403)
        else:
            super().do_HEAD()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path / "served")
    ) as made:
        made.asked = []
        made.folder = tmp_path / "served"
        made.url = f"http://127.0.0.1:{made.server_port}"
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def told(url, **options):
    with pytest.raises(Fault) as caught:
        urls.copy(url, **options)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic.code, diagnostic.message, diagnostic.help


def test_a_file_is_fetched_once_and_again_when_it_has_changed(server, cache):
    (server.folder / "a.jsonl").write_text("one")
    url = f"{server.url}/a.jsonl"
    first = urls.copy(url)
    assert first.read_text() == "one" and first == urls.copy(url) and first.is_relative_to(cache)
    assert [p for c, p in server.asked if c == "GET"] == ["/a.jsonl"]
    pin = urls.pin_version(url)
    assert urls.copy(pin) == first
    (server.folder / "a.jsonl").write_text("another")
    assert urls.copy(url).read_text() == "another" and first.read_text() == "one"
    assert urls.copy(pin) == first
    shutil.rmtree(first.parent)
    what = f"the content of `{url}` has changed since the run started"
    assert told(pin) == ("missing-file", what, "start the run again")


def test_processes_that_ask_at_once_fetch_once(server, cache):
    for name in ("config.json", "model.safetensors"):
        (server.folder / name).write_bytes(os.urandom(1 << 20))
    call = f"from msrl_graph.files import urls; print(urls.copy({server.url!r}, folder=True))"
    run = functools.partial(subprocess.Popen, stdout=subprocess.PIPE, text=True)
    found = {process.communicate()[0] for process in [run([sys.executable, "-c", call]) for _ in range(3)]}
    (folder,) = found
    assert sorted(p.name for p in Path(folder.strip()).iterdir()) == ["config.json", "model.safetensors"]
    assert len([p for c, p in server.asked if c == "GET" and p == "/model.safetensors"]) == 1
    assert {p.suffix for p in cache.iterdir()} == {"", ".lock"} and len(list(cache.iterdir())) == 2


def test_what_is_cut_short_on_the_way_is_no_copy(tmp_path, cache, monkeypatch):
    from fsspec.implementations.local import LocalFileSystem

    (tmp_path / "a.jsonl").write_text("one two")
    monkeypatch.setattr(LocalFileSystem, "get_file", lambda _, path, target: Path(target).write_text("one"))
    url = f"file://{tmp_path}/a.jsonl"
    assert told(url) == ("missing-file", f"`{url}` cannot be read: OSError: a.jsonl has 3 bytes instead of 7", "")
    assert [p.suffix for p in cache.iterdir()] == [".lock"]


@examples(25)
@given(
    st.dictionaries(st.text("abcé #%+", min_size=1, max_size=6).filter(str.strip), st.binary(max_size=40), min_size=1)
)
def test_a_copy_of_a_folder_is_the_folder(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("any")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    copied = urls.copy(f"file://{folder}", folder=True)
    assert {p.name: p.read_bytes() for p in copied.iterdir()} == files


def test_what_cannot_be_read_is_told_with_what_to_do(server, tmp_path):
    assert told(f"{server.url}/none.jsonl") == ("missing-file", f"there is nothing at `{server.url}/none.jsonl`", "")
    url = f"{server.url}/secret.jsonl"
    help = "provide credentials where the file system's package looks for them"
    assert told(url) == ("missing-file", f"this process may not read `{url}`", help)
    assert told(f"file://{tmp_path}/none", folder=True) == (
        "missing-file",
        f"there is nothing at `file://{tmp_path}/none`",
        "",
    )
    code, message, _ = told("http://127.0.0.1:1/a.jsonl")
    assert code == "missing-file" and message.startswith(
        "`http://127.0.0.1:1/a.jsonl` cannot be read: ClientConnectorError: "
    )
    what = "reading `oss://a/b` needs a package that is not installed"
    assert told("oss://a/b") == ("not-installed", what, "pip install ossfs")
    assert told("htp://a/b") == (
        "bad-value",
        "fsspec cannot read `htp://a/b`: it has no protocol htp",
        "did you mean `http`?",
    )


def test_a_file_system_that_says_nothing_is_not_waited_for(monkeypatch):
    import socket

    monkeypatch.setattr(urls, "ANSWER", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/a"
        assert told(url)[1] == f"`{url}` cannot be read: TimeoutError: no answer within 0.3 s"


def test_what_nobody_has_used_for_a_month_goes(tmp_path, cache):
    for name in "ab":
        (tmp_path / name).write_text(name)
    old = urls.copy(f"file://{tmp_path}/a").parent
    os.utime(old, (0, 0))
    urls.copy(f"file://{tmp_path}/b")
    assert not old.exists()


def program(folder, model, data):
    path = folder / "p.rlg"
    path.write_text(PROGRAM.replace("./model", model).replace("train.jsonl", data).replace("test.jsonl", data))
    return str(path)


def test_a_program_at_urls_is_checked_as_one_of_files(server, tmp_path, capsys, cache):
    shutil.copytree(EXAMPLE / "model", server.folder / "model")
    shutil.copy(EXAMPLE / "train.jsonl", server.folder)
    data = f"{server.url}/train.jsonl"
    model = f"{server.url}/model"
    path = program(tmp_path, model, data)
    assert compile_main([path, "--check"]) == 0, capsys.readouterr().err
    assert not list(cache.glob("*/*.safetensors"))
    assert run_main([path, "--dry-run"]) == 0, capsys.readouterr().err
    assert len(list(cache.glob("*/*.safetensors"))) == 1
    (server.folder / "train.jsonl").write_text(json.dumps({"prompt": "1"}) + "\n")
    capsys.readouterr()
    assert compile_main([path, "--check"]) == 1
    assert "error[bad-data]: line 1 of " in (err := capsys.readouterr().err) and "has no field `answer`" in err


def test_what_the_compiler_cannot_reach_is_told_at_its_line(server, tmp_path, capsys):
    url = f"{server.url}/none"
    assert compile_main([program(tmp_path, "./model", f"{url}.jsonl"), "--check", "--diagnostics", "concise"]) == 1
    shutil.copytree(EXAMPLE / "model", tmp_path / "model")
    capsys.readouterr()
    path = program(tmp_path, "./model", f"{url}.jsonl")
    line = PROGRAM.splitlines().index(next(x for x in PROGRAM.splitlines() if "data source" in x)) + 1
    assert compile_main([path, "--check", "--diagnostics", "concise"]) == 0
    assert f"p.rlg:{line}:19: warning[missing-file]: there is nothing at `{url}.jsonl`" in capsys.readouterr().err
    assert run_main([path, "--dry-run", "--diagnostics", "concise"]) == 1
    assert f"p.rlg:{line}:19: error[missing-file]: there is nothing at `{url}.jsonl`" in capsys.readouterr().err
    assert compile_main([program(tmp_path, url, f"{url}.jsonl"), "--diagnostics", "concise"]) == 1
    assert f"error[missing-file]: there is nothing at `{url}`" in capsys.readouterr().err


def test_a_compiler_that_reads_no_url_loads_no_fsspec():
    program = str(EXAMPLE / "grpo.rlg")
    code = f"import sys, msrl_graph; msrl_graph.compile({program!r}); assert 'fsspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_that_is_none_to_write_into_is_told(server, tmp_path, capsys):
    path = str(EXAMPLE / "grpo.rlg")
    assert run_main([path, "--dry-run", "--out", f"{server.url}/out"]) == 1
    what = f"nothing can be written at `{server.url}/out`: http:// is read-only"
    assert capsys.readouterr().err == f"error[bad-value]: {what}\n  = help: name another with --out\n"
    there = tmp_path / "out"
    (there / "logs").mkdir(parents=True)
    assert run_main([path, "--dry-run", "--out", f"file://{there}"]) == 1
    what = f"the output folder file://{there} exists and is not empty"
    help = "name another with --out, or replace the results in it: --overwrite"
    assert capsys.readouterr().err == f"error[bad-value]: {what}\n  = help: {help}\n"
    assert run_main([path, "--dry-run", "--out", f"file://{there}", "--overwrite"]) == 0
    assert f"results would be in file://{there}; nothing was started" in capsys.readouterr().out
    assert run_main([path, "--dry-run", "--out", f"oss://{there}"]) == 1
    assert "= help: pip install ossfs" in capsys.readouterr().err
    assert not list((tmp_path / "cache" / "msrl_graph" / "runs").iterdir())


def test_a_checkpoint_at_a_url_is_whole_or_refused(tmp_path, capsys):
    path = str(EXAMPLE / "grpo.rlg")
    there = tmp_path / "run"
    plan = compile(path)
    url = f"file://{tmp_path / 'run'}"
    assert run_main([path, "--dry-run", "--resume", url]) == 1
    assert capsys.readouterr().err.startswith(f"error[bad-checkpoint]: the run in {url} has saved no checkpoint\n")
    for iteration in (1, 2):
        newest = save(there, plan, iteration)
    assert run_main([path, "--dry-run", "--resume", url]) == 0
    assert f"results would be in {url}; nothing" in capsys.readouterr().out
    assert run_main([path, "--dry-run", "--resume", f"{url}/checkpoints/000001"]) == 1
    assert f"the run in {url} has newer checkpoints than 000001, which" in capsys.readouterr().err
    (newest / "states.safetensors").write_bytes(b"")
    assert run_main([path, "--dry-run", "--resume", url]) == 1
    said = capsys.readouterr().err
    assert f"the checkpoint {url}/checkpoints/000002 cannot be used: its file states.safetensors has 0 bytes" in said
    assert f"try the one before: --resume {url}/checkpoints/000001, with --out another folder" in said
    assert not list((tmp_path / "cache" / "msrl_graph" / "runs").iterdir())


def test_a_checkpoint_is_seen_at_a_url_when_all_of_it_is_there(tmp_path, monkeypatch):
    from fsspec.implementations.local import LocalFileSystem

    plan = compile(EXAMPLE / "grpo.rlg")
    there = tmp_path / "bucket"
    parted = DistributedCheckpoint(plan, [], list)
    url = f"file://{there}"
    put = LocalFileSystem.put_file

    def written(iteration):
        folder = save(tmp_path / "copy", plan, iteration, keep=2)
        parted.written_files = {HERE: [f.name for f in verify(folder).files]}
        return folder

    for iteration in (1, 2):
        parted.send(written(iteration), url)
    third = written(3)
    (there / "checkpoints" / "000000").mkdir()  # somebody's own
    for most in range(5):
        left = iter(range(most))

        def some(*arguments, left=left, **options):
            if next(left, None) is None:
                raise PermissionError("no more")
            put(*arguments, **options)

        monkeypatch.setattr(LocalFileSystem, "put_file", some)
        with pytest.raises(OSError, match=r"^nothing can be written at `file://.*`: PermissionError: no more$"):
            parted.send(third, url)
        assert find_newest(there)[0].name == "000002" and (there / "checkpoints" / "000003").is_dir()
    monkeypatch.undo()
    parted.send(third, url)
    assert find_newest(there)[0].name == "000003"
    assert sorted(p.name for p in (there / "checkpoints").iterdir()) == ["000000", "000002", "000003"]


@pytest.mark.slow
def test_a_run_from_urls_into_a_url_goes_on_from_there(place, server, cache):
    shutil.copytree(EXAMPLE / "model", server.folder / "model")
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(EXAMPLE / name, server.folder)
    names = [(f'"{n}"', f'"{server.url}/{n.removeprefix("./")}"') for n in ("./model", "train.jsonl", "test.jsonl")]
    (place.folder / "mine.py").write_text(
        "from pathlib import Path\n\n\nclass Ids:\n    def begin(self, run):\n"
        "        (Path(run.folder) / f'{run.id} {run.resumed} {len(run.lines)}').touch()\n\n"
        "    def add(self, line): ...\n"
    )
    run = 'run { save = 1, track = ["mine.py:Ids"], iterations'
    place.write(*names, *ONE_RANK, ("run { iterations", run), evaluated=False)
    there = place.folder / "bucket" / "run"
    url = f"file://{there}"
    environment = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    code, out, err = place.run("p.rlg", *SMALL, "--iterations", "2", "--out", url, **environment)
    assert code == 0 and f"results in {url}\n" in out, err
    first = metrics(there)
    assert len(first) == 2 and verify(there / "checkpoints" / "000002").iteration == 2
    assert {p.name for p in there.iterdir()} >= {"logs", "plan.json", "weights", "curve.png", "trace.json"}
    code, out, err = place.run("p.rlg", *SMALL, "--iterations", "3", "--resume", url, **environment)
    assert code == 0 and f"results in {url}\n" in out, err
    assert metrics(there)[:2] == first and len(metrics(there)) == 3
    assert sorted(p.name for p in (there / "checkpoints").iterdir()) == ["000002", "000003"]
    tracked = (there / "trackers" / "id").read_text()
    begun = sorted(p.name for p in (there / "trackers" / "mine-Ids").iterdir())
    assert begun == [f"{tracked} False 0", f"{tracked} True 2"]
    assert not list((cache.parent / "runs").iterdir())
    assert len([p for c, p in server.asked if c == "GET" and p == "/model/model.safetensors"]) == 1
    place.assert_clean()
