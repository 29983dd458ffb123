"""The fields of a config.json, and their checks.

Invariant: the fields of a family's class (`ModelConfig`, families/) are those that an engine reads. From a config that
`read_fields` accepts, each engine builds the model for which the plan was made: engines get the fields from
`engine_fields`, and never read the file themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

Config = Mapping[str, Any]
MOST = 2**31 - 1
LAYERS = 4096
# Activations of transformers (ACT2FN) that have no options of their own.
Activation = Literal[
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
]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
Size = Annotated[int, Meta(ge=1, le=MOST, description="a whole number of 1 or more")]
Count = Annotated[int, Meta(ge=0, le=MOST, description="a whole number of 0 or more")]
Depth = Annotated[int, Meta(ge=1, le=LAYERS, description=f"a whole number from 1 to {LAYERS}")]
Above = Annotated[float, Meta(gt=0, lt=1e300, description="a number above 0")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Flag = Annotated[bool, Meta(description="true or false")]
Token = Annotated[int, Meta(ge=-1, le=MOST, description="a token's number")]
_Some = Annotated[list[Count], Meta(min_length=1)]
Tokens = Annotated[
    Annotated[int, Meta(ge=-1, le=MOST)] | _Some, Meta(description="a token's number, or a list of them")
]
Table = Annotated[dict[str, Any], Meta(description="an object")]
Names = Annotated[list[str], Meta(description="a list of strings")]
Act = Annotated[Activation, Meta(description=f"one of {', '.join(ACTIVATIONS)}")]

# Kinds of rotary positions, and the numbers that each requires (transformers' modeling_rope_utils).
ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
OTHER_ROPES = ("longrope", "proportional")  # the other kinds of transformers' ROPE_INIT_FUNCTIONS
ROPE_MORE = (
    "rope_theta",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
ROPE_ALWAYS = ("rope_type", "type", "factor", "truncate")
THETA = 10_000.0


class ConfigError(NamedTuple):
    """An error in a config: a message that says why it is wrong.

    `feature` is the feature of the model that no engine supports yet; it is "" if the config itself is wrong.
    """

    message: str
    feature: str = ""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that all families have.

    A field that is null counts as absent, unless its type allows null.
    """

    hidden_size: Size
    num_hidden_layers: Depth
    num_attention_heads: Size
    num_key_value_heads: Size | UnsetType | None = UNSET
    head_dim: Size | UnsetType = UNSET
    intermediate_size: Size
    vocab_size: Size
    max_position_embeddings: Size | UnsetType = UNSET
    hidden_act: Act | UnsetType = UNSET
    rms_norm_eps: Above | UnsetType = UNSET
    rope_theta: Above | UnsetType = UNSET
    rope_scaling: Table | UnsetType = UNSET
    rope_parameters: Table | UnsetType = UNSET
    initializer_range: Share | UnsetType = UNSET
    attention_dropout: Share | UnsetType = UNSET
    use_cache: Flag | UnsetType = UNSET
    tie_word_embeddings: Flag | UnsetType = UNSET
    attention_bias: Flag | UnsetType = UNSET
    rope_fields: ClassVar[tuple[str, ...]] = ()  # further fields of a table of rotary positions that the family has
    bos_token_id: Token | UnsetType = UNSET
    eos_token_id: Tokens | UnsetType = UNSET
    pad_token_id: Token | UnsetType = UNSET

    @classmethod
    def complete(cls, config: Config) -> Config:
        """Return a config.json with the fields of this class.

        Published files may have others instead.
        """
        return config

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def size_of_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rope(self) -> dict[str, Any]:
        """The table of rotary positions, as transformers' `rope_parameters`."""
        return complete_rope(self.rope_parameters or self.rope_scaling or {}, self.rope_theta or THETA)

    @property
    def rope_tables(self) -> tuple[Table, ...]:
        """The tables of rotary positions, of all layers."""
        return (self.rope,)

    def list_features(self) -> Iterator[str]:
        """Yield the features (features.py) that fields of the family state.

        Features of layers are not among them.
        """
        yield from ()

    def find_errors(self) -> Iterator[ConfigError]:
        """Yield what is wrong in a config whose fields are right by themselves."""
        yield from check_heads(self)
        yield from self.find_rope_errors()
        yield from check_tokens(self)

    def find_rope_errors(self) -> Iterator[ConfigError]:
        yield from check_rope(self)


def complete_rope(table: Config, theta: float) -> dict[str, Any]:
    """Return a table of rotary positions with uniform field names.

    The base is `theta` if the table states none.
    """
    return {
        "rope_theta": theta,
        **{key: value for key, value in table.items() if value is not None and key != "type"},
        "rope_type": table.get("rope_type", table.get("type", "default")),
    }


C = TypeVar("C", bound=ModelConfig)


def read_fields(config: Config, kind: type[C]) -> C | ConfigError:
    """Return the fields of a config.json, or the first error."""
    hints = get_type_hints(kind, include_extras=True)
    stated = {
        name: value
        for name, value in kind.complete(config).items()
        if name in hints and (value is not None or type(None) in get_args(hints[name]))
    }
    try:
        fields = msgspec.convert(stated, kind)
    except msgspec.ValidationError as error:
        if missing := re.search(r"missing required field `(\w+)`", str(error)):
            return ConfigError(f"has no `{missing[1]}`")
        match = re.search(r"`\$\.(\w+)", str(error))
        name = match[1] if match else next(iter(stated))
        words = next(_iterate_descriptions(hints[name]))
        return ConfigError(f"has {format_value(stated[name])} for `{name}`, which must be {words}")
    return next(fields.find_errors(), None) or fields


