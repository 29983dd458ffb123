"""Deploys that extend others: the same as if they were written out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from language import PROGRAMS, context, lowered

from msrl_graph import Cluster, Deploy, Fault, Imported, compile, parse, to_rlg
from msrl_graph.dsl.ast import same_tree

SWEEP = next(p for p in PROGRAMS if p.stem == "sweep").read_text()
HEAD = SWEEP[: SWEEP.index("deploy wide")]
WRITTEN = {
    "wide": """deploy grpo on large as wide {
  set prompts      = 256
  set response_len = 1024
  model policy     = "qwen2.5-7b"
  data source      = "train.jsonl" { prompt = "problem" }
  layout actor.update, actor.infer { tp = 4, dp = 8 }
  layout actor.generate            { tp = 2 }
  run { iterations = 200, seed = 1, save = 20 }
}
""",
    "free": """deploy grpo on large as free {
  set prompts      = 256
  set response_len = 1024
  model policy     = "qwen2.5-7b"
  data source      = "train.jsonl" { prompt = "problem" }
}
""",
}


def deployed(text: str, name: str) -> tuple[dict[str, object], str, str]:
    found = lowered(text, context(deploy=name))
    assert found.cluster is not None and found.deploy is not None
    return dict(found.graph.params), found.cluster.name, re.sub(r"Span\([^)]*\)", "", repr(found.deploy))


@pytest.mark.parametrize("name", WRITTEN)
def test_it_is_what_it_would_be_written_out(name: str) -> None:
    assert deployed(SWEEP, name) == deployed(HEAD + WRITTEN[name], name)


STATEMENTS = """
  data test = "test.jsonl" { prompt = "problem" }
  evaluate test { every = 5, report = reward, samples = 4 }
  dock { deadline = 5 min, imbalance = 2 }
  engine actor.generate, actor.update = OTHER { micro_batch = 4 }
  apart actor, reference
  actor.generate -> actor.infer, reference.infer { stream = 8 }
"""


def test_each_statement_changes_what_it_is_of() -> None:
    """Engines and edges state by state, `evaluate`, `dock` and `run` by attribute, `place` and `apart` as one."""
    base = HEAD.replace(
        "  run {",
        STATEMENTS.replace("actor.generate, actor.update = OTHER", "actor.infer, actor.update = fsdp") + "  run {",
    )
    own = """deploy b extends base {
  evaluate test { samples = 1, label = "held out" }
  dock { imbalance = 3 }
  engine actor.infer = fsdp { micro_batch = 2 }
  place actor.generate on nodes 0 devices 0..3
  actor.generate -> actor.infer { balance = tokens }
}
"""
    found = lowered(base + own, context(deploy="b"))
    deploy = found.deploy
    edges = {(e.src, e.dst): e.attributes for e in found.graph.edges}
    assert deploy is not None
    (evaluation,) = deploy.evaluations
    assert (evaluation.every, evaluation.samples, evaluation.label) == (5, 1, "held out")
    assert (deploy.dock.deadline, deploy.dock.imbalance) == (300, 3)
    assert {n: c.options["micro_batch"] for n, c in deploy.engines.items()} == {"actor.infer": 2, "actor.update": 4}
    assert [pool.nodes for pool in deploy.pools] == [("actor.generate",)]
    assert {*edges["actor.generate", "actor.infer"]} == {"balance"} and {
        *edges["actor.generate", "reference.infer"]
    } == {"stream"}
    dropped = lowered(
        base + "deploy b extends base { drop apart drop actor.generate -> actor.infer }\n", context(deploy="b")
    )
    assert dropped.deploy is not None and not dropped.deploy.pools
    assert "stream" not in {(e.src, e.dst): e.attributes for e in dropped.graph.edges}["actor.generate", "actor.infer"]


def test_a_deploy_of_an_imported_file_keeps_its_paths(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "base.rlg").write_text(SWEEP)
    program = tmp_path / "mine.rlg"
    program.write_text('import "shared/base.rlg"\ndeploy mine extends free on small { data test = "test.jsonl" }\n')
    plan = compile(str(program))
    assert plan.deploy.name == "mine" and plan.cluster.name == "small"
    assert {n: Path(d.path) for n, d in plan.deploy.data.items()} == {
        "source": tmp_path / "shared" / "train.jsonl",
        "test": tmp_path / "test.jsonl",
    }
    # It is there to be extended: alone it is not the program's.
    program.write_text('import "shared/base.rlg"\n')
    with pytest.raises(Fault, match="the program has no deploy"):
        compile(str(program))


def test_the_same_is_said_in_python() -> None:
    small = Cluster("small", device="h100", devices_per_node=8)
    base = Deploy("grpo", on=small, name="base")
    base.set(prompts=64)
    base.model("policy", "qwen2.5-7b")
    base.layout("actor.update", tp=4, dp=2)
    base.run(iterations=9, seed=3)
    other = Deploy(extends=base, on=Cluster("other", device="h100", devices_per_node=4), name="other")
    other.drop("layout actor.update", "set prompts")
    other.run(seed=4)
    last = Deploy(extends=other, name="last")
    last.layout("actor.update", tp=4)
    plan = compile(last)
    assert (plan.deploy.name, plan.cluster.devices, plan.deploy.run.iterations, plan.deploy.run.seed) == (
        "last",
        4,
        9,
        4,
    )
    assert plan.graph.params["prompts"] == 256 and plan.deploy.layouts["actor.update"].tp == 4
    assert same_tree(last.tree(), parse(to_rlg(last), "p.rlg"))
    assert "deploy last extends other {" in to_rlg(
        last
    ) and "  drop layout actor.update\n  drop set prompts\n" in to_rlg(last)
    assert compile(base).deploy.name == "base"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda d: Deploy(), "a deploy needs an algorithm or a base deploy"),
        (lambda d: Deploy("grpo", extends=d, name="x"), "a deploy needs an algorithm or a base deploy"),
        (lambda d: Deploy(extends=d), "a deploy that extends another needs its own name"),
        (lambda d: Deploy(extends="base", name="x"), "`extends` takes a Deploy, or an Imported one, not a str"),
        (lambda d: Deploy("grpo"), "`on` takes a Cluster"),
        (lambda d: Deploy(extends=d, name="x").drop("layot actor.update"), "expected .*, found|no statement|layot"),
        (lambda d: Deploy(extends=d, name="x").drop(), "`drop` needs a name"),
    ],
)
def test_what_is_no_variant_in_python_is_refused(made, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(Fault, match=message):
        made(Deploy("grpo", on=Imported("small", "sweep.rlg"), name="base"))
