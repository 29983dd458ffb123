"""Models with features that an engine lacks: told before a device is taken, or another engine is chosen."""

import json
import shutil

import pytest
from folders import ROOT

from msrl_graph import Fault, compile

EXAMPLE = ROOT / "examples" / "arithmetic"


@pytest.fixture
def compiled(tmp_path):
    """Compiles the example with a Llama whose projections have biases."""
    shutil.copytree(EXAMPLE / "model", tmp_path / "model")
    config = json.loads((EXAMPLE / "model" / "config.json").read_text())
    for name in ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers"):
        del config[name]
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "model.safetensors").unlink()  # it has other tensors
    for data in ("train.jsonl", "test.jsonl"):
        shutil.copy(EXAMPLE / data, tmp_path)

    def make(*changes):
        text = (EXAMPLE / "grpo.rlg").read_text()
        for old, new in (("layout actor.update   { dp = 2, zero = 3 }", ""), *changes):
            assert old in text
            text = text.replace(old, new)
        return compile(tmp_path / "p.rlg", text=text)

    return make


def test_a_stated_engine_that_lacks_a_feature_is_told_with_those_that_have_it(compiled):
    stated = ("  layout actor.generate", "  engine actor.update = megatron\n  layout actor.generate")
    with pytest.raises(Fault) as caught:
        compiled(stated)
    told = next(d for d in caught.value.diagnostics if "megatron" in d.message)
    assert told.message == "the engine `megatron` of `actor.update` does not support a bias of the attention's output"
    assert told.help == "these can: `fsdp`"
    plan = compiled((stated[0], stated[1].replace("megatron", "fsdp")))
    assert plan.placement("actor.update").engine.name == "fsdp"


def test_the_planner_chooses_an_engine_that_has_all_features(compiled):
    plan = compiled(('device = "cpu"', 'device = "h100"'))
    placed = plan.placement("actor.update").engine
    assert placed.name == "fsdp"
    assert placed.chosen == "the plan: `megatron` lacks a bias of the attention's output"
