"""What the engines on transformers share: a model without weights, and a rank's boxes of its weights read from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..layout import Box, Tensor, slices
from ..plan import Model

if TYPE_CHECKING:
    import torch

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def empty(model: Model) -> Any:
    """The transformers model of a folder, its parameters on the meta device, its buffers real."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model.path)
    for name in [n for n in vars(config) if n.endswith("dropout")]:
        setattr(config, name, 0.0)  # a log-probability is a function of tokens and weights, in training too
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPES[model.dtype]))
    # Rotary frequencies are computed, not loaded; on the meta device they were lost.
    module.model.rotary_emb = type(module.model.rotary_emb)(config=config)
    return module


def named_weights(module: Any) -> dict[str, Any]:
    """Parameters by name, a tied one once."""
    return dict(module.named_parameters(remove_duplicate=True))


def read(model: Model, boxes: dict[str, tuple[Tensor, Box]]) -> dict[str, torch.Tensor]:
    """The boxes of the weights in a folder of safetensors; only their bytes are read."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(model.path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a mapping)
                if name in boxes:
                    found[name] = weights.get_slice(name)[slices(boxes[name][1])]
    missing = sorted(set(boxes) - set(found))
    if missing:
        raise FileNotFoundError(f"{model.path} holds no weights for {missing[0]} ({len(missing)} missing)")
    return found
