"""Parallel layouts: which box of which tensor a rank holds.

A box is a range [start, stop) in each dim of a tensor. Invariant: under one layout, the boxes of a tensor on any two
ranks are equal or disjoint, and the boxes of one model replica cover the tensor exactly once. A rank that holds nothing
of a tensor has an empty box. Ranks of a placement are numbered from 0 as Megatron numbers them (arXiv:2104.04473): tp
fastest, then cp, dp, and pp slowest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from ..diagnostics import NOWHERE, Span
from .device_range import DeviceRange
from .tensors import Box, Tensor

# The axes of a mesh, as programs name them.
AXES = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")


class Coordinates(NamedTuple):
    """A rank's index on each axis.

    `tp`, `cp` and `dp` number the ranks of a pipeline stage. For experts, `etp`, `ep` and `edp` number the same ranks.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes; `zero` is the ZeRO stage (arXiv:1910.02054) over dp.

    Experts have a mesh of their own, etp x ep x edp, on the tp x cp x dp ranks of a stage. Layers are cut into pp x vpp
    chunks; chunk c is on stage c % pp. `stages` has the number of layers of each chunk, if stated. `inner` is the
    number of data-parallel replicas whose ranks alternate: `inner` consecutive ranks have the same tp index and
    different dp indices. With a suitable `inner`, the update ranks that hold the parts of one generation shard are
    neighbors, and gather in groups of `inner` (the idea of HybridFlow, arXiv:2409.19256, section 5.3). `inner` changes
    only the order of ranks, and no result.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    zero: int = 1
    inner: int = 1
    stages: tuple[int, ...] = ()
    cp_kind: str = "ring"
    span: Span = field(default=NOWHERE, compare=False)

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def stage_devices(self) -> int:
        """The number of ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """The number of copies of each expert, if ep x etp divides the ranks of a stage."""
        return max(1, self.stage_devices // (self.ep * self.etp))

    def coordinates(self, rank: int) -> Coordinates:
        near = rank % self.inner
        rest = rank // self.inner
        tp = rest % self.tp
        rest = rest // self.tp
        cp = rest % self.cp
        rest = rest // self.cp
        outer = rest % (self.dp // self.inner)
        pp = rest // (self.dp // self.inner)
        dp = outer * self.inner + near
        # Experts number the ranks as the engine does, which does not know `inner`.
        index = (dp * self.cp + cp) * self.tp + tp
        return Coordinates(tp, cp, dp, pp, index % self.etp, index // self.etp % self.ep, index // (self.etp * self.ep))

    def rank(self, tp: int, dp: int, cp: int = 0, pp: int = 0) -> int:
        """Return the rank at the given coordinates (inverse of the method `coordinates`)."""
        outer = pp * (self.dp // self.inner) + dp // self.inner
        return ((outer * self.cp + cp) * self.tp + tp) * self.inner + dp % self.inner

    def chunks(self, layers: int) -> tuple[int, ...]:
        """Return the number of layers of each chunk: as stated, or evenly split.

        Extra layers go to the middle chunks, because embedding and head are at the ends.
        """
        return self.stages or _split_layers(self.pp * self.vpp, layers)

    def stage_layers(self, stage: int, layers: int) -> tuple[tuple[int, int], ...]:
        """Return the layers of each chunk of a pipeline stage, as ranges [start, stop)."""
        return _layers_by_stage(self.chunks(layers), self.pp)[stage]

    def stage_of(self, layer: int, layers: int) -> int:
        """Return the pipeline stage of a layer.

        The embedding is layer -1, on the first stage. The norm and the head are layer `layers`, on the last stage.
        """
        if layer < 0:
            return 0
        stage_by_layer = _stage_by_layer(self.chunks(layers), self.pp)
        return stage_by_layer[layer] if layer < len(stage_by_layer) else self.pp - 1

    def __str__(self) -> str:
        sizes = [(axis, getattr(self, axis)) for axis in AXES]
        return " ".join(f"{axis}{size}" for axis, size in sizes if size > 1 or axis in ("tp", "dp"))


@lru_cache(maxsize=1 << 10)
def _split_layers(number: int, layers: int) -> tuple[int, ...]:
    base, extra = divmod(layers, number)
    first = (number - extra) // 2
    return tuple(base + (first <= i < first + extra) for i in range(number))


@lru_cache(maxsize=1 << 10)
def _layers_by_stage(chunks: tuple[int, ...], pp: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the ranges of layers on each pipeline stage, one range per chunk."""
    by_stage: list[list[tuple[int, int]]] = [[] for _ in range(pp)]
    start = 0
    for i, number in enumerate(chunks):
        by_stage[i % pp].append((start, start + number))
        start += number
    return tuple(map(tuple, by_stage))


