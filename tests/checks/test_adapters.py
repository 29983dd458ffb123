"""Adapters that start from a folder: settings that must agree with it, and files that are not complete."""

import json
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from place import EXAMPLE
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from msrl_graph import compile, run
from msrl_graph.cli import compile_main
from msrl_graph.compiler.loading import load
from msrl_graph.diagnostics import Fault
from msrl_graph.runtime.driver import run_inputs
from msrl_graph.runtime.process.host_requirements import files_read

PROGRAM = (EXAMPLE / "grpo.rlg").read_text()
ACTOR = "worker actor     : policy"
MODEL = 'model policy  = "./model"'
FILE = "adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path):
    for item in ("train.jsonl", "test.jsonl", "model"):
        (tmp_path / item).symlink_to(EXAMPLE / item)
    net = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    get_peft_model(net, settings).save_pretrained(tmp_path / "adapter")
    edit(tmp_path, lora_dropout=0.0)
    return tmp_path


def edit(folder, **settings):
    file = folder / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def change(folder, *changes):
    """Write the adapter's weights with other values; None removes one."""
    tensors = load_file(folder / "adapter" / FILE) | dict(changes)
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / "adapter" / FILE)


def compiled(folder, settings=None):
    stated = "" if settings is None else f" {{ adapter = lora{settings} }}"
    text = PROGRAM.replace(MODEL, 'model policy  = "./adapter"').replace(ACTOR, f"{ACTOR}{stated}")
    return compile(folder / "p.rlg", text=text)


def refusals(folder, settings=None):
    with pytest.raises(Fault) as caught:
        compiled(folder, settings)
    return caught.value.diagnostics


@pytest.mark.parametrize("settings", [None, "", "(rank = 4)", "(rank = 4, alpha = 8, targets = [v_proj, q_proj])"])
def test_settings_are_the_folder_s_or_left_out(settings, folder):
    lora = compiled(folder, settings).model("actor.update").lora
    assert (lora.rank, lora.alpha, lora.targets) == (4, 8, ("q_proj", "v_proj"))
    assert lora.folder == str(folder / "adapter")


@pytest.mark.parametrize("stated", ["rank = 8", "alpha = 4", "targets = [q_proj]", "targets = all_linear"])
def test_other_settings_are_refused_and_both_helps_are_right(stated, folder):
    (problem,) = refusals(folder, f"({stated})")
    assert (problem.code, problem.span.line) == ("bad-value", 17)
    shown = stated.replace("all_linear", "[all_linear]")
    assert f"`{shown}` in the adapter of `actor`, but the adapter in {folder}/adapter has" in problem.message
    written = re.search("or write `(.*)`", problem.help)[1]
    assert written in problem.message
    assert compiled(folder, f"({written})").model("actor.update").lora == compiled(folder).model("actor.update").lora


def test_the_folder_s_dropout_is_not_used_and_a_hint_says_so(folder, capsys):
    (folder / "p.rlg").write_text(PROGRAM.replace(MODEL, 'model policy  = "./adapter"'))
    for dropout, number in ((0, 0), (0.1, 1)):
        edit(folder, lora_dropout=dropout)
        assert compile_main(["--check", str(folder / "p.rlg")]) == 0
        assert capsys.readouterr().err.count("do not use `lora_dropout = 0.1`") == number
    assert compiled(folder).model("actor.update").lora.dropout == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_files_of_the_folder_that_differ_from_the_model_s_are_not_used_and_a_hint_says_so(name, folder, capsys):
    (folder / "p.rlg").write_text(PROGRAM.replace(MODEL, 'model policy  = "./adapter"'))
    tokenizer = (folder / "model" / "tokenizer.json").read_text()
    (folder / "adapter" / "tokenizer.json").write_text(tokenizer)
    texts = {"tokenizer.json": tokenizer.replace("<eos>", "<end>"), "chat_template.jinja": "{{ messages }}"}
    for number in range(2):
        assert compile_main(["--check", str(folder / "p.rlg")]) == 0
        assert capsys.readouterr().err.count(f"the {name} in {folder}/adapter differs from the model's") == number
        (folder / "adapter" / name).write_text(texts[name])


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
BROKEN = [
    ((Q.format("A"), None), f"has no `{Q.format('A')[17:]}`, which the adapter of `actor` needs"),
    ((Q.format("B"), torch.zeros(4, 4)), "has the shape [4, 4], but `actor` needs [128, 4]"),
    ((Q.format("magnitude"), torch.zeros(4)), "`, which the adapter of `actor` does not have"),
    (("base_model.model.score.weight", torch.zeros(1, 128)), "has `score.weight`, which the adapter of `actor`"),
    ((Q.format("A"), torch.zeros(4, 128, dtype=torch.int32)), "has the type I32"),
]


