"""Killed processes of a run.

Whatever is killed, whenever: the run continues with the same results, or ends with a message. Nothing is left behind,
and the next run starts. What replaces the processes is in runtime/driver/process_pool.py.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from killed_runs import computed, program
from place import MINE, ONE_RANK, ROOT, SMALL, metrics

from msrl_graph.runtime.process.fault_points import fault_file as points_file
from msrl_graph.runtime.weights import checkpoint


def copy_of_the_first_half(whole, half):
    """A run of which only the first checkpoint is left, and one line of metrics and a part; how many belong to it."""
    shutil.copytree(whole, half)
    shutil.rmtree(half / "checkpoints" / "000004")
    text = (half / "metrics.jsonl").read_bytes()
    (half / "metrics.jsonl").write_bytes(text[: text.index(b"\n") + 9])
    return checkpoint.find_newest(half)[1].lines


@pytest.mark.core
@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_would_have_been(place):
    program(place)
    code, _, err = place.run("p.rlg", *SMALL, "--out", "whole")
    assert code == 0, err
    lines = copy_of_the_first_half(place.folder / "whole", place.folder / "again")
    code, _, err = place.run("p.rlg", *SMALL, "--resume", "again")
    assert code == 0 and "resumed after 2 iterations" in err, err
    assert f"metrics.jsonl ends after line 1 of {lines}: its {lines} lines come from {place.folder}/again/" in err
    whole, first = computed(place.folder / "whole")
    again, second = computed(place.folder / "again")
    assert again == whole and [x.get("after_iterations") for x in whole] == [0, None, None, 2, None, None, 4]
    assert all((first[t] == second[t]).all() for t in first)  # bit for bit
    # On another layout, in another folder: the first lines are the old ones. It has two pools: ranks that take no step
    # of an update do not speak of its steps.
    written = (place.folder / "p.rlg").read_text()
    apart = "layout actor.generate { dp = 1 }\n  apart actor.update, actor.generate"
    text = written.replace("{ dp = 2, zero = 3 }", "{ dp = 1 }").replace("layout actor.generate { tp = 2 }", apart)
    (place.folder / "p.rlg").write_text(text)
    code, _, err = place.run("p.rlg", *SMALL, "--resume", "whole/checkpoints/000002", "--out", "other")
    assert code == 0, err
    other, third = computed(place.folder / "other")
    for a, b in zip(whole, other, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {
            "evaluation",
            "reshard_bytes",
            "logp_drift",
            "logp_drift_max",
        }:  # bytes and rounding are the layout's
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-7), key
    assert other[:4] == whole[:4]
    # The gradient of a bias of the keys is nearly zero and in good part rounding; Adam makes steps of the usual size of
    # it.
    assert max(abs(first[t] - third[t]).max() for t in first if not t.endswith("k_proj.bias")) < 1e-6
    assert all(checkpoint.find_newest(place.folder / f)[1].iteration == 4 for f in ("whole", "again", "other"))
    place.assert_clean()
    # What is there is not overwritten by mistake.
    code, _, err = place.run("p.rlg", *SMALL, "--resume", "whole/checkpoints/000002")
    assert code == 1 and "has newer checkpoints than 000002" in err and "--out" in err
    code, _, err = place.run("p.rlg", *SMALL, "--out", "whole")
    assert code == 1 and "resume the run in it: --resume whole" in err


@pytest.mark.slow
def test_a_resumed_run_has_its_bf16_states_wherever_they_are_between_updates(place):
    """The first run keeps them on the device; the one that resumes it has them there in its updates alone."""
    engine = (
        "layout actor.generate { tp = 2 }",
        "layout actor.generate {{ tp = 2 }}\n  engine actor.update = fsdp {{ {} }}",
    )
    types = "gradients = bf16, moments = bf16"
    program(place, (engine[0], engine[1].format(types)))
    code, _, err = place.run("p.rlg", *SMALL, "--out", "whole")
    assert code == 0, err
    copy_of_the_first_half(place.folder / "whole", place.folder / "again")
    written = (place.folder / "p.rlg").read_text()
    (place.folder / "p.rlg").write_text(written.replace(types, f"{types}, offload = phase"))
    code, _, err = place.run("p.rlg", *SMALL, "--resume", "again")
    assert code == 0 and "resumed after 2 iterations" in err, err
    (whole, first), (again, second) = (computed(place.folder / name) for name in ("whole", "again"))
    assert again == whole and all((first[t] == second[t]).all() for t in first)
    place.assert_clean()


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_two_kills_cost_seconds_and_no_row():
    """`make chaos` in short; what is killed, and when, is drawn."""
    command = [sys.executable, str(ROOT / "bench" / "chaos.py"), "--kills", "2", "--iterations", "12", "--gap", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    wrong = {k: figures[k] for k in ("rows_lost", "rows_twice", "differing", "hangs", "leftovers")}
    assert figures["faults"] == 2 and figures["finished"] == figures["runs"] and not any(wrong.values()), done.stdout


@pytest.mark.slow
def test_a_function_host_and_the_controllers_are_started_again_at_once(place):
    """The next iteration's functions are asked for already where they die in one: `make chaos` dies everywhere."""
    program(place, *ONE_RANK, iterations=10)
    (points := place.folder / "points").mkdir()
    functions = "functions of host 0"
    controllers = "dock of host 0"
    deaths = [
        points_file(points, functions, "share of host.reward in train/2"),
        points_file(points, functions, "before put of host.advantage in train/4"),
        points_file(points, functions, "end in train/6"),
        points_file(points, controllers, "share of host.reward in train/8"),
    ]
    for death in deaths:
        death.touch()
    code, _, err = place.run("p.rlg", *SMALL, "--out", "results", MSRL_POINTS=str(points))
    assert code == 0 and "restarting" not in err, err
    assert not any(death.exists() for death in deaths)
    assert [int(n) for n in re.findall(r"functions of host 0 died in .* in train/(\d+)\b.*; started again", err)] == [
        2,
        4,
        6,
    ], err
    assert len(metrics(place.folder / "results")) == 10 + 6
    place.assert_clean()


