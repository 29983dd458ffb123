"""Rotary positions of a part of each head, as several families state them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from msgspec import UNSET, Meta, UnsetType

from ..fields import ConfigError, ModelConfig, format_value

Part = Annotated[float, Meta(gt=0, le=1, description="a number above 0, up to 1")]
FIELD = "partial_rotary_factor"


class PartialRotaryConfig(ModelConfig, frozen=True, kw_only=True):
    partial_rotary_factor: Part | UnsetType = UNSET
    rope_fields: ClassVar[tuple[str, ...]] = (FIELD,)
    whole: ClassVar[float] = 1.0  # the part if the config states none

    @property
    def rope(self) -> dict[str, Any]:
        stated = self.whole if self.partial_rotary_factor is UNSET else self.partial_rotary_factor
        return {FIELD: stated, **super().rope}

    @property
    def rotated(self) -> int:
        """The number of elements of a head that are rotated."""
        return int(self.size_of_head * self.rope[FIELD])

    def list_features(self) -> Iterator[str]:
        if self.rotated < self.size_of_head:
            yield "rope_partial"

    def find_rope_errors(self) -> Iterator[ConfigError]:
        yield from super().find_rope_errors()
        part = self.rope[FIELD]
        if not isinstance(part, int | float) or isinstance(part, bool) or not 0 < part <= 1:
            yield ConfigError(f"has {format_value(part)} for `{FIELD}`, which must be a number above 0, up to 1")
        elif not self.rotated or self.rotated % 2:
            yield ConfigError(f"rotates {self.rotated:,} elements of a head, but rotary positions need pairs")
