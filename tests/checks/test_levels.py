"""Levels of rows, and the programs that have more than prompts and responses: each compiles to a plan, as the golden
texts say."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from language import TESTS, lowered

from msrl_graph import compile
from msrl_graph.analysis.sequences import bound, sequences
from msrl_graph.backends import ENGINES
from msrl_graph.cost import holdings
from msrl_graph.cost.time import Costs
from msrl_graph.dsl.parse import parse
from msrl_graph.emit.text import plan_text
from msrl_graph.ir.plan import Plan
from msrl_graph.model import models, presets
from msrl_graph.simulation import simulate

pytestmark = pytest.mark.filterwarnings("ignore::msrl_graph.diagnostics.ProgramWarning")  # there are no data
PROGRAMS = TESTS / "programs"
NAMES = (
    "agent",
    "async",
    "curriculum",
    "dapo",
    "distil",
    "dpo",
    "judge",
    "pf_ppo",
    "ppo",
    "rft",
    "sweep",
    "two_deploys",
    "variants",
)
POD = 'cluster pod_of_two { device = "ascend-910c", nodes = 2, devices_per_node = 8, network = 300 MB/s }\n'


def algorithms(name: str) -> list[tuple[str, str | None]]:
    """The algorithms of a program, or its deploys: what its golden texts are called, and the deploy's name."""
    tree = parse((PROGRAMS / f"{name}.rlg").read_text(encoding="utf-8"), name)
    deploys = [(d.alias or d.algorithm).text for d in tree.items if type(d).__name__ == "DeployDecl"]
    if deploys:
        return [(f"{name}.{d}" if len(deploys) > 1 else name, d) for d in deploys]
    own = [a.name.text for a in tree.items if type(a).__name__ == "AlgorithmDecl"]
    return [(f"{name}.{a}" if len(own) > 1 else name, None) for a in own]


@cache
def planned(name: str, deploy: str | None = None) -> Plan:
    """The plan of a program; one without a deploy goes on two hosts, all its models of one size."""
    stem, _, algorithm = name.partition(".")
    text = (PROGRAMS / f"{stem}.rlg").read_text(encoding="utf-8")
    if deploy is None:
        own = [a.name.text for a in parse(text, stem).items if type(a).__name__ == "AlgorithmDecl"]
        algorithm = algorithm or own[-1]
        kinds = ("policy", "value", "reward_model", "teacher", "judge")
        used = {
            w.model for w in lowered(f"{text}algorithm only extends {algorithm} {{ param only = 1 }}").graph.workers
        }
        models = "".join(f'  model {m} = "qwen2.5-7b"\n' for m in kinds if m in used)
        text += f"{POD}deploy {algorithm} on pod_of_two {{\n{models}}}\n"
    return compile(str(PROGRAMS / f"{stem}.rlg"), text=text, deploy=deploy)


@pytest.mark.parametrize(("name", "deploy"), [a for n in NAMES for a in algorithms(n)])
def test_the_programs_compile_to_plans(name: str, deploy: str | None, golden: Callable[[str, str], None]) -> None:
    golden(f"programs/{name}.txt", plan_text(planned(name, deploy)).replace(f"{PROGRAMS}/", ""))


@pytest.fixture
def judge() -> Plan:
    return planned("judge")


def test_a_generation_from_responses_makes_rows_under_them(judge: Plan) -> None:
    graph = judge.graph
    assert graph.rows == (256, 256 * 16, 256 * 16 * 4)
    assert graph.under == (-1, 0, 1)
    levels = {c.name: c.level for c in graph.columns}
    assert {c: levels[c] for c in ("prompt", "response", "question", "verdict", "judge_score", "reward")} == {
        "prompt": 0,
        "response": 1,
        "question": 1,
        "verdict": 2,
        "judge_score": 1,
        "reward": 1,
    }
    by_edge = {(t.src, t.dst): (t.rows, t.bytes) for t in judge.traffic}
    assert by_edge["judge.generate", "host.vote"] == (16384, 16384 * 1024 * 4)
    assert by_edge["host.vote", "host.mix"] == (4096, 4096 * 4)


def test_a_text_is_as_long_as_what_its_writer_read_unless_it_says(judge: Plan) -> None:
    assert bound(judge.graph, "question") == 2048 + 8192
    assert holdings.row_tokens(judge, "judge.generate") == 2048 + 8192 + 1024
    text = (
        (PROGRAMS / "judge.rlg").read_text(encoding="utf-8").replace("question   : text", "question   : text[<= 512]")
    )
    stated = lowered(text).graph
    assert bound(stated, "question") == 512


