"""What rows share is computed once: each distinct beginning is one node, and what comes out is what the padded rows
give."""

from itertools import combinations, pairwise

import numpy as np
import packed_reference
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sample import examples
from transformers import Qwen2Config, Qwen2ForCausalLM

from msrl_graph.backends import prefix_tree, row_blocks
from msrl_graph.backends.kernels import ScoreRule, reference, torch_native
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack

# Few tokens, so that rows often begin alike.
rows_of_tokens = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.lists(st.integers(0, 2), max_size=4)),
    min_size=1,
    max_size=8,
)


def packed_rows(rows, after=False):
    contexts, responses = ([np.array(r[i], np.int32) for r in rows] for i in (0, 1))
    return pack([ragged(contexts, np.int32)], [ragged(responses, np.int32)], np.arange(len(rows)), after=after)


def defined(packed):
    """The paths of all nodes of a tree in order, by the definition: the distinct beginnings of rows, as far as they are
    needed. A token is its id and its routes."""
    ids = [(int(id),) for id in packed["ids"]]
    if (replayed := packed.get("routes", None)) is not None:
        ids = [(*id, *routes.flatten().tolist()) for id, routes in zip(ids, replayed, strict=True)]
    rows = [ids[start:stop] for start, stop in pairwise(packed["offsets"].tolist())]
    needed = [0 for _ in rows]
    for row, position in zip(packed["row"].tolist(), packed["position"].tolist(), strict=True):
        needed[row] = max(needed[row], position + 1)
    needed[0] = max(needed[0], 1)
    rows = [row[:length] for row, length in zip(rows, needed, strict=True)]
    paths = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    whole = {path for path in map(tuple, rows) if path and not any(path == other[:-1][: len(path)] for other in paths)}
    before = [
        tuple(rows[row][: position + 1])
        for row, position in zip(packed["row"].tolist(), packed["position"].tolist(), strict=True)
    ]
    of_id = [
        tuple(row[: at + 1]) if at < len(row) else None
        for row, (start, stop) in zip(rows, pairwise(packed["offsets"].tolist()), strict=True)
        for at in range(stop - start)
    ]
    return paths, whole, before, of_id


def read_paths(tree, packed):
    """The path of each node, read from the rows in which it stands."""
    tokens = [(id,) for id in tree.ids.tolist()]
    if tree.routes is not None:
        tokens = [(*id, *routes.flatten().tolist()) for id, routes in zip(tokens, tree.routes, strict=True)]
    by_place = {}
    place = 0
    for block in tree.rows:
        for row in block.tolist():
            by_place |= {place + at: tuple(tokens[node] for node in row[: at + 1]) for at in range(len(row))}
            place += len(row)
    return [by_place[place] for place in tree.place.tolist()]


def check_tree(packed, few):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "FEW", few)
        tree = prefix_tree.build_tree(packed)
        paths, whole, before, of_id = defined(packed)
        found = read_paths(tree, packed)
        assert len(found) == len(paths) and {*found} == paths
        assert tree.depth.tolist() == [len(path) - 1 for path in found]
        if tree.routes is None:
            assert found == sorted(paths, key=lambda path: (len(path), path))
        assert [found[node] for node in tree.before.tolist()] == before
        assert [None if node < 0 else found[node] for node in tree.node_of_id.tolist()] == of_id
        # The rows without padding: each row that begins no other, once.
        nodes = tree.packed.nodes.tolist()
        assert tree.packed.begins.tolist() == [0, *tree.packed.ends]
        rows = [tuple(nodes[start:stop]) for start, stop in pairwise([0, *tree.packed.ends])]
        assert len(rows) == len(whole) and {found[row[-1]] for row in rows} == whole
        assert all(found[node] == found[row[-1]][: at + 1] for row in rows for at, node in enumerate(row))
        assert max(map(len, rows)) == tree.packed.longest
        assert tree.packed.nodes[tree.packed.place].tolist() == [*range(len(found))]
        # The blocks have these rows, and little more.
        padded = [tuple(row) for block in tree.rows for row in block.tolist()]
        assert [row[: len(own)] for row, own in zip(padded, rows, strict=True)] == rows
        assert sum(map(len, padded)) <= max(row_blocks.bound_row_tokens(len(nodes)), few)
    return tree


@given(rows_of_tokens, st.booleans(), st.sampled_from([0, 30, 2048]))
@example([([0], []), ([1, 1], [])], False, 0)  # nothing is asked for
@example([([0, 1], [1]), ([0], []), ([0, 1], [1]), ([0], [1])], False, 0)  # equal rows, and rows that begin others
def test_each_beginning_is_one_node(rows, after, few):
    check_tree(packed_rows(rows, after), few)


