"""Sliding windows of attention, as configs of several families state them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from msgspec import UNSET, UnsetType

from ..fields import ConfigError, Count, Flag, ModelConfig, Names, Table, check_rope_table, complete_rope, format_value

FULL = "full_attention"
SLIDING = "sliding_attention"
FIRST_WINDOW = 28  # transformers' default of `max_window_layers`
ALTERNATING_WINDOW = 4096  # transformers' default of `sliding_window` where layers alternate
SHORTEST = 2  # tokens; transformers' KV cache of a layer with a window supports no shorter window


class LayerTypesConfig(ModelConfig, frozen=True, kw_only=True):
    """A config that may state for each layer whether it has a window."""

    sliding_window: Count | UnsetType | None = UNSET
    layer_types: Names | UnsetType = UNSET

    @property
    def slides(self) -> list[bool]:
        """Whether each layer has a window."""
        return [kind == SLIDING for kind in self.layer_types or []]

    @property
    def window(self) -> int | UnsetType:
        """The window of the layers that have one."""
        return UNSET if self.sliding_window is None else self.sliding_window

    @property
    def windows(self) -> list[int]:
        """The window of each layer; 0 for full attention."""
        return [(self.window or 0) if slides else 0 for slides in self.slides]

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        kinds = self.layer_types or []
        if self.layer_types is not UNSET and len(kinds) != self.num_hidden_layers:
            yield ConfigError(f"has {len(kinds):,} `layer_types` for {self.num_hidden_layers:,} layers")
        elif other := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
            message = f"has layers of {format_value(other[0])}: only `{FULL}` and `{SLIDING}` are supported yet"
            yield ConfigError(message, f"layers of `{other[0]}`")
        elif any(self.slides):
            yield from check_window(self.window)


class WindowConfig(LayerTypesConfig, frozen=True, kw_only=True):
    """Windows as configs of the Qwen series state them."""

    use_sliding_window: Flag | UnsetType = UNSET
    sliding_window: Count | UnsetType = UNSET
    max_window_layers: Count | UnsetType = UNSET

    @property
    def slides(self) -> list[bool]:
        if self.layer_types:
            return super().slides
        first = FIRST_WINDOW if self.max_window_layers is UNSET else self.max_window_layers
        return [bool(self.use_sliding_window) and layer >= first for layer in range(self.num_hidden_layers)]

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        if any(self.slides) and not self.use_sliding_window:
            yield ConfigError(f"has layers of `{SLIDING}`, but no `use_sliding_window`")


class AlternatingWindowConfig(LayerTypesConfig, frozen=True, kw_only=True):
    """Windows in all layers but every `period`-th.

    The config can also state the kind of each layer.
    """

    period: ClassVar[int]

    @property
    def full_period(self) -> int:
        return self.period

    @property
    def slides(self) -> list[bool]:
        if self.layer_types:
            return super().slides
        return [(layer + 1) % self.full_period != 0 for layer in range(self.num_hidden_layers)]

    @property
    def window(self) -> int | UnsetType:
        return ALTERNATING_WINDOW if self.sliding_window is UNSET else super().window


class WindowRotaryConfig(AlternatingWindowConfig, frozen=True, kw_only=True):
    """Layers with windows have other rotary positions than layers of full attention.

    `thetas` are transformers' defaults. A `rope_scaling` and a `rope_theta` are those of the layers of full attention.
    """

    thetas: ClassVar[dict[str, float]]

    @property
    def sliding_theta(self) -> float:
        """The base of rotary positions in layers with windows, if their table states none."""
        return self.thetas[SLIDING]

    @property
    def rope(self) -> dict[str, Any]:
        stated = self.rope_parameters or {}
        full = {**(stated.get(FULL) or {}), **(self.rope_scaling or {})}
        thetas = {FULL: self.rope_theta or self.thetas[FULL], SLIDING: self.sliding_theta}
        tables = {FULL: full, SLIDING: stated.get(SLIDING) or {}}
        return {kind: complete_rope(table, thetas[kind]) for kind, table in tables.items()}

    @property
    def rope_tables(self) -> tuple[Table, ...]:
        return tuple(self.rope[kind] for kind in (FULL, SLIDING))

    def list_features(self) -> Iterator[str]:
        yield from super().list_features()
        full, sliding = self.rope_tables
        if full != sliding:
            yield "rope_by_window"

    def find_rope_errors(self) -> Iterator[ConfigError]:
        stated = self.rope_parameters or {}
        if other := sorted(stated.keys() - {FULL, SLIDING}):
            yield ConfigError(f"has `{other[0]}` in `rope_parameters`, which must have `{FULL}` and `{SLIDING}`")
        elif wrong := [kind for kind, table in stated.items() if not isinstance(table, dict | None)]:
            yield ConfigError(f"has {format_value(stated[wrong[0]])} for `{wrong[0]}`, which must be an object")
        else:
            for kind, table in zip((FULL, SLIDING), self.rope_tables, strict=True):
                yield from check_rope_table(self, table, f"rope_parameters.{kind}")


def check_window(window: int | UnsetType) -> Iterator[ConfigError]:
    """Report the window of a model's layers if no engine could use it."""
    if window is UNSET:
        yield ConfigError("has layers with a sliding window, but no `sliding_window`")
    elif window < SHORTEST:
        yield ConfigError(f"has {window} for `sliding_window`, which must be {SHORTEST} or more")
