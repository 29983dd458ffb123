"""Models' folders that are wrong: told at the model's line before anything starts (checks/folders.py), or what is built
is what was planned for."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from sample import examples
from tokenizers import Tokenizer
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.activations import ACT2FN

from msrl_graph import compile
from msrl_graph.backends.hf_modules import build_empty_model, named_weights
from msrl_graph.cli import compile_main, run_main
from msrl_graph.diagnostics import Fault
from msrl_graph.model.families import FAMILIES
from msrl_graph.model.fields import ACTIVATIONS, ROPES
from msrl_graph.model.models import load
from msrl_graph.runtime.data.tokens import end_tokens

ARITHMETIC = ROOT / "examples" / "arithmetic"
GOOD = json.loads((ARITHMETIC / "model" / "config.json").read_text(encoding="utf-8"))
LLAMA = {
    **GOOD,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
}
ROPE_TABLES = [
    {"rope_type": "yarn"},
    {"rope_type": "yarn", "factor": 2.0},
    {"type": "linear", "factor": 2},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_theta": "much"},
    {"rope_type": ["linear"]},
]
OTHERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from([10**12, -(10**30), 1e-6, 5.5, -2.0, 1e308, float("nan"), float("inf")]),
    st.sampled_from(["", "silu", "gelu", "nosuch", "full_attention", "llama", "qwen2", "LlamaForCausalLM"]),
    st.sampled_from([[], [0, 2], ["x"], ["full_attention"] * 4, ["sliding_attention"] * 4, [None], [[1]]]),
    st.sampled_from([{}, {"a": 1}, *ROPE_TABLES]),
)
MORE = ("rope_scaling", "rope_theta", "attention_bias", "mlp_bias", "quantization_config", "problem_type", "num_labels")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the program of the arithmetic example on one rank, its data and its model."""
    shutil.copytree(ARITHMETIC / "model", tmp_path / "model")
    shutil.copy(ARITHMETIC / "train.jsonl", tmp_path)
    text = (ARITHMETIC / "grpo.rlg").read_text(encoding="utf-8").split("cluster ")[0]
    deploy = """cluster one { device = "cpu" }
deploy grpo on one {
  model policy = "./model"
  data source  = "train.jsonl" { prompt = "prompt", answer = "answer" }
  run { iterations = 1 }
}
"""
    (tmp_path / "p.rlg").write_text(text + deploy, encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path := tmp_path_factory.mktemp("place") / "m").mkdir()
    return path


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


@examples(150)
@given(good=st.sampled_from([GOOD, LLAMA]), data=st.data(), other=OTHERS)
def test_one_field_of_a_config_changed_is_told_or_builds_what_was_planned(
    place: Path, good: Any, data: st.DataObject, other: Any
) -> None:
    config = copy.deepcopy(good)
    name = data.draw(st.sampled_from([*config, *MORE]))
    if data.draw(st.integers(0, 7)):
        config[name] = other
    else:
        config.pop(name, None)
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    try:
        model = load("./m", place.parent)
    except Fault as fault:
        assert all(d.message and not d.message.startswith("Traceback") for d in fault.diagnostics)
        return
    module = build_empty_model(model)
    assert {n: tuple(p.shape) for n, p in named_weights(module, model).items()} == {
        t.name: t.shape for t in model.weights
    }
    module.model.rotary_emb(torch.zeros(1, 4, model.hidden), torch.arange(4)[None])


def test_every_field_of_the_classes_that_run_is_judged() -> None:
    of_all = {f.name for f in dataclasses.fields(PreTrainedConfig)}
    fields = {family.name: {*family.config.__struct_fields__} for family in FAMILIES.values()}
    for kind in (LlamaConfig, Qwen2Config, Qwen3Config):
        assert {f.name for f in dataclasses.fields(kind)} - of_all <= fields[kind.model_type], kind
    assert set(ACTIVATIONS) <= set(ACT2FN) and "default" in ROPES


def config(field: str, value: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        rewritten(model / "config.json", lambda c: c.update({field: value}))

    return change


def without(name: str) -> Callable[[Path], None]:
    """Weights that have a tensor under another name."""

    def change(model: Path) -> None:
        header, rest = parts(model)
        header["other"] = header.pop(name)
        stored(model, header, rest)

    return change


def parts(model: Path) -> tuple[dict[str, Any], bytes]:
    whole = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def stored(model: Path, header: Any, rest: bytes) -> None:
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + rest)


