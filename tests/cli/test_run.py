"""`msrl-run` before anything runs: usage, plans that are none, machines that lack what is asked for."""

import json
import re
import shutil
from pathlib import Path

import pytest
from folders import ROOT

from msrl_graph import compile
from msrl_graph.backends.packages import make_extra_command
from msrl_graph.cli import compile_main, run_main
from msrl_graph.runtime.data.dataset_preview import PREVIEW_ROWS
from msrl_graph.runtime.driver import supervisor

EXAMPLE = ROOT / "examples" / "arithmetic"


def test_what_is_no_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, why in (
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"format_version": 1}', "Object missing required field `graph`"),
    ):
        Path("plan.json").write_text(text)
        assert run_main(["plan.json"]) == 1
        assert capsys.readouterr().err == (
            f"error[bad-plan]: plan.json is not a plan of this version: {why}\n"
            "  = help: write it again: msrl-compile FILE --format json -o plan.json\n"
        )
    assert run_main(["other.json"]) == 1
    assert (
        capsys.readouterr().err
        == "error[missing-file]: the plan other.json cannot be read: No such file or directory\n"
    )


def test_a_plan_of_another_version(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    assert compile_main([str(EXAMPLE / "grpo.rlg"), "--format", "json", "-o", str(plan)]) == 0
    plan.write_text(plan.read_text().replace('"format_version": 1', '"format_version": 99'))
    assert run_main([str(plan)]) == 1
    assert "is not a plan of this version: its format is 99, this version reads 1" in capsys.readouterr().err


def test_a_plan_without_pools_is_of_another_version(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    assert compile_main([str(EXAMPLE / "grpo.rlg"), "--format", "json", "-o", str(plan)]) == 0
    plan.write_text(json.dumps({k: v for k, v in json.loads(plan.read_text()).items() if k != "pools"}))
    assert run_main([str(plan)]) == 1
    assert "is not a plan of this version: it does not say which devices its states share" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a.rlg", "--iterations", "-1"],
        ["a.rlg", "--seed", "x"],
        ["a.rlg", "--set", "a"],
        ["plan.json", "--set", "a=1"],
        ["a.rlg", "--no"],
    ],
)
def test_bad_usage_is_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        run_main(arguments)
    assert ended.value.code == 2
    assert "usage: msrl-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nodes", "devices", "message", "help"),
    [
        (
            3,
            2,
            "the plan asks for 3 hosts of 2 CPU; this machine is 1 host of 2 cores",
            "set RAY_ADDRESS to a Ray cluster of that many hosts, or use one host",
        ),
        (
            1,
            32,
            "the plan asks for 1 host of 32 CPU; this machine is 1 host of 2 cores",
            "at most 8 ranks share a core: use 16 devices or fewer",
        ),
    ],
)
def test_a_machine_that_is_too_small(nodes, devices, message, help, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    text = (EXAMPLE / "grpo.rlg").read_text()
    text = text.replace("nodes = 1, devices_per_node = 2", f"nodes = {nodes}, devices_per_node = {devices}")
    text = text.replace("{ dp = 2, zero = 3 }", "{ zero = 3 }").replace("mini_batch = 256", "mini_batch = 96")
    for item in ("train.jsonl", "test.jsonl", "model"):
        (tmp_path / item).symlink_to(EXAMPLE / item)
    (tmp_path / "p.rlg").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert run_main(["p.rlg"]) == 3
    line = next(i for i, x in enumerate(text.split("\n"), 1) if x.startswith("cluster"))
    assert capsys.readouterr().err == (
        f"error[no-resources]: {message}\n"
        f"  --> p.rlg:{line}:1\n"
        "   |\n"
        f"{line} | {text.split(chr(10))[line - 1]}\n"
        f"   | {'^' * len(text.split(chr(10))[line - 1])}\n"
        f"   = help: {help}\n"
    )
    assert not (tmp_path / "runs").exists()


def test_results_of_another_run_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "kept").write_text("results")
    assert run_main([str(EXAMPLE / "grpo.rlg"), "--out", str(tmp_path)]) == 1
    assert "exists and is not empty" in capsys.readouterr().err
    assert (tmp_path / "kept").read_text() == "results"


