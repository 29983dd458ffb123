"""Families from end to end: the example's program trains a small model of each.

Weights sharded over two ranks are trained, delivered to two ranks that share each layer, and saved.
"""

import conformance
import pytest
import torch
from safetensors.torch import load_file
from short_runs import run

FAMILIES = ["gemma2", "gemma3_text", "glm", "glm4", "granite", "olmo2", "olmo3", "phi3", "seed_oss", "smollm3"]
MIXTURES = ["glm4_moe", "gpt_oss", "minimax_m2", "mixtral"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES + MIXTURES)
def test_a_family_is_trained_delivered_and_saved_for_transformers(family, tmp_path):
    from transformers import AutoModelForCausalLM

    saved = run(tmp_path / "run", made=conformance.WRITTEN[family]) / "weights" / "actor"
    begun = load_file(tmp_path / "run" / "model" / "model.safetensors")
    trained = load_file(saved / "model.safetensors")
    assert trained.keys() == begun.keys() and any((trained[name] != begun[name]).any() for name in begun)
    net, information = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(information[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(value, trained[name]) for name, value in net.state_dict().items() if name in trained)