def cut(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def piped(model: Path) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")


def headed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        header, rest = parts(model)
        stored(model, change(header), rest)

    return apply


def quantized(header: dict[str, Any]) -> dict[str, Any]:
    header["model.norm.weight"] |= {"dtype": "F8_E4M3", "shape": [4 * 128]}
    return header


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "activation": (
        config("hidden_act", "nosuch"),
        "has 'nosuch' for `hidden_act`, which must be one of silu, swish, gelu",
    ),
    "theta": (config("rope_theta", {"base": 1}), "has {'base': 1} for `rope_theta`, which must be a number above 0"),
    "epsilon": (config("rms_norm_eps", "1e-6"), "has '1e-6' for `rms_norm_eps`, which must be a number above 0"),
    "negative": (config("hidden_size", -128), "has -128 for `hidden_size`, which must be a whole number of 1 or more"),
    "heads": (config("num_key_value_heads", 3), "has 3 key-value heads, which do not divide its 4 heads"),
    "stretched": (
        config("rope_parameters", {"rope_type": "linear"}),
        "lacks the `factor` of `rope_parameters`, a number above 0",
    ),
    "stretched twice": (
        config("rope_scaling", {"type": "yarn", "factor": 2.0}),
        "has a `rope_scaling` that differs from its `rope_parameters`",
    ),
    "endless": (config("eos_token_id", 99), "has 99 for `eos_token_id`, beyond its vocabulary of 16"),
    "another": (config("model_type", "llama"), "but 'llama' for its `model_type`, which must be 'qwen2'"),
    "unknown": (
        config("architectures", ["MambaForCausalLM"]),
        "models of architecture `MambaForCausalLM` can be neither planned nor run",
    ),
    "quantized": (
        config("quantization_config", {"bits": 4}),
        "the weights of `./model` are quantized by the method `unknown`",
    ),
    "no JSON": (lambda m: (m / "config.json").write_text("{"), "`./model/config.json` cannot be read"),  # type: ignore[arg-type, return-value]
    "no object": (lambda m: (m / "config.json").write_text("[1]"), "`./model/config.json` is not a JSON object"),  # type: ignore[arg-type, return-value]
    "vocabulary": (config("vocab_size", 12), "; its `vocab_size` is 12"),
    "shapes": (config("intermediate_size", 224), "has the shape [448, 128], but `actor` needs [224, 128]"),
    "tensor": (without("model.norm.weight"), "hold no `model.norm.weight`, which the policy `actor` needs"),
    "short": (cut, "cannot be read: its tensors end at byte"),
    "empty": (lambda m: (m / "model.safetensors").write_bytes(b""), "its header has 0 bytes, the file 0"),  # type: ignore[arg-type, return-value]
    "pipe": (piped, "cannot be read: it is not a regular file"),
    "header": (headed(lambda h: [h]), "its header is not a JSON object"),
    "entry": (headed(lambda h: {**h, "more": {"shape": 1}}), "its header does not describe `more`"),
    "type": (headed(quantized), "has the type F8_E4M3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_folder_is_told_at_its_line(folder: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, message = WRONG[case]
    assert compile_main([str(folder / "p.rlg"), "--check"]) == 0
    change(folder / "model")
    for command in (
        lambda: compile_main([str(folder / "p.rlg"), "--check"]),
        lambda: run_main([str(folder / "p.rlg"), "--dry-run"]),
    ):
        capsys.readouterr()
        assert command() == 1
        told = capsys.readouterr().err
        assert message in told and 'model policy = "./model"' in told and "Traceback" not in told


def more(*names: str) -> Callable[[Path], None]:
    """Weights beside the model's own."""

    def change(model: Path) -> None:
        header, rest = parts(model)
        for name in names:
            header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [len(rest), len(rest) + 4]}
            rest += bytes(4)
        stored(model, header, rest)

    return change


UNUSED: dict[str, tuple[tuple[Callable[[Path], None], ...], str]] = {
    "one": ((more("v_head.summary.weight"),), "`v_head.summary.weight`"),
    "layers that the config lacks": (
        (config("num_hidden_layers", 2), config("layer_types", None)),
        "`model.layers.2.input_layernorm.weight` and 23 more",
    ),
    "a bias": (
        (more("model.layers.0.self_attn.o_proj.bias", "model.layers.0.mlp.up_proj.bias"),),
        "`model.layers.0.mlp.up_proj.bias` and 1 more",
    ),
    "angles, which are computed": ((more("model.layers.0.self_attn.rotary_emb.inv_freq"),), ""),
    "a tied head": ((config("tie_word_embeddings", True),), ""),
}


@pytest.mark.parametrize("case", UNUSED)
def test_a_weight_that_the_config_says_nothing_of_is_told(
    folder: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, name = UNUSED[case]
    for change in changes:
        change(folder / "model")
    assert compile_main([str(folder / "p.rlg"), "--check"]) == 0
    program = folder / "p.rlg"
    file = folder / "model" / "model.safetensors"
    line = program.read_text(encoding="utf-8").split("\n").index('  model policy = "./model"') + 1
    what = f"{file} holds {name}, which the config.json next to it does not describe"
    told = f"""warning[unused-weight]: {what}
  --> {program}:{line}:18
   |
{line} |   model policy = "./model"
   |                  ^^^^^^^^^
   = help: config.json and weights must be of the same model: copy both again, or remove what is not the model's
"""
    assert capsys.readouterr().err == (told if name else "")


def test_a_plan_whose_folder_has_changed_since_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "plan.json").write_text(compile(folder / "p.rlg").to_json(), encoding="utf-8")
    assert run_main([str(folder / "plan.json"), "--dry-run"]) == 0
    for field, value, message in (
        ("intermediate_size", 224, "describes another model than the plan was made for"),
        ("hidden_act", 5, "has 5 for"),
    ):
        rewritten(folder / "model" / "config.json", lambda c, f=field, v=value: c.update({f: v}))  # type: ignore[misc]
        assert run_main([str(folder / "plan.json"), "--dry-run"]) == 1
        assert message in capsys.readouterr().err


def test_a_folder_of_a_config_alone_can_be_planned_with(folder: Path) -> None:
    for path in _all_but_config(folder / "model"):
        path.unlink()
    assert compile(folder / "p.rlg").model("actor.update").parameters


def _all_but_config(model: Path) -> Iterator[Path]:
    return (p for p in sorted(model.iterdir()) if p.name != "config.json")


STRETCHED: dict[str, tuple[dict[str, Any], int]] = {
    "not at all": ({}, 8),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 16),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic", "factor": 1.25}}, 10),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}}, 16),
    "yarn that the config has counted": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4}},
        8,
    ),
    # Its config states what it is stretched to.
    "llama3": ({"rope_scaling": {**ROPE_TABLES[3], "original_max_position_embeddings": 4}}, 8),
}


