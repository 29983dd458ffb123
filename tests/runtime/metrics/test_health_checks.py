"""Warnings of a run that goes wrong: sequences of metrics in, words out. And how far rewards differ, whoever had which
rows."""

import numpy as np
import pytest
from folders import ROOT
from stage import one_rank

from msrl_graph import compile
from msrl_graph.runtime.data.columns import ColumnData
from msrl_graph.runtime.metrics.health_checks import CALM, PAGE, HealthChecks, judged_columns
from msrl_graph.runtime.metrics.reward_variance import ColumnMeans, prompt_spreads
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import Report

WHERE = {"reward": "`host.reward`, line 26 of grpo.rlg", "generate": "`actor.generate`, line 23 of grpo.rlg"}
WHERE["update"] = "`actor.update`, line 28 of grpo.rlg"


def told(metrics, *changes):
    """By iteration, the first of them 1, what is told of these lines."""
    symptoms = HealthChecks(one_rank(*changes))
    return {i: words for i, line in enumerate(metrics, 1) if (words := symptoms.look({"iteration": i, **line}))}


def stated(text):
    return ("iterations = 320, seed = 0", f"iterations = 320, seed = 0, {text}")


def test_a_reward_without_spread():
    flat = {"reward/flat": 1.0}
    found = told([flat] * 7 + [{"reward/flat": 0.5}] * CALM + [flat] * 6)
    words = (
        "`reward` has been the same for all responses to a prompt for 5 iterations: nothing is learnt from it, "
        "in iteration {}"
    )
    assert found == {i: [f"warning: {words.format(i)} ({WHERE['reward']}): {PAGE}"] for i in (5, 7 + CALM + 5)}
    assert told([flat] * 3, stated("warn_flat = 2")).keys() == {2} and told([flat] * 20, stated("warn_flat = 0")) == {}
    # An iteration that tells nothing of it, as one without rows, begins anew.
    assert told([flat] * 4 + [{}] + [flat] * 4) == {}


def test_responses_that_are_cut():
    found = told([{"response_truncated": x} for x in (0.5, 0.51, 0.9, *[0.2] * CALM, 0.625)])
    assert found[2] == [
        f"warning: 51% of the responses were cut at their bound in iteration 2 ({WHERE['generate']}): {PAGE}"
    ]
    assert found.keys() == {2, 4 + CALM} and told([{"response_truncated": 1.0}], stated("warn_truncated = 1")) == {}


def test_an_entropy_that_collapses():
    found = told([{"entropy": x} for x in (2.0, 1.0, 0.21, 0.19, 0.1, *[0.3] * CALM, 0.1)])
    assert found[4] == [
        f"warning: the entropy has fallen from 2 to 0.19 nats a token in iteration 4 ({WHERE['update']}): {PAGE}"
    ]
    assert (
        found.keys() == {4, 6 + CALM} and told([{"entropy": 2.0}, {"entropy": 0.0}], stated("warn_entropy = 0")) == {}
    )


def test_a_figure_that_swings_about_its_threshold_is_told_of_once():
    assert told([{"entropy": 2.0}] + [{"entropy": x} for x in (0.19, 0.21)] * CALM).keys() == {2}


def test_a_divergence_past_its_bound():
    found = told([{"loss/kl": 0.9, "clip/kl": 0.1}, {"loss/kl": 1.25, "clip/kl": 3}, {"loss/kl": 1.5, "clip/kl": 0.1}])
    text = "warning: `{}` is {} nats a token, over 1, in iteration 2 ({}): {}"
    assert found == {
        2: [text.format("loss/kl", "1.25", WHERE["update"], PAGE), text.format("clip/kl", "3", WHERE["update"], PAGE)]
    }
    assert (
        told([{"loss/kl": 9.0}], stated("warn_kl = 0")) == {}
        and told([{"loss/kl": 9.0}], stated("warn_kl = 9.5")) == {}
    )


