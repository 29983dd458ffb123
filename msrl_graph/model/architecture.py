"""A model's architecture: its sizes, and its tensors by name and shape.

Invariant: plain data, without particular weights. models.py builds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ..diagnostics import NOWHERE, Span
from ..sharding.layout import Tensor, TensorKind, group_by_kind

HEAD = "score.weight"  # of a model that scores
CORRECTION = "e_score_correction_bias"


def is_copied(tensor: Tensor) -> bool:
    """Return whether all tp ranks have a copy, with a gradient from their own tokens.

    With sequence parallelism (arXiv:2205.05198) that is true of all copied tensors except a score head, which sees
    all tokens.
    """
    return tensor.tp_dim < 0 and tensor.name != HEAD


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a layer's experts.

    - `active`: experts that a router picks for each token.
    - `shared`: the width of the experts that every token passes.
    - `first`: the first layer that has experts.
    - `corrected`: a bias corrects the router's scores (arXiv:2412.19437).
    """

    number: int
    active: int
    intermediate: int
    shared: int = 0
    first: int = 0
    corrected: bool = False


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv:2405.04434).

    The ranks of the latents, and the sizes of a head's parts. `q_rank` 0: queries have no latent.
    """

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
    scores: bool = False  # the head returns one number per token instead of logits

    @property
    def outputs(self) -> int:
        """Return the size of the head's output for one token."""
        return 1 if self.scores else self.vocabulary


@dataclass(frozen=True, kw_only=True)
class Model(Shape):
    """A model's architecture.

    `path` is the folder of its weights, empty for a preset. `family` is one of models.FAMILIES.
    """

    name: str
    path: str
    family: str
    dtype: str  # f32 or bf16
    tensors: tuple[Tensor, ...]
    span: Span = NOWHERE

    @cached_property
    def fixed(self) -> tuple[Tensor, ...]:
        """Return the tensors that no run changes: the biases of its routers' scores.

        Each engine reads them from the model's folder, whole and in float32, whatever the weights' type. They are
        never moved.
        """
        if self.experts is None or not self.experts.corrected:
            return ()
        return tuple(
            Tensor(
                f"model.layers.{layer}.mlp.gate.{CORRECTION}", (self.experts.number,), layer=layer, layers=self.layers
            )
            for layer in range(self.experts.first, self.layers)
        )

    @cached_property
    def kinds(self) -> tuple[TensorKind, ...]:
        return group_by_kind(self.tensors)

    @cached_property
    def norms_heads(self) -> bool:
        """Return whether queries and keys have a norm of their own, head by head."""
        return any(tensor.name.endswith(".q_norm.weight") for tensor in self.tensors)

    @cached_property
    def scoring(self) -> Model:
        """Return the model with a head of one number per token instead of logits.

        It is the model of a value worker, or a reward model.
        """
        head = Tensor(HEAD, (1, self.hidden), layer=self.layers, layers=self.layers)
        body = tuple(
            tensor if not tensor.tied else replace(tensor, tied=False)
            for tensor in self.tensors
            if tensor.name != "lm_head.weight"
        )
        return replace(self, tensors=(*body, head), tied=False, scores=True)

    @cached_property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in (*self.tensors, *self.fixed))

    @cached_property
    def largest(self) -> int:
        """Return the elements of its largest tensor."""
        return max((tensor.elements for tensor in self.tensors), default=0)

    @cached_property
    def largest_read(self) -> int:
        """Return the elements of the largest tensor in its files.

        Files have one tensor per expert.
        """
        return max(
            (tensor.elements // (tensor.shape[0] if tensor.experts else 1) for tensor in self.tensors), default=0
        )

    @cached_property
    def active_parameters(self) -> int:
        """Return the number of parameters that are active for one token."""
        routed = sum(tensor.elements for tensor in self.tensors if tensor.experts)
        return self.parameters - (routed - routed * self.experts.active // self.experts.number if self.experts else 0)

    @property
    def kv_elements(self) -> int:
        """Return the elements that a token leaves in one layer's cache, all heads.

        Without latent attention these are keys and values, with it the latent and the rotary key.
        """
        return self.latent.kv_rank + self.latent.rope if self.latent else 2 * self.kv_heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of keys and values per token, over all layers and heads."""
        return self.layers * self.kv_elements * (4 if self.dtype == "f32" else 2)
