"""Runs whose rows are filtered: the same rows on any layout, states that go on after a resume, refills that suffice and
that do not."""

import json
from pathlib import Path

import pytest
from place import metrics, ran, rows_of
from tiny import scoring

from msrl_graph.runtime.metrics.recorder import TIMES

pytestmark = pytest.mark.slow

FILTERED = """
import pf_ppo_pow
algorithm mine extends pf_ppo_pow {
  node host.pairs(score) { select = best_worst(), per = prompt }
  reward.infer -> host.pairs -> host.filter
  node critic.update { mini_batch = 8, epochs = 1 }
  node actor.update { mini_batch = 8, epochs = 2, optimizer = adamw(lr = 1e-5) }
}
cluster laptop { device = "cpu", nodes = 1, devices_per_node = RANKS }
deploy mine on laptop {
  set prompts = 8
  set prompt_len = 6
  set response_len = 5
  model policy = "./model"
  model value = "./model"
  model reward_model = "./judge"
  data source = "train.jsonl" { prompt = "prompt" }
  LAYOUT
  run { iterations = 2, seed = 3, save = 1, keep = 2 }
}
"""
REFILLED = """
import dapo
algorithm mine extends dapo {
  node host.reward(response, answer) -> score { call = REWARD }
  state iterations : f32 = 0
  node host.count(iterations) -> iterations { call = "count.py:count", per = batch }
  host.reward -> host.count
}
cluster laptop { device = "cpu", nodes = 1, devices_per_node = 2 }
deploy mine on laptop {
  set prompts = 8
  set group = 4
  set prompt_len = 6
  set response_len = 5
  set buffer = 2
  model policy = "./model"
  data source = "train.jsonl" { prompt = "prompt", answer = "answer" }
  run { iterations = 2, seed = 0 }
}
"""


