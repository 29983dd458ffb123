"""Seconds of the masks of an adapter's dropout."""

import pytest

from msrl_graph import compile

PROGRAM = """import grpo
algorithm mine extends grpo {{
  worker actor : policy {{ adapter = lora(rank = 16, targets = {targets}, dropout = {dropout}) }}
}}
cluster one {{ device = "h100", nodes = 1, devices_per_node = 8 }}
deploy mine on one {{
  model policy = "qwen2.5-7b"
  layout actor.update   {{ {layout} }}
  layout actor.generate {{ dp = 8 }}
  engine actor.update = {engine} {{ micro_batch = 4, recompute = full }}
}}
"""


def seconds(tmp_path, engine="fsdp", layout="dp = 8, zero = 3", targets="all_linear", dropout=0.1):
    text = PROGRAM.format(engine=engine, layout=layout, targets=targets, dropout=dropout)
    plan = compile(tmp_path / "p.rlg", text=text)
    (found,) = [phase.seconds.value for phase in plan.estimate.phases if phase.name == "actor.update"]
    return found


def masks(tmp_path, **case):
    return seconds(tmp_path, **case) - seconds(tmp_path, dropout=0, **case)


def test_an_update_takes_longer_by_the_elements_of_the_inputs(tmp_path):
    every = masks(tmp_path)
    assert every > 0
    # Of the projections of a layer, one has inputs of the intermediate size: 18944 of 6 x 3584 + 18944.
    assert masks(tmp_path, targets="[down_proj]") / every == pytest.approx(18944 / (6 * 3584 + 18944), rel=0.01)
    assert masks(tmp_path, targets="[q_proj]") / every == pytest.approx(3584 / (6 * 3584 + 18944), rel=0.01)


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_tp_ranks_share_the_masks(engine, tmp_path):
    sharded = masks(tmp_path, engine=engine, layout="tp = 4, dp = 2")
    assert sharded == pytest.approx(masks(tmp_path, engine=engine, layout="tp = 2, dp = 4"), rel=0.05)
