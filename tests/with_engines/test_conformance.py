"""Megatron-Core and vLLM compute each family's models as transformers does, on every small layout that they have."""

import conformance
import pytest

from msrl_graph.model.lora_settings import Lora


@pytest.mark.parametrize("family", conformance.WRITTEN)
@pytest.mark.parametrize("engine", ["megatron", "vllm"])
def test_a_family_is_computed_as_by_transformers(family, engine, tmp_path):
    if not (found := conformance.measure(family, [engine], tmp_path)):
        pytest.skip(f"{engine} lacks features of {family}")
    assert {"one rank", "tp 2", "pp 2", "dp 2"} <= {layout for _, layout in found}
    conformance.assert_close(found, conformance.BARS | conformance.ROUNDED.get(family, {}))


def test_light_engines_cap_scores_with_an_older_transformers_too(tmp_path):
    found = conformance.measure("gemma2", ["fsdp", "hf"], tmp_path, layouts={"one rank": conformance.EVERY["one rank"]})
    conformance.assert_close(found, conformance.BARS)


@pytest.mark.parametrize("family", ["seed_oss", "olmo2", "smollm3"])
def test_vllm_leaves_classes_of_transformers_as_they_are_for_a_trainer_of_the_same_process(family, tmp_path):
    """VLLM builds these families of transformers' modules."""
    layouts = {"one rank": conformance.LAYOUTS["one rank"]}
    found = conformance.measure(family, ["vllm", "fsdp"], tmp_path, layouts=layouts)
    assert [engine for engine, _ in found] == ["vllm", "fsdp"]
    conformance.assert_close(found)


@pytest.mark.parametrize(
    ("family", "frozen"),
    [
        ("qwen2", ("embeddings",)),
        ("llama", ("embeddings", "model.layers.0.*")),
        ("qwen3_moe", ("router", "model.layers.*.self_attn.k_proj.*")),
    ],
)
def test_frozen_weights_are_not_trained_and_the_others_are_as_by_transformers(family, frozen, tmp_path):
    found = conformance.measure(family, ["megatron"], tmp_path, frozen=frozen)
    assert {"one rank", "tp 2", "pp 2", "dp 2"} <= {layout for _, layout in found}
    conformance.assert_close(found)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("targets", [("all_linear",), ("o_proj", "up_proj")])
def test_an_adapter_is_computed_and_trained_as_its_product_added_to_the_weights(family, targets, tmp_path):
    adapter = Lora(rank=3, alpha=6, targets=targets)
    found = conformance.measure(family, ["megatron"], tmp_path, adapter=adapter)
    assert {"one rank", "tp 2", "pp 2", "dp 2"} <= {layout for _, layout in found}
    conformance.assert_close(found)
