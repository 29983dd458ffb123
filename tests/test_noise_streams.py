"""Each user of noise has a stream of its own: what one draws says nothing of what another does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from stage import PROMPTS, Stage, one_rank

from msrl_graph.runtime.data.columns import ragged

SAMPLES = 32
SECOND = (
    (
        "    advantage : f32[response]\n",
        "    advantage : f32[response]\n    other : i32[<= 5]\n    verdict : i32[<= 5]\n",
    ),
    ("  worker host ", "  worker judge : policy frozen\n  worker host "),
    (
        "  source -> actor.generate\n",
        f"""  node again: actor.generate(prompt) -> other {{ samples = {SAMPLES}, temperature = 5.0 }}
  node judge.generate(prompt) -> verdict {{ samples = {SAMPLES}, temperature = 5.0 }}
  source -> actor.generate, again, judge.generate
  actor.update => again
""",
    ),
    ("samples = 1, temperature = 0, ", ""),  # an evaluation draws as training does
    ("samples = group, temperature = 1.0", f"samples = {SAMPLES}, temperature = 5.0"),
)
pytestmark = pytest.mark.usefixtures("alone")


def test_generations_with_the_same_weights_draw_apart() -> None:
    """The policy, a second generation of it as ReMax may sample its baseline, a judge of the same model, and both in an
    evaluation: all read the same prompts, and none repeats another or says anything of it."""
    stage, prompts = Stage(one_rank(*SECOND)), {"prompt": ragged(PROMPTS, np.int32)}
    written = {
        ("actor.generate", "train"): "response",
        ("again", "train"): "other",
        ("judge.generate", "train"): "verdict",
        ("again", "held_out"): "other",
        ("judge.generate", "held_out"): "verdict",
    }
    found = {key: stage.act(key[0], prompts, task=key[1])[column] for key, column in written.items()}
    rows = range(len(PROMPTS) * SAMPLES)
    first = {key: np.array([float(made[i][0]) for i in rows]) for key, made in found.items()}
    for one, other in itertools.combinations(found, 2):
        assert np.mean([np.array_equal(found[one][i], found[other][i]) for i in rows]) < 0.1, (one, other)
        assert abs(np.corrcoef(first[one], first[other])[0, 1]) < 0.5, (one, other)  # five standard deviations and more
    rewards = [1.0 if token < 9 else 0.0 for token in first["actor.generate", "train"]]
    baseline = [1.0 if token < 9 else 0.0 for token in first["again", "train"]]
    assert np.any(np.not_equal(rewards, baseline)), "ReMax with a sampled baseline learns nothing"
