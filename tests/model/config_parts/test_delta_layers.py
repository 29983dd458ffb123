"""Which layers are recurrent is what transformers builds of a config; what it does not build is refused."""

import pytest

from msrl_graph.model.families import FAMILIES
from msrl_graph.model.fields import ConfigError, engine_fields, read_fields
from msrl_graph.model.layers import GatedDeltaNet

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "vocab_size": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
NAMES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
KINDS = ["full_attention", "linear_attention"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stated", [{}, {"full_attention_interval": 3}, {"layer_types": KINDS * 4}])
def test_layers_are_those_that_transformers_builds(name, stated):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    fields = read_fields(SMALL | stated, FAMILIES[name].config)
    assert not isinstance(fields, ConfigError)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(name, **engine_fields(fields))
        )
    recurrent = [hasattr(layer, "linear_attn") for layer in made.model.layers]
    layers = [layer for kind in FAMILIES[name].layers(fields) for layer in [kind] * kind.count]
    assert [isinstance(layer.mixer, GatedDeltaNet) for layer in layers] == recurrent
    assert any(recurrent) and not all(recurrent)
    rotated = made.model.rotary_emb.inv_freq.numel() * 2
    assert rotated == 4 and "rope_partial" in fields.list_features()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("stated", "words", "feature"),
    [
        ({"layer_types": KINDS}, "2 `layer_types` for 8 layers", ""),
        ({"layer_types": ["mamba", *KINDS, *KINDS, *KINDS, "mamba"]}, "layers of 'mamba'", "layers of `mamba`"),
        ({"layer_types": ["linear_attention"] * 8}, "no layer of `full_attention`", "models without attention"),
        ({"linear_num_key_heads": 3}, "do not divide its 4 `linear_num_value_heads`", ""),
        ({"attn_output_gate": False}, "no `attn_output_gate`", "attention of this family without output gates"),
    ],
)
def test_what_is_not_built_is_refused(name, stated, words, feature):
    error = read_fields(SMALL | stated, FAMILIES[name].config)
    assert isinstance(error, ConfigError) and words in error.message and error.feature == feature
