"""A mixture of experts from end to end: the example's program trains a small one."""

import engines
import numpy as np
import pytest
import torch
from mixture import latent
from place import ONE_RANK, assert_alike, weights
from safetensors.numpy import load_file
from short_runs import run

from msrl_graph.backends.engine_protocols import ForwardRequest
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.model import models
from msrl_graph.runtime.data.columns import ragged
from msrl_graph.runtime.rank.micro_batches import pack


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("mixture") / "alone", *ONE_RANK)


@pytest.mark.slow
def test_it_trains_alike_with_experts_on_other_ranks(alone, tmp_path):
    found = run(
        tmp_path / "run",
        ("dp = 2, zero = 3", "dp = 2, ep = 2"),
        ("layout actor.generate { tp = 2 }", "layout actor.generate { dp = 2 }"),
    )
    assert_alike(alone, found)


@pytest.mark.slow
def test_what_it_saves_is_read_by_transformers(alone):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(alone / "weights" / "actor")
    saved = weights(alone)
    first = model.model.layers[0].mlp.experts.gate_up_proj[3].detach().numpy()
    assert (first[:32] == saved["model.layers.0.mlp.experts.3.gate_proj.weight"]).all()
    assert (first[32:] == saved["model.layers.0.mlp.experts.3.up_proj.weight"]).all()


@pytest.mark.slow
@pytest.mark.long
def test_latent_attention_trains_alike_and_its_corrections_stay(tmp_path):
    """And what is saved is read by transformers."""
    from transformers import AutoModelForCausalLM

    alone = run(tmp_path / "alone", *ONE_RANK, made=latent)
    found = run(tmp_path / "run", ("dp = 2, zero = 3", "tp = 2, ep = 2"), made=latent)
    assert_alike(alone, found)
    begun = load_file(tmp_path / "run" / "model" / "model.safetensors")
    saved = weights(found)
    corrections = [name for name in begun if name.endswith("e_score_correction_bias")]
    assert len(corrections) == 2 and all((saved[name] == begun[name]).all() for name in corrections)
    module = AutoModelForCausalLM.from_pretrained(found / "weights" / "actor")
    held = module.model.layers[2].mlp.gate.e_score_correction_bias.numpy()
    assert (held == begun["model.layers.2.mlp.gate.e_score_correction_bias"]).all() and held.any()


def test_a_correction_is_read_in_float32_whatever_the_weights_are(tmp_path):
    """To which bf16 would round it, and another expert be chosen."""
    of = models.load(latent(tmp_path), tmp_path, "bf16", NOWHERE)
    engine = engines.trainer(of, rank=0)
    held = {n: v for n, v in engine.module.named_buffers() if n.endswith("e_score_correction_bias")}
    assert held.keys() == {t.name for t in of.buffers} and len(held) == 2
    begun = load_file(tmp_path / "model.safetensors")
    assert all(v.dtype == torch.float32 and (v.numpy() == begun[n]).all() for n, v in held.items())
    prompts = ragged([np.arange(3, 9)] * 2, np.int32)
    responses = ragged([np.arange(4, 8)] * 2, np.int32)
    made = engine.score([pack([prompts], [responses], np.arange(2))], ForwardRequest(1.0))
    assert torch.isfinite(made[0].logp).all()
