"""Parallel layouts: which box of which tensor a rank holds, and how two layouts overlap.

Invariant: the boxes of one model replica's ranks cover every tensor exactly once (replicated tensors once a rank). A box is a range
[start, stop) in each dim. Ranks of a layout are numbered 0 .. devices-1 within its placement; classes of equal ranks are never spelt
out rank by rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .diagnostics import NOWHERE, Span

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes; `zero` is the ZeRO stage (arXiv:1910.02054) over dp.

    `inner` splits dp in two: `inner` data-parallel replicas lie next to each other *inside* the tensor-parallel groups, so that
    ranks that hold the parts of one generation shard under the update layout are neighbours, and resharding gathers in groups of
    `inner` (the idea of HybridFlow, arXiv:2409.19256, section 5.3). It numbers ranks; it changes no result.
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
    span: Span = NOWHERE

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(tp, dp) coordinates of a rank; tp runs fastest outside `inner`."""
        near = rank % self.inner
        tp = rank // self.inner % self.tp
        return tp, rank // (self.inner * self.tp) * self.inner + near

    def rank(self, tp: int, dp: int) -> int:
        """The inverse of `coordinates`."""
        return (dp // self.inner * self.tp + tp) * self.inner + dp % self.inner

    def __str__(self) -> str:
        sizes = [(k, getattr(self, k)) for k in ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")]
        return " ".join(f"{k}{v}" for k, v in sizes if v > 1 or k in ("tp", "dp"))


@dataclass(frozen=True)
class Tensor:
    """A named weight of a model; `tp_dim` is the dim that tensor parallelism divides, -1 where every rank holds a copy."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int = -1

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """The index-th of `parts` stretches of [0, length), ceil-sized as torch.chunk cuts them: the last may be short or empty."""
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def full(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def shard(tensor: Tensor, layout: Layout, rank: int, divided: bool) -> Box:
    """The box of `tensor` that `rank` holds: its tensor-parallel slice and, where weights are `divided` over dp (ZeRO 3), of that
    the stretch of dim 0."""
    tp, dp = layout.coordinates(rank)
    box = list(full(tensor.shape))
    if tensor.tp_dim >= 0:
        box[tensor.tp_dim] = chunk(tensor.shape[tensor.tp_dim], layout.tp, tp)
    if divided and layout.dp > 1:
        start, stop = box[0]
        low, high = chunk(stop - start, layout.dp, dp)
        box[0] = (start + low, start + high)
    return tuple(box)


def owns(tensor: Tensor, layout: Layout, rank: int, divided: bool) -> bool:
    """Whether `rank` is the first of those that hold its box."""
    tp, dp = layout.coordinates(rank)
    return (tensor.tp_dim >= 0 or tp == 0) and (divided or dp == 0)


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


def kinds(tensors: Iterable[Tensor]) -> dict[Tensor, int]:
    """Tensors without their names, and how many there are of each: what holds for one holds for all of its kind."""
    return {Tensor("", shape, tp_dim): n for (shape, tp_dim), n in Counter((t.shape, t.tp_dim) for t in tensors).items()}


def held(tensors: Iterable[Tensor], layout: Layout, divided: bool, rank: int = 0) -> int:
    """Elements that `rank` holds; rank 0 is the busiest, since the first of ceil-sized stretches is never the shorter one."""
    return sum(n * elements(shard(t, layout, rank, divided)) for t, n in kinds(tensors).items())


def period(layout: Layout, divided: bool) -> int:
    """The number of consecutive ranks after which the boxes repeat: dp makes no difference unless it divides weights."""
    return layout.devices if divided and layout.dp > 1 else layout.inner * layout.tp


def block_boxes(tensor: Tensor, layout: Layout, ranks: range, divided: bool) -> set[Box]:
    """The different boxes of `tensor` that `ranks` hold, without empty ones. Those of a layout are equal or apart."""
    boxes = {shard(tensor, layout, rank, divided) for rank in ranks[: period(layout, divided)]}
    return {box for box in boxes if elements(box)}


def gather_group(tensors: Iterable[Tensor], source: Layout, source_divided: bool, target: Layout, target_divided: bool) -> int:
    """The smallest g that divides the devices, such that in each aligned block of g consecutive ranks the block's `source` boxes cover
    every rank's `target` box: an all-gather among g neighbours is then enough to reshard.

    Both layouts are of the same number of devices. All of the devices always suffice.
    """
    devices = target.devices
    distinct = tuple(kinds(tensors))
    # Beyond this number of ranks, blocks repeat.
    repeat = math.lcm(period(source, source_divided), period(target, target_divided))
    for g in (g for g in range(1, devices) if devices % g == 0):
        starts = range(0, min(devices, math.lcm(g, repeat)), g)
        if all(_covers(t, source, source_divided, target, target_divided, range(s, s + g)) for s in starts for t in distinct):
            return g
    return devices


def _covers(tensor: Tensor, source: Layout, source_divided: bool, target: Layout, target_divided: bool, ranks: range) -> bool:
    have = block_boxes(tensor, source, ranks, source_divided)
    want = block_boxes(tensor, target, ranks, target_divided)
    if have >= want:
        return True
    # Boxes of `have` are apart, so covering is a matter of counting; too little in all is seen at once.
    amount = sum(map(elements, have))
    if any(elements(box) > amount for box in want):
        return False
    return all(sum(elements(o) for h in have if (o := overlap(box, h))) == elements(box) for box in want - have)


def replicas(layout: Layout, divided: bool, first: int, per_host: int) -> list[list[int]]:
    """The ranks of each host that hold the same boxes, together; rank 0 is on device `first`."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.devices):
        tp, dp = layout.coordinates(rank)
        found.setdefault(((first + rank) // per_host, tp, dp if divided else 0), []).append(rank)
    return list(found.values())


def transfers(
    tensor: Tensor, source: Layout, source_divided: bool, target: Layout, target_divided: bool, takers: Iterable[int]
) -> list[tuple[int, int, Box]]:
    """What moves between two pools: (source rank, target rank, box). Each of the target ranks `takers` gets every element of its box once;
    source ranks that hold the same box take turns."""
    holders: dict[Box, list[int]] = {}
    for rank in range(source.devices):
        holders.setdefault(shard(tensor, source, rank, source_divided), []).append(rank)
    wanted = [(rank, shard(tensor, target, rank, target_divided)) for rank in takers]
    moves = []
    for box, ranks in holders.items():
        found = [(taker, common) for taker, want in wanted if (common := overlap(box, want)) is not None]
        moves += [(ranks[i % len(ranks)], taker, common) for i, (taker, common) in enumerate(found)]
    return moves


def left_behind(tensors: Iterable[Tensor], source: Layout, source_divided: bool, target: Layout, target_divided: bool) -> int:
    """Elements, over all devices, that naive resharding leaves beside the generation weights (arXiv:2507.19017, figure 3 and eq. 3).

    A rank whose target box lies within its source box generates from the buffer that is there, and the rest of that buffer is useless;
    where it does not, a new buffer is made and the whole old one is useless.
    """
    devices = target.devices
    repeat = min(devices, math.lcm(period(source, source_divided), period(target, target_divided)))
    total = 0
    for tensor, number in kinds(tensors).items():
        for rank in range(repeat):
            old, new = shard(tensor, source, rank, source_divided), shard(tensor, target, rank, target_divided)
            kept = elements(new) if overlap(old, new) == new else 0
            total += number * (elements(old) - kept) * (devices // repeat)
    return total
