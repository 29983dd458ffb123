"""What the engines on transformers share: a model without weights, and a rank's shards of it filled from a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files.weights import weight_files
from ..model.architecture import HEAD, Model
from ..model.config import fields
from ..sharding.layout import Tensor, elements, full, slices
from .spec import Shard

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def empty(model: Model) -> Any:
    """The transformers model of a folder, its parameters on the meta device, its buffers real; one that scores has
    `score`, a product without bias, in place of `lm_head`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    stated = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
    config = AutoConfig.for_model(model.family, **fields(stated))
    dtype = getattr(torch, DTYPES[model.dtype])
    for name in [n for n in vars(config) if n.endswith("dropout")]:
        setattr(config, name, 0.0)  # a log-probability is a function of tokens and weights, in training too
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if model.scores:
            del module.lm_head
            module.score = torch.nn.Linear(model.hidden, 1, bias=False, dtype=dtype)
    # Rotary frequencies are computed, not loaded; on the meta device they were lost.
    module.model.rotary_emb = type(module.model.rotary_emb)(config=config)
    for name, value in fixed(model).items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_buffer(leaf, value)
    return module


def fixed(model: Model) -> dict[str, Any]:
    """What no run changes of a model (Model.fixed), from its folder, by name."""
    import torch

    shards = [Shard(t.name, full(t.shape), torch.empty(t.shape)) for t in model.fixed]
    fill(model, shards)
    return {s.name: s.tensor for s in shards}


def scoring(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model that scores, as transformers' classes for the classification of sequences read it."""
    names = [re.sub(r"For\w+$", "ForSequenceClassification", name) for name in config.get("architectures") or ()]
    return {
        **config,
        "architectures": names,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "tie_word_embeddings": False,
    }


def named_weights(module: Any) -> dict[str, Any]:
    """Parameters by our names, a tied one once."""
    found = dict(module.named_parameters(remove_duplicate=True))
    return {re.sub(r"\.experts\.(\w+)$", r".experts.*.\1.weight", name): p for name, p in found.items()}


def parameter(name: str) -> str:
    """Where in a module the weight of a name is: experts of a projection are one parameter (experts.py)."""
    return re.sub(r"\.experts\.\*\.(\w+)\.weight$", r".experts.\1", name)


def fill(model: Model, shards: Sequence[Shard]) -> None:
    """Copies the weights in a folder of safetensors into shards, one at a time; only the bytes of their boxes are read.
    A head of scores that the folder lacks begins at zero, as that of a critic does that is begun from a policy."""
    import torch
    from safetensors import safe_open

    by_name = {t.name: t for t in model.tensors}
    parts = (
        (name, s.tensor[i] if i else s.tensor, box)
        for s in shards
        for name, i, box in by_name.get(s.name, Tensor(s.name, ())).in_files(s.box)
    )
    missing = {name: (tensor, box) for name, tensor, box in parts}
    with torch.no_grad():
        for file, named in weight_files(model.path).read.items():
            with safe_open(file, framework="pt") as weights:
                for name in missing.keys() & {*weights.keys()} & ({*missing} if named is None else named):
                    tensor, box = missing.pop(name)
                    if elements(box):
                        tensor.copy_(weights.get_slice(name)[slices(box)])
        if HEAD in missing:
            missing.pop(HEAD)[0].zero_()
    if missing:
        raise FileNotFoundError(f"{model.path} holds no weights for {min(missing)} ({len(missing)} missing)")
