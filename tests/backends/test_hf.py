"""Engines on one rank: weights read and written, bf16 with float32 masters, sampling against torch, stops and
filters."""

import json
import shutil

import engines
import numpy as np
import pytest
import torch
from light_engines import EXAMPLE, PROMPTS, model, sampling
from safetensors.torch import load_file

from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends import hf_modules
from msrl_graph.backends.engine_protocols import ForwardRequest, GenerateRequest, Shard, StepRequest, collect_responses
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.model import models
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.sharding.layout import Layout, Side, full_box, shard, slices


@pytest.fixture(scope="module")
def generator():
    return engines.loaded(model(), EXAMPLE / "model")


def test_greedy_agrees_with_transformers(generator):
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(EXAMPLE / "model")
    got, _ = collect_responses(generator.generate(GenerateRequest(PROMPTS, np.arange(3), sampling(temperature=0.0))))
    for prompt, tokens in zip(PROMPTS, got, strict=True):
        out = net.generate(torch.from_numpy(prompt)[None], max_new_tokens=5, do_sample=False)
        assert list(tokens) == out[0, len(prompt) :].tolist()
        assert len(tokens) == 5 or tokens[-1] == 1


def test_draws_follow_the_distribution(generator):
    """The first token of one prompt, drawn 4,000 times, against the softmax."""
    logits = transformer_logits(PROMPTS[1], 0.8)
    got, _ = collect_responses(
        generator.generate(
            GenerateRequest([PROMPTS[1]], np.arange(4000), sampling(samples=4000, max_tokens=1, temperature=0.8))
        )
    )
    counts = np.bincount([t[0] for t in got], minlength=16)
    expected = logits.softmax(-1).numpy() * 4000
    some = expected > 5
    assert (((counts - expected) ** 2 / expected)[some]).sum() < 40


