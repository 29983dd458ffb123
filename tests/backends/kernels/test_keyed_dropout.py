"""Masks of an adapter's dropout: by keys alone, and products and gradients as with an explicit mask."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from msrl_graph.backends.kernels import keyed_dropout
from msrl_graph.backends.kernels.keyed_dropout import InputDropout, TokenKeys, is_dropped
from msrl_graph.backends.prefix_tree import build_tree
from msrl_graph.model.lora_settings import Lora
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack

LORA = Lora(rank=4, alpha=8, targets=("q_proj",), dropout=0.3, seed=5)


def keys(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(-(2**31), 2**31, count).astype(np.int32))


def in_numpy(tokens, features, share):
    """The masks by 32-bit arithmetic without signs."""
    bits = tokens.numpy().view(np.uint32)[:, None] ^ features.numpy().view(np.uint32)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return bits.view(np.int32) < round(share * 2**32) - 2**31


def test_masks_are_those_of_unsigned_integers_and_drop_the_share_that_is_stated():
    features = InputDropout(LORA, "a", (0, 700), TokenKeys()).features
    tokens = keys(900)
    for share in (0.05, 0.3, 0.9):
        mask = is_dropped(tokens, features, share)
        assert np.array_equal(mask.numpy(), in_numpy(tokens, features, share))
        for part in (mask.double().mean(), mask[:, 0].double().mean(), mask[0].double().mean()):
            assert float(part) == pytest.approx(share, abs=0.06)
        # Neither tokens nor features nor projections go together.
        other = is_dropped(tokens, InputDropout(LORA, "b", (0, 700), TokenKeys()).features, share)
        for one, two in ((mask, other), (mask[1:], mask[:-1]), (mask[:, 1:], mask[:, :-1])):
            assert float((one & two).double().mean()) == pytest.approx(share**2, abs=0.01)


def test_a_rank_has_its_part_of_the_inputs():
    whole = InputDropout(LORA, "a", (0, 10), TokenKeys()).features
    assert torch.equal(InputDropout(LORA, "a", (4, 10), TokenKeys()).features, whole[4:])


@pytest.mark.parametrize("elements", [1, 64, 1 << 22])
def test_products_and_gradients_are_those_of_a_stored_mask(elements, monkeypatch):
    monkeypatch.setattr(keyed_dropout, "ELEMENTS", elements)
    dropout = InputDropout(LORA, "a", (0, 16), tokens := TokenKeys(keys(12)))
    draw = torch.Generator().manual_seed(0)
    x, down, weights = (torch.randn(*size, generator=draw).double() for size in ((3, 4, 16), (4, 16), (3, 4, 4)))
    found = []
    mask = (~is_dropped(tokens.keys, dropout.features, 0.3)).double() / 0.7
    for multiply in (dropout.multiply, lambda x, down: (x * mask.view(3, 4, 16)) @ down.t()):
        own = x.clone().requires_grad_()
        matrix = down.clone().requires_grad_()
        product = multiply(own, matrix)
        (product * weights).sum().backward()
        found.append((product.detach(), own.grad, matrix.grad))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    tokens.keys = None
    assert torch.equal(dropout.multiply(x, down), torch.nn.functional.linear(x, down))


def test_keys_of_tokens_depend_on_their_prefix_alone():
    """The micro-batch and the other rows change nothing; a step has keys of its own."""
    draw = np.random.default_rng(0)
    prompts = ragged([draw.integers(2, 9, 5) for _ in range(3) for _ in range(2)], np.int32)
    responses = ragged([draw.integers(2, 9, n) for n in (3, 4, 5, 2, 3, 4)], np.int32)

    def prefixes(rows, key):
        packed = pack([prompts], [responses], np.array(rows))
        tree = build_tree(packed, key)
        ids, offsets = packed["ids"].numpy(), packed["offsets"].numpy()
        found = {}
        for start, stop in pairwise(offsets):
            for end in range(start, stop):
                if (node := int(tree.node_of_id[end])) >= 0:
                    found[tuple(ids[start : end + 1])] = int(tree.keys[node])
        return found

    whole = prefixes(range(6), 7)
    parts = [prefixes(rows, 7) for rows in ([5, 0], [1, 3], [2, 4])]
    assert {prefix: key for part in parts for prefix, key in part.items()} == whole
    assert all(part[prefix] == whole[prefix] for part in parts for prefix in part)
    assert len({*whole.values()}) == len(whole)
    other = prefixes(range(6), 8)
    assert other.keys() == whole.keys() and not any(other[prefix] == whole[prefix] for prefix in whole)
    assert build_tree(pack([prompts], [responses], np.arange(6))).keys is None
