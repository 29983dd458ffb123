"""The best checkpoint by a figure of an evaluation, and a training that ends when the figure gets no better."""

import math
import re

import pytest
from language import context, diagnose
from place import EXAMPLE, ONE_RANK, SMALL, metrics
from stale_runs import APART, stale

from msrl_graph import compile, run
from msrl_graph.analysis.async_schedule import Sends, lead_of_pools
from msrl_graph.ir.evaluation import Evaluation
from msrl_graph.runtime.metrics.best import best_figures, early_stop_reason

PROGRAM = EXAMPLE / "grpo.rlg"
TEXT = PROGRAM.read_text()
STATED = next(line for line in TEXT.splitlines() if line.startswith("  evaluate held_out"))


def evaluating(**stated):
    return Evaluation(**{"data": "test", "every": 1, "report": ("reward",), "samples": 0, "temperature": None} | stated)


def lines(*values, key="reward"):
    return [{"evaluation": "test", "after_iterations": 10 * i, key: value} for i, value in enumerate(values)]


def test_the_first_of_the_greatest_figures_is_the_best():
    (best,) = best_figures([evaluating(best="reward")], lines(0.1, math.nan, 0.5, 0.5, None, 0.2))
    assert (best.iteration, best.value, best.since) == (20, 0.5, 3)
    assert best.description == "reward on test 0.500 after 20 iterations"


def test_the_smallest_is_where_that_is_the_goal():
    bests = best_figures([evaluating(best="reward", goal="minimize")], lines(0.1, 0.3, -2.0, 0.0))
    assert [(b.iteration, b.value, b.since) for b in bests] == [(20, -2.0, 1)]


def test_figures_of_other_evaluations_and_none_that_is_finite_are_no_best():
    assert not best_figures([evaluating(best="reward", name="other")], lines(0.1))
    assert not best_figures([evaluating(best="reward")], lines(math.nan, None))
    assert not best_figures([evaluating()], lines(0.1))


@pytest.mark.parametrize(("patience", "ends"), [(0, False), (3, True), (4, False)])
def test_the_training_ends_when_the_patience_is_spent(patience, ends):
    bests = best_figures([evaluating(best="reward", patience=patience)], lines(0.6, 0.5, 0.4, 0.3))
    why = "3 evaluations gave nothing better than reward on test 0.600 before the training"
    assert early_stop_reason(bests) == (why if ends else "")


def program(evaluation):
    return TEXT.replace(STATED, f"  evaluate held_out {{ {evaluation} }}")


WRONG = {
    'report = reward, every = 2, best = "rewards"': ("has no figure `rewards`", "did you mean `reward`?"),
    'report = reward, every = 2, at = [2], best = "reward/maj@2"': (
        "has no figure `reward/maj@2`",
        "did you mean `reward/pass@2`?",
    ),
    'report = reward, best = "reward"': ("runs only before and after the training", "add `every = 20`"),
    "report = reward, every = 2, patience = 2": ("`patience` needs `best`", 'add `best = "reward"`'),
    "report = reward, every = 2, goal = minimize": ("`goal` needs `best`", 'add `best = "reward"`'),
}


@pytest.mark.parametrize("stated", WRONG)
def test_what_says_nothing_is_refused_and_the_help_is_a_way_out(stated):
    (found,) = diagnose(program(stated), context(EXAMPLE))
    message, help = WRONG[stated]
    assert message in found.message and found.help.startswith(help)
    add = re.search("add `(.*?)`", found.help)
    meant = re.search("mean `(.*?)`", found.help)
    mended = f"{stated}, {add[1]}" if add else re.sub('best = ".*"', f'best = "{meant[1]}"', stated)
    assert not diagnose(program(mended), context(EXAMPLE))


def test_a_figure_of_a_part_may_decide():
    text = program('report = reward, every = 2, by = answer, best = "reward/answer=7"')
    assert not diagnose(text, context(EXAMPLE))


def test_the_plan_and_a_dry_run_say_what_is_kept(capsys):
    plan = compile(PROGRAM, text=program('report = reward, every = 2, best = "reward", patience = 3'))
    kept = "held_out: the checkpoint with the greatest `reward` is kept; the training ends after 3 evaluations without"
    assert kept in " ".join(plan.explain().split())
    run(plan, dry_run=True)
    assert "the one with the best `reward on held_out`; restarts" in capsys.readouterr().out


