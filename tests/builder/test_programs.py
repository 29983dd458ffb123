"""The Python API: the same graph, plan and diagnostics as from a file, with spans in the Python file.

`diagnostics/python/*.md`: each ```python block is a program, the ```text block after it all that is told of it.
"""

from __future__ import annotations

import linecache
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from language import TESTS

import msrl_graph
from msrl_graph import (
    Algorithm,
    Cluster,
    Deploy,
    Fault,
    Imported,
    ProgramWarning,
    algorithms,
    check,
    compile,
    diagnostics,
    parse,
    to_rlg,
)
from msrl_graph.diagnostics import NOWHERE, Span
from msrl_graph.dsl import ast
from msrl_graph.dsl.ast import map_spans, same_tree
from msrl_graph.emit.text import plan_text
from msrl_graph.ir.plan import Plan

PAGE = TESTS / "programs" / "grpo_page.rlg"
DOC = TESTS.parent / "docs" / "guides" / "python.md"
MISTAKES = sorted((TESTS / "diagnostics" / "python").glob("*.md"))
BLOCK = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```\n", re.DOTALL)


def page() -> Deploy:
    """The page's program."""
    a = Algorithm("grpo")
    a.param(prompts=256, group=16, prompt_len=2048, response_len=8192, kl_coef=0.001)
    a.columns(prompt="i32[<= prompt_len]", answer="text", response="i32[<= response_len]")
    a.columns(old_logp="f32[response]", ref_logp="f32[response]", reward="f32", advantage="f32[response]")
    a.worker("actor", "policy")
    a.worker("reference", "policy", frozen=True)
    a.worker("host", "function")
    a.source("prompts", "prompt, answer")
    generate = a.node("actor.generate", "prompt", "response", samples="group", temperature=1.0)
    infer = a.node("actor.infer", ["prompt", "response"], ["old_logp"])
    reference = a.node("reference.infer", reads="prompt, response", writes="ref_logp")
    reward = a.node("host.reward", "prompt, response, answer", "reward", call="math_verify()")
    advantage = a.node("host.advantage", "response, reward", "advantage", call="group_norm()", per="prompt")
    update = a.node(
        "actor.update",
        "prompt, response, old_logp, ref_logp, advantage",
        loss="clip(0.2) + kl_coef * kl(low_var)",
        optimizer="adamw(lr = 1e-6)",
    )
    a.edge("source", generate)
    a.edge(generate, [infer, reference, reward])
    a.edge(reward, advantage)
    a.edge("actor.infer, reference.infer, host.advantage", update)
    a.reshard(update, generate)
    d = Deploy(a, on=Cluster("pod", device="ascend-910c", nodes=2, devices_per_node=8, network="300 MB/s"))
    d.model("policy", "qwen2.5-32b")
    d.data("source", str(PAGE.parent / "deepscaler.jsonl"), prompt="problem", answer="answer")
    d.layout(update, tp=8, dp=2)
    d.layout(generate, tp=4, dp=4)
    d.run(iterations=1000, seed=0)
    return d


def bare(part: Any) -> Any:
    """A graph without spans: of what an attribute is, not where."""
    if is_dataclass(part):
        return {f.name: bare(getattr(part, f.name)) for f in fields(part) if f.name != "span"}
    if isinstance(part, dict):
        return {k: bare(v) for k, v in part.items()}
    return [bare(p) for p in part] if isinstance(part, tuple) else part


def spans(part: Any) -> list[Span]:
    if isinstance(part, Span):
        return [part]
    if is_dataclass(part):
        return [s for f in fields(part) for s in spans(getattr(part, f.name))]
    parts = part.values() if isinstance(part, dict) else part if isinstance(part, tuple) else ()
    return [s for p in parts for s in spans(p)]


def test_the_page_in_python_is_the_page() -> None:
    built = compile(page())
    read = compile(PAGE)
    assert bare(built.graph) == bare(read.graph)
    assert built.explain() == read.explain() == plan_text(read)
    assert {s.file for s in spans(built.graph)} - {""} == {__file__}


def test_the_page_in_python_as_text_is_the_page() -> None:
    again = compile("page.rlg", text=page().to_rlg())
    assert bare(again.graph) == bare(compile(PAGE).graph)
    assert str(page()) == to_rlg(page()) == page().to_rlg()


def run_block(code: str, file: str = "program.py") -> dict[str, Any]:
    """Runs a program as a cell of a notebook is run: its text is known to linecache alone."""
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    names: dict[str, Any] = {
        name: getattr(msrl_graph, name) for name in msrl_graph.__all__ if name not in ("run", "simulate")
    }
    exec(__builtins__["compile"](code, file, "exec"), names)  # type: ignore[index]
    return names


def told(code: str, file: str = "program.py") -> str:
    with pytest.raises(Fault) as caught:
        run_block(code, file)
    return f"{caught.value}\n".replace(f"{algorithms.FOLDER}/", "")


@pytest.mark.parametrize("path", MISTAKES, ids=lambda p: p.stem)
def test_mistakes_are_told_where_they_were_made(path: Path, update: bool) -> None:
    text = path.read_text(encoding="utf-8")
    found = BLOCK.sub(lambda m: f"```python\n{m[1]}```\n\n```text\n{told(m[1])}```\n", text)
    if update:
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")
    assert text.count("```python") == len(BLOCK.findall(text))


