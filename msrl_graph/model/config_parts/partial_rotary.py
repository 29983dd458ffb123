"""Rotary positions of a part of each head, as several families state them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, UnsetType

from ..fields import ConfigError, ModelConfig, format_value

Part = Annotated[float, Meta(gt=0, le=1, description="a number above 0, up to 1")]
FIELD = "partial_rotary_factor"


def complete_part(table: dict[str, Any], stated: float | UnsetType, whole: float) -> dict[str, Any]:
    """Return a table of rotary positions with the part of a head that is rotated.

    If the table has no part, it is the one that the config has `stated`, or else `whole`.
    """
    return {FIELD: whole if stated is UNSET else stated, **table}


def count_rotated(config: ModelConfig) -> int:
    """Return the number of elements of a head that are rotated."""
    return int(config.size_of_head * config.rope[FIELD])


def list_part_features(config: ModelConfig) -> Iterator[str]:
    if count_rotated(config) < config.size_of_head:
        yield "rope_partial"


def check_part(config: ModelConfig) -> Iterator[ConfigError]:
    part = config.rope[FIELD]
    if not isinstance(part, int | float) or isinstance(part, bool) or not 0 < part <= 1:
        yield ConfigError(f"has {format_value(part)} for `{FIELD}`, which must be a number above 0, up to 1")
    elif not (rotated := count_rotated(config)) or rotated % 2:
        yield ConfigError(f"rotates {rotated:,} elements of a head, but rotary positions need pairs")


class PartialRotaryConfig(ModelConfig, frozen=True, kw_only=True):
    partial_rotary_factor: Part | UnsetType = UNSET
    rope_fields: ClassVar[tuple[str, ...]] = (FIELD,)
    whole: ClassVar[float] = 1.0  # the part if the config states none

    @property
    def rope(self) -> dict[str, Any]:
        return complete_part(super().rope, self.partial_rotary_factor, self.whole)

    def list_features(self) -> Iterator[str]:
        return list_part_features(self)

    def find_rope_errors(self) -> Iterator[ConfigError]:
        yield from super().find_rope_errors()
        yield from check_part(self)
