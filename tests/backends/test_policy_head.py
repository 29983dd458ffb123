"""A policy's outputs and gradients are those of all logits at once, in float64, however few logits may exist at once
and however the vocabulary is sharded."""

import gc
from unittest.mock import patch

import engines
import numpy as np
import pytest
import ranks
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample import examples
from tensordict import TensorDict
from torch import distributed as dist

from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends import policy_head
from msrl_graph.backends.engine_protocols import ForwardRequest
from msrl_graph.backends.memory import sizes, trainer
from msrl_graph.backends.policy_head import HeadPart, LogitRule
from msrl_graph.ir.workload import Workload
from msrl_graph.model import models
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.process import memory
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.sharding.layout import Layout

TOLERANCE = 2e-6  # of the largest value, for float32


@st.composite
def cases(draw):
    return {
        "tokens": draw(st.integers(0, 40)),
        "vocabulary": draw(st.integers(4, 200)),
        "size": draw(st.integers(1, 9)),
        "given": draw(st.integers(0, 3)),
        "best": draw(st.integers(0, 3)),
        "entropy": draw(st.booleans()),
        "temperatures": draw(st.booleans()),
        "rule": LogitRule(draw(st.sampled_from([1.0, 8.0])), draw(st.sampled_from([None, 3.0]))),
        "limit": draw(st.sampled_from([4, 4000, 1 << 28])),
        "seed": draw(st.integers(0, 99)),
    }


def make_inputs(case):
    generator = torch.Generator().manual_seed(case["seed"])
    tokens, vocabulary, size = case["tokens"], case["vocabulary"], case["size"]
    columns = {"token": torch.randint(vocabulary, (tokens,), generator=generator)}
    if case["given"]:
        columns["given"] = torch.randint(vocabulary, (tokens, case["given"]), generator=generator)
    if case["temperatures"]:
        columns["temperature"] = torch.rand(tokens, 1, generator=generator) + 0.5
    hidden, weight = (torch.randn(rows, size, generator=generator) for rows in (tokens, vocabulary))
    slopes = [torch.randn(tokens, count, generator=generator) for count in (1, 1, case["given"])]
    request = ForwardRequest(temperature=0.7, entropy=case["entropy"], best=case["best"])
    return hidden, weight, TensorDict(columns, batch_size=[]), request, slopes


def compute_plainly(hidden, weight, columns, request, rule):
    """The outputs by their formulas, from all logits."""
    logits = hidden @ weight.t() / rule.scale
    if rule.cap:
        logits = rule.cap * (logits / rule.cap).tanh()
    logps = (logits / columns.get("temperature", request.temperature)).log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    ids = columns.get("given", columns["token"][:, None][:, :0])
    return logps.gather(1, columns["token"][:, None])[:, 0], entropy, logps.gather(1, ids), logps


def sum_up(logp, entropy, given_logps, slopes):
    loss = (logp * slopes[0][:, 0]).sum()
    if entropy.requires_grad:
        loss = loss + (entropy * slopes[1][:, 0]).sum()
    return loss if given_logps is None else loss + (given_logps * slopes[2]).sum()


def agree(found, expected):
    found, expected = found.detach(), expected.detach()
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    assert found.shape == expected.shape
    assert not len(found) or float((found.double() - expected).abs().max()) <= TOLERANCE * scale


def check(case, rank=0, size=1):
    hidden, weight, columns, request, slopes = make_inputs(case)
    wide, heavy = (x.double().requires_grad_() for x in (hidden, weight))
    logp, entropy, given_logps, logps = compute_plainly(wide, heavy, columns, request, case["rule"])
    sum_up(logp, entropy if case["entropy"] else entropy.detach(), given_logps, slopes).backward()
    # Equal parts, of which the last ones may be short or empty.
    rows = -(-len(weight) // size)
    first = rank * rows
    hidden.requires_grad_()
    part = weight[first : first + rows].clone().requires_grad_()
    group = dist.group.WORLD if size > 1 else None
    with patch.object(sizes, "LOGITS", case["limit"]):
        outputs = policy_head.compute_outputs(hidden, HeadPart(part, case["rule"], first, group), columns, request)
        sum_up(outputs.logp, outputs.entropy, outputs.given, slopes).backward()
    if group is not None:
        dist.all_reduce(hidden.grad)
    agree(outputs.logp, logp)
    agree(outputs.entropy, entropy)
    assert outputs.entropy.requires_grad == case["entropy"]
    if case["given"]:
        agree(outputs.given, given_logps)
    if case["best"]:
        agree(outputs.best, logps.topk(case["best"]).values)
        agree(logps.gather(1, outputs.ids).float(), logps.topk(case["best"]).values)
    agree(hidden.grad, wide.grad)
    agree(part.grad, heavy.grad[first : first + rows])


@examples(200)
@given(cases())
def test_outputs_and_gradients_are_those_of_all_logits(case):
    check(case)


def check_all(rank, _folder, several):
    for case in several:
        check(case, rank, dist.get_world_size())


@pytest.mark.parametrize("world", [2, 3])
@examples(20)
@given(several=st.lists(cases(), min_size=5, max_size=5))
def test_a_vocabulary_may_be_sharded_over_ranks(world, several):
    ranks.run(world, check_all, several)


def test_no_more_logits_exist_than_may():
    """In the forward and in the backward pass; the backward pass has the products' gradients too."""
    tokens, vocabulary, size, limit = 512, 4096, 8, 1 << 20
    hidden, weight = torch.randn(tokens, size, requires_grad=True), torch.randn(vocabulary, size, requires_grad=True)
    columns = TensorDict({"token": torch.zeros(tokens, dtype=torch.long)}, batch_size=[])
    largest = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest.append(result.untyped_storage().nbytes())
            return result

    with patch.object(sizes, "LOGITS", limit), Sizes():
        outputs = policy_head.compute_outputs(hidden, HeadPart(weight), columns, ForwardRequest())
        outputs.logp.sum().backward()
    assert max(largest) == limit < 4 * tokens * vocabulary


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["infer", "update"])
def test_a_large_vocabulary_needs_little_memory(verb, tmp_path):
    """8,192 tokens of a vocabulary of 151,936: all logits would be 5 GB. What the engine holds is planned."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=151_936, num_hidden_layers=2, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "model")
    model = models.load("./model", tmp_path, "f32")
    engine = engines.trainer(model, optimizer=adamw(lr=0.0))
    draw = np.random.default_rng(0)
    prompt, response = (ragged(list(draw.integers(0, 151_936, (8, n))), np.int32) for n in (24, 1000))
    packed = pack([prompt], [response], np.arange(8))
    gc.collect()
    before = memory.live_bytes()["device"]
    with memory.Peak() as peak:
        if verb == "infer":
            engine.score([packed], ForwardRequest())
        else:
            engines.train(engine, packed, lambda made: made.logp.sum(), ForwardRequest())
    held = peak.peak["device"] - before
    moments = trainer.peaks(verb, Workload(model, Layout(), "f32", 8, 8, 24, 1000, trained=True)).values()
    assert held == pytest.approx(max(sum(items.values()) for items in moments), rel=0.02)
    assert held < max(items.get("activations", 0) for items in moments) + 300e6
