"""Trackers with the real packages, offline, each in its process: what they hold after a run that was killed and
resumed, and what a tracker that fails or hangs costs: a warning, and no line.

The trackers are the files of trackers/: trackers/mlflow.py has the most to do, since MLflow forgets nothing.
"""

import io
import json
import os
import re
import signal
import time
from pathlib import Path
from types import MappingProxyType

import pytest
import tracked
from folders import ROOT

from msrl_graph import compile
from msrl_graph.backends import packages
from msrl_graph.diagnostics import Fault
from msrl_graph.runtime.driver.preflight import check_requirements
from msrl_graph.runtime.metrics import tracker_process
from msrl_graph.runtime.metrics.display import Display, Screen
from msrl_graph.runtime.metrics.metrics_file import METRICS, MetricsFile
from msrl_graph.runtime.metrics.tracking import Trackers, make_label
from msrl_graph.trackers import find_tracker, points, tracker_names

EXAMPLE = ROOT / "examples" / "arithmetic" / "grpo.rlg"
MINE = """
import json, os, sys, time
from pathlib import Path


class Lines:
    '''Its file is what it has got.'''

    def begin(self, run):
        self.file = Path(run.folder) / "lines.jsonl"
        self.file.write_text("".join(json.dumps(line) + "\\n" for line in run.lines))
        facts = {name: getattr(run, name) for name in ("project", "name", "id", "config", "digest", "resumed")}
        (Path(run.folder) / "run.json").write_text(json.dumps(facts))
        (Path(run.folder) / "plan.txt").write_text(run.plan)

    def add(self, line):
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\\n")

    def add_artefact(self, path):
        (self.file.parent / f"artefact-{path.name}").write_bytes(path.read_bytes())

    def close(self, outcome):
        (self.file.parent / "outcome").write_text(outcome)


class Minimal:
    def begin(self, run):
        pass

    def add(self, line):
        pass


class FailsInBegin(Minimal):
    def begin(self, run):
        raise RuntimeError("no server")


class FailsInAdd(Minimal):
    def add(self, line):
        if line.get("iteration") == 1:
            raise ValueError("a bad line")


class FailsInClose(Minimal):
    def close(self, outcome):
        raise OSError("the disk is full")


class Exits(Minimal):
    def add(self, line):
        sys.exit()


class Dies(Minimal):
    def add(self, line):
        os.abort()


class HangsInBegin(Minimal):
    def begin(self, run):
        time.sleep(600)


class HangsInAdd(Minimal):
    def add(self, line):
        time.sleep(600)


class HangsInClose(Minimal):
    def close(self, outcome):
        time.sleep(600)


class Starts(Minimal):
    '''A process that it starts does not outlive it.'''

    def begin(self, run):
        import subprocess
        self.child = subprocess.Popen(["sleep", "600"])
        (Path(run.folder) / "child").write_text(str(self.child.pid))
"""


def line_of(iteration, seconds):
    nested = {"actor.update": seconds / 2, "swap in": 0.25}
    return {"iteration": iteration, "seconds": seconds, "reward": iteration / 7, "loss/kl": 1e-5, "phases": nested}


def evaluation_of(done):
    figures = {"reward": done / 3, "reward/pass@8": 0.5, "reward/source=a b": float("nan")}
    return {"evaluation": "held_out", "after_iterations": done, "seconds": 2.0, **figures}


