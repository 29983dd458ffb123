"""From rows of the dock to tensors: every response token is predicted from all that stands before it, and nothing
else."""

from itertools import chain

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph.runtime.data.columns import ColumnData, ragged
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.runtime.rank.packing import count_distinct, flatten_column

tokens = st.lists(st.integers(0, 99), min_size=1, max_size=5)


@given(st.lists(st.tuples(tokens, tokens, st.lists(st.integers(0, 99), max_size=5)), min_size=1, max_size=6), st.data())
def test_each_token_is_asked_for_at_the_position_before_it(rows, data):
    contexts = [ragged([np.array(r[i]) for r in rows], np.int32) for i in (0, 1)]
    response = ragged([np.array(r[2]) for r in rows], np.int32)
    chosen = np.array(data.draw(st.permutations(range(len(rows)))))[: data.draw(st.integers(1, len(rows)))]
    packed = pack(contexts, [response], chosen)
    asked = list(zip(*(packed[name].tolist() for name in ("row", "position", "token")), strict=True))
    expected = []
    for i, r in enumerate(chosen):
        before = rows[r][0] + rows[r][1]
        answer = rows[r][2]
        for j, token in enumerate(answer):
            start = int(packed["offsets"][i])
            seen = packed["ids"][start : start + len(before) + j].tolist()
            assert seen == before + answer[:j]
            expected.append((i, len(before) + j - 1, token))
    assert asked == expected


@given(st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=3), tokens), min_size=1, max_size=6))
def test_a_token_that_is_scored_itself_is_asked_for_at_its_own_position(rows):
    """The last one at the end of the sequence, where a row that is scored as a whole is, too."""
    context, response = (ragged([np.array(r[i], np.int32) for r in rows], np.int32) for i in (0, 1))
    every = np.arange(len(rows))
    packed = pack([context], [response], every, after=True)
    whole = pack([context, response], [], every)
    assert packed["ids"].tolist() == whole["ids"].tolist()
    assert packed["position"].tolist() == [len(a) + i for a, b in rows for i in range(len(b))]
    ends = np.cumsum([len(b) for _, b in rows]) - 1
    assert packed["position"][ends].tolist() == whole["position"].tolist()


talks = st.lists(st.tuples(tokens, st.lists(tokens, max_size=3), st.integers(0, 7)), min_size=1, max_size=5)


@given(talks, st.booleans(), st.booleans(), st.data())
def test_conversations_of_a_row_are_the_sequences_of_rows_of_their_own(rows, after, masked, data):
    """None sees another, and what is asked for comes in the same order."""
    chosen = np.array(data.draw(st.permutations(range(len(rows)))))[: data.draw(st.integers(1, len(rows)))]
    context = ragged([np.array(c) for c, *_ in rows], np.int32)
    whole = ragged([np.array([*chain(*said)]) for _, said, _ in rows], np.int32)
    opens = [[i == 0 for one in said for i in range(len(one))] for _, said, _ in rows]
    begins = ragged([np.array(o, bool) for o in opens], np.bool_)
    bits = [[bool(bit >> i & 1) for i in range(len(o))] for (*_, bit), o in zip(rows, opens, strict=True)]
    mask = ragged([np.array(b, bool) for b in bits], np.bool_) if masked else None
    packed = pack([context], [whole], chosen, [mask], after, [begins])

    each = [(rows[r][0], one) for r in chosen for one in rows[r][1] or [[]]]
    alone = [ragged([np.array(e[i]) for e in each], np.int32) for i in (0, 1)]
    own = ColumnData(np.array([*chain(*(bits[r] for r in chosen))], bool), alone[1].offsets) if masked else None
    expected = pack(alone[:1], alone[1:], np.arange(len(each)), [own], after)
    for name in ("ids", "offsets", "row", "position", "token"):
        assert packed[name].tolist() == expected[name].tolist(), name


def test_no_rows_still_make_a_batch():
    empty = ragged([np.zeros(2, np.int32)], np.int32)
    packed = pack([empty], [empty], np.zeros(0, np.int64))
    assert packed["ids"].tolist() == [0] and packed["offsets"].tolist() == [0, 1]
    assert all(not len(packed[name]) for name in ("row", "position", "token"))


def test_scalars_are_given_to_every_token():
    column = ColumnData(np.array([1.5, 2.5], np.float32))
    assert torch.equal(flatten_column(column, np.array([1, 0]), np.array([2, 1])), torch.tensor([2.5, 2.5, 1.5]))


@given(st.integers(1, 5), st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=12))
def test_what_is_distinct_among_the_responses_to_a_prompt(fan, responses):
    responses = (responses * fan)[: len(responses) // fan * fan or fan]
    groups = [responses[i : i + fan] for i in range(0, len(responses), fan)]
    beginnings = sum(len({tuple(r[:n]) for r in g for n in range(1, len(r) + 1)}) for g in groups)
    rows = sum(len({tuple(r) for r in g}) for g in groups)
    assert count_distinct([np.array(r, np.int32) for r in responses], np.arange(len(responses)) // fan) == (
        beginnings,
        rows,
    )