@pytest.mark.parametrize("case", STRETCHED)
def test_a_sequence_longer_than_the_model_has_positions_is_refused(
    folder: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table, has = STRETCHED[case]
    rewritten(
        folder / "model" / "config.json",
        lambda c: c.update({"max_position_embeddings": 8, "rope_parameters": None, **table}),
    )
    text = (folder / "p.rlg").read_text(encoding="utf-8")
    assert "prompt    : i32[<= 6]" in text and "response  : i32[<= 5]" in text
    for most in (has, has + 1):
        fitted = text.replace("prompt    : i32[<= 6]", f"prompt    : i32[<= {most - 5}]")
        (folder / "p.rlg").write_text(fitted, encoding="utf-8")
        capsys.readouterr()
        assert compile_main([str(folder / "p.rlg"), "--check"]) == (most > has)
        told = capsys.readouterr().err
        message = (
            f"`actor.generate` computes on up to {most} tokens, `prompt` and `response`; `./model` has {has} positions"
        )
        assert (f"error[unknown-model]: {message}" in told and 'model policy = "./model"' in told) == (most > has)


def test_a_plan_whose_model_has_fewer_positions_since_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "plan.json").write_text(compile(folder / "p.rlg").to_json(), encoding="utf-8")
    config("max_position_embeddings", 8)(folder / "model")
    assert run_main([str(folder / "plan.json"), "--dry-run"]) == 1
    assert "computes on up to 11 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["plan.json", "script.py", "in Python"])
def test_what_was_compiled_runs_from_anywhere(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "score.py").write_text(
        "def score(response: str, answer: str) -> float:\n    return float(response == answer)\n"
    )
    text = (folder / "p.rlg").read_text(encoding="utf-8")
    assert "exact_match()" in text
    (folder / "p.rlg").write_text(text.replace("exact_match()", '"score.py:score"'), encoding="utf-8")
    monkeypatch.chdir(folder)
    made = ["--emit", "ray"] if kind == "script.py" else ["--format", "json"]
    if kind == "in Python":
        Path(kind).write_text(compile("p.rlg").to_json(), encoding="utf-8")
    else:
        assert compile_main(["p.rlg", *made, "-o", kind]) == 0
    (elsewhere := folder / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    content = (folder / kind).read_text(encoding="utf-8")
    if kind == "script.py":
        content = content[content.index('{\n"') : content.rindex("}") + 1]
    (elsewhere / "plan.json").write_text(content, encoding="utf-8")
    capsys.readouterr()
    assert run_main(["plan.json", "--dry-run"]) == 0, capsys.readouterr().err


def test_an_end_token_is_the_tokenizers_where_the_configs_name_none(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder / "model"
    (model / "generation_config.json").unlink(missing_ok=True)
    config("eos_token_id", None)(model)
    said = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    (end,) = end_tokens(str(ARITHMETIC / "model"))
    said["eos_token"] = Tokenizer.from_file(str(model / "tokenizer.json")).id_to_token(end)
    (model / "tokenizer_config.json").write_text(json.dumps(said), encoding="utf-8")
    assert end_tokens(str(model)) == (end,)
    assert compile_main([str(folder / "p.rlg"), "--check"]) == 0
    assert "no-end-token" not in capsys.readouterr().err
    # Where it is not there either, that is told, and what the help names is heeded.
    (model / "tokenizer_config.json").write_text(json.dumps({**said, "eos_token": None}), encoding="utf-8")
    end_tokens.cache_clear()
    assert end_tokens(str(model)) == () and compile_main([str(folder / "p.rlg"), "--check"]) == 0
    told = capsys.readouterr().err
    assert f"warning[no-end-token]: no file in {model} names an end token" in told, told
    assert 'add `"eos_token_id": NUMBER` to its generation_config.json' in told
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": end}), encoding="utf-8")
    end_tokens.cache_clear()
    assert end_tokens(str(model)) == (end,) and compile_main([str(folder / "p.rlg"), "--check"]) == 0
    assert "no-end-token" not in capsys.readouterr().err
