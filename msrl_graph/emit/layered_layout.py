"""A layered drawing: positions of boxes and points of arrows.

The input is the sizes of the boxes in dependency order, and the arrows between the boxes.

Invariant: boxes and labels of a layer never overlap. An arrow that passes through a layer has its own position in that
layer, so the arrow crosses no box and no label. An arrow from a later box to an earlier one is laid out in the opposite
direction, and then its points are reversed. The same input gives the same numbers.

Method: Sugiyama et al. 1981. Boxes get ranks (the numbers of their layers). Each layer is ordered by barycenters.
Positions are chosen by least squares.
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

    `x` and `y` are the center of the element.
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
    """The points of an arrow from start to end, and the center of its label."""

    points: tuple[tuple[float, float], ...]
    label: tuple[float, float] | None


@dataclass(frozen=True)
class LayeredDrawing:
    """The size of a drawing, the centers of its boxes (`places`), and its arrows."""

    width: float
    height: float
    places: dict[str, tuple[float, float]]
    routes: tuple[ArrowRoute, ...]


def draw(boxes: Mapping[str, Extent], arrows: Sequence[tuple[str, str, Extent]]) -> LayeredDrawing:
    """Return the positions of boxes and of the arrows between them.

    `boxes` is in dependency order. Each arrow is (start, end, extent of its label); the extent (0, 0) means that the
    arrow has no label.
    """
    order = {name: index for index, name in enumerate(boxes)}
    ends = [(src, dst) if order[src] <= order[dst] else (dst, src) for src, dst, _ in arrows]
    items = {
        name: Item(width, height, rank, box=True)
        for (name, (width, height)), rank in zip(boxes.items(), _assign_ranks(boxes, ends), strict=True)
    }
    chains: list[list[Item]] = []
    labels: list[Item | None] = []
    all_items = list(items.values())
    for (src, dst), (_, _, extent) in zip(ends, arrows, strict=True):
        first = items[src]
        last = items[dst]
        chain = [Item(4.0, 0.0, rank) for rank in range(first.rank + 1, last.rank)]
        # The label is between two layers of boxes, in the middle of a long arrow.
        middle = (len(chain) - 1) // 2 // 2 * 2
        label = chain[middle] if chain and extent[0] else None
        if label is not None:
            label.width, label.height = extent
        path = [first, *chain, last]
        for one, two in pairwise(path):
            if src != dst:
                one.below.append(two)
                two.above.append(one)
        chains.append(path)
        labels.append(label)
        all_items += chain
    layers = [
        [item for item in all_items if item.rank == rank]
        for rank in range(max((item.rank for item in all_items), default=0) + 1)
    ]
    layers = _order_layers(layers)
    _set_positions(layers)
    _straighten(layers, chains)
    leftmost = min((item.x - item.width / 2 for item in all_items), default=0.0)
    top = 0.0
    heights = []
    for layer in layers:
        high = max((item.height for item in layer), default=0.0)
        heights.append((top, top + high))
        for item in layer:
            item.x = item.x - leftmost
            item.y = top + high / 2
        top += high + BETWEEN
    routes = []
    for path, (src, _, _), label in zip(chains, arrows, labels, strict=True):
        points = _arrow_points(path, heights)
        forth = path[0] is items[src]
        routes.append(
            ArrowRoute(tuple(points if forth else points[::-1]), (label.x, label.y) if label is not None else None)
        )
    width = max((item.x + item.width / 2 for item in all_items), default=0.0)
    return LayeredDrawing(
        width, max(0.0, top - BETWEEN), {name: (item.x, item.y) for name, item in items.items()}, tuple(routes)
    )


def _assign_ranks(boxes: Mapping[str, Extent], ends: Sequence[tuple[str, str]]) -> list[int]:
    """Return the rank of each box: twice the length of the longest path to the box.

    The rank of a box is the number of its layer. So boxes are in layers with even numbers, and labels are in layers
    with odd numbers. `ends` has the start and end of each arrow.
    """
    ranks = dict.fromkeys(boxes, 0)
    for name in boxes:
        ranks[name] = max((ranks[src] + 2 for src, dst in ends if dst == name and src != name), default=0)
    return list(ranks.values())


def _order_layers(layers: list[list[Item]]) -> list[list[Item]]:
    """Reorder the items of each layer so that few arrows cross.

    The barycenter method tries several orders. The result is the order with the fewest crossings.
    """
    best = layers
    least = _count_crossings(layers)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        layers = [list(row) for row in layers]
        for layer in layers[1:] if down else layers[-2::-1]:
            place_of = {id(item): place for row in layers for place, item in enumerate(row)}
            mean = {}
            for index, item in enumerate(layer):
                near = item.above if down else item.below
                mean[id(item)] = (
                    sum(place_of[id(neighbour)] for neighbour in near) / len(near) if near else float(index)
                )
            layer.sort(key=lambda item, mean=mean: mean[id(item)])  # type: ignore[misc]
        if (crossings := _count_crossings(layers)) < least:
            best = layers
            least = crossings
    return best


def _count_crossings(layers: Sequence[Sequence[Item]]) -> int:
    total = 0
    for one, two in pairwise(layers):
        place_of = {id(item): place for place, item in enumerate(two)}
        pairs = [(place, place_of[id(neighbour)]) for place, item in enumerate(one) for neighbour in item.below]
        total += sum(a < c and b > d for a, b in pairs for c, d in pairs)
    return total


def _set_positions(layers: Sequence[Sequence[Item]]) -> None:
    """Center each item horizontally between the items that arrows connect with it.

    The items keep the order of their layer and do not overlap.
    """
    for layer in layers:
        _separate(layer, [(0.0, 1.0)] * len(layer))
    for sweep in range(4 * SWEEPS):
        for layer in layers[1:] if sweep % 2 == 0 else layers[-2::-1]:
            wanted = []
            for item in layer:
                near = item.above if sweep % 2 == 0 else item.below
                if sweep >= 3 * SWEEPS:
                    near = [*item.above, *item.below]
                weight = 1.0 if item.box else FIRM
                wanted.append((sum(neighbour.x for neighbour in near) / len(near), weight) if near else (item.x, 0.1))
            _separate(layer, wanted)


def _straighten(layers: Sequence[Sequence[Item]], chains: Sequence[Sequence[Item]]) -> None:
    """Give all passages of an arrow the same x, if the items next to them leave room.

    A passage is the point at which the arrow passes through a layer. `chains` has the items of each arrow: its first
    box, its passages and its last box.
    """
    neighbours = {
        id(item): (one, two)
        for layer in layers
        for one, item, two in zip([None, *layer], layer, [*layer[1:], None], strict=False)
    }
    for first, *inner, last in 2 * [*chains]:
        if len(inner) < 2:
            continue
        least = -math.inf
        most = math.inf
        for item in inner:
            one, two = neighbours[id(item)]
            if one is not None:
                least = max(least, one.x + (one.width + item.width) / 2 + APART)
            if two is not None:
                most = min(most, two.x - (two.width + item.width) / 2 - APART)
        if least <= most:
            ends = min(max((first.x + last.x) / 2, min(item.x for item in inner)), max(item.x for item in inner))
            for item in inner:
                item.x = min(max(ends, least), most)


def _separate(layer: Sequence[Item], wanted: Sequence[tuple[float, float]]) -> None:
    """Set the positions of a layer's items near wanted positions, without overlap.

    `wanted` has a (position, weight) for each item. The sum of the weighted squared distances from the wanted positions
    is minimal (pool adjacent violators).
    """
    offsets = []
    offset_sum = 0.0
    for before, item in zip([None, *layer], layer, strict=False):
        offset_sum += (before.width + item.width) / 2 + APART if before is not None else 0.0
        offsets.append(offset_sum)
    blocks: list[tuple[float, float, int]] = []  # mean wanted position without the offset, weight, items
    for (wish, weight), offset in zip(wanted, offsets, strict=True):
        mean = wish - offset
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


def _arrow_points(path: Sequence[Item], heights: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of an arrow from its first box to its last box.

    The arrow starts at the lower edge of the first box, and ends at the upper edge of the last box. Between the two
    boxes, the arrow passes each layer vertically. `path` has the arrow's items, and `heights` has the upper and lower
    end of each layer.
    """
    first = path[0]
    last = path[-1]
    points = [(_port_position(first, first.below, path[1], first.width), first.y + first.height / 2)]
    for item in path[1:-1]:
        points += [(item.x, y) for y in dict.fromkeys(heights[item.rank])]
    return [*points, (_port_position(last, last.above, path[-2], last.width), last.y - last.height / 2)]


def _port_position(item: Item, near: Sequence[Item], other: Item, width: float) -> float:
    """Return the x of an arrow's end on the edge of a box.

    `item` is the box, whose edge is `width` wide, and `other` is the arrow's next item. `near` has the next items of
    all arrows that end at this edge. The ends have the same horizontal order as these next items.
    """
    ordered = sorted(range(len(near)), key=lambda index: near[index].x)
    place = next((position for position, index in enumerate(ordered) if near[index] is other), 0)
    return item.x + (0.7 * width) * ((place + 1) / (len(near) + 1) - 0.5) if near else item.x
