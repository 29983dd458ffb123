"""Temperatures: greedy generations beside drawn ones, and a temperature of each row, which all that scores the row goes
by."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stage import EXAMPLE, PROMPTS, Stage, one_rank
from training_math import close, net, token_logps

from msrl_graph.runtime.data.columns import ColumnData, ragged
from msrl_graph.runtime.process.task_report import RunError

GREEDY = (
    ("    advantage : f32[response]\n", "    advantage : f32[response]\n    plain : i32[<= 5]\n    base : f32\n"),
    (
        "  source -> actor.generate\n",
        """  node likeliest: actor.generate(prompt) -> plain { temperature = 0 }
  node host.base(plain, answer) -> base { call = exact_match(response = plain) }
  source -> actor.generate
  source -> likeliest -> host.base
  actor.update => likeliest
""",
    ),
)
TEMP = (
    ("    answer    : text\n", "    answer    : text\n    temp : f32\n"),
    (
        "actor.generate(prompt) -> response { samples = group, temperature = 1.0 }",
        "actor.generate(prompt, temp) -> response { samples = group, temperature = temp }",
    ),
    (
        "  source -> actor.generate\n",
        """  node host.temp(prompt, answer) -> temp { call = contains(response = prompt) }
  source -> host.temp -> actor.generate
""",
    ),
)
HEAT = np.array([0.2, 3.0, 1.0, 0.7], np.float32)
pytestmark = pytest.mark.usefixtures("alone")


def greedy(prompt: np.ndarray) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "model")
    return model.generate(torch.from_numpy(prompt)[None], max_new_tokens=5, do_sample=False)[0, len(prompt) :].tolist()


def test_a_greedy_generation_stands_beside_a_drawn_one() -> None:
    stage, prompts = Stage(one_rank(*GREEDY)), ragged(PROMPTS, np.int32)
    plain = stage.act("likeliest", {"prompt": prompts})["plain"]
    assert [list(plain[i]) for i in range(4)] == [greedy(p) for p in PROMPTS]
    assert len(stage.act("actor.generate", {"prompt": prompts})["response"]) == 8


def test_an_evaluation_that_states_no_temperature_draws_each_generation_as_training_does() -> None:
    stated = (("samples = 1, temperature = 0, ", ""),)
    evaluation = one_rank(*GREEDY, *stated).deploy.evaluations[0]
    assert (evaluation.samples, evaluation.temperature) == (0, None)
    found = one_rank(*GREEDY).deploy.evaluations[0]
    assert (found.samples, found.temperature) == (1, 0)
    stage = Stage(one_rank(*GREEDY, *stated))
    prompts = {"prompt": ragged(PROMPTS, np.int32)}
    plain = stage.act("likeliest", prompts, task="held_out")["plain"]
    drawn = stage.act("actor.generate", prompts, task="held_out")["response"]
    assert [list(plain[i]) for i in range(4)] == [greedy(p) for p in PROMPTS] and len(drawn) == 8
    assert any(list(drawn[i]) != list(plain[i // 2]) for i in range(8))


def test_each_row_is_drawn_and_scored_at_its_own_temperature() -> None:
    """What the generator draws with, `infer` and `update` compute again; and it is what transformers computes at these
    temperatures."""
    stage = Stage(one_rank(*TEMP))
    assert stage.plan.graph.node("actor.infer").reads[-1] == stage.plan.graph.node("actor.update").reads[-1] == "temp"
    rows = np.repeat(np.arange(4), 2)
    columns = {"prompt": ragged(PROMPTS, np.int32), "temp": ColumnData(HEAT)}
    drawn = stage.act("actor.generate", columns)
    columns = {c: v.take(rows) for c, v in columns.items()} | drawn
    old = stage.act("actor.infer", columns)["old_logp"]
    model = net(stage, "actor")
    whole = [token_logps(model, columns, i, "response", float(HEAT[rows[i]])) for i in range(8)]
    assert close(old.values, [p.gather(1, t)[:, 0] for p, t in whole])
    assert np.allclose(old.values, drawn["response.logp"].values, atol=1e-3)
    advantage = ColumnData(np.ones_like(old.values), old.offsets)
    stage.act("actor.update", columns | {"old_logp": old, "ref_logp": old, "advantage": advantage})
    assert stage.told.sums["updates"] == (1.0, 0) and not stage.told.remarks
    assert stage.told.sums["clip/ratio"][0] == pytest.approx(len(old.values), rel=1e-4)  # the update's are the infer's


def test_a_row_without_a_temperature_ends_the_run() -> None:
    stage, prompts = Stage(one_rank(*TEMP)), ragged(PROMPTS, np.int32)
    for value, wanted in (
        (0.0, "0: it must be above 0, since `actor.infer` scores `response`"),
        (-1.0, "-1: it must"),
        (np.nan, "nan"),
    ):
        heat = ColumnData(np.array([1, 1, value, 1], np.float32))
        with pytest.raises(RunError) as error:
            stage.act("actor.generate", {"prompt": prompts, "temp": heat})
        assert str(error.value).startswith(
            "`actor.generate` (line 24 of grpo.rlg) on row 2 of iteration 3: the temperature `temp` is "
        )
        assert wanted in str(error.value)
