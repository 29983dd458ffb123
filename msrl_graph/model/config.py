"""What a model's config.json may say: each field that an engine reads, judged before anything starts.

Invariant: what passes here builds the model that was planned for: engines get the fields as `fields` gives them, never
the file itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Config = Mapping[str, Any]
MOST = 2**31 - 1
LAYERS = 4096


class FieldKind(NamedTuple):
    """What a field may be, in words; `make` gives it its type."""

    words: str
    holds: Callable[[Any], bool]
    make: Callable[[Any], Any] = lambda value: value


class ConfigError(NamedTuple):
    """A field that no engine can take, and what is wrong with it.

    `feature`: the feature of the model that no engine has yet; "" where the config itself is wrong.
    """

    field: str
    message: str
    feature: str = ""


def _whole(value: object, least: int = 1, most: int = MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _number(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)
    )


SIZE = FieldKind("a whole number of 1 or more", _whole)
COUNT = FieldKind("a whole number of 0 or more", lambda v: _whole(v, 0))
DEPTH = FieldKind(f"a whole number from 1 to {LAYERS}", lambda v: _whole(v, 1, LAYERS))
ABOVE = FieldKind("a number above 0", lambda v: _number(v) and v > 0, float)
SHARE = FieldKind("a number from 0 to 1", lambda v: _number(v) and 0 <= v <= 1, float)
BOOL = FieldKind("true or false", lambda v: isinstance(v, bool))
TOKEN = FieldKind("a token's number", lambda v: _whole(v, -1))
TOKENS = FieldKind(
    "a token's number, or a list of them",
    lambda v: _whole(v, -1) or (isinstance(v, list) and bool(v) and all(_whole(x, 0) for x in v)),
)
TABLE = FieldKind("an object", lambda v: isinstance(v, dict))
NAMES = FieldKind("a list of strings", lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v))
# Functions of transformers (ACT2FN) without options of their own.
ACTIVATIONS = (
    "silu",
    "swish",
    "gelu",
    "gelu_fast",
    "gelu_new",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "relu",
    "relu2",
    "sigmoid",
    "tanh",
)
ACTIVATION = FieldKind(f"one of {', '.join(ACTIVATIONS)}", lambda v: isinstance(v, str) and v in ACTIVATIONS)

# Null is as good as absent.
FIELDS = {
    "hidden_size": SIZE,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE,
    "head_dim": SIZE,
    "intermediate_size": SIZE,
    "vocab_size": SIZE,
    "max_position_embeddings": SIZE,
    "hidden_act": ACTIVATION,
    "rms_norm_eps": ABOVE,
    "rope_theta": ABOVE,
    "rope_scaling": TABLE,
    "rope_parameters": TABLE,
    "initializer_range": SHARE,
    "attention_dropout": SHARE,
    "use_cache": BOOL,
    "tie_word_embeddings": BOOL,
    "attention_bias": BOOL,
    "mlp_bias": BOOL,
    "use_sliding_window": BOOL,
    "sliding_window": COUNT,
    "max_window_layers": COUNT,
    "layer_types": NAMES,
    "pretraining_tp": SIZE,
    "bos_token_id": TOKEN,
    "eos_token_id": TOKENS,
    "pad_token_id": TOKEN,
    # Of experts: transformers writes `num_local_experts` for what published models call `num_experts`.
    "num_experts": SIZE,
    "num_local_experts": SIZE,
    "num_experts_per_tok": SIZE,
    "moe_intermediate_size": SIZE,
    "norm_topk_prob": BOOL,
    # Of latent attention, and of routers that choose groups of experts first.
    "q_lora_rank": SIZE,
    "kv_lora_rank": SIZE,
    "qk_nope_head_dim": SIZE,
    "qk_rope_head_dim": SIZE,
    "v_head_dim": SIZE,
    "rope_interleave": BOOL,
    "n_routed_experts": SIZE,
    "n_shared_experts": SIZE,
    "first_k_dense_replace": COUNT,
    "n_group": SIZE,
    "topk_group": SIZE,
    "routed_scaling_factor": ABOVE,
}
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
# What transformers makes of a field that is left out is its class's own, not this model's: it has to be said.
STATED = {
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
    "qwen3_moe": ("num_key_value_heads", "head_dim"),
    "deepseek_v3": (
        "num_key_value_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "moe_intermediate_size",
        "num_experts_per_tok",
        "n_routed_experts",
        "n_shared_experts",
        "first_k_dense_replace",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
    ),
}
NULLS = ("num_key_value_heads", "q_lora_rank")  # where null says something: as many as heads, no latent of queries
# What no engine reads of a router, since the family has one way.
ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
# Kinds of rotary positions, and the numbers that each needs (transformers' modeling_rope_utils).
ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
UNSUPPORTED_ROPES = ("longrope", "proportional")  # the other kinds of transformers' ROPE_INIT_FUNCTIONS
ROPE_MORE = (
    "rope_theta",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
THETA = 10_000.0
# What a config means that leaves its positions out, by the family's class.
POSITIONS = {"llama": 2048, "deepseek_v3": 4096}


def judged(config: Config, family: str) -> ConfigError | None:
    """The first thing that is wrong with the config.json of a model of a family; None where there is nothing."""
    for name, kind in FIELDS.items():
        if (value := config.get(name)) is not None and not kind.holds(value):
            return ConfigError(name, f"has {_shown(value)} for `{name}`, which is {kind.words}")
    for name in NEEDED:
        if config.get(name) is None:
            return ConfigError(name, f"has no `{name}`")
    for name in STATED.get(family, ()):
        if name not in config or (config[name] is None and name not in NULLS):
            return ConfigError(name, f"has no `{name}`")
    return _heads(config, family) or _routed(config, family) or _rope(config) or _ids(config) or _windows(config)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _heads(config: Config, family: str) -> ConfigError | None:
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    kv = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim")
    if family == "deepseek_v3":  # its heads have sizes of their own
        if kv != heads:
            return ConfigError(
                "num_key_value_heads", f"has {kv:,} key-value heads: latent attention has one a head, {heads:,}"
            )
        if (dim := config["qk_rope_head_dim"]) % 2:
            return ConfigError("qk_rope_head_dim", f"turns {dim:,} elements of a head: rotary positions take pairs")
        return None
    if (dim is None or family == "llama") and hidden % heads:
        return ConfigError(
            "num_attention_heads", f"has {heads:,} heads, which do not divide its hidden size of {hidden:,}"
        )
    if (dim or hidden // heads) % 2:
        return ConfigError("head_dim", f"has heads of {dim or hidden // heads:,} elements: rotary positions take pairs")
    if heads % kv:
        return ConfigError(
            "num_key_value_heads", f"has {kv:,} key-value heads, which do not divide its {heads:,} heads"
        )
    return None


def _routed(config: Config, family: str) -> ConfigError | None:
    """Experts of which a router first chooses groups, by the two best of each (arXiv:2412.19437)."""
    if family != "deepseek_v3":
        return None
    for name, only in ROUTER.items():
        if (value := config.get(name)) not in (None, only):
            known = isinstance(value, str | int)
            message = f"has {_shown(value)} for `{name}`: only `{only}` is supported yet"
            return ConfigError(name, message, f"routers with `{name} = {value}`" if known else "")
    number = config["n_routed_experts"]
    layers = config["num_hidden_layers"]
    groups = config["n_group"]
    some = config["topk_group"]
    first = config["first_k_dense_replace"]
    if first >= layers:
        return ConfigError("first_k_dense_replace", f"has {first:,} layers without experts, and {layers:,} layers")
    if number % groups or number // groups < 2:
        return ConfigError(
            "n_group", f"has {number:,} experts in {groups:,} groups: a group has 2 or more, all as many"
        )
    if some > groups:
        return ConfigError("topk_group", f"chooses {some:,} of {groups:,} groups of experts")
    if (active := config["num_experts_per_tok"]) > number // groups * some:
        return ConfigError(
            "num_experts_per_tok", f"has {active:,} experts a token, and {number // groups * some:,} to choose from"
        )
    return None


def _rope(config: Config) -> ConfigError | None:
    stated = next((n for n in ("rope_parameters", "rope_scaling") if config.get(n) is not None), "")
    table = config.get(stated) or {}
    if (scaling := config.get("rope_scaling")) and _stretch(table) != _stretch(scaling):
        # Engines would not agree: transformers goes by the one, and forgets the `rope_theta` in the other.
        return ConfigError(
            "rope_scaling",
            "has a `rope_scaling` that its `rope_parameters` differ from: write all of it into `rope_parameters`",
        )
    kind = table.get("rope_type", table.get("type", "default"))
    if kind in UNSUPPORTED_ROPES:
        message = f"has the `rope_type` {_shown(kind)}: only {', '.join(ROPES)} are supported yet"
        return ConfigError(stated, message, f"rotary positions of the type `{kind}`")
    if not isinstance(kind, str) or kind not in ROPES:
        return ConfigError(
            stated, f"has {_shown(kind)} for the `rope_type` of `{stated}`, which is one of {', '.join(ROPES)}"
        )
    for name in (*ROPES[kind], *(n for n in ROPE_MORE if table.get(n) is not None)):
        if name not in table or not ABOVE.holds(table[name]):
            what = f"has {_shown(table[name])} for" if name in table else "lacks"
            return ConfigError(stated, f"{what} the `{name}` of `{stated}`, a number above 0")
    if kind == "llama3" and not table["low_freq_factor"] < table["high_freq_factor"]:
        return ConfigError(stated, f"has a `low_freq_factor` in `{stated}` that is not below its `high_freq_factor`")
    if kind != "default" and table["factor"] < 1:
        return ConfigError(
            stated, f"has {_shown(table['factor'])} for the `factor` of `{stated}`, a number of 1 or more"
        )
    if other := sorted(table.keys() - {*ROPES[kind], *ROPE_MORE, "rope_type", "type", "factor", "truncate"}, key=str):
        message = f"has `{other[0]}` in `{stated}`, which is not supported yet"
        return ConfigError(stated, message, f"rotary positions with `{other[0]}`")
    return None


def _stretch(table: Config) -> Config:
    """How positions are stretched, whichever of its names the kind has."""
    kind = table.get("rope_type", table.get("type", "default"))
    return {
        "rope_type": kind,
        **{k: v for k, v in table.items() if k not in ("type", "rope_type", "rope_theta") and v is not None},
    }


def _ids(config: Config) -> ConfigError | None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        if any(v >= config["vocab_size"] for v in (value if isinstance(value, list) else [value]) if v is not None):
            return ConfigError(
                name, f"has {_shown(value)} for `{name}`, beyond its vocabulary of {config['vocab_size']:,}"
            )
    return None


def _windows(config: Config) -> ConfigError | None:
    layers = config["num_hidden_layers"]
    types = config.get("layer_types")
    if types is not None and len(types) != layers:
        return ConfigError("layer_types", f"has {len(types):,} `layer_types` for {layers:,} layers")
    if other := [t for t in types or () if t != "full_attention"]:
        message = f"has layers of {_shown(other[0])}: only `full_attention` is supported yet"
        return ConfigError("layer_types", message, f"layers of `{other[0]}`")
    window = config.get("use_sliding_window") and config.get("sliding_window") is not None and types is None
    if window and config.get("max_window_layers", 28) < layers:
        message = "has `use_sliding_window`: only full attention is supported yet"
        return ConfigError("use_sliding_window", message, "sliding windows of attention")
    return None


def fields(config: Config) -> dict[str, Any]:
    """The fields that an engine makes a model of, as a config that was judged has them; what is left out, as it was
    planned for."""
    found = {name: kind.make(config[name]) for name, kind in FIELDS.items() if config.get(name) is not None}
    table = found.pop("rope_parameters", None) or found.pop("rope_scaling", None) or {}
    theta = found.pop("rope_theta", THETA)
    found.pop("rope_scaling", None)
    found["rope_parameters"] = {
        "rope_theta": theta,
        **{k: v for k, v in table.items() if v is not None and k != "type"},
    }
    found["rope_parameters"]["rope_type"] = table.get("rope_type", table.get("type", "default"))
    nulls = {name: None for name in NULLS if name in config}
    return {**nulls, "num_key_value_heads": config["num_attention_heads"], **found}


def positions(config: Config, family: str) -> int:
    """How many tokens of a sequence the model has positions for, stretched ones too."""
    stated: int = config.get("max_position_embeddings") or POSITIONS.get(family, 32768)
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if table.get("rope_type", table.get("type")) in ("linear", "dynamic", "yarn"):
        return max(stated, int(table["factor"] * (table.get("original_max_position_embeddings") or stated)))
    return stated