class Attempt:
    """An attempt of a run that keeps some lines of the one before; there are no ranks."""

    def __init__(self, folder, tracks, keep=0, more=MappingProxyType({})):
        for name, text in {"mine.py": MINE, **more}.items():
            (folder / name).write_text(text)
        (folder / "attempt").mkdir(exist_ok=True)
        self.out = folder / "results"
        self.out.mkdir(exist_ok=True)
        text = EXAMPLE.read_text().replace("seed = 0", f"seed = 0, track = [{', '.join(tracks)}]")
        for name in ("train.jsonl", "test.jsonl", "model"):
            if not (folder / name).exists():
                (folder / name).symlink_to(EXAMPLE.parent / name)
        (folder / "p.rlg").write_text(text)
        plan = compile(folder / "p.rlg")
        (self.out / "plan.json").write_text(plan.to_json())
        self.said = io.StringIO()
        display = Display(plan, Screen(file=self.said, width=300))
        self.trackers = Trackers(plan, self.out, folder / "attempt", display)
        self.file = MetricsFile(self.out / METRICS, keep)
        self.trackers.begin(self.file.lines)

    def add(self, *lines):
        for line in lines:
            line = {"tokens_per_second": 1.0} | line if "iteration" in line else line
            self.file.add(line)
            self.trackers.add(line)

    def wait_for(self, count):
        """Until every tracker has got so many lines."""
        until = time.monotonic() + 60
        while any(process.added < count for process in self.trackers.processes):
            assert time.monotonic() < until, self.said.getvalue()
            for process in self.trackers.processes:
                process.look()
            time.sleep(0.05)

    def close(self, outcome):
        self.file.close()
        self.trackers.close(outcome)

    def kill(self):
        """As if the driver were killed: nothing is closed, and what it wrote last is lost."""
        self.file.close()
        for member in self.trackers.members.values():
            member.close("")
        for process in self.trackers.processes:
            process.ended = True
            process.wait(0.0)

    @property
    def warnings(self):
        return [line for line in self.said.getvalue().splitlines() if line.startswith("warning: ")]


def needs(name):
    """Skip a test whose packages the environment lacks; the lowest versions of others exclude some of them."""
    if missing := [package for package in find_tracker(name).packages if not packages.version(package)]:
        pytest.skip(f"{', '.join(missing)} is not installed")


def own(name):
    return f'"mine.py:{name}"'


@pytest.mark.parametrize("name", tracker_names())
def test_a_tracker_holds_the_lines_of_a_run_that_was_killed_and_resumed(name, tmp_path):
    """The times of iterations that are computed again differ, and nothing else does."""
    needs(name)
    first = Attempt(tmp_path, [name])
    first.add(evaluation_of(0), *(line_of(i, 1.5 + i) for i in range(5)), evaluation_of(5), line_of(5, 9.0))
    first.wait_for(8)
    first.kill()
    again = Attempt(tmp_path, [name], keep=4)
    assert [line.get("iteration") for line in again.file.lines] == [None, 0, 1, 2]
    again.add(*(line_of(i, 2.5 + i) for i in (3, 4)), evaluation_of(5), *(line_of(i, 2.5) for i in (5, 6)))
    again.close("done")
    assert not again.warnings, (tmp_path / "results" / "logs" / f"tracker-{name}.log").read_text()
    links = [path.readlink() for path in again.out.rglob("*") if path.is_symlink()]
    assert not any(link.is_absolute() for link in links) and (links or name not in ("wandb", "swanlab"))
    held = tracked.assert_holds(name, again.out)
    # Per line of an iteration six numbers, per evaluation three. MLflow may hold twice the times of three iterations
    # that were computed again: `seconds`, and a phase that goes with it.
    twice = held - (7 * 6 + 2 * 3)
    assert twice == 0 or (name == "mlflow" and twice <= 3 * 2)


def test_a_tracker_that_no_test_can_read_is_named_with_what_to_add(tmp_path):
    with pytest.raises(AssertionError, match=r"tests/support/tracked.py a function `read_mine\(out\)`.*in READERS"):
        tracked.assert_holds("mine", tmp_path)


