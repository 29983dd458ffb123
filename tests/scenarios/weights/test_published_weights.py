"""Runs from weights in published formats: the same numbers, bit for bit, as from these weights in float32."""

import json
import shutil

import numpy as np
import published
import pytest
import torch
from place import EXAMPLE, SMALL, metrics, ran, weights
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

pytestmark = pytest.mark.slow
TIMES = ("seconds", "tokens_per_second", "throughput_eq5", "phases", "dock_bytes", "dock_messages", "imbalance")


def plain(folder, block):
    """A folder's weights in fp8 as weights in float32."""
    held = published.weights(folder)
    scales = {name: value for name, value in held.items() if name.endswith("_scale_inv")}
    values = {
        name: _dequantize_fp8_weight(value, scales[f"{name}_scale_inv"], block, torch.float32)
        if f"{name}_scale_inv" in scales
        else value.float()
        for name, value in held.items()
        if name not in scales
    }
    assert scales
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    published.configure(folder, quantization_config=None, torch_dtype=None, dtype="float32")


def test_a_run_from_fp8_and_one_from_files_of_torch_are_as_one_from_float32(place):
    block = (48, 80)
    for name in ("fp8", "plain", "torch"):
        shutil.copytree(EXAMPLE / "model", place.folder / name)
        published.fp8(place.folder / name, block)
        if name != "fp8":
            plain(place.folder / name, block)
    published.pickle(place.folder / "torch", 2)
    for name in ("plain", "fp8", "torch"):
        place.write(('"./model"', f'"./{name}" {{ dtype = f32 }}'), evaluated=False)
        ran(place, *SMALL, "--iterations", "2", "--out", f"out-{name}")
    lines = {
        name: [{k: v for k, v in line.items() if k not in TIMES} for line in metrics(place.folder / f"out-{name}")]
        for name in ("plain", "fp8", "torch")
    }
    assert lines["fp8"] == lines["torch"] == lines["plain"]
    trained = weights(place.folder / "out-plain")
    begun = weights(place.folder, "plain")
    assert any(not np.array_equal(value, trained[key]) for key, value in begun.items())
    for name in ("fp8", "torch"):
        found = weights(place.folder / f"out-{name}")
        assert all(np.array_equal(value, found[key]) for key, value in trained.items())
    saved = place.folder / "out-fp8" / "weights" / "actor"
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    assert all(np.array_equal(value, loaded[key].numpy()) for key, value in trained.items())
