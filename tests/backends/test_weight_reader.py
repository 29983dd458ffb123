"""Published weights, read box by box: float16, files of torch, fp8 with block scales, and MXFP4.

They are compared with transformers' own code for the same formats.
"""

import itertools
import json
from pathlib import Path

import mixture
import published
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from msrl_graph.backends import hf_modules, weight_reader
from msrl_graph.backends.engine_protocols import Shard
from msrl_graph.model.models import load
from msrl_graph.model.quantization import Quantization, read_folder
from msrl_graph.sharding.layout import Layout, Side, elements, full_box, shard, slices

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def read(folder, quantization, name, box, dtype=torch.float32):
    target = torch.full([stop - start for start, stop in box], torch.nan, dtype=dtype)
    weight_reader.copy_boxes(read_folder(folder, quantization), {name: [(target, box)]})
    return target


def filled(folder, tp=1, rank=0, dtype="f32"):
    """The weights of a rank, by name, with their boxes."""
    model = load(str(folder), Path(), dtype)
    boxes = {tensor.name: shard(tensor, Side(Layout(tp=tp)), rank) for tensor in model.weights}
    shards = [
        Shard(name, box, torch.full([stop - start for start, stop in box], torch.nan, dtype=DTYPES[dtype]))
        for name, box in boxes.items()
    ]
    hf_modules.fill(model, shards)
    return model, {shard.name: (shard.box, shard.tensor) for shard in shards}


def by_file(model, name):
    """The tensors of files that are one weight of a model."""
    tensor = next(tensor for tensor in model.tensors if tensor.name == name)
    return [(file, index) for file, index, _ in tensor.in_files(full_box(tensor.shape))]


@pytest.mark.parametrize("files", [1, 3])
def test_files_of_torch_are_read_by_boxes(tmp_path, files):
    mixture.llama(tmp_path)
    whole = published.weights(tmp_path)
    published.pickle(tmp_path, files)
    for rank in range(2):
        _, found = filled(tmp_path, 2, rank)
        assert {*found} == {*whole}
        for name, (box, value) in found.items():
            assert torch.equal(value, whole[name][slices(box)])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(theirs[name], value) for name, value in whole.items())


def test_a_part_of_a_larger_storage_is_read(tmp_path):
    """As a file has it whose weights were saved as views: transposed, or from a fused matrix."""
    whole = torch.arange(48.0).view(6, 8)
    torch.save(
        {"turned": whole.T, "part": whole[2:4], "both": torch.nn.Parameter(whole)}, tmp_path / "pytorch_model.bin"
    )
    assert torch.equal(read(tmp_path, None, "turned", ((1, 5), (0, 3))), whole.T[1:5, :3])
    assert torch.equal(read(tmp_path, None, "part", ((1, 2), (2, 8))), whole[3:4, 2:])
    assert torch.equal(read(tmp_path, None, "both", ((0, 6), (0, 8))), whole)


def test_float16_becomes_the_type_of_the_run(tmp_path):
    mixture.llama(tmp_path)
    published.halve(tmp_path)
    assert load(str(tmp_path), Path()).dtype == "bf16"
    whole = published.weights(tmp_path)
    for dtype in ("f32", "bf16"):
        _, found = filled(tmp_path, dtype=dtype)
        assert all(torch.equal(value, whole[name].to(DTYPES[dtype])) for name, (_, value) in found.items())


