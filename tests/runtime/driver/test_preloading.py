"""Which runs fork their ranks from a process that has imported what they need, and that they do."""

import os
from contextlib import closing, suppress

import pytest
from killed_runs import computed, program
from patched import patched
from place import EXAMPLE, PROGRAM, SMALL, metrics

from msrl_graph.cli import run_main
from msrl_graph.compiler.pipeline import compile
from msrl_graph.runtime.driver import preloading
from msrl_graph.runtime.process import fault_points
from msrl_graph.runtime.process.preload import PreloadServer

LOADED = """
import os
with open({file!r}, "a") as loads:
    loads.write(f"{{os.getpid()}}\\n")
"""


class Recorder:
    """What is made instead of a server."""

    made: list["Recorder"]

    def __init__(self, modules, *_):
        self.modules = [*modules]
        self.closed = False
        self.made.append(self)

    def load(self, modules):
        self.modules += modules

    def close(self):
        self.closed = True


@pytest.fixture
def made(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(Recorder, "made", [], raising=False)
    monkeypatch.setattr(preloading, "PreloadServer", Recorder)
    return Recorder.made


def test_the_modules_of_the_example_are_those_of_its_engines_and_its_models():
    assert preloading.COMMON[0] == preloading.RANK
    assert preloading.modules(compile(EXAMPLE / "grpo.rlg")) == [
        "msrl_graph.backends.fsdp",
        "msrl_graph.backends.hf",
        "transformers.models.qwen2.modeling_qwen2",
    ]


def test_a_server_that_was_started_early_takes_the_modules_of_the_plan(made):
    with preloading.starting_early(str(EXAMPLE / "grpo.rlg")) as early:
        assert early.modules == [*preloading.COMMON]
        with preloading.serving(compile(EXAMPLE / "grpo.rlg"), early) as server:
            assert server is early and server.modules[-1] == "transformers.models.qwen2.modeling_qwen2"
        assert early.closed
    assert made == [early]


def test_a_plan_for_other_devices_ends_the_server(made, tmp_path):
    path = tmp_path / "p.rlg"
    path.write_text((EXAMPLE.parents[1] / "tests" / "programs" / "grpo_page.rlg").read_text())
    with preloading.starting_early(str(path)) as early:
        assert early is None
    plan = compile(path)
    with preloading.starting_early(str(EXAMPLE / "grpo.rlg")) as early, preloading.serving(plan, early) as server:
        assert server is None and early.closed
    with preloading.serving(plan) as server:
        assert server is None
    assert len(made) == 1


def test_a_run_on_a_cluster_has_no_server(made, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with preloading.starting_early(str(EXAMPLE / "grpo.rlg")) as early:
        assert early is None
    with preloading.serving(compile(EXAMPLE / "grpo.rlg")) as server:
        assert server is None
    assert made == []


def test_a_server_that_cannot_be_started_is_missed_by_none(monkeypatch):
    def fails(*_):
        raise OSError("no room")

    monkeypatch.setattr(preloading, "PreloadServer", fails)
    with preloading.starting_early(str(EXAMPLE / "grpo.rlg")) as early:
        assert early is None


@pytest.mark.parametrize(
    "arguments", [["--dry-run"], ["--no-such-flag"], ["--help"], ["--export", "there-is-none"], ["--set", "x"]]
)
def test_what_starts_no_run_starts_no_server(made, arguments, capsys):
    with suppress(SystemExit):
        run_main([str(EXAMPLE / "grpo.rlg"), *arguments])
    assert made == []


def test_an_invalid_program_ends_its_server(made, tmp_path, capsys):
    (tmp_path / "p.rlg").write_text(PROGRAM.replace("-> old_logp", "-> old_logb"))
    assert run_main([str(tmp_path / "p.rlg")]) == 1
    assert "undeclared column" in capsys.readouterr().err
    (server,) = made
    assert server.closed


def test_a_file_that_is_missing_or_no_text_has_no_server(made, tmp_path, capsys):
    (tmp_path / "p.rlg").write_bytes(b"\xff\x00")
    assert run_main([str(tmp_path / "p.rlg")]) == 1
    assert run_main([str(tmp_path / "none.rlg")]) == 1
    assert run_main(["no\0path.rlg"]) in (1, 2)
    assert made == []


def test_the_address_of_a_server_is_in_its_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with closing(PreloadServer([], {}, "server-", "MSRL_MARK")) as server:
        assert os.path.dirname(server.address.socket) == str(server.folder)  # noqa: PTH120
        assert os.getsid(server.address.session) == server.address.session


@pytest.mark.slow
def test_two_runs_at_the_same_time_have_a_server_each(place):
    place.write(evaluated=False)
    file = place.folder / "loads.txt"
    variables = patched(place, preloading.RANK, LOADED.format(file=str(file)))
    runs = [place.start("p.rlg", *SMALL, "--iterations", "1", "--out", out, **variables) for out in ("one", "two")]
    for run in runs:
        _, err = run.communicate(timeout=place.patience)
        assert run.returncode == 0, err
    assert len(set(file.read_text().split())) >= 2
    assert computed(place.folder / "one")[0] == computed(place.folder / "two")[0]
    place.assert_clean()


@pytest.mark.slow
def test_the_attempt_after_a_killed_rank_forks_from_the_same_server(place, tmp_path):
    points = tmp_path / "points"
    points.mkdir()
    fault_points.fault_file(points, "rank 0", "write checkpoint 1").touch()
    program(place, evaluated=False, iterations=2, save=1, restarts=3)
    file = place.folder / "loads.txt"
    variables = patched(place, preloading.RANK, LOADED.format(file=str(file)))
    code, _, err = place.run("p.rlg", *SMALL, "--out", "out", MSRL_POINTS=str(points), **variables)
    assert code == 0, err
    assert "restarting from the beginning" in err
    assert len(file.read_text().split()) == 1
    assert [line["iteration"] for line in metrics(place.folder / "out")] == [0, 1]
    place.assert_clean()


@pytest.mark.slow
def test_a_run_whose_server_is_killed_at_once_goes_on_as_if_there_were_none(place):
    place.write(evaluated=False)
    file = place.folder / "loads.txt"
    killed = LOADED + "os.kill(os.getpid(), 9) if 'MSRL_PRELOAD' not in os.environ else None\n"
    variables = patched(place, preloading.RANK, killed.format(file=str(file)))
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "1", "--out", "out", **variables)
    assert code == 0, err
    assert len(file.read_text().split()) == 3
    place.assert_clean()
