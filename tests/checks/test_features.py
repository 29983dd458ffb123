"""Models with features that an engine lacks: they can be planned; a run refuses them before a device is taken, or the
planner chooses another engine."""

import json
import shutil
from dataclasses import replace

import pytest
from folders import ROOT

from msrl_graph import Fault, compile
from msrl_graph.backends import ENGINES
from msrl_graph.compiler.unsupported import find_unsupported
from msrl_graph.model.families import FAMILIES
from msrl_graph.model.features import PLAIN

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


def test_a_stated_engine_that_lacks_a_feature_is_planned_and_a_run_names_those_that_have_it(compiled):
    stated = ("  layout actor.generate", "  engine actor.update = megatron\n  layout actor.generate")
    plan = compiled(stated)
    assert plan.placement("actor.update").engine.name == "megatron" and plan.memory
    feature = "a bias of the attention's output with the engine `megatron`"
    assert f"this version can plan but not run: {feature}" in [note.text for note in plan.notes]
    told, *_ = find_unsupported(plan)  # of the reference, which has the same engine, at the model
    assert told.code == "not-yet" and told.message == f"{feature} can be planned, but not run"
    assert told.help == "these can: `fsdp`"
    plan = compiled((stated[0], stated[1].replace("megatron", "fsdp")))
    assert plan.placement("actor.update").engine.name == "fsdp" and not find_unsupported(plan)


def test_a_known_feature_that_no_engine_has_is_planned_and_not_run(compiled, monkeypatch):
    for name in ("fsdp", "megatron"):
        spec = ENGINES[name]
        features = spec.capabilities.features - {"output_bias"}
        monkeypatch.setitem(ENGINES, name, replace(spec, capabilities=replace(spec.capabilities, features=features)))
    plan = compiled()
    (told,) = find_unsupported(plan)
    engine = plan.placement("actor.update").engine.name
    assert told.message == f"a bias of the attention's output with the engine `{engine}` can be planned, but not run"
    assert (
        told.help == "no engine can: use a model without this feature" and told.span == plan.model("actor.update").span
    )


def test_a_feature_whose_sizes_nobody_knows_is_refused_unless_an_engine_has_it(compiled, monkeypatch):
    family = FAMILIES["llama"]
    monkeypatch.setitem(FAMILIES.built_in, "llama", replace(family, features=frozenset(("spiral attention",))))
    with pytest.raises(Fault) as caught:
        compiled()
    (told,) = caught.value.diagnostics
    assert (told.code, told.message) == (
        "not-yet",
        "the model `./model` has spiral attention, so it can be neither planned nor run",
    )
    assert told.help == "no engine supports spiral attention yet: use a model without it"
    for name in ("fsdp", "hf"):
        spec = ENGINES[name]
        features = spec.capabilities.features | {"spiral attention"}
        monkeypatch.setitem(ENGINES, name, replace(spec, capabilities=replace(spec.capabilities, features=features)))
    assert not find_unsupported(compiled())


def test_an_engine_is_not_asked_about_a_feature_that_its_spec_does_not_list(compiled, monkeypatch):
    def peaks(verb, work):
        raise AssertionError("this engine knows no sizes of such a model")

    asked = replace(ENGINES["fsdp"].memory, peaks=peaks, stored=None)
    capabilities = replace(ENGINES["fsdp"].capabilities, features=PLAIN, planned_features=frozenset())
    spec = replace(ENGINES["fsdp"], name="plain", capabilities=capabilities, memory=asked)
    monkeypatch.setitem(ENGINES, "plain", spec)
    assert compiled().placement("actor.update").engine.name == "fsdp"
    with pytest.raises(Fault) as caught:
        compiled(("  layout actor.generate", "  engine actor.update = plain\n  layout actor.generate"))
    (told,) = caught.value.diagnostics
    what = "a bias of the attention's output with the engine `plain` of `actor.update`"
    assert (told.code, told.message) == ("not-yet", f"{what} can be neither planned nor run")
    assert told.help == "these can: `fsdp`, `megatron`" and told.span.line


def test_the_planner_chooses_an_engine_that_has_all_features(compiled):
    plan = compiled(('device = "cpu"', 'device = "h100"'))
    placed = plan.placement("actor.update").engine
    assert placed.name == "fsdp"
    assert placed.chosen == "the plan: `megatron` lacks a bias of the attention's output"
