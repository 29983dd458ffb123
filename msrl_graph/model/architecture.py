"""A model's architecture: its sizes, and its tensors by name and shape.

Invariant: the classes are plain data, without the values of weights. models.py creates the objects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ..diagnostics import NOWHERE, Span
from ..sharding.layout import Tensor, TensorKind, group_by_kind

HEAD = "score.weight"  # of a model that scores
CORRECTION = "e_score_correction_bias"


def is_copied(tensor: Tensor) -> bool:
    """Return whether tp ranks have copies of a tensor, but different gradients.

    With sequence parallelism (arXiv:2205.05198), each tp rank computes the gradient of such a copy from the rank's part
    of the tokens. The result is False for the score head: each tp rank has a copy of it, but computes the gradient from
    all tokens.
    """
    return tensor.tp_dim < 0 and tensor.name != HEAD


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a layer's experts.

    - `number`: the number of experts.
    - `active`: the number of experts that a router picks for each token.
    - `intermediate`: the intermediate size of one expert.
    - `shared`: the intermediate size of all shared experts together. Every token passes through the shared experts.
    - `first`: the first layer that has experts.
    - `corrected`: whether a bias corrects the router's scores (arXiv:2412.19437).
    """

    number: int
    active: int
    intermediate: int
    shared: int = 0
    first: int = 0
    corrected: bool = False


@dataclass(frozen=True)
class Latent:
    """The sizes of multi-head latent attention (arXiv:2405.04434).

    - `q_rank`: the size of the latent vector of queries; 0 if queries have no latent vector.
    - `kv_rank`: the size of the latent vector of keys and values.
    - `nope`: for each head, the size of the part of a key that has no rotary position.
    - `rope`: for each head, the size of the part of a key that has a rotary position.
    - `value`: for each head, the size of a value.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model's layers, heads and vocabulary."""

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
        """The size of the output of the model's head for one token."""
        return 1 if self.scores else self.vocabulary


@dataclass(frozen=True, kw_only=True)
class Model(Shape):
    """A model's architecture.

    `path` is the folder of the model's weights; it is empty for a preset. `family` is one of models.FAMILIES.
    """

    name: str
    path: str
    family: str
    dtype: str  # f32 or bf16
    tensors: tuple[Tensor, ...]
    span: Span = NOWHERE

    @cached_property
    def fixed(self) -> tuple[Tensor, ...]:
        """The tensors that training does not change: the bias of each router's scores.

        Each engine reads these tensors from the model's folder. They are not sharded, and are in float32 even if the
        weights have another dtype. Resharding never moves them.
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
        """Whether each head of the queries and keys is normalized (q_norm and k_norm)."""
        return any(tensor.name.endswith(".q_norm.weight") for tensor in self.tensors)

    @cached_property
    def scoring(self) -> Model:
        """This model, but with a head that returns one number per token instead of logits.

        Workers of the kinds `value` and `reward_model` use this architecture.
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
        """The number of elements of the model's largest tensor."""
        return max((tensor.elements for tensor in self.tensors), default=0)

    @cached_property
    def largest_read(self) -> int:
        """The number of elements of the largest tensor in the model's files.

        The files have a separate tensor for each expert.
        """
        return max(
            (tensor.elements // (tensor.shape[0] if tensor.experts else 1) for tensor in self.tensors), default=0
        )

    @cached_property
    def active_parameters(self) -> int:
        """The number of parameters that are active for one token."""
        routed = sum(tensor.elements for tensor in self.tensors if tensor.experts)
        return self.parameters - (routed - routed * self.experts.active // self.experts.number if self.experts else 0)

    @property
    def kv_elements(self) -> int:
        """The number of elements that a token adds to one layer's KV cache, for all heads.

        Without latent attention, the elements are the keys and values. With latent attention, they are the latent and
        the rotary key.
        """
        return self.latent.kv_rank + self.latent.rope if self.latent else 2 * self.kv_heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """The bytes of the KV cache for one token, over all layers and heads."""
        return self.layers * self.kv_elements * (4 if self.dtype == "f32" else 2)
