"""Quantized weights as folders state them: what is read, what is refused, and what a broken folder's message says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mixture
import published
import pytest
import torch
from safetensors.torch import load_file, save_file

from msrl_graph.cli import compile_main, run_main
from msrl_graph.compiler.pipeline import compile
from msrl_graph.files.weight_headers import StoredTensor
from msrl_graph.model.quantization import Quantization, find_weights, read_method

PROGRAM = """import grpo
cluster laptop { device = "cpu", nodes = 1, devices_per_node = 2 }
deploy grpo on laptop {
  model policy = "./model"
  data source = "train.jsonl" { prompt = "prompt", answer = "answer" }
  set prompts = 4
  set prompt_len = 6
  set response_len = 5
}
"""
METHODS: dict[str, tuple[Mapping[str, Any] | None, Quantization | str | None]] = {
    "none": (None, None),
    "DeepSeek-V3": (
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        Quantization("fp8", (128, 128)),
    ),
    "Qwen3-FP8": (
        {"quant_method": "fp8", "weight_block_size": [64, 32], "modules_to_not_convert": ["lm_head"]},
        Quantization("fp8", (64, 32)),
    ),
    "one scale a tensor": ({"quant_method": "fp8", "weight_block_size": None}, Quantization("fp8", None)),
    "gpt-oss": ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}, Quantization("mxfp4")),
    "another format": ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with the format e5m2"),
    "no size": ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "fp8 with the `weight_block_size` [0, 1]"),
    "GPTQ": ({"quant_method": "gptq", "bits": 4}, "gptq"),
    "bitsandbytes": ({"load_in_4bit": True}, "unknown"),
}


@pytest.mark.parametrize("case", METHODS)
def test_the_method_of_a_config(case: str) -> None:
    stated, expected = METHODS[case]
    assert read_method({"quantization_config": stated}) == expected


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "p.rlg").write_text(PROGRAM)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], dry: bool = False) -> tuple[int, str]:
    capsys.readouterr()
    code = run_main(["p.rlg", "--dry-run", "--set", "prompts=1"]) if dry else compile_main(["p.rlg", "--check"])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("kind", [mixture.llama, mixture.mixture, mixture.latent])
def test_weights_in_fp8_are_planned_as_weights_of_the_runs_type(
    folder: Path, kind: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    kind(folder / "model")
    published.configure(folder / "model", dtype="bfloat16")
    plain = compile(folder / "p.rlg")
    published.fp8(folder / "model")
    plan = compile(folder / "p.rlg")
    assert plan.model("actor.update").dtype == "bf16"
    assert plan.memory == plain.memory and plan.model("actor.update").tensors == plain.model("actor.update").tensors
    code, text = told(capsys)
    assert code == 0 and "warning" not in text and "error" not in text, text


TYPES = {
    "fp8": (published.fp8, {}, "fp8: the run converts them to bf16"),
    "fp8 in float32": (published.fp8, {"dtype": "f32"}, "fp8: the run converts them to f32"),
    "float16": (published.halve, {}, "float16: the run converts them to bf16, and trains in it"),
    "float16 in float32": (published.halve, {"dtype": "f32"}, ""),
    "bfloat16": (lambda model: published.configure(model, dtype="bfloat16"), {}, ""),
}


@pytest.mark.parametrize("case", TYPES)
def test_the_type_that_a_run_trains_in_is_told_once(
    folder: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    convert, options, message = TYPES[case]
    mixture.llama(folder / "model")
    convert(folder / "model")
    text = PROGRAM.replace('"./model"', '"./model" { dtype = f32 }') if options else PROGRAM
    (folder / "p.rlg").write_text(text)
    for dry in (False, True):
        code, text = told(capsys, dry)
        assert code == 0 and text.count("hint[converted-weights]") == bool(message), text
        assert message in text and ("write `{ dtype = f32 }`" in text) == ("to bf16" in message)


@pytest.mark.parametrize("dtype", ["fp8", "mxfp4", "f16", "float16"])
def test_training_in_a_published_type_is_refused(folder: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    mixture.llama(folder / "model")
    published.fp8(folder / "model")
    text = PROGRAM.replace('"./model"', f'"./model" {{ dtype = {dtype} }}')
    (folder / "p.rlg").write_text(text)
    code, message = told(capsys)
    assert code == 1 and f"nothing is trained in `{dtype}`; published weights are converted" in message
    (folder / "p.rlg").write_text(text.replace(dtype, "bf16"))
    assert told(capsys)[0] == 0


def change(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(model: Path) -> None:
        held = load_file(model / "model.safetensors")
        edit(held)
        save_file(held, model / "model.safetensors", {"format": "pt"})

    return apply


UP = "model.layers.0.mlp.up_proj.weight"  # 128 x 64, in blocks of 16 x 16
SCALES = f"{UP}_scale_inv"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no scales": (
        change(lambda held: held.pop(SCALES)),
        f"has the type F8_E4M3, but the folder has no `{SCALES}`",
    ),
    "other blocks": (
        lambda model: published.configure(
            model, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
        ),
        "but blocks of 128 x 128 of [",
    ),
    "scales of another tensor": (
        change(lambda held: held.update({SCALES: torch.ones(8, 3)})),
        "has scales of shape [8, 3], but blocks of 16 x 16 of [128, 64] need [8, 4]",
    ),
    "scales of whole numbers": (
        change(lambda held: held.update({SCALES: torch.ones(8, 4, dtype=torch.int32)})),
        "has scales of the type I32; they must be F32, BF16, F16, F8_E8M0",
    ),
    "another shape": (
        change(lambda held: held.update({UP: held[UP][:64].clone(), SCALES: held[SCALES][:4].clone()})),
        "has the shape [64, 64], but `actor` needs [128, 64]",
    ),
    "a config of weights that are not quantized": (
        lambda model: published.configure(model, quantization_config=None),
        "has the type F8_E4M3; weights must be F64, F32, BF16, F16",
    ),
    "another method": (
        lambda model: published.configure(model, quantization_config={"quant_method": "awq", "bits": 4}),
        "the weights of `./model` are quantized by the method `awq`, which is not supported",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_broken_folder_is_told_at_its_line(folder: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    mixture.llama(folder / "model")
    published.fp8(folder / "model")
    break_folder, message = WRONG[case]
    break_folder(folder / "model")
    for dry in (False, True):
        code, text = told(capsys, dry)
        assert code == 1 and message in text and '  model policy = "./model"' in text, text


def test_scales_for_activations_are_no_unused_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixture.llama(folder / "model")
    published.fp8(folder / "model")
    change(lambda held: held.update({UP.replace("weight", "activation_scale"): torch.ones(())}))(folder / "model")
    assert "unused-weight" not in told(capsys)[1]
    change(lambda held: held.update({"other_scale_inv": torch.ones(())}))(folder / "model")
    assert "holds `other_scale_inv`" in told(capsys)[1]


def stored(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    return {name: StoredTensor(Path("f"), name, dtype, shape, 0) for name, (dtype, shape) in tensors.items()}


def test_weights_in_mxfp4_have_the_shape_of_the_models_weights() -> None:
    held = stored(w_blocks=("U8", (4, 64, 3, 16)), w_scales=("U8", (4, 64, 3)), w_bias=("BF16", (4, 64)))
    found = find_weights(held, Quantization("mxfp4"))
    assert {name: (weight.shape, weight.problem) for name, weight in found.items()} == {
        "w": ((4, 96, 64), ""),
        "w_bias": ((4, 64), ""),
    }
    assert {*find_weights(held, None)} == {*held}, "a folder that states no method has these tensors"


@pytest.mark.parametrize(
    ("scales", "problem"),
    [
        ({}, "has the blocks `w_blocks`, but the folder has no `w_scales`"),
        (
            {"w_scales": ("U8", (4, 64, 2))},
            "has scales that are U8 of shape [4, 64, 2], but its blocks need U8",
        ),
        ({"w_scales": ("F32", (4, 64, 3))}, "has scales that are F32"),
        ({"w_blocks": ("U8", (64, 3, 16))}, "is not in MXFP4: `w_blocks` is U8 of shape [64, 3, 16]"),
    ],
)
def test_what_is_wrong_with_weights_in_mxfp4(scales: dict[str, tuple[str, tuple[int, ...]]], problem: str) -> None:
    held = stored(**({"w_blocks": ("U8", (4, 64, 3, 16))} | scales))
    assert problem in find_weights(held, Quantization("mxfp4"))["w"].problem
