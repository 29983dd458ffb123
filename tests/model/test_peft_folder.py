"""Folders of adapters: what is read of them, what is refused, and that PEFT's own folders are understood."""

import json

import dense_families as families
import mixture
import pytest
import torch
from peft import LoraConfig, get_peft_model
from place import EXAMPLE
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from msrl_graph import compile
from msrl_graph.data import plan_paths
from msrl_graph.diagnostics import NOWHERE, Fault
from msrl_graph.model import lora, models, peft_folder
from msrl_graph.sharding.layout import full_box

BASE = {"peft_type": "LORA", "base_model_name_or_path": "../model", "r": 4, "lora_alpha": 8}
SETTINGS = BASE | {"target_modules": ["q_proj", "down_proj"]}


def write_adapter(folder, **settings):
    """Write the settings of an adapter into `folder`, next to the folder of its model."""
    if not (folder.parent / "model").exists():
        mixture.qwen2(folder.parent / "model")
    folder.mkdir(exist_ok=True)
    stated = {name: value for name, value in (SETTINGS | settings).items() if value is not ...}
    (folder / peft_folder.CONFIG).write_text(json.dumps(stated))
    return folder


def load(folder, base=""):
    return models.load(f"./{folder.name}", folder.parent, None, NOWHERE, base)


def refusal(folder, base=""):
    with pytest.raises(Fault) as caught:
        load(folder, base)
    (problem,) = caught.value.diagnostics
    return problem


def test_a_folder_is_its_model_and_the_adapter(tmp_path):
    found = load(write_adapter(tmp_path / "adapter", lora_dropout=0.1))
    own = models.load("./model", tmp_path, None, NOWHERE)
    assert (found.path, found.tensors, found.lora) == (own.path, own.tensors, None)
    initial = found.initial
    assert (initial.rank, initial.alpha, initial.targets) == (4, 8.0, ("q_proj", "down_proj"))
    assert (initial.dropout, initial.folder) == (0.1, str(tmp_path / "adapter"))
    assert models.reload(found).initial == initial


@pytest.mark.parametrize("named", ["model", "./model", "{}/model", "qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"])
def test_the_model_is_named_by_a_folder_a_preset_or_a_name_on_the_hub(named, tmp_path):
    folder = write_adapter(tmp_path / "adapter", base_model_name_or_path=named.format(tmp_path / "adapter"))
    (folder / "model").symlink_to(tmp_path / "model")
    found = load(folder)
    assert found.path == (str(tmp_path / "model") if named.endswith("model") else "")
    assert load(folder, base="./model").path == str(tmp_path / "model")  # the program's comes first


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("peft_type", "IA3"),
        ("use_rslora", True),
        ("use_dora", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("layers_to_transform", [0]),
        ("layer_replication", [[0, 2]]),
        ("exclude_modules", ["o_proj"]),
        ("fan_in_fan_out", True),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("trainable_token_indices", [1]),
        ("lora_bias", True),
        ("init_lora_weights", "pissa"),
        ("use_something_new", True),
    ],
)
def test_a_setting_that_nothing_supports_is_an_error_with_its_name(setting, value, tmp_path):
    problem = refusal(write_adapter(tmp_path / "adapter", **{setting: value}))
    assert problem.code == "not-yet" and f"`{setting} = {json.dumps(value)}`" in problem.message
    assert "merge_and_unload" in problem.help


