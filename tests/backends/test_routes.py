"""Routes of a mixture: replaying a router's own routes changes no bit, replaying others' routes gives theirs."""

import engines
import numpy as np
import pytest
import ranks
import torch
from hybrid_families import qwen3_5_moe, qwen3_next
from mamba_families import granite4_experts, nemotron_h_experts
from mixture import latent, mixture
from mixture_families import glm4_moe, gpt_oss, minimax_m2, mixtral

from msrl_graph.algorithms.optimizers import adamw, sgd
from msrl_graph.backends import hf_modules
from msrl_graph.backends.engine_protocols import ForwardRequest, GenerateRequest, Sampling, StepRequest
from msrl_graph.backends.routes import UNKNOWN
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.model import models
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.sharding.layout import Layout, slices

ASKED = ForwardRequest(routes=True)
SAMPLES = 3
RECURRENT = [qwen3_next, qwen3_5_moe, nemotron_h_experts, granite4_experts]
MADE = pytest.mark.parametrize("made", [mixture, latent, mixtral, glm4_moe, minimax_m2, gpt_oss, *RECURRENT])


def loaded(made, folder):
    return models.load(made(folder), folder, "f32", NOWHERE)


def packed_rows():
    """Rows of three prompts, whose responses begin alike."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, 16, n).astype(np.int32) for n in (3, 6, 1)]
    columns = [ragged([prompts[i % 3] for i in range(9)], np.int32)]
    columns.append(ragged([draw.integers(2, 4, n).astype(np.int32) for n in (4, 1, 0, 3, 4, 2, 4, 4, 1)], np.int32))
    return columns, pack(columns[:1], columns[1:], np.arange(9))


def trained(engine, packed):
    """The outputs, and the gradients of the weights."""
    outputs = []
    engine.train([packed], lambda made, _: (outputs.append(made), made.logp.exp().sum())[1], ForwardRequest())
    gradients = [engine._gradients.take(parameter) for parameter in engine._parameters]
    return outputs[0].logp.detach(), gradients


@MADE
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_replaying_its_own_routes_changes_no_bit(made, recompute, tmp_path):
    model = loaded(made, tmp_path)
    engine = engines.trainer(model, optimizer=adamw(lr=0.0), recompute=recompute)
    _, packed = packed_rows()
    (recorded,) = engine.score([packed], ASKED)
    assert recorded.routes.shape == (len(packed["ids"]), len(model.expert_layers), model.expert_mlp.active)
    logp, gradients = trained(engine, packed)
    packed["routes"] = recorded.routes
    replayed_logp, replayed_gradients = trained(engine, packed)
    assert torch.equal(logp, replayed_logp)
    assert all(torch.equal(one, other) for one, other in zip(gradients, replayed_gradients, strict=True))
    # Other routes give other results: the property above does not hold because routes are ignored.
    packed["routes"] = recorded.routes.flip(0)
    assert not torch.allclose(trained(engine, packed)[0], logp, atol=1e-3)


@MADE
def test_a_generator_returns_the_routes_that_the_trainer_takes_of_the_same_weights(made, tmp_path):
    model = loaded(made, tmp_path)
    generator = engines.generator(model)
    hf_modules.fill(model, generator.allocate())
    prompts = [np.array([3, 4, 5], np.int32), np.array([7], np.int32), np.array([3, 4, 5], np.int32)]
    request = GenerateRequest(
        prompts, np.arange(9, dtype=np.uint64), Sampling(SAMPLES, 6, 1.0, 1.0, 0, ends=(1,)), routes=True
    )
    drawn = sorted(generator.generate(request), key=lambda response: response.place)
    contexts = ragged([prompts[response.place // SAMPLES] for response in drawn], np.int32)
    responses = ragged([response.tokens for response in drawn], np.int32)
    packed = pack([contexts], [responses], np.arange(9))
    assert [len(response.routes) for response in drawn] == np.diff(packed["offsets"]).tolist()
    (output,) = engines.trainer(model).score([packed], ASKED)
    chosen = np.concatenate([response.routes for response in drawn])
    assert (np.sort(chosen, -1) == np.sort(output.routes.numpy(), -1)).all()
    assert len(np.unique(chosen)) > 2


def test_rows_with_other_routes_share_no_prefix_from_there_on(tmp_path):
    """So each row is computed with its own routes, though rows have the same tokens."""
    model = loaded(mixture, tmp_path)
    engine = engines.trainer(model)
    tokens = [np.array([3, 4, 5], np.int32)] * 2
    packed = pack([ragged(tokens, np.int32)], [ragged(tokens, np.int32)], np.arange(2))
    routes = torch.tensor([[0, 1], [2, 3]], dtype=torch.int16).expand(10, 2, 2).clone()
    packed["routes"] = routes
    (alike,) = engine.score([packed], ASKED)
    assert torch.equal(alike.routes, routes) and torch.equal(alike.logp[:3], alike.logp[3:])
    routes[6] = torch.tensor([[2, 3], [0, 1]], dtype=torch.int16)  # the second row's second token
    (other,) = engine.score([packed], ASKED)
    assert torch.equal(other.routes, routes)
    assert torch.equal(other.logp[:3], alike.logp[:3]) and not torch.isclose(other.logp[3:], alike.logp[3:]).any()


def replay_on_rank(rank, folder, model_folder, layout):
    """What a layout computes with given routes is what one rank computes."""
    model = models.load(str(model_folder), model_folder, "f32", NOWHERE)
    _, packed = packed_rows()
    number = next(iter(model.experts)).number
    size = (len(packed["ids"]), len(model.expert_layers), next(iter(model.experts)).active)
    draw = np.random.default_rng(0)
    packed["routes"] = torch.from_numpy(
        np.argsort(draw.random((*size[:2], number)), -1)[..., : size[2]].astype(np.int16)
    )
    alone = engines.trainer(model, optimizer=sgd(lr=0.0, momentum=0.9))
    engine = engines.trainer(model, layout, rank, engines.mesh(layout), optimizer=sgd(lr=0.0, momentum=0.9))
    (right,) = alone.score([packed], ASKED)
    (made,) = engine.score([packed], ASKED)
    computed = made.routes != UNKNOWN
    assert torch.equal(made.routes, packed["routes"].where(computed, UNKNOWN)) and computed.float().mean() > 0.9
    torch.testing.assert_close(made.logp, right.logp, atol=2e-5, rtol=0)
    for trainer, micro_batches in ((alone, [packed] * layout.dp), (engine, [packed])):
        trainer.train(micro_batches, lambda outputs, _: outputs.logp.exp().sum(), ForwardRequest())
        trainer.step(StepRequest(lr=0.1, clip_grad=1e9))
    whole = {piece.name: piece.tensor for piece in alone.shards()}
    for piece in engine.shards():
        torch.testing.assert_close(piece.tensor, whole[piece.name][slices(piece.box)], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=3),
        Layout(dp=2, ep=2),
        Layout(tp=2),
        Layout(tp=2, ep=2),
        Layout(cp=2),
        Layout(cp=2, cp_kind="ulysses"),
    ],
    ids=str,
)
@MADE
def test_ranks_of_a_layout_replay_as_one_rank_does(made, layout, tmp_path):
    if made in RECURRENT and layout.cp > 1:
        pytest.skip("the compiler rejects it: recurrent layers need whole rows")
    if made is latent and layout.cp > 1 and layout.cp_kind == "ulysses":
        pytest.skip("the same code as for the other mixture")
    made(tmp_path)
    ranks.run(2, replay_on_rank, tmp_path, layout)


def test_unknown_routes_are_the_routers(tmp_path):
    model = loaded(mixture, tmp_path)
    engine = engines.trainer(model)
    _, packed = packed_rows()
    (own,) = engine.score([packed], ASKED)
    packed["routes"] = torch.full_like(own.routes, UNKNOWN)
    (unknown,) = engine.score([packed], ASKED)
    assert torch.equal(own.logp, unknown.logp) and torch.equal(own.routes, unknown.routes)
