"""A process that hangs is handled like one that died: it is found, killed, named and replaced.

This includes the driver (runtime/driver/driver.py, runtime/driver/watchdog.py). A folder has one writer.
"""

import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from killed_runs import program
from place import ONE_RANK, SMALL, metrics

DEADLINE = ("  run { iterations", "  dock { deadline = 20 s }\n  run { iterations")  # 10 s until a process is killed
KEEPER = "runtime.process.processes"


def pid_of(place, word):
    """The process of a run with this in its command line."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for pid in place.processes():
            with suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                    return pid
        time.sleep(0.1)
    raise AssertionError(f"no process {word}")


def lines(place):
    path = place.folder / "results" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("stopped", "told"),
    [
        (
            (("ray::FunctionHost", KEEPER), ("ray::RankHost",), ("driver.driver",)),
            [
                "functions of host 0 has not moved for 10 s (stopped); killed; started again",
                "the keeper has not moved for 10 s (stopped); killed; another one was started",
                "rank 0 has not moved for 10 s (stopped); killed; restarting from ",
                "the driver has not moved for 10 s (stopped); killed; restarting from ",
            ],
        ),
        pytest.param(
            (("ray::DockHost",), ("raylet/raylet",), ("gcs/gcs_server",)),
            [
                "dock of host 0 has not moved for 10 s (stopped); killed; started again",
                "Ray's raylet has not moved for 10 s (stopped); killed; restarting from ",
                "Ray's gcs_server has not moved for 10 s (stopped); killed; restarting from ",
            ],
            marks=pytest.mark.long,
        ),
    ],
    ids=["ours", "others"],
)
def test_whoever_is_stopped_is_killed_named_and_replaced(place, stopped, told):
    program(place, *ONE_RANK, DEADLINE, evaluated=False, iterations=8)
    process = place.start("p.rlg", *SMALL, "--out", "results")
    for words in stopped:
        place.wait_for_lines("results", lines(place) + 1)
        for word in words:
            os.kill(pid_of(place, word), signal.SIGSTOP)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    for line in told:
        assert err.count(line) == 1, err
    assert err.count("restarting") == sum("restarting" in line for line in told), err
    assert [x["iteration"] for x in metrics(place.folder / "results")] == [*range(8)]
    place.assert_clean()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_driver_that_can_open_no_more_files_is_replaced(place):
    """Whoever can connect to Ray's ports on the machine can take its descriptors."""
    program(place, *ONE_RANK, evaluated=False, iterations=12, save=1)
    process = place.start("p.rlg", *SMALL, "--out", "results")
    place.wait_for_lines("results", 2)
    driver = pid_of(place, "driver.driver")
    opened = min(len([*Path(f"/proc/{driver}/fd").iterdir()]) for _ in range(50))  # some come and go
    resource.prlimit(driver, resource.RLIMIT_NOFILE, (opened, opened))
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert err.count("restarting from ") == 1, err
    assert [x["iteration"] for x in metrics(place.folder / "results")] == [*range(12)]
    place.assert_clean()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_folder_has_one_writer_though_keeper_and_supervisor_are_killed(place):
    """The driver ends with its supervisor, and holds the folder's lock until then."""
    program(place, *ONE_RANK, evaluated=False, iterations=12, save=2)
    process = place.start("p.rlg", *SMALL, "--out", "results")
    place.wait_for_lines("results", 4)
    driver = pid_of(place, "driver.driver")
    os.kill(driver, signal.SIGSTOP)
    for pid in (pid_of(place, KEEPER), process.pid):
        os.kill(pid, signal.SIGKILL)
    again = place.start("p.rlg", *SMALL, "--resume", "results")
    process.wait(60)
    _, err = again.communicate(timeout=100)
    assert again.returncode == 1 and "another run is writing into " in err and f"results (process {driver})" in err, err
    again = place.start("p.rlg", *SMALL, "--resume", "results")
    time.sleep(3)
    os.kill(driver, signal.SIGCONT)
    process.communicate(timeout=60)
    _, err = again.communicate(timeout=200)
    assert again.returncode == 0 and "resumed after" in err, err
    written = (place.folder / "results" / "metrics.jsonl").read_bytes()
    assert b"\0" not in written and [x["iteration"] for x in metrics(place.folder / "results")] == [*range(12)]
    place.assert_clean()
