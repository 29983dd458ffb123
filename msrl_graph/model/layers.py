"""The layers of a model: each has a mixer of tokens and an MLP.

Invariant: the classes are plain data. Each part of a layer (mixers.py, mlps.py) yields its tensors, with the names that
transformers gives them, and counts what costs and memory depend on: pairs of queries and keys, the cache, what is saved
for a backward pass. So a new kind of mixer or MLP is one class. A family (families/) says which layers its models have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import msgspec

from ..sharding.tensors import Tensor
from .mamba import Mamba2
from .mixers import KV_HEADS, AttentionMixer, GroupedQueryAttention, Mixer, MultiHeadLatentAttention, NoMixer
from .mlps import ClampedExpertMlp, DenseMlp, ExpertMlp, MakeTensor, Mlp, NoMlp, iterate_linear
from .recurrent_mixers import GatedDeltaNet, RecurrentMixer

__all__ = [
    "BEFORE",
    "KV_HEADS",
    "AttentionMixer",
    "ClampedExpertMlp",
    "DenseMlp",
    "ExpertMlp",
    "GatedDeltaNet",
    "GroupedQueryAttention",
    "Layer",
    "LayerNorms",
    "MakeTensor",
    "Mamba2",
    "Mixer",
    "Mlp",
    "MultiHeadLatentAttention",
    "NoMixer",
    "NoMlp",
    "RecurrentMixer",
    "group_layers",
    "iterate_linear",
]


class LayerNorms(msgspec.Struct, frozen=True):
    """The names of a layer's norms: those of the mixer and of the MLP.

    - `before`: the norms of the inputs. Without them, mixer and MLP read the residual itself.
    - `after`: the norms of the outputs, before they are added to the residual.
    """

    before: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        return len(self.before) + len(self.after)

    def list_features(self) -> Iterator[str]:
        if self.after:
            yield "sandwich_norms" if self.before else "post_norms"

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        for name in (*self.before, *self.after):
            yield make(f"{name}.weight", (hidden,))


BEFORE = LayerNorms()


class Layer(msgspec.Struct, frozen=True):
    """A kind of layer, and how many such layers follow each other.

    A layer of some families has only a mixer (and a `NoMlp`), or only an MLP (and a `NoMixer`).
    """

    mixer: Mixer
    mlp: Mlp
    count: int = 1
    norms: LayerNorms = BEFORE

    @property
    def has_mixer(self) -> bool:
        return not isinstance(self.mixer, NoMixer)

    @property
    def has_mlp(self) -> bool:
        return not isinstance(self.mlp, NoMlp)

    @property
    def halves(self) -> int:
        """The number of a layer's parts, of mixer and MLP."""
        return self.has_mixer + self.has_mlp

    @property
    def kind(self) -> Layer:
        """The layer without its count."""
        return msgspec.structs.replace(self, count=1)

    def list_features(self) -> Iterator[str]:
        for part in (self.mixer, self.mlp, self.norms):
            yield from part.list_features()

    def list_tensors(self, make: MakeTensor, hidden: int) -> Iterator[Tensor]:
        for part in (self.mixer, self.mlp, self.norms):
            yield from part.list_tensors(make, hidden)

    def count_flop(self, hidden: int, tokens: int) -> float:
        """Return the FLOP of one of these layers for a token.

        The result is the mean over the tokens of a row with `tokens` tokens. `hidden` is the model's hidden size.
        """
        mixer = self.mixer
        projections = 2 * hidden * (mixer.projected + self.mlp.projected)
        if isinstance(mixer, RecurrentMixer):
            return projections + mixer.count_scan_flop(False)
        attention = mixer.heads * mixer.count_flop(False) * mixer.share_of_pairs(tokens, False)
        return projections + attention * tokens / 2


def group_layers(layers: Iterable[tuple[Mixer, Mlp]], norms: LayerNorms = BEFORE) -> Iterator[Layer]:
    """Yield layers, of which equal ones that follow each other are one item."""
    for (mixer, mlp), same in groupby(layers):
        yield Layer(mixer, mlp, len([*same]), norms)
