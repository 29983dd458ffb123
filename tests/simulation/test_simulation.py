"""The simulation: the estimate where all rows are alike, and never less for more; every row once; the same bytes each
time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, median

import numpy as np
import pytest
from folders import TESTS
from hypothesis import Phase, given
from hypothesis import strategies as st
from sample import examples

from msrl_graph import compile, noise, simulate
from msrl_graph.analysis.async_schedule import row_age_bound
from msrl_graph.backends import ENGINES
from msrl_graph.cli import compile_main
from msrl_graph.cost import transfers as costs
from msrl_graph.diagnostics import Fault
from msrl_graph.emit.text import plan_text
from msrl_graph.hardware.cluster import Figure
from msrl_graph.hardware.device_presets import DEVICES
from msrl_graph.ir.attributes import LOOKS, UpdateAttributes
from msrl_graph.ir.plan import Plan
from msrl_graph.runtime.dock.controller import Controller
from msrl_graph.runtime.dock.messages import Round, RowLocation, RowsReady
from msrl_graph.runtime.dock.readers import list_node_reads
from msrl_graph.runtime.process.task import Task
from msrl_graph.simulation import simulation_text
from msrl_graph.simulation.assumptions import INVERSES, distribution, read_specs
from msrl_graph.simulation.flow import RowTimes
from msrl_graph.simulation.generation import Sequence, generate, tail_share
from msrl_graph.simulation.rollout import SimulatedRollout
from msrl_graph.simulation.rows import RowSampler, key, keys, to_unit_interval
from msrl_graph.simulation.run import Simulator

PROGRAMS = TESTS / "programs"
PAGE = (PROGRAMS / "grpo_page.rlg").read_text(encoding="utf-8")
STALE = PROGRAMS / "stale.rlg"
# Micro-batches by tokens have other prompts together than the estimate assumes.
APART_TWO = (
    (PROGRAMS / "apart_two.rlg")
    .read_text(encoding="utf-8")
    .replace("  apart", "  engine actor.update, actor.infer, reference.infer = megatron { micro_batch = 16 }\n  apart")
)
SMALL = """import grpo
cluster four {{ device = "ascend-910c", nodes = {nodes}, devices_per_node = 2, network = 25 GB/s }}
deploy grpo on four {{
  set prompts = {prompts}
  set group = {group}
  set prompt_len = 128
  set response_len = 512
  model policy = "qwen2.5-7b"
  data source = "deepscaler.jsonl" {{ prompt = "problem", answer = "answer" }}
  {more}
}}
"""


@cache
def small(more: str = "", nodes: int = 2, prompts: int = 8, group: int = 4, text: str = SMALL) -> Plan:
    return compile("small.rlg", text=text.format(more=more, nodes=nodes, prompts=prompts, group=group))


@cache
def page(*changes: tuple[str, str]) -> Plan:
    text = PAGE
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return compile("page.rlg", text=text, sets={"prompts": "32"})


MINI = ("optimizer = adamw(lr = 1e-6)", "optimizer = adamw(lr = 1e-6), mini_batch = 128, epochs = 2")
# The KV cache has room for all sequences that are generated at one time.
SHORT = ("= 8192 ", "= 2048 ")
ROOMY = ("run {", "engine actor.generate = vllm { micro_batch = 3 }\n  run {")
ENGINE = "engine actor.update, actor.infer, reference.infer = {} {{ micro_batch = {} }}"
PIPELINE = f"layout actor.update {{ pp = 2, dp = 2 }}\n{ENGINE.format('megatron', 3)}"
EIGHT = f"layout actor.update {{ dp = 2, zero = 3 }}\n{ENGINE.format('fsdp', 8)}"
OFFLOAD = "engine actor.update, reference.infer = megatron { micro_batch = 1, offload = all }"
RING = f"layout actor.update {{ cp = 2, dp = 2 }}\n{ENGINE.format('megatron', 2)}"


# All rows at their bounds: what the estimate says.


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(lambda: page(SHORT), id="page"),
        pytest.param(lambda: page(MINI, ROOMY), id="mini-batches and epochs"),
        pytest.param(
            lambda: page(("run {", "engine actor.generate = hf { micro_batch = 3 }\n  run {")),
            id="waves, the last one short",
        ),
        pytest.param(lambda: page(ROOMY), id="continuous"),
        pytest.param(lambda: page(SHORT, ("  run {", "  reshard { order = staged }\n  run {")), id="staged"),
        pytest.param(lambda: page(SHORT, ("  run {", "  dock { mode = central }\n  run {")), id="central"),
        pytest.param(lambda: compile("apart_two.rlg", text=APART_TWO), id="apart"),
        pytest.param(
            lambda: small("apart actor.generate, actor.update, reference", nodes=3, prompts=12), id="three pools"
        ),
        pytest.param(lambda: small("layout actor.update { dp = 4, zero = 3 }"), id="ZeRO 3"),
        pytest.param(lambda: small(EIGHT, nodes=1), id="one host"),
        pytest.param(lambda: small(PIPELINE), id="pipeline"),
        pytest.param(lambda: small(f"{RING}\napart actor.generate, actor.update", nodes=4), id="context parallel"),
        pytest.param(lambda: small(OFFLOAD), id="offload"),
        pytest.param(lambda: page(MINI, ("run {", f"{OFFLOAD}\n  run {{")), id="offload, each step"),
        pytest.param(
            lambda: page(MINI, ("run {", f"{OFFLOAD.replace('all', 'phase')}\n  run {{")), id="offload, each phase"
        ),
        pytest.param(
            lambda: small(text=SMALL.replace("ascend-910c", "cpu").replace("qwen2.5-7b", "tiny"), more=EIGHT, nodes=1),
            id="CPUs",
        ),
    ],
)
def test_rows_at_their_bounds_take_what_the_estimate_says(plan: Callable[[], Plan]) -> None:
    found = plan()
    simulated = simulate(found, iterations=2)
    assert found.estimate is not None
    for iteration in simulated.iterations:
        assert iteration.seconds == pytest.approx(found.estimate.iteration_seconds.value, rel=1e-9)
    assert simulated.throughput == pytest.approx(found.estimate.tokens_per_second_per_device.value, rel=1e-9)
    assert " > ".join(simulated.path) == found.estimate.iteration_seconds.basis.removeprefix("critical path: ")


def test_the_bound_stated_is_the_bound() -> None:
    plan = small()
    assert simulate(plan, lengths=["fixed(512)", "prompt=fixed(4096)"]).iterations == simulate(plan).iterations


@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_rows_that_share_a_beginning_take_nearly_what_the_estimate_says(size: int) -> None:
    """Which rows of a prompt fall into one mini-batch is drawn; the estimate takes the mean."""
    plan = page(
        MINI, ("run {", f"{ENGINE.format('fsdp', size)}\n  run {{"), ("= 8192 ", "= 512 "), ("= 2048 ", "= 256 ")
    )
    assert plan.estimate is not None
    assert simulate(plan, iterations=1).seconds == pytest.approx(plan.estimate.iteration_seconds.value, rel=0.03)


# Never less for more.

ROWS = st.sampled_from([("lognormal", 0.8), ("uniform", 0.5), ("geometric", 0.0), ("fixed", 0.0)])
# By an engine that computes each row by itself: one that shares beginnings does less where rows of one prompt are of
# like length.
ALONE = ENGINE.format("megatron", 3)
APART = "apart actor.generate, actor.update"
PLANS = {
    "colocated": lambda: small(ALONE),
    "apart": lambda: small(f"{ALONE}\n{APART}"),
    "continuous": lambda: small(f"{ALONE}\n{APART}\nengine actor.generate = vllm {{ micro_batch = 1 }}"),
    "waves": lambda: small(f"{ALONE}\nengine actor.generate = hf {{ micro_batch = 1 }}"),
}


def lengths(kind: tuple[str, float], middle: int) -> str:
    name, spread = kind
    if name == "uniform":
        return f"uniform(1, {middle})"
    return f"lognormal({middle}, {spread})" if name == "lognormal" else f"{name}({middle})"


@given(st.sampled_from(sorted(PLANS)), ROWS, st.integers(2, 400), st.integers(0, 200), st.integers(0, 3))
@examples(40)
def test_longer_rows_never_take_less(name: str, kind: tuple[str, float], middle: int, more: int, seed: int) -> None:
    plan = PLANS[name]()
    short, long = (simulate(plan, iterations=2, lengths=lengths(kind, m), seed=seed) for m in (middle, middle + more))
    assert all(a <= b for a, b in zip(short.lengths[1]["response"], long.lengths[1]["response"], strict=True))
    assert all(a.seconds <= b.seconds * (1 + 1e-9) for a, b in zip(short.iterations, long.iterations, strict=True))


@given(
    st.sampled_from(sorted(PLANS)),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(1, 5),
    st.floats(0, 5),
    st.integers(0, 3),
)
@examples(40)
def test_more_and_slower_stragglers_never_take_less(
    name: str, some: float, more: float, slow: float, slower: float, seed: int
) -> None:
    found = [
        simulate(PLANS[name](), iterations=2, lengths="lognormal(150, 0.8)", stragglers=f"{s:.4f} x{f:.4f}", seed=seed)
        for s, f in ((some, slow), (max(some, more), slow + slower))
    ]
    assert all(a.seconds <= b.seconds * (1 + 1e-9) for a, b in zip(*(f.iterations for f in found), strict=True))


def test_one_slow_device_of_all_slows_the_iteration() -> None:
    plan = PLANS["colocated"]()
    whole = simulate(plan, iterations=1, stragglers="100% x3").seconds
    assert (
        simulate(plan, iterations=1).seconds
        < simulate(plan, iterations=1, stragglers="30% x3", seed=1).seconds
        <= whole
    )
    assert whole <= 3 * simulate(plan, iterations=1).seconds * (1 + 1e-9)


# A generation, against one that counts token by token.


HOST = 0.125  # of a row


@dataclass
class Linear:
    """Costs that are linear in what they are asked for."""

    device = replace(DEVICES["h100"], overheads=replace(DEVICES["h100"].overheads, row=Figure(HOST, "derived")))

    def prefill(self, lengths: list[float]) -> Figure:
        return Figure(1 + sum(lengths), "derived")

    def decode_step(self, sequences: float, cached: float) -> Figure:
        return Figure(2 + 0.5 * sequences + 0.25 * cached, "derived")


def by_token(sequences: list[Sequence], slots: int, continuous: bool) -> tuple[float, dict[int, float]]:
    waiting = list(sequences)
    live = dict[Sequence, int]()
    now = 0.0
    ends = dict[int, float]()
    while waiting or live:
        if waiting and (not live or (continuous and len(live) < slots)):
            new = waiting[: slots - len(live)]
            waiting = waiting[slots - len(live) :]
            if any(s.prefill for s in new):
                now += 1 + sum(s.prefill for s in new)
            live |= dict.fromkeys(new, 1)  # the first token comes with the prompt
        elif live:
            # A token enters the cache in the middle of its step.
            now += 2 + 0.5 * len(live) + 0.25 * sum(s.context + n - 0.5 for s, n in live.items())
            live = {s: n + 1 for s, n in live.items()}
        for s in [s for s, n in live.items() if n == s.tokens]:
            now += HOST
            ends[s.row] = now
            del live[s]
    return now, ends


@given(
    st.lists(st.tuples(st.integers(1, 20), st.booleans(), st.integers(1, 30)), max_size=12),
    st.integers(1, 5),
    st.booleans(),
)
def test_stretches_add_up_to_tokens(rows: list[tuple[int, bool, int]], slots: int, continuous: bool) -> None:
    sequences = [Sequence(i, c, c * fresh, n) for i, (c, fresh, n) in enumerate(rows)]
    found = generate(Linear(), sequences, slots, continuous, 1.0, 0.0)  # type: ignore[arg-type]
    now, ends = by_token(sequences, slots, continuous)
    assert found.end == pytest.approx(now)
    assert found.ends == pytest.approx(ends)
    assert all(n <= slots for _, _, n in found.stretches)
    twice = generate(Linear(), sequences, slots, continuous, 2.0, 5.0)  # type: ignore[arg-type]
    assert twice.end == pytest.approx(5 + 2 * now - HOST * len(rows))


def test_the_tail_is_where_less_than_half_live() -> None:
    assert tail_share([(0, 6, 4), (6, 8, 2), (8, 10, 1)]) == pytest.approx(0.2)
    assert tail_share([(0, 6, 4), (0, 10, 4), (10, 20, 3)]) == pytest.approx(0.5)
    assert tail_share([]) == tail_share([(1, 1, 1)]) == 0


# Rows: each once.


@pytest.mark.parametrize(
    "more",
    [
        "",
        "actor.generate -> reference.infer { stream = 5 }",
        "actor.generate -> actor.infer { balance = tokens }",
        "actor.generate -> host.reward { stream_tokens = 500 }",
    ],
)
@pytest.mark.parametrize("batches", ["", "mini_batch = 8", "mini_batch = 16, epochs = 3"])
def test_every_unit_is_handed_out_once(more: str, batches: str) -> None:
    plan = page(
        ("run {", f"{more}\n  run {{"),
        ("optimizer = adamw(lr = 1e-6)", f"optimizer = adamw(lr = 1e-6)\n    {batches}"),
    )
    simulator = Simulator(plan, ENGINES, read_specs(plan, (), "", {}, 0))
    flow = simulator.flow
    done = {}
    for node in plan.graph.nodes:
        rows = flow.rows(plan.graph.row_level(node))
        done[node.name] = RowTimes(plan.graph.row_level(node), [float(r * 7919 % 31) for r in range(rows)], 31.0)
    lengths = {"prompt": simulator.draws.tokens("prompt", 0), "response": simulator.draws.tokens("response", 0)}
    for node in plan.graph.nodes[1:]:
        counted = Counter(u for b in flow.batches(node, 0, done, lengths) for part in b.parts for u in part)
        assert set(counted.values()) == {UpdateAttributes.of(node).epochs}
        assert len(counted) == flow.units(node)


DOCKS = {
    "whole": lambda: small(),
    "streamed": lambda: small(
        "actor.generate -> actor.infer { stream = 5 }\nactor.generate -> host.reward { stream = 3 }"
    ),
    "balanced": lambda: small("actor.generate -> actor.infer { stream = 7, balance = tokens }", group=3, prompts=16),
    "by tokens": lambda: small(
        "actor.generate -> actor.infer { stream_tokens = 900, balance = tokens }\n"
        "actor.generate -> host.reward { stream = 3, stream_tokens = 700 }\n"
        "source -> actor.generate { stream_tokens = 300 }"
    ),
    "mini-batches": lambda: page(
        ("optimizer = adamw(lr = 1e-6)", "optimizer = adamw(lr = 1e-6)\n    mini_batch = 64, epochs = 2")
    ),
}


@pytest.mark.parametrize("name", sorted(DOCKS))
@given(st.integers(0, 2**32), st.integers(0, 5))
@examples(10, phases=(Phase.generate,))  # a smaller seed says nothing
def test_rows_are_handed_out_as_the_dock_of_a_run_does(name: str, seed: int, iteration: int) -> None:
    """Rows come to a run's controllers one by one, in the order in which the simulation has them, to groups that are
    all on one host."""
    plan = DOCKS[name]()
    random = Random(seed)
    flow = Simulator(plan, ENGINES, read_specs(plan, (), "", {}, plan.deploy.run.seed)).flow
    prompts = plan.graph.rows[0]
    for reader in list_node_reads(plan):
        node = plan.graph.node(reader.node)
        done = {}
        arrivals = list[tuple[float, str, int]]()
        for edge in (e for e in plan.graph.samples() if e.dst == node.name):
            level = plan.graph.row_level(plan.graph.node(edge.src))
            times = list(map(float, random.sample(range(10**6), flow.rows(level))))
            done[edge.src] = RowTimes(level, times, max(times))
        for r in reader.reads:
            # What comes by another edge than its writer's is there already.
            times = done[r.writer].times if r.writer in done else [-1.0] * flow.rows(r.rows)
            arrivals += [(t, r.column, row) for row, t in enumerate(times)]
        tokens = {
            c: [random.randint(1, 500) for _ in range(flow.rows(plan.graph.column(c).level))]
            for c in ("prompt", "response")
        }
        controller = Controller(replace(reader, group_warehouses=(0,) * len(reader.group_warehouses)))
        rounds = list[Round]()
        task = Task("train", iteration, prompts)
        controller.open(task)
        for _, column, row in sorted(arrivals):
            size = tokens[column][row] if column in tokens else 0
            rounds += controller.take_in_news(
                task.key, [RowsReady(column, np.array([row]), np.array([size]), RowLocation(0, "some"))]
            )
        found = flow.batches(node, iteration, done, tokens)
        assert [b.parts for b in found] == [[p.units.tolist() for p in r.parts] for r in rounds]
        assert found


def test_keys_are_those_of_a_run() -> None:
    parts = (2**53, 7, 0)
    assert keys(parts, range(50)) == [key(*parts, n) for n in range(50)] == noise._keys(*parts, np.arange(50)).tolist()


@given(
    st.lists(st.lists(st.integers(1, 20), min_size=2, max_size=2), min_size=30, max_size=30),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_partial_rollout_generates_every_token_once_and_takes_every_prompt_once(
    tokens: list[list[int]], most: int, more: int, cuts: int
) -> None:
    rollout = SimulatedRollout(3, 3 + more, 2, most, cuts, True, lambda prompt: (5, tokens[prompt]))
    written = Counter[tuple[int, int]]()
    taken = list[int]()
    for version in range(6):
        working = rollout.begin(version)
        assert len(working) == 3 + more
        while not rollout.is_done(working):
            for place, group in enumerate(working):
                for s in group.sequences(place, most, True):
                    assert s.tokens <= most
                    assert s.context == 5 + written[group.prompt, s.row % 2]
                    written[group.prompt, s.row % 2] += s.tokens
            rollout.grow(working, [1.0] * 2 * len(working))
        found = rollout.take(working)
        taken += [g.prompt for g in found]
        assert len(found) == 3 and all(g.is_complete and version - cuts <= g.version <= version for g in found)
    assert len(set(taken)) == len(taken) == 18
    for prompt in taken:
        assert [written[prompt, i] for i in (0, 1)] == tokens[prompt]


def test_balance_shortens_what_waits_for_the_longest_share() -> None:
    edges = "\n".join(
        f"{a} {{ balance = tokens }}" for a in ("actor.generate -> actor.infer", "actor.infer -> actor.update")
    )
    plain, balanced = (
        simulate(small(f"{ALONE}\n{more}"), iterations=4, lengths="lognormal(100, 1)") for more in ("", edges)
    )
    assert balanced.seconds < plain.seconds


def test_stream_overlaps_what_is_apart() -> None:
    apart = "apart actor.generate, actor.update\nengine actor.generate = vllm { micro_batch = 1 }"
    streamed = small(f"{apart}\nactor.generate -> reference.infer {{ stream = 4 }}")
    whole, early = (simulate(p, iterations=3, lengths="lognormal(100, 1)") for p in (small(apart), streamed))
    assert early.seconds < whole.seconds


# Partial rollout and staleness.


def stale(staleness: int, share: float) -> Plan:
    return compile(STALE, sets={"staleness": str(staleness), "share": str(share)})


@pytest.mark.slow
def test_staleness_and_partial_rollout_shorten_a_long_tail() -> None:
    runs = {
        (k, n): simulate(stale(k, n), iterations=8, lengths="lognormal(1200, 1)")
        for k, n in ((0, 0.0), (1, 0.0), (0, 0.5), (2, 0.5))
    }
    assert runs[1, 0.0].seconds < runs[0, 0.0].seconds
    assert runs[0, 0.5].seconds < runs[0, 0.0].seconds
    assert runs[2, 0.5].seconds < runs[0, 0.5].seconds
    assert runs[0, 0.5].tail < runs[0, 0.0].tail
    spans = [next(w.span for w in runs[k].work if w.name == "actor.generate") for k in ((0, 0.5), (0, 0.0))]
    assert spans[0] < spans[1]
    assert [i.most_stale for i in runs[0, 0.0].iterations] == [0] * 8
    assert max(i.most_stale for i in runs[1, 0.0].iterations) == 1


def test_one_step_behind_the_slower_pool_sets_the_pace() -> None:
    """With rows alike and no `stream`: the longer of generation and resharding, and of all that the other pool does,
    with the copy of its weights."""
    text = STALE.read_text(encoding="utf-8").replace("actor.generate -> actor.infer { stream = 32 }", "")
    for middle in (100, 1000, 4000):
        plans = [compile("stale.rlg", text=text, sets={"staleness": str(k), "share": "0"}) for k in (0, 1)]
        turns, beside = (simulate(p, iterations=6, lengths=f"fixed({middle})") for p in plans)
        last = [s for s in turns.spans if s.iteration == 5]
        generation, other = ([s for s in last if s.pool == p.name] for p in turns.plan.pools)
        seconds = [
            max(s.end for s in some) - min(s.begin for s in some)
            for some in (generation, [s for s in other if s.name != "reshard"])
        ]
        seconds[1] += costs.publish(plans[1], plans[1].reshards[0]).value
        around = costs.iteration_overhead(plans[1]).value
        assert beside.iterations[-1].seconds == pytest.approx(max(seconds) + around, rel=1e-6)


def test_what_is_whole_beyond_what_an_iteration_takes_is_not_generated_again() -> None:
    """Rows that are all as long as they may get: all are whole at once, after as many stretches."""
    one_group = "layout actor.generate { tp = 4, pp = 2 }\n  data source"
    text = STALE.read_text(encoding="utf-8").replace("data source", one_group, 1)
    plan = compile("stale.rlg", text=text, sets={"staleness": "0", "share": "0.5"})
    found = simulate(plan, iterations=3, lengths="fixed(8192)")
    spans = [s for s in found.spans if s.name == "actor.generate" and s.lane == 0]
    assert [len([s for s in spans if s.iteration == i]) for i in range(3)] == [LOOKS] * 3
    first, *others = (sum(s.end - s.begin for s in spans if s.iteration == i) for i in range(3))
    assert all(other < 0.8 * first for other in others)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_row_is_older_than_the_edge_allows(staleness: int) -> None:
    # A slow update: the generation is as far ahead as it may be.
    found = simulate(stale(staleness, 0.0), iterations=8, lengths="fixed(16)", function_seconds={"host.reward": 0.5})
    assert found.iterations[-1].most_stale == staleness
    assert all(i.most_stale <= min(staleness, i.number) for i in found.iterations)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("cuts", [1, 3])
def test_rows_that_are_cut_reach_the_age_that_the_plan_states(staleness: int, cuts: int) -> None:
    """The plan's bound counts `staleness` and `cuts`; long responses reach it and never exceed it."""
    text = STALE.read_text(encoding="utf-8").replace("partial = share", f"partial = share, cuts = {cuts}")
    plan = compile("stale.rlg", text=text, sets={"staleness": str(staleness), "share": "1"})
    assert row_age_bound(plan) == staleness + cuts
    assert (f"rows at most {staleness + cuts}" in plan_text(plan)) == bool(staleness)
    assert f"rows are at most {staleness + cuts} version" in plan_text(plan)
    long_tail = {"lengths": "lognormal(600, 1.8)", "function_seconds": {"host.reward": 30.0}}
    oldest = max(i.most_stale for i in simulate(plan, iterations=24, **long_tail).iterations)
    assert staleness < oldest <= staleness + cuts