@given(rows_of_tokens, st.randoms(use_true_random=False), st.sampled_from([1, 3, 8]))
def test_other_routes_are_another_beginning(rows, random, size):
    packed = packed_rows(rows)
    routes = [[random.choice([0, 0, 1, 300]) for _ in range(2 * size)] for _ in packed["ids"]]
    packed["routes"] = torch.tensor(routes, dtype=torch.int16).view(-1, 2, size)
    tree = check_tree(packed, 0)
    with pytest.MonkeyPatch.context() as patch:  # all digests are equal
        patch.setattr(prefix_tree, "DIGEST", 0)
        assert len(check_tree(packed, 0).ids) == len(tree.ids)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12).map(sorted), st.sampled_from([0, 40, 200]))
@example([60] * 12, 0)
def test_blocks_are_as_few_as_the_bound_allows(lengths, few):
    """Of all ways to divide the rows, none has fewer blocks, and of as many blocks none has less padding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "FEW", few)
        bound = max(row_blocks.bound_row_tokens(sum(lengths)), few)
        assert row_blocks.bound_row_tokens(sum(lengths)) == sum(lengths) * 9 // 8
        blocks = row_blocks.divide_rows(np.array(lengths))
    assert [index for block in blocks for index in range(len(lengths))[block]] == [*range(len(lengths))]
    size = sum(lengths[block][-1] * len(lengths[block]) for block in blocks)
    assert size <= bound
    for number in range(len(blocks)):
        for cuts in combinations(range(1, len(lengths)), number):
            least = sum((stop - start) * lengths[stop - 1] for start, stop in pairwise([0, *cuts, len(lengths)]))
            assert least > bound if number + 1 < len(blocks) else least >= size


def draw_states(tree, heads, kv_heads, size, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    shapes = [(heads, len(tree.ids), size), *[(kv_heads, len(tree.ids), size)] * 2, (len(tree.before), heads, size)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def attended(tree, states, rule, sinks=None, padded=False):
    """Outputs of the requested tokens and gradients: by the tree, or by the formula for one row after the other."""
    *states, slope = states
    states = [x.clone().requires_grad_() for x in (*states, *([] if sinks is None else [sinks]))]
    q, k, v, *sinks = states
    if not padded:
        out = tree.attend(q, k, v, rule, *sinks)
    else:
        out = torch.empty(len(tree.ids), len(q), q.shape[-1], dtype=q.dtype)
        for start, stop in pairwise([0, *tree.packed.ends]):
            row = tree.packed.nodes[start:stop]
            made = reference.attention(q[None, :, row], k[None, :, row], v[None, :, row], rule, *sinks)
            out = out.index_copy(0, row, made[0].transpose(0, 1))
    out = out[tree.before]
    (out * slope).sum().backward()
    return [out.detach(), *(x.grad for x in states)]


mixed_rows = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.lists(st.integers(0, 2), max_size=16)),
    min_size=1,
    max_size=6,
)


rules = st.builds(ScoreRule, st.just(0.3), st.sampled_from([None, 1, 4]), st.sampled_from([None, 0.7]))


@given(mixed_rows, st.sampled_from([1, 2, 4]), rules, st.booleans())
@examples(50)
def test_attention_in_blocks_and_without_padding_is_that_of_each_row_alone(rows, kv_heads, rule, sinks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "FEW", 0)
        tree = prefix_tree.build_tree(packed_rows(rows))
    states = draw_states(tree, 4, kv_heads, 8)
    given_sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64) if sinks else None
    expected = attended(tree, states, rule, given_sinks, padded=True)
    for kernels in (torch_native.KERNELS, packed_reference.KERNELS):  # the second has no caps: these are blocks
        found = attended(tree.with_kernels(kernels), states, rule, given_sinks)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 3])
def test_values_and_gradients_are_those_of_padded_rows(window):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=5,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=1,
    )
    draw = np.random.default_rng(0)
    contexts = [draw.integers(0, 5, n) for n in (3, 6, 2)]
    rows = [
        (contexts[i % 3].tolist(), draw.integers(0, 2, n).tolist()) for i, n in enumerate((4, 1, 0, 3, 4, 2, 4, 4, 1))
    ]
    packed = packed_rows(rows)
    model = Qwen2ForCausalLM(config)
    results = []
    for shared in (False, True):
        model.zero_grad()
        if shared:
            prefix_tree.prepare(model)
            found = prefix_tree.build_tree(packed)
            assert len(found.ids) < len(packed["ids"]) / 1.5
            hidden = prefix_tree.compute_states(model.model, found)[found.before]
        else:
            ids = torch.nested.nested_tensor_from_jagged(packed["ids"], packed["offsets"]).to_padded_tensor(0)
            states = model.model(input_ids=ids, use_cache=False).last_hidden_state
            hidden = states[packed["row"], packed["position"]]
        logp = model.lm_head(hidden).log_softmax(-1).gather(1, packed["token"][:, None])
        logp.square().sum().backward()
        results.append([logp.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-5), (a - b).abs().max()
