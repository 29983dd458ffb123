"""Learning rates: schedules are those of transformers, whose first step has the rate 0 and ours its second; a file's
function, a state."""

import pytest
import torch
from stage import one_rank
from transformers import get_scheduler

from msrl_graph import algorithms
from msrl_graph.ir.attributes import UpdateAttributes
from msrl_graph.runtime.process.task_report import RunError
from msrl_graph.runtime.rank import learning_rate as rates

CASES = (
    ("constant(2e-3)", "constant", 0, {}),
    ("constant(2e-3, warmup = 7)", "constant_with_warmup", 7, {}),
    ("linear(2e-3, steps = 30)", "linear", 1, {}),
    ("linear(2e-3, warmup = 7, steps = 30)", "linear", 7, {}),
    ("cosine(2e-3, warmup = 7, steps = 30)", "cosine", 7, {}),
    ("cosine(2e-3, warmup = 1, min = 5e-4, steps = 30)", "cosine_with_min_lr", 1, {"min_lr": 5e-4}),
)
STATE = (
    ("  worker actor     : policy\n", "  state speed : f32 = 0.5\n  worker actor     : policy\n"),
    ("ref_logp, advantage) {", "ref_logp, advantage, speed) {"),
    (
        "{ call = group_norm(), per = prompt }",
        "{ call = group_norm(), per = prompt }\n  node host.next(reward, speed) -> speed { NEXT }",
    ),
    ("NEXT", "call = moving_mean(0.9), per = batch"),
    ("  host.reward -> host.advantage", "  host.reward -> host.advantage, host.next"),
)


def plan_of(rate, *changes):
    return one_rank(
        ("adamw(lr = 2e-4, betas = [0.9, 0.99], weight_decay = 0, warmup = 20)", f"adamw(lr = {rate})"),
        ("iterations = 320", "iterations = 15"),
        *changes,
    )


def found(plan, count, states=()):
    return [
        rates.learning_rate(plan, plan.graph.node("actor.update"), step, dict(states)) for step in range(1, count + 1)
    ]


@pytest.mark.parametrize(("rate", "kind", "warmup", "more"), CASES, ids=[c[0] for c in CASES])
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_schedules_are_those_of_transformers(rate, kind, warmup, more):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2e-3)
    schedule = get_scheduler(kind, optimizer, warmup, 30, scheduler_specific_kwargs=more)
    expected = []
    for _ in range(30):
        schedule.step()
        expected += schedule.get_last_lr()
    assert found(plan_of(rate), 30) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_a_schedule_ends_with_the_run_where_nothing_else_is_stated():
    plan = plan_of("linear(2e-3, warmup = 2, min = 1e-4)")  # 8 rows, 4 a step, 15 iterations
    assert found(plan, 32)[29:] == pytest.approx([1e-4] * 3)
    assert found(plan, 32)[28] == pytest.approx(1e-4 + 1.9e-3 / 28)
    assert found(plan_of("linear(2e-3, warmup = 2, min = 1e-4, steps = 10)"), 32)[9:] == pytest.approx([1e-4] * 23)


@pytest.mark.parametrize(
    ("stated", "steps"), [("", 30), ("epochs = 3", 90), ("after = 3\n    every = 4", 6), ("after = 99", 0)]
)
def test_the_steps_of_a_run(stated, steps):
    plan = one_rank(("mini_batch = 4", f"mini_batch = 4\n    {stated}"))
    assert UpdateAttributes.of(plan.graph.node("actor.update")).steps_in_run(8, 15) == steps


def test_a_function_of_the_step_and_of_states(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def fall(step, last, speed, *, peak):\n    return speed * peak * (1 - step / last)\n"
    )
    plan = plan_of(f'"{tmp_path}/mine.py:fall"(peak = 2e-3)', *STATE)
    assert found(plan, 3, {"speed": 0.25}) == pytest.approx([5e-4 * (1 - s / 30) for s in (1, 2, 3)])


def test_a_state_is_a_rate():
    assert found(plan_of("speed, warmup = 4", *STATE), 5, {"speed": 0.4}) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


@pytest.mark.parametrize("body", ["None", "-1e-6", "float('nan')", "'fast'", "1 / 0"])
def test_what_is_no_rate_is_told(body, tmp_path):
    (tmp_path / "mine.py").write_text(f"def fall(step):\n    return {body}\n")
    with pytest.raises(
        RunError, match=r"`actor.update` \(line 30 of grpo.rlg\) failed on the learning rate of step 1: "
    ) as told:
        found(plan_of(f'"{tmp_path}/mine.py:fall"'), 1)
    assert ("mine.py:2" if "/" in body else "instead of a number of at least 0") in str(told.value)


def test_a_state_that_is_no_rate_is_told():
    with pytest.raises(RunError, match=r"the state `speed` is float -0\.5 instead of a number of at least 0"):
        found(plan_of("speed", *STATE), 1, {"speed": -0.5})


def test_every_optimizer_takes_a_rate_and_a_warmup():
    signatures = [s for (kind, _), (s, _) in algorithms.library().items() if kind == "optimizer"]
    assert len(signatures) >= 4
    for signature in signatures:
        assert [o.kind for o in signature.options if o.name in ("lr", "warmup")] == ["Rate", "Count"], signature.name