def test_settings_without_effect_are_read(tmp_path):
    neutral = {"use_rslora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}, "revision": "main"}
    neutral |= {"init_lora_weights": "gaussian", "inference_mode": True, "megatron_core": "megatron.core"}
    assert load(write_adapter(tmp_path / "adapter", **neutral)).initial.rank == 4


@pytest.mark.parametrize(
    ("stated", "targets"),
    [
        ("all-linear", ("all_linear",)),
        (["self_attn.q_proj", "v_proj"], ("q_proj", "v_proj")),
        (r"model\.layers\.\d+\.mlp\.(gate|up)_proj", ("gate_proj", "up_proj")),
        (["q_proj", "query_key_value"], ("q_proj",)),  # as PEFT, which ignores what the model does not have
    ],
)
def test_targets_are_chosen_as_by_peft(stated, targets, tmp_path):
    assert load(write_adapter(tmp_path / "adapter", target_modules=stated)).initial.targets == targets


@pytest.mark.parametrize(
    ("stated", "text"),
    [
        (["q_proj", "lm_head"], "`lm_head` can have no adapter"),
        (["layers.0.self_attn.q_proj"], "does not choose `model.layers.1.self_attn.q_proj`"),
        (["query_key_value"], "chooses no projection"),
        ("(", "chooses no projection"),
        (..., "chooses no projection"),
    ],
)
def test_other_targets_are_refused(stated, text, tmp_path):
    assert text in refusal(write_adapter(tmp_path / "adapter", target_modules=stated)).message


def test_what_is_wrong_with_a_folder_is_said(tmp_path):
    folder = write_adapter(tmp_path / "adapter", base_model_name_or_path=None)
    assert "does not name the model" in refusal(folder).message
    write_adapter(folder, base_model_name_or_path="someone/unknown-model")
    problem = refusal(folder)
    assert "the model of the adapter `./adapter`: `someone/unknown-model`" in problem.message
    assert 'base = "./my-model"' in problem.help
    assert load(folder, base="./model").initial.rank == 4  # so the help says
    assert "leave `base` out" in refusal(tmp_path / "model", base="./model").help
    write_adapter(folder, base_model_name_or_path=".")
    assert "is an adapter itself" in refusal(folder).message
    write_adapter(folder, r="4")
    assert '`r = "4"`' in refusal(folder).message
    (folder / peft_folder.CONFIG).write_text("[]")
    assert "is not a JSON object" in refusal(folder).message


@pytest.mark.parametrize("write", [mixture.qwen2, families.phi3, families.glm4])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_what_peft_saves_is_what_is_read(write, suffix, tmp_path):
    net = AutoModelForCausalLM.from_pretrained(write(tmp_path / "model"))
    theirs = get_peft_model(net, LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM"))
    theirs.save_pretrained(tmp_path / "adapter", safe_serialization=True)
    if suffix == "bin":
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        torch.save(load_file(file), file.with_suffix(".bin"))
        file.unlink()
    initial = load(tmp_path / "adapter").initial
    model = lora.adapt(models.load("./model", tmp_path, None, NOWHERE), initial)
    assert model.lora.targets == tuple(lora.list_projections(model)) and initial.scale == 3
    wanted = {
        name: (*(stop for _, stop in box),)
        for tensor in model.trained
        for name, _, box in tensor.in_files(full_box(tensor.shape))
    }
    assert wanted == {name: weight.shape for name, weight in peft_folder.read_weights(initial.folder).items()}


def test_merged_as_the_help_says_it_is_a_model(tmp_path):
    net = AutoModelForCausalLM.from_pretrained(mixture.qwen2(tmp_path / "model"))
    settings = LoraConfig(r=4, target_modules=["q_proj"], use_rslora=True, task_type="CAUSAL_LM")
    theirs = get_peft_model(net, settings)
    theirs.save_pretrained(tmp_path / "adapter")
    assert "`use_rslora = true`" in refusal(tmp_path / "adapter").message
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert models.load("./merged", tmp_path, None, NOWHERE).initial is None


def test_a_folder_at_a_url_names_its_model_or_the_program_does(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_adapter(tmp_path / "adapter")
    url = f"file://{folder}"
    with pytest.raises(Fault) as caught:
        models.load(url, tmp_path, None, NOWHERE)
    assert "base = " in caught.value.diagnostics[0].help
    found = models.load(url, tmp_path, None, NOWHERE, "./model")
    assert found.path == str(tmp_path / "model") and found.initial.folder.startswith(url)
    other = models.load(url, tmp_path, None, NOWHERE, f"file://{tmp_path}/model")
    assert all(place.startswith("file://") for place in other.folders)


def test_each_host_has_a_copy_of_an_adapter_at_a_url(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (write_adapter(tmp_path / "adapter") / "adapter_model.bin").write_bytes(b"weights")
    models_of_plan = f'model policy = "file://{tmp_path}/adapter" {{ base = "./model" }}'
    text = (EXAMPLE / "grpo.rlg").read_text().replace('model policy  = "./model"', models_of_plan)
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).symlink_to(EXAMPLE / name)
    text = text.replace("generate { tp = 2 }", "generate { dp = 2 }")  # of two key-value heads
    plan = plan_paths.pin_urls(plan_paths.make_absolute(compile(tmp_path / "p.rlg", text=text)))
    assert plan_paths.has_urls(plan)
    heads, copied = (way(plan).deploy.models["policy"] for way in (plan_paths.copy_model_heads, copy_all))
    assert heads.path == copied.path == str(tmp_path / "model")
    assert not peft_folder.find_files(heads.initial.folder)
    (file,) = peft_folder.find_files(copied.initial.folder)
    assert file.read_bytes() == b"weights" and file.is_relative_to(tmp_path / "cache")


def copy_all(plan):
    local = plan_paths.copy_to_host(plan, data=False)
    assert not plan_paths.has_urls(local)
    return local