@pytest.mark.slow
@pytest.mark.long
def test_a_function_that_is_killed_twice_on_a_row_ends_the_run_with_it(place):
    place.function("os.kill(os.getpid(), 9)")
    program(place, *ONE_RANK, MINE)
    code, _, err = place.run("p.rlg", *SMALL, "--out", "results")
    assert code == 3, err
    # Where it died, is what was last heard of it: the source, if its own word of the reward was lost with it.
    assert (
        len(re.findall(r"functions of host 0 died in \S+ in held_out/0\b.*; started again", err)) == 2
        and "restarting" not in err
    ), err
    told = "error[run-failed]: `host.reward` (line 26 of p.rlg) failed on row 0 of iteration 0: ProcessDied: "
    assert (
        f"{told}its process was killed in it 2 times" in err and "\n  response: '" in err and "\n  answer: '" in err
    ), err
    place.assert_clean()


@pytest.mark.slow
def test_a_function_that_ends_its_process_ends_the_run_at_once_with_its_line(place):
    place.function("if time.time() and answer.startswith('4'):\n        os.abort()\n    return 0.0")
    program(place, *ONE_RANK, MINE, evaluated=False, iterations=100)
    code, _, err = place.run("p.rlg", *SMALL, "--out", "results")
    assert code == 3 and err.count("started again") == 1 and "restarting" not in err, err
    found = re.search(
        r"`host.reward` \(line 26 of p.rlg\) failed on row \d+ of iteration \d+: ProcessDied: (.*?); the files", err
    )
    assert found and found[1] == f"it ended its process: Aborted, at {place.folder}/mine.py:7", err
    assert "\n  answer: '4" in err and "/ray/" not in err, err
    assert "Fatal Python error: Aborted" in (place.folder / "results" / "logs" / "functions-of-host-0.log").read_text()
    place.assert_clean()


