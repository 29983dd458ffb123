"""The windows that a config states are those of the layers that transformers builds of it; others are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph.model.families import FAMILIES
from msrl_graph.model.fields import ConfigError, engine_fields, read_fields
from msrl_graph.model.layers import GroupedQueryAttention

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "vocab_size": 16,
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,  # some classes have a default beyond this vocabulary
}
KINDS = st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=4, max_size=4)
STATED = {
    "sliding_window": st.sampled_from([None, 0, 1, 2, 5, 4096]),
    "use_sliding_window": st.booleans(),
    "max_window_layers": st.integers(0, 5),
    "layer_types": KINDS,
}


@pytest.mark.parametrize(
    "name",
    [
        "mistral",
        "mixtral",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "olmo3",
        "gpt_oss",
        "gemma2",
        "gemma3_text",
    ],
)
@examples(60)
@given(stated=st.fixed_dictionaries({}, optional=STATED))
def test_windows_are_those_of_the_layers_that_are_built(name: str, stated: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    family = FAMILIES[name]
    alike = name in ("mistral", "mixtral", "phi3")  # all layers
    if alike:
        stated.pop("layer_types", None)
    fields = read_fields({**SMALL, **stated}, family.config)
    if isinstance(fields, ConfigError):
        assert any(word in fields.message for word in ("sliding_window", "layer_types")), fields
        return
    config = transformers.AutoConfig.for_model(name, **engine_fields(fields))
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    cache = transformers.DynamicCache(config=config)
    windows = []
    for layer in family.layers(fields):
        assert isinstance(layer.mixer, GroupedQueryAttention)
        windows += [layer.mixer.window] * layer.count
    assert windows == [layer.sliding_window if layer.is_sliding else 0 for layer in cache.layers]
    if alike:
        assert set(windows) == {config.sliding_window or 0}
    else:
        assert windows == [layer.self_attn.sliding_window or 0 for layer in built.model.layers]


@pytest.mark.parametrize(
    ("name", "stated", "told"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, "has layers with a sliding window, but no"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8}, "but no `use_sliding_window`"),
        ("mistral", {"sliding_window": 1}, "has 1 for `sliding_window`, which must be 2 or more"),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 4},
            "has `layer_types` that differ from its `use_sliding_window`",
        ),
    ],
)
def test_windows_that_no_engine_could_use_are_refused(name: str, stated: dict[str, Any], told: str) -> None:
    wrong = read_fields({**SMALL, **stated}, FAMILIES[name].config)
    assert isinstance(wrong, ConfigError) and told in wrong.message
