"""A model's architecture: its sizes, and its tensors by name and shape.

Invariant: the classes are plain data, without the values of weights. models.py creates the objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from msgspec import structs

from ..diagnostics import NOWHERE, Span
from ..sharding.layout import TensorKind, TensorKinds, full_box, group_by_kind
from ..sharding.tensors import Tensor
from .features import FEATURES
from .layers import (
    AttentionMixer,
    ExpertMlp,
    GroupedQueryAttention,
    Layer,
    Mixer,
    Mlp,
    MultiHeadLatentAttention,
    RecurrentMixer,
)
from .lora_settings import Lora

Kind = TypeVar("Kind")
EMBEDDING = "model.embed_tokens.weight"
LOGITS = "lm_head.weight"
HEAD = "score.weight"  # of a model that scores


def is_copied(tensor: Tensor) -> bool:
    """Return whether tp ranks have copies of a tensor, but different gradients.

    For experts, these are the ranks of expert tensor parallelism, which have copies of some matrices of adapters.
    With sequence parallelism (arXiv:2205.05198), each tp rank computes the gradient of such a copy from the rank's part
    of the tokens. The result is False for the score head: each tp rank has a copy of it, but computes the gradient from
    all tokens.
    """
    return tensor.tp_dim < 0 and tensor.name != HEAD


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model's architecture.

    - `path`: the folder of the model's weights; empty for a preset.
    - `family`: the `model_type` of the model's config.json.
    - `dtype`: f32 or bf16.
    - `stack`: the layers, in order.
    - `features`: what an engine must implement to compute the model (features.py).
    - `tensors`: all tensors, in order. Most code uses one of the views: `weights`, `trained`, `moved`, `saved`,
      `buffers`.
    - `scores`: whether the head returns one number per token instead of logits.
    - `initial`: the adapter in the folder that the program names; None if this is the folder of a model. The model is
      the one that the adapter belongs to.
    - `lora`, `base`: the adapter of a worker, and the same model without it; None if there is no adapter.
    """

    name: str
    path: str
    family: str
    dtype: str
    hidden: int
    vocabulary: int
    tied: bool
    stack: tuple[Layer, ...]
    features: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    scores: bool = False
    initial: Lora | None = None
    lora: Lora | None = None
    base: Model | None = None
    span: Span = NOWHERE

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the model's weights and of its initial adapter."""
        return tuple(folder for folder in (self.path, self.initial.folder if self.initial else "") if folder)

    @property
    def outputs(self) -> int:
        """The size of the output of the model's head for one token."""
        return 1 if self.scores else self.vocabulary

    @cached_property
    def head(self) -> Tensor:
        """The weight of the head, which may be the embedding's."""
        name = HEAD if self.scores else EMBEDDING if self.tied else LOGITS
        return next(tensor for tensor in self.weights if tensor.name == name)

    @cached_property
    def layers(self) -> int:
        return sum(layer.count for layer in self.stack)

    @cached_property
    def layer_kinds(self) -> tuple[Layer, ...]:
        """The kinds of layers, by their first layer, each with its number of layers."""
        counts = _sum_counts((layer.kind, layer.count) for layer in self.stack)
        return tuple(structs.replace(kind, count=count) for kind, count in counts.items())

    @cached_property
    def kind_of_layer(self) -> tuple[int, ...]:
        """For each layer, the index of its kind in `layer_kinds`."""
        index = {layer.kind: i for i, layer in enumerate(self.layer_kinds)}
        return tuple(index[layer.kind] for layer in self.stack for _ in range(layer.count))

    @cached_property
    def last_layers(self) -> tuple[int, ...]:
        """The last layer of each kind."""
        last = {kind: layer for layer, kind in enumerate(self.kind_of_layer)}
        return tuple(last[kind] for kind in range(len(last)))

    @cached_property
    def ends_of_kinds(self) -> tuple[int, ...]:
        """The first and the last layer of each kind that a backward pass reaches."""
        layers = range(self.first_trained, self.layers)
        firsts = {self.kind_of_layer[layer]: layer for layer in reversed(layers)}
        lasts = {self.kind_of_layer[layer]: layer for layer in layers}
        return (*firsts.values(), *lasts.values())

    def count_kinds(self, *stretches: tuple[int, int]) -> tuple[int, ...]:
        """Return how many layers of each kind there are in ranges [start, stop) of layers."""
        if (counts := self._kinds_of_stretches.get(stretches)) is None:
            layers = [kind for start, stop in stretches for kind in self.kind_of_layer[start:stop]]
            counts = tuple(layers.count(kind) for kind in range(len(self.layer_kinds)))
            self._kinds_of_stretches[stretches] = counts
        return counts

    @cached_property
    def _kinds_of_stretches(self) -> dict[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """The results of `count_kinds`: a cache."""
        return {}

    @cached_property
    def mixers(self) -> dict[Mixer, int]:
        """The kinds of mixers, with the number of layers of each kind."""
        return _sum_counts((layer.mixer, layer.count) for layer in self.stack)

    @cached_property
    def attention_mixers(self) -> dict[AttentionMixer, int]:
        """The kinds of attention, with the number of layers of each kind."""
        return {mixer: count for mixer, count in self.mixers.items() if isinstance(mixer, AttentionMixer)}

    @cached_property
    def recurrent_mixers(self) -> dict[RecurrentMixer, int]:
        """The kinds of recurrent mixers, with the number of layers of each kind."""
        return {mixer: count for mixer, count in self.mixers.items() if isinstance(mixer, RecurrentMixer)}

    @cached_property
    def mlps(self) -> dict[Mlp, int]:
        """The kinds of MLPs, with the number of layers of each kind."""
        return _sum_counts((layer.mlp, layer.count) for layer in self.stack)

    @cached_property
    def experts(self) -> dict[ExpertMlp, int]:
        """The kinds of MLPs with experts, with the number of layers of each kind."""
        return {mlp: count for mlp, count in self.mlps.items() if isinstance(mlp, ExpertMlp)}

    @property
    def mixer(self) -> GroupedQueryAttention | MultiHeadLatentAttention:
        """The attention of all layers, for engines that need equal layers.

        Raises ValueError if layers have different mixers.
        """
        (mixer,) = self.mixers
        assert isinstance(mixer, GroupedQueryAttention | MultiHeadLatentAttention)
        return mixer

    @property
    def expert_mlp(self) -> ExpertMlp | None:
        """The experts of all layers that have experts, for engines that need equal ones.

        Raises ValueError if layers have different experts.
        """
        (experts,) = self.experts or (None,)
        return experts

    @cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have experts."""
        return tuple(
            layer for layer, kind in enumerate(self.kind_of_layer) if isinstance(self.layer_kinds[kind].mlp, ExpertMlp)
        )

    @cached_property
    def route_length(self) -> int:
        """The number of experts that routers choose for a token, in all layers together."""
        return sum(count * experts.active for experts, count in self.experts.items())

    @cached_property
    def fewest_heads(self) -> int:
        """The number of heads of the layers that have the fewest heads."""
        return min(mixer.heads for mixer in self.mixers if mixer.heads)

    @cached_property
    def query_key_size(self) -> int:
        """The number of elements of a token's queries and keys, in all layers together."""
        return sum(count * mixer.query_key_size for mixer, count in self.mixers.items())

    def count_scan_flop(self, decode: bool) -> int:
        """Return the FLOP per token of all recurrent layers, without their projections."""
        return sum(count * mixer.count_scan_flop(decode) for mixer, count in self.recurrent_mixers.items())

    @cached_property
    def halves(self) -> int:
        """The number of mixers and of MLPs, in all layers together."""
        return sum(layer.count * layer.halves for layer in self.stack)

    def count_capped(self, tokens: float) -> float:
        """Return how many attention scores of a sequence no fused kernel computes.

        The sequence has `tokens` tokens. The result is the sum over all layers.
        """
        return sum(
            count * mixer.heads * tokens**2 / 2
            for mixer, count in self.mixers.items()
            if isinstance(mixer, GroupedQueryAttention) and mixer.scores_itself
        )

    @cached_property
    def mlp_width(self) -> int:
        """The intermediate size that a token passes through, in all layers together."""
        return sum(count * mlp.width for mlp, count in self.mlps.items())

    @cached_property
    def weights(self) -> tuple[Tensor, ...]:
        """The tensors that an engine shards, in the model's dtype: all but the buffers."""
        return tuple(tensor for tensor in self.tensors if tensor.role != "buffer")

    @cached_property
    def trained(self) -> tuple[Tensor, ...]:
        """The tensors that an update changes: they have gradients and optimizer states."""
        return tuple(tensor for tensor in self.tensors if tensor.is_trained)

    @cached_property
    def first_trained(self) -> int:
        """The lowest layer that a backward pass reaches: no weight below it is trained."""
        return max(0, min((tensor.layer for tensor in self.trained), default=self.layers))

    @cached_property
    def frozen_names(self) -> frozenset[str]:
        """The names of the weights that only the first resharding delivers."""
        return frozenset(tensor.name for tensor in self.weights if tensor.frozen)

    @cached_property
    def backward_share(self) -> float:
        """The FLOP of a backward pass, divided by those of a forward pass.

        The result is 2 if all weights are trained. One half is for gradients of the inputs of the layers that the pass
        reaches, the other half for gradients of trained weights.
        """
        layers = [tensor for tensor in self.weights if 0 <= tensor.layer < self.layers]
        trained = sum(tensor.elements for tensor in layers if tensor.is_trained)
        return 1 - self.first_trained / self.layers + trained / sum(tensor.elements for tensor in layers)

    @property
    def moved(self) -> tuple[Tensor, ...]:
        """The tensors that every resharding delivers.

        The first one also delivers the frozen weights.
        """
        return self.trained

    @cached_property
    def saved(self) -> tuple[Tensor, ...]:
        """The tensors in a checkpoint and in an exported folder.

        These are the trained weights of a model with an adapter, or else all weights. So weights that `freeze` names
        are saved with the trained ones, and a run can resume with other frozen weights.
        """
        return self.trained if self.lora else self.weights

    @cached_property
    def buffers(self) -> tuple[Tensor, ...]:
        """The constants, such as the biases that correct a router's scores."""
        return tuple(tensor for tensor in self.tensors if tensor.role == "buffer")

    @cached_property
    def kinds(self) -> tuple[TensorKind, ...]:
        """The kinds of the weights."""
        return group_by_kind(self.weights)

    @cached_property
    def trained_kinds(self) -> tuple[TensorKind, ...]:
        """The kinds of the trained weights.

        If all weights are trained, it is the same object as `kinds`, so that caches find it at once.
        """
        return TensorKinds(kind for kind in self.kinds if kind.tensor.is_trained) if self.frozen_kinds else self.kinds

    @cached_property
    def frozen_kinds(self) -> tuple[TensorKind, ...]:
        return TensorKinds(kind for kind in self.kinds if kind.tensor.frozen)

    @cached_property
    def with_frozen(self) -> dict[tuple[str, ...], Model]:
        """This model with frozen weights, by what `freeze` states (freezing.py); a cache."""
        return {}

    @cached_property
    def with_adapter(self) -> dict[tuple[Lora, bool], Model]:
        """This model with an adapter, by the arguments of `adapt` (lora.py); a cache."""
        return {}

    @cached_property
    def scoring(self) -> Model:
        """This model, but with a head that returns one number per token instead of logits.

        Workers of the kinds `value` and `reward_model` use this architecture.
        """
        head = Tensor(HEAD, (1, self.hidden), layer=self.layers, layers=self.layers)
        body = tuple(
            tensor if not tensor.tied else replace(tensor, tied=False)
            for tensor in self.tensors
            if tensor.name != LOGITS
        )
        return replace(self, tensors=(*body, head), tied=False, scores=True)

    def list_lacking(self, features: Container[str]) -> list[str]:
        """Return the features of this model that are not in `features`, in words."""
        return [FEATURES.get(feature, feature) for feature in self.features if feature not in features]

    @cached_property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @cached_property
    def fused(self) -> dict[str, list[str]]:
        """For each module of the files that is several here, their names."""
        parts: dict[str, list[str]] = {}
        for tensor in self.tensors:
            if tensor.fused and tensor.role == "base":
                module = tensor.name.split(".")[-2]
                if module not in parts.setdefault(tensor.fused, []):
                    parts[tensor.fused].append(module)
        return parts

    @cached_property
    def adapted(self) -> frozenset[str]:
        """The projections with an adapter; those that the files fuse are separate."""
        targets = self.lora.targets if self.lora else ()
        return frozenset(part for target in targets for part in self.fused.get(target, [target]))

    @cached_property
    def shapes_in_files(self) -> dict[str, list[int]]:
        """The shape of each tensor in the model's files, by its name there."""
        shapes: dict[str, list[int]] = {}
        for tensor in self.tensors:
            for name, _, box in tensor.in_files(full_box(tensor.shape)):
                shapes[name] = [stop for _, stop in box]  # the last part of a fused tensor ends where the tensor ends
        return shapes

    @cached_property
    def largest(self) -> int:
        """The number of elements of the model's largest tensor."""
        return max((tensor.elements for tensor in self.weights), default=0)

    @cached_property
    def largest_read(self) -> int:
        """The number of elements of the largest tensor in the model's files.

        The files of most families have a separate tensor for each expert. A tensor in files can be several here.
        """
        sizes: Counter[str] = Counter()
        for tensor in self.weights:
            sizes[tensor.name_in_files] += tensor.elements // (tensor.shape[0] if tensor.in_files_by_expert else 1)
        return max(sizes.values(), default=0)

    @cached_property
    def active_parameters(self) -> int:
        """The number of parameters that are active for one token."""
        inactive: Counter[ExpertMlp] = Counter()
        for tensor in self.tensors:
            mlp = self.layer_kinds[self.kind_of_layer[tensor.layer]].mlp if tensor.experts else None
            if isinstance(mlp, ExpertMlp):
                inactive[mlp] += tensor.elements
        return self.parameters - sum(
            routed - routed * experts.active // experts.number for experts, routed in inactive.items()
        )


def _sum_counts(counted: Iterable[tuple[Kind, int]]) -> dict[Kind, int]:
    """Return the distinct kinds, in order, each with the sum of its counts."""
    counts: dict[Kind, int] = {}
    for kind, count in counted:
        counts[kind] = counts.get(kind, 0) + count
    return counts
