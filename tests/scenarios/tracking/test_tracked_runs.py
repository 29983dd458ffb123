"""A run with all trackers whose driver is killed, and then its supervisor, and that is resumed.

What each tracker holds at the end, as its own program reads it, is what metrics.jsonl has. One of them fails all the
time, and one hangs: neither costs an iteration. Other tests are in runtime/metrics/test_tracking.py.
"""

import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
import tracked
from killed_runs import program
from place import ONE_RANK, SMALL, metrics

from msrl_graph.backends import packages
from msrl_graph.trackers import find_tracker, tracker_names

ITERATIONS = 40
MINE = """
import json, time
from pathlib import Path


class Lines:
    def begin(self, run):
        self.file = Path(run.folder) / "lines.jsonl"
        self.file.write_text("".join(json.dumps(line) + "\\n" for line in run.lines))

    def add(self, line):
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\\n")


class Fails(Lines):
    def add(self, line):
        raise RuntimeError("no room")


class Hangs(Lines):
    def add(self, line):
        time.sleep(3600)

"""


def tracked_steps(out):
    """How many steps MLflow, which is the last to begin, has got."""
    path = out / "trackers" / "mlflow" / "mlflow.db"
    if not path.is_file():
        return 0
    with closing(sqlite3.connect(path)) as connection:
        try:
            (last,) = connection.execute("select max(step) from metrics where key = 'loss'").fetchone()
        except sqlite3.Error:  # it is being made
            return 0
    return 0 if last is None else last + 1


def wait_for_steps_after_a_checkpoint(out, more_than):
    """Until MLflow has got iterations that a resumed run computes again; how many steps it has."""
    until = time.monotonic() + 150
    while True:
        saved = max((int(path.name) for path in (out / "checkpoints").glob("0*")), default=0)
        steps = tracked_steps(out)
        if steps > max(saved, more_than) and saved:
            return steps
        assert time.monotonic() < until, f"MLflow has {steps} steps, and the newest checkpoint is of {saved}"
        time.sleep(0.05)


def driver_of(place):
    (pid,) = [
        pid
        for pid in place.processes()
        if b"msrl_graph.runtime.driver.driver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


@pytest.mark.slow
def test_trackers_hold_what_metrics_jsonl_has_after_kills_and_a_resume(place):
    names = [name for name in tracker_names() if all(map(packages.version, find_tracker(name).packages))]
    if "mlflow" not in names:
        pytest.skip("the packages of trackers are not installed")
    (place.folder / "mine.py").write_text(MINE)
    own = ", ".join(f'"mine.py:{name}"' for name in ("Lines", "Fails", "Hangs"))
    program(
        place,
        *ONE_RANK,
        ("every = 2", "every = 8"),
        iterations=ITERATIONS,
        save=5,
        track=f"[{', '.join(names)}, {own}]",
    )
    out = place.folder / "results"
    process = place.start("p.rlg", *SMALL, "--out", "results")
    first = wait_for_steps_after_a_checkpoint(out, 5)
    os.kill(driver_of(place), signal.SIGKILL)
    second = wait_for_steps_after_a_checkpoint(out, first)
    process.kill()
    _, before = process.communicate(timeout=60)
    place.assert_clean(within=20)
    run_id = (out / "trackers" / "id").read_text()
    code, _, err = place.run("p.rlg", *SMALL, "--resume", "results")
    assert code == 0, err
    place.assert_clean()
    assert first < second <= ITERATIONS
    assert [line["iteration"] for line in metrics(out) if "iteration" in line] == list(range(ITERATIONS))
    for name in names:
        assert tracked.assert_holds(name, out), name
    assert (out / "trackers" / "mine-Lines" / "lines.jsonl").read_text() == (out / "metrics.jsonl").read_text()
    assert (out / "trackers" / "id").read_text() == run_id
    assert err.count("warning: the tracker `mine-Fails` failed: RuntimeError: no room") == 1, err
    assert err.count("warning: the tracker `mine-Hangs`") == 1 and "it has 0 of" in err, err
    assert "the tracker `mine-Fails` failed" in before
    for name in {*names} - {"tensorboard"}:
        assert f"the tracker `{name}`" not in before + err
    artefacts = out / "trackers" / "mlflow" / "artifacts"
    assert {path.name for path in artefacts.rglob("*.*")} == {"program.rlg", "plan.txt", "plan.json", "plan.sha256"}
