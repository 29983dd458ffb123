"""Models: their tensors by name and shape, from a preset or a Hugging Face folder.

The presets are in presets.py.

Invariant: tensors are derived from an architecture, never read from weights. Their names are those in the safetensors
files. Their order is the order in the model: embedding, layers, norm, head. Model families differ in three ways: the
biases and norms of the attention, latent attention (arXiv:2405.04434), and experts. The experts of a layer form one
tensor per projection. Heads for multi-token prediction are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..diagnostics import NOWHERE, Diagnostic, Fault, Span
from ..files import fix_commands, urls
from ..files.paths import hub_name, is_file, is_folder
from ..sharding.layout import Tensor
from . import presets
from .architecture import ExpertSizes, Latent, Model, Shape
from .config import SIZE, find_config_error

DTYPES = {"float32": "f32", "bfloat16": "bf16", "f32": "f32", "bf16": "bf16"}
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}


SHAPE = ("config.json", "tokenizer.json")  # files read from a folder at a URL before a run fetches all of it


def read_token_texts(path: str, special: bool = True) -> dict[int, str] | None:
    """Return the text of each token id, from the tokenizer.json of a model's folder.

    `special` says whether special tokens are included. Returns None if there is no readable tokenizer.json.
    """
    try:
        content = json.loads((Path(path) / "tokenizer.json").read_bytes())
        vocabulary = content["model"]["vocab"]
        pairs = (
            vocabulary.items()
            if isinstance(vocabulary, dict)
            else ((item[0], number) for number, item in enumerate(vocabulary))
        )
        added = content.get("added_tokens", ())
        texts = {number: text for text, number in pairs}
        texts |= {entry["id"]: entry["content"] for entry in added}
        for token in () if special else added:
            if token.get("special"):
                texts.pop(token["id"], None)
        return texts if all(isinstance(number, int) for number in texts) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def load(target: str, folder: Path, dtype: str | None = None, span: Span = NOWHERE) -> Model:
    """Load the model that `target` names.

    `target` has one of four forms:

    - A name without a slash: a preset.
    - A folder, relative to `folder`.
    - A model's name on the Hugging Face Hub, if a preset has this name and no such folder exists.
    - The URL of a folder.

    `dtype` (f32 or bf16) overrides the dtype of the model's config. Raises Fault with one of these codes:
    unknown-model, not-yet (an unsupported architecture or feature), bad-value.
    """
    if urls.is_url(target) and not hub_name(target):
        return _load_url(target, dtype, span)
    bare = "/" not in target and target not in (".", "..")
    config = folder / target / "config.json"
    hub = "" if bare or is_folder(config.parent) else hub_name(target)
    if (bare or hub) and (preset := presets.find_preset(target)):
        return _make_model(target, "", presets.PRESETS[preset], dtype, span)
    if bare or not is_file(config):
        raise Fault(_make_unknown_model(target, folder, hub, span))
    return _load_folder(target, config.parent, str(config.parent.resolve()), dtype, span)


def _load_url(url: str, dtype: str | None, span: Span) -> Model:
    """Load the model of a folder at a URL.

    The model's `path` is the URL, pinned to the version of the content that was read.
    """
    path = urls.pin_version(url, True, span)
    folder = urls.copy(path, True, SHAPE, span)
    if not is_file(folder / "config.json"):
        help = "a Hugging Face model folder holds a config.json"
        raise Fault(Diagnostic("unknown-model", f"the model folder `{url}` has no config.json", span, help))
    return _load_folder(url, folder, path, dtype, span)


def _load_folder(target: str, folder: Path, path: str, dtype: str | None, span: Span) -> Model:
    stated = read_config(folder, target, span)
    if stated.get("quantization_config") is not None:
        message = f"the weights of `{target}` are quantized, by the `quantization_config` of its config.json"
        raise Fault(Diagnostic("not-yet", message, span, "name a folder with weights in float32 or bfloat16"))
    return _make_model(target, path, stated, dtype, span)


def _make_unknown_model(target: str, folder: Path, hub: str, span: Span) -> Diagnostic:
    """Return the diagnostic for an unknown model name, with a help text."""
    shape = "a plan needs only the model's `config.json`, in a folder"
    if hub:
        message = (
            f"`{target}` is not a folder here: it looks like a model's name on the Hugging Face Hub, which is not read"
        )
        help = f"{presets.download(hub)}; {shape}"
        if near := presets.find_similar_preset(hub):
            help = f"to plan with its shape, write the preset `{near}`; {help}"
    elif "/" in target or target in (".", ".."):
        exists = is_folder(folder / target)
        message = f"the model folder `{target}` {'has no config.json' if exists else 'does not exist'}"
        help = "a Hugging Face model folder holds a config.json"
    elif is_folder(folder / target):
        message = f"no model preset is called `{target}`"
        help = f'for the folder next to the program, write `"./{target}"`'
    else:
        message = f"no model preset is called `{target}`"
        help = presets.suggest_presets(target)
        if not help.startswith("did"):
            help += f"; {shape}, a run also its weights: write a folder with a slash, `./my-model`"
    return Diagnostic("unknown-model", message, span, help)


def read_config(folder: Path, name: str, span: Span = NOWHERE) -> dict[str, Any]:
    """Read the config.json of a model's folder.

    `name` is the name of the folder in messages. Raises Fault (unknown-model) if the file cannot be read or is not a
    JSON object.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        help = fix_commands.lfs(folder / "config.json")
        raise Fault(Diagnostic("unknown-model", f"`{name}/config.json` cannot be read: {error}", span, help)) from None
    if not isinstance(config, dict):
        raise Fault(Diagnostic("unknown-model", f"`{name}/config.json` is not a JSON object", span))
    return config


