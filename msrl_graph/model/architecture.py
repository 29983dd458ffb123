"""A model's architecture: its sizes, and its tensors by name and shape.

Invariant: plain data, of no particular weights; models.py makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ..diagnostics import NOWHERE, Span
from ..sharding.layout import Tensor, TensorKind, kinds

HEAD = "score.weight"  # of a model that scores
CORRECTION = "e_score_correction_bias"


def copied(tensor: Tensor) -> bool:
    """Whether all ranks of tp have it, and each makes of its gradient what its own tokens give where sequences are
    divided too (arXiv:2205.05198): all that is copied, but for a head of scores, which sees all tokens."""
    return tensor.tp_dim < 0 and tensor.name != HEAD


@dataclass(frozen=True)
class ExpertSizes:
    """A layer's experts, of which a router picks `active` for each token; `shared`: the width of those that every token
    passes; `first`: the first layer that has experts; `corrected`: a bias corrects the router's scores
    (arXiv:2412.19437)."""

    number: int
    active: int
    intermediate: int
    shared: int = 0
    first: int = 0
    corrected: bool = False


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv:2405.04434): ranks of the latents (`q_rank` 0: none), and a head's parts."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    qkv_bias: bool
    experts: ExpertSizes | None = None
    latent: Latent | None = None
    scores: bool = False  # its head gives one number a token, not logits

    @property
    def outputs(self) -> int:
        """What the head gives of a token."""
        return 1 if self.scores else self.vocabulary


@dataclass(frozen=True, kw_only=True)
class Model(Shape):
    """A model's architecture. `path` is the folder of its weights, empty for a preset; `family` one of
    models.FAMILIES."""

    name: str
    path: str
    family: str
    dtype: str  # f32 or bf16
    tensors: tuple[Tensor, ...]
    span: Span = NOWHERE

    @cached_property
    def fixed(self) -> tuple[Tensor, ...]:
        """What belongs to the model and no run changes: the biases that correct its routers' scores. Each engine reads
        them from the model's folder, whole and in float32, whatever the weights' type; they are never moved."""
        if self.experts is None or not self.experts.corrected:
            return ()
        return tuple(
            Tensor(f"model.layers.{i}.mlp.gate.{CORRECTION}", (self.experts.number,), layer=i, layers=self.layers)
            for i in range(self.experts.first, self.layers)
        )

    @cached_property
    def kinds(self) -> tuple[TensorKind, ...]:
        return kinds(self.tensors)

    @cached_property
    def norms_heads(self) -> bool:
        """Whether queries and keys pass a norm of their own, head by head."""
        return any(t.name.endswith(".q_norm.weight") for t in self.tensors)

    @cached_property
    def scoring(self) -> Model:
        """The model with a head of one number in place of its logits: a value worker's, or a reward model's."""
        head = Tensor(HEAD, (1, self.hidden), layer=self.layers, layers=self.layers)
        body = tuple(t if not t.tied else replace(t, tied=False) for t in self.tensors if t.name != "lm_head.weight")
        return replace(self, tensors=(*body, head), tied=False, scores=True)

    @cached_property
    def parameters(self) -> int:
        return sum(t.elements for t in (*self.tensors, *self.fixed))

    @cached_property
    def largest(self) -> int:
        """Elements of its largest tensor."""
        return max((t.elements for t in self.tensors), default=0)

    @cached_property
    def largest_read(self) -> int:
        """Elements of the largest tensor of its files, where each expert has its own."""
        return max((t.elements // (t.shape[0] if t.experts else 1) for t in self.tensors), default=0)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that a token passes: of the experts, those that the router picks."""
        routed = sum(t.elements for t in self.tensors if t.experts)
        return self.parameters - (routed - routed * self.experts.active // self.experts.number if self.experts else 0)

    @property
    def kv_elements(self) -> int:
        """Elements of keys and values that a token leaves in one layer, all heads; of latent attention, the latent and
        the rotary key."""
        return self.latent.kv_rank + self.latent.rope if self.latent else 2 * self.kv_heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values a token, over all layers and heads."""
        return self.layers * self.kv_elements * (4 if self.dtype == "f32" else 2)
