"""No program that compiles waits for nothing: random programs run dry, in random orders, to their end, and each row is
handed out once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import dry
import pytest
from broken import compiled
from dry_outcomes import (
    DATA,
    KINDNESS,
    holds,
)
from hypothesis import HealthCheck, event, given
from hypothesis import strategies as st
from random_programs import FILE, FUNCTIONS, programs
from sample import examples

from msrl_graph.analysis.async_schedule import count_lanes, lead_of_pools, pipelined_openings
from msrl_graph.checks.liveness import least_capacity
from msrl_graph.compiler.unsupported import find_unsupported
from msrl_graph.runtime.process.task_report import RunError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("dry")
    (made / FILE).write_text(FUNCTIONS)
    return made


@examples(25, suppress_health_check=list(HealthCheck))
@given(programs(), st.integers(0, 10**6), KINDNESS)
def test_what_compiles_runs_to_its_end(folder: Path, text: str, seed: int, kindness: float) -> None:
    event(holds(text, folder, seed, kindness).how)


@examples(10, suppress_health_check=list(HealthCheck))
@given(programs(), st.integers(0, 10**6))
def test_rows_have_a_place_where_the_least_capacity_says_so_and_are_refused_below(
    folder: Path, text: str, seed: int
) -> None:
    """The compiler's rule, held against the rows that a run really writes: with so many bytes a host for the iterations
    that may be under way it comes to its end, whoever writes how much where; with less than all rows of one take it
    says so."""
    made, _ = compiled(text, "a.rlg", folder)
    if made is None or made.plan is None or find_unsupported(made.plan):
        return
    plan = made.plan
    free = dry.Dry(plan, seed, 1.0)
    hosts = len(plan.docks.warehouses)
    free.run(DATA)
    need = max(free.stored.values())

    def bounded(capacity: int) -> dry.Dry:
        return dry.Dry(replace(plan, docks=replace(plan.docks, capacity=capacity)), seed, 1.0)

    enough = bounded(least_capacity(-(-need * count_lanes(plan) // hosts), free.largest, hosts))
    enough.run(DATA)
    assert enough.stored == free.stored
    if need >= hosts:
        # Devices that generate ahead of their own update wait for a place that only the update would give them. A run
        # says so at its deadline, and here no time passes.
        ends = (RunError, dry.Stuck) if pipelined_openings(plan) else RunError
        with pytest.raises(ends, match=r"full on every host|^rank \d+ waits"):
            bounded((need - 1) // hosts).run(DATA)
    event(f"{hosts} hosts, {'some' if enough.away else 'no'} rows went to another host")


# What random programs have found.


def run(
    folder: Path,
    algorithm: str,
    deploy: str = "",
    iterations: int | str = 2,
    kindness: float = 1.0,
    prompts: int = 4,
    devices: int = 2,
    seed: int = 0,
) -> str:
    text = f"""