@pytest.mark.parametrize("data", ['  data source = "none.jsonl"\n', ""])
def test_data_that_are_missing_are_told_once(data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cluster = 'cluster one { device = "cpu" }\n'
    Path("small.rlg").write_text(f'import grpo\n{cluster}deploy grpo on one {{\n  model policy = "tiny"\n{data}}}\n')
    assert run_main(["small.rlg", "--diagnostics", "concise"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len([line for line in told if "[missing-file]" in line or "[no-data]" in line]) == 1
    assert not any("warning" in line for line in told)


@pytest.mark.parametrize(
    ("long", "short", "told", "warned"),
    [
        (0, 64, "", ()),
        (64, 64, "source: 64 of 128 rows are left out: `prompt` is empty or longer than 6 (rows: 64)", ()),
        (
            65,
            64,
            "source: 65 of 129 rows are left out: `prompt` is empty or longer than 6 (rows: 65)",
            ("train.jsonl: 65 of 129 rows are left out: `prompt` is empty or longer than 6 (rows: 65)",),
        ),
        (
            1,
            9,
            "source: 1 of 10 rows are left out: ",
            ("train.jsonl has 9 usable rows, and an iteration begins with 64 prompts",),
        ),
        (
            PREVIEW_ROWS // 2 + 1,
            PREVIEW_ROWS,
            f"source: 501 of the first {PREVIEW_ROWS:,} rows are left out: ",
            ("train.jsonl: 501 of the first 1,000 rows",),
        ),
    ],
)
def test_rows_that_are_left_out_are_told_before_anything_is_started(
    long, short, told, warned, tmp_path, capsys, monkeypatch
):
    shutil.copytree(EXAMPLE / "model", tmp_path / "model")
    rows = [{**ROW, "prompt": "11+11+11="}] * long + [ROW] * short
    for name, content in (("train", rows), ("test", [ROW])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    shutil.copy(EXAMPLE / "grpo.rlg", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run_main(["grpo.rlg", "--dry-run", "--diagnostics", "concise"]) == 0
    printed = capsys.readouterr()
    assert [line.startswith(told) for line in printed.out.splitlines() if "left out" in line] == [True] * bool(told)
    found = [
        line.partition("]: ")[2]
        for line in printed.err.splitlines()
        if "warning[bad-data]: " in line or "warning[few-rows]: " in line
    ]
    assert len(found) == len(warned) and all(words in line for words, line in zip(warned, found, strict=True))


ROW = {"prompt": "1+1=", "answer": "2"}
CHAT = [{"role": "user", "content": "1+1="}]


@pytest.mark.parametrize(
    ("rows", "tokenizer", "told"),
    [
        (
            [{**ROW, "prompt": "11+11+11="}] * (PREVIEW_ROWS + 1),
            "",
            "no-data]: no row of train.jsonl is short enough to be used",
        ),
        ([{**ROW, "prompt": "11+11+11="}] * PREVIEW_ROWS + [ROW], "", None),
        (
            [ROW, {**ROW, "prompt": CHAT}],
            "",
            "bad-data]: line 2 of train.jsonl has messages in `prompt`, and the model folder ",
        ),
        ([ROW], "{}", "missing-file]: the tokenizer of "),
    ],
)
def test_data_and_tokenizer_are_tried_before_anything_is_started(rows, tokenizer, told, tmp_path, capsys, monkeypatch):
    shutil.copytree(EXAMPLE / "model", tmp_path / "model")
    if tokenizer:
        (tmp_path / "model" / "tokenizer.json").write_text(tokenizer)
    for name, content in (("train", rows), ("test", [ROW])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    shutil.copy(EXAMPLE / "grpo.rlg", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run_main(["grpo.rlg", "--dry-run", "--diagnostics", "concise"]) == (1 if told else 0)
    printed = capsys.readouterr()
    if told:
        (line,) = [x for x in printed.err.splitlines() if "error[" in x]
        assert told in line.replace(f"{tmp_path}/", "")
    else:
        assert f"source {len(rows)} rows" in printed.out + printed.err


NAMED = """  state solved : f32 per prompt = 0.5
  source(prompts) -> prompt, answer { weights = "mine.py:weigh" }
  node host.one(reward) { keep = "mine.py:one", per = prompt }
  node host.other(reward) { select = "mine.py:other", per = prompt }
  node host.solved(reward, solved) -> solved { call = "mine.py:mean", per = prompt }
  host.reward -> host.one -> host.other -> host.advantage, host.solved
"""


def test_python_that_a_program_names_is_found_from_any_folder(tmp_path, monkeypatch):
    """Processes of a Ray that is there already have a working directory of their own."""
    monkeypatch.chdir(tmp_path)
    for item in ("train.jsonl", "test.jsonl", "model"):
        Path(item).symlink_to(EXAMPLE / item)
    names = ("weigh(solved)", "one(reward)", "other(reward)", "mean(reward, solved)")
    Path("mine.py").write_text("".join(f"def {name}: ...\n" for name in names))
    text = (EXAMPLE / "grpo.rlg").read_text().replace("  source(prompts) -> prompt, answer\n", NAMED)
    plan = supervisor.prepare(compile("p.rlg", text=text)).plan
    found = {str(e.value) for n in plan.graph.nodes for e in n.attributes.values() if ".py:" in str(e.value)}
    assert found == {f"{tmp_path}/mine.py:{name.split('(')[0]}" for name in names}


def test_an_engine_that_is_not_installed(tmp_path, capsys):
    shutil.copytree(EXAMPLE, tmp_path / "here")
    program = tmp_path / "here" / "grpo.rlg"
    text = program.read_text().replace("  layout actor.generate { tp = 2 }", "  engine actor.generate = vllm")
    program.write_text(text)
    assert run_main([str(program)]) == 1
    line = text.splitlines().index("  engine actor.generate = vllm") + 1
    err = capsys.readouterr().err
    assert err.startswith(
        "error[not-installed]: the engine `vllm` of `actor.generate` needs vllm, not installed here\n"
    )
    assert f"grpo.rlg:{line}:" in err and err.endswith(f"  = help: {make_extra_command('vllm')}\n")


def test_an_engine_that_a_layout_asks_for_is_reported_at_the_layout(tmp_path, capsys):
    """What the help says works: without the axis another engine runs the program."""
    shutil.copytree(EXAMPLE, tmp_path / "here")
    program = tmp_path / "here" / "grpo.rlg"
    text = re.sub(r"  layout actor.update .*", "  layout actor.update { pp = 2 }", program.read_text())
    program.write_text(text)
    assert run_main([str(program), "--dry-run"]) == 1
    line = text.splitlines().index("  layout actor.update { pp = 2 }") + 1
    err = capsys.readouterr().err
    what = "the engine `megatron` of `actor.update` needs megatron-core, not installed here"
    assert err.startswith(f"error[not-installed]: {what}; the plan chose it, since `fsdp` has no pp\n")
    assert f"grpo.rlg:{line}:" in err
    fix = "or leave `pp` out of the layout: `fsdp` runs it then"
    assert err.endswith(f"  = help: {make_extra_command('megatron')}; {fix}\n")
    program.write_text(text.replace("{ pp = 2 }", "{}"))
    assert run_main([str(program), "--dry-run"]) == 0
