"""Models against published counts, against transformers' own parameters, and the mistakes in naming one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from folders import ROOT

from msrl_graph import ProgramWarning, compile
from msrl_graph.diagnostics import Fault, Span
from msrl_graph.ir.workload import kv_bytes
from msrl_graph.model.families import find_family
from msrl_graph.model.fields import ConfigError, engine_fields, read_fields
from msrl_graph.model.models import load, read_engine_fields
from msrl_graph.model.presets import PRESETS
from msrl_graph.runtime.driver import preflight
from msrl_graph.sharding.layout import Layout

EXAMPLE = ROOT / "examples" / "arithmetic"


def test_tiny_is_about_a_million_in_float32() -> None:
    model = load("tiny", Path())
    assert 0.8e6 < model.parameters < 1.2e6
    assert model.dtype == "f32"


def test_what_a_token_passes() -> None:
    # "671B total parameters with 37B activated for each token" (arXiv:2412.19437, abstract), one embedding left out.
    assert 36.5e9 < load("deepseek-r1-671b", Path()).active_parameters - 129280 * 7168 < 37.5e9
    assert 3.2e9 < load("qwen3-30b-a3b", Path()).active_parameters < 3.4e9
    assert load("qwen2.5-7b", Path()).active_parameters == 7_615_616_512
    # "1.04 trillion-parameter [...] with 32 billion activated" (arXiv:2507.20534, section 2.3).
    assert 1.02e12 < load("kimi-k2-1t", Path()).parameters < 1.045e12
    assert 32e9 < load("kimi-k2-1t", Path()).active_parameters < 33e9
    # "230 billion total parameters with 10 billion active" (https://huggingface.co/MiniMaxAI/MiniMax-M2).
    assert 228e9 < load("minimax-m2-230b-a10b", Path()).parameters < 231e9
    # "80B in total and 3B activated" (https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct), and as the names say.
    assert 79e9 < load("qwen3-next-80b-a3b", Path()).parameters < 81e9
    for name in ("qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.5-122b-a10b"):
        size = float(name.split("-")[1].removesuffix("b")) * 1e9
        assert load(name, Path()).parameters == pytest.approx(size, rel=0.06), name
    assert load("qwen3.5-397b-a17b", Path()).parameters == pytest.approx(397e9, rel=0.01)
    assert load("qwen3.5-397b-a17b", Path()).active_parameters == pytest.approx(17e9, rel=0.03)
    assert 9.5e9 < load("minimax-m2-230b-a10b", Path()).active_parameters - 200064 * 3072 < 10.5e9


# Fields of published configs that no preset has.
KIMI_K2 = {
    "model_type": "kimi_k2",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "attention_bias": False,
    "ep_size": 1,
    "max_position_embeddings": 131072,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
}
MOONLIGHT = KIMI_K2 | {"model_type": "deepseek_v3", "max_position_embeddings": 8192, "rope_scaling": None}


@pytest.mark.parametrize(("preset", "more"), [("kimi-k2-1t", KIMI_K2), ("moonlight-16b-a3b", MOONLIGHT)])
def test_published_configs_of_deepseek_v3s_architecture_are_read_as_they_are(
    preset: str, more: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[preset] | more))
    model = load("./", tmp_path)
    assert model.tensors == load(preset, Path()).tensors
    fields = read_engine_fields(model)
    assert fields["rope_parameters"]["rope_type"] == ("yarn" if more["rope_scaling"] else "default")
    assert fields["rope_parameters"]["rope_theta"] == 50000.0


def test_what_a_token_leaves_in_the_cache() -> None:
    # Latent attention keeps 512 + 64 elements a layer (arXiv:2405.04434, section 2.1).
    assert kv_bytes(load("deepseek-r1-671b", Path()), Layout(), 1, 2) == 61 * 576 * 2
    assert kv_bytes(load("qwen2.5-7b", Path()), Layout(), 3, 2) == 28 * 2 * 4 * 128 * 3 * 2


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-32b", "llama3-70b", "tiny"])
def test_what_tensor_parallelism_divides(name: str) -> None:
    tensors = {t.name: t for t in load(name, Path()).tensors}
    layer = "model.layers.0."
    divided = {f"{layer}self_attn.{p}_proj.weight": 0 for p in "qkv"} | {f"{layer}self_attn.o_proj.weight": 1}
    divided |= {f"{layer}mlp.gate_proj.weight": 0, f"{layer}mlp.up_proj.weight": 0, f"{layer}mlp.down_proj.weight": 1}
    divided |= {
        "model.embed_tokens.weight": 0,
        "lm_head.weight": 0,
        "model.norm.weight": -1,
        f"{layer}input_layernorm.weight": -1,
    }
    assert {n: tensors[n].tp_dim for n in divided} == divided


def test_what_divides_experts_and_latent_attention() -> None:
    tensors = {t.name.removeprefix("model.layers.5."): t for t in load("deepseek-r1-671b", Path()).tensors}
    expected = {
        "self_attn.q_a_proj.weight": ((1536, 7168), -1, 1, False),
        "self_attn.q_b_proj.weight": ((128 * 192, 1536), 0, 192, False),
        "self_attn.kv_a_proj_with_mqa.weight": ((576, 7168), -1, 1, False),
        "self_attn.kv_b_proj.weight": ((128 * 256, 512), 0, 256, False),
        "self_attn.o_proj.weight": ((7168, 128 * 128), 1, 128, False),
        "mlp.gate.weight": ((256, 7168), -1, 1, False),
        "mlp.experts.*.gate_proj.weight": ((256, 2048, 7168), 1, 1, True),
        "mlp.experts.*.down_proj.weight": ((256, 7168, 2048), 2, 1, True),
        "mlp.shared_experts.up_proj.weight": ((2048, 7168), 0, 1, False),
    }
    assert {n: (t.shape, t.tp_dim, t.unit, t.experts) for n, t in tensors.items() if n in expected} == expected
    assert tensors["model.layers.2.mlp.gate_proj.weight"].shape == (18432, 7168)


def test_a_folder_comes_before_a_name_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    with pytest.raises(Fault, match=r"has no config\.json"):
        load("Qwen/Qwen3-8B", tmp_path)
    config = PRESETS["tiny"]
    (tmp_path / "Qwen" / "Qwen3-8B" / "config.json").write_text(json.dumps(config))
    assert load("Qwen/Qwen3-8B", tmp_path).hidden == config["hidden_size"]


def test_a_folder_beside_the_program_is_found_by_its_bare_name(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(Fault) as caught:
        load("model", tmp_path)
    (told,) = caught.value.diagnostics
    assert (told.message, told.help) == (
        "no model preset is called `model`",
        'for the folder next to the program, write `"./model"`',
    )


@pytest.mark.parametrize("folder", [None, "tied", "llama"])
def test_names_and_shapes_are_transformers(folder: str | None, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = json.loads((EXAMPLE / "model" / "config.json").read_text())
    if folder == "tied":
        config["tie_word_embeddings"] = True
    if folder == "llama":
        for key in ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers"):
            del config[key]
        config |= {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": True,
            "mlp_bias": True,
        }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    theirs = {n: tuple(p.shape) for n, p in peer.named_parameters()}
    ours = {t.name: t.shape for t in load("./", tmp_path).tensors}
    assert ours == theirs


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
}
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
FAMILIES = {
    "Qwen3ForCausalLM": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "GraniteForCausalLM": ("granite", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "SeedOssForCausalLM": (
        "seed_oss",
        {"num_key_value_heads": 2, "head_dim": 8, "attention_out_bias": True, "mlp_bias": True},
    ),
    "SmolLM3ForCausalLM": ("smollm3", {"num_key_value_heads": 2, "pad_token_id": 0}),
    "Olmo3ForCausalLM": ("olmo3", {"num_key_value_heads": 2}),
    "Gemma2ForCausalLM": ("gemma2", {"num_key_value_heads": 2, "head_dim": 8, "attention_bias": True}),
    "Gemma3ForCausalLM": ("gemma3_text", {"num_key_value_heads": 2, "head_dim": 8, "attention_bias": True}),
    "Phi3ForCausalLM": ("phi3", {"num_key_value_heads": 2, "pad_token_id": 0}),
    "GlmForCausalLM": ("glm", {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}),
    "Glm4ForCausalLM": ("glm4", {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}),
    "Olmo2ForCausalLM": ("olmo2", {"num_key_value_heads": 2}),
    "MixtralForCausalLM": (
        "mixtral",
        {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, **MOE}),
    "GptOssForCausalLM": (
        "gpt_oss",
        {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "MiniMaxM2ForCausalLM": (
        "minimax_m2",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "bos_token_id": None,
            "eos_token_id": 1,
        },
    ),
    "Glm4MoeForCausalLM": (
        "glm4_moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            **MOE,
        },
    ),
    "DeepseekV3ForCausalLM": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            **MOE,
            **LATENT,
        },
    ),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_other_families_are_transformers(architecture: str, tmp_path: Path) -> None:
    """Names and shapes; of experts, which transformers keep in one tensor a layer with gate beside up, the shapes."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    kind, sizes = FAMILIES[architecture]
    config = {"architectures": [architecture], "model_type": kind, "tie_word_embeddings": False, **SMALL, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    theirs = {
        n: tuple(p.shape)
        for n, p in [*peer.named_parameters(), *peer.named_buffers()]
        if "rotary" not in n and "inv_freq" not in n and "embed_scale" not in n
    }
    model = load("./", tmp_path)
    # Transformers renames what Mixtral's files call `block_sparse_moe`.
    shapes = {name.replace(".block_sparse_moe.", ".mlp."): shape for name, shape in model.shapes_in_files.items()}
    by_expert = [t for t in model.tensors if t.in_files_by_expert]
    ours = {name: tuple(shape) for name, shape in shapes.items() if ".experts." not in name or not by_expert}
    for layer in {t.layer for t in by_expert}:
        stacked = {t.name.rsplit(".", 2)[1]: t.shape for t in by_expert if t.layer == layer}
        number, width, hidden = stacked["gate_proj"]
        ours[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = (number, 2 * width, hidden)
        ours[f"model.layers.{layer}.mlp.experts.down_proj"] = stacked["down_proj"]
    assert ours == theirs


@pytest.mark.parametrize(
    ("architecture", "field", "value", "told"),
    [
        ("MixtralForCausalLM", "num_experts_per_tok", 5, "has 5 experts per token, but only 4 to choose from"),
        ("GptOssForCausalLM", "num_experts_per_tok", 5, "has 5 experts per token, but only 4 to choose from"),
        ("MixtralForCausalLM", "sliding_window", 1, "has 1 for `sliding_window`, which must be 2 or more"),
        ("GptOssForCausalLM", "num_local_experts", ..., "has no `num_local_experts`"),
        ("MiniMaxM2ForCausalLM", "qk_norm_type", "per_head", "only 'per_layer' is supported yet"),
        ("MiniMaxM2ForCausalLM", "shared_intermediate_size", 64, "only 0 is supported yet"),
        ("MiniMaxM2ForCausalLM", "rotary_dim", 5, "rotates 5 elements of a head, but rotary positions need pairs"),
        ("MiniMaxM2ForCausalLM", "rotary_dim", 32, "has 2.0 for `partial_rotary_factor`"),
        ("Glm4MoeForCausalLM", "n_group", 3, "has 8 experts in 3 groups"),
        ("Glm4MoeForCausalLM", "partial_rotary_factor", 0.2, "rotates 3 elements of a head"),
    ],
)
def test_configs_of_mixtures_that_no_engine_could_use(architecture: str, field: str, value: object, told: str) -> None:
    family = find_family(architecture)
    assert family is not None
    config = {**SMALL, **FAMILIES[architecture][1]}
    assert not isinstance(read_fields(config, family.config), ConfigError)
    changed = {k: v for k, v in config.items() if k != field} if value is ... else {**config, field: value}
    wrong = read_fields(changed, family.config)
    assert isinstance(wrong, ConfigError) and told in wrong.message


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("q_lora_rank", ..., "has no `q_lora_rank`"),
        ("n_group", None, "has no `n_group`"),
        ("n_group", 3, "has 8 experts in 3 groups: groups must be equal, with 2 or more experts each"),
        ("n_group", 8, "has 8 experts in 8 groups"),
        ("topk_group", 3, "chooses 3 of 2 groups of experts"),
        ("num_experts_per_tok", 5, "has 5 experts per token, but only 4 to choose from"),
        ("first_k_dense_replace", 2, "has 2 layers without experts, but only 2 layers"),
        ("num_key_value_heads", 2, "has 2 key-value heads: latent attention needs one for each of its 4 heads"),
        ("qk_rope_head_dim", 3, "rotates 3 elements of a head, but rotary positions need pairs"),
        ("scoring_func", "softmax", "has 'softmax' for `scoring_func`: only `sigmoid` is supported yet"),
        ("topk_method", "greedy", "has 'greedy' for `topk_method`: only `noaux_tc` is supported yet"),
        ("moe_layer_freq", 2, "has 2 for `moe_layer_freq`: only `1` is supported yet"),
    ],
)
def test_what_no_engine_could_make_of_latent_attention_or_groups(field: str, value: object, told: str) -> None:
    family = find_family("DeepseekV3ForCausalLM")
    assert family is not None
    config = {**SMALL, **FAMILIES["DeepseekV3ForCausalLM"][1]}
    assert not isinstance(read_fields(config, family.config), ConfigError)
    without_latent = read_fields({**config, "q_lora_rank": None}, family.config)
    assert not isinstance(without_latent, ConfigError)
    assert engine_fields(without_latent)["q_lora_rank"] is None, "null says that there is none"
    changed = {k: v for k, v in config.items() if k != field} if value is ... else {**config, field: value}
    wrong = read_fields(changed, family.config)
    assert isinstance(wrong, ConfigError) and told in wrong.message


