"""Frozen weights of a trained model: those that `freeze` names.

Invariant: a model with frozen weights has the same tensors as before, in the same order. They differ only in `frozen`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from ..sharding.tensors import Tensor
from .architecture import Model

# By name of a part of a model, patterns of the names of its weights.
PARTS = {
    "embeddings": ("model.embed_tokens.*",),
    "attention": ("model.layers.*.self_attn.*", "model.layers.*.linear_attn.*", "model.layers.*.mamba.*"),
    "mlp": ("model.layers.*.mlp.*",),
    "experts": ("model.layers.*.mlp.experts.*",),
    "router": ("model.layers.*.mlp.gate.*", "model.layers.*.mlp.router.*"),
    "norms": ("*norm.weight",),
    "head": ("lm_head.*", "score.*"),
}


def is_pattern(word: str) -> bool:
    """Return whether `word` can be a pattern of names of weights.

    The name of a part has no punctuation.
    """
    return not word.isidentifier()


def freeze(model: Model, words: tuple[str, ...]) -> Model:
    """Return the model with frozen weights.

    `words` are names of parts (`PARTS`), or patterns of names of weights, in which `*` stands for any characters.
    """
    if not words:
        return model
    if words not in model.with_frozen:
        patterns = [*_iterate_patterns(words)]
        model.with_frozen[words] = replace(
            model, tensors=tuple(replace(tensor, frozen=_matches(tensor, patterns)) for tensor in model.tensors)
        )
    return model.with_frozen[words]


def list_unmatched(model: Model, words: Iterable[str]) -> list[str]:
    """Return the words that match none of the model's weights."""
    return [
        word for word in words if not any(_matches(tensor, [*_iterate_patterns([word])]) for tensor in model.weights)
    ]


def _iterate_patterns(words: Iterable[str]) -> Iterator[str]:
    for word in words:
        yield from PARTS.get(word, (word,))


def _matches(tensor: Tensor, patterns: Iterable[str]) -> bool:
    return tensor.role != "buffer" and any(fnmatchcase(tensor.name, pattern) for pattern in patterns)
