"""What is offloaded leaves the device, and no bit of what is computed changes."""

import pytest
import ranks
import torch
import walk
import walk_offloaded
from offloaded import frozen_turns, same_gradients, same_steps

from msrl_graph.sharding.layout import Layout

F32 = torch.float32
BF16 = torch.bfloat16
OPTIMIZERS = {
    1: [(Layout(), "adamw", F32), (Layout(), "sgd", BF16), (Layout(), "muon", F32)],
    2: [
        (Layout(dp=2, zero=1), "adamw", F32),
        (Layout(dp=2, zero=1), "muon", BF16),
        (Layout(dp=2, zero=1), "rounded", BF16),
        (Layout(dp=2, zero=3), "muon", F32),
        (Layout(dp=2, zero=3), "adamw", BF16),
        (Layout(tp=2), "adamw", BF16),
        (Layout(cp=2, zero=1), "sgd", F32),
    ],
}
WORLDS = [1, pytest.param(2, marks=pytest.mark.slow)]
ACTIVATIONS = {
    1: [(Layout(), F32, "none"), (Layout(), BF16, "none"), (Layout(), F32, "full")],
    2: [
        (Layout(dp=2, zero=3), F32, "none"),
        (Layout(dp=2, zero=2), F32, "full"),
        (Layout(tp=2), F32, "none"),
        (Layout(tp=2), BF16, "full"),
        (Layout(cp=2), F32, "none"),
        (Layout(cp=2, cp_kind="ulysses"), F32, "full"),
    ],
}


@pytest.mark.parametrize("world", WORLDS)
def test_offloaded_optimizers_take_the_same_steps(world, tmp_path):
    ranks.run(world, same_steps, "fsdp", str(tmp_path), OPTIMIZERS[world])


@pytest.mark.parametrize("world", WORLDS)
def test_offloaded_activations_give_the_same_gradients(world, tmp_path):
    ranks.run(world, same_gradients, "fsdp", str(tmp_path), ACTIVATIONS[world])


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in walk_offloaded.CASES if "phase" in c.deploy], ids=lambda case: case.name)
def test_states_are_on_the_device_while_their_update_computes(case, tmp_path):
    """The plan says what a run holds in each phase, and what the host does."""
    plan = case.write(tmp_path)
    found = walk.measured(plan)
    wanted = walk.predicted(plan)
    for key, (size, items) in wanted.items():
        assert size == pytest.approx(found[key][0], rel=0.05), (key, items)
    told = {phase: items for (place, phase), (_, items) in wanted.items() if place == "device"}
    assert "actor optimizer" in told["update"] and len(told) > 3
    assert not any("actor optimizer" in items for phase, items in told.items() if phase != "update")


def test_weights_that_never_change_are_there_in_their_turns_alone():
    ranks.run(1, frozen_turns)
