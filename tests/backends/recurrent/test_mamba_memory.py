"""What a Mamba-2 mixer of transformers keeps for its backward pass and holds in a scan, and what the plan counts."""

import gc

import mamba_families
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from msrl_graph.backends.memory.sizes import Sizes
from msrl_graph.backends.recurrent.mamba_memory import MambaSizes
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.ir.workload import Workload
from msrl_graph.model import models
from msrl_graph.runtime.process import memory
from msrl_graph.sharding.layout import Layout

ROWS = 3
SHAPES = {
    "long chunks": {"chunk_size": 64},
    "large states": {"ssm_state_size": 64, "chunk_size": 16},
    "wide heads": {"mamba_head_dim": 96, "chunk_size": 8},
}


@pytest.fixture(params=[(shape, dtype) for shape in SHAPES for dtype in ("f32", "bf16")], ids=" ".join)
def mixer(request, tmp_path):
    """A mixer of transformers, an input, and the sizes that the plan counts."""
    from transformers import AutoModelForCausalLM

    shape, name = request.param
    path = mamba_families.nemotron_h(tmp_path, **SHAPES[shape])
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[name]
    net = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    model = models.load(path, tmp_path, name, NOWHERE)
    work = Workload(model, Layout(), name, ROWS, ROWS, prompt=50, response=51)
    states = torch.randn(ROWS, work.fed, model.hidden, dtype=dtype)
    return net.model.layers[0].mixer, states, MambaSizes(Sizes(work), next(iter(model.mixers)), ROWS, work.fed)


def test_what_is_kept_for_the_backward_pass(mixer):
    module, states, sizes = mixer
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    weights.add(states.untyped_storage().data_ptr())
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # alive, so that no other gets its address
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(states.clone().requires_grad_())
    weights.add(output.untyped_storage().data_ptr())
    projected = (
        states.numel() * states.element_size() + sizes.gates * states.element_size() // 4
    )  # inputs of projections
    assert sizes.kept == pytest.approx(sum(size for size, _ in kept.values()) - projected, rel=0.01)


def test_what_a_scan_holds(mixer):
    module, states, sizes = mixer
    with torch.no_grad():
        module(states)
        gc.collect()
        with memory.Peak() as peak:
            module(states)
    assert sizes.inputs + sizes.scanned == pytest.approx(peak.peak["device"] - peak.before["device"], rel=0.03)
