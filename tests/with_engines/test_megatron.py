"""Megatron-Core in the ranks' own processes: on every layout it computes and steps as fsdp on one rank, with the
vocabulary of tensor parallelism (backends/policy_head.py) too."""

import json
from dataclasses import replace
from pathlib import Path

import engines
import numpy as np
import pytest
import ranks
import torch
from conformance import adapter_values
from mixture import latent, mixture
from place import THRICE, TRAINED, assert_alike
from torch import distributed as dist

from msrl_graph.algorithms.optimizers import sgd
from msrl_graph.backends.engine_protocols import ForwardRequest, StepRequest
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.model import lora, models
from msrl_graph.model.lora_settings import Lora
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.sharding.layout import Layout, slices

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "arithmetic"
ROWS = 16


def model(folder, **changes):
    """The example's model, with other fields of its config and weights at random."""
    from safetensors.torch import save_file

    config = json.loads((EXAMPLE / "model" / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text((EXAMPLE / "model" / "tokenizer.json").read_text())
    found = models.load(str(folder), Path("/"), None, NOWHERE)
    draw = torch.Generator().manual_seed(0)
    weights = {t.name: torch.randn(t.shape, generator=draw) * 0.2 for t in (*found.weights, found.scoring.weights[-1])}
    save_file(weights, str(folder / "model.safetensors"))
    return found


def micro_batches(rank, layout, scores=False):
    """Of 16 rows those of a data-parallel group, two or four at a time, some with a common beginning; their responses
    hold padding tokens (0) too, as a policy may draw them. With `scores` every other one is a reward model's."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, 16, draw.integers(2, 7)) for _ in range(ROWS // 2)]
    contexts = ragged([prompts[i // 2] for i in range(ROWS)], np.int32)
    responses = ragged([draw.integers(0, 16, draw.integers(2, 6)) for _ in range(ROWS)], np.int32)
    own = np.arange(ROWS).reshape(layout.dp, -1)[layout.coordinates(rank).dp]
    size = 2 if layout.vpp > 1 else 4
    packed = []
    for i, rows in enumerate(own.reshape(-1, size)):
        packed.append(pack([contexts], [responses], rows, after=scores and i % 2 == 1))
        packed[-1]["given"] = _given(responses, rows)
    return packed


def _given(responses, rows):
    tokens = np.concatenate([responses[r] for r in rows]).astype(np.int64)
    return torch.from_numpy(np.stack([tokens, (tokens + 3) % 16], 1))


def loss(made, _):
    if made.values is not None:
        return (made.values**2).sum()
    return (made.logp * torch.linspace(-1, 1, len(made.logp))).sum() + 0.1 * made.entropy.sum() + made.given.sum()


def trained(engine, batches, scores):
    """What three steps tell: log-probabilities before, norms, and the weights by tensor."""
    asked = ForwardRequest(0.8, entropy=not scores, best=0 if scores else 3)
    told = [[None if x is None else x.clone() for x in out] for out in engine.score(batches, asked)]
    norms = []
    for step in range(3):
        dropout = step if engine.model.lora and engine.model.lora.dropout else None
        engine.train(batches, loss, ForwardRequest(0.8, entropy=not scores, dropout=dropout))
        norms.append(engine.step(StepRequest(0.3, 1.0)))
    return told, norms, {s.name: (s.box, s.tensor.clone()) for s in engine.shards()}


def routed(batches, of):
    """The micro-batches with routes at random, of each row its own; every tenth token's are the router's."""
    experts = next(iter(of.experts))
    for packed in batches:
        draw = np.random.default_rng(int(packed["ids"].sum()))
        size = (len(packed["ids"]), len(of.expert_layers))
        routes = np.argsort(draw.random((*size, experts.number)), -1)[..., : experts.active].astype(np.int16)
        routes[::10] = -1
        packed["routes"] = torch.from_numpy(routes)
    return batches


def _replays(rank, folder, layout, of, recompute):
    _alike(rank, folder, layout, of, "megatron", lambda batches: routed(batches, of), recompute=recompute)


def _records(rank, folder, layout, of):
    """What a layout returns of the routers of one rank."""
    engine = engines.built("megatron", of, layout, rank, engines.mesh(layout))
    alone = engines.trainer(of)
    batches = micro_batches(rank, layout)
    asked = ForwardRequest(0.8, routes=True)
    for found, wanted in zip(engine.score(batches, asked), alone.score(batches, asked), strict=True):
        assert torch.equal(found.routes.sort(-1).values, wanted.routes.sort(-1).values)
        assert torch.allclose(found.logp, wanted.logp, atol=1e-5)


def set_adapter(engine, of):
    """Give an adapter values at random, those of B too."""
    tensors = {tensor.name: tensor for tensor in of.trained if tensor.role == "adapter"}
    for shard in engine.shards():
        if shard.name in tensors:
            shard.tensor.copy_(adapter_values(tensors[shard.name])[slices(shard.box)])


def _alike(rank, _, layout, of, name, prepare=lambda batches: batches, **options):
    scores = of.scores
    alone = engines.trainer(of, optimizer=sgd(lr=0.0, momentum=0.9)) if rank == 0 else None
    engine = engines.built(name, of, layout, rank, engines.mesh(layout), sgd(lr=0.0, momentum=0.9), **options)
    for trainer in filter(None, (alone, engine)):
        set_adapter(trainer, of)
    found, norms, weights = trained(engine, prepare(micro_batches(rank, layout, scores)), scores)
    everyone = [None] * layout.devices
    dist.all_gather_object(everyone, (found, norms, weights))
    if rank:
        return
    batches = [b for dp in range(layout.dp) for b in micro_batches(layout.rank(tp=0, dp=dp), layout, scores)]
    batches = prepare(batches)
    before = {s.name: (s.box, s.tensor.clone()) for s in alone.shards()}
    wanted, want_norms, want_weights = trained(alone, batches, scores)
    told = [layout.rank(tp=0, dp=dp, pp=layout.pp - 1) for dp in range(layout.dp)]
    for one, other in zip((o for r in told for o in everyone[r][0]), wanted, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, atol=1e-5), (a - b).abs().max()
    for _, some, held in everyone:
        assert some == pytest.approx(want_norms, rel=1e-4)
        for tensor, (box, values) in held.items():
            right, begun = (weights[tensor][1][slices(box)] for weights in (want_weights, before))
            if values.numel():
                rounding = 3e-7  # of a weight
                assert (values - right).abs().max() < 1e-4 * (right - begun).abs().max() + rounding, tensor


LAYOUTS = {
    "one rank": Layout(),
    "tp 2": Layout(tp=2),
    "pp 2": Layout(pp=2),
    "dp 2": Layout(dp=2),
    "dp 2, zero 0": Layout(dp=2, zero=0),
    "vpp 2": Layout(pp=2, vpp=2),
    "tp 2, pp 2": Layout(tp=2, pp=2),
    "uneven stages": Layout(pp=2, stages=(1, 3)),
    "cp 2": Layout(cp=2),
    "cp 2 by Ulysses, tp 2": Layout(cp=2, tp=2, cp_kind="ulysses"),
    "cp 2, pp 2": Layout(cp=2, pp=2),
    "cp 2 by Ulysses, dp 2": Layout(cp=2, dp=2, cp_kind="ulysses"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", ["untied", "tied", "scores"])
def test_it_computes_and_steps_as_fsdp_on_one_rank(layout, kind, tmp_path):
    of = model(tmp_path, tie_word_embeddings=kind == "tied")
    ranks.run(layout.devices, _alike, layout, of.scoring if kind == "scores" else of, "megatron")


def test_it_has_the_activation_of_the_config(tmp_path):
    ranks.run(2, _alike, Layout(tp=2), model(tmp_path, hidden_act="gelu_pytorch_tanh"), "megatron")


MIXED = [
    Layout(),
    Layout(tp=2, etp=2),
    Layout(tp=2, ep=2),
    Layout(dp=2, ep=2),
    Layout(pp=2),
    Layout(tp=2, dp=2, ep=2, etp=2),
    Layout(dp=4, ep=2),
]


@pytest.mark.parametrize("layout", MIXED, ids=str)
def test_a_mixture_computes_and_steps_as_fsdp_on_one_rank(layout, tmp_path):
    of = models.load(mixture(tmp_path), Path("/"), None, NOWHERE)
    ranks.run(layout.devices, _alike, layout, of, "megatron")


@pytest.mark.parametrize("recompute", ["none", "full", ("moe", "norms")], ids=str)
@pytest.mark.parametrize("layout", [Layout(tp=2, ep=2), Layout(pp=2), Layout(dp=2, ep=2)], ids=str)
def test_it_replays_routes_as_fsdp_on_one_rank(layout, recompute, tmp_path):
    """With stages, a layer is recomputed after passes of other micro-batches, whose routes are others."""
    of = models.load(mixture(tmp_path), Path("/"), None, NOWHERE)
    ranks.run(layout.devices, _replays, layout, of, recompute)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, ep=2), Layout(cp=2)], ids=str)
def test_it_replays_and_records_routes_of_grouped_experts(layout, tmp_path):
    of = models.load(latent(tmp_path), Path("/"), None, NOWHERE)
    ranks.run(layout.devices, _replays, layout, of, "none")
    ranks.run(layout.devices, _records, layout, of)


LATENT = [
    Layout(),
    Layout(tp=2, ep=2),
    Layout(tp=2, etp=2),
    Layout(dp=2, ep=2),
    Layout(pp=2),
    Layout(cp=2),
    Layout(tp=2, pp=2, stages=(1, 2)),
    Layout(tp=2, dp=2, ep=2, etp=2),
]


@pytest.mark.parametrize("layout", LATENT, ids=str)
def test_latent_attention_computes_and_steps_as_fsdp_on_one_rank(layout, tmp_path):
    """With a first layer without experts, shared ones, and groups of which a router takes the best."""
    of = models.load(latent(tmp_path), Path("/"), None, NOWHERE)
    ranks.run(layout.devices, _alike, layout, of, "megatron")


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": None, "rope_interleave": False, "topk_group": 4, "num_experts_per_tok": 3},
        {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
    ids=["no latent of queries, all groups", "plain positions"],
)
def test_so_does_another_form_of_it(changes, tmp_path):
    of = models.load(latent(tmp_path, **changes), Path("/"), None, NOWHERE)
    ranks.run(2, _alike, Layout(tp=2, ep=2), of, "megatron")


def test_a_router_that_it_has_not_is_refused(tmp_path, alone):
    of = models.load(latent(tmp_path, num_experts_per_tok=3), Path("/"), None, NOWHERE)
    with pytest.raises(ValueError, match=r"a group of experts by its best 1 .* this model by its best 2: use `fsdp`"):
        engines.built("megatron", of, Layout(), 0, engines.mesh(Layout()))


ADAPTER = Lora(rank=3, alpha=6, targets=(lora.ALL_LINEAR,))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_it_trains_an_adapter_as_fsdp_on_one_rank(layout, tmp_path):
    ranks.run(layout.devices, _alike, layout, lora.adapt(model(tmp_path), ADAPTER), "megatron")


DROPOUT = replace(ADAPTER, dropout=0.3)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_dropout_has_the_same_masks_on_each_layout(layout, tmp_path):
    ranks.run(layout.devices, _alike, layout, lora.adapt(model(tmp_path), DROPOUT), "megatron")


RECOMPUTED = pytest.mark.parametrize("recompute", ["full", 1, ("attention", "mlp", "norms")], ids=str)


@RECOMPUTED
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_so_it_has_if_layers_are_recomputed(layout, recompute, tmp_path):
    """With stages, a layer is recomputed after passes of other micro-batches, whose masks are others."""
    ranks.run(layout.devices, _recomputed, layout, lora.adapt(model(tmp_path), DROPOUT), recompute)


@RECOMPUTED
@pytest.mark.parametrize("layout", [Layout(tp=2, ep=2), Layout(pp=2)], ids=str)
def test_so_does_latent_attention_that_is_recomputed(layout, recompute, tmp_path):
    of = models.load(latent(tmp_path), Path("/"), None, NOWHERE)
    ranks.run(layout.devices, _recomputed, layout, of, recompute)


@pytest.mark.parametrize("layout", [Layout(tp=2, ep=2), Layout(tp=2, pp=2, stages=(1, 2))], ids=str)
def test_so_it_has_of_latent_attention(layout, tmp_path):
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    of = models.load(latent(tmp_path), Path("/"), None, NOWHERE)
    ranks.run(layout.devices, _alike, layout, lora.adapt(of, replace(DROPOUT, targets=targets)), "megatron")


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_it_trains_an_adapter_and_a_head_that_scores(layout, tmp_path):
    ranks.run(layout.devices, _alike, layout, lora.adapt(model(tmp_path).scoring, ADAPTER), "megatron")


@RECOMPUTED
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2)], ids=str)
def test_so_it_does_if_layers_are_recomputed(layout, recompute, tmp_path):
    """The embedding is frozen, so no input of the first layer has a gradient."""
    of = lora.adapt(model(tmp_path), ADAPTER)
    ranks.run(layout.devices, _recomputed, layout, of, recompute)


def _recomputed(rank, folder, layout, of, recompute):
    _alike(rank, folder, layout, of, "megatron", recompute=recompute)


@pytest.mark.parametrize("layout", MIXED, ids=str)
def test_so_it_does_with_adapters_of_experts(layout, tmp_path):
    of = lora.adapt(models.load(mixture(tmp_path), Path("/"), None, NOWHERE), ADAPTER)
    ranks.run(layout.devices, _alike, layout, of, "megatron")


@pytest.mark.parametrize("layout", LATENT, ids=str)
def test_so_it_does_with_adapters_of_latent_attention(layout, tmp_path):
    of = lora.adapt(models.load(latent(tmp_path), Path("/"), None, NOWHERE), ADAPTER)
    ranks.run(layout.devices, _alike, layout, of, "megatron")


def _bf16(rank, _, of):
    """Three steps of micro-batches, whose gradients are summed in float32, beside fsdp's, which sums them in bf16."""
    found = [
        trained(
            engines.built(name, of, Layout(), 0, engines.mesh(Layout()), sgd(lr=0.0)), micro_batches(0, Layout()), False
        )
        for name in ("megatron", "fsdp")
    ]
    assert found[0][1] == pytest.approx(found[1][1], rel=0.03)
    assert all(values.dtype == torch.bfloat16 for _, values in found[0][2].values())


def test_bf16(tmp_path):
    ranks.run(1, _bf16, model(tmp_path, dtype="bfloat16"))


def test_bf16_of_an_adapter(tmp_path):
    ranks.run(1, _bf16, lora.adapt(model(tmp_path, dtype="bfloat16"), ADAPTER))


def test_bf16_of_latent_attention(tmp_path):
    """Its weights are half as large: with larger ones a last bit, which differs by processor, moves a norm by 6 %."""
    ranks.run(1, _bf16, models.load(latent(tmp_path, initializer_range=0.1), Path("/"), "bf16", NOWHERE))


@pytest.mark.parametrize(("axis", "generator"), [("tp", "vllm"), ("pp", "vllm"), ("pp", "hf")])
def test_a_program_trains_alike(axis, generator, reference, place):
    """On Megatron, whose weights reshard to a generator's layout."""
    update = f"layout actor.update {{ {axis} = 2 }}\n  engine actor.update = megatron"
    generate = f"layout actor.generate {{ tp = 2 }}\n  engine actor.generate = {generator}"
    place.write(
        ("layout actor.update   { dp = 2, zero = 3 }", update), ("layout actor.generate { tp = 2 }", generate), *TRAINED
    )
    code, _, err = place.run("p.rlg", *THRICE, "--out", "out")
    assert code == 0, err
    assert_alike(place.folder / "out", reference)
    place.assert_clean()
