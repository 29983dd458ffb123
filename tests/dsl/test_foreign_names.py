"""Words of other systems, and of other statements: each help is applied, and then the program is accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from language import context, diagnose
from suggestions import EVALUATION, PROGRAM, change, only

from msrl_graph.dsl import foreign_names
from msrl_graph.ir.statements import STATEMENTS

EXTENDED = "import grpo\nalgorithm mine extends grpo {\n  BODY\n}\n"


def errors(program: str, folder: Path = Path()) -> list[str]:
    return [d.message for d in diagnose(program, context(folder)) if d.severity == "error"]


# Attributes


def test_an_attribute_of_another_statement_is_said_to_be_its() -> None:
    told = only(EXTENDED.replace("BODY", "node actor.update { temperature = 1.0 }"))
    assert told.help == "`generate` or `evaluate` has it"
    told = only(EXTENDED.replace("BODY", "node actor.infer { samples = 2 }"))
    assert told.help == "it has none; `generate` or `evaluate` has it"
    told = only(EXTENDED.replace("BODY", "node actor.update { micro_batch = 2 }"))
    assert told.help == "`engine` has it; or did you mean `mini_batch`?"


def test_epochs_of_a_run_are_its_iterations() -> None:
    told = only(f"{PROGRAM}{EVALUATION}".replace("evaluate test", "run { epochs = 3 }\n  evaluate test"))
    assert "`iterations`" in told.help and "`epochs` of `update`" in told.help
    assert not errors(f"{PROGRAM}{EVALUATION}".replace("evaluate test", "run { iterations = 3 }\n  evaluate test"))
    assert not errors(change(PROGRAM, ("mini_batch = 16", "mini_batch = 16, epochs = 3")))


@pytest.mark.parametrize("statement", foreign_names._CALLED)
def test_what_a_word_is_called_here_is_an_attribute(statement: str) -> None:
    known = STATEMENTS[statement].kinds()
    for name, words in foreign_names._CALLED[statement].items():
        assert name in known and not known.keys() & {*words}, name


# Losses


@pytest.mark.parametrize("term", foreign_names._TERMS)
def test_a_term_of_another_system_is_written_as_the_help_says(term: str) -> None:
    base, node = ("ppo", "critic.update") if "value_clip" in foreign_names._TERMS[term] else ("grpo", "actor.update")
    program = EXTENDED.replace("grpo", base).replace("BODY", f"node {node} {{ loss = TERM }}")
    told = only(program.replace("TERM", f"{term}(0.2)"))
    (written,) = re.findall(r"write `(\w+\([^`]*\))`", told.help)
    assert not errors(program.replace("TERM", written))


@pytest.mark.parametrize(("word", "form"), [("k3", "low_var"), ("k2", "mse"), ("low_var_kl", "low_var"), ("kl", "k1")])
def test_a_form_of_kl_of_another_system_is_called_something_else(word: str, form: str) -> None:
    told = only(change(PROGRAM, ("kl(low_var)", f"kl({word})")))
    assert told.help == f"it is called `{form}` here"
    assert not errors(change(PROGRAM, ("kl(low_var)", f"kl({form})")))


# Reward functions

FUNCTIONS = """
def verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
def verl_text(data_source: str, solution_str: str, ground_truth: str, extra_info=None):
    return 1.0
def trl(completions, **kwargs):
    return [1.0 for completion in completions]
def trl_text(prompts: list[str], completions: list[str], solution: list[str], **kwargs):
    return [1.0 for completion in completions]
def named(**columns):
    return 1.0