@pytest.mark.parametrize(("changed", "text"), BROKEN, ids=range(len(BROKEN)))
def test_weights_that_are_not_the_adapter_s_are_refused(changed, text, folder):
    change(folder, changed)
    (problem,) = refusals(folder)
    assert problem.code == "missing-file" and text in problem.message


def test_a_file_that_cannot_be_read_is_refused(folder):
    file = folder / "adapter" / FILE
    file.write_bytes(file.read_bytes()[:1000])
    (problem,) = refusals(folder)
    assert problem.code == "missing-file" and f"the weights in {file} cannot be read" in problem.message


def test_a_plan_needs_no_weights_and_a_run_does(folder):
    (folder / "adapter" / FILE).unlink()
    plan = compiled(folder)
    with pytest.raises(Fault, match="holds no weights"):
        run(plan, out=folder / "out", dry_run=True)


def test_a_run_checks_the_weights_again(folder):
    plan = compiled(folder)
    change(folder, BROKEN[0][0])
    with pytest.raises(Fault, match="which the adapter of `actor` needs"):
        run(plan, out=folder / "out", dry_run=True)


def test_hosts_and_inputs_have_the_files_of_the_adapter(folder):
    plan = compiled(folder)
    paths = [str(folder / "adapter" / name) for name in ("adapter_config.json", FILE)]
    assert files_read(plan, 0)["adapter policy"] == paths
    before = run_inputs.collect_inputs(plan)
    assert [before.files[f"adapter policy: {name}"].path for name in ("adapter_config.json", FILE)] == paths
    edit(folder, peft_version="9", base_model_name_or_path="elsewhere")
    before, config = run_inputs.collect_inputs(plan), before
    assert run_inputs.differences(config, before) == run_inputs.Differences()
    change(folder, (Q.format("A"), torch.ones(4, 128)))
    assert run_inputs.describe_edit(before).startswith("adapter policy: adapter_model.safetensors")
    (found,) = run_inputs.differences(before, run_inputs.collect_inputs(plan)).model
    assert found.startswith("adapter policy: adapter_model.safetensors has other content")


def test_a_plan_from_a_file_is_the_same_and_another_adapter_is_noticed(folder):
    plan = compiled(folder)
    text = plan.to_json().encode()
    assert load(text, "plan.json", run=True).deploy.models["policy"].initial == plan.deploy.models["policy"].initial
    edit(folder, r=8)
    with pytest.raises(Fault, match="initial"):
        load(text, "plan.json", run=True)


def test_experts_without_modules_are_not_left_out_silently(folder):
    text = PROGRAM.replace(MODEL, 'model policy  = "gpt-oss-20b"').replace('device = "cpu"', 'device = "h200"')
    with pytest.raises(Fault) as caught:
        compile(folder / "p.rlg", text=text.replace(ACTOR, f"{ACTOR} {{ adapter = lora }}"))
    (problem,) = caught.value.diagnostics
    assert "`gate_up_proj` and `down_proj`" in problem.message
    written = re.search("write `(.*)`", problem.help)[1]
    plan = compile(folder / "p.rlg", text=text.replace(ACTOR, f"{ACTOR} {{ adapter = lora({written}) }}"))
    assert plan.model("actor.update").lora.targets == ("q_proj", "k_proj", "v_proj", "o_proj")
