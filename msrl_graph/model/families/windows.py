"""Sliding windows of attention, as configs of the Qwen series state them."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from ..fields import ConfigError, Count, Flag, ModelConfig, Names, format_value

FULL = "full_attention"
SLIDING = "sliding_attention"
FIRST_WINDOW = 28  # transformers' default of `max_window_layers`
SHORTEST = 2  # tokens; transformers' KV cache of a layer with a window supports no shorter window


class WindowConfig(ModelConfig, frozen=True, kw_only=True):
    use_sliding_window: Flag | UnsetType = UNSET
    sliding_window: Count | UnsetType = UNSET
    max_window_layers: Count | UnsetType = UNSET
    layer_types: Names | UnsetType = UNSET

    @property
    def slides(self) -> list[bool]:
        """Whether each layer has a window."""
        if self.layer_types:
            return [kind == SLIDING for kind in self.layer_types]
        first = FIRST_WINDOW if self.max_window_layers is UNSET else self.max_window_layers
        return [bool(self.use_sliding_window) and layer >= first for layer in range(self.num_hidden_layers)]

    @property
    def windows(self) -> list[int]:
        """The window of each layer; 0 for full attention."""
        return [(self.sliding_window or 0) if slides else 0 for slides in self.slides]

    def find_errors(self) -> Iterator[ConfigError]:
        yield from super().find_errors()
        kinds = self.layer_types or []
        if self.layer_types is not UNSET and len(kinds) != self.num_hidden_layers:
            yield ConfigError(f"has {len(kinds):,} `layer_types` for {self.num_hidden_layers:,} layers")
        elif other := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
            message = f"has layers of {format_value(other[0])}: only `{FULL}` and `{SLIDING}` are supported yet"
            yield ConfigError(message, f"layers of `{other[0]}`")
        elif any(self.slides):
            yield from check_window(self.sliding_window)
            if not self.use_sliding_window:
                yield ConfigError(f"has layers of `{SLIDING}`, but no `use_sliding_window`")


def check_window(window: int | UnsetType) -> Iterator[ConfigError]:
    """Report the window of a model's layers if no engine could use it."""
    if window is UNSET:
        yield ConfigError("has layers with a sliding window, but no `sliding_window`")
    elif window < SHORTEST:
        yield ConfigError(f"has {window} for `sliding_window`, which must be {SHORTEST} or more")