def test_a_run_that_goes_on_does_not_tell_again():
    lines = [{"iteration": i, "entropy": e} for i, e in enumerate((2.0, 0.1, 0.1))]
    symptoms = HealthChecks(one_rank())
    for line in lines[:2]:
        symptoms.look(line)
    assert symptoms.look(lines[2]) == []


def test_the_page_of_warnings_is_there():
    assert (ROOT / PAGE).read_text(encoding="utf-8").startswith("# When training goes wrong\n")


def test_what_advantages_are_made_of():
    assert judged_columns(one_rank().graph) == ["reward"]
    ppo = compile("ppo", model="tiny").graph
    assert judged_columns(ppo) == ["score"]


@pytest.mark.parametrize("samples", [1, 4])
def test_the_spread_of_rewards_is_that_of_all_rows(samples):
    plan = compile("grpo", model="tiny", sets={"prompts": "16", "group": str(samples)})
    draw = np.random.default_rng(0)
    node = plan.graph.node("host.reward")
    rows = np.arange(16 * samples)
    values = (1e6 + draw.integers(0, 3, len(rows)) / 8).astype(np.float32)
    values[:8] = 1e6
    parts = np.array_split(draw.permutation(rows), 5)
    reports = []
    for part in parts:  # of whoever had these rows
        reports.append(Report(""))
        ColumnMeans(plan).count(
            reports[-1], node, Task("train", 0, 16), "reward", part, ColumnData(values[part]).values
        )
    found = prompt_spreads(reports)
    groups = values.astype(np.float64).reshape(-1, samples) if samples > 1 else values.astype(np.float64)[None]
    assert found["reward/std"] == pytest.approx(groups.std(1, ddof=1).mean(), rel=1e-9)
    assert found["reward/flat"] == np.mean([len({*g}) == 1 for g in groups])
    assert sum(r.sums["reward"][0] for r in reports) == pytest.approx(values.astype(np.float64).sum())


def test_what_is_not_finite_has_no_spread():
    plan = compile("grpo", model="tiny", sets={"prompts": "2", "group": "2"})
    report = Report("")
    means = ColumnMeans(plan)
    node = plan.graph.node("host.reward")
    means.count(report, node, Task("train", 0, 2), "reward", np.arange(4), np.array([1.0, np.nan, 2.0, 4.0]))
    assert prompt_spreads([report]) == {"reward/std": pytest.approx(2**0.5), "reward/flat": 0.0} and report.sums[
        "reward"
    ] == (
        7.0,
        3,
    )
    means.count(report, node, Task("held_out", 0, 2), "reward", np.arange(2), np.ones(2))
    assert prompt_spreads([report])["reward/flat"] == 0.0  # of training alone


def test_trainer_and_generator_that_drift_apart():
    apart = [{"logp_drift": d} for d in (0.02, 0.011, 0.036)]
    assert told(apart) == {}, "without a threshold there is none"
    words = "the log-probabilities of trainer and generator differ by 0.036 nats a token, over 0.03"
    where = "`actor.infer`, line 24 of grpo.rlg"
    assert told(apart, stated("max_drift = 0.03")) == {3: [f"warning: {words}, in iteration 3 ({where}): {PAGE}"]}
    stale = [{"logp_drift/1": 0.5, "logp_drift_max/1": 3.0}]
    assert told(stale, stated("max_drift = 0.03")) == {}, "the policy has changed since"
    stops = HealthChecks(one_rank(stated("max_drift = 0.03, on_drift = stop")))
    line = {"iteration": 7, **apart[2]}
    assert stops.look(line) == [] and stops.end_reason({"iteration": 6, **apart[0]}) == ""
    assert stops.end_reason(line) == f"`actor.infer` (line 24 of grpo.rlg) in iteration 7: {words}: {PAGE}"
    assert HealthChecks(one_rank(stated("max_drift = 0.03"))).end_reason(line) == ""
