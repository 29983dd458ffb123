"""Generations with a full KV cache: each row is whole once, no more than fits is there, less room gains no time."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph import compile, simulate
from msrl_graph.backends import ENGINES
from msrl_graph.cost.kv_cache import KvCache
from msrl_graph.cost.time import Costs
from msrl_graph.ir.plan import Plan
from msrl_graph.simulation.generation import Sequence, generate

TEXT = """
import grpo
cluster pod {{ device = "h100", nodes = 1, devices_per_node = 12 }}
deploy grpo on pod {{
  model policy = "qwen2.5-7b"
  data source = "data.jsonl"
  set prompts = 64
  set prompt_len = 2048
  set response_len = 16384
  layout actor.generate {{ tp = 2, dp = 2 }}
  engine actor.generate = vllm {{ memory = {memory} }}
  apart actor.generate, actor.update, reference
}}
"""
NODE = "actor.generate"
pytestmark = pytest.mark.filterwarnings("ignore::msrl_graph.diagnostics.ProgramWarning")  # there are no data


@cache
def planned(memory: float) -> Plan:
    return compile("full.rlg", text=TEXT.format(memory=memory))


def simulated_seconds(plan: Plan, **more: str) -> float:
    work = next(work for work in simulate(plan, iterations=1, **more).work if work.name == NODE)  # type: ignore[arg-type]
    return work.most


@pytest.mark.parametrize("memory", [0.25, 0.4, 0.6, 0.9])
def test_the_estimate_is_near_the_simulation(memory: float) -> None:
    plan = planned(memory)
    assert KvCache(plan, ENGINES, NODE).is_full
    assert plan.estimate is not None
    estimate = next(phase.seconds.value for phase in plan.estimate.phases if phase.name == NODE)
    assert simulated_seconds(plan) == pytest.approx(estimate, rel=0.2)


@pytest.mark.parametrize("lengths", ["fixed(16384)", "lognormal(4000, 0.8)"])
def test_a_smaller_cache_takes_no_less(lengths: str) -> None:
    seconds = [simulated_seconds(planned(memory), lengths=lengths) for memory in (0.25, 0.4, 0.6, 0.9)]
    assert all(slow >= fast * 0.98 for slow, fast in pairwise(seconds)) and seconds[0] > 1.2 * seconds[-1]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 200)), min_size=1, max_size=12),
    slots=st.integers(1, 12),
    room=st.integers(1, 1500),
)
@examples(60)
def test_every_row_ends_once_and_no_more_than_fits_is_there(
    lengths: list[tuple[int, int]], slots: int, room: int
) -> None:
    costs = Costs(planned(0.9), ENGINES, NODE)
    rows = [Sequence(row, context, context, tokens) for row, (context, tokens) in enumerate(lengths)]
    free = generate(costs, rows, slots, True, 1.0, 0.0)
    found = generate(costs, rows, slots, True, 1.0, 0.0, room)
    assert found.ends.keys() == free.ends.keys() == {*range(len(rows))}
    assert all(begin <= end for begin, end, _ in found.stretches)
    assert found.end >= free.end * (1 - 1e-9) or len(rows) > slots
    if sum(context + tokens for context, tokens in lengths) <= room:
        assert found == free
    least = sorted(context for context, _ in lengths)
    for _, _, live in found.stretches:
        assert live <= slots and (live == 1 or sum(least[:live]) <= room)