def _iterate_descriptions(hint: Any) -> Iterator[str]:
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, Meta) and meta.description:
            yield meta.description
    for part in get_args(hint):
        yield from _iterate_descriptions(part)


def engine_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that an engine needs to build the model.

    A field that the config omits gets the value that the plan assumes for it.
    """
    stated = {name: value for name, value in msgspec.structs.asdict(config).items() if value is not UNSET}
    for name in ("rope_scaling", "rope_theta"):
        stated.pop(name, None)
    return {**stated, "num_key_value_heads": config.kv_heads, "rope_parameters": config.rope}


def format_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def check_heads(config: ModelConfig) -> Iterator[ConfigError]:
    if not config.head_dim:
        yield from check_head_division(config)
    if config.size_of_head % 2:
        yield ConfigError(f"has heads of {config.size_of_head:,} elements, but rotary positions need pairs")
    if config.num_attention_heads % config.kv_heads:
        heads = f"{config.num_attention_heads:,} heads"
        yield ConfigError(f"has {config.kv_heads:,} key-value heads, which do not divide its {heads}")


def check_head_division(config: ModelConfig) -> Iterator[ConfigError]:
    """Report heads that do not divide the hidden size."""
    if config.hidden_size % config.num_attention_heads:
        heads = f"{config.num_attention_heads:,} heads"
        yield ConfigError(f"has {heads}, which do not divide its hidden size of {config.hidden_size:,}")


def check_rope(config: ModelConfig) -> Iterator[ConfigError]:
    stated = next((name for name in ("rope_parameters", "rope_scaling") if getattr(config, name) is not UNSET), "")
    table = getattr(config, stated) if stated else {}
    if config.rope_scaling and _normalize_scaling(table) != _normalize_scaling(config.rope_scaling):
        # Engines would not agree: transformers uses `rope_parameters`, and ignores the `rope_theta` of the other.
        yield ConfigError(
            "has a `rope_scaling` that differs from its `rope_parameters`: write everything into `rope_parameters`"
        )
        return
    yield from check_rope_table(config, table, stated)


def check_rope_table(config: ModelConfig, table: Config, stated: str) -> Iterator[ConfigError]:
    """Check a table of rotary positions, which the config states as `stated`."""
    kind = table.get("rope_type", table.get("type", "default"))
    if kind in OTHER_ROPES:
        message = f"has the `rope_type` {format_value(kind)}: only {', '.join(ROPES)} are supported yet"
        yield ConfigError(message, f"rotary positions of the type `{kind}`")
        return
    if not isinstance(kind, str) or kind not in ROPES:
        known = ", ".join(ROPES)
        yield ConfigError(f"has {format_value(kind)} for the `rope_type` of `{stated}`, which must be one of {known}")
        return
    for name in (*ROPES[kind], *(field for field in ROPE_MORE if table.get(field) is not None)):
        value = table.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
            prefix = f"has {format_value(value)} for" if name in table else "lacks"
            yield ConfigError(f"{prefix} the `{name}` of `{stated}`, a number above 0")
            return
    if kind == "llama3" and not table["low_freq_factor"] < table["high_freq_factor"]:
        yield ConfigError(f"has a `low_freq_factor` in `{stated}` that is not below its `high_freq_factor`")
    elif kind != "default" and table["factor"] < 1:
        value = format_value(table["factor"])
        yield ConfigError(f"has {value} for the `factor` of `{stated}`, a number of 1 or more")
    elif other := sorted(table.keys() - {*ROPES[kind], *ROPE_MORE, *config.rope_fields, *ROPE_ALWAYS}, key=str):
        message = f"has `{other[0]}` in `{stated}`, which is not supported yet"
        yield ConfigError(message, f"rotary positions with `{other[0]}`")


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


def check_tokens(config: ModelConfig) -> Iterator[ConfigError]:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        tokens = value if isinstance(value, list) else [] if value is UNSET else [value]
        if any(token >= config.vocab_size for token in tokens):
            vocabulary = f"beyond its vocabulary of {config.vocab_size:,}"
            yield ConfigError(f"has {format_value(value)} for `{name}`, {vocabulary}")


def count_positions(config: ModelConfig, default: int) -> int:
    """Return the largest number of positions that a sequence can have.

    The number includes the positions that position scaling adds. `default` is the number of positions if the config has
    no `max_position_embeddings`.
    """
    stated: int = config.max_position_embeddings or default
    return max(_count_positions(table, stated) for table in config.rope_tables)


def _count_positions(table: Config, stated: int) -> int:
    if table["rope_type"] in ("linear", "dynamic", "yarn"):
        return max(stated, int(table["factor"] * (table.get("original_max_position_embeddings") or stated)))
    if table["rope_type"] == "longrope":
        # All positions of a longer sequence differ, so that a row would depend on the rows next to it.
        return min(stated, int(table["original_max_position_embeddings"]))
    return stated