def test_warehouses_keep_rows_of_all_iterations_under_way() -> None:
    rows = [
        next(m.items["rows"] for m in stale(k, 1).memory if (m.place, m.phase) == ("host", "update")) for k in (0, 3)
    ]
    assert rows[1] == pytest.approx(4 * rows[0], rel=1e-6)


# What is drawn.


@pytest.mark.parametrize(
    ("text", "middle", "average"),
    [
        ("fixed(7)", 7, 7),
        ("uniform(10, 30)", 20, 20),
        ("normal(50, 5)", 50, 50),
        ("lognormal(100, 0.5)", 100, 113.3),
        ("geometric(40)", 28, 40),
        ("geometric(1)", 1, 1),
    ],
)
def test_distributions(text: str, middle: float, average: float) -> None:
    found = distribution(text, "--lengths")
    values = [found.value_at((i + 0.5) / 20_000) for i in range(20_000)]
    assert values == sorted(values)
    assert median(values) == pytest.approx(middle, rel=0.02)
    assert mean(values) == pytest.approx(average, rel=0.02)
    assert str(found) == text


def test_draws_are_keyed_by_row_and_clipped_to_the_bound() -> None:
    plan = PLANS["colocated"]()
    draws = RowSampler(plan, read_specs(plan, ["lognormal(300, 2)"], "", {}, 5))
    assert draws.tokens("response", 3) == draws.tokens("response", 3) != draws.tokens("response", 4)
    assert {min(draws.tokens("response", i)) >= 1 for i in range(50)} == {True}
    assert max(n for i in range(50) for n in draws.tokens("response", i)) == 512
    assert 0 < to_unit_interval(0) < to_unit_interval(2**64 - 1) < 1
    assert set(INVERSES) == {"fixed", "uniform", "normal", "lognormal", "geometric"}