def _make_model(name: str, path: str, config: Mapping[str, object], dtype: str | None, span: Span) -> Model:
    architectures = config.get("architectures")
    kind = config.get("model_type")
    classes = {family: architecture for architecture, family in FAMILIES.items()}
    named = classes.get(kind, kind) if isinstance(kind, str) else "unknown"
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else str(named)
    # A model with a classification head has the body of the causal model (see Model.scoring).
    architecture = re.sub("For(Sequence|Token)Classification$", "ForCausalLM", architecture)
    if architecture not in FAMILIES:
        known = ", ".join(f"`{known_name}`" for known_name in FAMILIES)
        raise Fault(
            Diagnostic(
                "not-yet", f"models of architecture `{architecture}` are not supported yet", span, f"supported: {known}"
            )
        )

    def make_config_fault(problem: str) -> Fault:
        return Fault(
            Diagnostic(
                "unknown-model",
                f"the config.json of `{name}` {problem}",
                span,
                "a config.json belongs to its weights: copy both again",
            )
        )

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        if value is None and default is not None:
            return default
        if not SIZE.holds(value):
            raise make_config_fault(f"has no usable `{key}`")
        assert isinstance(value, int)
        return value

    family = FAMILIES[architecture]
    if kind is not None and kind != family:
        raise make_config_fault(
            f"has the architecture `{architecture}`, but {kind!r} for its `model_type`, which must be {family!r}"
        )
    if wrong := find_config_error(config, family):
        if wrong.feature:
            help = f"no engine supports {wrong.feature} yet: use a model without it"
            raise Fault(Diagnostic("not-yet", f"the config.json of `{name}` {wrong.message}", span, help))
        raise make_config_fault(wrong.message)
    hidden = size("hidden_size")
    heads = size("num_attention_heads")
    stated = str(dtype or config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if stated not in DTYPES:
        raise Fault(
            Diagnostic("bad-value", f"weights of type `{stated}` are not supported", span, "known here: `f32`, `bf16`")
        )
    experts = latent = None
    if family == "qwen3_moe":
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            message = f"the config.json of `{name}` mixes layers with and without experts"
            raise Fault(
                Diagnostic("not-yet", message, span, "supported: `mlp_only_layers = []` and `decoder_sparse_step = 1`")
            )
        number = size("num_experts" if config.get("num_experts") is not None else "num_local_experts")
        experts = ExpertSizes(number, size("num_experts_per_tok"), size("moe_intermediate_size"))
    elif family == "deepseek_v3":
        width = size("moe_intermediate_size")
        shared = size("n_shared_experts") * width
        first = config["first_k_dense_replace"]
        assert isinstance(first, int)
        experts = ExpertSizes(
            size("n_routed_experts"), size("num_experts_per_tok"), width, shared, first, corrected=True
        )
        heads_of = [size(field) for field in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        latent = Latent(size("q_lora_rank", 0), *heads_of)
    bias = family == "qwen2" or bool(config.get("attention_bias", False))
    shape = Shape(
        hidden=hidden,
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=latent.nope + latent.rope if latent else size("head_dim", hidden // heads),
        intermediate=size("intermediate_size"),
        vocabulary=size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias,
        experts=experts,
        latent=latent,
    )
    o_bias = family != "qwen2" and bias
    tensors = tuple(
        _iterate_tensors(
            shape, o_bias, family == "llama" and bool(config.get("mlp_bias")), qk_norm=family.startswith("qwen3")
        )
    )
    return Model(name=name, path=path, family=family, dtype=DTYPES[stated], tensors=tensors, span=span, **vars(shape))


def _iterate_tensors(shape: Shape, o_bias: bool, mlp_bias: bool, qk_norm: bool) -> Iterator[Tensor]:
    """Yield the tensors of a model in the model's order.

    Dim 1 of a projection is its input. So tensor parallelism shards dim 0 of q, k, v, gate and up, and dim 1 of o and
    down.
    """
    layers = shape.layers
    hidden = shape.hidden
    experts = shape.experts
    yield Tensor(
        "model.embed_tokens.weight",
        (shape.vocabulary, hidden),
        0,
        padded=True,
        tied=shape.tied,
        layer=-1,
        layers=layers,
    )
    for layer in range(layers):
        make = partial(_layer_tensor, layer, layers)
        yield from (
            _iterate_latent(shape, shape.latent, make)
            if shape.latent
            else _iterate_attention(shape, make, o_bias, qk_norm)
        )
        if experts and layer >= experts.first:
            yield make("mlp.gate.weight", (experts.number, hidden))
            for name, size, tp_dim in _list_projections(hidden, experts.intermediate):
                yield make(f"mlp.experts.*.{name}_proj.weight", (experts.number, *size), tp_dim + 1, experts=True)
            for name, size, tp_dim in _list_projections(hidden, experts.shared) if experts.shared else ():
                yield make(f"mlp.shared_experts.{name}_proj.weight", size, tp_dim)
        else:
            for name, size, tp_dim in _list_projections(hidden, shape.intermediate):
                yield from _iterate_linear(make, f"mlp.{name}_proj", size, tp_dim, mlp_bias)
        yield make("input_layernorm.weight", (hidden,))
        yield make("post_attention_layernorm.weight", (hidden,))
    yield Tensor("model.norm.weight", (hidden,), layer=layers, layers=layers)
    if not shape.tied:
        yield Tensor("lm_head.weight", (shape.vocabulary, hidden), 0, padded=True, layer=layers, layers=layers)


def _layer_tensor(layer: int, layers: int, name: str, shape: tuple[int, ...], tp_dim: int = -1, **more: Any) -> Tensor:
    return Tensor(f"model.layers.{layer}.{name}", shape, tp_dim, layer=layer, layers=layers, **more)


def _iterate_linear(
    make: Callable[..., Tensor], name: str, size: tuple[int, int], tp_dim: int, bias: bool, **more: Any
) -> Iterator[Tensor]:
    yield make(f"{name}.weight", size, tp_dim, **more)
    if bias:
        # The bias of a row-parallel projection is added once, after the sum, so every rank has it.
        yield make(f"{name}.bias", size[:1], *((0,) if tp_dim == 0 else ()), **(more if tp_dim == 0 else {}))


def _list_projections(hidden: int, width: int) -> tuple[tuple[str, tuple[int, int], int], ...]:
    """Return the (name, shape, sharded dim) of each projection of a gated MLP."""
    return ("gate", (width, hidden), 0), ("up", (width, hidden), 0), ("down", (hidden, width), 1)


def _iterate_attention(shape: Shape, make: Callable[..., Tensor], o_bias: bool, qk_norm: bool) -> Iterator[Tensor]:
    """Yield the tensors of attention with grouped key-value heads.

    A head is never split between ranks. If there are more ranks than key-value heads, several ranks have a copy of the
    same head.
    """
    unit = shape.head_dim
    q = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    yield from _iterate_linear(make, "self_attn.q_proj", (q, shape.hidden), 0, shape.qkv_bias, unit=unit)
    for name in ("k", "v"):
        yield from _iterate_linear(
            make, f"self_attn.{name}_proj", (kv, shape.hidden), 0, shape.qkv_bias, unit=unit, shared=True
        )
    yield from _iterate_linear(make, "self_attn.o_proj", (shape.hidden, q), 1, o_bias, unit=unit)
    if qk_norm:
        yield make("self_attn.q_norm.weight", (unit,))
        yield make("self_attn.k_norm.weight", (unit,))


def _iterate_latent(shape: Shape, latent: Latent, make: Callable[..., Tensor]) -> Iterator[Tensor]:
    """Yield the tensors of multi-head latent attention.

    Projections down to the latents are copied on all ranks. Projections up from the latents are sharded by heads.
    """
    hidden = shape.hidden
    heads = shape.heads
    unit = latent.nope + latent.rope
    if latent.q_rank:
        yield from _iterate_linear(make, "self_attn.q_a_proj", (latent.q_rank, hidden), -1, shape.qkv_bias)
        yield make("self_attn.q_a_layernorm.weight", (latent.q_rank,))
        yield make("self_attn.q_b_proj.weight", (heads * unit, latent.q_rank), 0, unit=unit)
    else:
        yield make("self_attn.q_proj.weight", (heads * unit, hidden), 0, unit=unit)
    yield from _iterate_linear(
        make, "self_attn.kv_a_proj_with_mqa", (latent.kv_rank + latent.rope, hidden), -1, shape.qkv_bias
    )
    yield make("self_attn.kv_a_layernorm.weight", (latent.kv_rank,))
    both = latent.nope + latent.value
    yield make("self_attn.kv_b_proj.weight", (heads * both, latent.kv_rank), 0, unit=both)
    yield from _iterate_linear(
        make, "self_attn.o_proj", (hidden, heads * latent.value), 1, shape.qkv_bias, unit=latent.value
    )