BOXES = [((0, 80), (0, 96)), ((16, 48), (32, 64)), ((7, 41), (17, 95)), ((79, 80), (0, 1)), ((3, 3), (0, 96))]


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("block", [(16, 32), (128, 128), (48, 40)])
def test_boxes_in_fp8_are_as_transformers_has_them(tmp_path, block, scale_dtype):
    torch.manual_seed(0)
    values, scales = published.quantize_fp8(torch.randn(80, 96), block, scale_dtype)
    save_file({"w.weight": values, "w.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    for dtype in DTYPES.values():
        if 80 % block[0] or 96 % block[1]:  # where transformers' reader guesses other blocks, or fails
            theirs = _dequantize_fp8_weight(values, scales.float(), block, torch.float32).to(dtype)
        else:
            theirs = Fp8Dequantize(None)._dequantize_one(values, scales, dtype)
        for box in BOXES:
            assert torch.equal(read(tmp_path, Quantization("fp8", block), "w.weight", box, dtype), theirs[slices(box)])


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_in_fp8_may_have_one_scale(tmp_path, shape):
    values = torch.randn(6, 8).to(torch.float8_e4m3fn)
    save_file({"w.weight": values, "w.weight_scale_inv": torch.full(shape, 0.3)}, tmp_path / "model.safetensors")
    found = read(tmp_path, Quantization("fp8", None), "w.weight", ((1, 4), (2, 8)))
    assert torch.equal(found, values[1:4, 2:].float() * torch.tensor(0.3))
    save_file({"w": values[0].clone(), "w_scale_inv": torch.full(shape, 0.3)}, tmp_path / "model.safetensors")
    assert torch.equal(read(tmp_path, Quantization("fp8", None), "w", ((3, 7),)), values[0, 3:7].float() * 0.3)


def test_experts_in_one_tensor_of_fp8(tmp_path):
    values, scales = published.quantize_fp8(torch.randn(3, 40, 24), (16, 16))
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    box = ((1, 3), (5, 37), (3, 20))
    one_by_one = [_dequantize_fp8_weight(v, s, (16, 16), torch.float32) for v, s in zip(values, scales, strict=True)]
    assert torch.equal(read(tmp_path, Quantization("fp8", (16, 16)), "w", box), torch.stack(one_by_one)[slices(box)])


def test_boxes_in_mxfp4_are_as_transformers_has_them(tmp_path, monkeypatch):
    """In gpt-oss's layout: all experts of a layer in one tensor, transposed."""
    torch.manual_seed(0)
    monkeypatch.setattr(weight_reader, "AT_ONCE", 700)
    blocks, scales = published.mxfp4(4, 48, 96)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "model.safetensors")
    weight = read_folder(tmp_path, Quantization("mxfp4"))[name]
    assert weight.shape == (4, 96, 48)
    for dtype in DTYPES.values():
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        for box in (
            full_box(weight.shape),
            ((1, 3), (0, 96), (12, 24)),
            ((0, 4), (40, 75), (0, 48)),
            ((3, 4), (95, 96), (7, 8)),
        ):
            assert torch.equal(read(tmp_path, Quantization("mxfp4"), name, box, dtype), theirs[slices(box)])


def test_only_the_blocks_that_a_box_touches_are_read(tmp_path, monkeypatch):
    values, scales = published.quantize_fp8(torch.randn(64, 64), (16, 16))
    blocks, exponents = published.mxfp4(4, 8, 128)
    held = {"w": values, "w_scale_inv": scales, "e_blocks": blocks, "e_scales": exponents}
    save_file({k: v for k, v in held.items() if k.startswith("w")}, tmp_path / "model.safetensors")
    parts = []

    def recorded(file, stack, open_file=weight_reader._open_file):
        tensors = open_file(file, stack)

        class Slice:
            def __init__(self, name):
                self.name = name

            def __getitem__(self, index):
                part = tensors(self.name)[index]
                parts.append((self.name, [*part.shape]))
                return part

        return Slice

    monkeypatch.setattr(weight_reader, "_open_file", recorded)
    read(tmp_path, Quantization("fp8", (16, 16)), "w", ((20, 40), (0, 16)))
    assert parts == [("w", [20, 16]), ("w_scale_inv", [2, 1])]
    parts.clear()
    save_file({k: v for k, v in held.items() if k.startswith("e")}, tmp_path / "model.safetensors")
    read(tmp_path, Quantization("mxfp4"), "e", ((2, 3), (32, 70), (4, 8)))
    assert parts == [("e_blocks", [1, 4, 2, 16]), ("e_scales", [1, 4, 2])]


MODELS = {"llama": mixture.llama, "experts": mixture.mixture, "latent": mixture.latent}


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_models_in_fp8_are_filled_by_ranks(tmp_path, kind, files):
    """Each tensor of each rank of two, with blocks that neither ranks nor heads divide."""
    MODELS[kind](tmp_path)
    published.fp8(tmp_path, (48, 16), files=files)
    named = {}
    for file in tmp_path.glob("*.safetensors"):
        named |= published.load_file(file)
    expected = {
        name: _dequantize_fp8_weight(value, named[f"{name}_scale_inv"], (48, 16), torch.float32)
        if f"{name}_scale_inv" in named
        else value.float()
        for name, value in named.items()
    }
    for rank, dtype in itertools.product(range(2), DTYPES):
        model, found = filled(tmp_path, 2, rank, dtype)
        compared = 0
        for name, (box, value) in found.items():
            whole = [expected[file] for file, _ in by_file(model, name)]
            stacked = torch.stack(whole) if "*" in name else whole[0]
            assert torch.equal(value, stacked[slices(box)].to(DTYPES[dtype])), name
            compared += elements(box)
        assert compared > 1000


def test_a_model_in_fp8_computes_as_transformers_dequantizes_it(tmp_path):
    """Transformers dequantizes a folder in fp8 by itself where there is no GPU; its blocks must divide."""
    mixture.latent(tmp_path)
    published.fp8(tmp_path, (8, 8))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model, found = filled(tmp_path)
    ours = hf_modules.build_empty_model(model).to_empty(device="cpu")
    state = theirs.state_dict()
    ours.load_state_dict(state)
    for name, (_, value) in found.items():
        if "*" not in name:
            assert torch.equal(value, state[name]), name
    experts = found["model.layers.1.mlp.experts.*.down_proj.weight"][1]
    assert torch.equal(experts, state["model.layers.1.mlp.experts.down_proj"])
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
