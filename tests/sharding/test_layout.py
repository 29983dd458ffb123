"""Boxes of layouts: they cover every tensor once a replica, whatever divides it."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from layouts import layouts, points, sides, tensors

from msrl_graph.sharding.layout import (
    Coordinates,
    Layout,
    Side,
    count_busiest_elements,
    elements,
    full_box,
    group_by_kind,
    owns,
    relative_box,
    shard,
    stage_elements,
    stages,
)
from msrl_graph.sharding.tensors import Tensor


@given(layouts())
def test_rank_is_the_inverse_of_coordinates(layout: Layout) -> None:
    seen = [layout.coordinates(r) for r in range(layout.devices)]
    assert {(c.tp, c.cp, c.dp, c.pp) for c in seen} == set(
        product(*map(range, (layout.tp, layout.cp, layout.dp, layout.pp)))
    )
    assert {(c.etp, c.ep, c.edp, c.pp) for c in seen} == set(
        product(*map(range, (layout.etp, layout.ep, layout.edp, layout.pp)))
    )
    assert all(layout.rank(c.tp, c.dp, c.cp, c.pp) == r for r, c in enumerate(seen))


def test_ranks_are_numbered_as_megatron_does() -> None:
    # tp, then cp, dp, pp; experts on the same ranks of a stage: etp, ep, then their copies.
    layout = Layout(tp=2, cp=2, dp=3, pp=2, ep=3, etp=2)
    assert layout.coordinates(17) == Coordinates(tp=1, cp=0, dp=1, pp=1, etp=1, ep=2, edp=0)
    assert (layout.stage_devices, layout.edp) == (12, 2)


@given(tensors(), sides())
def test_boxes_cover_every_element_once_a_replica(tensor: Tensor, side: Side) -> None:
    layout = side.layout
    boxes = [shard(tensor, side, r) for r in range(layout.devices)]
    on = [layout.coordinates(r).pp in stages(tensor, layout) for r in range(layout.devices)]
    assert all(elements(box) == 0 for box, here in zip(boxes, on, strict=True) if not here)
    for stage in stages(tensor, layout):
        different = {b for r, b in enumerate(boxes) if elements(b) and layout.coordinates(r).pp == stage}
        # Boxes of one side are equal or apart, and together all of the tensor.
        assert Counter(p for box in different for p in points(box)) == Counter(points(full_box(tensor.shape)))


@given(tensors(), sides())
def test_every_box_has_one_owner(tensor: Tensor, side: Side) -> None:
    owned = [shard(tensor, side, r) for r in range(side.devices) if owns(tensor, side, r)]
    assert sorted(b for b in owned if elements(b)) == sorted(
        {b for r in range(side.devices) if elements(b := shard(tensor, side, r))}
    )


@given(st.lists(tensors(), min_size=1, max_size=5), sides())
def test_kinds_count_what_ranks_hold(some: list[Tensor], side: Side) -> None:
    # The first rank of a stage is its busiest.
    assume(len({t.layers for t in some}) == 1)
    sizes = [sum(elements(shard(t, side, r)) for t in some) for r in range(side.devices)]
    width = side.layout.stage_devices
    for stage in range(side.layout.pp):
        assert stage_elements(group_by_kind(some), side, stage) == max(sizes[stage * width : (stage + 1) * width])
    assert count_busiest_elements(group_by_kind(some), side) == max(sizes)


def test_kinds_join_layers() -> None:
    some = [Tensor(f"{i}.{n}", (2, 3), 0, layer=i, layers=4) for i in (0, 1, 3) for n in "ab"] + [
        Tensor("e", (2, 3), 0, layer=-1, layers=4)
    ]
    assert [(k.tensor.name, k.stretches, k.each) for k in group_by_kind(some)] == [
        ("0.a", ((-1, 0),), 1),
        ("0.a", ((0, 2), (3, 4)), 2),
    ]


def test_kinds_do_not_depend_on_names_and_places_in_files() -> None:
    some = [
        Tensor(f"{i}.{n}_proj.weight", (2, 3), 0, fused="both", start=2 * j, file_name=f"f.{i}.{n}", layer=i, layers=4)
        for i in range(4)
        for j, n in enumerate("ab")
    ]
    assert [(k.stretches, k.each) for k in group_by_kind(some)] == [(((0, 4),), 2)]


@pytest.mark.parametrize(
    ("layout", "layers", "expected"),
    [
        (Layout(pp=6), 61, [((0, 10),), ((10, 20),), ((20, 31),), ((31, 41),), ((41, 51),), ((51, 61),)]),
        (Layout(pp=2, stages=(1, 3)), 4, [((0, 1),), ((1, 4),)]),
        (Layout(pp=2, vpp=2), 8, [((0, 2), (4, 6)), ((2, 4), (6, 8))]),
        (Layout(pp=4), 6, [((0, 1),), ((1, 3),), ((3, 5),), ((5, 6),)]),
    ],
)
def test_layers_of_stages(layout: Layout, layers: int, expected: list[tuple[tuple[int, int], ...]]) -> None:
    assert [layout.stage_layers(s, layers) for s in range(layout.pp)] == expected
    for stage, stretches in enumerate(expected):
        assert all(layout.stage_of(layer, layers) == stage for a, b in stretches for layer in range(a, b))
    assert (layout.stage_of(-1, layers), layout.stage_of(layers, layers)) == (0, layout.pp - 1)


def test_key_value_heads_are_copied_where_ranks_are_more() -> None:
    key = Tensor("k", (2 * 4, 3), 0, unit=4, shared=True)
    assert [shard(key, Side(Layout(tp=4)), r)[0] for r in range(4)] == [(0, 4), (0, 4), (4, 8), (4, 8)]
    assert [owns(key, Side(Layout(tp=4)), r) for r in range(4)] == [True, False, True, False]


def test_heads_stay_whole() -> None:
    # Three heads on two ranks: two and one, though four and a half rows each would be even.
    assert [shard(Tensor("q", (9,), 0, unit=3), Side(Layout(tp=2)), r)[0] for r in range(2)] == [(0, 6), (6, 9)]


def test_a_padded_vocabulary_is_cut_at_its_padded_size() -> None:
    # 1,000 rows padded to 1,024 for four ranks of a multiple of 64: the last has 232.
    words = Tensor("embed", (1000, 2), 0, padded=True)
    sizes = [elements(shard(words, Side(Layout(tp=4), multiple=64), r)) // 2 for r in range(4)]
    assert sizes == [256, 256, 256, 232]


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.data())
def test_boxes_are_the_slices_of_a_fused_projection(
    groups: int, per_group: int, unit: int, data: st.DataObject
) -> None:
    """Megatron's linear_qkv holds for each group of heads its queries, its key and its value; cut over tp it holds our
    boxes of q, k, v."""
    tp = data.draw(st.sampled_from([t for t in range(1, groups + 1) if groups % t == 0]))
    q, k, v = (np.arange(n * unit) + base for n, base in ((groups * per_group, 0), (groups, 1000), (groups, 2000)))
    fused = np.concatenate(
        [
            np.concatenate([q.reshape(groups, -1)[g], k.reshape(groups, -1)[g], v.reshape(groups, -1)[g]])
            for g in range(groups)
        ]
    )
    for rank, part in enumerate(np.split(fused, tp)):
        mine = []
        for values, shared in ((q, False), (k, True), (v, True)):
            ((start, stop),) = shard(Tensor("", values.shape, 0, unit=unit, shared=shared), Side(Layout(tp=tp)), rank)
            mine.append(values[start:stop])
        assert sorted(np.concatenate(mine)) == sorted(part)


def test_within_and_text() -> None:
    assert relative_box(((4, 6), (0, 2)), ((4, 8), (0, 4))) == ((0, 2), (0, 2))
    assert elements(((4, 6), (0, 2))) == 4
    assert str(Layout(tp=8, dp=2)) == "tp8 dp2"
