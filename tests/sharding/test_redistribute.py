"""From any layout to any layout: every byte of the target has one source, and bytes counted are bytes moved."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from layouts import layouts, points, sides, tensors
from sample import examples

from msrl_graph.backends import ENGINES
from msrl_graph.model.models import load
from msrl_graph.sharding.layout import Layout, Side, elements, group_by_kind, overlap, shard, slices
from msrl_graph.sharding.redistribute import (
    count_left_behind,
    count_movement,
    crosses,
    gather_block,
    list_gather_groups,
    list_transfers,
    pairs,
)
from msrl_graph.sharding.tensors import Box, Tensor

Case = tuple[list[Tensor], Side, Side, int]


@st.composite
def cases(draw: st.DrawFn, same: bool = False) -> Case:
    """Tensors, two sides on the same devices, or on any (in a row, or some of each host), and the devices of a host."""
    some = draw(st.lists(tensors(), min_size=1, max_size=4))
    per_host = draw(st.integers(1, 6))
    one, other = (draw(st.integers(0, per_host - 1)) for _ in range(2))  # of each host; 0: in a row
    source = draw(sides(each=one))
    if same or draw(st.booleans()):
        return some, source, draw(sides(source.devices, each=one)), per_host
    first = (
        draw(st.integers(0, 3)) * per_host + draw(st.integers(0, per_host - other))
        if other
        else draw(st.integers(0, 20))
    )
    return some, source, draw(sides(first=first, each=other)), per_host


def boxes(tensor: Tensor, side: Side, per_host: int) -> dict[int, Box]:
    """By device."""
    return {side.device(r, per_host): box for r in range(side.devices) if elements(box := shard(tensor, side, r))}


@examples(200)
@given(cases())
def test_every_element_of_the_target_comes_from_one_source(case: Case) -> None:
    some, source, target, per_host = case
    for tensor in some:
        whole = np.random.default_rng(0).random(tensor.shape)
        given = {d: whole[slices(box)] for d, box in boxes(tensor, source, per_host).items()}
        have = boxes(tensor, source, per_host)
        want = boxes(tensor, target, per_host)
        arrived = {d: np.full(tensor.shape, np.nan) for d in want}
        times = Counter[tuple[int, tuple[int, ...]]]()
        for device, box in have.items():
            if device in arrived and (own := overlap(box, want[device])):
                arrived[device][slices(own)] = whole[slices(own)]
                times.update((device, p) for p in points(own))
        for giver, takers, box in list_transfers(tensor, source, target, per_host):
            assert overlap(have[giver], box) == box
            assert len({t // per_host for t in takers}) == 1 and giver not in takers
            within = tuple(slice(a - w, b - w) for (a, b), (w, _) in zip(box, have[giver], strict=True))
            for taker in takers:
                arrived[taker][slices(box)] = given[giver][within]
                times.update((taker, p) for p in points(box))
        assert set(times.values()) <= {1}
        assert all(np.array_equal(arrived[d][slices(box)], whole[slices(box)]) for d, box in want.items())


@examples(200)
@given(cases())
def test_bytes_counted_are_bytes_moved(case: Case) -> None:
    some, source, target, per_host = case
    received = dict.fromkeys((target.device(r, per_host) for r in range(target.devices)), 0)
    inward = defaultdict[int, int](int)
    for tensor in some:
        for giver, takers, box in list_transfers(tensor, source, target, per_host):
            for taker in takers:
                received[taker] += elements(box)
            if giver // per_host != takers[0] // per_host:
                inward[takers[0] // per_host] += elements(box)
    found = count_movement(group_by_kind(some), source, target, per_host)
    assert (found.received, found.total) == (max(received.values()), sum(received.values()))
    assert (found.inward, found.between) == (max(inward.values(), default=0), sum(inward.values()))


@given(cases())
def test_holders_of_a_box_take_turns(case: Case) -> None:
    some, source, target, _ = case
    source = replace(source, each=0)
    for tensor in some:
        have = boxes(tensor, source, 1)
        # On hosts of one device, nobody is nearer than another.
        gave = Counter(f.giver for f in list_transfers(tensor, source, target, 1) if f.giver not in f.takers)
        for box in set(have.values()):
            counts = [gave[d] for d, b in have.items() if b == box]
            assert max(counts) - min(counts) <= 1


@examples(200)
@example(([Tensor("t", (1, 1), experts=True, layers=5)], Side(Layout(tp=2), divided=True), Side(Layout(pp=2)), 1))
@given(cases(same=True))
def test_a_block_is_the_smallest_that_holds_what_its_ranks_want(case: Case) -> None:
    some, source, target, per_host = case
    source = Side(source.layout, source.divided, source.multiple)
    target = Side(target.layout, target.divided, target.multiple)
    found = group_by_kind(some)
    across = any(crosses(source, target, t.layers) for t in some)
    width = source.layout.stage_devices

    def enough(block: int) -> bool:
        """Whether each group holds all boxes that its ranks want, whatever stage a tensor is on (groups do not depend
        on it)."""
        for group in list_gather_groups(source, across, block):
            for tensor in some:
                flat = replace(tensor, layer=0, layers=1, tied=False)
                one, other = (Side(_flat(s.layout), s.divided, s.multiple) for s in (source, target))
                # A stage at a time: the same tensor as if it lay on each.
                have = set().union(*(points(shard(flat, one, r % width)) for r in group))
                wide = target.layout.stage_devices
                if any(not points(shard(flat, other, r % wide)) <= have for r in group):
                    return False
        return True

    block = gather_block(found, source, target)
    assert enough(block)
    assert block == next(b for b in range(1, width + 1) if width % b == 0 and (enough(b) or b == width))
    if all(t.experts is some[0].experts for t in some):
        counted = count_movement(found, source, target, per_host, block)
        exact = count_movement(found, source, target, per_host)
        assert counted.received >= exact.received and counted.inward >= exact.inward
        received = []
        for rank in range(source.devices):
            group = next(g for g in list_gather_groups(source, across, block) if rank in g)
            got = 0
            for tensor in some:
                mine = shard(tensor, source, rank)
                stage = {r for r in group if r // width == rank // width}  # a tied embedding is on two
                held = Counter(b for r in group if elements(b := shard(tensor, source, r)))
                alike = sum(shard(tensor, source, r) == mine for r in stage)
                wants = [(shard(tensor, target, r), shard(tensor, source, r)) for r in group]
                if any(elements(want) and overlap(want, have) != want for want, have in wants):
                    got += sum(map(elements, held)) - elements(mine) // alike
            received.append(got)
        # Of a block over several hosts, one that lacks nothing is counted as if it took no part; and where the sides
        # have other stages, a block as the one in its place that lacks something.
        assert across is False or source.layout.pp != target.layout.pp or counted.received <= max(received)
        exact = per_host >= source.devices and source.layout.pp == target.layout.pp
        assert across is False or not exact or counted.received == max(received)


def _flat(layout: Layout) -> Layout:
    return Layout(**{**vars(layout), "pp": 1, "vpp": 1, "stages": ()})


@given(cases(same=True))
def test_left_behind_is_what_naive_resharding_cannot_reuse(case: Case) -> None:
    some, source, target, _ = case
    source = Side(source.layout, source.divided)
    target = Side(target.layout, target.divided)
    expected = 0
    for tensor in some:
        for rank in range(target.devices):
            old = points(shard(tensor, source, rank))
            new = points(shard(tensor, target, rank))
            expected += len(old) - len(new) if new and new <= old else len(old)
    assert count_left_behind(group_by_kind(some), source, target) == expected


@given(st.lists(tensors(), min_size=1, max_size=5), layouts(), layouts())
def test_pairs_count_every_tensor_once(some: list[Tensor], source: Layout, target: Layout) -> None:
    assert sum(p.number for p in pairs(group_by_kind(some), Side(source), Side(target))) == len(some)


@pytest.mark.parametrize(("inner", "block"), [(1, 8), (2, 2), (4, 8)])
def test_the_papers_case_gathers_among_two_neighbours(inner: int, block: int) -> None:
    some = group_by_kind([Tensor("q", (64, 8), 0), Tensor("o", (8, 64), 1), Tensor("norm", (8,))])
    assert gather_block(some, Side(Layout(tp=8, dp=2)), Side(Layout(tp=4, dp=4, inner=inner))) == block


def test_the_papers_largest_case() -> None:
    """TP4 PP6 DP16 with EP16 (etp 2) to TP2 DP192 with EP64 on 384 devices (arXiv:2507.19017, section 5)."""
    model = load("deepseek-r1-671b", Path())
    stages = (10, 10, 11, 10, 10, 10)
    source = ENGINES["megatron"].side(Layout(tp=4, pp=6, dp=16, ep=16, etp=2, stages=stages))
    target = ENGINES["vllm"].side(Layout(tp=2, dp=192, ep=64))
    assert (source.layout.edp, target.layout.edp) == (2, 6)
    experts = sum(t.elements for t in model.tensors if t.experts)
    # Each generation rank holds a 64th of the experts, which lie on six stages.
    found = count_movement(tuple(k for k in model.kinds if k.tensor.experts), source, target, 8)
    assert found.received <= experts // 64
    assert found.received >= experts // 64 * 5 // 6
    assert found.total <= 384 * experts // 64