def test_a_class_of_the_user_gets_the_run_its_lines_and_artefacts(tmp_path):
    first = Attempt(tmp_path, [own("Lines")])
    first.add(line_of(0, 1.0), line_of(1, 1.0))
    first.close("interrupted")
    folder = first.out / "trackers" / "mine-Lines"
    before = json.loads((folder / "run.json").read_text())
    assert (folder / "outcome").read_text() == "interrupted" and not before["resumed"]
    again = Attempt(tmp_path, [own("Lines")], keep=1)
    again.add(line_of(1, 2.0))
    again.close("done")
    after = json.loads((folder / "run.json").read_text())
    assert not first.warnings + again.warnings
    assert (folder / "lines.jsonl").read_text() == (again.out / METRICS).read_text()
    assert after == before | {"resumed": True} and (before["project"], before["name"]) == ("arithmetic", "results")
    assert (before["config"]["kl_coef"], before["config"]["run/iterations"]) == (0.001, 320)
    assert before["config"]["actor.update/loss"] == "clip(low = 0.2) + 0.001 * kl(form = low_var)"
    assert (folder / "artefact-program.rlg").read_text() == (tmp_path / "p.rlg").read_text()
    assert (folder / "artefact-plan.sha256").read_text() == f"{before['digest']}  plan.json\n"
    assert (folder / "artefact-plan.json").read_bytes() == (again.out / "plan.json").read_bytes()
    assert (folder / "plan.txt").read_text() + "\n" == (folder / "artefact-plan.txt").read_text()


def test_the_class_of_the_guide_runs(tmp_path):
    guide = (ROOT / "docs" / "guides" / "tracking.md").read_text()
    first = Attempt(
        tmp_path, ['"guide.py:MyTracker"'], more={"guide.py": guide.split("```python\n")[1].split("```")[0]}
    )
    first.add(line_of(0, 1.0), line_of(1, 1.0))
    first.close("interrupted")
    again = Attempt(tmp_path, ['"guide.py:MyTracker"'], keep=1, more={})
    again.add(line_of(1, 2.0), evaluation_of(2))
    again.close("done")
    assert not first.warnings + again.warnings
    text = (again.out / "trackers" / "guide-MyTracker" / "lines.txt").read_text()
    assert text.splitlines() == ["0 0.0", f"1 {1 / 7}", f"None {2 / 3}"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FailsInBegin", "failed: RuntimeError: no server; it has 0 of 3 lines of this attempt"),
        ("FailsInAdd", "failed: ValueError: a bad line; it has 1 of 3 lines of this attempt"),
        ("FailsInClose", "failed: OSError: the disk is full; it has 3 of 3 lines of this attempt"),
        ("Exits", "failed: SystemExit: ; it has 0 of 3 lines of this attempt"),
        ("Dies", "failed: its process ended, killed by SIGABRT; it has 0 of 3 lines of this attempt"),
    ],
)
def test_a_tracker_that_fails_is_reported_once_and_costs_no_line(name, message, tmp_path):
    attempt = Attempt(tmp_path, [own(name), own("Lines")])
    attempt.add(*(line_of(i, 1.0) for i in range(3)))
    attempt.close("done")
    (warning,) = attempt.warnings
    log = attempt.out / "logs" / f"tracker-mine-{name}.log"
    assert warning == f"warning: the tracker `mine-{name}` {message}; the run goes on without it: see {log}"
    lines = (attempt.out / METRICS).read_text()
    assert lines.count("\n") == 3 and (attempt.out / "trackers" / "mine-Lines" / "lines.jsonl").read_text() == lines


@pytest.mark.parametrize("name", ["HangsInBegin", "HangsInAdd"])
def test_a_tracker_that_hangs_is_ended_while_the_run_goes_on(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tracker_process, "HANG", 1.0)
    attempt = Attempt(tmp_path, [own(name)])
    (process,) = attempt.trackers.processes
    added = 0
    until = time.monotonic() + 60
    while not process.ended:
        assert time.monotonic() < until
        attempt.add(line_of(added, 1.0))
        added += 1
        time.sleep(0.05)
    assert process._process.returncode == -signal.SIGKILL
    attempt.add(*(line_of(added + i, 1.0) for i in range(3)))
    attempt.close("done")
    (warning,) = attempt.warnings
    what = "its begin" if name == "HangsInBegin" else "line 1"
    assert f"hangs: {what} has taken more than 1 s; it has 0 of {added} lines" in warning
    assert (attempt.out / METRICS).read_text().count("\n") == added + 3


