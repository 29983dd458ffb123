"""Frozen workers that compute with the weights of a trained one, without its adapter."""

import json

import pytest
from place import EXAMPLE

from msrl_graph import compile

PROGRAM = (EXAMPLE / "grpo.rlg").read_text()
ACTOR = "worker actor     : policy"
REFERENCE = "worker reference : policy frozen"
MODEL = 'model policy  = "./model"'
LORA = f"{ACTOR} {{ adapter = lora }}"
FOLDER = 'model policy  = "./adapter"'


@pytest.fixture
def folder(tmp_path):
    for item in ("train.jsonl", "test.jsonl", "model"):
        (tmp_path / item).symlink_to(EXAMPLE / item)
    (tmp_path / "same").symlink_to(EXAMPLE / "model")
    (tmp_path / "other").mkdir()
    for file in (EXAMPLE / "model").iterdir():
        (tmp_path / "other" / file.name).symlink_to(file)
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    settings["base_model_name_or_path"] = "../model"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    return tmp_path


def compiled(folder, *changes):
    text = PROGRAM
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return compile(folder / "p.rlg", text=text)


def is_shared(plan):
    node = next(node for node in plan.graph.nodes if "ref_logp" in node.writes)
    return node.worker == "actor"


def named(model):
    return (MODEL, f"{MODEL}\n  model base = {model}"), (REFERENCE, f"{REFERENCE} {{ model = base }}")


def test_a_reference_of_the_same_model_shares_the_weights(folder):
    assert is_shared(compiled(folder, (ACTOR, LORA)))
    assert not is_shared(compiled(folder))  # nothing is frozen in the trained worker


@pytest.mark.parametrize(
    ("model", "shared"),
    [('"./model"', True), ('"./same"', True), ('"./other"', False), ('"./model" { dtype = bf16 }', False)],
)
def test_the_model_counts_and_not_its_name(model, shared, folder):
    assert is_shared(compiled(folder, (ACTOR, LORA), *named(model))) == shared


def test_a_reference_from_the_folder_of_an_adapter_is_another_model(folder):
    plan = compiled(folder, (MODEL, FOLDER))
    assert not is_shared(plan)
    models = [plan.model(node) for node in ("actor.update", "reference.infer")]
    assert {str(model.lora.targets) for model in models} == {"('q_proj',)"}
    assert {model.lora.folder for model in models} == {str(folder / "adapter")}
    memory = {item for entry in plan.memory for item in entry.items}
    assert "reference.infer weights" in memory


def test_a_reference_from_the_adapter_s_model_shares_it(folder):
    changes = ((MODEL, f'{FOLDER}\n  model base = "./model"'), (REFERENCE, f"{REFERENCE} {{ model = base }}"))
    plan = compiled(folder, *changes)
    assert is_shared(plan)
    assert not any(item == "reference.infer weights" for entry in plan.memory for item in entry.items)
