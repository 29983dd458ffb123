"""`--export`: checkpoints of any layout become the folders that a run would save, and what is missing is reported."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import mixture_families
import published
import pytest
import torch
from dense_families import phi3
from hybrid_families import qwen3_5, qwen3_5_with_images, qwen3_next
from mixture import latent, mixture
from place import EXAMPLE, SMALL
from safetensors.torch import load_file
from tiny import ROLLOUT, planned

from msrl_graph import export
from msrl_graph.backends import hf_modules
from msrl_graph.backends.engine_protocols import Shard
from msrl_graph.cli import run_main
from msrl_graph.diagnostics import Fault
from msrl_graph.model import models
from msrl_graph.runtime.driver import run_inputs
from msrl_graph.runtime.driver.resume import program
from msrl_graph.runtime.weights import checkpoint, hf_export
from msrl_graph.sharding.layout import Layout, Side, full_box, owns, shard, slices

LAYOUTS = {
    "one rank": (Layout(), False),
    "tp": (Layout(tp=2), False),
    "tp and dp": (Layout(tp=2, dp=2), False),
    "zero 3": (Layout(dp=3, zero=3), True),
    "tp and zero 3": (Layout(tp=2, dp=2, zero=3), True),
    "pp": (Layout(pp=2, tp=2), False),
}
MODELS = {"example": None, "mixture": mixture, "latent": latent, "phi3": phi3}


def trained(model, dtype):
    """Weights at random, by name."""
    torch.manual_seed(len(model.weights))
    return {t.name: torch.randn(t.shape).to(dtype) for t in model.weights}


def save(run, plan, layout, dtype=torch.float32, iteration=3, written=None):
    """A checkpoint of all trained workers by the ranks of a layout, with the run's plan; its folder and the weights."""
    (layout, divided), weights, files = LAYOUTS[layout], {}, []
    partial = checkpoint.begin(run, iteration)
    true = {"iteration": iteration, "lines": 0, "position": 8}
    says = checkpoint.checkpoint_metadata(**true, program=program(plan))
    side = Side(layout, divided)
    for node in plan.graph.verb("update"):
        model = plan.model(node.name)
        weights[node.worker] = trained(model, dtype)
        for rank in range(layout.devices):
            owned = [t for t in model.weights if owns(t, side, rank)]
            shards = [
                Shard(t.name, box := shard(t, side, rank), weights[node.worker][t.name][slices(box)]) for t in owned
            ]
            moments = [(f"{node.worker}/exp_avg", Shard(s.name, s.box, s.tensor.float() * 0)) for s in shards]
            pieces = [*((f"{node.worker}/weights", s) for s in shards), *moments]
            files.append(checkpoint.write_tensors(partial, f"{node.worker}-rank-{rank:05d}.safetensors", pieces, says))
    read = run_inputs.collect_inputs(plan)
    run_inputs.write(run, read)
    known = {"format_version": checkpoint.FORMAT, "steps": {}, **true, "inputs": run_inputs.read(run)}
    known |= {"program": program(plan), "files": tuple(files)} | (written or {})
    (run / "plan.json").write_text(plan.to_json())
    return checkpoint.commit(partial, checkpoint.Manifest(**known), 9), weights


def model_folder(tmp_path, kind):
    if MODELS[kind] is None:
        return EXAMPLE / "model"
    return MODELS[kind](tmp_path / "model")


def plan_of(folder, text=ROLLOUT):
    plan = planned(text, judge=str(EXAMPLE.parent / "ppo" / "reward_model"))
    if folder == EXAMPLE / "model":
        return plan
    text = (EXAMPLE / "grpo.rlg").read_text().replace('"./model"', f'"{folder}"').replace("mini_batch = 256", "")
    from msrl_graph import compile

    return compile(EXAMPLE / "p.rlg", text=re.sub(r"\n  layout .*", "", text))


