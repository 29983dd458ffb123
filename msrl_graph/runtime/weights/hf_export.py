"""Weights of a trained worker as a Hugging Face folder.

Invariant: a folder gets its final name when all of its files are written. A run and `--export` both write through this
module, so the same weights give the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...backends import hf_modules
from ...backends.adapters import merge_adapter
from ...backends.engine_protocols import Shard
from ...model import peft_folder
from ...model.architecture import Model
from ...model.models import read_config
from ...sharding.layout import full_box
from . import tensor_files
from .checkpoint import CheckpointSource

if TYPE_CHECKING:
    import torch


def write_folder(model: Model, weights: Mapping[str, torch.Tensor], folder: Path, merged: bool = False) -> None:
    """Write the weights of a model as a Hugging Face folder.

    `weights` has whole tensors, by the names in `model.saved`. A model with an adapter is written as a folder of PEFT,
    which has the adapter alone. If it is `merged`, the folder has the merged weights instead. An existing `folder` is
    replaced. Raises OSError.
    """
    import torch

    if model.lora and merged:
        weights = _merge(model, weights)
        model = model.base or model
    named: dict[str, torch.Tensor] = {}
    for tensor in model.saved:
        for name, index, _ in tensor.in_files(full_box(tensor.shape)):
            part = weights[tensor.name][index] if index else weights[tensor.name]
            named[name] = part if name not in named else torch.cat([named[name], part], tensor.rows_dim)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tensor_files.copy_companions(Path(model.path), partial)
        config = partial / "config.json"
        stated = read_config(partial, model.name)
        if stated != json.loads(config.read_text()):  # the model was published with a part for images
            _write_json(config, stated)
        if model.lora:
            named = {peft_folder.BEHIND + name: value for name, value in named.items()}
            tensor_files.write_tensors(partial / peft_folder.WEIGHTS[0], named, {"format": "pt"})
            _write_json(partial / peft_folder.CONFIG, peft_folder.make_config(model))
            for file in (config, partial / "generation_config.json"):  # those of the model that it belongs to
                file.unlink(missing_ok=True)
        else:
            saved_type = str(next(iter(named.values())).dtype).removeprefix("torch.")
            buffers = hf_modules.load_buffers(model)
            named |= {tensor.name_in_files: buffers[tensor.name] for tensor in model.buffers}
            tensor_files.write_tensors(partial / "model.safetensors", named, {"format": "pt"})
            tensor_files.state_saved_type(partial, saved_type)
            if model.scores:
                _write_json(config, hf_modules.make_scoring_config(json.loads(config.read_text())))
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was resumed
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def _merge(model: Model, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a model, with its adapter merged into them."""
    import torch

    base = model.base or model
    dtype = next(iter(weights.values())).dtype
    shards = [
        Shard(tensor.name, full_box(tensor.shape), torch.empty(tensor.shape, dtype=dtype)) for tensor in base.weights
    ]
    hf_modules.fill(base, [shard for shard in shards if shard.name not in weights])
    for shard in shards:
        if shard.name in weights:  # a score head
            shard.tensor.copy_(weights[shard.name])
    merge_adapter(model, {shard.name: shard.tensor for shard in shards} | dict(weights))
    return {shard.name: shard.tensor for shard in shards}


def read_weights(source: CheckpointSource, worker: str, model: Model) -> dict[str, torch.Tensor]:
    """Read the whole tensors of a worker from a checkpoint, in their saved type.

    The result has the tensors of `model`, by their names in `model.saved`.

    Raises CorruptCheckpoint.
    """
    names = {tensor.name: f"{worker}/weights/{tensor.name}" for tensor in model.saved}
    return {
        tensor.name: source.read(names[tensor.name], full_box(tensor.shape), source.dtype(names[tensor.name]))
        for tensor in model.saved
    }