def test_a_file_of_lengths_reproduces_them(tmp_path: Path) -> None:
    plan = PLANS["waves"]()
    path = tmp_path / "lengths.jsonl"
    drawn = simulate(plan, iterations=3, lengths=["lognormal(150, 1)", "prompt=uniform(10, 100)"], seed=4)
    rows = [json.dumps([n["prompt"][r // 4], n["response"][r]]) for n in drawn.lengths for r in range(32)]
    path.write_text("\n".join(rows), encoding="utf-8")
    again = simulate(plan, iterations=6, lengths=str(path))
    assert again.iterations[:3] == drawn.iterations
    # After the last it begins again.
    assert again.lengths[3:] == again.lengths[:3]


def test_metrics_of_a_run_give_means(tmp_path: Path) -> None:
    lines = [
        {"evaluation": "test", "reward": 0.5},
        *(
            {"iteration": i, "response_length": n, "prompt_tokens": 32.0 * 20, "response_tokens": 32.0 * n}
            for i, n in enumerate((50, 60.4))
        ),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = simulate(PLANS["colocated"](), iterations=2, lengths=str(tmp_path))
    assert [set(n["response"]) for n in found.lengths] == [{50}, {60}]
    assert [set(n["prompt"]) for n in found.lengths] == [{20}, {20}]


NO_SHARE = "is not a share of the devices and a factor of slowness; write `1% x3`"
NO_FILE = "no such file or directory; name a file or a distribution: fixed, uniform, normal, lognormal, geometric"


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        (
            "lengths",
            "lognorm(6, 1)",
            "`lengths=lognorm(6, 1)`: unknown distribution `lognorm`; did you mean `lognormal`?",
        ),
        ("lengths", "normal(600)", "`lengths=normal(600)`: `normal` takes mean and std; write `normal(mean, std)`"),
        (
            "lengths",
            "uniform(9, 3)",
            "`lengths=uniform(9, 3)`: the least is above the most; write `uniform(least, most)`",
        ),
        (
            "lengths",
            "resp=fixed(6)",
            "`lengths=resp=fixed(6)`: there is no token column `resp`; did you mean `response`?",
        ),
        ("lengths", "nowhere.jsonl", f"cannot read the lengths nowhere.jsonl: {NO_FILE}"),
        ("stragglers", "some", f"`stragglers=some` {NO_SHARE}"),
        ("stragglers", "1% x0.5", f"`stragglers=1% x0.5` {NO_SHARE}"),
        (
            "function_seconds",
            {"host.rewrd": 1},
            (
                "`function_seconds={'host.rewrd': '1'}`: there is no function node `host.rewrd`; did you mean "
                "`host.reward`?"
            ),
        ),
        (
            "function_seconds",
            {"host.reward": "fast"},
            (
                "`function_seconds={'host.reward': 'fast'}` is not a number of seconds per row; write "
                "`host.reward=0.05` or a distribution of seconds"
            ),
        ),
    ],
)
def test_what_cannot_be_read_is_told(option: str, value: object, told: str) -> None:
    with pytest.raises(Fault) as error:
        simulate(PLANS["colocated"](), **{option: value})  # type: ignore[arg-type]
    (found,) = error.value.diagnostics
    assert f"{found.message}; {found.help}" == told


@pytest.mark.parametrize("line", ["[1, 2, 3]", '"long"', "-4", "true", '{"iteration": 3}'])
def test_a_file_that_holds_no_lengths_is_told(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(f"12\n{line}\n", encoding="utf-8")
    with pytest.raises(Fault) as error:
        simulate(PLANS["colocated"](), lengths=str(path))
    assert error.value.diagnostics[0].message == f"the file {path} does not contain lengths"


# What is shown.


def test_text(golden: Callable[[str, str], None]) -> None:
    found = simulate(
        stale(2, 0.5),
        iterations=6,
        lengths=["lognormal(1200, 1)", "prompt=uniform(50, 600)"],
        stragglers="10% x2",
        function_seconds={"host.reward": "lognormal(0.05, 1)"},
    )
    golden("stale.simulation.txt", simulation_text(found))


def test_what_filters_drop_is_not_known() -> None:
    mine = "node host.pick(reward) {{ keep = reward > 0 }} host.reward -> host.pick -> actor.update"
    text = SMALL.replace("cluster", f"algorithm mine extends grpo {{{{ {mine} }}}}\ncluster", 1)
    plan = small(text=text.replace("deploy grpo", "deploy mine"))
    said = "rows that filters drop count as kept, and the rounds of a refill are not counted: host.pick"
    assert said in simulation_text(simulate(plan, iterations=1)) and said in [n.text for n in plan.notes]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for plan in (stale(1, 0.5), PLANS["colocated"]()):
        assert max(map(len, simulation_text(simulate(plan, iterations=2), width).split("\n"))) <= width


def test_shares_of_a_pools_time_add_up() -> None:
    found = simulate(stale(2, 0.5), iterations=4, lengths="lognormal(1200, 1)", stragglers="10% x2")
    for pool in found.sizes:
        assert sum(w.share for w in found.work if w.pool == pool) + found.idle(pool) == pytest.approx(1)
        # A device does one thing at a time.
        lanes = {s.lane for s in found.spans if s.pool == pool and s.name != "reshard"}
        for lane in lanes:
            own = sorted((s.begin, s.end) for s in found.spans if (s.pool, s.lane) == (pool, lane))
            assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(own))


def test_the_same_bytes_in_any_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(STALE), "--simulate", "3", "--lengths", "lognormal(900, 1)", "--stragglers", "20% x2", "--trace"]
    assert compile_main([*arguments, str(tmp_path / "a.json")]) == 0
    own = capsys.readouterr().out
    command = [sys.executable, "-m", "msrl_graph.cli", *arguments, str(tmp_path / "b.json")]
    other = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "7"}, timeout=120
    )
    assert other.stdout == own
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    trace = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert {e["name"] for e in trace if e["ph"] == "X"} == {
        "actor.generate",
        "actor.infer",
        "actor.update",
        "reshard",
        "host.reward",
        "host.advantage",
    }
    assert all(e["dur"] > 0 and e["args"]["iteration"] in range(3) for e in trace if e["ph"] == "X")