"""
REWARD = "host.reward(response, answer) -> reward { call = exact_match() }"
TEXT = "`solution_str: str` gets text, without it token ids"
LISTS = "with `per = prompt` it gets lists and returns a list"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "g.py").write_text(FUNCTIONS)
    return tmp_path


def rewarded(reads: str, call: str, more: str = "") -> str:
    node = f"host.reward({reads}) -> reward {{ call = {call}{more} }}"
    data = ("source(8) -> prompt, answer", "source(8) -> prompt, answer, data_source")
    program = change(PROGRAM, (REWARD, node))
    return (
        change(program, data, ("answer    : text", "answer : text\n data_source : text"))
        if "data" in reads
        else program
    )


def helps(program: str, folder: Path) -> list[str]:
    """The lines of the helps of a program, which are all the same."""
    (help,) = {d.help for d in diagnose(program, context(folder)) if d.severity == "error"}
    return help.splitlines()


def test_a_reward_function_of_verl_is_bound_as_the_help_says(folder: Path) -> None:
    bound = '"g.py:verl"(solution_str = response, ground_truth = answer)'
    lines = helps(rewarded("response, answer", '"g.py:verl"'), folder)
    lacking = "let the node read a column `data_source` too, or give the parameter a default"
    assert lines == [f"name the columns: `{bound}`", lacking, TEXT]
    assert not errors(rewarded("response, answer, data_source", bound), folder)
    lines = helps(rewarded("response, answer, data_source", '"g.py:verl_text"'), folder)
    bound = bound.replace("verl", "verl_text")
    assert lines == [f"name the columns: `{bound}`"]
    assert not errors(rewarded("response, answer, data_source", bound), folder)


def test_a_reward_function_of_trl_is_bound_as_the_help_says(folder: Path) -> None:
    bound = '"g.py:trl"(completions = response)'
    lines = helps(rewarded("response, answer", '"g.py:trl"'), folder)
    over = "let the node not read `answer`, or add a parameter for it"
    text = "`completions: list[str]` gets text, without it token ids"
    assert lines == [f"name the columns: `{bound}`", over, LISTS, text]
    assert not errors(rewarded("response", bound, ", per = prompt"), folder)
    bound = '"g.py:trl_text"(completions = response, solution = answer, prompts = prompt)'
    lines = helps(rewarded("prompt, response, answer", '"g.py:trl_text"', ", per = prompt"), folder)
    assert lines == [f"name the columns: `{bound}`"]
    assert not errors(rewarded("prompt, response, answer", bound, ", per = prompt"), folder)


def test_a_function_of_keywords_alone_names_no_parameter(folder: Path) -> None:
    assert helps(rewarded("response, answer", '"g.py:named"'), folder) == [
        "it has no parameters: write `def named(response, answer)`"
    ]
    (folder / "g.py").write_text("def named(response, answer):\n    return 1.0\n")
    assert not errors(rewarded("response, answer", '"g.py:named"'), folder)


# States, and counts


def test_a_state_that_is_not_declared_is_declared_as_the_help_says() -> None:
    node = "node host.level(reward, level) -> level { call = moving_mean(mean = level), per = batch }"
    program = change(PROGRAM, ("  source -> actor", f"  {node}\n  host.reward -> host.level\n  source -> actor"))
    told = [d for d in diagnose(program) if d.message.startswith("`host.level` ")]
    assert [d.message.split()[1] for d in told] == ["reads", "writes"]
    assert all(d.help.endswith("as a state: `state level : f32 = 0`") for d in told)
    assert not errors(change(program, ("  worker actor ", "  state level : f32 = 0\n  worker actor ")))


def test_what_a_generation_reads_is_no_state() -> None:
    told = only(change(PROGRAM, ("actor.generate(prompt)", "actor.generate(prompt, level)")))
    assert "state" not in told.help


@pytest.mark.parametrize("samples", ["-1", "0", "1 / 0", '"4"', "2 GB"])
def test_a_wrong_count_starves_nobody(samples: str) -> None:
    assert len(errors(change(PROGRAM, ("samples = 4", f"samples = {samples}")))) == 1
    assert len(errors(change(PROGRAM, ("source(8)", f"source({samples})")))) == 1


def test_another_wrong_value_hides_no_batch_that_starves() -> None:
    wrong = change(PROGRAM, ("mini_batch = 16", "mini_batch = 64, clip_grad = -1"))
    assert {d.code for d in diagnose(wrong)} == {"bad-value", "dock-starves"}
