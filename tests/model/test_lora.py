"""Adapters of models: which tensors they have, and how tensor parallelism shards them."""

from pathlib import Path

import pytest

from msrl_graph.diagnostics import NOWHERE
from msrl_graph.model import freezing, lora, models
from msrl_graph.model.architecture import HEAD
from msrl_graph.model.lora_settings import Lora
from msrl_graph.sharding.layout import Layout, Side, elements, shard

ALL = (lora.ALL_LINEAR,)
# Trained parameters at rank 16 with all projections: PEFT's `print_trainable_parameters` for the same configuration.
TRAINED = {"qwen2.5-0.5b": 8_798_208, "qwen2.5-7b": 40_370_176, "llama3.1-8b": 41_943_040, "qwen3-8b": 43_646_976}


def load(name, targets=ALL, **more):
    return lora.adapt(models.load(name, Path("/"), None, NOWHERE), Lora(16, 32.0, targets, **more))


@pytest.mark.parametrize(("name", "count"), TRAINED.items())
def test_as_many_parameters_are_trained_as_in_peft(name, count):
    assert sum(tensor.elements for tensor in load(name).trained) == count


def test_base_weights_are_frozen_and_the_order_stays():
    base = models.load("qwen3-8b", Path("/"), None, NOWHERE)
    adapted = load("qwen3-8b", ("q_proj", "down_proj"))
    assert [tensor.name for tensor in adapted.weights if tensor.role == "base"] == [t.name for t in base.weights]
    assert {tensor.frozen for tensor in adapted.weights if tensor.role == "base"} == {True}
    pairs = lora.list_adapted(adapted)
    assert len(pairs) == 2 * base.layers
    assert [tensor.name for tensor in adapted.saved] == [name for pair in pairs for name in pair[1:]]
    assert all(tensor.is_trained for tensor in adapted.saved)


def test_a_score_head_is_trained_too():
    scoring = models.load("qwen3-8b", Path("/"), None, NOWHERE).scoring
    adapted = lora.adapt(scoring, Lora(8, 16.0, ALL))
    assert [tensor.name for tensor in adapted.trained if tensor.role == "base"] == [HEAD]
    assert HEAD in {tensor.name for tensor in adapted.saved}


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "deepseek-v3-671b"])
def test_each_rank_has_the_matrices_that_its_part_of_a_weight_needs(name):
    """The product of a rank's parts of B and A has the rank's box of the weight."""
    adapted = load(name)
    boxes = {tensor.name: shard(tensor, Side(Layout(tp=4, etp=4)), 3) for tensor in adapted.weights}
    for weight, down, up in lora.list_adapted(adapted):
        *experts, rows, columns = boxes[weight.name]
        assert boxes[up] == (*experts, rows, (0, 16))
        assert boxes[down] == (*experts, (0, 16), columns)
        assert elements(boxes[up]) and elements(boxes[down])


def test_experts_have_adapters_and_routers_have_none():
    names = {tensor.name for tensor in load("qwen3-30b-a3b").trained}
    assert "model.layers.0.mlp.experts.*.gate_proj.lora_A.weight" in names
    assert not any("mlp.gate." in name for name in names)


def test_targets_are_named_as_in_the_files():
    base = models.load("deepseek-v3-671b", Path("/"), None, NOWHERE)
    attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    assert lora.list_projections(base) == [*attention, "gate_proj", "up_proj", "down_proj"]


def test_an_engine_that_computes_with_merged_weights_needs_no_feature():
    base = models.load("qwen3-8b", Path("/"), None, NOWHERE)
    said = Lora(16, 32.0, ALL)
    assert lora.adapt(base, said, merged=True).features == base.features
    assert lora.adapt(base, said).features == (*base.features, "lora")
    assert lora.adapt(base, None) is base and lora.adapt(base, said) is lora.adapt(base, said)


def test_the_model_s_own_weights_can_be_frozen_otherwise_without_an_adapter():
    base = models.load("qwen3-8b", Path("/"), None, NOWHERE)
    assert freezing.freeze(base, ("norms",)).saved == freezing.freeze(base, ("norms",)).weights
