"""Gradients and optimizer states in bf16: each step is an independent float32 computation, rounded; sharding, offload,
pieces and checkpoints change no bit of it."""

from pathlib import Path

import engines
import msgspec
import numpy as np
import offloaded
import pytest
import ranks
import torch
from torch import distributed as dist

from msrl_graph.algorithms.optimizers import adamw, muon, sgd
from msrl_graph.backends import hf_modules
from msrl_graph.backends.devices import Devices, TorchDevice
from msrl_graph.backends.engine_protocols import ForwardRequest, Shard, StepRequest
from msrl_graph.backends.optimizer import shards as optimizer_shards
from msrl_graph.backends.optimizer.gradients import Gradients
from msrl_graph.backends.optimizer.steps import Steps
from msrl_graph.ir.optimizer_spec import with_moments
from msrl_graph.runtime.weights import checkpoint
from msrl_graph.sharding.layout import Layout, full_box, slices
from msrl_graph.sharding.tensors import Tensor

# Rows fill the widest vector registers: torch's kernels may round elements that do not fill one differently.
TENSORS = (
    Tensor("model.layers.0.mlp.up_proj.weight", (8, 16)),
    Tensor("model.layers.0.mlp.down_proj.weight", (16, 16)),
    Tensor("model.embed_tokens.weight", (4, 16)),
)
BETAS = (0.8, 0.9)
OPTIMIZERS = {
    "adamw": adamw(lr=0.1, betas=BETAS, eps=1e-6, weight_decay=0.1),
    "sgd": sgd(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "muon": muon(lr=0.1),
}
LR = 0.01
ALONE = Layout()


def rounded(values):
    """The nearest bf16, ties to even, by bits: of float32 numbers, as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)


def weights(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(tensor.shape, generator=draw).to(dtype) for tensor in TENSORS]


def gradients(number, dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    return [[torch.randn(t.shape, generator=draw).to(dtype) for t in TENSORS] for _ in range(number)]


def make(optimizer, tensors, residency="always", item=2, layout=ALONE, devices=None):
    shards = [Shard(t.name, full_box(t.shape), w) for t, w in zip(TENSORS, tensors, strict=True)]
    devices = devices or Devices(TorchDevice(), 0, None)
    return Steps(with_moments(optimizer, item), TENSORS, shards, layout, devices, False, residency)


def step(steps, given, clip=0.0):
    return steps.step([gradient.clone() for gradient in given], StepRequest(LR, clip, True))


def states(steps):
    return {f"{kind}/{s.name}": s.tensor.clone() for kind, of in steps.moments().items() for s in of}


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_of_adamw_with_bf16_moments_is_the_formula(dtype):
    """Each moment is read from bf16, computed in float32 and rounded; the weight uses the unrounded moments."""
    held = weights()
    steps = make(OPTIMIZERS["adamw"], held)
    own = [w.numpy().astype(np.float64) for w in weights()]
    first = [np.zeros(w.shape) for w in own]
    second = [np.zeros(w.shape) for w in own]
    for number, given in enumerate(gradients(4, dtype), 1):
        step(steps, given)
        for i, gradient in enumerate(g.double().numpy() for g in given):
            m = BETAS[0] * first[i] + (1 - BETAS[0]) * gradient
            v = BETAS[1] * second[i] + (1 - BETAS[1]) * gradient**2
            change = (m / (1 - BETAS[0] ** number)) / (np.sqrt(v / (1 - BETAS[1] ** number)) + 1e-6)
            own[i] = own[i] * (1 - LR * 0.1) - LR * change
            found = {k: s[i].tensor for k, s in steps.moments().items()}
            assert {t.dtype for t in found.values()} == {torch.bfloat16}
            for kind, exact in (("exp_avg", m), ("exp_avg_sq", v)):
                stored = found[kind].float().numpy()
                # float32 and float64 may round to two neighbours where the value is half-way
                assert np.allclose(stored, rounded(exact), rtol=2**-7, atol=1e-6)
                assert (stored == rounded(exact)).mean() > 0.9
            first[i], second[i] = (found[kind].double().numpy() for kind in ("exp_avg", "exp_avg_sq"))
            assert np.allclose(held[i].numpy(), own[i], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bf16_states_are_those_of_float32_up_to_their_rounding(name):
    exact, rough = weights(), weights()
    full, short = make(OPTIMIZERS[name], exact, item=4), make(OPTIMIZERS[name], rough)
    for given in gradients(5):
        assert step(full, given, 1.0) == step(short, given, 1.0)
    for kind, value in states(full).items():
        assert torch.allclose(states(short)[kind].float(), value, rtol=5 * 2**-8, atol=2e-3), kind
    changed = max(float((a - b).abs().max()) for a, b in zip(exact, weights(), strict=True))
    apart = max(float((a - b).abs().max()) for a, b in zip(exact, rough, strict=True))
    assert 0 < apart < 0.05 * changed


@pytest.mark.parametrize("of", ["gradients", "moments", "both"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_offload_and_a_checkpoint_change_no_bit(name, of, dtype, monkeypatch):
    kept = {"item": 4 if of == "gradients" else 2}
    given = gradients(4, torch.float32 if of == "moments" else torch.bfloat16)
    whole = weights(dtype)
    steps = make(OPTIMIZERS[name], whole, **kept)
    norms = [step(steps, each, 1.0) for each in given]
    for size, residency in ((48, "always"), (1 << 20, "parts"), (16, "parts"), (48, "phase")):
        monkeypatch.setattr(optimizer_shards, "CHUNK", size)
        again = weights(dtype)
        other = make(OPTIMIZERS[name], again, residency, **kept)
        assert norms[:2] == [step(other, each, 1.0) for each in given[:2]]
        saved = {k: {s.name: s.tensor.float() for s in of} for k, of in other.moments().items()}  # as files are read
        third = make(OPTIMIZERS[name], again, residency, **kept)
        third.restore(saved, 2)
        assert norms[2:] == [step(third, each, 1.0) for each in given[2:]]
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
        assert same(states(steps), states(third))
        if kept["item"] == 2:
            assert {t.dtype for k, t in states(third).items() if not k.startswith("master")} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stretch_of_two_ranks_has_the_states_of_one(name, tmp_path):
    ranks.run(2, _stretched, name)


def _stretched(rank, _, name):
    from torch.distributed.device_mesh import init_device_mesh

    whole, own = weights(torch.bfloat16), weights(torch.bfloat16)
    alone = make(OPTIMIZERS[name], whole)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    both = make(OPTIMIZERS[name], own, layout=Layout(dp=2, zero=1), devices=Devices(TorchDevice(), rank, mesh))
    for given in gradients(3, torch.bfloat16):
        halves = [gradient / 2 for gradient in given]  # exact in bf16: the ranks' sum is the gradient
        assert step(both, halves, 1.0) == pytest.approx(step(alone, given, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(whole, own, strict=True))
    assert same(states(alone), states(both))
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_engines_sum_gradients_in_bf16_on_every_layout(dtype, tmp_path):
    """Over micro-batches and ranks: the norm of the gradient is that of float32 sums, up to its rounding."""
    ranks.run(2, _summed, offloaded.model(tmp_path / "model", dtype), str(tmp_path))


def _summed(rank, _, of, folder):
    def norm(layout, gradients):
        mesh = engines.mesh(layout) if layout.devices > 1 else None
        engine = engines.built("fsdp", of, layout, rank * (mesh is not None), mesh, adamw(lr=0.0), gradients=gradients)
        micro = offloaded.batches(layout, rank * (mesh is not None))
        engine.train(micro, lambda made, _: made.logp.sum(), ForwardRequest())
        read = [engine._gradients.read(parameter) for parameter in engine._parameters]
        assert {gradient.dtype for gradient in read} == {getattr(torch, hf_modules.DTYPES[gradients])}
        return engine.step(StepRequest(LR, 0.0, True))

    exact = norm(ALONE, "f32")
    for layout in (ALONE, *LAYOUTS, Layout(dp=2, zero=0), Layout(dp=2, zero=2), Layout(cp=2)):
        assert norm(layout, "bf16") == pytest.approx(exact, rel=2**-7), layout
        dist.barrier()


LAYOUTS = (Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2))


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", "optimizer", "phase"])
def test_another_layout_continues_with_the_states_of_a_checkpoint(offload, tmp_path):
    of = offloaded.model(tmp_path / "model", torch.bfloat16)
    ranks.run(2, _continued, of, offload, str(tmp_path))


def _continued(rank, _, of, offload, folder):
    options = {"gradients": "bf16", "moments": "bf16", "offload": offload}
    rounding = with_moments(adamw(lr=0.0, betas=BETAS, weight_decay=0.1), 2)

    def built(layout):
        mesh = engines.mesh(layout) if layout.devices > 1 else None
        return engines.built("fsdp", of, layout, 0 if mesh is None else rank, mesh, rounding, **options)

    first = built(ALONE)
    offloaded.stepped(first, offloaded.batches(ALONE, 0), 2)
    for layout in LAYOUTS:
        target = Path(folder) / f"{layout}-{rank}"
        _write({"weights": first.shards(), **first.moments()}, target)
        other = built(layout)
        _resume(other, target)
        found = {
            (kind, s.name): s for kind, shards in {"weights": other.shards(), **other.moments()}.items() for s in shards
        }
        for kind, shards in {"weights": first.shards(), **first.moments()}.items():
            for s in shards:
                part = found[kind, s.name]
                assert part.tensor.dtype == s.tensor.dtype and torch.equal(part.tensor, s.tensor[slices(part.box)])
        assert torch.isfinite(torch.tensor(offloaded.stepped(other, offloaded.batches(layout, rank), 1))).all()
        dist.barrier()


def _write(kinds, target):
    target.mkdir(exist_ok=True)
    pieces = [(f"actor/{kind}", s) for kind, shards in kinds.items() for s in shards]
    file = checkpoint.write_tensors(target, "states.safetensors", pieces, {})
    manifest = checkpoint.Manifest(checkpoint.FORMAT, 1, 0, {}, {}, (file,))
    (target / "manifest").write_bytes(msgspec.json.encode(manifest))


def _resume(engine, target):
    manifest = msgspec.json.decode((target / "manifest").read_bytes(), type=checkpoint.Manifest)
    source = checkpoint.CheckpointSource(target, manifest)
    with torch.no_grad():
        for s in engine.shards():
            s.tensor.copy_(source.read(f"actor/weights/{s.name}", s.box, s.tensor.dtype))
    kinds = source.kinds("actor").keys() - {"weights"}
    assert kinds == {"exp_avg", "exp_avg_sq", "master"}
    engine.restore(
        {
            kind: {s.name: source.read(f"actor/{kind}/{s.name}", s.box, torch.float32) for s in engine.shards()}
            for kind in kinds
        },
        2,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_in_bf16_are_rounded_once_per_micro_batch(dtype):
    weight = torch.nn.Parameter(torch.zeros(64, dtype=dtype))
    sums = Gradients([weight], torch.bfloat16)
    expected = np.zeros(64, np.float32)
    for part in torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype):
        (weight * part).sum().backward()
        expected = rounded(expected + part.float().numpy())
    found = sums.take(weight)
    assert found.dtype == torch.bfloat16 and np.array_equal(found.float().numpy(), expected)
    assert weight.grad is None and sums.read(weight) is None
