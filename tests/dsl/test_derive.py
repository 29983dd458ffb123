"""`extends`, patches and `drop`: what is derived lowers as if it had been written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from language import context, diagnose, lowered

from msrl_graph import Algorithm, check
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.dsl import ast
from msrl_graph.dsl.derive import derive
from msrl_graph.dsl.expressions import Problems
from msrl_graph.dsl.parse import parse
from msrl_graph.ir.attributes import UpdateAttributes
from msrl_graph.ir.graph import Expr, Graph

# A whole algorithm, statement by statement: as it is, and as a base may have it that is changed.
PIECES = [
    ("param prompts = 8", "param prompts = 3"),
    ("param kl_coef = 0.001", "param kl_coef = 1"),
    ("columns { prompt : i32[<= 64] }", "columns { prompt : text }"),
    ("columns { answer : text }", "columns { answer : f32 }"),
    ("columns { response : i32[<= 128] }", "columns { response : f32[<= 4] }"),
    ("columns { old_logp : f32[response] }", "columns { old_logp : f32 }"),
    ("columns { ref_logp : f32[response] }", "columns { ref_logp : f32[prompt] }"),
    ("columns { reward : f32 }", "columns { reward : i32 }"),
    ("columns { advantage : f32[response] }", "columns { advantage : f32 }"),
    ("worker actor : policy", "worker actor : value"),
    ("worker reference : policy frozen", "worker reference : policy"),
    ("worker host : function", "worker host : reward_model"),
    ("source(prompts) -> prompt, answer", "source(5) -> answer"),
    ("node actor.generate(prompt) -> response { samples = 4 }", "node actor.generate(answer) -> reward"),
    ("node actor.infer(prompt, response) -> old_logp", "node actor.infer(prompt) -> ref_logp"),
    ("node second: reference.infer(prompt, response) -> ref_logp", "node second: actor.infer(response) -> reward"),
    (
        "node host.reward(response, answer) -> reward { call = exact_match() }",
        "node host.reward(prompt) -> reward { call = math_verify() }",
    ),
    (
        "node host.advantage(response, reward) -> advantage { call = group_norm(std = false), per = prompt }",
        "node host.advantage(reward) -> advantage { call = exact_match() }",
    ),
    (
        "node actor.update(prompt, response, old_logp, ref_logp, advantage) "
        "{ loss = clip(0.2) + kl_coef * kl(low_var), optimizer = adamw(lr = 1e-6) }",
        "node actor.update(prompt) { loss = clip(9), optimizer = adamw(lr = 1), epochs = 3 }",
    ),
    ("source -> actor.generate", "source -> actor.generate { stream = 2 }"),
    ("actor.generate -> actor.infer", "actor.generate -> actor.infer { stream = 2 }"),
    ("actor.generate -> second", "actor.generate -> second { balance = tokens }"),
    ("actor.generate -> host.reward", "actor.generate -> host.reward { stream = 1 }"),
    ("host.reward -> host.advantage", "host.reward -> host.advantage { stream = 4 }"),
    ("actor.infer -> actor.update", "actor.infer -> actor.update { stream = 4 }"),
    ("second -> actor.update", "second -> actor.update { stream = 4 }"),
    ("host.advantage -> actor.update", "host.advantage -> actor.update { stream = 4 }"),
    ("actor.update => actor.generate", "actor.update => actor.generate { every = 1, staleness = 2 }"),
]
# What a base may have too, and how all of it goes away.
MORE = [
    (["param extra = 3"], ["drop extra"]),
    (["columns { extra : f32 }"], ["drop extra"]),
    (
        ["worker extra : value", "node extra.infer(prompt, response) -> reward", "actor.generate -> extra.infer"],
        ["drop extra"],
    ),
    (
        ["node host.extra(answer) -> reward { call = exact_match() }", "source -> host.extra -> host.reward"],
        ["drop host.extra"],
    ),
    (["node extra: host.other(answer) -> reward", "source -> extra -> actor.generate, host.reward"], ["drop extra"]),
    (["source -> host.reward, actor.infer"], ["drop source -> host.reward, actor.infer"]),
    (["second => actor.generate"], ["drop second => actor.generate"]),
]


def written(name: str, statements: list[str], base: str = "") -> str:
    return f"algorithm {name} {f'extends {base} ' if base else ''}{{\n" + "\n".join(statements) + "\n}\n"


def plain(graph: Graph) -> dict[str, Any]:
    """What a graph says, without where it says it."""

    def bare(expr: Expr) -> Expr:
        return replace(expr, span=NOWHERE, args=tuple(map(bare, expr.args)))

    def attributes(of: Any) -> dict[str, Expr]:
        return {k: bare(v) for k, v in of.attributes.items()}

    return {
        "params": graph.params,
        "rows": graph.rows,
        "columns": {c.name: replace(c, span=NOWHERE) for c in graph.columns},
        "workers": {w.name: replace(w, span=NOWHERE) for w in graph.workers},
        "nodes": [replace(n, span=NOWHERE, attributes=attributes(n)) for n in graph.nodes],
        "edges": {(e.kind, e.src, e.dst): replace(e, span=NOWHERE, attributes=attributes(e)) for e in graph.edges},
    }


WHOLE = plain(lowered(written("whole", [right for right, _ in PIECES])).graph)


def derived(base: list[str], own: list[str]) -> Graph:
    found = context()
    load = replace(found, load=lambda target, is_file, span: parse(written("base", base), "base.rlg"))
    return lowered('import "base.rlg"\n' + written("own", own, "base"), load).graph


@given(
    st.lists(st.sampled_from(["base", "own", "replaced"]), min_size=len(PIECES), max_size=len(PIECES)),
    st.sets(st.sampled_from(range(len(MORE)))),
)
def test_what_is_derived_is_what_would_have_been_written(where: list[str], more: set[int]) -> None:
    base = list[str]()
    own = list[str]()
    for (right, other), place in zip(PIECES, where, strict=True):
        base += {"base": [right], "own": [], "replaced": [other]}[place]
        own += {"base": [], "own": [right], "replaced": [right]}[place]
        if place == "replaced" and "epochs = 3" in other:  # which it would keep
            own.append("drop actor.update.epochs")
    for number in sorted(more)[:1] if {0, 1, 2, 4} & more else sorted(more):  # several of them have one name
        base += MORE[number][0]
        own += MORE[number][1]
    assert plain(derived(base, own)) == WHOLE


def test_a_patch_changes_only_what_it_names() -> None:
    right = [r for r, _ in PIECES]
    graph = derived(
        right,
        [
            "node actor.update { loss = clip(0.3), epochs = 2 }",
            "node second: reference.infer { }",
            "node host.reward { call = math_verify() }",
        ],
    )
    update = graph.node("actor.update")
    reward = graph.node("host.reward")
    assert str(update.attributes["loss"]) == "clip(low = 0.3)" and UpdateAttributes.of(update).epochs == 2
    assert (
        str(update.attributes["optimizer"]) == "adamw(lr = 1e-06)" and reward.attributes["call"].value == "math_verify"
    )
    assert {n.name for n in graph.nodes} == {n.name for n in derived(right, []).nodes}


def test_a_node_that_reads_more_keeps_the_attributes_that_it_does_not_state() -> None:
    right = [r for r, _ in PIECES]
    base = derived(right, [])
    graph = derived(
        [*right, "columns { more : f32[response] }", "node host.more(response) -> more { call = exact_match() }"],
        [
            "node actor.update(prompt, response, old_logp, ref_logp, advantage, more) { loss = clip(0.3) }",
            "node host.advantage(response, reward) -> advantage",
            "node actor.generate(prompt) -> response",
        ],
    )
    update = graph.node("actor.update")
    before = base.node("actor.update")
    assert str(update.attributes["loss"]) == "clip(low = 0.3)" and update.reads[-1] == "more"
    assert str(update.attributes["optimizer"]) == str(before.attributes["optimizer"])
    advantage = graph.node("host.advantage")
    assert advantage.per == "prompt" and str(advantage.attributes["call"]) == "group_norm(std = false)"
    assert str(graph.node("actor.generate").attributes["samples"]) == "4"


@pytest.mark.parametrize(
    ("statement", "kept"),
    [
        ("node host.pick(reward) { select = best_of_n(2) }", {"select", "refill", "per"}),
        ("node host.pick(reward) { keep = reward > 0.5 }", {"keep"}),
        ("node host.pick(reward) -> more { call = length_reward() }", {"call"}),
        ("node host.pick(reward) { select = best_of_n(2) }\ndrop host.pick.refill", {"select", "per"}),
        ("drop host.pick.refill\ndrop host.pick.per", {"select"}),
        ("node host.pick(reward) { select = best_of_n(2), per = row }", {"select", "refill", "per"}),
    ],
)
def test_what_does_something_else_keeps_nothing_and_drop_takes_an_attribute_away(
    statement: str, kept: set[str]
) -> None:
    base = "algorithm base { node host.pick(reward) { select = best_of_n(1), per = prompt, refill = 3 } }\n"
    found = parse(base + "algorithm own extends base {\n" + statement + "\n}", "p.rlg")
    base_, own = (item for item in found.items if isinstance(item, ast.AlgorithmDecl))
    written_out = derive(own, {"base": base_, "own": own}, Problems())
    assert written_out is not None
    (node,) = written_out.body
    assert isinstance(node, ast.NodeDecl) and {a.key.text for a in node.attrs} == kept


def test_python_drops_an_attribute_as_a_file_does() -> None:
    built = Algorithm("own", extends="ppo")
    built.drop("critic.update.epochs")
    own = check(built).node("critic.update")
    inherited = check(Algorithm("same", extends="ppo")).node("critic.update")
    assert {*inherited.attributes} - {*own.attributes} == {"epochs"}


def test_an_attribute_that_is_not_there_cannot_be_dropped() -> None:
    right = written("base", [r for r, _ in PIECES])
    found = diagnose(right + written("own", ["drop actor.update.optimiser", "drop second.tokens"], "base"))
    told = "\n".join(map(str, found))
    assert "`actor.update` states no `optimiser`, so there is nothing to drop" in told, told
    assert "did you mean `optimizer`?" in told and "`second` states no `tokens`" in told, told


def test_a_line_of_algorithms_and_a_name_of_its_own() -> None:
    text = (
        written("a", [r for r, _ in PIECES])
        + written("b", ["param prompts = 4"], "a")
        + written("c", ["param more = prompts * 2"], "b")
    )
    graph = lowered(text).graph
    assert (graph.name, graph.params["prompts"], graph.params["more"]) == ("c", 4, 8)


def test_a_dropped_column_leaves_every_list() -> None:
    own = ["drop second", "drop reference", "drop ref_logp", "drop kl_coef", "node actor.update { loss = clip(0.2) }"]
    graph = derived([r for r, _ in PIECES], own)
    assert "ref_logp" not in graph.node("actor.update").reads and "second" not in {n.name for n in graph.nodes}
    assert {w.name for w in graph.workers} == {"actor", "host"} and "kl_coef" not in graph.params


def test_a_dropped_state_leaves_every_list() -> None:
    reads = "prompt, response, old_logp, advantage"
    update = f"node actor.update({reads}, seen) {{ loss = seen * clip(0.2), optimizer = adamw(lr = 1e-6) }}"
    node = "node host.seen(reward, seen) -> seen { call = moving_mean(0.9, mean = seen), per = batch }"
    middle = written("middle", ["state seen : f32 = 0.1", update, node, "host.reward -> host.seen"], "base")
    base = written("base", [r for r, _ in PIECES])
    graph = lowered(
        base
        + middle
        + written("own", ["drop host.seen", "drop seen", "node actor.update { loss = clip(0.2) }"], "middle")
    ).graph
    assert ", ".join(graph.node("actor.update").reads) == reads and not graph.states


def test_functions_of_a_base_lie_beside_its_file(tmp_path: Any) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "mine.py").write_text("def score(response: str, answer: str) -> float:\n    return 0.0\n")
    base = [r.replace("exact_match()", '"mine.py:score"') for r, _ in PIECES]
    (tmp_path / "far" / "base.rlg").write_text(written("base", base))
    (tmp_path / "own.rlg").write_text('import "far/base.rlg"\n' + written("own", [], "base"))
    from msrl_graph.compiler.pipeline import translate
    from msrl_graph.compiler.sources import read_source

    graph = translate(read_source(tmp_path / "own.rlg"), until="graph").graph
    assert graph is not None and str(graph.node("host.reward").attributes["call"].value).endswith("far/mine.py:score")


@pytest.mark.parametrize("name", ["rloo", "dr_grpo"])
def test_a_mistake_in_a_base_is_told_once(name: str) -> None:
    broken = [r.replace("exact_match", "exact_mach") for r, _ in PIECES]
    found = diagnose(written("base", broken) + written(name, ["param prompts = 4"], "base"))
    assert [d.code for d in found] == ["unknown-function"]


def test_an_algorithm_without_base_is_left_as_it_is() -> None:
    from msrl_graph.dsl.derive import derive
    from msrl_graph.dsl.expressions import Problems

    (item,) = parse(written("whole", [r for r, _ in PIECES]), "p.rlg").items
    assert isinstance(item, ast.AlgorithmDecl) and derive(item, {}, Problems()) is item
