"""Partial rollout: an iteration takes the first prompts whose responses have ended; the others go on in the next one,
with its weights, and enter the update once."""

import os
import signal
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from place import MINE, SMALL, metrics, ran, rows_of
from stale_runs import APART, named, off, saved, stale

LONG = [
    ("i32[<= 5]", "i32[<= 48]"),
    ("temperature = 1.0", "temperature = 20.0, partial = 0.5, cuts = 2"),
    ("lr = 2e-4", "lr = 2e-2"),  # so that versions differ, hot as responses are drawn to be of many lengths
]
WAYS = {
    "apart and ahead": [*APART, stale(1)],
    "apart and in step": [*APART],
    "on one pool, two groups": [
        *APART[2:],
        ("layout actor.generate { tp = 2 }", "layout actor.generate { dp = 2 }"),
    ],
    "on one pool, one group": [*APART[2:]],
}
OPTIONS = [*SMALL, "--iterations", "6", "--record"]


def written(place, way, *more):
    place.function("return float(len(response) % 2)")
    place.write(*WAYS[way], *LONG, MINE, ("seed = 0", "seed = 0, save = 1, keep = 9"), *more, evaluated=False)


def recorded(place, out):
    return [rows_of(place.folder / out, i).to_pylist() for i in range(6)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["apart and ahead", pytest.param("on one pool, two groups", marks=pytest.mark.long)])
def test_every_token_is_of_the_version_that_is_told_and_no_older_than_it_may_be(place, way):
    written(place, way)
    ran(place, *OPTIONS, "--out", "out")
    behind = int("ahead" in way)
    lines = metrics(place.folder / "out")
    rows = recorded(place, "out")
    prompts = Counter()
    for number, some in enumerate(rows):
        taken = [row for row in some if row["response"] is not None]
        assert len(taken) == 32 and len({row["prompt_row"] for row in taken}) == 8
        prompts.update(str(row["prompt"]) for row in taken)
        for row in taken:
            assert len(row["made"]) == len(row["response"]) == len(row["gen_logp"])
            assert all(a <= b for a, b in pairwise(row["made"]))
            assert number - 2 - behind <= min(row["made"]) and max(row["made"]) <= number
        oldest = max(number - min(row["made"]) for row in taken)
        assert oldest == lines[number]["staleness_max"]
    assert max(prompts.values()) == 4, "a prompt has entered the update twice"
    assert max(line["staleness_max"] for line in lines) > behind, "nothing was cut"
    assert sum(line["carried_over"] for line in lines) == 4 * 6
    mixed = [row for some in rows for row in some if row["response"] is not None and len(set(row["made"])) > 1]
    assert mixed
    for row in mixed[:6]:
        for version in set(row["made"]):
            mine = np.array(row["made"]) == version
            other = next(v for v in row["made"] if v != version)
            assert off(saved(place, "out", version), row, 20.0)[mine].max() < 1e-5
            assert off(saved(place, "out", other), row, 20.0)[mine].max() > 1e-5


@pytest.mark.slow
@pytest.mark.long
def test_the_same_prompts_are_taken_whoever_draws_them(place):
    """The first iteration of any layout, whose weights are the same."""
    found = {}
    for way in ("on one pool, two groups", "on one pool, one group", "apart and in step"):
        written(place, way)
        out = way.replace(" ", "-").replace(",", "")
        ran(place, *SMALL, "--iterations", "1", "--record", "--out", out)
        rows = rows_of(place.folder / out, 0).to_pylist()
        found[way] = {row["row"]: row["response"] for row in rows if row["response"] is not None}
    first, *others = found.values()
    assert len(first) == 32 and all(other == first for other in others)


@pytest.mark.slow
def test_a_run_that_loses_ranks_goes_on_with_what_was_cut_and_without_what_was_overdue(place):
    written(
        place, "on one pool, two groups", ("partial = 0.5, cuts = 2", "partial = 1, cuts = 1, overdue = drop_group")
    )
    options = [*OPTIONS, "--set", "group=2"]  # few, so that prompts differ in how long they take
    ran(place, *options, "--out", "first")
    process = place.start("p.rlg", *options, "--out", "second")
    place.wait_for_lines("second", 3)
    os.kill(next(p for p in place.processes() if named(p).startswith("ray::RankHost")), signal.SIGKILL)
    _, err = process.communicate(timeout=place.patience)
    assert process.returncode == 0 and err.count("restarting") == 1, err
    assert recorded(place, "first") == recorded(place, "second")
    both = (metrics(place.folder / out) for out in ("first", "second"))
    told = [[(line["carried_over"], line["overdue"]) for line in lines] for lines in both]
    assert told[0] == told[1] and sum(overdue for _, overdue in told[0]) > 0


@pytest.mark.slow
@pytest.mark.long
def test_a_recording_is_replayed_on_another_layout_and_gone_on_with(place):
    """The prompts that the recorded run took, and those that it cut in the same order."""
    written(place, "on one pool, two groups")
    ran(place, *OPTIONS, "--out", "first")
    lines = metrics(place.folder / "first")
    replay = ["--record", "--replay", "first"]
    written(place, "on one pool, one group")
    ran(place, *SMALL, "--iterations", "3", *replay, "--out", "second")
    ran(place, *SMALL, "--iterations", "6", *replay, "--resume", "second")
    for one, other in zip(recorded(place, "first"), recorded(place, "second"), strict=True):
        for name in ("row", "prompt", "response", "gen_logp", "made", "actor_generate_times"):
            assert [row[name] for row in one] == [row[name] for row in other], name
    for one, other in zip(lines, metrics(place.folder / "second"), strict=True):
        assert other["carried_over"] == 4
        assert [other[key] for key in ("reward", "staleness_max")] == [one["reward"], one["staleness_max"]]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3, abs=1e-6)
    written(place, "on one pool, one group", (", gen_logp, made {", ", gen_logp {"), ("    made : i32[response]\n", ""))
    ran(place, *SMALL, "--iterations", "2", "--replay", "first", "--out", "third")
    for one, other in zip(lines[:2], metrics(place.folder / "third"), strict=True):
        assert other["reward"] == one["reward"] and "staleness_max" not in other


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            ("source -> actor.generate\n", "source -> actor.generate { stream = 2 }\n"),
            "`stream` of `source -> actor.generate` together with `partial`",
        ),
        (
            (
                "  reference.infer, host.advantage -> actor.update",
                "  node host.some(reward) { keep = reward > 0.5, refill = 2 }\n"
                "  host.advantage -> host.some -> actor.update\n  reference.infer -> actor.update",
            ),
            "`refill` of `host.some` together with `partial`",
        ),
        (
            (
                "  source -> actor.generate\n",
                '  node host.twice(prompt) { select = "twice.py:twice", per = prompt }\n'
                "  source -> host.twice -> actor.generate\n",
            ),
            "`select` of `host.twice` together with `partial`",
        ),
    ],
)
def test_what_a_run_cannot_do_beside_it_is_refused_by_name(place, change, what):
    (place.folder / "twice.py").write_text("def twice(*columns) -> list[int]:\n    return [0, 0]\n")
    written(place, "on one pool, one group", change)
    code, _, err = place.run("p.rlg", *SMALL)
    assert code and f"error[not-yet]: {what} can be planned, but not run" in err and "leave one of the two out" in err
