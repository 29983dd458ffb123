"""Functions that the engines based on transformers share.

The functions build a model without weights, and fill a rank's shards with weights from a model's folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from ..model.architecture import HEAD, Model
from ..model.layers import AttentionMixer, NoMixer, RecurrentMixer
from ..model.models import read_engine_fields, read_folder_weights
from ..sharding.layout import full_box
from ..sharding.tensors import Box, Tensor
from . import adapters, hf_names, weight_reader
from .engine_protocols import Shard
from .policy_head import LogitRule
from .recurrent import parameters

if TYPE_CHECKING:
    import torch

DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def build_empty_model(model: Model) -> Any:
    """Build the transformers model that a model's config.json describes.

    Parameters are on the meta device (without memory); buffers have values. A scoring model (a value or reward model)
    has `score`, a linear layer without bias, instead of `lm_head`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model.family, **read_engine_fields(model))
    dtype = getattr(torch, DTYPES[model.dtype])
    for name in [field for field in vars(config) if field.endswith("dropout")]:
        setattr(config, name, 0.0)  # the log-probability depends on tokens and weights only, in training too
    # Of transformers 5.19, Gemma 2 would use a fused kernel, which ignores the cap of scores.
    attention = {"attn_implementation": "eager"} if "attention_cap" in model.features else {}
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, **attention)
        if model.scores:
            del module.lm_head
            module.score = torch.nn.Linear(model.hidden, 1, bias=False, dtype=dtype)
    hf_names.unify_names(module)
    _split_fused(module, model)
    for _, mixer in list_recurrent(module, model):
        parameters.prepare(mixer)
    # Buffers that are computed, not loaded, were lost on the meta device.
    if (rotary := getattr(module.model, "rotary_emb", None)) is not None:
        module.model.rotary_emb = type(rotary)(config=config)
    for part in module.modules():
        if lost := [name for name, value in part.named_buffers(recurse=False) if value.is_meta]:
            for name in lost:
                value = getattr(part, name)
                part.register_buffer(name, torch.empty(value.shape, dtype=value.dtype), persistent=False)
            module._init_weights(part)
    for name, value in load_buffers(model).items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner).register_buffer(leaf, value)
    _check_groups(module, model)
    return module


def _check_groups(module: Any, model: Model) -> None:
    """Check that norms of recurrent mixers normalize each group of heads by itself.

    Raises RuntimeError if not: transformers 5.19 normalizes all groups of Granite 4 together. Published models have one
    group.
    """
    for mixer, part in list_recurrent(module, model):
        if getattr(mixer, "groups", 1) > 1 and not hasattr(part.norm, "group_size"):
            name = type(part.norm).__name__
            raise RuntimeError(f"{name} of this version of transformers ignores groups: install transformers >= 5.23")


def list_mixers(module: Any, model: Model) -> Iterator[tuple[AttentionMixer | RecurrentMixer, Any]]:
    """Yield the mixer of each layer of a transformers model, with its module.

    Layers without a mixer are left out.
    """
    for kind, layer in zip(model.kind_of_layer, module.model.layers, strict=True):
        mixer = model.layer_kinds[kind].mixer
        if not isinstance(mixer, NoMixer):
            yield mixer, getattr(layer, mixer.module)


def list_recurrent(module: Any, model: Model) -> Iterator[tuple[RecurrentMixer, Any]]:
    """Yield the recurrent mixers of a transformers model, with their modules."""
    for mixer, part in list_mixers(module, model):
        if isinstance(mixer, RecurrentMixer):
            yield mixer, part


def list_shared_mlps(module: Any) -> Iterator[Any]:
    """Yield the part of each layer's MLP that all tokens pass.

    Of experts, these are the shared ones.
    """
    for layer in module.model.layers:
        if (mlp := get_shared_mlp(layer)) is not None:
            yield mlp


def get_shared_mlp(layer: Any) -> Any:
    """Return the part of a layer's MLP that all tokens pass; None if there is no MLP."""
    mlp = getattr(layer, "mlp", None)
    return getattr(mlp, "shared_experts", getattr(mlp, "shared_expert", mlp))


