"""Calls: what is read of a signature, which columns bind which parameters, and what a loss asks of the update."""

from dataclasses import replace
from pathlib import Path

import page
import pytest
from language import TESTS, diagnose, lowered

from msrl_graph import algorithms
from msrl_graph.checks.terms import term_worker
from msrl_graph.compiler.pipeline import translate
from msrl_graph.compiler.sources import ProgramSource
from msrl_graph.compiler.unsupported import find_unsupported, find_untested
from msrl_graph.ir.graph import Expr, Worker
from msrl_graph.ir.signatures import Option, read_signatures


@pytest.mark.parametrize("path", sorted(algorithms.FOLDER.glob("*.rlg")), ids=lambda p: p.stem)
def test_every_algorithm_of_the_package_compiles(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    codes = {d.code for d in diagnose(f"import {path.stem}\nalgorithm mine extends {path.stem} {{ }}")}
    assert codes == set()
    assert "arXiv:" in text.split("algorithm")[0]
    assert text.count("\n") < (25 if " extends " in text else 70)


def test_calls_bind_what_is_left() -> None:
    text = """
algorithm small {
  columns { prompt : i32[<= 8], response : i32[<= 8], first : f32, second : f32,
    reward : f32, advantage : f32[response] }
  state rate : f32 per prompt = 0.5
  worker actor : policy
  worker host : function
  source(8) -> prompt { weights = around(0.3) }
  node actor.generate(prompt) -> response { samples = 4 }
  node host.first(response, prompt) -> first { call = exact_match(answer = prompt) }
  node host.second(first) -> second { call = shuffle(), per = prompt }
  node host.mix(second, first) -> reward { call = weighted_sum(1, 0.5) }
  node host.track(reward, rate) -> rate { call = moving_mean(0.8), per = prompt }
  node host.pick(reward) { select = resample(weights = pow(3)), per = batch }
  node host.advantage(response, reward) -> advantage { call = leave_one_out(), per = prompt }
  node actor.update(prompt, response, advantage) { loss = clip(0.2), optimizer = adamw(lr = 1e-6) }
  source -> actor.generate -> host.first -> host.second -> host.mix -> host.advantage -> actor.update
  host.mix -> host.track, host.pick
  host.pick -> actor.update
  actor.update => actor.generate
}"""
    assert [d.code for d in diagnose(text)] == []
    nodes = {n.name: n.attributes for n in lowered(text).graph.nodes}
    assert str(nodes["source"]["weights"]) == "around(target = 0.3, state = rate)"
    assert str(nodes["host.second"]["call"]) == "shuffle(score = first)"
    mix = nodes["host.mix"]["call"]
    assert (
        str(mix) == "weighted_sum(weights = [1, 0.5])"
        and mix.columns() == {}
        and mix.options() == {"weights": [1, 0.5]}
    )
    assert str(nodes["host.track"]["call"]) == "moving_mean(decay = 0.8, mean = rate)"
    assert str(nodes["host.pick"]["select"]) == "resample(weights = pow(k = 3), score = reward)"


def test_what_the_runtime_fills_is_read_from_the_source() -> None:
    source = """
@loss_term
def pairs(good: "LogProbs", bad: LogProbs, logp, good_lengths, lengths, old_lengths,
          values=None, *, form: Literal["a"] = "a") -> Rows: ...

@loss_term
def scored(chosen: Scores, rejected: Scores | None = None) -> Rows: ...

@loss_term
def plain(entropy: Tokens, x: Tokens) -> Tokens: ...

def mix(response, extra=None, *scores, weights: Sequence[float], how: Literal["low"] | Maker, rng) -> float: ...

@option
def twice(*, k: int = 2) -> Maker: ...

@function(scope="batch", together=("logp", "values"))
def whole(logp, values): ...
"""
    found = read_signatures(source)
    pairs = found["pairs"]
    assert (pairs.kind, pairs.fills, pairs.columns) == (
        "loss",
        ("logp", "good_lengths", "lengths", "values"),
        ("good", "bad", "old_lengths"),
    )
    assert (pairs.logps, pairs.rows, found["plain"].rows, found["plain"].fills) == (
        {"good", "bad"},
        True,
        False,
        ("entropy",),
    )
    assert (found["scored"].scores, found["scored"].logps) == ({"chosen", "rejected"}, frozenset())
    mix = found["mix"]
    assert (mix.columns, mix.optional, mix.rest, mix.rng) == (("response", "extra"), frozenset(), "scores", True)
    assert mix.options == (Option("weights", True, several=True), Option("how", True, ("low",), calls=("twice",)))
    assert found["twice"].kind == "option" and found["twice"].options == (Option("k", kind="int"),)
    assert (found["whole"].scope, found["whole"].fills, found["whole"].columns) == ("batch", (), ("logp", "values"))
    assert found["whole"].together == ("logp", "values") and found["plain"].together == ()


def test_a_file_of_functions_is_one_name_more_and_its_helpers_are_not_in_the_language(tmp_path, monkeypatch) -> None:
    """Whatever the names of the helpers, and although a user's own file needs no decorator."""
    source = """
@loss_term(scope="mini_batch")
def term(logp: Tokens) -> Tokens: ...

@function()
async def reward(response: str) -> float: ...

def helper(logp: Tokens) -> Tokens: ...

@cache
def table() -> list[float]: ...
"""
    (tmp_path / "more.py").write_text(source)
    monkeypatch.setattr(algorithms, "FOLDER", tmp_path)
    monkeypatch.setattr(algorithms, "MODULES", ("more",))
    found = {key for key, (_, module) in algorithms.library.__wrapped__().items() if module == "more"}
    assert found == {("loss", "term"), ("function", "reward")}
    assert read_signatures(source).keys() == {"term", "reward", "helper", "table"}


@pytest.mark.parametrize(
    ("term", "kind", "message"),
    [
        ("clip", "policy", ""),
        ("dpo", "policy", ""),
        ("value_clip", "value", ""),
        ("value_clip", "reward_model", ""),
        ("bradley_terry", "reward_model", ""),
        *(
            (
                "bradley_terry",
                kind,
                f"`bradley_terry` needs scores of rows, which a {name} such as `actor` does not give",
            )
            for kind, name in (("policy", "policy"), ("value", "value worker"))
        ),
        (
            "value_clip",
            "policy",
            "`value_clip` needs predictions of values, which a policy such as `actor` does not give",
        ),
        (
            "clip",
            "value",
            "`clip` needs log-probabilities of tokens, which a value worker such as `actor` does not give",
        ),
        ("entropy", "value", "`entropy` needs entropies, which a value worker such as `actor` does not give"),
        ("dpo", "value", "`dpo` needs log-probabilities of tokens, which a value worker such as `actor` does not give"),
        (
            "distil",
            "reward_model",
            "`distil` needs log-probabilities of tokens, which a reward model such as `actor` does not give",
        ),
    ],
)
def test_a_term_needs_what_its_worker_gives(term: str, kind: str, message: str) -> None:
    graph = page.graph()
    loss = {"loss": Expr("+", args=(Expr("call", term), Expr("call", "truncated")))}
    nodes = tuple(replace(n, attributes=loss) if n.verb == "update" else n for n in graph.nodes)
    workers = tuple(Worker(w.name, kind) if w.name == "actor" else w for w in graph.workers)
    found = term_worker(replace(graph, nodes=nodes, workers=workers), algorithms.library())
    assert [d.message for d in found] == ([message] if message else [])
    if kind != "policy" and message:
        scoring = "`bradley_terry`, " if kind == "reward_model" else ""
        assert found[0].help == f"terms for it: {scoring}`value_clip`"


@pytest.mark.parametrize(
    ("body", "device", "note"),
    [
        ("", "cpu", []),
        ("", "h100", ["nothing has run on more than one device of kind cuda yet"]),
        (
            "node actor.generate { partial = 0.5 }\n source -> actor.generate { stream = 2 }",
            "cpu",
            ["this version can plan but not run: `stream` of `source -> actor.generate` together with `partial`"],
        ),
    ],
)
def test_a_plan_notes_what_a_run_would_refuse_or_warn_of(body: str, device: str, note: list[str]) -> None:
    head = (
        f'import grpo\nalgorithm mine extends grpo {{\n {body}\n}}\ncluster one {{ device = "{device}", '
        "devices_per_node = 2 }\n"
    )
    deploy = 'deploy mine on one { model policy = "./model"\n data source = "train.jsonl"\n SETS }'
    deploy = deploy.replace(
        "SETS", "\n".join(f"set {p}" for p in ("prompts = 8", "group = 2", "prompt_len = 6", "response_len = 5"))
    )
    source = ProgramSource("program.rlg", head + deploy, TESTS.parent / "examples" / "arithmetic")
    plan = translate(source).plan
    assert plan is not None
    assert [n.text for n in plan.notes if n.about == "run"] == note
    told = [d.message.split(" can be planned")[0] for d in (*find_unsupported(plan), *find_untested(plan))]
    assert [what in "".join(note) for what in told] == [True] * len(note)
    assert [d.severity for d in find_untested(plan)] == ["warning"] * (device == "h100")
