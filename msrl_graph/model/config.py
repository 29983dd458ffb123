"""Checks of the fields of a model's config.json that an engine reads.

Invariant: from a config that passes the checks, each engine builds the model for which the plan was made. Engines get
the config's fields from `fields`, and never read the file themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Config = Mapping[str, Any]
MOST = 2**31 - 1
LAYERS = 4096


class FieldKind(NamedTuple):
    """The allowed values of a field: a description, a check, and a conversion.

    `words` is the description for messages. The function `holds` returns whether a value is allowed. The function
    `make` converts a value to the field's type.
    """

    words: str
    holds: Callable[[Any], bool]
    make: Callable[[Any], Any] = lambda value: value


class ConfigError(NamedTuple):
    """An error in a config: a field, and a message that says why its value is wrong.

    `feature` is the feature of the model that no engine supports yet; it is "" if the config itself is wrong.
    """

    field: str
    message: str
    feature: str = ""


def _is_integer(value: object, least: int = 1, most: int = MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)
    )


SIZE = FieldKind("a whole number of 1 or more", _is_integer)
COUNT = FieldKind("a whole number of 0 or more", lambda v: _is_integer(v, 0))
DEPTH = FieldKind(f"a whole number from 1 to {LAYERS}", lambda v: _is_integer(v, 1, LAYERS))
ABOVE = FieldKind("a number above 0", lambda v: _is_number(v) and v > 0, float)
SHARE = FieldKind("a number from 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1, float)
BOOL = FieldKind("true or false", lambda v: isinstance(v, bool))
TOKEN = FieldKind("a token's number", lambda v: _is_integer(v, -1))
TOKENS = FieldKind(
    "a token's number, or a list of them",
    lambda v: _is_integer(v, -1) or (isinstance(v, list) and bool(v) and all(_is_integer(x, 0) for x in v)),
)
TABLE = FieldKind("an object", lambda v: isinstance(v, dict))
NAMES = FieldKind("a list of strings", lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v))
# Activations of transformers (ACT2FN) that have no options of their own.
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

# The checked fields. A field that is null counts as absent.
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
    # Experts: transformers writes `num_local_experts` for what published models call `num_experts`.
    "num_experts": SIZE,
    "num_local_experts": SIZE,
    "num_experts_per_tok": SIZE,
    "moe_intermediate_size": SIZE,
    "norm_topk_prob": BOOL,
    # Latent attention, and routers that choose groups of experts first.
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
# For these fields transformers' default is that of its class, not of this model, so they are required.
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
NULLS = ("num_key_value_heads", "q_lora_rank")  # null has a meaning: the number of heads, and no latent of queries
# Router fields that no engine reads, because the family has only one variant.
ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
# Kinds of rotary positions, and the numbers that each requires (transformers' modeling_rope_utils).
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
# The number of positions if a config has no max_position_embeddings, by family: the default of its class.
POSITIONS = {"llama": 2048, "deepseek_v3": 4096}


def find_config_error(config: Config, family: str) -> ConfigError | None:
    """Return the first error in a config.json, or None.

    `family` is the family of the config's model.
    """
    for name, kind in FIELDS.items():
        if (value := config.get(name)) is not None and not kind.holds(value):
            return ConfigError(name, f"has {_format_value(value)} for `{name}`, which must be {kind.words}")
    for name in NEEDED:
        if config.get(name) is None:
            return ConfigError(name, f"has no `{name}`")
    for name in STATED.get(family, ()):
        if name not in config or (config[name] is None and name not in NULLS):
            return ConfigError(name, f"has no `{name}`")
    return (
        _check_heads(config, family)
        or _check_router(config, family)
        or _check_rope(config)
        or _check_ids(config)
        or _check_windows(config)
    )


def _format_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_heads(config: Config, family: str) -> ConfigError | None:
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    kv = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim")
    if family == "deepseek_v3":  # its heads have sizes of their own
        if kv != heads:
            return ConfigError(
                "num_key_value_heads",
                f"has {kv:,} key-value heads: latent attention needs one for each of its {heads:,} heads",
            )
        if (dim := config["qk_rope_head_dim"]) % 2:
            return ConfigError(
                "qk_rope_head_dim", f"rotates {dim:,} elements of a head, but rotary positions need pairs"
            )
        return None
    if (dim is None or family == "llama") and hidden % heads:
        return ConfigError(
            "num_attention_heads", f"has {heads:,} heads, which do not divide its hidden size of {hidden:,}"
        )
    if (dim or hidden // heads) % 2:
        return ConfigError(
            "head_dim", f"has heads of {dim or hidden // heads:,} elements, but rotary positions need pairs"
        )
    if heads % kv:
        return ConfigError(
            "num_key_value_heads", f"has {kv:,} key-value heads, which do not divide its {heads:,} heads"
        )
    return None


def _check_router(config: Config, family: str) -> ConfigError | None:
    """Check the config of a router that first chooses groups of experts.

    The router then chooses experts in these groups. A group is chosen by the scores of its two best experts
    (arXiv:2412.19437), so a group must have two or more experts.
    """
    if family != "deepseek_v3":
        return None
    for name, only in ROUTER.items():
        if (value := config.get(name)) not in (None, only):
            known = isinstance(value, str | int)
            message = f"has {_format_value(value)} for `{name}`: only `{only}` is supported yet"
            return ConfigError(name, message, f"routers with `{name} = {value}`" if known else "")
    number = config["n_routed_experts"]
    layers = config["num_hidden_layers"]
    groups = config["n_group"]
    chosen_groups = config["topk_group"]
    first = config["first_k_dense_replace"]
    if first >= layers:
        return ConfigError("first_k_dense_replace", f"has {first:,} layers without experts, but only {layers:,} layers")
    if number % groups or number // groups < 2:
        return ConfigError(
            "n_group", f"has {number:,} experts in {groups:,} groups: groups must be equal, with 2 or more experts each"
        )
    if chosen_groups > groups:
        return ConfigError("topk_group", f"chooses {chosen_groups:,} of {groups:,} groups of experts")
    if (active := config["num_experts_per_tok"]) > number // groups * chosen_groups:
        return ConfigError(
            "num_experts_per_tok",
            f"has {active:,} experts per token, but only {number // groups * chosen_groups:,} to choose from",
        )
    return None


def _check_rope(config: Config) -> ConfigError | None:
    stated = next((field for field in ("rope_parameters", "rope_scaling") if config.get(field) is not None), "")
    table = config.get(stated) or {}
    if (scaling := config.get("rope_scaling")) and _normalize_scaling(table) != _normalize_scaling(scaling):
        # Engines would not agree: transformers uses `rope_parameters`, and ignores the `rope_theta` of the other.
        return ConfigError(
            "rope_scaling",
            "has a `rope_scaling` that differs from its `rope_parameters`: write everything into `rope_parameters`",
        )
    kind = table.get("rope_type", table.get("type", "default"))
    if kind in UNSUPPORTED_ROPES:
        message = f"has the `rope_type` {_format_value(kind)}: only {', '.join(ROPES)} are supported yet"
        return ConfigError(stated, message, f"rotary positions of the type `{kind}`")
    if not isinstance(kind, str) or kind not in ROPES:
        return ConfigError(
            stated,
            f"has {_format_value(kind)} for the `rope_type` of `{stated}`, which must be one of {', '.join(ROPES)}",
        )
    for name in (*ROPES[kind], *(field for field in ROPE_MORE if table.get(field) is not None)):
        if name not in table or not ABOVE.holds(table[name]):
            prefix = f"has {_format_value(table[name])} for" if name in table else "lacks"
            return ConfigError(stated, f"{prefix} the `{name}` of `{stated}`, a number above 0")
    if kind == "llama3" and not table["low_freq_factor"] < table["high_freq_factor"]:
        return ConfigError(stated, f"has a `low_freq_factor` in `{stated}` that is not below its `high_freq_factor`")
    if kind != "default" and table["factor"] < 1:
        return ConfigError(
            stated, f"has {_format_value(table['factor'])} for the `factor` of `{stated}`, a number of 1 or more"
        )
    if other := sorted(table.keys() - {*ROPES[kind], *ROPE_MORE, "rope_type", "type", "factor", "truncate"}, key=str):
        message = f"has `{other[0]}` in `{stated}`, which is not supported yet"
        return ConfigError(stated, message, f"rotary positions with `{other[0]}`")
    return None


def _normalize_scaling(table: Config) -> Config:
    """Return a config's table of position scaling with uniform field names.

    The kind of scaling is in the field `rope_type` or `type` of a config; the result has `rope_type`. `rope_theta` and
    null values are left out.
    """
    kind = table.get("rope_type", table.get("type", "default"))
    return {
        "rope_type": kind,
        **{
            key: value
            for key, value in table.items()
            if key not in ("type", "rope_type", "rope_theta") and value is not None
        },
    }


def _check_ids(config: Config) -> ConfigError | None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        if any(
            token >= config["vocab_size"]
            for token in (value if isinstance(value, list) else [value])
            if token is not None
        ):
            return ConfigError(
                name, f"has {_format_value(value)} for `{name}`, beyond its vocabulary of {config['vocab_size']:,}"
            )
    return None


def _check_windows(config: Config) -> ConfigError | None:
    layers = config["num_hidden_layers"]
    types = config.get("layer_types")
    if types is not None and len(types) != layers:
        return ConfigError("layer_types", f"has {len(types):,} `layer_types` for {layers:,} layers")
    if other := [layer_type for layer_type in types or () if layer_type != "full_attention"]:
        message = f"has layers of {_format_value(other[0])}: only `full_attention` is supported yet"
        return ConfigError("layer_types", message, f"layers of `{other[0]}`")
    window = config.get("use_sliding_window") and config.get("sliding_window") is not None and types is None
    if window and config.get("max_window_layers", 28) < layers:
        message = "has `use_sliding_window`: only full attention is supported yet"
        return ConfigError("use_sliding_window", message, "sliding windows of attention")
    return None


def fields(config: Config) -> dict[str, Any]:
    """Return those fields of a checked config that an engine needs to build the model.

    A field that the config omits gets the value that the plan assumes for it.
    """
    result = {name: kind.make(config[name]) for name, kind in FIELDS.items() if config.get(name) is not None}
    table = result.pop("rope_parameters", None) or result.pop("rope_scaling", None) or {}
    theta = result.pop("rope_theta", THETA)
    result.pop("rope_scaling", None)
    result["rope_parameters"] = {
        "rope_theta": theta,
        **{key: value for key, value in table.items() if value is not None and key != "type"},
    }
    result["rope_parameters"]["rope_type"] = table.get("rope_type", table.get("type", "default"))
    nulls = {name: None for name in NULLS if name in config}
    return {**nulls, "num_key_value_heads": config["num_attention_heads"], **result}


def count_positions(config: Config, family: str) -> int:
    """Return the largest number of positions that a sequence can have.

    The number includes the positions that position scaling adds.
    """
    stated: int = config.get("max_position_embeddings") or POSITIONS.get(family, 32768)
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if table.get("rope_type", table.get("type")) in ("linear", "dynamic", "yarn"):
        return max(stated, int(table["factor"] * (table.get("original_max_position_embeddings") or stated)))
    return stated
