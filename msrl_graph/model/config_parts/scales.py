"""Four constants of Granite's configs.

They scale the embedding, attention scores, residual branches and logits.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..fields import Above, ModelConfig

SCALES = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logits_scale",
}


class ScaledConfig(ModelConfig, frozen=True, kw_only=True):
    embedding_multiplier: Above = 1.0
    attention_multiplier: Above = 1.0
    residual_multiplier: Above = 1.0
    logits_scaling: Above = 1.0

    def list_features(self) -> Iterator[str]:
        plain = {"attention_multiplier": self.size_of_head**-0.5}
        return (feature for name, feature in SCALES.items() if getattr(self, name) != plain.get(name, 1.0))
