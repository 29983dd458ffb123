"""States of real runs under `staleness` (runtime/driver/function_tasks.py).

A state has one value in each iteration, the one that the previous iteration left. Nodes that score rows use the
temperature at which the rows were drawn.
"""

import os
import signal

import pytest
from place import SMALL, metrics, ran, rows_of
from stale_runs import APART, named, stale

STATES = [
    ("  source(prompts)", "  state heat : f32 = 1\n  state count : f32 = 0\n  source(prompts)"),
    ("actor.generate(prompt) -> response, gen_logp", "actor.generate(prompt, heat) -> response, gen_logp"),
    ("temperature = 1.0 }", "temperature = heat }"),
    (
        "  node host.advantage(",
        """  node host.hotter(reward, heat) -> heat { call = "states.py:hotter", per = batch }
  node host.counted(reward, count) -> count { call = "states.py:counted", per = batch }
  node host.advantage(""",
    ),
    ("  host.reward -> host.advantage", "  host.reward -> host.advantage, host.hotter, host.counted"),
    ("lr = 2e-4", "lr = 1e-12"),  # so that log-probabilities change with the temperature alone
]
FUNCTIONS = """def hotter(reward, heat):
    return heat * 1.25


def counted(reward, count):
    return count + 1
"""
WHERE = {
    "on devices of their own": APART,
    "on the same devices": [item for item in APART if not item[0].startswith("layout")],
}


def program(place, where, versions, saves="save = 4, keep = 9, deterministic = true"):
    (place.folder / "states.py").write_text(FUNCTIONS)
    place.write(*WHERE[where], stale(versions), *STATES, ("seed = 0", f"seed = 0, {saves}"), evaluated=False)


def seen(place, out, iterations):
    lines = metrics(place.folder / out)
    assert [line["count"] for line in lines] == [*range(iterations)]
    assert [line["heat"] for line in lines] == [1.25**i for i in range(iterations)]
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_states_go_on_by_one_step_an_iteration_and_rows_are_scored_at_the_temperature_that_drew_them(place, where):
    program(place, where, 1)
    ran(place, *SMALL, "--iterations", "6", "--out", "out")
    lines = seen(place, "out", 6)
    assert [line["heat/age"] for line in lines] == [line["staleness"] for line in lines] == [0, 1, 1, 1, 0, 1]
    for line in lines:
        drift = line.get("logp_drift_max", 0.0) + line.get("logp_drift_max/1", 0.0)
        assert drift < 1e-5, line


@pytest.mark.slow
def test_they_do_whatever_is_killed_and_go_on_from_a_checkpoint(place):
    """A function host dies between the two parts of a task, and a rank, so that the run goes on from a checkpoint."""
    program(place, "on devices of their own", 2)
    ran(place, *SMALL, "--iterations", "10", "--record", "--out", "first")
    process = place.start("p.rlg", *SMALL, "--iterations", "10", "--record", "--out", "second")
    place.wait_for_lines("second", 2)
    for pid in [p for p in place.processes() if named(p).startswith("ray::FunctionHost")][:2]:
        os.kill(pid, signal.SIGKILL)
    place.wait_for_lines("second", 6)
    os.kill(next(p for p in place.processes() if named(p).startswith("ray::RankHost")), signal.SIGKILL)
    _, err = process.communicate(timeout=place.patience)
    assert process.returncode == 0 and "restarting" in err, err
    for one, other in zip(seen(place, "first", 10), seen(place, "second", 10), strict=True):
        assert all(one[key] == other[key] for key in ("staleness", "heat/age", "rows", "reward"))
    for number in range(10):
        assert rows_of(place.folder / "first", number).equals(rows_of(place.folder / "second", number))
