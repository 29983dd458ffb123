"""Rows in micro-batches: each row once, within the limit, in as few micro-batches as first-fit decreasing."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph.analysis.row_packing import MicroBatchLimit, pack_padded, pack_tokens
from msrl_graph.sharding.layout import Layout

shares = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=30)  # length, prompt
budgets = st.integers(1, 100)
layouts = st.sampled_from([Layout(), Layout(pp=2), Layout(pp=2, vpp=2), Layout(cp=2), Layout(cp=2, cp_kind="ulysses")])


def first_fit_decreasing(lengths, most):
    bins = []
    for length in sorted(lengths, reverse=True):
        own = next((i for i, load in enumerate(bins) if load + length <= most), None)
        if own is None:
            bins.append(length)
        else:
            bins[own] += length
    return len(bins)


@given(shares, budgets, st.integers(1, 8))
def test_tokens_limit_micro_batches(share, most, least):
    lengths, prompts = ([row[i] for row in share] for i in (0, 1))
    packed = pack_tokens(lengths, prompts, most, least)
    assert Counter(row for own in packed for row in own) == Counter(range(len(share)))
    loads = [sum(lengths[row] for row in own) for own in packed]
    assert all(load <= most or len(own) == 1 for load, own in zip(loads, packed, strict=True))
    assert least <= len(packed) <= max(least, first_fit_decreasing(lengths, most), 1)
    assert loads == sorted(loads, reverse=True)
    assert all(own == sorted(own) for own in packed)


@given(shares, budgets, st.integers(1, 8))
def test_padding_counts_where_rows_are_padded(share, most, least):
    lengths, prompts = ([row[i] for row in share] for i in (0, 1))
    packed = pack_padded(lengths, prompts, most, least)
    assert Counter(row for own in packed for row in own) == Counter(range(len(share)))
    for own in packed:
        assert len(own) <= 1 or len(own) * max(lengths[row] for row in own) <= most
    longest = max(lengths, default=1)
    assert least <= len(packed) <= max(least, -(-len(share) // max(1, most // longest)), 1)


@given(st.integers(0, 60), st.integers(1, 40), budgets, layouts, st.integers(1, 6))
def test_rows_of_equal_length_are_as_many_micro_batches_as_a_plan_counts(rows, length, tokens, layout, fan):
    limit = MicroBatchLimit(layout, tokens=tokens, multiple=layout.cp)
    packed = limit.pack([length] * rows, [row // fan for row in range(rows)], rows)
    full = limit.count_rows(length)
    number = max(1, -(-rows // full))
    assert len(packed) == (number if layout.vpp == 1 else -(-number // layout.pp) * layout.pp)
    assert max(map(len, packed)) <= full


@given(shares, budgets, layouts)
def test_no_row_of_a_plan_is_longer_so_a_run_has_no_more_micro_batches(share, tokens, layout):
    limit = MicroBatchLimit(layout, tokens=tokens, longest=40, multiple=layout.cp)
    lengths, prompts = ([row[i] for row in share] for i in (0, 1))
    full = limit.pack([40] * len(share), prompts, len(share))
    assert len(limit.pack(lengths, prompts, len(share))) <= len(full)


def test_rows_of_a_prompt_stay_together():
    lengths = [10, 12, 11, 9] * 4
    prompts = [row // 4 for row in range(16)]
    packed = pack_tokens(lengths, prompts, 90)
    assert [{prompts[row] for row in own} for own in packed] == [{0, 2}, {1, 3}]
    assert all(len({prompts[row] for row in own}) == 1 for own in pack_tokens(lengths, prompts, 42))
    assert all(len({prompts[row] for row in own}) == 1 for own in pack_tokens(lengths, prompts, 23))


def test_a_prompt_is_split_where_that_needs_fewer_micro_batches():
    """Three prompts of 60 tokens fit into two micro-batches of 90 only in part."""
    packed = pack_tokens([10] * 18, [row // 6 for row in range(18)], 90)
    assert [len(own) for own in packed] == [9, 9]
    assert sum(len({row // 6 for row in own}) for own in packed) == 4


@pytest.mark.parametrize("each", [1, 16])
def test_prompts_of_long_rows_are_split_little_and_evenly(each):
    """Less than 1 in 50 micro-batches more than the best, each prompt in about as many as it needs."""
    draw = Random(0)
    lengths = [min(10240, int(draw.lognormvariate(7.5, 0.8)) + 200) for _ in range(1024)]
    prompts = [row // each for row in range(1024)]
    packed = pack_tokens(lengths, prompts, 16384)
    fewest = first_fit_decreasing(lengths, 16384)
    assert len(packed) <= fewest + fewest // 50
    loads = [sum(lengths[row] for row in own) for own in packed]
    assert min(loads) > 0.9 * max(loads)
    parts = sum(len({prompts[row] for row in own}) for own in packed)
    assert parts <= 1.4 * (len({*prompts}) + len(packed))


def test_tokens_are_balanced():
    """All rows fit into two micro-batches; first-fit would fill the first."""
    lengths = [50, 30, 30, 20, 10, 10]
    packed = pack_tokens(lengths, range(6), 100)
    assert [sum(lengths[row] for row in own) for own in packed] == pytest.approx([75, 75], abs=5)


def test_a_prompt_is_split_if_more_micro_batches_are_needed():
    """As of a pipeline."""
    packed = pack_tokens([10] * 6, [0] * 6, 100, 4)
    assert len(packed) == 4 and max(map(len, packed)) == 2


def test_a_limit_on_rows_sorts_them_by_length():
    limit = MicroBatchLimit(Layout(), rows=2)
    assert limit.pack([5, 1, 4, 2, 3], [0] * 5, 5) == [[1, 3], [4, 2], [0]]
    assert limit.pack([5], [0], 5) == [[0], [], []]
    assert MicroBatchLimit(Layout()).pack([5, 1], [0, 0], 2) == [[1, 0]]
