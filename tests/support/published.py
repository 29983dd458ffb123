"""Folders of models in the formats in which weights are published, made from a folder of float32 weights."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FP8_MOST = 448.0  # of float8_e4m3fn
LEFT = ("embed_tokens", "lm_head", "norm", "mlp.gate.")  # what DeepSeek-V3 does not quantize


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def configure(folder, **stated):
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text()) | stated
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def halve(folder):
    """Weights in float16, and a config that says so, as of models of 2023."""
    held = {name: value.half() for name, value in weights(folder).items()}
    save_file(held, Path(folder) / "model.safetensors", {"format": "pt"})
    configure(folder, dtype=None, torch_dtype="float16")


def pickle(folder, files=1):
    """Weights as torch saved them before there was safetensors: one file, or several with an index."""
    folder = Path(folder)
    held = weights(folder)
    (folder / "model.safetensors").unlink()
    if files == 1:
        torch.save(held, folder / "pytorch_model.bin")
        return
    names = [f"pytorch_model-{i + 1:05d}-of-{files:05d}.bin" for i in range(files)]
    place = {name: names[i % files] for i, name in enumerate(held)}
    for file in names:
        torch.save({name: held[name] for name in held if place[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))


def quantize_fp8(value, block, scale_dtype=torch.float32):
    """The numbers in float8_e4m3fn and the scales of a matrix."""
    rows, columns = value.shape[-2:]
    padded = torch.nn.functional.pad(value, (0, -columns % block[1], 0, -rows % block[0]))
    parts = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))  # [..., rows, block, columns, block]
    scales = (parts.abs().amax((-1, -3)) / FP8_MOST).clamp(min=1e-12)
    if scale_dtype == torch.float8_e8m0fnu:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scales = scales.to(scale_dtype)
    spread = scales.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., :rows, :columns]
    return (value / spread).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn), scales


def fp8(folder, block=(16, 16), scale_dtype=torch.float32, files=1):
    """Weights in fp8 with a scale for each block, as DeepSeek-V3's own folder has them.

    With two `files`, the scales are in another file than the numbers.
    """
    folder = Path(folder)
    held = {}
    for name, value in weights(folder).items():
        if value.ndim < 2 or any(part in name for part in LEFT):
            held[name] = value.to(torch.bfloat16)
        else:
            held[name], held[f"{name}_scale_inv"] = quantize_fp8(value, block, scale_dtype)
    _save(folder, held, files)
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*block]}
    configure(folder, quantization_config=method, dtype=None, torch_dtype="bfloat16")


def mxfp4(experts, outputs, inputs):
    """Random blocks and scales of experts, as gpt-oss has them."""
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(118, 130, blocks.shape[:-1], dtype=torch.uint8)


def _save(folder, held, files):
    if files == 1:
        save_file(held, folder / "model.safetensors", {"format": "pt"})
        return
    (folder / "model.safetensors").unlink()
    place = {name: f"model-{1 + name.endswith('_scale_inv')}.safetensors" for name in held}
    for file in set(place.values()):
        save_file({n: held[n] for n in held if place[n] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))


def stored_bytes(folder):
    return sum(math.prod(value.shape) * value.element_size() for value in weights(folder).values())
