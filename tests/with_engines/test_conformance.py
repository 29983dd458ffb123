"""Megatron-Core and vLLM compute each family's models as transformers does, on every small layout that they have."""

import conformance
import pytest


@pytest.mark.parametrize("family", conformance.WRITTEN)
@pytest.mark.parametrize("engine", ["megatron", "vllm"])
def test_a_family_is_computed_as_by_transformers(family, engine, tmp_path):
    if not (found := conformance.measure(family, [engine], tmp_path)):
        pytest.skip(f"{engine} lacks features of {family}")
    assert {"one rank", "tp 2", "pp 2", "dp 2"} <= {layout for _, layout in found}
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
