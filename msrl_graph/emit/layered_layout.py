"""A layered drawing: positions of boxes and points of arrows.

Its only input is the order of the boxes. Invariant: boxes and labels of a layer never overlap. An arrow that passes a
layer has a place of its own in it, so it crosses neither. Arrows lead from an earlier box to a later one, or are drawn
reversed. The same input gives the same numbers. Method: Sugiyama et al. 1981: ranks, an order by barycentres, positions
by least squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Extent = tuple[float, float]  # width and height
APART = 22.0
BETWEEN = 20.0
SWEEPS = 12
FIRM = 6.0  # the weight of a straight arrow, relative to that of a centred box


@dataclass
class Item:
    """An element of a layer: a box, a label, or an arrow passing through.

    `x`, `y` is its centre.
    """

    width: float
    height: float
    rank: int
    box: bool = False
    x: float = 0.0
    y: float = 0.0
    above: list[Item] = field(default_factory=list)
    below: list[Item] = field(default_factory=list)


@dataclass(frozen=True)
class ArrowRoute:
    """The points of an arrow from start to end, and the centre of its label."""

    points: tuple[tuple[float, float], ...]
    label: tuple[float, float] | None


@dataclass(frozen=True)
class LayeredDrawing:
    """A drawing; `places` are the centres of the boxes."""

    width: float
    height: float
    places: dict[str, tuple[float, float]]
    routes: tuple[ArrowRoute, ...]


def draw(boxes: Mapping[str, Extent], arrows: Sequence[tuple[str, str, Extent]]) -> LayeredDrawing:
    """Draw boxes, given in dependency order, and arrows.

    Arrows come with the extents of their labels (0, 0: none).
    """
    order = {name: i for i, name in enumerate(boxes)}
    ends = [(a, b) if order[a] <= order[b] else (b, a) for a, b, _ in arrows]
    items = {
        n: Item(w, h, rank, box=True) for (n, (w, h)), rank in zip(boxes.items(), _ranks(boxes, ends), strict=True)
    }
    chains: list[list[Item]] = []
    labels: list[Item | None] = []
    every = list(items.values())
    for (a, b), (_, _, extent) in zip(ends, arrows, strict=True):
        first = items[a]
        last = items[b]
        chain = [Item(4.0, 0.0, r) for r in range(first.rank + 1, last.rank)]
        # The label is between two layers of boxes, in the middle of a long arrow.
        middle = (len(chain) - 1) // 2 // 2 * 2
        label = chain[middle] if chain and extent[0] else None
        if label is not None:
            label.width, label.height = extent
        path = [first, *chain, last]
        for one, two in pairwise(path):
            if a != b:
                one.below.append(two)
                two.above.append(one)
        chains.append(path)
        labels.append(label)
        every += chain
    layers = [[i for i in every if i.rank == r] for r in range(max((i.rank for i in every), default=0) + 1)]
    layers = _ordered(layers)
    _place(layers)
    _straighten(layers, chains)
    left = min((i.x - i.width / 2 for i in every), default=0.0)
    top = 0.0
    heights = []
    for layer in layers:
        high = max((i.height for i in layer), default=0.0)
        heights.append((top, top + high))
        for item in layer:
            item.x = item.x - left
            item.y = top + high / 2
        top += high + BETWEEN
    routes = []
    for path, (a, _, _), label in zip(chains, arrows, labels, strict=True):
        points = _points(path, heights)
        forth = path[0] is items[a]
        routes.append(
            ArrowRoute(tuple(points if forth else points[::-1]), (label.x, label.y) if label is not None else None)
        )
    width = max((i.x + i.width / 2 for i in every), default=0.0)
    return LayeredDrawing(width, max(0.0, top - BETWEEN), {n: (i.x, i.y) for n, i in items.items()}, tuple(routes))


def _ranks(boxes: Mapping[str, Extent], ends: Sequence[tuple[str, str]]) -> list[int]:
    """Return twice the length of the longest path to each box; labels use odd ranks."""
    ranks = dict.fromkeys(boxes, 0)
    for name in boxes:
        ranks[name] = max((ranks[a] + 2 for a, b in ends if b == name and a != name), default=0)
    return list(ranks.values())


def _ordered(layers: list[list[Item]]) -> list[list[Item]]:
    """Order the layers with the fewest crossings that barycentre sweeps find."""
    best = layers
    least = _crossings(layers)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        layers = [list(x) for x in layers]
        for layer in layers[1:] if down else layers[-2::-1]:
            at = {id(i): n for x in layers for n, i in enumerate(x)}
            mean = {}
            for n, item in enumerate(layer):
                near = item.above if down else item.below
                mean[id(item)] = sum(at[id(i)] for i in near) / len(near) if near else float(n)
            layer.sort(key=lambda i, mean=mean: mean[id(i)])  # type: ignore[misc]
        if (found := _crossings(layers)) < least:
            best = layers
            least = found
    return best


def _crossings(layers: Sequence[Sequence[Item]]) -> int:
    total = 0
    for one, two in pairwise(layers):
        at = {id(i): n for n, i in enumerate(two)}
        pairs = [(n, at[id(b)]) for n, i in enumerate(one) for b in i.below]
        total += sum(a < c and b > d for a, b in pairs for c, d in pairs)
    return total


def _place(layers: Sequence[Sequence[Item]]) -> None:
    """Set horizontal positions: each item is centred between its neighbours.

    The layer's order and the widths limit this.
    """
    for layer in layers:
        _spread(layer, [(0.0, 1.0)] * len(layer))
    for sweep in range(4 * SWEEPS):
        for layer in layers[1:] if sweep % 2 == 0 else layers[-2::-1]:
            wanted = []
            for item in layer:
                near = item.above if sweep % 2 == 0 else item.below
                if sweep >= 3 * SWEEPS:
                    near = [*item.above, *item.below]
                weight = 1.0 if item.box else FIRM
                wanted.append((sum(n.x for n in near) / len(near), weight) if near else (item.x, 0.1))
            _spread(layer, wanted)


def _straighten(layers: Sequence[Sequence[Item]], chains: Sequence[Sequence[Item]]) -> None:
    """Move the passages of an arrow to one position, if their neighbours leave room."""
    beside = {
        id(i): (one, two)
        for layer in layers
        for one, i, two in zip([None, *layer], layer, [*layer[1:], None], strict=False)
    }
    for first, *inner, last in 2 * [*chains]:
        if len(inner) < 2:
            continue
        least = -math.inf
        most = math.inf
        for item in inner:
            one, two = beside[id(item)]
            if one is not None:
                least = max(least, one.x + (one.width + item.width) / 2 + APART)
            if two is not None:
                most = min(most, two.x - (two.width + item.width) / 2 - APART)
        if least <= most:
            ends = min(max((first.x + last.x) / 2, min(i.x for i in inner)), max(i.x for i in inner))
            for item in inner:
                item.x = min(max(ends, least), most)


def _spread(layer: Sequence[Item], wanted: Sequence[tuple[float, float]]) -> None:
    """Set the positions nearest to the wanted ones at which nothing overlaps.

    Nearest is by weighted least squares (pool adjacent violators).
    """
    offsets = []
    at = 0.0
    for before, item in zip([None, *layer], layer, strict=False):
        at += (before.width + item.width) / 2 + APART if before is not None else 0.0
        offsets.append(at)
    blocks: list[tuple[float, float, int]] = []  # mean wanted position without the offset, weight, items
    for (x, weight), offset in zip(wanted, offsets, strict=True):
        mean = x - offset
        size = 1
        while blocks and blocks[-1][0] > mean:
            other, heavy, many = blocks.pop()
            mean = (mean * weight + other * heavy) / (weight + heavy)
            weight = weight + heavy
            size = size + many
        blocks.append((mean, weight, size))
    means = [mean for mean, _, size in blocks for _ in range(size)]
    for item, mean, offset in zip(layer, means, offsets, strict=True):
        item.x = mean + offset


def _points(path: Sequence[Item], heights: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return points from the first box's lower edge to the last box's upper edge.

    The arrow passes each layer between vertically.
    """
    first = path[0]
    last = path[-1]
    points = [(_port(first, first.below, path[1], first.width), first.y + first.height / 2)]
    for item in path[1:-1]:
        points += [(item.x, y) for y in dict.fromkeys(heights[item.rank])]
    return [*points, (_port(last, last.above, path[-2], last.width), last.y - last.height / 2)]


def _port(item: Item, near: Sequence[Item], other: Item, width: float) -> float:
    """Return where an arrow ends on a box's edge: in the order of the neighbours."""
    ordered = sorted(range(len(near)), key=lambda n: near[n].x)
    place = next((k for k, n in enumerate(ordered) if near[n] is other), 0)
    return item.x + (0.7 * width) * ((place + 1) / (len(near) + 1) - 0.5) if near else item.x
