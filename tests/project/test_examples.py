"""The examples: each compiles without a word and could be run as it stands, each has learnt with every seed, and the
pages say so."""

import json
import math
import re
import runpy
import statistics

import pytest
from folders import ROOT
from language import context, diagnose

from msrl_graph.algorithms import FOLDER
from msrl_graph.compiler.pipeline import translate
from msrl_graph.compiler.sources import read_source
from msrl_graph.diagnostics import render
from msrl_graph.ir.run_options import RunOptions
from msrl_graph.runtime.driver import supervisor

EXAMPLES = ROOT / "examples"
CURVES = runpy.run_path(str(EXAMPLES / "curves.py"))
# One is planned for only, and what other engines and devices run is tried where these are (with_engines/, on_gpu/).
PROGRAMS = [
    p
    for p in sorted(EXAMPLES.glob("*/*.rlg"))
    if p.parent.name != "paper" and not p.stem.endswith("_vllm") and p.stem not in ("one_gpu", "two_environments")
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.stem)
def test_a_program_of_the_examples_could_be_run(program, tmp_path):
    result = translate(read_source(str(program)))
    assert not result.warnings
    made = supervisor.prepare(result.plan, RunOptions(tmp_path / "out"))
    assert made.rows and all(made.rows.values()) and not made.warnings


def test_the_mistake_in_the_readme_is_reported_as_it_says():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```rlg\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    wrong = program.replace("-> old_logp\n", "-> old_logb\n")
    (found,) = diagnose(wrong, context(EXAMPLES / "arithmetic"))
    assert render(found, {"program.rlg": wrong}) in text


def test_the_one_for_a_gpu_is_planned_for_as_the_plan_chooses():
    result = translate(read_source(str(EXAMPLES / "arithmetic" / "one_gpu.rlg")))
    assert not result.warnings
    assert [result.plan.placement(f"actor.{n}").engine.name for n in ("generate", "update")] == ["vllm", "megatron"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/curve.json")), ids=lambda p: p.parent.name)
def test_an_example_learns_with_each_of_three_seeds(path):
    (program,) = (p for p in CURVES["programs"]().values() if p.parent == path.parent)
    iterations = translate(read_source(str(program))).plan.deploy.run.iterations
    seeds = json.loads(path.read_text(encoding="utf-8"))["seeds"]
    assert len(seeds) >= 3 and path.with_suffix(".png").stat().st_size > 1000
    assert [run["points"][-1] for run in seeds.values()] == [[iterations, run["last"]] for run in seeds.values()]
    assert {seed: run["last"] > run["first"] for seed, run in seeds.items()} == dict.fromkeys(seeds, True)


def test_the_tables_are_those_of_the_curves():
    for page, tables in CURVES["tables"]().items():
        text = page.read_text(encoding="utf-8")
        assert [t for t in tables if t not in text] == [], "python examples/curves.py --tables"


def test_other_engines_learn_as_the_light_ones_do():
    """Within what seeds leave open: three standard errors of a difference of means."""
    runs = json.loads((EXAMPLES / "arithmetic" / "engines.json").read_text(encoding="utf-8"))["runs"]
    light = json.loads((EXAMPLES / "arithmetic" / "curve.json").read_text(encoding="utf-8"))["seeds"].values()
    for name in CURVES["engine_programs"]():
        found = [run for key, run in runs.items() if key.split()[0] == name]
        last = found[0]["points"][-1][0]
        own = [r["last"] for r in found]
        others = [dict(r["points"])[last] for r in light]
        open_by = 3 * math.sqrt((statistics.variance(own) + statistics.variance(others)) / 3)
        assert len(found) == 3 and abs(statistics.mean(own) - statistics.mean(others)) <= open_by


def test_the_lines_of_each_algorithm_are_as_the_page_counts_them():
    page = (EXAMPLES.parent / "docs" / "results.md").read_text(encoding="utf-8")
    section = page.partition("## Lines of an algorithm")[2].partition("\n## ")[0]
    told = dict(re.findall(r"^\| (\w+) \| \w* ?\| (\d+) \|", section, re.MULTILINE))
    assert told == {
        p.stem: str(len(re.findall(r"^ *[^#\s]", p.read_text(encoding="utf-8"), re.MULTILINE)))
        for p in FOLDER.glob("*.rlg")
    }
