"""A package that somebody else wrote, installed next to msrl_graph: its engine, family, tracker, function, loss term,
optimizer and device are used by their names, with no change to msrl_graph."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from place import EXAMPLE, PROGRAM, ROOT, SMALL, metrics

pytestmark = pytest.mark.slow
PACKAGE = ROOT / "tests" / "support" / "toy_package"
OWN = [
    ("call = exact_match()", "call = toy_length(most = 5)"),
    ("loss       = clip(0.2)", "loss       = 0.01 * toy_confidence() + clip(0.2)"),
    ("adamw(lr = 2e-4, betas = [0.9, 0.99], weight_decay = 0, warmup = 20)", "toy_sgd(lr = 0.1)"),
    ("  run {", "  engine actor.generate = toy\n  run {"),
    ("seed = 0 }", "seed = 0, track = [tensorboard, toy] }"),
    ("devices_per_node = 2", "devices_per_node = 1"),
    ("  layout actor.update   { dp = 2, zero = 3 }\n  layout actor.generate { tp = 2 }\n", ""),
    ("mini_batch = 256", "mini_batch = prompts * group"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A fresh environment that also sees the packages of this one, with the toy package installed by pip."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    own = Path(
        subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
        ).strip()
    )
    parent = sysconfig.get_paths()["purelib"]
    tree = f"sys.path.insert(0, {str(ROOT)!r})"
    (own / "parent.pth").write_text(f"import site, sys; site.addsitedir({parent!r}); {tree}\n")
    source = shutil.copytree(PACKAGE, folder / "toy")
    install = [python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", source]
    subprocess.run(install, check=True, timeout=120)
    return python


@pytest.fixture
def folder(tmp_path):
    """The program, with the data of the example and a Helium model with random weights and its tokenizer."""
    from transformers import HeliumConfig, HeliumForCausalLM

    for file in ("train.jsonl", "test.jsonl"):
        (tmp_path / file).symlink_to(EXAMPLE / file)
    known = json.loads((EXAMPLE / "model" / "config.json").read_text())
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = (*sizes, "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    size = known["hidden_size"] // known["num_attention_heads"]
    config = HeliumConfig(**{key: known[key] for key in sizes if key in known}, head_dim=size)
    HeliumForCausalLM(config).save_pretrained(tmp_path / "model")
    for file in (EXAMPLE / "model").glob("*token*"):
        shutil.copy(file, tmp_path / "model")
    write(tmp_path)
    return tmp_path


def write(folder, *changes):
    text = PROGRAM
    for old, new in (*OWN, *changes):
        assert old in text, old
        text = text.replace(old, new)
    (folder / "p.rlg").write_text(text)


def call(python, folder, command, *arguments):
    code = f"import sys; from msrl_graph.cli import {command}_main; sys.exit({command}_main())"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, "-c", code, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_a_run_with_plug_ins_of_each_kind(environment, folder):
    done = call(environment, folder, "run", "p.rlg", *SMALL, "--iterations", "2", "--out", "out")
    assert done.returncode == 0, done.stderr
    lines = [line for line in metrics(folder / "out") if "iteration" in line]
    assert [line["iteration"] for line in lines] == [0, 1]
    assert all(0 <= line["reward"] <= 5 and line["loss/toy_confidence"] > 0 for line in lines)
    log = (folder / "out" / "logs" / "rank-0.log").read_text()
    assert "the toy engine has new weights" in log and "is asked for 4 responses to a prompt" in log
    plan = json.loads((folder / "out" / "plan.json").read_text())
    found = {(plug_in["group"].partition(".")[2], plug_in["name"]): plug_in for plug_in in plan["plugins"]}
    assert found.keys() == {("engines", "toy"), ("families", "helium"), ("functions", "toy"), ("trackers", "toy")}
    told = (folder / "out" / "trackers" / "toy" / "rewards.txt").read_text().splitlines()
    assert {f"{line['iteration']} {line['reward']!r}" for line in lines} <= {*told}
    assert {(plug_in["package"], plug_in["version"]) for plug_in in found.values()} == {("toy-plug-ins", "0.3")}
    inputs = json.loads((folder / "out" / "inputs.json").read_text())
    assert inputs["versions"]["toy-plug-ins"] == "0.3"


def test_a_plan_says_which_plug_ins_it_uses_and_is_refused_where_they_are_missing(environment, folder):
    shown = call(environment, folder, "compile", "p.rlg")
    assert "plug-in helium: toy-plug-ins 0.3" in shown.stdout, shown.stderr
    write(folder, ('device = "cpu"', 'device = "toy-npu"'), ("  engine actor.generate = toy\n", ""))
    (folder / "plan.json").write_text(call(environment, folder, "compile", "p.rlg", "--format", "json").stdout)
    plan = json.loads((folder / "plan.json").read_text())
    assert {plug_in["group"] for plug_in in plan["plugins"]} == {
        f"msrl_graph.{group}" for group in ("families", "functions", "trackers", "devices", "device_kinds")
    }
    missing = call(sys.executable, folder, "run", "plan.json")
    assert missing.returncode == 1 and "of the package toy-plug-ins 0.3, which is not installed here" in missing.stderr


BROKEN = [
    ("broken", "ModuleNotFoundError: No module named 'a_package_that_nobody_has'"),
    ("misnamed", "calls itself `toy`"),
]


@pytest.mark.parametrize(("name", "why"), BROKEN)
def test_a_broken_plug_in_is_reported_when_a_program_names_it(environment, folder, name, why):
    write(folder, ("generate = toy", f"generate = {name}"))
    done = call(environment, folder, "compile", "p.rlg", "--check")
    assert done.returncode == 1 and "error[not-installed]" in done.stderr, done.stderr
    assert f"the plug-in `{name}` of the package toy-plug-ins 0.3" in done.stderr and why in done.stderr


FAULTS = [
    ("engine", "_peaks", "ZeroDivisionError: integer division or modulo by zero", "choose another engine"),
    ("family", "_layers", "KeyError: 'no such layer'", "use a model of another family"),
]


@pytest.mark.parametrize(("part", "function", "why", "instead"), FAULTS)
def test_a_fault_in_the_formulas_of_a_plug_in_names_its_package(environment, folder, part, function, why, instead):
    if part == "engine":
        write(folder, ("generate = toy", "generate = faulty"))
    else:
        config = folder / "model" / "config.json"
        named = {"model_type": "faulty", "architectures": ["FaultyForCausalLM"]}
        config.write_text(json.dumps(json.loads(config.read_text()) | named))
    for command in ("compile", "run"):
        done = call(environment, folder, command, "p.rlg")
        said = " ".join(done.stderr.split())
        assert done.returncode == 1 and "internal error" not in said, done.stderr
        assert f"error[bad-plug-in]: the package toy-plug-ins 0.3 failed in `{function}` (" in said
        assert re.search(rf"toy_plug_ins/faulty_{part}\.py, line \d+\): {re.escape(why)} ", said), said
        assert f"report it to the authors of toy-plug-ins; until then {instead}, or remove the package: pip" in said


def test_the_doctor_lists_plug_ins_and_says_which_cannot_be_loaded(environment, tmp_path):
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    done = subprocess.run(
        [environment, "-m", "msrl_graph.cli.doctor", "--json"],
        cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [finding for finding in json.loads(done.stdout)["findings"] if finding["check"] == "plug-ins"]
    (usable,) = [finding["told"] for finding in found if finding["state"] == "ok"]
    assert usable.startswith("toy-plug-ins 0.3 has engines faulty, engines toy, families faulty, ")
    listed = {*usable.partition(" has ")[2].split(", ")}
    assert listed == {
        *("engines toy", "families helium", "functions toy", "trackers toy", "devices toy-npu", "device_kinds toy"),
        *("engines faulty", "families faulty"),
    }
    broken = {finding["told"]: finding["next"] for finding in found if finding["state"] == "warning"}
    assert len(broken) == len(BROKEN)
    for name, why in BROKEN:
        (told,) = [told for told in broken if f"the plug-in `{name}` of the package toy-plug-ins 0.3" in told]
        assert why in told and "toy-plug-ins" in broken[told]


def test_an_unknown_engine_lists_those_of_plug_ins(environment, folder):
    write(folder, ("generate = toy", "generate = toi"))
    done = call(environment, folder, "compile", "p.rlg", "--check")
    assert "did you mean `toy`?" in done.stderr