@pytest.mark.parametrize(("best", "begins"), [('best = "reward"', 3), ("", 2)])
def test_with_deterministic_no_iteration_generates_with_weights_from_before_a_checkpoint_that_may_be_there(
    best, begins
):
    """A run that goes on from the best checkpoint draws the same."""
    text = program(f"report = reward, every = 3, {best}").replace("seed = 0", "seed = 0, deterministic = true")
    for old, new in (*APART, stale(2)):
        text = text.replace(old, new)
    plan = compile(PROGRAM, text=text)
    (pool,) = lead_of_pools(plan)
    assert Sends(plan).update_iteration(pool, 4) == begins


# A figure that rises until the third iteration and falls after it.
FUNCTIONS = """def counted(reward, count):
    return count + 1


def quality(response: str, count: float) -> float:
    return 1 - (count - 3) ** 2 / 100
"""
QUALITY = [
    ("  columns {", "  columns {\n    quality : f32"),
    ("  source(prompts)", "  state count : f32 = 0\n  source(prompts)"),
    (
        "  node host.advantage(",
        """  node host.counted(reward, count) -> count { call = "mine.py:counted", per = batch }
  node host.quality(response, count) -> quality { call = "mine.py:quality" }
  node host.advantage(""",
    ),
    (
        "  host.reward -> host.advantage",
        "  actor.generate -> host.quality\n  host.reward -> host.advantage, host.counted",
    ),
]
PLACES = {"in step": ONE_RANK, "ahead by two": [*APART, stale(2)]}


def stated(patience):
    best = f'every = 1, report = quality, samples = 1, temperature = 0, best = "quality", patience = {patience}'
    other = "evaluate last { data = held_out, report = reward, samples = 1, temperature = 0 }"
    return (STATED, f"  evaluate held_out {{ {best} }}\n  {other}")


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
def test_a_run_keeps_its_best_checkpoint_and_ends_when_nothing_gets_better(place, where):
    (place.folder / "mine.py").write_text(FUNCTIONS)
    place.write(*PLACES[where], *QUALITY, stated(2), ("seed = 0", "seed = 0, keep = 1"))
    code, out, err = place.run("p.rlg", *SMALL, "--iterations", "20", "--out", "out")
    assert code == 0, err
    place.assert_clean()
    words = "quality on held_out 1.000 after 3 iterations"
    assert f"ended after 5 of 20 iterations: 2 evaluations gave nothing better than {words}" in err
    assert f"best: {words}: " in out and out.endswith("out/checkpoints/000003\n")
    assert sorted(p.name for p in (place.folder / "out" / "checkpoints").iterdir()) == ["000003", "000005"]
    before = metrics(place.folder / "out")
    evaluated = [(x["evaluation"], x["after_iterations"]) for x in before if "evaluation" in x]
    assert evaluated == [
        *(("held_out", 0), ("last", 0)),
        *(("held_out", i) for i in range(1, 6)),
        ("last", 5),
    ]
    assert (place.folder / "out" / "weights" / "actor" / "model.safetensors").is_file()

    if where != "in step":
        return
    # What has ended so is at its end; with more patience it goes on, and the best stays.
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "20", "--resume", "out")
    assert code == 0 and "ended after 5 of 20 iterations: 2 evaluations" in err, err
    assert [(x.get("iteration"), x.get("quality")) for x in metrics(place.folder / "out")] == [
        (x.get("iteration"), x.get("quality")) for x in before
    ]
    place.write(*PLACES[where], *QUALITY, stated(20), ("seed = 0", "seed = 0, keep = 1"))
    code, out, err = place.run("p.rlg", *SMALL, "--iterations", "7", "--resume", "out")
    assert code == 0, err
    assert f"best: {words}: " in out and out.endswith("out/checkpoints/000003\n")
    assert sorted(p.name for p in (place.folder / "out" / "checkpoints").iterdir()) == ["000003", "000007"]
    place.assert_clean()
