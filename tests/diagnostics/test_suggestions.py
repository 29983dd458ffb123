"""Helps that name what was likely meant: each is applied, and then the program is accepted and means what it should."""

from __future__ import annotations

from pathlib import Path

import pytest
from language import context, diagnose, lowered
from suggestions import EVALUATION, PROGRAM, change, only


def writer(program: str, column: str) -> str:
    return lowered(program).graph.writer(column).name


WRITERS = {
    "the trained worker's": ("actor.infer(prompt, response) -> old_logp", "ref_logp", "actor.infer"),
    "the reference's": ("reference.infer(prompt, response) -> ref_logp", "old_logp", "reference.infer"),
}


@pytest.mark.parametrize("case", WRITERS)
@pytest.mark.parametrize("name", ["reference", "teacher"])
@pytest.mark.parametrize("turned", [False, True])
def test_of_two_writers_the_one_that_the_names_tell_is_meant_to_write_the_other_column(
    case: str, name: str, turned: bool
) -> None:
    """Whichever is first, and also where the frozen worker is called something else."""
    right, other, node = WRITERS[case]
    lines = [f"  node {right}\n" for right, *_ in WRITERS.values()]
    head, column = right.rsplit(" ", 1)
    program = change(PROGRAM, ("".join(lines), "".join(reversed(lines)))) if turned else PROGRAM
    program = change(program, ("reference", name))
    head = head.replace("reference", name)
    node = node.replace("reference", name)
    told = only(change(program, (f"{head} {column}", f"{head} {other}")))
    assert told.help == f"let `{node}` write `{column}`, which is read but never written"
    assert (writer(program, "old_logp"), writer(program, "ref_logp")) == ("actor.infer", f"{name}.infer")


def test_two_writers_that_nothing_tells_apart_are_both_named() -> None:
    names = (("old_logp", "first"), ("ref_logp", "second"), ("clip(0.2)", "clip(0.2, old_logp = first)"))
    program = change(PROGRAM, *names, ("kl(low_var)", "kl(low_var, ref_logp = second)"), (" frozen", ""))
    assert not [d for d in diagnose(program) if d.severity == "error"]
    told = only(change(program, ("-> second", "-> first")))
    assert told.help == "let `actor.infer` or `reference.infer` write `second`, which is read but never written"


@pytest.mark.parametrize("deploy", ["", EVALUATION])
@pytest.mark.parametrize("call", ["exact_match()", '"rewards.py:own"'])
def test_a_node_without_its_arrow_is_named_where_its_column_is_missed(deploy: str, call: str, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def own(response, answer):\n    return 1.0\n")
    program = change(PROGRAM, ("exact_match()", call)) + deploy
    told = only(change(program, (" -> reward {", " {")), tmp_path)
    assert told.help == "add `-> reward` to `host.reward`, which has a `call` and writes nothing"
    assert [(note, span.line) for span, note in told.related] == [("`host.reward` writes nothing", 18)]
    assert not [d for d in diagnose(program, context(tmp_path)) if d.severity == "error"]


def test_a_node_that_only_looks_on_is_not_meant_to_write_what_is_missed(tmp_path: Path) -> None:
    (tmp_path / "log.py").write_text("def lengths(response):\n    print(len(response))\n")
    log = '  node host.log(response) { call = "log.py:lengths" }\n  actor.generate -> host.log\n'
    program = change(PROGRAM, ("  source -> actor", f"{log}  source -> actor"))
    assert not [d for d in diagnose(program, context(tmp_path)) if d.severity == "error"]
    lines = "".join(line for line in program.splitlines(True) if "reference.infer(" not in line)
    told = only(change(lines, ("reference.infer, ", "")), tmp_path)
    assert told.help == "add a node that writes it"


def test_a_node_whose_column_is_misspelt_is_not_said_to_write_nothing() -> None:
    found = diagnose(change(PROGRAM, ("-> reward {", "-> rewrd {")) + EVALUATION)
    assert [d.help for d in found] == ["did you mean `reward`?", "known here: " + KNOWN]


KNOWN = ", ".join(f"`{c}`" for c in ("advantage", "answer", "old_logp", "prompt", "ref_logp", "response"))


@pytest.mark.parametrize(("kind", "other"), [("f32[response]", ""), ("i32", ""), ("i32", "score")])
def test_a_column_that_cannot_be_reported_is_not_the_one_that_the_help_reports(kind: str, other: str) -> None:
    program = change(PROGRAM, ("reward    : f32", f"reward    : {kind}")) + EVALUATION
    what = "an f32 scalar that a function or a reward model writes"
    help = f"report {what}: `NAME : f32`"
    if other:
        help = f"report a column such as `score`, {what}"
        second = "  node second: host.reward(response, answer) -> score { call = exact_match() }\n"
        program = change(program, ("  source -> actor", f"{second}  source -> actor"))
        program = change(program, ("  columns {", "  columns {\n    score : f32"))
        program = change(program, ("reference.infer, host.reward\n", "reference.infer, host.reward, second\n"))
    (told,) = (d for d in diagnose(program) if "reported" in d.message)
    assert told.help == help
    if other:
        applied = change(program, ("report = reward", "report = score"))
        assert not [d for d in diagnose(applied) if "report" in d.message]


DROPPED = {
    "host.advantage.per": "add `per = prompt`",
    "actor.update.loss": "add `loss = clip(0.2)`",
    "actor.update.optimizer": "add `optimizer = adamw(lr = 1e-6)`",
    "host.reward.call": 'add `{ call = NAME() }` or `{ call = "file.py:function" }`',
}
STATED = {"per": "prompt", "loss": "clip(0.2)", "optimizer": "adamw(lr = 1e-6)", "call": "exact_match()"}


@pytest.mark.parametrize("name", DROPPED)
def test_an_attribute_that_is_missed_was_dropped(name: str) -> None:
    head = "import grpo\nalgorithm mine extends grpo {\n"
    told = only(f"{head}  drop {name}\n}}\n")
    assert told.help == f"leave `drop {name}` out, or {DROPPED[name]}"
    assert [(note, span.line) for span, note in told.related] == [(f"`{name}` is dropped here", 3)]
    node, _, key = name.rpartition(".")
    applied = diagnose(f"{head}  drop {name}\n  node {node} {{ {key} = {STATED[key]} }}\n}}\n")
    assert not [d for d in applied if d.severity == "error"]


def test_an_attribute_that_is_stated_again_is_not_missed_by_its_drop() -> None:
    again = "algorithm mine extends grpo { drop host.advantage.per node host.advantage { per = row } }"
    assert "dropped" not in str(only(f"import grpo\n{again}"))
    second = "algorithm mine extends grpo { drop host.advantage.per }\nalgorithm next extends mine "
    whole = "{ node host.advantage(response, reward) -> advantage { per = row, call = group_norm() } }"
    assert "dropped" not in str(only(f"import grpo\n{second}{whole}"))