@lru_cache(maxsize=1 << 10)
def _stage_by_layer(chunks: tuple[int, ...], pp: int) -> tuple[int, ...]:
    """Return the pipeline stage of each layer."""
    return tuple(i % pp for i, number in enumerate(chunks) for _ in range(number))


@dataclass(frozen=True)
class Side(DeviceRange):
    """How a node's weights are sharded, and the devices of its ranks.

    `divided` means that weights are sharded over dp (ZeRO 3). The engine pads a vocabulary to a multiple of `multiple`.
    """

    layout: Layout
    divided: bool = False
    multiple: int = 1
    first: int = 0
    each: int = 0

    @property
    def devices(self) -> int:
        return self.layout.devices


class TensorKind(NamedTuple):
    """Tensors that differ only in layer, and in their names and places in files.

    `tensor` is one of these tensors. `each` is the number of these tensors in every layer of `stretches`, which are
    ranges [start, stop) of layers.
    """

    tensor: Tensor
    stretches: tuple[tuple[int, int], ...]
    each: int

    @property
    def at_end(self) -> bool:
        """Whether the tensors belong to the embedding or the head."""
        return self.tensor.layer < 0 or self.tensor.layer >= self.tensor.layers

    @property
    def layers(self) -> Iterator[int]:
        return chain.from_iterable(range(*stretch) for stretch in self.stretches)

    def count_on_stage(self, side: Side, stage: int) -> int:
        """Return how many tensors of this kind a pipeline stage holds."""
        return self.each * self.layers_on(side.layout)[stage]

    def layers_on(self, layout: Layout) -> tuple[int, ...]:
        """Return how many of the kind's layers each stage has (embedding, head: 0 or 1)."""
        return _count_layers_by_stage(
            self.stretches, self.tensor.layers, self.tensor.tied, layout.chunks(self.tensor.layers), layout.pp
        )


@lru_cache(maxsize=1 << 12)
def _count_layers_by_stage(
    stretches: tuple[tuple[int, int], ...], layers: int, tied: bool, chunks: tuple[int, ...], pp: int
) -> tuple[int, ...]:
    start = stretches[0][0]
    if start < 0 or start >= layers:
        return tuple(int(stage == (0 if start < 0 else pp - 1) or (tied and stage == pp - 1)) for stage in range(pp))
    return tuple(
        sum(max(0, min(stop, end) - max(start, begin)) for begin, end in of_stage for start, stop in stretches)
        for of_stage in _layers_by_stage(chunks, pp)
    )


def strip_name(tensor: Tensor) -> Tensor:
    """Return a tensor without layer, names, and place in files.

    It is equal for all tensors of a kind.
    """
    return replace(tensor, name="", file_name="", fused="", start=0, layer=0)


class TensorKinds(tuple[TensorKind, ...]):
    """A tuple of tensor kinds that computes its hash once."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()


def group_by_kind(tensors: Iterable[Tensor]) -> tuple[TensorKind, ...]:
    """Return the kinds of a model's tensors."""
    groups: dict[Tensor, tuple[Tensor, dict[int, int]]] = {}
    for tensor in tensors:
        _, counts = groups.setdefault(strip_name(tensor), (tensor, {}))
        counts[tensor.layer] = counts.get(tensor.layer, 0) + 1
    return TensorKinds(kind for tensor, counts in groups.values() for kind in _iterate_kinds(tensor, counts))


