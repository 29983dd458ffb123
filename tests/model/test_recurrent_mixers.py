"""What costs and memory count of recurrent layers is what their modules of transformers have and compute."""

from pathlib import Path

import hybrid_families
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from msrl_graph.ir.workload import kv_bytes
from msrl_graph.model import models
from msrl_graph.model.layers import GatedDeltaNet
from msrl_graph.sharding.layout import Layout

DELTA = GatedDeltaNet(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def states_of(layer):
    if hasattr(layer, "conv_states"):
        return [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return [layer.keys, layer.values]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_parameters_are_tensors_of_the_same_shapes(family, tmp_path):
    folder = hybrid_families.WRITTEN[family](tmp_path / "model")
    model = models.load(folder, Path("/"))
    parameters = dict(load(folder).named_parameters())
    assert model.parameters == sum(parameter.numel() for parameter in parameters.values())
    shapes = {name: shape for name, shape in model.shapes_in_files.items() if ".experts." not in name}
    assert shapes == {name: [*value.shape] for name, value in parameters.items() if ".experts." not in name}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_the_cache_of_a_sequence_is_that_of_transformers(family, tokens, tmp_path):
    from transformers import DynamicCache

    folder = hybrid_families.WRITTEN[family](tmp_path / "model", max_position_embeddings=128)
    net = load(folder)
    cache = DynamicCache(config=net.config)
    net(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache)
    counted = kv_bytes(models.load(folder, Path("/")), Layout(), tokens, 4)
    assert counted == sum(state.numel() * state.element_size() for layer in cache.layers for state in states_of(layer))


def test_tp_shards_states_by_heads_and_nothing_grows_with_tokens():
    assert DELTA.count_cached(7) == DELTA.count_cached(7000) == 2 * DELTA.count_cached(7, 2)
    assert DELTA.count_state() == 32 * 128 * 128 == 2 * DELTA.count_state(2)


def test_flop_are_those_of_the_operators():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    heads = 2
    tokens = 256
    delta = GatedDeltaNet(key_heads=heads, value_heads=heads, key_dim=32, value_dim=48, kernel=4)
    query, key = torch.randn(2, 1, tokens, heads, 32)
    value = torch.randn(1, tokens, heads, 48)
    gates = torch.rand(2, 1, tokens, heads)
    counter = FlopCounterMode(display=False)
    with counter:
        torch_chunk_gated_delta_rule(query, key, value, -gates[0], gates[1])
    convolution = 2 * 4 * delta.mixed
    solved = 64 * (32 + 48) * heads  # torch counts no FLOP of the triangular systems
    counted = delta.count_scan_flop(False) - convolution - solved
    assert counter.get_total_flops() / tokens == pytest.approx(counted)
    assert delta.count_scan_flop(True) - convolution == 6 * 32 * 48 * heads