@pytest.mark.parametrize(
    ("preset", "more", "features"),
    [
        ("qwen2.5-7b", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, {"sliding_window"}),
        (
            "qwen2.5-7b",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            {"sliding_window", "mixed_layers"},
        ),
        ("qwen3-30b-a3b", {"mlp_only_layers": [1]}, {"mixed_layers"}),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, {"mixed_layers"}),
    ],
)
def test_layers_of_several_kinds_are_a_feature(
    preset: str, more: dict[str, Any], features: set[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PRESETS[preset], **more}))
    assert {*load("./", tmp_path).features} & {"sliding_window", "mixed_layers"} == features
    assert not {*load(preset, Path()).features} & features


def test_a_folder_is_relative_to_the_program() -> None:
    model = load("./model", EXAMPLE)
    assert (model.dtype, model.mixer.head_dim, model.parameters, model.tied) == ("f32", 32, 891008, False)
    assert Path(model.path) == (EXAMPLE / "model").resolve()


def test_dtype_overrides() -> None:
    assert load("qwen2.5-7b", Path(), "f32").dtype == "f32"


@pytest.mark.parametrize(
    ("target", "config", "code", "help"),
    [
        ("qwen2.5-32", None, "unknown-model", "did you mean `qwen2.5-32b`?"),
        ("qwen2.5-33b", None, "unknown-model", "did you mean `qwen2.5-32b`?"),
        ("qwen3-30b", None, "unknown-model", "did you mean `qwen3-30b-a3b`?"),
        ("qwen2.5-8b", None, "unknown-model", "the presets, for plans, are"),
        ("./nowhere", None, "unknown-model", "config.json"),
        ("./here", None, "unknown-model", "config.json"),
        ("./here", {"architectures": ["JambaForCausalLM"]}, "not-yet", "`Qwen2ForCausalLM`"),
        ("./here", {**PRESETS["qwen2.5-7b"], "layer_types": ["mamba"] * 28}, "not-yet", "layers of `mamba`"),
        ("./here", {**PRESETS["qwen2.5-7b"], "rope_scaling": {"rope_type": "longrope"}}, "not-yet", "`longrope`"),
        ("./here", {**PRESETS["qwen2.5-7b"], "rope_scaling": {"rope_type": "mine"}}, "unknown-model", ""),
        ("./here", {**PRESETS["deepseek-r1-671b"], "scoring_func": "softmax"}, "not-yet", "`scoring_func = softmax`"),
        ("./here", {**PRESETS["deepseek-r1-671b"], "kv_lora_rank": None}, "unknown-model", ""),
        ("./here", {"architectures": ["LlamaForCausalLM"]}, "unknown-model", ""),
        ("./here", [], "unknown-model", ""),
        ("./here", "no json", "unknown-model", ""),
    ],
)
def test_mistakes_in_naming_a_model(target: str, config: object, code: str, help: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    if config is not None:
        (tmp_path / "here" / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    span = Span("a.rlg", 3, 4, 3, 9)
    with pytest.raises(Fault) as caught:
        load(target, tmp_path, None, span)
    (told,) = caught.value.diagnostics
    assert (told.code, told.span) == (code, span)
    assert help in told.help


def test_a_run_of_a_name_on_the_hub_needs_its_folder() -> None:
    program = """import grpo
    cluster laptop { device = "cpu" }
    deploy grpo on laptop {
      model policy = "Qwen/Qwen2.5-0.5B-Instruct"
      data source = "rows.jsonl" { prompt = "q", answer = "a" }
    }"""
    with pytest.warns(ProgramWarning):
        plan = compile("p.rlg", text=program, sets={"prompts": 8, "group": 2, "response_len": 16})
    with pytest.raises(Fault) as caught:
        preflight.check_requirements(plan)
    told = next(d for d in caught.value.diagnostics if d.code == "unknown-model")
    assert told.message.startswith("`Qwen/Qwen2.5-0.5B-Instruct` is a preset") and "hf download" in told.help