def _split_fused(module: Any, model: Model) -> None:
    """Replace modules whose weight is one tensor in the files by several.

    Each part of the tensor becomes a module, which tensor parallelism can shard.
    """
    import torch

    dtype = getattr(torch, DTYPES[model.dtype])
    shapes = {tensor.name: tensor.shape for tensor in model.tensors if tensor.fused}
    for tensor in model.tensors:
        path, _, kind = tensor.name.rpartition(".")
        if not tensor.fused or tensor.experts or tensor.role == "adapter" or kind != "weight":
            continue
        owner_path, _, name = path.rpartition(".")
        owner = module.get_submodule(owner_path)
        is_linear = len(tensor.shape) == 2
        part: Any = torch.nn.Module()
        if is_linear:
            outputs, inputs = tensor.shape
            part = torch.nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype)
        else:
            part.weight = torch.nn.Parameter(torch.empty(tensor.shape, device="meta", dtype=dtype))
            if (bias := shapes.get(f"{path}.bias")) is not None:
                part.bias = torch.nn.Parameter(torch.empty(bias, device="meta", dtype=dtype))
        setattr(owner, name, part)
        if isinstance(getattr(owner, tensor.fused), torch.nn.Linear | torch.nn.Conv1d):
            delattr(owner, tensor.fused)
            names = model.fused[tensor.fused]
            joined: Any = torch.nn.Module()
            joined.forward = partial(_join_outputs, owner, names)
            joined = joined if is_linear else parameters.JoinedConvolution(owner, names)
            setattr(owner, tensor.fused, joined)


def _join_outputs(owner: Any, names: Sequence[str], states: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([getattr(owner, name)(states) for name in names], dim=-1)


def count_local_heads(module: Any, model: Model, tp: int) -> None:
    """Make mixers count the heads of one of `tp` ranks.

    By these counts attention splits the joined outputs of projections that are one tensor in the files, and recurrent
    mixers split all outputs of projections.
    """
    for mixer, part in list_recurrent(module, model):
        for name in mixer.counts:
            setattr(part, name, mixer.divide_count(name, getattr(part, name), tp))
    for layer in module.model.layers if "qkv_proj" in model.fused else ():
        attention = layer.self_attn
        attention.config = copy(attention.config)
        attention.config.num_attention_heads //= tp
        attention.num_key_value_heads //= tp


def find_logit_rule(config: Any) -> LogitRule:
    """Return how a causal model of transformers computes logits after its head."""
    return LogitRule(getattr(config, "logits_scaling", 1.0), getattr(config, "final_logit_softcapping", None))


def load_buffers(model: Model) -> dict[str, Any]:
    """Load a model's buffers (Model.buffers), by name."""
    import torch

    shards = [Shard(tensor.name, full_box(tensor.shape), torch.empty(tensor.shape)) for tensor in model.buffers]
    fill(model, shards)
    return {shard.name: shard.tensor for shard in shards}


def make_scoring_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a scoring model, made from a policy's config.json.

    A scoring model is a value or reward model. Transformers' classes for sequence classification accept the returned
    config.
    """
    names = [re.sub(r"For\w+$", "ForSequenceClassification", name) for name in config.get("architectures") or ()]
    return {
        **config,
        "architectures": names,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "tie_word_embeddings": False,
    }


def named_weights(module: Any, model: Model) -> dict[str, Any]:
    """Return a transformers module's parameters in a dictionary, by name.

    The keys are the names that msrl_graph uses for weights. A tied parameter is returned once.
    """
    names = {parameter_path(tensor.name): tensor.name for tensor in model.weights}
    parameters = module.named_parameters(remove_duplicate=True)
    return {names.get(path, path): parameter for path, parameter in parameters}


def parameter_path(name: str) -> str:
    """Return the path of a weight's parameter in a transformers module.

    `name` is the weight's name in msrl_graph. A layer with experts has one parameter per projection, which holds the
    projection's weights of all experts (experts.py). So all experts' weights of a projection have the same path.
    """
    layer, experts, projection = name.partition(".experts.*.")
    return f"{layer}.experts.{projection.removesuffix('.weight').replace('.', '_')}" if experts else name


def fill(model: Model, shards: Sequence[Shard]) -> None:
    """Copy a model's weights from its folder into shards, one tensor at a time.

    Only the bytes of the shards' boxes (index ranges) are read. Values are converted to the type of the shards, from
    any of the formats in which weights are published (quantization.py). If the folder contains no score head, the shard
    of the score head is set to zero: a critic that starts from the weights of a policy has no score head yet. An
    adapter gets its first values.
    """
    import torch

    by_name = {model_tensor.name: model_tensor for model_tensor in model.tensors}
    read = adapters.fill(model, shards)
    parts = (
        (name, shard.tensor[index] if index else shard.tensor, box)
        for shard in read
        for name, index, box in by_name.get(shard.name, Tensor(shard.name, ())).in_files(shard.box)
    )
    wanted: dict[str, list[tuple[torch.Tensor, Box]]] = {}
    for name, tensor, box in parts:
        wanted.setdefault(name, []).append((tensor, box))
    weights = read_folder_weights(model)
    missing = wanted.keys() - weights.keys()
    with torch.no_grad():
        weight_reader.copy_boxes(weights, {name: part for name, part in wanted.items() if name in weights})
        if HEAD in missing:
            for tensor, _ in wanted[HEAD]:
                tensor.zero_()
            missing -= {HEAD}
    if missing:
        raise FileNotFoundError(f"{model.path} has no weights for {min(missing)} ({len(missing)} missing)")