def _iterate_kinds(tensor: Tensor, counts: dict[int, int]) -> Iterator[TensorKind]:
    """Yield one TensorKind for all layers with equal numbers of tensors.

    `counts` has, for each layer, the number of tensors of the kind of `tensor`. The embedding and the head are separate
    kinds, because their pipeline stages are different.
    """
    stretches: dict[tuple[int, bool], list[list[int]]] = {}  # by number and whether it is an end
    for layer, number in sorted(counts.items()):
        at_end = not 0 <= layer < tensor.layers
        found = stretches.setdefault((number, at_end), [])
        if found and found[-1][1] == layer and not at_end:
            found[-1][1] = layer + 1
        else:
            found.append([layer, layer + 1])
    for (number, at_end), ranges in stretches.items():
        for some in [[only] for only in ranges] if at_end else [ranges]:
            yield TensorKind(replace(tensor, layer=some[0][0]), tuple((start, stop) for start, stop in some), number)


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return the index-th of `parts` ranges of [0, length), as torch.chunk cuts them.

    All ranges have the same size, rounded up; the last ranges may be shorter or empty.
    """
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def full_box(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def stages(tensor: Tensor, layout: Layout) -> tuple[int, ...]:
    """Return the pipeline stages that hold a tensor."""
    if layout.pp == 1:
        return (0,)
    own = layout.stage_of(tensor.layer, tensor.layers)
    return (own, layout.pp - 1) if tensor.tied and own != layout.pp - 1 else (own,)


def shard(tensor: Tensor, side: Side, rank: int) -> Box:
    """Return the box of `tensor` that `rank` holds.

    The box is the tensor-parallel slice of the rank. For experts, the box contains the rank's own experts, each sharded
    over etp. If weights are sharded over dp, the box is a range of dim 0 of the slice.
    """
    layout = side.layout
    place = layout.coordinates(rank)
    if layout.pp > 1 and place.pp not in stages(tensor, layout):
        return ((0, 0),) * len(tensor.shape)
    return box_at(tensor, side, _locate(tensor, place))


def _locate(tensor: Tensor, place: Coordinates) -> tuple[int, int, int]:
    """Return the coordinates on which the box of a tensor depends."""
    return (place.etp, place.ep, place.edp) if tensor.experts else (place.tp, 0, place.dp)


@lru_cache(maxsize=1 << 16)
def box_at(tensor: Tensor, side: Side, coordinates: tuple[int, int, int]) -> Box:
    """Return the box at the coordinates (tp, 0, dp), for experts at (etp, ep, edp)."""
    tp, ep, dp = coordinates
    layout = side.layout
    box = list(full_box(tensor.shape))
    ranks, replicas = (layout.etp, layout.edp) if tensor.experts else (layout.tp, layout.dp)
    if tensor.experts:
        box[0] = chunk(tensor.shape[0], layout.ep, ep)
    if tensor.tp_dim >= 0:
        length = tensor.shape[tensor.tp_dim]
        units = length // tensor.unit
        if tensor.shared and ranks > units:
            box[tensor.tp_dim] = (tp * units // ranks * tensor.unit, (tp * units // ranks + 1) * tensor.unit)
        elif tensor.padded:
            padded = -(-length // (side.multiple * ranks)) * side.multiple * ranks if side.multiple > 1 else length
            start, stop = chunk(padded, ranks, tp)
            box[tensor.tp_dim] = (min(start, length), min(stop, length))
        else:
            start, stop = chunk(units, ranks, tp)
            box[tensor.tp_dim] = (start * tensor.unit, stop * tensor.unit)
    if side.divided and replicas > 1:
        start, stop = box[0]
        low, high = chunk(stop - start, replicas, dp)
        box[0] = (start + low, start + high)
    return tuple(box)


def find_equal_ranks(tensor: Tensor, side: Side, rank: int, among: Iterable[int]) -> list[int]:
    """Return the ranks among others that hold the same box of a tensor as `rank`.

    They are ranks of the same stage. The result is empty if the box of `rank` is.
    """
    box = shard(tensor, side, rank)
    if not elements(box):
        return []
    stage = side.layout.coordinates(rank).pp
    return [
        other for other in among if side.layout.coordinates(other).pp == stage and shard(tensor, side, other) == box
    ]


@lru_cache(maxsize=1 << 8)
def count_host_elements(tensor_kinds: tuple[TensorKind, ...], side: Side, per_host: int) -> int:
    """Return the number of elements on the host that holds the most.

    Equal boxes of a stage's ranks are counted once on each host. A host has `per_host` devices.
    """
    places: dict[int, set[Coordinates]] = {}
    for rank in range(side.devices):
        places.setdefault(side.device(rank, per_host) // per_host, set()).add(side.layout.coordinates(rank))
    most = 0
    for of_host in places.values():
        total = 0
        for kind in tensor_kinds:
            boxes = {(place.pp, box_at(kind.tensor, side, _locate(kind.tensor, place))) for place in of_host}
            total += sum(kind.count_on_stage(side, stage) * elements(box) for stage, box in boxes)
        most = max(most, total)
    return most


def owns(tensor: Tensor, side: Side, rank: int) -> bool:
    """Return whether `rank` is the first of the ranks that hold its box of `tensor`."""
    layout = side.layout
    place = side.layout.coordinates(rank)
    if layout.pp > 1 and place.pp != stages(tensor, layout)[0]:
        return False
    tp, ranks = (place.etp, layout.etp) if tensor.experts else (place.tp, layout.tp)
    units = tensor.shape[tensor.tp_dim] // tensor.unit if tensor.tp_dim >= 0 else 1
    copies = tensor.tp_dim < 0 or (tensor.shared and ranks > units)
    if copies and tp and tp * units // ranks == (tp - 1) * units // ranks:
        return False
    return side.divided or place.edp == 0 if tensor.experts else place.cp == 0 and (side.divided or place.dp == 0)


def elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def overlap(a: Box, b: Box) -> Box | None:
    """Return the common part of two boxes, or None if they have none."""
    box = tuple((max(one[0], other[0]), min(one[1], other[1])) for one, other in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def relative_box(part: Box, outer: Box) -> Box:
    """Return `part` in coordinates relative to the start of `outer`."""
    return tuple((inside[0] - around[0], inside[1] - around[0]) for inside, around in zip(part, outer, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """Return the slices that select a box from its tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def stage_elements(tensor_kinds: Iterable[TensorKind], side: Side, stage: int) -> int:
    """Return the number of elements on the busiest rank of a pipeline stage.

    The busiest rank has the coordinates 0, because the first range of a dim is never shorter than the other ranges.
    """
    return sum(stage_parts(_as_tuple(tensor_kinds), side)[stage])


