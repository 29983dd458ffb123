"""Pools that are ahead of the updates: the simulation has them begin what a run's driver has them begin, when it does;
the estimate says how often an iteration ends in the long run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import dry
import pytest
import stale_programs
from broken import compiled
from folders import ROOT, TESTS
from hypothesis import given
from hypothesis import strategies as st
from random_programs import FILE, FUNCTIONS
from sample import examples

from msrl_graph import compile, simulate
from msrl_graph.analysis.async_schedule import Sends, fetched_edges, staleness_bounds
from msrl_graph.cost import transfers as costs
from msrl_graph.diagnostics.quantities import duration, size
from msrl_graph.emit import json as emit_json
from msrl_graph.emit.search_report import why_text
from msrl_graph.emit.text import plan_text
from msrl_graph.hardware.cluster import Figure, Overheads
from msrl_graph.ir.instruction import Instruction
from msrl_graph.ir.plan import Plan
from msrl_graph.passes.throughput import critical_path, estimate_pace
from msrl_graph.simulation.lanes import LaneSpan
from msrl_graph.simulation.result import RESHARD

NONE = Figure(0.0, "stated")
NODES = """worker reward : reward_model frozen { model = reward }
  node actor.generate(prompt) -> response { samples = 3 }
  node reward.infer(prompt, response) -> score
  node host.rate(score) -> number { call = "f.py:numbers" }
  node actor.update(prompt, response, score, number) { loss = "f.py:term", optimizer = adamw(lr = 1e-6) }
  actor.generate -> reward.infer -> host.rate -> actor.update"""
PROGRAM = """
algorithm a {{
  columns {{ prompt : i32[<= 8], answer : text, response : i32[<= 400], score : f32, number : f32 }}
  worker actor : policy
  worker host : function
  source(4) -> prompt, answer
  source -> actor.generate, reward.infer, actor.update
  {nodes}
  actor.update => actor.generate {{ staleness = {staleness}, every = {every} }}
}}
cluster c {{ device = "cpu", devices_per_node = {devices} }}
deploy a on c {{
  model policy = "tiny"
  model reward = "tiny"
  data source = "tiny.jsonl"
  data test = "tiny.jsonl"
  {places}
  {evaluate}
  run {{ iterations = 12{run} }}
}}
"""
THREE = "apart actor.generate, actor.update, reward.infer"
TWO = "apart actor.generate, actor.update"
ONE = "place actor.generate, actor.update, reward.infer together"
BESIDE = "place actor.generate, actor.update together\n  apart actor.update, reward.infer"
REFILLS = (
    NODES.replace("actor.generate -> reward", "actor.generate -> host.keep -> reward")
    + """
  node host.keep(prompt, response) { keep = "f.py:keep", per = prompt, refill = 30 }
  source -> host.keep"""
)
EVALUATE = "evaluate test { every = 3, samples = 1, report = [score] }"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ahead")
    (made / FILE).write_text(FUNCTIONS)
    return made


def plan(
    folder: Path,
    staleness: int,
    places: str = THREE,
    evaluate: str = "",
    run: str = "",
    nodes: str = NODES,
    every: int = 1,
    devices: int = 3,
) -> Plan:
    """Whose runtime takes no time, since that of a run without processes does not."""
    said = {"nodes": nodes, "staleness": staleness, "every": every, "places": places, "evaluate": evaluate, "run": run}
    text = PROGRAM.format(**said, devices=devices)
    made, found = compiled(text, "a.rlg", folder)
    assert made is not None and made.plan is not None, found
    device = replace(made.plan.cluster.device, overheads=Overheads(NONE, NONE, NONE, NONE, NONE))
    traffic = tuple(replace(t, seconds=NONE) for t in made.plan.traffic)
    edges = tuple(replace(r, swap_in=replace(r.swap_in, bytes=0)) for r in made.plan.reshards)
    return replace(made.plan, cluster=replace(made.plan.cluster, device=device), traffic=traffic, reshards=edges)


def done(spans: tuple[LaneSpan, ...], name: str, number: int) -> tuple[float, float]:
    own = [s for s in spans if (s.name, s.iteration) == (name, number)]
    return min(s.begin for s in own), max(s.end for s in own)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("staleness", "options"),
    [
        (0, {}),
        (1, {}),
        (2, {}),
        (3, {"evaluate": EVALUATE}),
        (1, {"evaluate": EVALUATE}),
        (2, {"run": ", deterministic = true"}),
        (3, {"run": ", deterministic = true", "evaluate": EVALUATE}),
        (2, {"places": TWO}),
        (2, {"nodes": REFILLS}),
        (1, {"every": 2}),
        (2, {"every": 3, "places": TWO}),
        (3, {"every": 2, "run": ", deterministic = true"}),
        (3, {"every": 4, "evaluate": EVALUATE}),
        (2, {"every": 2, "run": ", save = 5, deterministic = true", "evaluate": EVALUATE}),
        (2, {"every": 3, "nodes": REFILLS}),
        (1, {"places": ONE, "devices": 1}),
        (3, {"places": ONE, "devices": 1, "evaluate": EVALUATE}),
        (3, {"places": ONE, "devices": 1, "run": ", deterministic = true, save = 5", "evaluate": EVALUATE}),
        (1, {"places": BESIDE, "devices": 2}),
        (2, {"places": BESIDE, "devices": 2, "run": ", deterministic = true", "evaluate": EVALUATE}),
    ],
)
def test_a_run_begins_and_ends_all_when_the_simulation_does(
    folder: Path, staleness: int, options: dict[str, Any], seed: int
) -> None:
    """The real driver, docks, function hosts and ranks, with time that is counted: each node takes the seconds that it
    took in the simulation, where rows differ in length, and now the generation, now the reward, now the update is the
    slowest."""
    made = plan(folder, staleness, **options)
    draw = random.Random(seed)
    edges = fetched_edges(made)
    assert bool(staleness_bounds(made)) == bool(staleness)
    found = simulate(
        made,
        iterations=12,
        lengths=f"lognormal({draw.choice([20, 200])}, 1)",
        function_seconds={"host.rate": f"lognormal({draw.choice([0.001, 0.05, 0.3])}, 1)"},
        seed=seed,
    )
    world = dry.Dry(made, seed, 1.0)
    names = {s.name for s in found.spans} - {RESHARD}
    assert names >= {"actor.generate", "reward.infer", "host.rate", "actor.update"}
    (edge,) = made.reshards
    for number in range(12):
        key = f"train/{number}"
        for name in names:
            begin, end = done(found.spans, name, number)
            world.takes[name, key] = end - begin
        what = f"fetch {edge.dst}" if edges else f"reshard {edge.dst}"
        world.takes[what, key] = costs.reshard(made, edge).value
        world.takes[f"copy {edge.src}", key] = costs.publish(made, edge).value
    world.run(7)
    for number in range(12):
        for name in names:
            assert world.times[name, f"train/{number}"] == pytest.approx(done(found.spans, name, number)), (
                name,
                number,
            )
    for versions in world.versions.values():
        behind = [number - versions.taken[f"train/{number}"] for number in range(12)]
        assert behind == [i.most_stale for i in found.iterations] and max(behind) > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("every", "options", "sent"),
    [
        (1, {}, range(12)),
        (2, {}, range(0, 12, 2)),
        (4, {}, (0, 4, 8)),
        (4, {"evaluate": EVALUATE}, (0, 3, 4, 6, 8, 9, 12)),
        (4, {"run": ", save = 5, deterministic = true"}, (0, 4, 5, 8, 10)),
    ],
)
def test_so_many_versions_are_copied_and_each_is_fetched_once(
    folder: Path, every: int, options: dict[str, Any], sent: Sequence[int], seed: int
) -> None:
    """Between two a generation keeps its weights; an evaluation after the last iteration takes those."""
    made = plan(folder, 4, every=every, **options)
    kept = [s.pool for s in made.schedule if Instruction("RELEASE", "actor.generate") not in s.instructions]
    assert (made.placement("actor.generate").pool in kept) == (every > 1)
    world = dry.Dry(made, seed, 1.0)
    world.run(7)
    (versions,) = world.versions.values()
    assert versions.copied == {*sent} and {*versions.told} <= {*sent}
    assert every == 1 or len(versions.told) == len({*versions.told})
    assert {versions.taken[f"train/{number}"] for number in range(12)} <= {*sent}


def test_a_run_that_is_gone_on_with_begins_with_its_first_version(folder: Path) -> None:
    """Which is that of the checkpoint; from there on it takes what the first would have taken."""
    made = plan(folder, 3, every=4, run=", save = 6, deterministic = true")
    (edge,), pool = fetched_edges(made), made.placement("actor.generate").pool
    whole = Sends(made)
    later = Sends(made, 6)
    assert [v for v in range(13) if whole.sends(edge, v)] == [0, 4, 6, 8, 12]
    assert [v for v in range(6, 13) if later.sends(edge, v)] == [6, 8, 12]
    assert [whole.update_iteration(pool, n) for n in range(13)] == [0, 0, 0, 0, 4, 4, 6, 6, 6, 6, 8, 8, 12]
    assert [later.update_iteration(pool, n) for n in range(6, 13)] == [
        whole.update_iteration(pool, n) for n in range(6, 13)
    ]
    odd = Sends(made, 5)  # of a run that somebody ended after five
    assert odd.sends(edge, 5) and odd.newest(edge, 5) == 5 == odd.update_iteration(pool, 5)


@given(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=2))
def test_the_share_of_the_versions_that_are_sent(every: int, between: list[int]) -> None:
    sends = object.__new__(Sends)
    sends.multiples = {("a", "b"): (every, *filter(None, between))}
    period = math.lcm(*sends.multiples["a", "b"])
    sent = sum(any(v % n == 0 for n in sends.multiples["a", "b"]) for v in range(period))
    assert sends.share(("a", "b")) == pytest.approx(sent / period)


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
@pytest.mark.parametrize("seed", range(8))
def test_no_row_of_random_programs_is_older_than_it_may_be(seed: int) -> None:
    """`bench/staleness.py` does the same 10,000 iterations long."""
    some = stale_programs.stale(random.Random(seed))
    found = compile("a.rlg", text=some.text)
    counted = stale_programs.ages(simulate(found, iterations=40, **some.options), some)
    assert sum(counted.values()) == 40 * found.graph.rows[-1] and max(counted) > 0


# The long run.


ASYNC = """import grpo
algorithm a extends grpo {{
  columns {{ gen_logp : f32[response] }}
  node actor.generate(prompt) -> response, gen_logp {{ samples = group }}
  node actor.update(prompt, response, gen_logp, old_logp, ref_logp, advantage) {{
    loss = truncated() * clip(0.2) + kl_coef * kl(), optimizer = adamw(lr = 1e-6)
  }}
  actor.update => actor.generate {{ staleness = {staleness}, every = {every} }}
}}
cluster some {{ device = "{device}", nodes = 7, devices_per_node = 2, network = 25 GB/s }}
deploy a on some {{
  set prompts = 24
  set group = 4
  set prompt_len = 128
  set response_len = 512
  model policy = "{model}"
  data source = "deepscaler.jsonl" {{ prompt = "problem", answer = "answer" }}
  {places}
  engine actor.update, actor.infer, reference.infer = fsdp {{ micro_batch = 8 }}
}}
"""
PLACES = {
    "the generation is the slowest": "place actor.generate on nodes 0\nplace actor.update, reference on nodes 1..6",
    "the update is the slowest": "place actor.generate on nodes 0..5\nplace actor.update, reference on nodes 6",
    "the reference is by itself": (
        "place actor.generate on nodes 0..3\nplace reference on nodes 4\nplace actor.update on nodes 5..6"
    ),
}
# The generation shares devices with the update, and so nothing there is ever older than one version.
PIPELINED = {
    "all on the same": "place actor.generate, actor.update, reference together",
    "the reference on others": "place actor.generate, actor.update on nodes 0..5\nplace reference on nodes 6",
}


@cache
def far(places: str, staleness: int, device: str = "ascend-910c", model: str = "qwen2.5-7b", every: int = 1) -> Plan:
    said = {"staleness": staleness, "every": every, "device": device, "model": model}
    return compile("a.rlg", text=ASYNC.format(places=places, **said))


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("places", (PLACES | PIPELINED).values(), ids=PLACES | PIPELINED)
@pytest.mark.parametrize("machine", [("ascend-910c", "qwen2.5-7b"), ("cpu", "tiny")], ids=["accelerators", "CPUs"])
def test_the_estimate_is_the_simulation_in_the_long_run(places: str, staleness: int, machine: tuple[str, str]) -> None:
    """With every row at its bound; a mean over so many iterations as may be under way, times some."""
    made = far(places, staleness, *machine)
    assert made.estimate is not None
    behind = made.estimate.staleness
    assert behind is not None
    found = simulate(made, iterations=18 * (1 + staleness))
    last = found.iterations[-6 * (1 + staleness) - 1 : -1]  # beside the very last nothing more is begun
    took = (last[-1].end - last[0].begin) / len(last)
    assert took == pytest.approx(made.estimate.iteration_seconds.value, rel=1e-6)
    assert max(i.most_stale for i in last) <= behind.bound == (1 if places in PIPELINED.values() else staleness)
    assert behind.mean.value == pytest.approx(sum(i.staleness for i in last) / len(last), abs=0.05)
    edges = tuple(replace(e, attributes={}) for e in made.graph.edges)
    still = replace(made, graph=replace(made.graph, edges=edges))
    assert simulate(still, iterations=1).seconds == pytest.approx(behind.in_step_seconds.value, rel=1e-9)
    assert made.estimate.iteration_seconds.value < behind.in_step_seconds.value * (1 + 1e-9)


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
@pytest.mark.parametrize(("staleness", "every"), [(1, 2), (2, 3), (3, 2), (4, 4)])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_the_estimate_is_the_simulation_where_not_every_version_is_sent(
    places: str, staleness: int, every: int
) -> None:
    """But for the turns at which weights come, of which the estimate has an even part in each."""
    made = far(places, staleness, every=every)
    assert made.estimate is not None and made.estimate.staleness is not None
    found = simulate(made, iterations=24 * every * (1 + staleness))
    last = found.iterations[-12 * every * (1 + staleness) :]
    took = (last[-1].end - last[0].begin) / len(last)
    (fetch,) = (p.seconds.value for p in made.estimate.phases if p.name == "reshard")
    assert took == pytest.approx(made.estimate.iteration_seconds.value, abs=fetch)
    behind = made.estimate.staleness
    assert max(i.most_stale for i in last) <= behind.bound == staleness
    assert behind.mean.value == pytest.approx(sum(i.staleness for i in last) / len(last), abs=0.1)
    full = far(places, staleness).estimate
    assert full is not None
    assert fetch == pytest.approx(next(p.seconds.value for p in full.phases if p.name == "reshard") / every)
    # Weights that come late are waited for, and weights that do not come take no time.
    less = fetch * (every - 1) * 2
    assert full.iteration_seconds.value - less <= made.estimate.iteration_seconds.value
    assert made.estimate.iteration_seconds.value <= behind.in_step_seconds.value


ENDS = {name: (places, 1) for name, places in (PLACES | PIPELINED).items()} | {
    f"{name}, and a version of three is sent": (places, 3) for name, places in PLACES.items()
}


@pytest.mark.parametrize("name", ENDS)
@given(st.randoms(use_true_random=False))
@examples(40)
def test_no_iteration_ends_sooner_because_something_takes_longer(name: str, draw: random.Random) -> None:
    """Nor sooner than the busiest pool, nor later than in step."""
    places, every = ENDS[name]
    made = far(places, 2, every=every)
    works = [("RUN", n.name) for n in made.graph.nodes if n.verb != "source"]
    works += [("RESHARD", "actor.generate"), ("PUBLISH", "actor.generate")]
    seconds = {work: draw.choice([0.0, 0.1, 1.0, 7.0]) * draw.random() for work in works}
    found = estimate_pace(made, seconds, 0.01).seconds
    for pool in made.pools:
        assert found >= sum(seconds["RUN", node] for node in pool.nodes)
    apart = {k: s for k, s in seconds.items() if k[0] != "PUBLISH"}
    assert found <= critical_path(made, apart)[0] + seconds["PUBLISH", "actor.generate"] + 0.01 + 1e-9
    more = {k: s + draw.choice([0.0, 0.5]) for k, s in seconds.items()}
    assert estimate_pace(made, more, 0.01).seconds >= found - 1e-9


TOGETHER = "place actor.generate, reference on nodes 0..5\nplace actor.update on nodes 6"


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_what_a_generation_keeps_counts_while_others_compute_on_its_devices(engine: str) -> None:
    """Its weights, and the cache that it gives back with them."""
    places = f"{TOGETHER}\n  engine actor.generate = {engine}"
    each = far(places, 1, "cpu", "tiny")
    seldom = far(places, 1, "cpu", "tiny", every=2)
    assert seldom.placement("actor.generate").pool == seldom.placement("reference.infer").pool

    def kept(made: Plan, phase: str) -> dict[str, int]:
        return {k: v for m in made.memory if m.phase == phase for k, v in m.items.items() if k.endswith(", kept")}

    own = {k: v for m in seldom.memory if m.phase == "generate" for k, v in m.items.items()}
    found = kept(seldom, "infer")
    assert found.pop("actor.generate weights, kept") == own["generation weights"]
    assert found.keys() == ({"actor.generate cache, kept"} if engine == "vllm" else set())
    assert all(size >= own["KV cache"] > 0 for size in found.values())
    assert not any(kept(seldom, phase) for phase in ("load", "reshard", "generate", "update"))
    assert not any(kept(each, m.phase) for m in each.memory)


# What is shown, and advised.

COUNTDOWN = ROOT / "examples" / "countdown" / "countdown.rlg"


def parts(text: str, *headings: str) -> str:
    """Sections of a page."""
    return "\n\n".join(s for s in text.split("\n\n") if s.startswith(headings))


def test_the_text_of_a_plan_with_pools_ahead(golden: Callable[[str, str], None]) -> None:
    golden("countdown.stale.txt", parts(plan_text(compile(COUNTDOWN)), "Reshard", "Estimate", "Notes"))


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
def test_the_text_of_a_plan_in_which_not_every_version_is_sent() -> None:
    saves = "place actor.generate on nodes 0\nplace actor.update, reference on nodes 1..6\nrun { save = 3 }"
    made = far(saves, 1, every=2)
    (edge,) = made.reshards
    text = " ".join(parts(plan_text(made), "Reshard").split())
    moved = size(4 / 6 * edge.received_bytes_per_device)
    assert f"fetched in 66.7 % of the iterations, {moved} a device and iteration on average (derived)" in text
    assert "only versions that are multiples of 2 or 3 are sent; actor.generate keeps its weights in between" in text
    assert made.estimate is not None
    (fetch,) = (p.seconds for p in made.estimate.phases if p.name == "reshard")
    assert fetch.basis.startswith("in 66.7 % of the iterations, ")
    assert fetch.value == pytest.approx(4 / 6 * costs.reshard(made, edge).value)


def test_the_json_of_a_plan_with_pools_ahead() -> None:
    stale = json.loads(emit_json.plan_json(compile(COUNTDOWN)))["estimate"]["staleness"]
    assert stale["mean"] == {"value": 1.0, "source": "assumed", "basis": "in the long run"}
    assert stale["bound"] == 1 and stale["in_step_seconds"]["basis"].startswith("critical path: actor.generate > ")


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
@pytest.mark.parametrize(("name", "devices"), [*zip(PLACES, (12, 2, 4), strict=True)])
def test_what_is_said_of_staleness_that_is_not_stated_is_what_it_then_takes(name: str, devices: int) -> None:
    places = f"{PLACES[name]}\n  layout actor.update {{ dp = {devices} }}"
    plain = far(places, 0)
    stated = far(places, 1)
    assert plain.estimate is not None and stated.estimate is not None and stated.estimate.staleness is not None
    then, now = (p.estimate.iteration_seconds.value for p in (stated, plain) if p.estimate is not None)
    (said,) = (n.text for n in plain.notes if n.about == "staleness")
    assert f"an iteration would take {duration(then)}, {100 * (1 - then / now):.3g} % less" in said
    assert not [n for n in stated.notes if n.about == "staleness"]


def test_staleness_that_saves_little_is_not_advised() -> None:
    page = TESTS / "programs" / "apart_four.rlg"
    text = page.read_text(encoding="utf-8")
    for length, advised in ((1024, True), (16, False)):  # of a short response, generating takes little
        found = compile(page, text=text.replace("response_len = 1024", f"response_len = {length}"))
        assert bool([n for n in found.notes if n.about == "staleness"]) == advised


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
def test_why_pools_are_apart_where_nothing_is_stated_but_staleness(golden: Callable[[str, str], None]) -> None:
    """The rival's seconds are those of the same program without staleness and with all states together."""
    found = far("", 1)
    golden("stale_open.why.txt", why_text(found))
    assert found.search is not None and found.search.rival is not None and found.estimate is not None
    behind = found.estimate.staleness
    rival = found.search.rival
    assert behind is not None and (behind.mean.value, behind.bound) == (rival.mean, rival.bound) == (1.0, 1)
    nodes = "actor.generate, actor.infer, actor.update, reference.infer"
    together = far(f"place {nodes} together", 0).search
    assert together is not None and not rival.ahead
    assert found.search.seconds < rival.seconds <= together.seconds * (1 + 1e-9)
