"""LoRA adapters of models (arXiv:2106.09685).

An adapter has two small matrices for each of some projections. A projection with the weight W [out, in] computes
W x + alpha / rank * B A x, with A [rank, in] and B [out, rank]. Only A and B are trained. In files, they are
`lora_A.weight` and `lora_B.weight` behind the name of the projection, as in the library PEFT.

Projections that the files fuse, such as `qkv_proj`, have one A. Each of them has its own rows of B.

Invariant: a model with an adapter has the same tensors as before, all frozen but a score head. The tensors of the
adapter follow the weight that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from ..sharding.layout import full_box
from ..sharding.tensors import Tensor
from .architecture import HEAD, Model
from .lora_settings import Lora

ALL_LINEAR = "all_linear"
RANK = 16  # if a program states none
PROJECTION = "_proj"
RECURRENT_INPUTS = "in_proj"  # how fused projections of recurrent mixers begin
DOWN = ".lora_A.weight"
UP = ".lora_B.weight"


@dataclass(frozen=True)
class StatedLora:
    """The settings of an adapter that a program states.

    None stands for a setting that is left out.
    """

    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] | None = None
    dropout: float = 0.0

    def __str__(self) -> str:
        stated = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}
        texts = (f"{name} = {format_setting(value)}" for name, value in stated.items())
        return f"lora({', '.join(texts)})" if stated else "lora"

    def resolve(self, initial: Lora | None, seed: int) -> Lora:
        """Return the adapter.

        Settings that are left out are those of the adapter `initial`. Without it, they have their defaults.
        """
        if initial is not None:
            return replace(initial, dropout=self.dropout, seed=seed)
        rank = self.rank or RANK
        targets = (ALL_LINEAR,) if self.targets is None else self.targets
        return Lora(rank, self.alpha or 2.0 * rank, targets, self.dropout, seed)


def format_setting(value: float | tuple[str, ...] | list[str]) -> str:
    """Return the value of a setting of `lora(…)`, as a program states it."""
    return f"[{', '.join(value)}]" if isinstance(value, tuple | list) else f"{value:g}"


class AdaptedWeight(NamedTuple):
    """The weight of a projection, and the names of the two tensors of its adapter."""

    weight: Tensor
    down: str
    up: str


def adapt(model: Model, lora: Lora | None, merged: bool = False) -> Model:
    """Return the model with an adapter.

    The adapter of the result names its targets, in the order of a layer. If it is `merged` into the weights before an
    engine computes with them, the engine needs no feature for it.
    """
    if lora is None:
        return model
    if (lora, merged) not in model.with_adapter:
        tensors = tuple(part for tensor in model.tensors for part in _iterate_adapted(tensor, lora))
        added = ("lora", "lora_dropout") if lora.dropout else ("lora",)
        features = model.features if merged else (*model.features, *added)
        named = replace(lora, targets=tuple(list_targets(model, lora.targets)))
        model.with_adapter[lora, merged] = replace(model, tensors=tensors, lora=named, base=model, features=features)
    return model.with_adapter[lora, merged]


def list_targets(model: Model, stated: tuple[str, ...]) -> list[str]:
    """Return the projections of a model that `targets` names, in the order of a layer."""
    return [name for name in list_projections(model) if {ALL_LINEAR, name} & {*stated}]


def list_adapted(model: Model) -> list[AdaptedWeight]:
    """Return the weights of a model that have an adapter."""
    names = {tensor.name for tensor in model.tensors if tensor.role == "adapter"}
    pairs = (_name_pair(tensor) for tensor in model.weights if tensor.role == "base")
    return [pair for pair in pairs if pair.down in names]


def is_adapter(name: str) -> bool:
    """Return whether a tensor of this name belongs to an adapter."""
    return name.endswith((DOWN, UP))


def list_projections(model: Model) -> list[str]:
    """Return the names that `targets` can have, such as `q_proj`.

    The order is that of a layer.
    """
    return list(dict.fromkeys(_projection(tensor) for tensor in model.weights if is_projection(tensor)))


def list_left_out(model: Model) -> list[str]:
    """Return the names of projections that can have no adapter.

    They are those of experts that have one tensor for all, without a module of their own; those that the files name
    otherwise, since no other library would read an adapter of them; and the fused inputs of recurrent mixers.
    """
    experts = (tensor.name.rpartition(".")[2] for tensor in model.weights if tensor.experts and len(tensor.shape) == 3)
    others = (
        tensor.name.split(".")[-2] if tensor.file_name else tensor.fused
        for tensor in model.weights
        if _is_left_out(tensor)
    )
    names = [name for name in experts if name != "weight"] + [name for name in others if PROJECTION in name]
    return list(dict.fromkeys(names))


def is_projection(tensor: Tensor) -> bool:
    """Return whether a tensor is a projection's weight, which can have an adapter."""
    is_linear = tensor.name.endswith(".weight") and PROJECTION in _projection(tensor)
    return tensor.role == "base" and is_linear and not _is_left_out(tensor)


def _is_left_out(tensor: Tensor) -> bool:
    return tensor.name.endswith(".weight") and bool(tensor.file_name or tensor.fused.startswith(RECURRENT_INPUTS))


def name_module(tensor: Tensor) -> str:
    """Return the name that the files have for a weight's module.

    For experts, it is the module of the first one.
    """
    name, _, _ = next(tensor.in_files(full_box(tensor.shape)))
    return name.removesuffix(".weight")


def _projection(tensor: Tensor) -> str:
    return tensor.fused or tensor.name.removesuffix(".weight").rsplit(".", 1)[-1]


def _name_pair(tensor: Tensor) -> AdaptedWeight:
    stem = tensor.name.removesuffix(".weight")
    shared = f"{stem.rpartition('.')[0]}.{tensor.fused}" if tensor.fused else stem
    return AdaptedWeight(tensor, shared + DOWN, stem + UP)


def _iterate_adapted(tensor: Tensor, lora: Lora) -> Iterator[Tensor]:
    """Yield a tensor of the model, frozen, and the tensors of its adapter.

    Tensor parallelism shards the tensors of the adapter like the weight: B if the weight's output is sharded, A if its
    input is. Each rank has a copy of the other one.
    """
    if tensor.role == "buffer" or tensor.name == HEAD:
        yield tensor
        return
    yield replace(tensor, frozen=True)
    if not is_projection(tensor) or not {ALL_LINEAR, _projection(tensor)} & {*lora.targets}:
        return
    *experts, rows, columns = tensor.shape
    output = len(experts)
    pair = _name_pair(tensor)
    for name, shape, dim in ((pair.down, (lora.rank, columns), output + 1), (pair.up, (rows, lora.rank), output)):
        is_down = name == pair.down
        if is_down and tensor.start:
            continue  # it follows the first of the projections that the files fuse
        sharded = tensor.tp_dim == dim
        yield replace(
            tensor,
            name=name,
            shape=(*experts, *shape),
            tp_dim=dim if sharded else -1,
            unit=tensor.unit if sharded else 1,
            shared=tensor.shared and sharded,
            fused="" if is_down else tensor.fused,
            start=0 if is_down else tensor.start,
            role="adapter",
        )
