"""Dropout of an adapter's inputs by fsdp: the same masks on each layout, and in each size of micro-batches."""

from dataclasses import replace

import conformance
import engines
import numpy as np
import pytest
import ranks
import torch

from msrl_graph.algorithms.optimizers import sgd
from msrl_graph.backends.engine_protocols import ForwardRequest, StepRequest
from msrl_graph.model.lora_settings import Lora
from msrl_graph.runtime.rank.micro_batches import pack
from msrl_graph.sharding.layout import Layout, slices

pytestmark = pytest.mark.slow
ADAPTER = Lora(rank=3, alpha=6, targets=("all_linear",), dropout=0.3)
KEY = 11
ALONE = Layout()
LAYOUTS = {**conformance.DIVIDED, **conformance.CONTEXT}
del LAYOUTS["pp 2"], LAYOUTS["ep 2"]


def compute(rank, _, folder, layout, adapter, size, key, out, options):
    """Write the log-probabilities of a rank's rows, the norm of the gradient, and the adapter after a step."""
    model = conformance.load(folder, adapter=adapter)
    engine = engines.built(
        "fsdp", model, layout, rank, engines.mesh(layout), sgd(lr=0.0, momentum=0.0), **dict(options)
    )
    for shard, tensor in zip(engine.shards(), model.weights, strict=True):
        if tensor.role == "adapter":
            shard.tensor.copy_(conformance.adapter_values(tensor)[slices(shard.box)])
    prompts, responses = conformance.batch()
    rows = np.arange(conformance.ROWS).reshape(layout.dp, -1)[layout.coordinates(rank).dp]
    batches = [pack([prompts], [responses], part) for part in rows.reshape(-1, size)]
    share = conformance.shares(responses)
    index = [
        np.concatenate([np.arange(*responses.offsets[r : r + 2]) for r in part]) for part in rows.reshape(-1, size)
    ]
    request = ForwardRequest(1.0, dropout=key)
    logps = [outputs.logp.clone() for outputs in engine.score(batches, request)]
    engine.train(batches, lambda made, i: (made.logp * share[index[i]]).sum(), request)
    norm = engine.step(StepRequest(0.1, 1e9))
    after = {s.name: (s.box, s.tensor.clone()) for s in engine.shards() if "lora" in s.name}
    torch.save((np.concatenate(index), torch.cat(logps), norm, after), f"{out}{rank}")


def computed(tmp_path, layout, adapter=ADAPTER, size=4, key=KEY, family="llama", **options):
    folder = conformance.WRITTEN[family](tmp_path / family)
    out = str(tmp_path / "found")
    ranks.run(layout.devices, compute, folder, layout, adapter, size, key, out, tuple(options.items()))
    return [torch.load(f"{out}{rank}", weights_only=False) for rank in range(layout.devices)]


def assert_alike(found, alone):
    ((_, wanted, norm, after),) = alone
    for index, logps, own_norm, tensors in found:
        assert torch.allclose(logps, wanted[index], atol=1e-5)
        assert own_norm == pytest.approx(norm, rel=1e-5)
        for name, (box, values) in tensors.items():
            assert torch.allclose(values, after[name][1][slices(box)], atol=1e-4), name  # Adam divides small gradients


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_each_layout_has_the_same_masks(layout, tmp_path):
    assert_alike(computed(tmp_path, layout), computed(tmp_path, ALONE))


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"compile": "layers"}], ids=str)
def test_so_has_each_way_to_compute_a_layer(options, tmp_path):
    assert_alike(computed(tmp_path, ALONE, **options), computed(tmp_path, ALONE))


def test_so_has_each_size_of_micro_batches_and_another_step_has_others(tmp_path):
    alone = computed(tmp_path, ALONE)
    assert_alike(computed(tmp_path, ALONE, size=2), alone)
    for key in (KEY + 1, None):
        ((_, logps, _, _),) = computed(tmp_path, ALONE, key=key)
        assert not torch.allclose(logps, alone[0][1], atol=1e-3)


def test_so_has_latent_attention(tmp_path):
    targets = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    case = {"adapter": replace(ADAPTER, targets=targets), "family": "deepseek_v3"}
    assert_alike(computed(tmp_path, Layout(tp=2), **case), computed(tmp_path, ALONE, **case))
