"""Boxes of layouts: they cover every tensor once, and resharding moves every byte of the target once within its block."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_graph.layout import (
    Layout,
    Tensor,
    block_boxes,
    elements,
    full,
    gather_group,
    held,
    kinds,
    left_behind,
    overlap,
    period,
    replicas,
    shard,
    transfers,
    within,
)

TENSORS = st.builds(
    lambda shape, dim: Tensor("t", tuple(shape), min(dim, len(shape) - 1)),
    st.lists(st.integers(1, 13), min_size=1, max_size=3),
    st.integers(-1, 2),
)


@st.composite
def layouts(draw: st.DrawFn, devices: int | None = None) -> Layout:
    devices = devices or draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
    tp = draw(st.sampled_from([t for t in range(1, devices + 1) if devices % t == 0]))
    dp = devices // tp
    return Layout(tp=tp, dp=dp, inner=draw(st.sampled_from([i for i in range(1, dp + 1) if dp % i == 0])))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    source = draw(layouts())
    return source, draw(layouts(source.devices))


def points(box: tuple[tuple[int, int], ...]) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in box)))


@given(layouts())
def test_rank_is_the_inverse_of_coordinates(layout: Layout) -> None:
    seen = {layout.coordinates(r) for r in range(layout.devices)}
    assert seen == set(product(range(layout.tp), range(layout.dp)))
    assert all(layout.rank(*layout.coordinates(r)) == r for r in range(layout.devices))


@given(TENSORS, layouts(), st.booleans())
def test_boxes_cover_every_element_once_a_replica(tensor: Tensor, layout: Layout, divided: bool) -> None:
    # A replica: all tp ranks of one dp coordinate, or of all of them where weights are divided over dp.
    replicas = [range(layout.dp)] if divided else [[d] for d in range(layout.dp)]
    tps = range(layout.tp) if tensor.tp_dim >= 0 else [0]
    for replica in replicas:
        count = Counter(p for dp in replica for tp in tps for p in points(shard(tensor, layout, layout.rank(tp, dp), divided)))
        assert count == Counter(points(full(tensor.shape)))


@settings(max_examples=200)
@given(TENSORS, pairs(), st.booleans(), st.booleans())
def test_every_target_byte_has_exactly_one_source_in_its_block(
    tensor: Tensor, pair: tuple[Layout, Layout], divided: bool, target_divided: bool
) -> None:
    source, target = pair
    group = gather_group([tensor], source, divided, target, target_divided)
    assert target.devices % group == 0
    for rank in range(target.devices):
        start = rank - rank % group
        have = block_boxes(tensor, source, range(start, start + group), divided)
        want = shard(tensor, target, rank, target_divided)
        parts = [o for box in have if (o := overlap(box, want))]
        assert Counter(p for o in parts for p in points(o)) == Counter(points(want))


@given(TENSORS, pairs(), st.booleans(), st.booleans())
def test_no_smaller_group_would_do(tensor: Tensor, pair: tuple[Layout, Layout], divided: bool, target_divided: bool) -> None:
    source, target = pair
    devices = target.devices
    group = gather_group([tensor], source, divided, target, target_divided)

    def enough(g: int) -> bool:
        for rank in range(devices):
            block = range(rank - rank % g, rank - rank % g + g)
            have = set().union(*(points(shard(tensor, source, r, divided)) for r in block))
            if not points(shard(tensor, target, rank, target_divided)) <= have:
                return False
        return True

    assert group == next(g for g in range(1, devices + 1) if devices % g == 0 and enough(g))


@given(TENSORS, pairs(), st.booleans())
def test_left_behind_is_what_naive_resharding_cannot_reuse(tensor: Tensor, pair: tuple[Layout, Layout], divided: bool) -> None:
    source, target = pair
    expected = 0
    for rank in range(target.devices):
        old, new = points(shard(tensor, source, rank, divided)), points(shard(tensor, target, rank, False))
        expected += len(old) - len(new) if new <= old else len(old)
    assert left_behind([tensor], source, divided, target, False) == expected


@settings(max_examples=200)
@given(TENSORS, layouts(), layouts(), st.booleans(), st.booleans(), st.integers(1, 6))
def test_between_pools_every_target_byte_comes_once_from_a_rank_that_has_it(
    tensor: Tensor, source: Layout, target: Layout, divided: bool, target_divided: bool, per_host: int
) -> None:
    alike = replicas(target, target_divided, 3, per_host)
    assert sorted(r for ranks in alike for r in ranks) == list(range(target.devices))
    for ranks in alike:
        assert len({(3 + r) // per_host for r in ranks}) == len({shard(tensor, target, r, target_divided) for r in ranks}) == 1
    heads = [ranks[0] for ranks in alike]
    moves = transfers(tensor, source, divided, target, target_divided, heads)
    for head in heads:
        got = Counter(p for _, taker, box in moves if taker == head for p in points(box))
        assert got == Counter(points(shard(tensor, target, head, target_divided)))
    assert all(points(box) <= points(shard(tensor, source, giver, divided)) for giver, _, box in moves)
    # Ranks that hold the same take turns: none gives to two more than another.
    for box in {shard(tensor, source, r, divided) for r in range(source.devices)}:
        same = [r for r in range(source.devices) if shard(tensor, source, r, divided) == box]
        given = [sum(g == r for g, _, _ in moves) for r in same]
        assert max(given) - min(given) <= 1


@given(TENSORS, layouts(), st.booleans())
def test_rank_0_is_the_busiest_and_boxes_repeat(tensor: Tensor, layout: Layout, divided: bool) -> None:
    sizes = [held([tensor], layout, divided, r) for r in range(layout.devices)]
    assert sizes[0] == max(sizes)
    every = period(layout, divided)
    assert all(shard(tensor, layout, r, divided) == shard(tensor, layout, r % every, divided) for r in range(layout.devices))


@pytest.mark.parametrize(("inner", "group"), [(1, 8), (2, 2), (4, 8)])
def test_the_papers_case_gathers_among_two_neighbours(inner: int, group: int) -> None:
    tensors = [Tensor("q", (64, 8), 0), Tensor("o", (8, 64), 1), Tensor("norm", (8,))]
    assert gather_group(tensors, Layout(tp=8, dp=2), False, Layout(tp=4, dp=4, inner=inner), False) == group


def test_a_large_cluster_costs_little() -> None:
    tensors = [Tensor(f"{i}", (1 << 14, 1 << 10), i % 2) for i in range(1000)]
    assert gather_group(tensors, Layout(tp=8, dp=1250), False, Layout(tp=4, dp=2500, inner=2), False) == 2
    assert gather_group(tensors, Layout(tp=8, dp=1250), True, Layout(tp=4, dp=2500), False) == 10000


def test_kinds_within_and_text() -> None:
    assert kinds([Tensor("a", (2, 3), 0), Tensor("b", (2, 3), 0)]) == {Tensor("", (2, 3), 0): 2}
    assert within(((4, 6), (0, 2)), ((4, 8), (0, 4))) == ((0, 2), (0, 2))
    assert elements(((4, 6), (0, 2))) == 4
    assert str(Layout(tp=8, dp=2)) == "tp8 dp2"
