"""What rows share is computed once: each distinct beginning is one node, and what comes out is what the padded rows
give."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from msrl_graph.backends import prefix_tree
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack

# Few tokens, so that rows often begin alike.
rows_of_tokens = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.lists(st.integers(0, 2), max_size=4)),
    min_size=1,
    max_size=8,
)


def packed_rows(rows):
    contexts, responses = ([np.array(r[i], np.int32) for r in rows] for i in (0, 1))
    return pack([ragged(contexts, np.int32)], [ragged(responses, np.int32)], np.arange(len(rows)))


@given(rows_of_tokens)
def test_each_beginning_is_one_node(rows):
    found = prefix_tree.build_tree(packed_rows(rows))
    beginnings = {tuple((c + r)[:n]) for c, r in rows if r for n in range(1, len(c) + len(r))}
    beginnings.add((rows[0][0][0],))
    # A node's beginning, read off the row in which it stands.
    width = found.rows.shape[1]
    paths = [tuple(found.ids[found.rows[p // width, : p % width + 1]].tolist()) for p in found.place.tolist()]
    assert sorted(paths) == sorted(beginnings)
    assert found.depth.tolist() == [len(p) - 1 for p in paths]
    asked = [tuple((c + r)[: len(c) + i]) for c, r in rows for i in range(len(r))]
    assert [paths[n] for n in found.before.tolist()] == asked


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
