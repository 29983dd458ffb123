"""A program in Python is stated again and again, as in a notebook: the last statement of a name counts, at the place of
the first, and a statement that fails changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph import Algorithm, Cluster, Deploy, Fault, check, compile, to_rlg
from msrl_graph.emit.text import graph_text

POD = Cluster("pod", device="ascend-910c", nodes=2, devices_per_node=8)
Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # a method and its arguments
VALUES = st.integers(1, 9)


def call(method: str, *arguments: Any, **attributes: Any) -> Call:
    return method, arguments, attributes


def algorithm_calls(value: int, name: str) -> dict[str, Call]:
    """Good statements by what they state."""
    return {
        f"param {name}": call("param", **{name: value}),
        f"column c{name}": call("columns", **{f"c{name}": f"f32[<= {value}]"}),
        f"state s{name}": call("state", f"s{name}", "f32", value),
        f"worker w{name}": call("worker", f"w{name}", "function"),
        "source": call("source", value, "prompt"),
        f"node {name}": call("node", f"{name}: host.reward", "response", "reward", call=f"length({value})"),
        f"edge {name}": call("edge", "source", f"host.{name}", stream=value),
        f"reshard {name}": call("reshard", f"{name}.update", f"{name}.generate", staleness=value),
        f"drop {name}": call("drop", f"other_{name}"),
    }


def deploy_calls(value: int, name: str) -> dict[str, Call]:
    return {
        f"set {name}": call("set", **{name: value}),
        f"model {name}": call("model", name, f"folder-{value}"),
        f"data {name}": call("data", name, f"{value}.jsonl", prompt="question"),
        f"layout {name}": call("layout", f"{name}.update", tp=value),
        f"engine {name}": call("engine", f"{name}.update", "fsdp", micro_batch=value),
        f"place {name}": call("place", name, nodes=value),
        f"apart {name}": call("apart", f"{name}, other"),
        "dock": call("dock", deadline=value),
        "reshard": call("reshard", bucket=f"{value} MiB"),
        "run": call("run", iterations=value),
        f"evaluate {name}": call("evaluate", name, every=value),
        f"edge {name}": call("edge", f"source -> {name}.generate", stream=value),
    }


BAD_OF_ALGORITHM = [
    call("param", good=1, bad="1 +"),
    call("columns", good="f32", bad="f32["),
    call("state", "s", "f32", object()),
    call("worker", "node", "function"),
    call("worker", "w", "function", frozen=2),
    call("source", 8, ","),
    call("node", "a b", "prompt"),
    call("node", "host.reward", "response", "reward", call=len),
    call("edge", "source"),
    call("edge", "source -> "),
    call("reshard", "actor.update -> actor.generate"),
    call("drop", "a b"),
]
BAD_OF_DEPLOY = [
    call("set", good=1, bad="1 +"),
    call("model", "policy", 3),
    call("data", "source", "a.jsonl", prompt=object()),
    call("layout", "", tp=1),
    call("engine", "actor.update", "a b"),
    call("place", "actor", nodes=(1, 2, 3)),
    call("place", "actor", devices=1),
    call("apart"),
    call("dock", deadline="5 mi n"),
    call("evaluate", "a b"),
    call("drop", "layout never.stated"),
    call("drop", "nonsense"),
]


def count(response: str) -> float:
    return len(response)


def make(kind: str) -> Any:
    return Algorithm("mine", extends="grpo") if kind == "algorithm" else Deploy("grpo", on=POD)


def state(program: Any, one: Call) -> Any:
    method, arguments, attributes = one
    return getattr(program, method)(*arguments, **attributes)


def text(program: Any) -> str:
    return to_rlg(program)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [("algorithm", algorithm_calls, BAD_OF_ALGORITHM), ("deploy", deploy_calls, BAD_OF_DEPLOY)],
)
@examples(60)
@given(data=st.data())
def test_any_sequence_is_the_good_statements_with_the_last_of_each_name(
    kind: str, good: Callable[[int, str], dict[str, Call]], bad: list[Call], data: st.DataObject
) -> None:
    program = make(kind)
    last: dict[str, Call] = {}
    for _ in range(data.draw(st.integers(0, 15))):
        if data.draw(st.booleans()):
            named = data.draw(st.sampled_from(sorted(good(1, "p")) + sorted(good(1, "q"))))
            made = good(data.draw(VALUES), "p") | good(data.draw(VALUES), "q")
            last[named] = made[named]
            state(program, made[named])
        else:
            before = text(program)
            with pytest.raises(Fault):
                state(program, data.draw(st.sampled_from(bad)))
            assert text(program) == before
    once = make(kind)
    for one in last.values():
        state(once, one)
    assert text(program) == text(once)


# Statements that overlap: of several names, whole and changed, dropped and stated again.
OVERLAPPING = {
    "algorithm": [
        call("param", group=4),
        call("param", group=6, prompts=32),
        call("columns", reward="f32", extra="f32"),
        call("columns", extra="f32[response]"),
        call("node", "actor.update", epochs=2),
        call("node", "actor.update", mini_batch=4, epochs=3),
        call("node", "host.reward", "response, answer", "reward", call="exact_match()"),
        call("node", "host.reward", call="length(4)"),
        call("edge", "actor.generate -> host.reward, reference.infer"),
        call("edge", "actor.generate -> host.reward", stream=8),
        call("drop", "reference"),
        call("drop", "actor.update.epochs"),
        call("drop", "host.reward"),
        call("drop", "actor.generate -> host.reward"),
        call("drop", "group"),
        call("worker", "reference", "policy", frozen=True),
        call("node", "reference.infer", "prompt, response", "ref_logp"),
    ],
    "deploy": [
        call("layout", "actor.update, actor.infer", tp=2),
        call("layout", "actor.infer", tp=4),
        call("engine", "actor.update, actor.infer", "fsdp"),
        call("engine", "actor.update", "hf"),
        call("place", "actor, reference", together=True),
        call("place", "actor", nodes=0),
        call("apart", "actor", "reference"),
        call("edge", "actor.generate -> actor.infer, host.reward", stream=4),
        call("edge", "actor.generate -> host.reward", stream=8),
        call("run", iterations=3),
        call("run", seed=1),
    ],
}


@pytest.mark.parametrize("kind", OVERLAPPING)
@examples(150)
@given(data=st.data())
def test_a_cell_that_runs_twice_makes_the_same_program(kind: str, data: st.DataObject) -> None:
    cells = st.lists(st.sampled_from(OVERLAPPING[kind]), max_size=8)
    earlier = data.draw(cells)
    cell = data.draw(cells)
    program = make(kind)
    for one in [*earlier, *cell]:
        state(program, one)
    once = text(program)
    for one in cell:
        state(program, one)
    assert text(program) == once


@examples(100)
@given(data=st.data())
def test_what_is_stated_last_is_there_whatever_was_dropped_before(data: st.DataObject) -> None:
    program = make("algorithm")
    for one in data.draw(st.lists(st.sampled_from(OVERLAPPING["algorithm"]), max_size=6)):
        state(program, one)
    for one in (call("param", group=5), call("columns", extra="i32")):
        (name,) = one[2]
        state(program, one)
        lines = [" ".join(line.split()) for line in text(program).splitlines()]
        (place,) = (i for i, line in enumerate(lines) if f"{name} = 5" in line or f"{name} : i32" in line)
        assert f"drop {name}" not in lines[place:], lines


def test_what_was_stated_by_mistake_can_be_taken_back() -> None:
    a = Algorithm("mine", extends="grpo")
    plain = graph_text(check(a))
    a.node("host.rewrd", "response, answer", "reward", call="exact_match()")
    a.edge("actor.generate", "host.rewrd")
    with pytest.raises(Fault):
        check(a)
    a.drop("host.rewrd")
    assert graph_text(check(a)) == plain
    d = Deploy("grpo", on=POD).model("policy", "qwen2.5-7b").data("source", "rows.jsonl", prompt="question")
    kept = text(d)
    d.layout("actor.updat, actor.infer", tp=2).place("actr", nodes=0)
    with pytest.raises(Fault, match=r"`actor\.updat`"):
        compile(d)
    d.drop("layout actor.updat", "layout actor.infer", "place")
    assert text(d) == kept
    with pytest.raises(Fault, match=r"states no `layout actor\.updat`, so there is nothing to drop") as caught:
        d.drop("model policy", "layout actor.updat")
    assert text(d) == kept
    assert caught.value.diagnostics[0].span.file == __file__


def test_a_drop_is_taken_back_by_the_statement() -> None:
    a = Algorithm("mine", extends="grpo")
    a.param(extra=1)
    a.drop("extra")
    a.param(extra=2)
    assert check(a).params["extra"] == 2
    a.drop("extra")
    assert "extra" not in check(a).params
    # An attribute of a node: the node's other attributes stay.
    a.node("actor.update", epochs=2, mini_batch=8)
    a.drop("actor.update.epochs")
    assert "epochs" not in check(a).node("actor.update").attributes
    a.node("actor.update", epochs=3)
    assert check(a).node("actor.update").attributes["epochs"].value == 3
    a.drop("actor.update.epochs")
    attributes = check(a).node("actor.update").attributes
    assert "epochs" not in attributes and attributes["mini_batch"].value == 8


@examples(150)
@given(data=st.data())
def test_attributes_are_those_that_were_stated_and_not_dropped_since(data: st.DataObject) -> None:
    a = Algorithm("mine", extends="grpo")
    taken = check(a).node("actor.update").attributes
    expected = {name: taken[name].value for name in ("epochs", "mini_batch") if name in taken}
    for _ in range(data.draw(st.integers(1, 7))):
        if expected and data.draw(st.booleans()):
            name = data.draw(st.sampled_from(sorted(expected)))
            a.drop(f"actor.update.{name}")
            del expected[name]
        else:
            stated = data.draw(
                st.dictionaries(st.sampled_from(["epochs", "mini_batch"]), st.sampled_from([8, 16, 32]), min_size=1)
            )
            a.node("actor.update", **stated)
            expected |= stated
    found = check(a).node("actor.update").attributes
    assert {n: found[n].value for n in ("epochs", "mini_batch") if n in found} == expected
    assert {"loss", "optimizer"} <= found.keys()


def test_an_attribute_that_was_dropped_stays_so_when_others_are_stated() -> None:
    a = Algorithm("mine", extends="grpo")
    a.node("actor.update", epoch=2)  # a slip
    a.drop("actor.update.epoch")
    a.node("actor.update", epochs=2)
    assert check(a).node("actor.update").attributes["epochs"].value == 2


def test_changes_of_a_node_add_up_and_a_whole_node_replaces_them() -> None:
    a = Algorithm("mine", extends="grpo")
    a.node("actor.update", epochs=2)
    a.node("actor.update", mini_batch=8)
    a.node("actor.update", epochs=3)
    assert "node actor.update { epochs = 3, mini_batch = 8 }" in text(a)
    a.node("host.reward", "response, answer", "reward", call="exact_match()", weight=1)
    a.node("host.reward", weight=2)
    a.node("host.reward", "response, answer", "reward", call="exact_match()", weight=3)
    assert "weight = 2" not in text(a) and "weight = 3" in text(a)


def test_a_name_of_another_kind_is_refused_where_it_is_stated() -> None:
    a = Algorithm("mine", extends="grpo")
    a.param(judge=1)
    before = text(a)
    with pytest.raises(Fault) as caught:
        a.worker("judge", "reward_model")
    assert text(a) == before
    shown = str(caught.value)
    assert shown.startswith("error[duplicate-name]: `judge` is already a param\n")
    assert '= help: give the worker another name, or drop the param first: `drop("judge")`' in shown
    assert "a.param(judge=1)" in shown and 'a.worker("judge", "reward_model")' in shown
    a.drop("judge")
    a.worker("judge", "reward_model")
    assert {w.name for w in check(a).workers} > {"judge"}
    assert "judge" not in check(a).params


def test_statements_return_the_object_and_nodes_their_names() -> None:
    a = Algorithm("two", extends=Algorithm("one", extends="grpo").param(group=4))
    assert a.param(steps=2).columns(extra="f32").state("kl", "f32", 0.1).drop("kl") is a
    assert a.edge("source -> host.b").drop_edge("source", "host.b") is a
    assert a.reshard("actor.update => judge.infer").drop_reshard("actor.update", "judge.infer") is a
    assert a.worker("judge", "reward_model") == "judge"
    assert a.node("judge.infer", "prompt, response", "extra") == "judge.infer"
    assert a.node("long: host.reward", "response", "reward", call="length(4)") == "long"
    assert a.source(8, "prompt") == "source"
    d = Deploy(a, on=POD)
    assert d.set(group=2).model("policy", "x").data("source", "x.jsonl").layout("actor.update", tp=1) is d
    assert d.engine("actor.update", "fsdp").place("actor", nodes=0).apart("actor").dock(deadline=1) is d
    assert d.reshard(bucket=1).run(seed=1).evaluate("x").edge("source -> actor.generate").drop("run") is d
    assert repr([a, d, POD]) == "[<Algorithm two: 12 statements>, <Deploy two: 11 statements>, <Cluster pod>]"


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
def test_a_whole_program_stated_twice_is_planned_alike() -> None:
    a = Algorithm("mine", extends="grpo")
    d = Deploy(a, on=POD)
    seen = []
    for _ in range(2):
        a.param(steps=2)
        a.drop("reference")
        a.drop("ref_logp")
        a.drop("kl_coef")
        a.node("host.length", "response", "extra", call=count)
        a.columns(extra="f32")
        a.edge("actor.generate -> host.length")
        a.node("actor.update", loss="clip(0.2, 0.28)", mini_batch="prompts * group // steps")
        d.set(prompts=128)
        d.model("policy", "qwen2.5-7b").data("source", "rows.jsonl", prompt="question")
        d.layout("actor.update", tp=4).run(iterations=3)
        seen.append((text(d), compile(d).explain()))
    assert seen[0] == seen[1]


def test_a_misspelt_attribute_of_a_change_is_taken_back_as_the_help_says() -> None:
    a = Algorithm("mine", extends="grpo")
    a.node("actor.update", epoch=2)
    with pytest.raises(Fault) as raised:
        check(a)
    (told,) = raised.value.diagnostics
    lines = [
        "did you mean `epochs`?",
        'in a notebook, undo it, too, since changes add up: `drop("actor.update.epoch")`',
    ]
    assert told.help.splitlines() == lines and lines[1] in str(raised.value)
    a.drop("actor.update.epoch").node("actor.update", epochs=2)
    check(a)
    a.drop("actor.update.epoch").node("actor.update", epochs=2)  # the corrected cell again
    check(a)


def test_an_attribute_of_a_whole_node_is_corrected_by_stating_it_again() -> None:
    a = Algorithm("mine", extends="grpo")
    a.node("host.reward", "response, answer", "reward", call="exact_match()", pre="prompt")
    with pytest.raises(Fault) as raised:
        check(a)
    assert "drop" not in str(raised.value)
    a.node("host.reward", "response, answer", "reward", call="exact_match()")
    check(a)
