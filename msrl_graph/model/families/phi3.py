"""Phi-3, Phi-4 and Phi-4-mini (arXiv:2404.14219, 2412.08905 and 2503.01743).

The files have queries, keys and values as one tensor, and the projections gate and up of an MLP as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from ..config_parts.partial_rotary import PartialRotaryConfig, count_rotated
from ..config_parts.windows import check_window
from ..fields import ConfigError, Count, Size, format_value
from ..layers import DenseMlp, GroupedQueryAttention, Layer
from .family import Family

ORIGINAL = 4096  # transformers' default of `original_max_position_embeddings`
FACTORS = ("short_factor", "long_factor")


class Phi3Config(PartialRotaryConfig, frozen=True, kw_only=True):
    sliding_window: Count | UnsetType | None = UNSET  # null: no window
    original_max_position_embeddings: Size | UnsetType = UNSET
    rope_fields: ClassVar[tuple[str, ...]] = (*PartialRotaryConfig.rope_fields, *FACTORS)

    @property
    def rope(self) -> dict[str, Any]:
        table = super().rope
        if table["rope_type"] != "longrope":
            return table
        return {**table, "original_max_position_embeddings": self.original_max_position_embeddings or ORIGINAL}

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        if self.sliding_window is not UNSET and self.sliding_window is not None:
            yield from check_window(self.sliding_window)

    def find_rope_errors(self) -> Iterator[ConfigError]:
        kind = self.rope["rope_type"]
        if kind not in ("default", "longrope"):  # transformers builds no others of this family
            message = f"has the `rope_type` {format_value(kind)}: only `default` and `longrope` are supported"
            yield ConfigError(message, f"rotary positions of the type `{kind}`" if isinstance(kind, str) else "")
            return
        errors = super().find_rope_errors()
        if kind == "longrope":
            errors = (error for error in errors if error.feature != "rotary positions of the type `longrope`")
        yield from errors
        if kind == "longrope" and self.size_of_head * self.num_attention_heads != self.hidden_size:
            yield ConfigError("has `longrope` positions, whose heads must together have the hidden size")
        for name in FACTORS if kind == "longrope" else ():
            if not _is_list_of_factors(factors := self.rope.get(name), count_rotated(self) // 2):
                words = f"a list of {count_rotated(self) // 2} numbers above 0, one for each pair that is rotated"
                yield ConfigError(f"has {format_value(factors)} for the `{name}` of rotary positions, not {words}")


def _is_list_of_factors(value: object, length: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == length
        and all(type(factor) in (int, float) and 0 < factor < 1e300 for factor in value)
    )


def _layers(config: Phi3Config) -> Iterator[Layer]:
    heads = (config.num_attention_heads, config.kv_heads, config.size_of_head)
    mixer = GroupedQueryAttention(*heads, window=config.sliding_window or 0, fused=True)
    yield Layer(mixer, DenseMlp(config.intermediate_size, fused=True), config.num_hidden_layers)


FAMILY = Family("phi3", "Phi3ForCausalLM", Phi3Config, _layers, positions=4096)
