"""Sliding windows of attention, as configs of the Qwen series state them."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from ..fields import ConfigError, Count, Flag, ModelConfig, Names, format_value

FULL = "full_attention"
SLIDING = "sliding_attention"
FIRST_WINDOW = 28  # transformers' default of `max_window_layers`


class WindowConfig(ModelConfig, frozen=True, kw_only=True):
    use_sliding_window: Flag | UnsetType = UNSET
    sliding_window: Count | UnsetType = UNSET
    max_window_layers: Count | UnsetType = UNSET
    layer_types: Names | UnsetType = UNSET

    @property
    def windows(self) -> list[int]:
        """The window of each layer; 0 for full attention."""
        window = (self.sliding_window or 0) if self.use_sliding_window else 0
        if self.layer_types:
            return [(self.sliding_window or 0) if kind == SLIDING else 0 for kind in self.layer_types]
        first = FIRST_WINDOW if self.max_window_layers is UNSET else self.max_window_layers
        return [window if layer >= first else 0 for layer in range(self.num_hidden_layers)]

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        kinds = self.layer_types or []
        if self.layer_types is not UNSET and len(kinds) != self.num_hidden_layers:
            yield ConfigError(f"has {len(kinds):,} `layer_types` for {self.num_hidden_layers:,} layers")
        elif other := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
            message = f"has layers of {format_value(other[0])}: only `{FULL}` and `{SLIDING}` are supported yet"
            yield ConfigError(message, f"layers of `{other[0]}`")
        elif SLIDING in kinds and not self.sliding_window:
            yield ConfigError(f"has layers of `{SLIDING}`, but no `sliding_window`")