@pytest.mark.slow
def test_a_supervisor_that_is_killed_leaves_nothing_and_its_run_can_go_on(place):
    program(place, *ONE_RANK, iterations=8)
    process = place.start("p.rlg", *SMALL, "--out", "results")
    place.wait_for_lines("results", 5)
    process.kill()
    process.communicate(timeout=60)
    place.assert_clean(within=20)
    code, _, err = place.run("p.rlg", *SMALL, "--resume", "results")
    assert code == 0, err
    assert [x["iteration"] for x in metrics(place.folder / "results") if "iteration" in x] == list(range(8))


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_saves(place):
    program(place, *ONE_RANK, iterations=300, save=100)
    process = place.start("p.rlg", *SMALL, "--out", "results")
    place.wait_for_lines("results", 3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert (
        "ending after this iteration, with a checkpoint" in err
        and "continue with --resume results" in err
        and "Traceback" not in err
    )
    done = len([x for x in metrics(place.folder / "results") if "iteration" in x])
    assert [p.name for p in (place.folder / "results" / "checkpoints").iterdir()] == [f"{done:06d}"]
    place.assert_clean()


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_is_asked_twice_ends_at_once(place):
    place.function("time.sleep(0.3)\n    return 0.0")  # an iteration of ten seconds
    program(place, MINE, evaluated=False, iterations=300)
    process = place.start("p.rlg", *SMALL, "--out", "results")
    place.wait_for_lines("results", 1)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and time.monotonic() - begin < 8
    assert (
        "repeat the signal to end at once" in err and "interrupted; the files of the run so far are in results" in err
    ), err
    place.assert_clean()


@pytest.mark.slow
def test_a_run_that_waits_for_a_function_ends_by_one_signal(place):
    called = place.folder / "called"
    place.function(f"open({str(called)!r}, 'w').close()\n    time.sleep(600)\n    return 0.0")
    program(place, *ONE_RANK, MINE, evaluated=False, iterations=300)
    process = place.start("p.rlg", *SMALL, "--out", "results")
    until = time.monotonic() + 120
    while not called.exists() and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and time.monotonic() - begin < 20, err
    assert re.search(r"for \d+ s no row has moved: ending at once\n.*`actor.update`.* has waited", err, re.DOTALL), err
    place.assert_clean()


@pytest.mark.slow
def test_a_full_disk_costs_a_checkpoint_and_no_more(place):
    if not shutil.which("unshare") or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no file system of its own can be mounted here")
    program(place, *ONE_RANK, iterations=6, save=2, keep=5)
    (place.folder / "small").mkdir()
    # Room for one checkpoint and a half.
    size = (
        sum(f.stat().st_size for f in (ROOT / "examples" / "arithmetic" / "model").glob("*.safetensors")) * 3 * 3 // 2
    )
    run = (
        f"{sys.executable} -c 'import sys; from msrl_graph.cli import run_main; sys.exit(run_main())' p.rlg "
        f"{' '.join(SMALL)} --out small/r"
    )
    script = f"mount -t tmpfs -o size={size} none small && {run}; code=$?; ls small/r/checkpoints; exit $code"
    environment = {**os.environ, "TMPDIR": str(place.temporary)}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        cwd=place.folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        "the checkpoint after 4 iterations could not be written" in done.stderr
        and "000002 stays the last one" in done.stderr
    ), done.stderr
    assert "000002" in done.stdout and "000004" not in done.stdout.split() and "iteration 5 (6 of 6)" in done.stderr
    # The run goes on to its end, and does not end as one that has the checkpoint that it was asked for.
    assert (
        done.returncode == 3
        and "error[run-failed]: the checkpoint after 6 iterations could not be written" in done.stderr
    )
    assert "Traceback" not in done.stderr
    place.assert_clean()