def told(folder: Path) -> list[dict[str, float]]:
    """The lines of the metrics without what is of time and place."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in metrics(folder)]


@pytest.mark.long
def test_the_same_rows_on_one_rank_and_four_and_after_a_resume(place):
    scoring(place.folder / "judge")
    (place.folder / "p.rlg").write_text(FILTERED.replace("RANKS", "1").replace("LAYOUT", ""))
    ran(place, "--out", "one", "--record")
    ran(place, "--resume", "one/checkpoints/000001", "--out", "resumed")
    layouts = "layout actor.update, critic.update { dp = 2, tp = 2 }\n  layout actor.generate { dp = 4 }"
    (place.folder / "p.rlg").write_text(FILTERED.replace("RANKS", "4").replace("LAYOUT", layouts))
    ran(place, "--out", "four", "--record")
    for iteration in range(2):
        one, four = (rows_of(place.folder / name, iteration).to_pydict() for name in ("one", "four"))
        for column in ("prompt", "response", "host_pairs_times", "host_filter_times"):
            assert one[column] == four[column], (iteration, column)
        assert one["score"] == pytest.approx(four["score"], rel=1e-4)
        # Of each prompt's five responses the best and the worst, and of those as many as there are, some again.
        assert sum(n or 0 for n in one["host_pairs_times"]) == 16 == sum(n or 0 for n in one["host_filter_times"])
        # Those that came again stand there again: what was trained on is what has an advantage.
        again = [r != origin for r, origin in zip(one["row"], one["origin_row"], strict=True)]
        assert sum(a is not None for a in one["advantage"]) == 16 and len(again) - sum(again) == 40 and sum(again) > 0
        assert all(a is not None for a, repeat in zip(one["advantage"], again, strict=True) if repeat)
        assert max(n or 0 for n in one["host_filter_times"]) > 1
        line = metrics(place.folder / "four")[iteration]
        assert line["kept/host.pairs"] == line["distinct/host.pairs"] == 16 / 40 and line["kept/host.filter"] == 1
        assert line["distinct/host.filter"] == sum(n is not None and n > 0 for n in one["host_filter_times"]) / 16
    lines = told(place.folder / "one")
    resumed = told(place.folder / "resumed")
    assert resumed == lines and len({line["kl_coef"] for line in lines}) == 2
    assert lines[0]["kl_coef"] == 0.05 and lines[0]["rows"] == 16 * 3 and lines[0]["updates"] == 2 + 4
    assert [line["kl_coef"] for line in told(place.folder / "four")] == pytest.approx(
        [line["kl_coef"] for line in lines], rel=1e-4
    )


def test_a_refill_goes_on_until_the_batch_is_full_and_ends_where_it_never_is(place):
    (place.folder / "count.py").write_text("def count(iterations):\n    return iterations + 1\n")
    (place.folder / "p.rlg").write_text(REFILLED.replace("REWARD", "exact_match()"))
    ran(place, "--out", "one", "--record")
    for iteration, line in enumerate(metrics(place.folder / "one")):
        rows = rows_of(place.folder / "one", iteration).to_pydict()
        assert line["iterations"] == iteration  # counted by a node that reads nothing but its state
        assert line["prompts_drawn"] == 8 * (1 + line["refills"]) == len(rows["row"]) / 4
        mixed = [p for p in range(int(line["prompts_drawn"])) if 0 < sum(rows["score"][4 * p : 4 * p + 4]) < 4]
        assert line["prompts_kept"] == len(mixed) >= 8 and line["rows"] == 32
        # What is over is cut in the source's order: the first eight are trained on.
        trained = [r // 4 for r, advantage in zip(rows["row"], rows["advantage"], strict=True) if advantage is not None]
        assert sorted(set(trained)) == mixed[:8]
    lines = (place.folder / "one" / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["refills"] for line in lines) > 0

    (place.folder / "p.rlg").write_text(
        REFILLED.replace("REWARD", '"mine.py:score"').replace("seed = 0", "seed = 0, restarts = 0")
    )
    place.function("return 1.0")
    code, _, err = place.run("p.rlg", "--out", "none")
    message = (
        "`host.filter` in iteration 0: 0 of 88 prompts in 11 rounds have rows that pass the filter, 8 are needed; "
        "raise `refill`"
    )
    assert code == 3 and message in " ".join(err.split()), err
    place.assert_clean()


def test_an_adaptive_refill_draws_about_as_many_as_are_needed_the_same_on_any_layout_and_after_a_resume(place):
    (place.folder / "count.py").write_text("def count(iterations):\n    return iterations + 1\n")
    text = REFILLED.replace("REWARD", "exact_match()").replace("iterations = 2", "iterations = 8")
    text = text.replace("set prompts = 8", "set prompts = 24").replace("set group = 4", "set group = 8")
    text = text.replace("seed = 0", "seed = 0, save = 4, keep = 9")
    adaptive = text.replace("  state iterations", "  node host.filter { adaptive = true }\n  state iterations")
    (place.folder / "p.rlg").write_text(text)
    ran(place, "--out", "plain")
    (place.folder / "p.rlg").write_text(adaptive)
    ran(place, "--out", "two", "--record")
    plain = metrics(place.folder / "plain")
    two = metrics(place.folder / "two")
    assert two[0]["refill/prompts"] == 24 and all(line["rows"] == 192 for line in (*plain, *two))
    for line in two:
        assert line["prompts_drawn"] == line["refill/prompts"] * (1 + line["refills"]) and line["prompts_kept"] >= 24
    later = [sum(line["prompts_drawn"] for line in lines[2:]) for lines in (plain, two)]
    refills = [sum(line["refills"] for line in lines[2:]) for lines in (plain, two)]
    assert later[1] < 0.9 * later[0] and refills[1] < refills[0], (later, refills)
    # The first 24 that pass are trained on, in the source's order.
    rows = rows_of(place.folder / "two", 7).to_pydict()
    mixed = [p for p in range(int(two[7]["prompts_drawn"])) if 0 < sum(rows["score"][8 * p : 8 * p + 8]) < 8]
    trained = [r // 8 for r, advantage in zip(rows["row"], rows["advantage"], strict=True) if advantage is not None]
    assert sorted(set(trained)) == mixed[:24]
    (place.folder / "p.rlg").write_text(adaptive)
    ran(place, "--resume", "two/checkpoints/000004", "--out", "resumed")
    assert told(place.folder / "resumed") == told(place.folder / "two")
    (place.folder / "p.rlg").write_text(adaptive.replace("devices_per_node = 2", "devices_per_node = 1"))
    ran(place, "--out", "one")
    for line, other in zip(metrics(place.folder / "one"), two, strict=True):
        for key in ("refill/prompts", "prompts_drawn", "prompts_kept", "response_tokens", "rows"):
            assert line[key] == other[key], (key, line["iteration"])
