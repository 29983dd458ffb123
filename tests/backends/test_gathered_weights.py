"""FSDP2 gathers each layer's weights once in a pass, in the type of the computation."""

import engines
import held
import numpy as np
import pytest
import ranks
import torch
from gathers import Collectives

from msrl_graph.algorithms.optimizers import adamw
from msrl_graph.backends.engine_protocols import ForwardRequest
from msrl_graph.ir.workload import Workload
from msrl_graph.sharding.layout import Layout

LAYERS = 4


def gather(rank, folder, model, layout, options):
    """Compare the gathers of a pass without gradients, and of an update, with the sizes of the modules."""
    engine = engines.built("fsdp", model, layout, rank, engines.mesh(layout), adamw(lr=0.0), **options)
    batch = held._batch(np.random.default_rng(0), Workload(model, layout, model.dtype, 8, 2, 12, 30))
    layer = [tensor for tensor in model.weights if tensor.layer == 1]
    experts = sum(tensor.elements for tensor in layer if tensor.experts) // layout.ep
    dense = sum(tensor.elements for tensor in layer if not tensor.experts)
    parts = [dense, experts] if layout.ep > 1 else [dense + experts]
    ends = sum(tensor.elements for tensor in model.weights) - LAYERS * sum(tensor.elements for tensor in layer)
    passes = {
        1: lambda: engine.score([batch], ForwardRequest()),
        2: lambda: engine.train([batch], held._loss, ForwardRequest()),
    }
    for number, compute in passes.items():
        compute()  # FSDP2 prepares itself in the first pass
        with Collectives() as collectives:
            compute()
        gathers = [(dtype, size) for name, dtype, size in collectives.found if name == "_allgather_base_"]
        assert {dtype for dtype, _ in gathers} == {torch.bfloat16}
        assert sorted(size for _, size in gathers) == sorted([ends, *parts * LAYERS * number])


@pytest.mark.parametrize(
    ("layout", "experts", "options"),
    [
        (Layout(dp=2, zero=3), {}, {}),
        (Layout(dp=2, zero=3), {}, {"recompute": "full"}),
        (Layout(dp=2, zero=3), held.EXPERTS, {}),
        pytest.param(Layout(dp=4, ep=2, zero=3), held.EXPERTS, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_layer_is_gathered_once_in_a_pass(layout, experts, options, tmp_path):
    model = held.small(tmp_path, num_hidden_layers=LAYERS, dtype="bfloat16", **experts)
    ranks.run(layout.devices, gather, model, layout, options)
