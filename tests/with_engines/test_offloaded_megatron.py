"""What Megatron offloads changes no bit of what it computes."""

from functools import partial

import pytest
import ranks
import torch
from offloaded import same_gradients, same_steps

from msrl_graph.sharding.layout import Layout

F32 = torch.float32
BF16 = torch.bfloat16
OPTIMIZERS = {
    1: [(Layout(), "adamw", F32), (Layout(), "muon", BF16)],
    2: [(Layout(dp=2, zero=1), "adamw", BF16), (Layout(pp=2), "adamw", F32), (Layout(tp=2), "sgd", F32)],
}
ACTIVATIONS = {
    1: [(Layout(), F32, "none"), (Layout(), BF16, "full")],
    2: [(Layout(tp=2), F32, "none"), (Layout(pp=2), F32, "none"), (Layout(pp=2), F32, "full")],
}


@pytest.mark.parametrize("world", OPTIMIZERS)
def test_offloaded_optimizers_take_the_same_steps(world, tmp_path):
    ranks.run(world, same_steps, "megatron", str(tmp_path), OPTIMIZERS[world])


def test_so_they_do_in_bf16(tmp_path):
    cases = [(Layout(dp=2, zero=1), "rounded", BF16), (Layout(tp=2), "rounded", F32), (Layout(pp=2), "rounded", BF16)]
    ranks.run(2, partial(same_steps, gradients="bf16"), "megatron", str(tmp_path), cases)


@pytest.mark.parametrize("world", ACTIVATIONS)
def test_offloaded_activations_give_the_same_gradients(world, tmp_path):
    ranks.run(world, same_gradients, "megatron", str(tmp_path), ACTIVATIONS[world])