algorithm a {{
  columns {{ prompt : i32[<= 8], answer : text, response : i32[<= 4], score : f32, number : f32 }}
  worker actor : policy
  worker host : function
  source({prompts}) -> prompt, answer
  {algorithm}
}}
cluster c {{ device = "cpu", devices_per_node = {devices} }}
deploy a on c {{
  model policy = "tiny"
  data source = "tiny.jsonl"
  data test = "tiny.jsonl"
  {deploy}
  run {{ iterations = {iterations} }}
}}
"""
    return holds(text, folder, seed, kindness).how


def test_a_state_of_each_prompt_is_there_in_an_evaluation_that_reads_nothing_else(folder: Path) -> None:
    algorithm = """state rate : f32 per prompt = 0.5
  node host.number(rate) -> number { call = "f.py:count" }
  source -> host.number"""
    assert run(folder, algorithm, "evaluate test { every = 1, samples = 1, report = [number] }") == "to its end"


def test_devices_ahead_of_an_update_of_every_other_iteration_have_the_weights_that_there_are(folder: Path) -> None:
    algorithm = """node actor.generate(prompt) -> response { samples = 1 }
  node actor.update(prompt, response) { loss = "f.py:term", optimizer = adamw(lr = 1e-6), every = 2 }
  source -> actor.generate -> actor.update
  actor.update => actor.generate { staleness = 1 }"""
    assert (
        run(folder, algorithm, "place actor.generate, actor.update together", iterations=5)
        == "to its end, 1 versions behind"
    )


GENERATE = """node actor.generate(prompt) -> response { samples = 3 }
  node actor.update(prompt, response) { loss = "f.py:term", optimizer = adamw(lr = 1e-6) }
  actor.update => actor.generate
  source -> actor.generate -> actor.update
  """


@pytest.mark.parametrize("refill", ["", ", refill = 3"])
def test_a_filter_beside_one_that_repeats_rows_chooses_before_it(folder: Path, refill: str) -> None:
    filters = f"""node host.a(response) {{ select = "f.py:places", per = response }}
  node host.b(response) {{ keep = "f.py:keep"{refill} }}
  actor.generate -> host.a, host.b -> actor.update"""
    assert run(folder, GENERATE + filters, kindness=0.6) == "to its end"


def test_a_state_of_a_prompt_that_a_filter_repeats_is_set(folder: Path) -> None:
    algorithm = """state rate : f32 per prompt = 0.5
  node host.twice(answer) { select = "f.py:places", per = prompt }
  node host.track(answer, rate) -> rate { call = "f.py:numbers_rate", per = prompt }
  source -> host.twice -> host.track"""
    assert run(folder, algorithm) == "to its end"


def test_who_reads_only_a_state_works_in_every_round_of_a_refill(folder: Path) -> None:
    algorithm = """state step : f32 = 0
  node host.number(step) -> number { call = "f.py:count" }
  node host.keep(response, number) { keep = "f.py:keep", per = prompt, refill = 30 }
  source -> host.number -> host.keep -> actor.update
  actor.generate -> host.keep"""
    assert run(folder, GENERATE + algorithm, kindness=0.3) == "to its end"


@pytest.mark.parametrize("staleness", [0, 1])
def test_iterations_of_an_adaptive_refill_draw_as_many_as_the_share_says(folder: Path, staleness: int) -> None:
    algorithm = """node host.keep(prompt, response) { keep = "f.py:keep", per = prompt, refill = 30, adaptive = true }
  actor.generate -> host.keep -> actor.update
  source -> host.keep"""
    edge = f"update => actor.generate {{ staleness = {staleness} }}"
    text = GENERATE.replace("update => actor.generate", edge) + algorithm
    deploy = "apart actor.generate, actor.update"
    assert run(folder, text, deploy, kindness=0.3, iterations=6, prompts=16).endswith(", rounds of several sizes")


def test_a_row_goes_on_more_often_than_there_are_rows_and_again(folder: Path) -> None:
    algorithm = """node host.a(answer) { select = "f.py:places", per = prompt }
  node host.b(answer) { select = "f.py:places", per = prompt }
  node host.number(answer) -> score { call = "f.py:numbers", per = prompt }
  source -> host.a -> host.b -> host.number"""
    assert run(folder, algorithm, prompts=2) == "to its end"


SECOND = """columns { second : i32[<= 4], s : f32[response], third : i32[<= 4] }
  """


def test_weights_come_again_in_a_round_of_prompts_while_those_of_the_round_before_are_on_their_way_back(
    folder: Path,
) -> None:
    algorithm = """worker judge : policy frozen { model = judge }
  node n: actor.generate(response) -> second { samples = 3 }
  node judge.generate(prompt, second) -> third { samples = 3 }
  node host.keep(third) { keep = "f.py:keep", per = third, refill = 30 }
  actor.generate -> n -> judge.generate -> host.keep -> actor.update
  source -> judge.generate
  actor.update => n"""
    deploy = 'model judge = "tiny"\n  apart actor.generate, actor.update'
    assert run(folder, SECOND + GENERATE + algorithm, deploy, kindness=0.2) == "to its end"


def test_weights_are_back_for_who_computes_between_two_generations_with_them(folder: Path) -> None:
    algorithm = """node actor.infer(prompt, response) -> s
  node n: actor.generate(prompt) -> second { samples = 1 }
  actor.generate -> actor.infer -> n -> actor.update
  source -> actor.infer, n
  actor.update => n"""
    deploy = "layout actor.generate, n { dp = 2 }\n  layout actor.infer, actor.update { dp = 2 }"
    assert run(folder, SECOND + GENERATE + algorithm, deploy) == "to its end"


def test_who_makes_rounds_of_prompts_is_not_ahead_where_the_filter_waits_for_who_is_in_step(folder: Path) -> None:
    algorithm = """worker reward : reward_model frozen { model = reward }
  node reward.infer(prompt, response) -> score
  node host.keep(prompt, score) { keep = "f.py:keep", per = prompt, refill = 30 }
  actor.generate -> reward.infer -> host.keep -> actor.update
  source -> reward.infer"""
    deploy = """model reward = "tiny"
  apart actor.generate, actor.update
  evaluate test { every = 1, samples = 1, report = [score] }"""
    program = GENERATE.replace("update => actor.generate", "update => actor.generate { staleness = 2 }") + algorithm
    assert run(folder, program, deploy, kindness=0.6) == "to its end"


def test_rounds_of_prompts_go_ahead_where_their_filter_waits_for_nobody_else(folder: Path) -> None:
    algorithm = """node host.keep(prompt, response) { keep = "f.py:keep", per = prompt, refill = 30 }
  actor.generate -> host.keep -> actor.update
  source -> host.keep"""
    program = GENERATE.replace("update => actor.generate", "update => actor.generate { staleness = 1 }") + algorithm
    deploy = "apart actor.generate, actor.update"
    assert run(folder, program, deploy, kindness=0.6, iterations=4) == "to its end, 1 versions behind"


COUNTED = {
    "one of the run": """state step : f32 = 0
  node host.set_step(response, step) -> step { call = "f.py:numbers_step", per = batch }
  actor.generate -> host.set_step""",
    "one of each prompt": """state rate : f32 per prompt = 0
  node host.set_rate(response, rate) -> rate { call = "f.py:numbers_rate", per = prompt }
  actor.generate -> host.set_rate""",
    "one that goes round by a column": """state step : f32 = 0
  node host.number(response, step) -> number { call = "f.py:numbers_step", per = batch }
  node host.set_step(number, step) -> step { call = "f.py:numbers_step", per = batch }
  actor.generate -> host.number -> host.set_step""",
}


@pytest.mark.parametrize("together", [True, False], ids=["on the same devices", "on devices of their own"])
@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("algorithm", COUNTED.values(), ids=COUNTED)
def test_a_state_is_counted_up_once_an_iteration_however_many_are_under_way(
    folder: Path, algorithm: str, staleness: int, together: bool
) -> None:
    program = GENERATE.replace("=> actor.generate", f"=> actor.generate {{ staleness = {staleness} }}") + algorithm
    deploy = "place actor.generate, actor.update together" if together else "apart actor.generate, actor.update"
    for seed in range(5):
        ended = run(folder, program, deploy, iterations=6, seed=seed)
        assert ended in ("to its end, 1 versions behind", "to its end, 2 versions behind")


@pytest.mark.parametrize(
    "deploy", ["place actor.generate, actor.update together", "apart actor.generate, actor.update"]
)
def test_who_generates_from_what_a_state_leads_to_is_in_step(folder: Path, deploy: str) -> None:
    algorithm = """state step : f32 = 0
  columns { text : text }
  node host.text(answer, step) -> text { call = "f.py:text_step" }
  node host.set_step(response, step) -> step { call = "f.py:numbers_step", per = batch }
  source -> host.text -> actor.generate -> host.set_step"""
    program = GENERATE.replace("=> actor.generate", "=> actor.generate { staleness = 1 }") + algorithm
    program = program.replace("generate(prompt)", "generate(prompt, text)")
    assert run(folder, program, deploy, iterations=4) in ("to its end", "refused")


@pytest.mark.parametrize("overdue", ["wait", "drop_group"])
@pytest.mark.parametrize("deploy", ["layout actor.generate { dp = 2 }", "apart actor.generate, actor.update"])
def test_what_is_overdue_is_waited_for_or_leaves(folder: Path, overdue: str, deploy: str) -> None:
    partial = f"samples = 3, partial = 0.6, cuts = 1, overdue = {overdue}"
    program = GENERATE.replace("samples = 3", partial)
    assert run(folder, program, deploy, iterations=5) == "to its end, what was not whole in the next iteration"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_what_goes_on_in_another_iteration_is_drawn_with_weights_as_old_as_may_be(
    folder: Path, staleness: int, seed: int
) -> None:
    """An iteration cannot begin before it is known what the one before has cut: the updates wait for that."""
    program = GENERATE.replace("samples = 3", "samples = 3, partial = 0.6, cuts = 1")
    program = program.replace("update => actor.generate", f"update => actor.generate {{ staleness = {staleness} }}")
    deploy = "apart actor.generate, actor.update\n  evaluate test { every = 3, samples = 2, report = [score] }"
    program = program.replace(
        "source -> actor.generate",
        'node host.score(response) -> score { call = "f.py:numbers" }\n  source -> actor.generate',
    )
    program += "actor.generate -> host.score"
    run_options = "8, deterministic = true, save = 5"
    assert run(folder, program, deploy, iterations=run_options, seed=seed).startswith("to its end, ")


@pytest.mark.parametrize("seed", range(10))
def test_who_waits_for_another_that_is_ahead_begins_no_earlier(folder: Path, seed: int) -> None:
    """Else an evaluation finds it waiting for rows of an iteration that the other is to begin after that."""
    algorithm = """worker reward : reward_model frozen { model = reward }
  node reward.infer(prompt, response) -> score
  actor.generate -> reward.infer -> actor.update
  source -> reward.infer"""
    program = GENERATE.replace("update(prompt, response)", "update(prompt, response, score)") + algorithm
    program = program.replace("update => actor.generate", "update => actor.generate { staleness = 1 }")
    deploy = """model reward = "tiny"
  apart actor.generate, actor.update, reward.infer
  evaluate test { every = 1, samples = 2, at = [1, 2], report = [score] }"""
    ended = run(folder, program, deploy, iterations=4, devices=3, seed=seed)
    assert ended == "to its end, 1 versions behind"


ROUNDS = """
algorithm a {
  columns { prompt : i32[<= 8], answer : text, drawn : i32[<= 4], verdict : i32[<= 4], score : f32[verdict] }
  worker actor : policy
  worker judge : policy frozen { model = judge }
  worker host : function
  source(4) -> prompt, answer
  node actor.generate(prompt) -> drawn { samples = 1 }
  node judge.generate(answer) -> verdict { samples = 1 }
  node actor.infer(answer, verdict) -> score
  node host.picked(verdict, score) { keep = "f.py:keep", refill = 1 }
  node actor.update(prompt, drawn) { loss = "f.py:term", optimizer = adamw(lr = 1e-6) }
  source -> actor.generate, judge.generate
  judge.generate -> actor.infer -> host.picked
  actor.generate, host.picked -> actor.update
  actor.update => actor.generate { staleness = 1 }
}
cluster c { device = "cpu", devices_per_node = 2 }
deploy a on c {
  model policy = "tiny"
  model judge = "tiny"
  data source = "tiny.jsonl"
  run { iterations = 3 }
  place actor.generate, judge.generate, actor.update together
}
"""


@pytest.mark.parametrize("scored", [True, False])
def test_a_generation_ahead_waits_for_all_rounds_of_a_refill_that_needs_other_rows(scored: bool, folder: Path) -> None:
    """The rounds, whose prompts it reads too, come before it on the devices that they share."""
    text = ROUNDS
    if not scored:
        text = text.replace("  node actor.infer(answer, verdict) -> score\n", "").replace(", score : f32[verdict]", "")
        text = text.replace("verdict, score", "verdict").replace("-> actor.infer ", "")
    made, _ = compiled(text, "a.rlg", folder)
    assert made is not None and made.plan is not None and lead_of_pools(made.plan)
    for seed in range(5):
        assert holds(text, folder, seed, 0.5).how.startswith("to its end")
