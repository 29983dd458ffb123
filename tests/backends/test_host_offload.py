"""What is offloaded leaves the device, and no bit of what is computed changes."""

import pytest
import ranks
import torch
from offloaded import frozen_turns, same_gradients, same_steps

from msrl_graph.sharding.layout import Layout

F32 = torch.float32
BF16 = torch.bfloat16
OPTIMIZERS = {
    1: [(Layout(), "adamw", F32), (Layout(), "sgd", BF16), (Layout(), "muon", F32)],
    2: [
        (Layout(dp=2, zero=1), "adamw", F32),
        (Layout(dp=2, zero=1), "muon", BF16),
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


def test_weights_that_never_change_are_there_in_their_turns_alone():
    ranks.run(1, frozen_turns)
