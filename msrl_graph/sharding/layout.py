"""Parallel layouts: which box of which tensor a rank holds.

Invariant: the boxes of one tensor on the ranks of one side are equal or apart, and those of one model replica cover the
tensor exactly once. A box is a range [start, stop) in each dim; a rank that holds nothing of a tensor has an empty box.
Ranks are numbered 0 .. devices-1 within their placement as Megatron numbers them (arXiv:2104.04473): tp fastest, then
cp, dp, and pp slowest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from ..diagnostics import NOWHERE, Span
from .device_range import DeviceRange

Box = tuple[tuple[int, int], ...]
# The axes of a mesh, as programs name them.
AXES = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")


class Coordinates(NamedTuple):
    """Where a rank stands on each axis; `etp`, `ep` and `edp` number the same ranks of a stage for the experts."""

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

    Experts lie on the tp x cp x dp ranks of a stage in a mesh of their own, etp x ep x edp. `stages` are the layers of
    each of the pp x vpp chunks, where they are stated; chunk c is on stage c % pp.

    `inner` splits dp in two: `inner` data-parallel replicas lie next to each other *inside* the tensor-parallel groups,
    so that ranks that hold the parts of one generation shard under the update layout are neighbours, and resharding
    gathers in groups of `inner` (the idea of HybridFlow, arXiv:2409.19256, section 5.3). It numbers ranks; it changes
    no result.
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
        """Ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def edp(self) -> int:
        """Copies of each expert, where ep x etp divides the stage."""
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
        # Experts count the ranks as the engine does, to which `inner` is unknown.
        index = (dp * self.cp + cp) * self.tp + tp
        return Coordinates(tp, cp, dp, pp, index % self.etp, index // self.etp % self.ep, index // (self.etp * self.ep))

    def rank(self, tp: int, dp: int, cp: int = 0, pp: int = 0) -> int:
        """The inverse of `coordinates`."""
        outer = pp * (self.dp // self.inner) + dp // self.inner
        return ((outer * self.cp + cp) * self.tp + tp) * self.inner + dp % self.inner

    def chunks(self, layers: int) -> tuple[int, ...]:
        """The layers of each chunk: as stated, else equal; what is over goes to the middle, since embedding and head
        are at the ends."""
        return self.stages or _even(self.pp * self.vpp, layers)

    def stage_layers(self, stage: int, layers: int) -> tuple[tuple[int, int], ...]:
        """The stretches [start, stop) of layers on a stage, one a chunk."""
        return _stretches_of(self.chunks(layers), self.pp)[stage]

    def most_layers(self, layers: int) -> int:
        """The layers of the stage that has the most."""
        return max(sum(stop - start for start, stop in self.stage_layers(s, layers)) for s in range(self.pp))

    def stage_of(self, layer: int, layers: int) -> int:
        """The stage of a layer; the embedding is layer -1, on the first, norm and head are layer `layers`, on the
        last."""
        if layer < 0:
            return 0
        found = _stages_of(self.chunks(layers), self.pp)
        return found[layer] if layer < len(found) else self.pp - 1

    def __str__(self) -> str:
        sizes = [(k, getattr(self, k)) for k in AXES]
        return " ".join(f"{k}{v}" for k, v in sizes if v > 1 or k in ("tp", "dp"))


@lru_cache(maxsize=1 << 10)
def _even(number: int, layers: int) -> tuple[int, ...]:
    each, over = divmod(layers, number)
    first = (number - over) // 2
    return tuple(each + (first <= i < first + over) for i in range(number))


@lru_cache(maxsize=1 << 10)
def _stretches_of(chunks: tuple[int, ...], pp: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """By stage, the stretches of layers that are on it."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(pp)]
    start = 0
    for i, number in enumerate(chunks):
        found[i % pp].append((start, start + number))
        start += number
    return tuple(map(tuple, found))


@lru_cache(maxsize=1 << 10)
def _stages_of(chunks: tuple[int, ...], pp: int) -> tuple[int, ...]:
    """The stage of each layer."""
    return tuple(i % pp for i, number in enumerate(chunks) for _ in range(number))


@dataclass(frozen=True)
class Tensor:
    """A named weight of a model, with what may divide it.

    `tp_dim`: the dim that tensor parallelism divides (expert tensor parallelism, for experts), -1 where every rank
    holds a copy; `unit` rows of it (a head) stay together. `shared` units are copied where there are more ranks than
    units (key-value heads). `padded`: a vocabulary, which engines pad. `experts`: dim 0 counts the experts of a layer,
    which ep divides; the safetensors files hold one tensor an expert, `name` with the number at its `*`. `layer`, of
    `layers`: -1 for the embedding, `layers` for norm and head; a `tied` embedding is on the last stage too.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int = -1
    unit: int = 1
    shared: bool = False
    padded: bool = False
    experts: bool = False
    tied: bool = False
    layer: int = 0
    layers: int = 1

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def in_files(self, box: Box) -> Iterator[tuple[str, tuple[int, ...], Box]]:
        """What of a box is where in files: a name, which part of the box it is (all of it, or one expert's), and the
        box there."""
        if not self.experts:
            yield self.name, (), box
            return
        for i, expert in enumerate(range(*box[0])):
            yield self.name.replace("*", str(expert)), (i,), box[1:]

    @cached_property
    def alone(self) -> Tensor:
        """What of it boxes depend on, wherever it stands in the model."""
        return self if not (self.name or self.layer) and self.layers == 1 else replace(self, name="", layer=0, layers=1)


@dataclass(frozen=True)
class Side(DeviceRange):
    """How a node's weights lie: its layout, whether they are `divided` over dp (ZeRO 3), the `multiple` to which its
    engine pads a vocabulary, and the devices of its ranks."""

    layout: Layout
    divided: bool = False
    multiple: int = 1
    first: int = 0
    each: int = 0

    @property
    def devices(self) -> int:
        return self.layout.devices


class TensorKind(NamedTuple):
    """Tensors that differ in name and layer alone: `each` of them in every layer of [start, stop)."""

    tensor: Tensor
    start: int
    stop: int
    each: int

    def on(self, side: Side, stage: int) -> int:
        """How many of them a stage holds."""
        return self.each * self.layers_on(side.layout)[stage]

    def layers_on(self, layout: Layout) -> tuple[int, ...]:
        """How many of the layers each stage holds; of an embedding or a head, one or none."""
        return _layers_on(
            self.start, self.stop, self.tensor.layers, self.tensor.tied, layout.chunks(self.tensor.layers), layout.pp
        )


@lru_cache(maxsize=1 << 12)
def _layers_on(start: int, stop: int, layers: int, tied: bool, chunks: tuple[int, ...], pp: int) -> tuple[int, ...]:
    if start < 0 or start >= layers:
        return tuple(int(stage == (0 if start < 0 else pp - 1) or (tied and stage == pp - 1)) for stage in range(pp))
    return tuple(
        sum(max(0, min(stop, b) - max(start, a)) for a, b in stretches) for stretches in _stretches_of(chunks, pp)
    )


def nameless(tensor: Tensor) -> Tensor:
    """A tensor without name and layer: what tensors of a kind have in common."""
    return replace(tensor, name="", layer=0)


class TensorKinds(tuple[TensorKind, ...]):
    """Kinds that are looked up by often: hashed once."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()


def kinds(tensors: Iterable[Tensor]) -> tuple[TensorKind, ...]:
    """The kinds of a model's tensors: what holds for one holds for all of its kind, but for the stage that it is on."""
    found: dict[Tensor, tuple[Tensor, dict[int, int]]] = {}
    for tensor in tensors:
        _, counts = found.setdefault(nameless(tensor), (tensor, {}))
        counts[tensor.layer] = counts.get(tensor.layer, 0) + 1
    return TensorKinds(kind for tensor, counts in found.values() for kind in _stretches(tensor, counts))


def _stretches(tensor: Tensor, counts: dict[int, int]) -> Iterator[TensorKind]:
    """A kind for each stretch of layers that have equally many; embedding and head stand alone, since they go by stages
    of their own."""
    stretch: list[int] = []
    for layer in [*sorted(counts), None]:
        ends = stretch and (
            layer is None
            or layer != stretch[-1] + 1
            or counts[layer] != counts[stretch[0]]
            or stretch[-1] < 0
            or layer == tensor.layers
        )
        if ends:
            yield TensorKind(replace(tensor, layer=stretch[0]), stretch[0], stretch[-1] + 1, counts[stretch[0]])
            stretch = []
        if layer is not None:
            stretch.append(layer)


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """The index-th of `parts` stretches of [0, length), ceil-sized as torch.chunk cuts them: the last may be short or
    empty."""
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def full(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def stages(tensor: Tensor, layout: Layout) -> tuple[int, ...]:
    """The pipeline stages that hold a tensor."""
    if layout.pp == 1:
        return (0,)
    own = layout.stage_of(tensor.layer, tensor.layers)
    return (own, layout.pp - 1) if tensor.tied and own != layout.pp - 1 else (own,)


def shard(tensor: Tensor, side: Side, rank: int) -> Box:
    """The box of `tensor` that `rank` holds: of its experts its tensor-parallel slice, and where weights are divided
    over dp, of that the stretch of dim 0."""
    layout = side.layout
    at = layout.coordinates(rank)
    if layout.pp > 1 and at.pp not in stages(tensor, layout):
        return ((0, 0),) * len(tensor.shape)
    return box_at(tensor, side, (at.etp, at.ep, at.edp) if tensor.experts else (at.tp, 0, at.dp))


@lru_cache(maxsize=1 << 16)
def box_at(tensor: Tensor, side: Side, at: tuple[int, int, int]) -> Box:
    """The box at (tp, 0, dp), for experts at (etp, ep, edp), whatever the stage."""
    (tp, ep, dp), layout = at, side.layout
    box = list(full(tensor.shape))
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


def owns(tensor: Tensor, side: Side, rank: int) -> bool:
    """Whether `rank` is the first of those that hold its box."""
    layout = side.layout
    at = side.layout.coordinates(rank)
    if layout.pp > 1 and at.pp != stages(tensor, layout)[0]:
        return False
    tp, ranks = (at.etp, layout.etp) if tensor.experts else (at.tp, layout.tp)
    units = tensor.shape[tensor.tp_dim] // tensor.unit if tensor.tp_dim >= 0 else 1
    copies = tensor.tp_dim < 0 or (tensor.shared and ranks > units)
    if copies and tp and tp * units // ranks == (tp - 1) * units // ranks:
        return False
    return side.divided or at.edp == 0 if tensor.experts else at.cp == 0 and (side.divided or at.dp == 0)


def elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def overlap(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None."""
    box = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def within(part: Box, whole: Box) -> Box:
    """`part` in coordinates relative to `whole`'s start."""
    return tuple((p[0] - w[0], p[1] - w[0]) for p, w in zip(part, whole, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    """The index of a box's elements in its tensor."""
    return tuple(slice(a, b) for a, b in box)


def stage_elements(found: Iterable[TensorKind], side: Side, stage: int) -> int:
    """Elements on the busiest rank of a stage: that of coordinates 0, since the first of ceil-sized stretches is never
    the shorter one."""
    return sum(stage_parts(_kept(found), side)[stage])


@lru_cache(maxsize=1 << 14)
def stage_parts(found: tuple[TensorKind, ...], side: Side) -> tuple[tuple[int, int], ...]:
    """By stage, elements on its busiest rank: of what every token passes, and of experts."""
    sizes: dict[tuple[tuple[int, ...], bool], int] = {}  # by how many a stage holds
    for kind in found:
        key = kind.layers_on(side.layout), kind.tensor.experts
        sizes[key] = sizes.get(key, 0) + kind.each * elements(box_at(kind.tensor, side, (0, 0, 0)))
    sums = [[0, 0] for _ in range(side.layout.pp)]
    for (numbers, experts), size in sizes.items():
        for stage, number in enumerate(numbers):
            sums[stage][experts] += size * number
    return tuple((dense, routed) for dense, routed in sums)


def _kept(found: Iterable[TensorKind]) -> tuple[TensorKind, ...]:
    return found if isinstance(found, tuple) else tuple(found)


def held(found: Iterable[TensorKind], side: Side) -> int:
    """Elements on the busiest rank of all."""
    return max(map(sum, stage_parts(_kept(found), side)))
