"""Formats of published weights: how tensors in files make up a model's weights.

Invariant: a weight is the same for every reader. Its name, shape and values do not depend on the format in which it is
stored, and a run computes with it in the run's own type.

A weight is stored in one of three ways:

- as one tensor, in a type of PLAIN;
- in fp8 with a scale for each block (DeepSeek-V3, arXiv:2412.19437, section 3.3.2): the tensor `NAME` in float8_e4m3fn,
  and `NAME_scale_inv`, by which the values of each block are multiplied;
- in MXFP4 (OCP Microscaling Formats 1.0), as the experts of gpt-oss: `NAME_blocks` [experts, outputs, groups, 16], with
  two numbers of 4 bits in each byte, and `NAME_scales` [experts, outputs, groups], the exponents of powers of two. The
  weight has the shape [experts, inputs, outputs], and a group is 32 consecutive inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import weight_headers
from ..files.weight_headers import StoredTensor

METHODS = ("fp8", "mxfp4")
PLAIN = ("F64", "F32", "BF16", "F16")
SCALES = ("F32", "BF16", "F16", "F8_E8M0")
FP8 = "F8_E4M3"
GROUP = 32  # numbers with one scale in MXFP4
BLOCK = (128, 128)  # if a config names no size
# Tensors for computing in a quantized type, which nothing here does.
ACTIVATIONS = ("activation_scale", "input_scale")


@dataclass(frozen=True)
class Quantization:
    """How a folder's weights are quantized: a method of METHODS.

    `block` is the size of the blocks of fp8; None if a whole tensor has one scale.
    """

    method: str
    block: tuple[int, int] | None = BLOCK


@dataclass(frozen=True)
class FolderWeight:
    """A weight in the files of a folder, with the tensors that have its values.

    `problem` says why the weight cannot be read; "" if it can be read.
    """

    values: StoredTensor
    shape: tuple[int, ...]
    scales: StoredTensor | None = None
    block: tuple[int, int] | None = None
    problem: str = ""

    @property
    def is_mxfp4(self) -> bool:
        return self.scales is not None and self.values.dtype == "U8"


def read_method(config: Mapping[str, Any]) -> Quantization | str | None:
    """Return how the weights of a config.json are quantized.

    Returns None for weights that are not quantized, and the name of the method if it is not supported.
    """
    stated = config.get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, dict):
        return "unknown"
    match stated.get("quant_method"):
        case "mxfp4":
            return Quantization("mxfp4")
        case "fp8":
            if (number_format := stated.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
                return f"fp8 with the format {number_format}"
            match stated.get("weight_block_size", BLOCK):
                case None:
                    return Quantization("fp8", None)
                case [int(rows), int(columns)] if rows > 0 and columns > 0:
                    return Quantization("fp8", (rows, columns))
                case size:
                    return f"fp8 with the `weight_block_size` {size!r}"
        case str(method):
            return method
    return "unknown"


def read_folder(folder: Path | str, quantization: Quantization | None) -> dict[str, FolderWeight]:
    """Return the weights in the files of a folder, by name.

    Raises the errors of `weight_headers.read_folder`.
    """
    return find_weights(weight_headers.read_folder(folder), quantization)


def find_weights(stored: Mapping[str, StoredTensor], quantization: Quantization | None) -> dict[str, FolderWeight]:
    """Return the weights that the tensors of files make up, by name."""
    method = quantization.method if quantization else ""
    weights = {}
    for name, tensor in stored.items():
        if method and (_is_scale(name, stored) or name.endswith(ACTIVATIONS)):
            continue
        if method == "mxfp4" and name.endswith("_blocks"):
            weight = _join_mxfp4(tensor, stored.get(f"{name.removesuffix('_blocks')}_scales"))
            weights[name.removesuffix("_blocks")] = weight
        elif method == "fp8" and tensor.dtype == FP8:
            assert quantization is not None
            weights[name] = _join_fp8(tensor, stored.get(f"{name}_scale_inv"), quantization.block)
        else:
            known = tensor.dtype in PLAIN
            problem = "" if known else f"has the type {tensor.dtype}; weights must be {', '.join(PLAIN)}"
            weights[name] = FolderWeight(tensor, tensor.shape, problem=problem)
    return weights


def _is_scale(name: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Return whether a tensor has the scales of another one."""
    values = {"_scale_inv": "", "_scales": "_blocks"}
    return any(name.endswith(end) and name.removesuffix(end) + other in stored for end, other in values.items())


def _join_fp8(values: StoredTensor, scales: StoredTensor | None, block: tuple[int, int] | None) -> FolderWeight:
    problem = ""
    if scales is None:
        problem = f"has the type {values.dtype}, but the folder has no `{values.name}_scale_inv`"
    elif scales.dtype not in SCALES:
        problem = f"has scales of the type {scales.dtype}; they must be {', '.join(SCALES)}"
    elif block is None:
        problem = "" if scales.shape in ((), (1,)) else f"has scales of shape {[*scales.shape]}; one number is expected"
    elif len(values.shape) < 2:
        problem = f"has the shape {[*values.shape]}, which has no blocks of {block[0]} x {block[1]}"
    else:
        rows, columns = values.shape[-2:]
        needed = (*values.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
        if scales.shape != needed:
            blocks = f"blocks of {block[0]} x {block[1]}"
            problem = f"has scales of shape {[*scales.shape]}, but {blocks} of {[*values.shape]} need {[*needed]}"
    return FolderWeight(values, values.shape, scales, block, problem)


def _join_mxfp4(blocks: StoredTensor, scales: StoredTensor | None) -> FolderWeight:
    name = blocks.name.removesuffix("_blocks")
    if len(blocks.shape) != 4 or blocks.shape[-1] * 2 != GROUP or blocks.dtype != "U8":
        what = f"`{blocks.name}` is {blocks.dtype} of shape {[*blocks.shape]}"
        problem = f"is not in MXFP4: {what}, not U8 of shape [experts, outputs, groups, {GROUP // 2}]"
        return FolderWeight(blocks, blocks.shape, scales, problem=problem)
    experts, outputs, groups, _ = blocks.shape
    problem = ""
    if scales is None:
        problem = f"has the blocks `{blocks.name}`, but the folder has no `{name}_scales`"
    elif scales.dtype != "U8" or scales.shape != blocks.shape[:-1]:
        needed = f"U8 of shape {[*blocks.shape[:-1]]}"
        problem = f"has scales that are {scales.dtype} of shape {[*scales.shape]}, but its blocks need {needed}"
    return FolderWeight(blocks, (experts, groups * GROUP, outputs), scales, problem=problem)