def test_flags_that_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, told in (
        (["--lengths", "fixed(3)"], "`--lengths` goes with `--simulate N`"),
        (["--simulate", "2", "--check"], "leave out `--check`"),
        (["--simulate", "0"], "a whole number of 1 or more"),
        (["--simulate", "2", "--function", "host.reward"], "`--function` takes NAME=SECONDS"),
    ):
        with pytest.raises(SystemExit) as ended:
            compile_main([str(STALE), *wrong])
        assert ended.value.code == 2
        assert told in capsys.readouterr().err
    assert compile_main([str(STALE), "--simulate", "2", "--lengths", "fixd(3)"]) == 1
    assert "error[bad-value]: `--lengths fixd(3)`" in capsys.readouterr().err
    assert compile_main([str(STALE), "--simulate", "2", "--format", "json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert len(figures["iterations"]) == 2
    assert figures["path"][-1] == "actor.update"
    assert compile_main([str(STALE), "--simulate", "1", "--trace", str(tmp_path)]) == 1
    assert f"cannot write `{tmp_path}`: is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "workers", "calls"),
    [
        ("def f(response, answer): return 0.0", 1, 1),
        ("def f(response, answer): return 0.0", 4, 4),
        ("async def f(response, answer): return 0.0", 1, 16),
        ("from msrl_graph import function\n@function(parallel=False)\ndef f(response, answer): return 0.0", 4, 1),
    ],
)
def test_calls_of_functions_that_are_made_at_once_take_so_much_less(
    source: str, workers: int, calls: int, tmp_path: Path
) -> None:
    """16 rows a host, of 100 s each, beside which others take next to nothing."""
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    mine = 'algorithm mine extends grpo { node host.reward(response, answer) -> reward { call = "mine.py:f" } }'
    more = f"run {{ function_workers = {workers} }}"
    text = SMALL.format(nodes=2, prompts=8, group=4, more=more).replace("deploy grpo on", "deploy mine on")
    (tmp_path / "p.rlg").write_text(text.replace("import grpo", f"import grpo\n{mine}"), encoding="utf-8")
    plan = compile(tmp_path / "p.rlg")
    found = simulate(plan, iterations=1, function_seconds={"host.reward": 100.0}).iterations[0]
    without = simulate(plan, iterations=1, function_seconds={"host.reward": 0.0}).iterations[0]
    assert found.end - without.end == pytest.approx(1600 / calls, rel=0.02)