def test_a_tracker_that_does_not_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("msrl_graph.runtime.metrics.tracking.CATCH_UP", 3.0)
    attempt = Attempt(tmp_path, [own("HangsInClose")])
    attempt.add(line_of(0, 1.0))
    attempt.wait_for(1)
    attempt.close("done")
    (warning,) = attempt.warnings
    assert "did not end in time; it has 1 of 1 lines" in warning
    assert attempt.trackers.processes[0]._process.returncode == -signal.SIGKILL


def test_a_process_that_a_tracker_starts_ends_with_it(tmp_path):
    attempt = Attempt(tmp_path, [own("Starts")])
    attempt.wait_for(0)
    child = int((attempt.out / "trackers" / "mine-Starts" / "child").read_text())
    os.kill(child, 0)
    attempt.close("done")
    until = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_tracker_ends_when_its_driver_is_gone(tmp_path):
    attempt = Attempt(tmp_path, [own("Minimal")])
    attempt.add(line_of(0, 1.0))
    attempt.wait_for(1)
    (process,) = attempt.trackers.processes
    process._process.stdin.close()  # as when the driver dies
    assert process._process.wait(30) == 1
    attempt.kill()


def test_a_tracker_in_the_driver_that_fails_costs_no_line(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(find_tracker("tensorboard"), "add", fail)
    attempt = Attempt(tmp_path, ["tensorboard"])
    attempt.add(line_of(0, 1.0), line_of(1, 1.0))
    attempt.close("done")
    (warning,) = attempt.warnings
    assert "the tracker `tensorboard` failed: RuntimeError: broken" in warning
    assert (attempt.out / METRICS).read_text().count("\n") == 2


def test_a_run_without_trackers_writes_nothing_for_them(tmp_path):
    attempt = Attempt(tmp_path, [])
    attempt.add(line_of(0, 1.0))
    attempt.close("done")
    assert {path.name for path in attempt.out.iterdir()} == {"metrics.jsonl", "plan.json"}


def test_a_tracker_whose_package_is_missing_is_told_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(find_tracker("wandb"), "packages", ("no-such-package",))
    (tmp_path / "p.rlg").write_text(EXAMPLE.read_text().replace("seed = 0", "seed = 0, track = [wandb]"))
    for name in ("train.jsonl", "test.jsonl", "model"):
        (tmp_path / name).symlink_to(EXAMPLE.parent / name)
    with pytest.raises(Fault) as raised:
        check_requirements(compile(tmp_path / "p.rlg"))
    (found,) = raised.value.diagnostics
    assert (found.code, found.help) == ("not-installed", "pip install no-such-package")
    assert found.message == "the tracker `wandb` needs no-such-package, not installed here"
    assert "track = [wandb]" in (tmp_path / "p.rlg").read_text().splitlines()[found.span.line - 1]


def test_numbers_of_a_line():
    assert points(line_of(3, 1.0)) == (
        3,
        {
            "seconds": 1.0,
            "reward": 3 / 7,
            "loss/kl": 1e-5,
            "phases/actor.update": 0.5,
            "phases/swap in": 0.25,
        },
    )
    assert points(evaluation_of(4)) == (
        4,
        {"held_out/seconds": 2.0, "held_out/reward": 4 / 3, "held_out/reward/pass@8": 0.5},
    )
    assert points({"iteration": 0, "changed": ["the seed"]}) == (0, {})


def test_labels_are_names_of_files():
    assert [make_label(name) for name in ("wandb", "/a b/my file.py:Mine")] == ["wandb", "my_file-Mine"]
    assert all(re.fullmatch(r"[\w-]+", make_label(name)) for name in tracker_names())
