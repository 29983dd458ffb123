"""Each light engine computes each family's models as transformers does, on every small layout."""

import conformance
import pytest

from msrl_graph.model.families import FAMILIES
from msrl_graph.model.lora_settings import Lora

LIGHT = ("fsdp", "hf")


def test_every_family_has_a_small_model():
    assert {name.partition(" ")[0] for name in conformance.WRITTEN} == FAMILIES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("family", conformance.WRITTEN)
def test_a_family_is_computed_as_by_transformers(family, tmp_path):
    found = conformance.measure(family, LIGHT, tmp_path)
    assert {"one rank", "tp 2", "dp 2"} <= {layout for _, layout in found}
    conformance.assert_close(found, conformance.BARS | conformance.ROUNDED.get(family, {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "broken"),
    [
        ("qwen3", conformance.remove_head_norms),
        ("gemma", conformance.remove_embedding_scale),
        ("qwen2 with windows", conformance.remove_windows),
        ("granite", conformance.remove_logits_scale),
        ("granite", conformance.remove_residual_scale),
        ("granite", conformance.remove_attention_scale),
        ("granite", conformance.remove_model_embedding_scale),
        ("smollm3", conformance.rotate_all_layers),
        ("olmo2", conformance.remove_head_norms),
        ("olmo2", conformance.remove_norms_of_outputs),
        ("glm4", conformance.remove_norms_of_outputs),
        ("glm", conformance.swap_gate_and_up),
        ("glm", conformance.rotate_halves),
        ("glm", conformance.rotate_less),
        ("phi3 with longrope", conformance.remove_rotary_factors),
        ("gemma2", conformance.remove_attention_caps),
        ("gemma2", conformance.remove_logits_cap),
        ("gemma2", conformance.remove_attention_scale),
        ("gemma2", conformance.remove_norms_of_outputs),
        ("gemma2", conformance.remove_windows),
        ("gemma3_text", conformance.rotate_alike),
        ("glm4_moe", conformance.remove_router_corrections),
        ("glm4_moe", conformance.rotate_less),
        ("minimax_m2", conformance.remove_router_corrections),
        ("minimax_m2", conformance.remove_head_norms),
        ("gpt_oss", conformance.remove_sinks),
        ("gpt_oss", conformance.clamp_less),
        ("olmo3", conformance.rotate_alike),
        ("nemotron_h", conformance.remove_skips),
        ("nemotron_h", conformance.norm_halves_of_groups),
        ("granitemoehybrid with experts", conformance.remove_shared_experts),
    ],
)
def test_what_an_engine_leaves_out_is_seen(family, broken, tmp_path):
    for cell, values in conformance.measure(family, LIGHT, tmp_path, broken).items():
        assert values["logp"] > conformance.SEEN, (cell, values)


@pytest.mark.slow
@pytest.mark.parametrize("family", conformance.WRITTEN)
def test_tokens_are_those_that_transformers_generates_with_the_same_keys(family, tmp_path):
    folder = conformance.WRITTEN[family](tmp_path / "model")
    for name, sampling in conformance.SAMPLINGS.items():
        drawn = [tokens.tolist() for tokens in conformance.generate(folder, sampling)[0]]
        assert drawn == conformance.generate_by_transformers(folder, sampling), name
        assert sum(map(len, drawn)) > 3 * len(drawn)
        assert len({*map(tuple, drawn)}) > 4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2 with windows", "gemma2", "olmo3", "smollm3", "gpt_oss"])
def test_windows_and_caps_are_those_of_transformers_if_rows_are_divided_among_ranks(family, tmp_path):
    found = conformance.measure(family, ["fsdp"], tmp_path, layouts=conformance.CONTEXT)
    assert {layout for _, layout in found} == conformance.CONTEXT.keys()
    conformance.assert_close(found)


# What is frozen: the ends, whole layers from the bottom (a pipeline stage without gradients), all but the head.
FROZEN = [
    ("qwen2", ("embeddings",)),
    ("llama", ("embeddings", "model.layers.0.*")),
    ("qwen3", ("head", "norms")),
    ("qwen3_moe", ("router", "attention")),
    ("qwen3_moe", ("embeddings", "attention", "norms", "mlp")),
    ("deepseek_v3", ("experts", "model.layers.0.self_attn.q*")),
    ("qwen3_next", ("attention", "experts")),
    ("qwen3_5_text", ("embeddings", "model.layers.0.*", "*conv*")),
    ("nemotron_h", ("embeddings", "model.layers.0.*", "mlp")),
    ("granitemoehybrid with experts", ("attention", "router")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "frozen"), FROZEN)
def test_frozen_weights_are_not_trained_and_the_others_are_as_by_transformers(family, frozen, tmp_path):
    found = conformance.measure(family, ["fsdp"], tmp_path, frozen=frozen, layouts=conformance.DIVIDED)
    assert {"one rank", "tp 2", "dp 2", "zero 2", "zero 3"} <= {layout for _, layout in found}
    conformance.assert_close(found)


ADAPTED = [
    (family, targets)
    for family in ("llama with biases", "qwen3", "gemma", "qwen3_moe", "deepseek_v3", "qwen3_next")
    for targets in (("all_linear",), ("o_proj", "up_proj"))
] + [("qwen3_5_text", ("in_proj_z", "out_proj", "q_proj"))]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "targets"), ADAPTED)
def test_an_adapter_is_computed_and_trained_as_its_product_added_to_the_weights(family, targets, tmp_path):
    assert_adapter_is_trained(family, targets, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["phi3", "glm4"])
@pytest.mark.parametrize("targets", [("all_linear",), ("o_proj", "gate_up_proj")])
def test_so_it_is_if_the_files_fuse_projections(family, targets, tmp_path):
    assert_adapter_is_trained(family, targets, tmp_path)


def assert_adapter_is_trained(family, targets, tmp_path):
    found = conformance.measure(
        family, LIGHT, tmp_path, layouts=conformance.DIVIDED, adapter=Lora(rank=3, alpha=6, targets=targets)
    )
    assert {"one rank", "tp 2", "dp 2", "zero 2", "zero 3"} <= {layout for _, layout in found}
    conformance.assert_close(found)