def test_levels_side_by_side() -> None:
    text = """
    import grpo
    algorithm two extends grpo {
      columns {
        other  : i32[<= 64]
        right  : f32
        chance : f32 per prompt
      }
      worker rival : policy frozen
      node rival.generate(prompt) -> other { samples = 2 }
      node host.right(other, answer) -> right { call = exact_match(response = other) }
      node host.chance(right) -> chance { call = "../diagnostics/functions.py:mean", per = prompt }
      node host.reward(response, answer, chance) -> reward { call = exact_match(prompt = chance) }
      source -> rival.generate -> host.right -> host.chance -> host.reward
    }
    """
    graph = lowered(text).graph
    ours = graph.column("response").level
    theirs = graph.column("other").level
    assert {ours, theirs} == {1, 2}
    assert graph.under == (-1, 0, 0)
    assert graph.common(ours, theirs) == 0
    assert graph.fan(ours) == 16
    assert graph.fan(theirs) == 2
    assert graph.column("chance").level == 0


@pytest.fixture
def ppo() -> Plan:
    return planned("ppo")


def _logits(plan: Plan, node: str) -> int:
    """Bytes of logits at the moment that has most of them."""
    peaks = ENGINES[plan.placement(node).engine.name].memory.peaks
    assert peaks is not None
    return max(items.get("logits", 0) for items in peaks("update", holdings.work(plan, ENGINES, node)).values())


def test_a_value_has_a_head_of_one_number(ppo: Plan) -> None:
    actor = ppo.model("actor.update")
    critic = ppo.model("critic.update")
    assert actor.parameters - critic.parameters == (152064 - 1) * 3584
    assert critic.outputs == 1
    assert [t.name for t in critic.tensors][-2:] == ["model.norm.weight", "score.weight"]
    scored = Costs(ppo, ENGINES, "critic.infer").rows(1)
    assert scored == Costs(ppo, ENGINES, "actor.infer").rows(1)
    # Its logits are nothing beside a vocabulary's.
    critics, actors = (_logits(ppo, node) for node in ("critic.update", "actor.update"))
    assert critics * 1000 < actors


def test_a_head_of_one_number_replaces_a_tied_one(tmp_path: Path) -> None:
    config = {**presets.PRESETS["tiny"], "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = models.load("./", tmp_path)
    assert model.tied
    assert not any(t.tied for t in model.scoring.tensors)
    assert model.scoring.parameters == model.parameters + model.hidden


def test_what_a_state_computes_on() -> None:
    def of(name: str, node: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        graph = lowered((PROGRAMS / f"{name}.rlg").read_text(encoding="utf-8")).graph
        found = sequences(graph, graph.node(node))
        return found.context, found.scored

    assert of("dpo", "reference.infer") == (("prompt",), ("chosen", "rejected"))
    assert of("dpo", "actor.update") == (("prompt",), ("chosen", "rejected"))
    assert of("ppo", "reward.infer") == (("prompt", "response"), ())
    assert of("ppo", "critic.update") == (("prompt",), ("response",))
    assert of("rft", "actor.update") == (("prompt",), ("response",))
    assert of("distil", "teacher.infer") == (("prompt",), ("response",))
    assert of("judge", "judge.generate") == (("question",), ("verdict",))
    assert of("agent", "actor.generate") == (("prompt",), ("response",))


def test_pairs_are_two_sequences_that_begin_alike() -> None:
    plan = planned("dpo")
    assert holdings.row_tokens(plan, "actor.update") == 2 * 1024 + 2 * 2048
    assert holdings.fan(plan, "actor.update") == 2
    rows = Costs(plan, ENGINES, "actor.update").rows(3)
    assert (rows.count, rows.tokens, rows.longest) == (6, 3 * (2 * 1024 + 2 * 2048), 1024 + 2048)


@pytest.mark.parametrize("name", ["judge", "ppo", "dpo", "distil"])
def test_iterations_can_be_simulated(name: str) -> None:
    plan = planned(name)
    at_bound = simulate(plan, iterations=2)
    first = at_bound.iterations[0]
    assert first.seconds > 0
    columns = [c for c in ("response", "verdict", "chosen") if any(x.name == c for x in plan.graph.columns)]
    shorter = simulate(plan, iterations=2, lengths=[f"{c}=uniform(8, 64)" for c in columns])
    assert 0 < shorter.iterations[0].seconds < first.seconds
