"""Models against published counts, against transformers' own parameters, and the mistakes in naming one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from msrl_graph.diagnostics import Fault, Span
from msrl_graph.models import PRESETS, load

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic"


@pytest.mark.parametrize(
    ("name", "parameters"),
    # Counts of the published checkpoints.
    [("qwen2.5-7b", 7_615_616_512), ("qwen2.5-32b", 32_763_876_352), ("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496)],
)
def test_counts_are_the_published_ones(name: str, parameters: int) -> None:
    assert load(name, Path()).parameters == parameters


def test_tiny_is_about_a_million_in_float32() -> None:
    model = load("tiny", Path())
    assert 0.8e6 < model.parameters < 1.2e6
    assert model.dtype == "f32"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_what_tensor_parallelism_divides(name: str) -> None:
    tensors = {t.name: t for t in load(name, Path()).tensors}
    layer = "model.layers.0."
    divided = {f"{layer}self_attn.{p}_proj.weight": 0 for p in "qkv"} | {f"{layer}self_attn.o_proj.weight": 1}
    divided |= {f"{layer}mlp.gate_proj.weight": 0, f"{layer}mlp.up_proj.weight": 0, f"{layer}mlp.down_proj.weight": 1}
    divided |= {"model.embed_tokens.weight": 0, "lm_head.weight": 0, "model.norm.weight": -1, f"{layer}input_layernorm.weight": -1}
    assert {n: tensors[n].tp_dim for n in divided} == divided


def test_a_folder_beside_the_program_is_found_by_its_bare_name(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(Fault) as caught:
        load("model", tmp_path)
    (told,) = caught.value.diagnostics
    assert (told.message, told.help) == ("no model preset is called `model`", 'for the folder beside the program write `"./model"`')


@pytest.mark.slow
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
        config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True, "mlp_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    theirs = {n: tuple(p.shape) for n, p in peer.named_parameters()}
    ours = {t.name: t.shape for t in load("./", tmp_path).tensors}
    assert ours == theirs


def test_a_folder_is_relative_to_the_program() -> None:
    model = load("./model", EXAMPLE)
    assert (model.dtype, model.head_dim, model.parameters, model.tied) == ("f32", 32, 891008, False)
    assert Path(model.path) == (EXAMPLE / "model").resolve()


def test_dtype_overrides() -> None:
    assert load("qwen2.5-7b", Path(), "f32").dtype == "f32"


@pytest.mark.parametrize(
    ("target", "config", "code", "help"),
    [
        ("qwen2.5-32", None, "unknown-model", "did you mean `qwen2.5-32b`?"),
        ("./nowhere", None, "unknown-model", "config.json"),
        ("./here", None, "unknown-model", "config.json"),
        ("./here", {"architectures": ["MixtralForCausalLM"]}, "not-yet", "`Qwen2ForCausalLM`"),
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