def test_a_file_shows_its_mistakes_in_the_traceback(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        'from msrl_graph import Algorithm, check\na = Algorithm("a", extends="grpo")\na.drop("actr")\ncheck(a)\n'
    )
    done = subprocess.run([sys.executable, program.name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    traceback, _, told = done.stderr.partition("msrl_graph.diagnostics.Fault: ")
    assert re.findall('File "(.*?)"', traceback) == [str(program), diagnostics.__file__]
    assert told == (
        "error[unknown-name]: no param, column, state, worker or node is called `actr`, so there is nothing to drop\n"
        f" --> {program}:3:9\n"
        "  |\n"
        '3 | a.drop("actr")\n'
        "  |         ^^^^\n"
        "  = help: did you mean `actor`?\n"
    )


def test_the_example_of_the_page_on_python_is_planned(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)[0]
    assert len(code.splitlines()) < 40
    program = tmp_path / "median.py"
    program.write_text(code)
    done = subprocess.run([sys.executable, "-W", "ignore", program.name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Plan of median_grpo on pod  128 prompts x 16 responses an iteration\n")


def test_the_table_of_the_page_on_python_is_true() -> None:
    rows = [line.split(" | ") for line in DOC.read_text(encoding="utf-8").splitlines() if line.startswith("| `")][1:]
    checked = 0
    for left, right in rows:
        head = (
            "deploy grpo on pod" if "`d" in right else "deploy more extends grpo" if "`e" in right else "algorithm mine"
        )
        said = [m for m in re.findall("`(.*?)`", left) if " " in m and "…" not in m]
        statements = [
            map_spans(parse(f"{head} {{ {text} }}", "p.rlg").items[0], lambda _: NOWHERE).body[0] for text in said
        ]  # type: ignore[union-attr]
        for call in re.findall(r"`([ade]\..*?)`", right):
            if "…" not in call:
                a = Algorithm("mine")
                d = Deploy("grpo", on=Imported("pod", "p.rlg"))
                made = {"a": a, "d": d, "e": Deploy(extends=d, name="more")}
                eval(call, made)
                (built,) = made[call[0]]._body
                assert map_spans(built, lambda _: NOWHERE) in statements, call
                checked += 1
    assert len(rows) > 20 and checked > len(rows)


def test_the_mistake_of_the_page_on_python_is_told_so() -> None:
    text = DOC.read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[1]
    shown = re.findall(r"```text\n(.*?)```", text, re.DOTALL)[0]
    assert told(code, "mine.py") == shown


def test_a_function_is_called_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "lib.py").write_text("def score(response: str, answer: str) -> float:\n    return 1.0\n")
    (tmp_path / "program.py").write_text(
        "from lib import score\nfrom msrl_graph import Algorithm, check\n"
        'a = Algorithm("a", extends="grpo")\n'
        'a.node("host.reward", "response, answer", "reward", call=score)\n'
        "print(a)\nprint(check(a).node('host.reward').attributes['call'])\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{tmp_path / 'lib.py'}:score()"
    assert 'call = "lib.py:score"' in done.stdout


def test_what_is_suspicious_is_a_warning_at_the_line_that_compiles() -> None:
    a = Algorithm("mine", extends="grpo")
    a.columns(spare="f32")
    with pytest.warns(ProgramWarning) as caught:
        check(a)
    (warning,) = caught
    assert warning.filename == __file__
    assert "a.columns(spare=" in str(warning.message) and str(warning.message).startswith("warning[unused-column]")


def test_every_statement_has_its_place() -> None:
    """What the language can say: each method, with the text that it stands for."""
    a = Algorithm("mine", extends=Imported("base", "base.rlg"))
    a.param(flag=True, word='"low_var"', rate=-0.5, rows="group * 2")
    a.columns(score="f32[<= 2 * group, 3] per prompt")
    a.state("success", "f32 per prompt", 0.5)
    a.worker("judge", "reward_model", model="judge")
    a.source(8, ["prompt"], weights="f(success)")
    hinter = a.node("hinter: host.hint", "answer", "hint", call="hints.py:hint")
    a.node("actor.update", epochs=2, optimizer="adamw(lr = 1e-6, betas = [0.9, 0.95])")
    a.node("actor.generate", stop=["</answer>", "\n\n"], temperature=0.7)
    a.edge("source", hinter, ["host.a", "host.b"], balance="tokens")
    a.edge("host.a, host.b -> host.c -> host.d { stream = 8 }", balance="tokens")
    a.reshard("actor.update", "actor.generate", staleness=1)
    a.reshard("actor.update => judge.infer { every = 2 }", staleness=1)
    a.drop("judge.infer")
    a.drop("host.a -> host.b")
    a.drop("actor.update => actor.generate")
    a.drop_edge("source -> host.a")
    a.drop_reshard("actor.update => judge.infer")
    a.drop_edge("source", hinter)
    a.drop_reshard("actor.update", "critic.infer")
    d = Deploy(a, on=Imported("pod", "base.rlg"), name="try")
    d.set(group=4)
    d.model("policy", Path("models/x"), dtype="bf16")
    d.data("test", "test.jsonl", prompt="question")
    d.layout(["actor.update", "actor.infer"], tp=2, stages=[10, 11], cp_kind="ring")
    d.engine("actor.update", "fsdp", micro_batch=2, recompute="full")
    d.place("actor", together=True, nodes=(0, 1), devices=3)
    d.apart("actor", "reference")
    d.dock(mode="central", deadline="5 min")
    d.reshard(bucket="64 MiB")
    d.edge("source -> actor.generate", stream=8)
    d.evaluate("test", report=["reward", "length"], label="held out")
    d.run(resume="runs/a b")
    written = """import "base.rlg"

algorithm mine extends base {
  param flag = true
  param word = "low_var"
  param rate = -0.5
  param rows = group * 2

  columns { score : f32[<= 2 * group, 3] per prompt }

  state success : f32 per prompt = 0.5

  worker judge : reward_model { model = judge }

  source(8) -> prompt { weights = f(success) }

  node hinter: host.hint(answer) -> hint { call = "hints.py:hint" }
  node actor.update   { epochs = 2, optimizer = adamw(lr = 1e-6, betas = [0.9, 0.95]) }
  node actor.generate { stop = ["</answer>", "\\n\\n"], temperature = 0.7 }

  source -> hinter -> host.a, host.b { balance = tokens }
  host.a, host.b -> host.c -> host.d { stream = 8, balance = tokens }
  actor.update => actor.generate { staleness = 1 }
  actor.update => judge.infer { every = 2, staleness = 1 }

  drop judge.infer
  drop host.a -> host.b
  drop actor.update => actor.generate
  drop source -> host.a
  drop actor.update => judge.infer
  drop source -> hinter
  drop actor.update => critic.infer
}

deploy mine on pod as try {
  set group = 4
  model policy = "models/x"   { dtype = bf16 }
  data test    = "test.jsonl" { prompt = "question" }
  layout actor.update, actor.infer { tp = 2, stages = [10, 11], cp_kind = ring }
  engine actor.update = fsdp { micro_batch = 2, recompute = full }
  place actor together on nodes 0..1 devices 3
  apart actor, reference
  dock { mode = central, deadline = 5 min }
  reshard { bucket = 64 MiB }
  source -> actor.generate { stream = 8 }
  evaluate test { report = [reward, length], label = "held out" }
  run { resume = "runs/a b" }
}
"""
    assert to_rlg(d) == written

    # What Python says is the very tree that the text gives.
    assert same_tree(d.tree(), parse(written, "p.rlg"))


def test_an_imported_program_is_read_beside_the_python_file(tmp_path: Path) -> None:
    (tmp_path / "base.rlg").write_text(PAGE.read_text(encoding="utf-8").replace("algorithm grpo", "algorithm base"))
    code = (
        'd = Deploy(Imported("base", "base.rlg"), on=Imported("pod", "base.rlg"))\nd.model("policy", '
        '"qwen2.5-7b")\nplan = compile(d)\n'
    )
    program = tmp_path / "program.py"
    program.write_text(code)
    plan = run_block(code, str(program))["plan"]
    assert isinstance(plan, Plan)
    assert (plan.graph.name, plan.cluster.nodes, plan.model("actor.update").layers) == ("base", 2, 28)


def test_a_tree_that_was_parsed_is_a_program_too() -> None:
    assert compile(parse(PAGE.read_text(encoding="utf-8"), str(PAGE))).explain() == compile(PAGE).explain()


def test_a_plan_and_a_graph_are_shown_as_the_command_line_shows_them_and_named_in_a_line() -> None:
    plan = compile(PAGE)
    assert f"{plan}\n" == plan.explain()
    assert str(plan.graph).startswith("Algorithm grpo  256 prompts x 16 responses an iteration\n")
    assert repr([plan, plan.graph]) == "[<Plan of grpo on pod: 7 states, 16 devices>, <Graph grpo: 7 states>]"


def test_where_there_is_no_source_the_line_is_told() -> None:
    with pytest.raises(Fault) as caught:
        exec("\n\nAlgorithm('1')", {"Algorithm": Algorithm})
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.span == Span("<string>", 3, 1, 3, 1)


def test_each_name_is_underlined() -> None:
    lines = Path(__file__).read_text(encoding="utf-8").split("\n")
    found = 0
    for part in parts(page().tree()):
        if isinstance(part, ast.Name | ast.Ref) and part.text not in (
            "grpo",
            "pod",
        ):  # these are what stands in a variable
            at = part.span
            under = lines[at.line - 1][at.column - 1 : at.end_column - 1]
            # What was given back by `node` stands as a variable, too.
            assert under == part.text or under in ("generate", "infer", "reference", "reward", "advantage", "update")
            found += under == part.text
    assert found > 60


def parts(part: Any) -> list[Any]:
    if isinstance(part, tuple):
        return [p for item in part for p in parts(item)]
    return [part, *(p for f in fields(part) for p in parts(getattr(part, f.name)))] if is_dataclass(part) else []


def test_without_positions_the_line_is_underlined(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text('from msrl_graph import Algorithm\nfor name in ("a b",):\n    Algorithm(name)  # here\n')
    done = subprocess.run(
        [sys.executable, "-X", "no_debug_ranges", program.name], cwd=tmp_path, capture_output=True, text=True
    )
    shown = f" --> {program}:3:5\n  |\n3 |     Algorithm(name)  # here\n  |     ^^^^^^^^^^^^^^^^^^^^^^^\n"
    assert shown in done.stderr


def test_who_compiles_files_loads_nothing_of_it() -> None:
    code = "import sys, msrl_graph.cli; print([m for m in sys.modules if m.startswith('msrl_graph.builder')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
