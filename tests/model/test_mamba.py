"""Models with Mamba-2 layers against published counts, against transformers' classes, and mistakes in their configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msrl_graph import compile
from msrl_graph.diagnostics import Fault
from msrl_graph.ir.workload import kv_bytes
from msrl_graph.model.families import find_family
from msrl_graph.model.fields import ConfigError, engine_fields, read_fields
from msrl_graph.model.layers import DenseMlp, ExpertMlp, GroupedQueryAttention, Mamba2, NoMixer, NoMlp
from msrl_graph.model.mamba_presets import PRESETS
from msrl_graph.model.models import load, read_engine_fields
from msrl_graph.sharding.layout import Layout

# The parameters of transformers' class with the fields of the published config.json.
COUNTS = {
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-h-47b": 46_791_554_816,
    "nemotron-h-56b": 56_324_350_464,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "nemotron-nano-12b-v2": 12_310_001_152,
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
    "granite4.0-350m": 352_379_904,
    "granite4.0-1b": 1_631_750_144,
    "granite4.0-micro": 3_402_836_480,
    "granite4.0-h-350m": 340_332_224,
    "granite4.0-h-1b": 1_461_538_368,
    "granite4.0-h-micro": 3_191_396_096,
    "granite4.0-h-tiny": 6_939_037_248,
    "granite4.0-h-small": 32_207_337_984,
}


@pytest.mark.parametrize("name", PRESETS)
def test_counts_are_those_of_transformers_class(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    stated = PRESETS[name]
    family = find_family(stated["architectures"][0])  # type: ignore[index]
    assert family is not None
    fields = read_fields(stated, family.config)
    assert not isinstance(fields, ConfigError)
    config = transformers.AutoConfig.for_model(family.name, **engine_fields(fields))
    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(config)
    theirs = sum(value.numel() for value in peer.parameters())
    theirs += sum(value.numel() for part, value in peer.named_buffers() if part.endswith("correction_bias"))
    assert load(name, Path()).parameters == theirs == COUNTS[name]


def test_what_a_token_passes() -> None:
    # "3.2B active parameters, 3.6B with embeddings" (arXiv:2512.20848, section 1).
    assert 3.5e9 < load("nemotron-3-nano-30b-a3b", Path()).active_parameters < 3.65e9
    # "32B parameters, 9B active", "7B, 1B active" (https://huggingface.co/ibm-granite/granite-4.0-h-small, h-tiny).
    assert 8.5e9 < load("granite4.0-h-small", Path()).active_parameters < 9.5e9
    assert 1e9 < load("granite4.0-h-tiny", Path()).active_parameters < 1.5e9


NAMES = {
    "nvidia/Nemotron-H-8B-Base-8K": "nemotron-h-8b",
    "nvidia/Nemotron-H-47B-Reasoning-128K": "nemotron-h-47b",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": "nemotron-nano-9b-v2",
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2-Base": "nemotron-nano-12b-v2",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": "nemotron-3-nano-30b-a3b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8": "",
    "ibm-granite/granite-4.0-h-tiny": "granite4.0-h-tiny",
    "ibm-granite/granite-4.0-h-small-base": "granite4.0-h-small",
    "ibm-granite/granite-4.0-micro": "granite4.0-micro",
    "ibm-granite/granite-4.0-350M": "granite4.0-350m",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_has_the_names_that_people_write(name: str, tmp_path: Path) -> None:
    if preset := NAMES[name]:
        assert load(name, tmp_path).tensors == load(preset, tmp_path).tensors
    else:
        with pytest.raises(Fault):
            load(name, tmp_path)


def test_a_layer_is_a_mixer_or_an_mlp() -> None:
    stack = load("nemotron-3-nano-30b-a3b", Path()).stack
    assert [type(layer.mixer) for layer in stack[:7]] == 2 * [Mamba2, NoMixer] + [
        Mamba2,
        GroupedQueryAttention,
        NoMixer,
    ]
    assert [type(layer.mlp) for layer in stack[:7]] == 2 * [NoMlp, ExpertMlp] + [NoMlp, NoMlp, ExpertMlp]
    assert {layer.halves for layer in stack} == {1} and {layer.norms.number for layer in stack} == {1}
    dense = load("granite4.0-h-1b", Path()).stack
    assert [layer.count for layer in dense] == [5, 1, 9, 1, 9, 1, 9, 1, 4]
    assert {layer.halves for layer in dense} == {2} and {type(layer.mlp) for layer in dense} == {DenseMlp}


def test_adapters_are_refused_where_files_have_other_names() -> None:
    program = """import grpo
    algorithm mine extends grpo { worker actor : policy { adapter = lora(rank = 4) } }
    cluster laptop { device = "cpu" }
    deploy mine on laptop {
      model policy = "%s"
      data source = "rows.jsonl" { prompt = "q", answer = "a" }
    }"""
    for model, help in (
        ("nemotron-nano-9b-v2", "train a part of the model instead: `freeze`"),
        ("granite4.0-h-1b", "`all_linear` includes them: write `targets = [out_proj, q_proj, k_proj, v_proj, o_proj]`"),
    ):
        with pytest.raises(Fault) as caught:
            compile("p.rlg", text=program % model, sets={"prompts": 8, "group": 2, "response_len": 16})
        (told,) = caught.value.diagnostics
        assert told.code == "not-yet" and told.help == help, told


def test_one_group_of_heads_is_on_every_rank() -> None:
    tensors = {t.name.removeprefix("model.layers.0.mamba."): t for t in load("granite4.0-h-micro", Path()).tensors}
    copied = {f"{module}_{part}.weight" for module in ("in_proj", "conv") for part in "bc"}
    copied |= {"conv_b.bias", "conv_c.bias"}
    mamba = {name: t.tp_dim for name, t in tensors.items() if t.layer == 0 and ".mamba." in t.name}
    assert {name for name, dim in mamba.items() if dim < 0} == copied


@pytest.mark.parametrize("name", ["nemotron-h-8b", "nemotron-3-nano-30b-a3b", "granite4.0-h-1b", "granite4.0-h-small"])
def test_flop_of_a_token_are_those_of_its_weights_and_of_scans(name: str) -> None:
    model = load(name, Path())
    ends = sum(t.elements for t in model.tensors if not 0 <= t.layer < model.layers)
    weights = 2 * (model.active_parameters - ends)
    flop = sum(layer.count * layer.count_flop(model.hidden, 1) for layer in model.stack)
    scans = model.count_scan_flop(decode=False)
    assert 0 < scans < flop / 4
    assert flop - scans == pytest.approx(weights, rel=0.01)


def test_a_state_does_not_grow_with_the_sequence() -> None:
    # Of each of 24 layers: the convolution's 8,192 + 2 x 1,024 inputs of 4 tokens, and a state of 128 x 64 x 128.
    model = load("nemotron-h-8b", Path())
    states = 24 * (2 * 4 * (8192 + 2 * 1024) + 4 * 128 * 64 * 128)
    attention = 4 * 2 * 2 * 8 * 128
    assert kv_bytes(model, Layout(), 0, 2) == states
    assert kv_bytes(model, Layout(), 1000, 2) == states + 1000 * attention
    assert kv_bytes(model, Layout(tp=8), 1000, 2) == (states + 1000 * attention) / 8


def test_what_divides_mamba() -> None:
    tensors = {t.name.removeprefix("model.layers.0."): t for t in load("nemotron-h-8b", Path()).tensors}
    inner = 128 * 64
    key = 8 * 128
    starts = {"z": 0, "x": inner, "b": 2 * inner, "c": 2 * inner + key, "dt": 2 * inner + 2 * key}
    sizes = {"z": inner, "x": inner, "b": key, "c": key, "dt": 128}
    units = {"z": 64, "x": 64, "b": 128, "c": 128, "dt": 1}
    for part, start in starts.items():
        tensor = tensors[f"mamba.in_proj_{part}.weight"]
        assert (tensor.shape, tensor.start, tensor.unit) == ((sizes[part], 4096), start, units[part])
        assert (tensor.tp_dim, tensor.name_in_files) == (0, "backbone.layers.0.mixer.in_proj.weight")
    for part in "xbc":
        for kind, shape in (("weight", (sizes[part], 1, 4)), ("bias", (sizes[part],))):
            tensor = tensors[f"mamba.conv_{part}.{kind}"]
            assert (tensor.shape, tensor.start, tensor.tp_dim) == (shape, starts[part] - inner, 0)
            assert tensor.name_in_files == f"backbone.layers.0.mixer.conv1d.{kind}"
    assert tensors["mamba.norm.weight"].unit == 64 and tensors["mamba.out_proj.weight"].tp_dim == 1
    assert {tensors[f"mamba.{name}"].shape for name in ("A_log", "D", "dt_bias")} == {(128,)}


# Fields of published configs that no preset has.
PUBLISHED: dict[str, dict[str, Any]] = {
    "nemotron-h-8b": {
        "model_type": "nemotron_h",
        "attention_head_dim": 128,
        "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
        "chunk_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "mlp_hidden_act": "relu2",
        "num_logits_to_keep": 1,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "rms_norm_eps": 1e-05,
        "sliding_window": None,
        "use_bias": False,
        "use_conv_bias": True,
        "use_mamba_kernels": True,
    },
    "nemotron-3-nano-30b-a3b": {
        "model_type": "nemotron_h",
        "moe_latent_size": None,
        "moe_shared_expert_overlap": True,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_eps": 1e-05,
        "norm_topk_prob": True,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000,
        "time_step_limit": [0.0, float("inf")],
        "time_step_min": 0.001,
        "topk_group": 1,
    },
    "granite4.0-h-tiny": {
        "model_type": "granitemoehybrid",
        "init_method": "mup",
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "normalization_function": "rmsnorm",
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 10000,
        "router_aux_loss_coef": 0.0,
    },
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_configs_are_read_as_they_are(preset: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[preset] | PUBLISHED[preset]))
    model = load("./", tmp_path)
    assert model.tensors == load(preset, Path()).tensors
    fields = read_engine_fields(model)
    kinds = fields.get("layers_block_type") or fields["layer_types"]
    assert len(kinds) == model.layers and {*kinds} <= {"linear_attention", "full_attention", "mlp", "moe"}


NEMOTRON: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "hybrid_override_pattern": "M-*E",
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 32,
}
GRANITE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "shared_intermediate_size": 48,
    "vocab_size": 100,
    "layer_types": ["mamba", "attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 8,
}


@pytest.mark.parametrize(
    ("field", "value", "told", "feature"),
    [
        ("hybrid_override_pattern", "M-*X", "has layers of 'X': only `linear_attention`", "layers of `X`"),
        ("hybrid_override_pattern", ..., "has no `num_hidden_layers`", ""),
        ("layers_block_type", "M-", "has 'M-' for `layers_block_type`, which must be a list of strings", ""),
        ("num_hidden_layers", 5, "has 4 `layers_block_type` for 5 layers", ""),
        ("num_key_value_heads", ..., "has no `num_key_value_heads`", ""),
        ("n_groups", 3, "has 3 groups of Mamba-2 heads, which do not divide its 8 heads", ""),
        ("mamba_hidden_act", "gelu", "only `silu` is supported yet", "Mamba-2 layers with the activation `gelu`"),
        ("use_bias", True, "has true for `use_bias`", "biases of the projections of Mamba-2 layers"),
        ("sliding_window", 64, "has a `sliding_window`", "windows next to Mamba-2 layers"),
        ("moe_latent_size", 16, "has a `moe_latent_size`", "experts of latent vectors"),
        ("mlp_bias", True, "has true for `mlp_bias`", "biases of shared experts"),
        ("moe_intermediate_size", None, "has layers of experts, but no `moe_intermediate_size`", ""),
        ("num_experts_per_tok", 5, "has 5 experts per token, but only 4 to choose from", ""),
        ("n_group", 4, "has 4 experts in 4 groups", ""),
    ],
)
def test_configs_of_nemotron_that_no_engine_could_use(field: str, value: object, told: str, feature: str) -> None:
    _check_wrong("NemotronHForCausalLM", NEMOTRON, field, value, told, feature)


@pytest.mark.parametrize(
    ("field", "value", "told", "feature"),
    [
        ("layer_types", ["mamba", "mlp"], "has layers of 'mlp'", "layers of `mlp`"),
        ("layer_types", ["mamba"], "has 1 `layer_types` for 2 layers", ""),
        ("position_embedding_type", "alibi", "has 'alibi' for `position_embedding_type`", ""),
        ("num_local_experts", ..., "has no `num_local_experts`", ""),
        ("num_experts_per_tok", 5, "has 5 experts per token, but only 4 to choose from", ""),
        ("num_experts_per_tok", 0, "has experts, but 0 for `num_experts_per_tok`", ""),
        ("mamba_n_heads", 7, "has 7 Mamba-2 heads, which do not make 2 x 64 elements", ""),
        ("mamba_d_head", 8, "has 8 Mamba-2 heads of 8 elements, which do not make 2 x 64 elements", ""),
        ("mamba_d_head", "small", "has 'small' for `mamba_d_head`, which must be", ""),
        ("mamba_n_groups", 3, "has 3 groups of Mamba-2 heads, which do not divide its 8 heads", ""),
        ("mamba_proj_bias", True, "has true for `mamba_proj_bias`", "biases of the projections of Mamba-2 layers"),
        ("time_step_limit", [0.0, 1.0], "for `time_step_limit`", "limits of the time steps of Mamba-2 layers"),
    ],
)
def test_configs_of_granite_that_no_engine_could_use(field: str, value: object, told: str, feature: str) -> None:
    _check_wrong("GraniteMoeHybridForCausalLM", GRANITE, field, value, told, feature)


def _check_wrong(architecture: str, config: dict[str, Any], field: str, value: object, told: str, feature: str) -> None:
    family = find_family(architecture)
    assert family is not None
    assert not isinstance(read_fields(config, family.config), ConfigError)
    changed = {k: v for k, v in config.items() if k != field} if value is ... else {**config, field: value}
    wrong = read_fields(changed, family.config)
    assert isinstance(wrong, ConfigError) and told in wrong.message
    assert wrong.feature == feature
