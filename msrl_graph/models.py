"""Models: a preset or a folder with a Hugging Face config.json, as tensors by name and shape.

Invariant: what is here was counted from an architecture, never read from weights; the names are those of the safetensors files, the
order is the model's own (embedding, layers, norm, head). Llama and Qwen2 differ in this only by the bias of q, k and v.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .diagnostics import NOWHERE, Diagnostic, Fault, Span, nearest
from .layout import Tensor
from .plan import Model

DTYPES = {"float32": "f32", "bfloat16": "bf16", "f32": "f32", "bf16": "bf16"}
FAMILIES = {"Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}


def _preset(
    family: str, hidden: int, layers: int, heads: int, kv: int, intermediate: int, vocabulary: int, **more: object
) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM" if family == "qwen2" else "LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
        **more,
    }


# The models' own config.json files, as published beside their weights.
PRESETS: dict[str, dict[str, object]] = {
    "qwen2.5-7b": _preset("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "qwen2.5-32b": _preset("qwen2", 5120, 64, 40, 8, 27648, 152064),
    "llama3-8b": _preset("llama", 4096, 32, 32, 8, 14336, 128256),
    "llama3-70b": _preset("llama", 8192, 80, 64, 8, 28672, 128256),
    "tiny": _preset("qwen2", 128, 4, 4, 2, 448, 512, torch_dtype="float32"),
}


def load(target: str, folder: Path, dtype: str | None = None, span: Span = NOWHERE) -> Model:
    """The model that `target` names: a preset, or with a slash in it a folder, relative to `folder`.

    `dtype` (f32 or bf16) overrides the config's. Raises Fault: unknown-model, not-yet (an architecture that is not there yet), bad-value.
    """
    if "/" not in target and target not in (".", ".."):
        if target not in PRESETS:
            help = nearest(target, PRESETS) or "a folder is written with a slash: `./my-model`"
            if _is_folder(folder / target):
                help = f'for the folder beside the program write `"./{target}"`'
            raise Fault(Diagnostic("unknown-model", f"no model preset is called `{target}`", span, help))
        return _model(target, "", PRESETS[target], dtype, span)
    path = (folder / target).resolve()
    config = path / "config.json"
    if not config.is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise Fault(
            Diagnostic("unknown-model", f"the model folder `{target}` {what}", span, "a Hugging Face model folder holds a config.json")
        )
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Fault(Diagnostic("unknown-model", f"`{target}/config.json` cannot be read: {error}", span)) from None
    if not isinstance(content, dict):
        raise Fault(Diagnostic("unknown-model", f"`{target}/config.json` is not a JSON object", span))
    return _model(target, str(path), content, dtype, span)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _model(name: str, path: str, config: Mapping[str, object], dtype: str | None, span: Span) -> Model:
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else str(config.get("model_type", "unknown"))
    if architecture not in FAMILIES:
        known = ", ".join(f"`{f}`" for f in FAMILIES)
        raise Fault(Diagnostic("not-yet", f"models of architecture `{architecture}` are not supported yet", span, f"supported: {known}"))

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise Fault(Diagnostic("unknown-model", f"the config.json of `{name}` has no usable `{key}`", span))
        return value

    family = FAMILIES[architecture]
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    stated = str(dtype or config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if stated not in DTYPES:
        raise Fault(Diagnostic("bad-value", f"weights of type `{stated}` are not supported", span, "known here: `f32`, `bf16`"))
    shape = {
        "hidden": hidden,
        "layers": size("num_hidden_layers"),
        "heads": heads,
        "kv_heads": size("num_key_value_heads", heads),
        "head_dim": size("head_dim", hidden // heads),
        "intermediate": size("intermediate_size"),
        "vocabulary": size("vocab_size"),
    }
    tied = bool(config.get("tie_word_embeddings", False))
    bias = family == "qwen2" or bool(config.get("attention_bias", False))
    all_biased = family == "llama" and bias
    tensors = _tensors(**shape, tied=tied, qkv_bias=bias, o_bias=all_biased, mlp_bias=bool(config.get("mlp_bias", False)))
    return Model(name=name, path=path, family=family, **shape, tied=tied, qkv_bias=bias, dtype=DTYPES[stated], tensors=tensors, span=span)


def _tensors(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocabulary: int,
    tied: bool,
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool,
) -> tuple[Tensor, ...]:
    """The tensors in the model's order; a projection's input stands in dim 1, so q, k, v, gate and up divide dim 0, o and down dim 1."""
    q, kv = heads * head_dim, kv_heads * head_dim
    linear = [
        ("self_attn.q_proj", q, hidden, 0, qkv_bias),
        ("self_attn.k_proj", kv, hidden, 0, qkv_bias),
        ("self_attn.v_proj", kv, hidden, 0, qkv_bias),
        ("self_attn.o_proj", hidden, q, 1, o_bias),
        ("mlp.gate_proj", intermediate, hidden, 0, mlp_bias),
        ("mlp.up_proj", intermediate, hidden, 0, mlp_bias),
        ("mlp.down_proj", hidden, intermediate, 1, mlp_bias),
    ]
    found = [Tensor("model.embed_tokens.weight", (vocabulary, hidden), 0)]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, out, into, tp_dim, bias in linear:
            found.append(Tensor(f"{at}{name}.weight", (out, into), tp_dim))
            if bias:
                # The bias of a projection whose input is divided is added once, after the sum: every rank holds it.
                found.append(Tensor(f"{at}{name}.bias", (out,), 0 if tp_dim == 0 else -1))
        found += [Tensor(f"{at}input_layernorm.weight", (hidden,)), Tensor(f"{at}post_attention_layernorm.weight", (hidden,))]
    found.append(Tensor("model.norm.weight", (hidden,)))
    if not tied:
        found.append(Tensor("lm_head.weight", (vocabulary, hidden), 0))
    return tuple(found)
