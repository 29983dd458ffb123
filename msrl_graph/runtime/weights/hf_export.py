"""Weights of a trained worker as a Hugging Face folder.

Invariant: a folder gets its final name when all of its files are written. A run and `--export` both write through this
module, so the same weights give the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...backends import hf_modules
from ...model.architecture import Model
from ...sharding.layout import full_box
from . import tensor_files
from .checkpoint import CheckpointSource

if TYPE_CHECKING:
    import torch


def write_folder(model: Model, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the weights of a model as a Hugging Face folder.

    `weights` has whole tensors, by the names in `model.saved`. An existing `folder` is replaced. Raises OSError.
    """
    named = {
        name: weights[tensor.name][index] if index else weights[tensor.name]
        for tensor in model.saved
        for name, index, _ in tensor.in_files(full_box(tensor.shape))
    } | hf_modules.load_buffers(model)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tensor_files.write_tensors(partial / "model.safetensors", named, {"format": "pt"})
        tensor_files.copy_companions(Path(model.path), partial)
        if model.scores:
            config = partial / "config.json"
            config.write_text(
                json.dumps(hf_modules.make_scoring_config(json.loads(config.read_text())), indent=2) + "\n"
            )
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was resumed
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