def test_top_k_and_top_p_leave_only_the_likeliest(generator):
    share = transformer_logits(PROMPTS[1], 2.0).softmax(-1)
    order = share.argsort(descending=True).tolist()
    drawn, _ = collect_responses(
        generator.generate(
            GenerateRequest(
                [PROMPTS[1]], np.arange(2000), sampling(samples=2000, max_tokens=1, temperature=2.0, top_k=3)
            )
        )
    )
    assert {int(t[0]) for t in drawn} == set(order[:3])
    drawn, _ = collect_responses(
        generator.generate(
            GenerateRequest(
                [PROMPTS[1]], np.arange(2000), sampling(samples=2000, max_tokens=1, temperature=2.0, top_p=0.5)
            )
        )
    )
    nucleus = [t for i, t in enumerate(order) if share[order[:i]].sum() < 0.5]
    assert {int(t[0]) for t in drawn} == set(nucleus)
    # Both: the nucleus is one of what the k likeliest are together.
    drawn, _ = collect_responses(
        generator.generate(
            GenerateRequest(
                [PROMPTS[1]], np.arange(2000), sampling(samples=2000, max_tokens=1, temperature=2.0, top_k=3, top_p=0.8)
            )
        )
    )
    both = [t for i, t in enumerate(order[:3]) if share[order[:i]].sum() < 0.8 * share[order[:3]].sum()]
    assert {int(t[0]) for t in drawn} == set(both) < set(order[:3])
    assert share[both].sum() < 0.8, "of all tokens it would be larger"


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_min_p_leaves_tokens_that_are_likely_enough_beside_the_likeliest(generator, temperature):
    share = transformer_logits(PROMPTS[1], temperature).softmax(-1)
    order = share.argsort(descending=True)
    bound = float(share[order[2:4]].mean() / share.max())  # between the third and the fourth likeliest
    found = {}
    for changes in ({"min_p": bound}, {"min_p": bound, "top_k": 2}, {"min_p": 1.0}):
        said = sampling(samples=20000, max_tokens=1, temperature=temperature, **changes)
        drawn, _ = collect_responses(generator.generate(GenerateRequest([PROMPTS[1]], np.arange(20000), said)))
        found[tuple(changes)[-1], changes["min_p"]] = {int(t[0]) for t in drawn}
    assert list(found.values()) == [set(order[:n].tolist()) for n in (3, 2, 1)]


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.7}, {"temperature": 2.0, "top_k": 3, "top_p": 0.9}, {"min_p": 0.2}]
)
def test_drawn_tokens_have_the_log_probability_of_the_whole_softmax(generator, changes):
    engine = engines.trainer(model())
    tokens, logps = collect_responses(
        generator.generate(GenerateRequest(PROMPTS, np.arange(12), sampling(samples=4, **changes)))
    )
    prompts = ragged([PROMPTS[i // 4] for i in range(12)], np.int32)
    packed = pack([prompts], [ragged(tokens, np.int32)], np.arange(12))
    (found,) = engine.score([packed], ForwardRequest(changes.get("temperature", 1.0)))
    assert all(x.dtype == np.float32 for x in logps)
    assert np.allclose(np.concatenate(logps), found.logp.numpy(), atol=2e-5)


def test_an_update_is_told_the_entropy_of_each_token(generator):
    engine = engines.trainer(model(), optimizer=adamw(lr=0.0))
    tokens, _ = collect_responses(generator.generate(GenerateRequest(PROMPTS, np.arange(12), sampling(samples=4))))
    packed = pack([ragged([PROMPTS[i // 4] for i in range(12)], np.int32)], [ragged(tokens, np.int32)], np.arange(12))
    (found,) = engine.score([packed], ForwardRequest(0.8, best=16))
    assert found.entropy is None and engine.score([packed], ForwardRequest(0.8))[0].entropy is None  # nobody asks
    expected = torch.distributions.Categorical(logits=found.best).entropy()
    looked = []
    for asked in (ForwardRequest(0.8), ForwardRequest(0.8, best=2), ForwardRequest(0.8, entropy=True)):

        def look(made, asked=asked):
            told = made.entropy
            looked.append(told.requires_grad == asked.entropy and torch.allclose(told.detach(), expected, atol=1e-5))
            return made.logp.sum()

        engines.train(engine, packed, look, asked)
    assert looked == [True] * 3


def test_at_temperature_0_a_token_is_sure(generator):
    _, logps = collect_responses(generator.generate(GenerateRequest(PROMPTS, np.arange(3), sampling(temperature=0.0))))
    assert not np.concatenate(logps).any()


def test_each_response_has_its_own_temperature(generator):
    """A row draws what it would draw among rows of one temperature, those at 0 the likeliest tokens."""
    heat = np.array([0, 1, 2, 0.5, 0, 1], np.float32)
    mixed, logps = collect_responses(
        generator.generate(GenerateRequest(PROMPTS, np.arange(6), sampling(samples=2, temperature=heat)))
    )
    for value in np.unique(heat):
        alone, expected = collect_responses(
            generator.generate(GenerateRequest(PROMPTS, np.arange(6), sampling(samples=2, temperature=float(value))))
        )
        for i in np.flatnonzero(heat == value):
            assert list(mixed[i]) == list(alone[i])
            assert np.allclose(logps[i], expected[i], atol=1e-6)
    assert len({tuple(t) for t in mixed}) > 3


def transformer_logits(prompt, temperature):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return (
            AutoModelForCausalLM.from_pretrained(EXAMPLE / "model")(torch.from_numpy(prompt)[None]).logits[0, -1]
            / temperature
        )


def test_released_weights_take_no_memory(generator):
    generator.release()
    pieces = {id(p.tensor): p.tensor for p in generator._shards}
    assert sum(t.untyped_storage().nbytes() for t in pieces.values()) == 0
    generator.allocate()
    assert sum(t.untyped_storage().nbytes() for t in pieces.values()) == 4 * model().parameters


def test_bf16_weights_learn_by_float32_masters():
    """Steps far below a bf16 weight's resolution add up in the master."""
    engine = engines.trainer(model("bf16"), optimizer=adamw(lr=0.0, weight_decay=0.0))
    assert all(s.tensor.dtype == torch.bfloat16 for s in engine.shards())
    before = [s.tensor.clone() for s in engine.shards()]
    packed = pack([ragged(PROMPTS, np.int32)], [ragged([np.array([3, 4, 1])] * 3, np.int32)], np.arange(3))
    first = float(engine.score([packed], ForwardRequest())[0].logp.mean())
    for _ in range(20):
        engines.train(engine, packed, lambda made: -made.logp.mean(), ForwardRequest())
        engine.step(StepRequest(2e-5, 1.0))
    assert float(engine.score([packed], ForwardRequest())[0].logp.mean()) > first
    assert all(m.dtype == torch.float32 for m in engine._optimizer.parts[0].masters)
    moved = [not torch.equal(a, s.tensor) for a, s in zip(before, engine.shards(), strict=True)]
    assert any(moved)


def test_only_the_boxes_are_read_and_what_is_missing_is_named(tmp_path):
    m = model()
    layout = Layout(tp=2, dp=1)
    shards = [Shard(t.name, box := shard(t, Side(layout), 1), torch.empty([b - a for a, b in box])) for t in m.weights]
    whole = load_file(EXAMPLE / "model" / "model.safetensors")
    hf_modules.fill(m, shards)
    for piece in shards:
        assert torch.equal(piece.tensor, whole[piece.name][slices(piece.box)])
    with pytest.raises(FileNotFoundError, match=r"no weights for model\.none\.weight"):
        hf_modules.fill(m, [*shards, Shard("model.none.weight", full_box((2, 2)), torch.empty(2, 2))])


def test_dropout_in_a_config_makes_no_noise(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(EXAMPLE / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    engine = engines.trainer(models.load(str(folder), tmp_path, None, NOWHERE))
    packed = pack([ragged(PROMPTS, np.int32)], [ragged([np.array([3, 4, 1])] * 3, np.int32)], np.arange(3))
    assert torch.equal(*(made.logp for made in engine.score([packed, packed], ForwardRequest())))