def content(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_of_any_layout_is_exported_as_a_run_saves_it(tmp_path, capsys, kind, layout):
    plan = plan_of(model_folder(tmp_path, kind))
    _, weights = save(tmp_path / "run", plan, layout, torch.bfloat16 if "dp" in layout else torch.float32)
    assert run_main(["--export", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    for worker, whole in weights.items():
        model = plan.model(next(n.name for n in plan.graph.verb("update") if n.worker == worker))
        hf_export.write_folder(model, whole, tmp_path / "saved" / worker)
        made = tmp_path / "run" / "exported" / "000003" / worker
        assert f"{worker}: {made}\n" in out
        assert content(made) == content(tmp_path / "saved" / worker)
        found = load_file(made / "model.safetensors")
        for tensor in model.weights:
            for name, index, box in tensor.in_files(tuple((0, n) for n in tensor.shape)):
                own = whole[tensor.name][index] if index else whole[tensor.name]
                assert torch.equal(found[name][slices(box)], own)


def test_what_is_exported_loads_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    _, weights = save(tmp_path / "run", plan_of(EXAMPLE / "model"), "zero 3")
    assert run_main(["--export", str(tmp_path / "run"), "--to", str(tmp_path / "to")]) == 0
    classes = {"actor": AutoModelForCausalLM, "critic": AutoModelForSequenceClassification}
    for worker, kind in classes.items():
        loaded = dict(kind.from_pretrained(tmp_path / "to" / worker).named_parameters())
        assert all(torch.equal(loaded[name], value) for name, value in weights[worker].items())
        assert AutoTokenizer.from_pretrained(tmp_path / "to" / worker)("1+2=").input_ids


@pytest.mark.parametrize("write", [phi3, mixture_families.minimax_m2, mixture_families.gpt_oss, qwen3_next, qwen3_5])
def test_a_models_folder_that_is_read_and_written_again_has_the_same_tensors(write, tmp_path):
    """Of projections and experts that the files have as one tensor, and where files have other names, too."""
    folder = Path(write(tmp_path / "model"))
    model = models.load("./model", tmp_path)
    weights = {tensor.name: torch.empty(tensor.shape) for tensor in model.weights}
    shards = [Shard(tensor.name, full_box(tensor.shape), weights[tensor.name]) for tensor in model.weights]
    hf_modules.fill(model, shards)
    hf_export.write_folder(model, weights, tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_of_a_model_that_also_reads_images_the_part_for_text_is_read_and_written(tmp_path):
    from transformers import AutoModelForCausalLM, Qwen3_5ForConditionalGeneration

    folder = qwen3_5_with_images(tmp_path / "model")
    whole = dict(Qwen3_5ForConditionalGeneration.from_pretrained(folder).named_parameters())
    model = models.load("./model", tmp_path)
    assert (model.family, model.dtype, model.tied) == ("qwen3_5_text", "f32", False)
    weights = {tensor.name: torch.empty(tensor.shape) for tensor in model.weights}
    hf_modules.fill(
        model, [Shard(tensor.name, full_box(tensor.shape), weights[tensor.name]) for tensor in model.weights]
    )
    hf_export.write_folder(model, weights, tmp_path / "again")
    text, information = AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(information[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    parts = {name.replace("model.language_model.", "model."): value for name, value in whole.items()}
    own = dict(text.named_parameters())
    assert len(own) > 50 and all(torch.equal(value, parts[name]) for name, value in own.items())


def test_a_folder_that_was_published_in_fp8_is_exported_in_the_type_of_the_weights(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = model_folder(tmp_path, "mixture")
    published.fp8(folder)
    plan = plan_of(folder)
    _, weights = save(tmp_path / "run", plan, "one rank", torch.bfloat16)
    assert run_main(["--export", str(tmp_path / "run"), "--worker", "actor", "--to", str(tmp_path / "to")]) == 0
    stated = json.loads((tmp_path / "to" / "config.json").read_text())
    assert stated["dtype"] == "bfloat16" and not {"quantization_config", "torch_dtype"} & stated.keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "to").state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(loaded[name], weights["actor"][name]) and loaded[name].dtype == torch.bfloat16


def test_one_worker_and_an_older_checkpoint(tmp_path, capsys):
    plan = plan_of(EXAMPLE / "model")
    old, _ = save(tmp_path / "run", plan, "tp", iteration=3)
    save(tmp_path / "run", plan, "one rank", iteration=5)
    assert run_main(["--export", str(old), "--worker", "critic", "--to", str(tmp_path / "to")]) == 0
    assert capsys.readouterr().out == f"critic: {tmp_path / 'to'}\n"
    assert json.loads((tmp_path / "to" / "config.json").read_text())["architectures"] == [
        "Qwen2ForSequenceClassification"
    ]


def told(capsys, *arguments):
    """Why an export is refused: code, message and help."""
    capsys.readouterr()
    assert run_main([*map(str, arguments)]) == 1
    err = capsys.readouterr().err
    return re.fullmatch(r"error\[([\w-]+)\]: (.*)\n(?:  = help: (.*)\n)?", err).groups()


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(tmp_path, capsys):
    run = tmp_path / "run"
    plan = plan_of(EXAMPLE / "model")
    assert told(capsys, "--export", run) == ("bad-checkpoint", f"there is no folder {run} to export from", None)
    run.mkdir()
    code, message, help = told(capsys, "--export", run)
    assert (code, message) == ("bad-checkpoint", f"the run in {run} has saved no checkpoint")
    old, _ = save(run, plan, "tp", iteration=2)
    path, _ = save(run, plan, "tp", iteration=3)
    what = f"the checkpoint {path} holds no weights of `critc`, but of `actor` and `critic`"
    assert told(capsys, "--export", run, "--worker", "critc") == ("unknown-name", what, "did you mean `critic`?")
    (run / "exported" / "000003" / "actor").mkdir(parents=True)
    (run / "exported" / "000003" / "actor" / "mine").touch()
    code, message, help = told(capsys, "--export", run)
    assert message.endswith("exists and is not empty") and help == "remove it, or name another one: --to"
    assert not (run / "exported" / "000003" / "critic").exists()
    (tmp_path / "file").touch()
    code, message, help = told(capsys, "--export", run, "--worker", "actor", "--to", tmp_path / "file")
    assert (code, help) == ("bad-value", "remove it, or name another one: --to") and message.endswith("is a file")
    code, message, help = told(capsys, "--export", run, "--to", tmp_path / "file" / "below")
    assert code == "bad-value" and help.endswith("--to")
    with (path / "actor-rank-00001.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x17")
    code, message, help = told(capsys, "--export", run)
    assert code == "bad-checkpoint" and "actor-rank-00001.safetensors was changed after it was written" in message
    assert help == f"{old} is intact: --export {old}"
    assert run_main(help.partition(": ")[2].split()) == 0  # the help is followed
    assert content(run / "exported" / "000002" / "actor").keys() >= {"model.safetensors", "tokenizer.json"}


def test_python_exports_the_same(tmp_path):
    plan = plan_of(EXAMPLE / "model")
    path, _ = save(tmp_path / "run", plan, "tp")
    folders = export(tmp_path / "run")
    assert folders == {name: tmp_path / "run" / "exported" / "000003" / name for name in ("actor", "critic")}
    one = export(path, tmp_path / "to", worker="actor", plan=plan)
    assert one == {"actor": tmp_path / "to"} and content(tmp_path / "to") == content(folders["actor"])
    for arguments, message, help in (
        ((tmp_path / "run",), "exists and is not empty", "remove it, or name another one: `to`"),
        ((tmp_path / "none",), "there is no folder", ""),
        ((3,), "`checkpoint` is a folder, a str or a Path, not an int", ""),
    ):
        with pytest.raises(Fault) as fault:
            export(*arguments)
        (told,) = fault.value.diagnostics
        assert message in told.message and told.help == help
    (tmp_path / "run" / "plan.json").unlink()
    with pytest.raises(Fault) as fault:
        export(path, tmp_path / "again")
    assert fault.value.diagnostics[0].help == f"name the program of the run: export({path}, plan=compile(PROGRAM))"
    assert export(path, tmp_path / "again", plan=plan)


def test_a_checkpoint_that_was_copied_out_of_its_run_needs_its_program_and_a_target(tmp_path, capsys):
    path, _ = save(tmp_path / "run", plan_of(EXAMPLE / "model"), "zero 3")
    shutil.copytree(path, tmp_path / "some" / "copy")
    plan = tmp_path / "run" / "plan.json"
    code, _, help = told(capsys, "--export", tmp_path / "some" / "copy")
    assert (
        code == "missing-file"
        and help == f"name the program of the run: msrl-run PROGRAM --export {tmp_path}/some/copy"
    )
    code, _, help = told(capsys, plan, "--export", tmp_path / "some" / "copy")
    assert (code, help) == ("bad-value", "add --to FOLDER")
    assert run_main([str(plan), "--export", str(tmp_path / "some" / "copy"), "--to", str(tmp_path / "to")]) == 0
    assert content(tmp_path / "to" / "actor").keys() >= {"model.safetensors", "tokenizer.json"}


def test_the_folder_of_the_model_is_the_one_that_the_run_began_with(tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(EXAMPLE / "model", folder)
    plan = plan_of(folder)
    path, _ = save(tmp_path / "run", plan, "tp")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "model.safetensors").unlink()  # its first weights are not needed
    assert run_main(["--export", str(path), "--to", str(tmp_path / "one")]) == 0
    assert "warning[changed-program]" in (err := capsys.readouterr().err)
    assert "model policy: chat_template.jinja is new" in err
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    code, message, _ = told(capsys, "--export", path, "--to", tmp_path / "two")
    assert code == "bad-checkpoint" and "rope_theta" in message
    folder.rename(tmp_path / "moved")
    code, message, _ = told(capsys, "--export", path, "--to", tmp_path / "two")
    assert code == "missing-file" and message.endswith(f"{folder} is not a folder on this machine")
    # As the help says: a program that names where it is now.
    (tmp_path / "moved" / "config.json").write_text(json.dumps(config))
    text = (tmp_path / "run" / "plan.json").read_text().replace(f'"{folder}"', f'"{tmp_path / "moved"}"')
    (tmp_path / "plan.json").write_text(text)
    assert run_main([str(tmp_path / "plan.json"), "--export", str(path), "--to", str(tmp_path / "two")]) == 0
    assert {p.name for p in (tmp_path / "two").iterdir()} == {"actor"}


def test_a_checkpoint_of_another_program_is_refused(tmp_path, capsys):
    path, _ = save(tmp_path / "run", plan_of(EXAMPLE / "model"), "tp")
    other = tmp_path / "other.json"
    other.write_text(plan_of(mixture(tmp_path / "mixture")).to_json())
    code, message, _ = told(capsys, other, "--export", path, "--to", tmp_path / "to")
    assert code == "bad-checkpoint" and "holds weights of `critic`, which `grpo` does not train" in message
    code, message, _ = told(capsys, other, "--export", path, "--worker", "actor", "--to", tmp_path / "to")
    assert code == "bad-checkpoint"


def test_parts_on_other_hosts_are_asked_for(tmp_path, capsys):
    files = ("actor-rank-00000.safetensors", "critic-rank-00000.safetensors"), ("actor-rank-00001.safetensors",)
    hosts = tuple(checkpoint.CheckpointHost(f"10.0.0.{i}", f"node{i}", names) for i, names in enumerate(files))
    written = {"format_version": checkpoint.DISTRIBUTED, "hosts": hosts}
    path, _ = save(tmp_path / "run", plan_of(EXAMPLE / "model"), "tp", written=written)
    (path / files[1][0]).rename(tmp_path / files[1][0])
    code, message, help = told(capsys, "--export", path)
    assert code == "bad-checkpoint" and f"has {files[1][0]} on another host" in message
    assert help == "copy the files of all hosts into this folder, and export again"
    (tmp_path / files[1][0]).rename(path / files[1][0])
    shutil.rmtree(tmp_path / "run" / "exported", ignore_errors=True)
    assert run_main(["--export", str(path)]) == 0


def test_a_checkpoint_at_a_url(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save(tmp_path / "run", plan_of(EXAMPLE / "model"), "tp")
    url = f"file://{tmp_path / 'run'}"
    assert told(capsys, "--export", url)[2] == "add --to FOLDER"
    assert run_main(["--export", url, "--to", str(tmp_path / "to")]) == 0
    assert content(tmp_path / "to" / "actor").keys() >= {"model.safetensors", "tokenizer.json"}
    assert not [*(tmp_path / "cache" / "msrl_graph" / "runs").iterdir()]  # the working copies are gone


@pytest.mark.parametrize(
    "arguments",
    [
        ["--export", "a", "--watch"],
        ["a.rlg", "--to", "b"],
        ["a.rlg", "--worker", "b"],
        ["--export", "a", "--set", "b=1"],
    ],
)
def test_flags_that_do_not_go_together(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        run_main(arguments)
    assert ended.value.code == 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp = 2, zero = 3", "tp = 2"])
def test_the_last_checkpoint_of_a_run_is_exported_as_its_weights(place, layout):
    place.write(
        ("layout actor.update   { dp = 2, zero = 3 }", f"layout actor.update {{ {layout} }}"),
        ("run { iterations", "run { save = 1, iterations"),
        evaluated=False,
    )
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", "1", "--out", "ran")
    assert code == 0, err
    code, _, err = place.run("--export", "ran")
    assert code == 0, err
    assert content(place.folder / "ran" / "exported" / "000001" / "actor") == content(
        place.folder / "ran" / "weights" / "actor"
    )
    place.assert_clean()