@lru_cache(maxsize=1 << 14)
def stage_parts(tensor_kinds: tuple[TensorKind, ...], side: Side) -> tuple[tuple[int, int], ...]:
    """Return the busiest rank's (dense, expert) elements, for each pipeline stage."""
    sizes: dict[tuple[tuple[int, ...], bool], int] = {}  # by how many a stage holds
    for kind in tensor_kinds:
        key = kind.layers_on(side.layout), kind.tensor.experts
        sizes[key] = sizes.get(key, 0) + kind.each * elements(box_at(kind.tensor, side, (0, 0, 0)))
    sums = [[0, 0] for _ in range(side.layout.pp)]
    for (numbers, experts), size in sizes.items():
        for stage, number in enumerate(numbers):
            sums[stage][experts] += size * number
    return tuple((dense, routed) for dense, routed in sums)


def _as_tuple(tensor_kinds: Iterable[TensorKind]) -> tuple[TensorKind, ...]:
    return tensor_kinds if isinstance(tensor_kinds, tuple) else tuple(tensor_kinds)


def count_busiest_elements(tensor_kinds: Iterable[TensorKind], side: Side) -> int:
    """Return the number of elements on the rank that holds the most elements."""
    return max(map(sum, stage_parts(_as_tuple(tensor_kinds), side)))
