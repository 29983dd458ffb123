"""KV caches have what memory leaves: room for one sequence is enough, for all is the most; less never gains time."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from folders import ROOT
from hypothesis import given
from hypothesis import strategies as st
from sample import examples

from msrl_graph import Fault, compile
from msrl_graph.backends import ENGINES
from msrl_graph.cost import groups, holdings
from msrl_graph.cost.kv_cache import KvCache
from msrl_graph.ir.graph import Value
from msrl_graph.ir.plan import PhaseMemory, Placement, Plan
from msrl_graph.passes.estimate import EstimateTime
from msrl_graph.planner.place import PlaceNodes

TEXT = """
import grpo
cluster pod { device = "DEVICE", nodes = 1, devices_per_node = COUNT }
deploy grpo on pod {
  model policy = "MODEL"
  data source = "data.jsonl"
  set prompts = PROMPTS
  set group = GROUP
  set prompt_len = 2048
  set response_len = RESPONSE
  MORE
}
"""
WORDS = {"DEVICE": "h100", "COUNT": 8, "MODEL": "qwen2.5-7b", "PROMPTS": 64, "GROUP": 16, "RESPONSE": 8192, "MORE": ""}
NODE = "actor.generate"
ALONE = f"layout {NODE} {{ tp = 1 }}"
APART = "apart actor.generate, actor.update, reference"
pytestmark = pytest.mark.filterwarnings("ignore::msrl_graph.diagnostics.ProgramWarning")  # there are no data


def planned(**words: object) -> Plan:
    text = TEXT
    for word, value in (WORDS | words).items():
        text = text.replace(word, str(value))
    return compile("cache.rlg", text=text)


def generating(plan: Plan) -> PhaseMemory:
    return next(phase for phase in plan.memory if phase.place == "device" and phase.phase == "generate")


def cache_of(plan: Plan) -> KvCache:
    return KvCache(plan, ENGINES, NODE)


# What others publish


@pytest.mark.parametrize(
    ("model", "count", "group", "response", "layers", "heads"),
    [
        ("deepseek-r1-distill-qwen-1.5b", 1, 16, 262_144, 28, 2),
        ("qwen3-30b-a3b", 8, 32, 40_960, 48, 4),
    ],
)
def test_long_responses_of_large_groups_fit(
    model: str, count: int, group: int, response: int, layers: int, heads: int
) -> None:
    plan = planned(MODEL=model, COUNT=count, GROUP=group, RESPONSE=response)
    layout = plan.placement(NODE).layout
    phase = generating(plan)
    assert all(entry.total <= entry.capacity.value for entry in plan.memory)
    # Blocks of 128 tokens, and one for vLLM itself.
    tokens = -(-(2048 + response) // 128) * 128
    share = max(1, heads // layout.tp) * -(-layers // layout.pp)
    by_token = share * 2 * 128 * 2
    assert phase.items["KV cache"] == plan.placement(NODE).cache_bytes
    held = (phase.items["KV cache"] / by_token - 128) / tokens
    cache = cache_of(plan)
    assert 1 <= held < cache.at_once and held == pytest.approx(cache.count_sequences(2048 + response))
    assert f"{int(held)} with the longest; if it is full, sequences are preempted" in phase.remark
    # All that is left.
    used = phase.total - phase.items.get(groups.BUFFERS, 0)
    assert used == int(0.9 * phase.capacity.value)
    assert held * tokens * by_token > 1e10


def test_all_sequences_are_the_most() -> None:
    plan = planned(PROMPTS=8)
    placement = plan.placement(NODE)
    cache = cache_of(plan)
    assert placement.sequences == cache.sequences == cache.at_once == 8 * 16 // placement.layout.dp
    assert cache.count_sequences(cache.bound) == pytest.approx(cache.sequences) and not cache.is_full
    assert generating(plan).total < 0.9 * generating(plan).capacity.value
    assert cache.preempted_share(cache.sequences, 2048, 8192) == 0


@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_a_stated_micro_batch_limits_the_prompts_at_one_time(engine: str) -> None:
    two, many = (
        planned(MORE=f"{ALONE}\n  engine {NODE} = {engine} {{ micro_batch = {number} }}") for number in (2, 1000)
    )
    assert two.placement(NODE).engine.options["micro_batch"] == 2
    assert cache_of(two).at_once == two.placement(NODE).sequences == 32
    assert cache_of(two).slots == 32 and sum(cache_of(two).waves().values()) == 4
    assert cache_of(many).sequences == 128 >= cache_of(many).at_once >= 32


def test_an_engine_that_does_not_preempt_has_room_for_each_sequence_that_it_begins() -> None:
    """Not for all responses to a prompt: fewer are enough, and one is."""
    numbers = []
    for part in (0.3, 0.34, 0.5, 0.7):
        more = f"{ALONE}\n  engine {NODE} = hf {{ memory = {part} }}\n  {APART}"
        plan = planned(COUNT=16, GROUP=64, RESPONSE=32768, MORE=more)
        cache = cache_of(plan)
        assert not plan.placement(NODE).cache_bytes and cache.running(2048, 32768) == float("inf")
        numbers.append(cache.at_once)
        assert generating(plan).items["KV cache"] == cache.at_once * 28 * 2 * 4 * 128 * 2 * (2048 + 32768 - 1)
    assert numbers == sorted(numbers) and numbers[0] < 16 < numbers[-1]


# What does not fit

TIGHT = {"COUNT": 16, "MODEL": "qwen2.5-32b", "RESPONSE": 65536, "PROMPTS": 64}
TIGHT["MORE"] = f"""layout {NODE} {{ tp = 1 }}
  engine actor.update = megatron {{ recompute = full, offload = all }}
  apart {NODE}, actor.update"""


def test_no_room_for_one_sequence_is_refused_with_what_fits() -> None:
    with pytest.raises(Fault) as refused:
        planned(**TIGHT)
    (found,) = refused.value.diagnostics
    assert found.code == "out-of-memory" and found.span.line == 11
    assert (
        "the KV cache of one sequence of 2,048 + 65,536 tokens is 17.8 GB, and 13.9 GB are left for it" in found.message
    )
    layout = re.search(r"the nearest layout that fits: `(.*)`", found.help)
    longest = re.search(r"a shorter response fits: `max_tokens = (\d+)` in `actor.generate`", found.help)
    assert layout and longest
    other = planned(**{**TIGHT, "MORE": str(TIGHT["MORE"]).replace(f"layout {NODE} {{ tp = 1 }}", layout[1])})
    assert other.placement(NODE).layout.tp == 2

    def shorten(tokens: int) -> Plan:
        grpo = (ROOT / "msrl_graph" / "algorithms" / "grpo.rlg").read_text(encoding="utf-8")
        program = grpo.replace("samples = group", f"samples = group, max_tokens = {tokens}")
        assert "max_tokens" in program
        text = TEXT.replace("import grpo", program)
        for word, value in (WORDS | TIGHT).items():
            text = text.replace(word, str(value))
        return compile("cache.rlg", text=text)

    fitting = shorten(int(longest[1]))
    assert 1 <= cache_of(fitting).count_sequences(2048 + int(longest[1])) < 2
    with pytest.raises(Fault):
        shorten(int(longest[1]) + 1024)


# Never less for less

MODELS = {
    "full attention": ("qwen2.5-7b", ""),
    "stages": ("qwen2.5-7b", f"layout {NODE} {{ pp = 2 }}"),
    "windows": ("gemma3-12b", ""),
    "experts": ("qwen3-30b-a3b", f"layout {NODE} {{ tp = 4 }}"),
    "states": ("qwen3.5-4b", ""),
}


def placed(plan: Plan, placement: Placement) -> Plan:
    others = (other for other in plan.placements if other.node != NODE)
    return replace(plan, placements=(placement, *others))


@cache
def beginning(case: str, response: int) -> Plan:
    model, more = MODELS[case]
    if "layout" not in more:
        more += f" layout {NODE} {{ tp = 2 }}"
    more += f"\n  engine {NODE} = vllm\n  {APART}"
    return planned(COUNT=24, MODEL=model, RESPONSE=response, MORE=more)


@pytest.mark.parametrize("case", MODELS)
@given(
    memory=st.lists(st.integers(15, 95), min_size=2, max_size=4, unique=True),
    response=st.sampled_from([4096, 65536]),
    micro_batch=st.sampled_from([None, 1, 5]),
)
@examples(12)
def test_seconds_never_fall_when_the_cache_shrinks(
    case: str, memory: list[int], response: int, micro_batch: int | None
) -> None:
    plan = beginning(case, response)
    found = []
    for part in sorted(memory):
        options: dict[str, Value] = {"memory": part / 100} | ({"micro_batch": micro_batch} if micro_batch else {})
        placement = holdings.with_options(plan.placement(NODE), options)
        placement = PlaceNodes(ENGINES).complete(placed(plan, placement), placement)
        one = placed(plan, placement)
        seconds, _ = EstimateTime(ENGINES).of_node(one, NODE)
        found.append((placement.cache_bytes, placement.sequences, seconds.value))
        assert cache_of(one).count_sequences(2048 + response) > 0.999
    for (less, few, slow), (more, many, fast) in pairwise(found):
        assert less <= more and few <= many
        assert fast <= slow * (1 + 1e-9)


def test_what_a_generation_keeps_leaves_room_for_others() -> None:
    """It gives nothing back until it fetches the next weights."""
    more = f"""place {NODE}, reference on nodes 0..0
  place actor.update on nodes 1
  layout {NODE} {{ tp = 2 }} engine {NODE} = vllm"""
    text = (
        TEXT.replace("nodes = 1,", "nodes = 2,").replace("import grpo", EVERY).replace("deploy grpo", "deploy seldom")
    )
    for word, value in (WORDS | {"PROMPTS": 512, "RESPONSE": 32768, "MORE": more}).items():
        text = text.replace(word, str(value))
    plan = compile("kept.rlg", text=text)
    kept = {item: size for phase in plan.memory for item, size in phase.items.items() if item.endswith(holdings.KEPT)}
    assert kept[f"{NODE} cache, kept"] >= plan.placement(NODE).cache_bytes > 1e10
    assert all(phase.total <= phase.capacity.value for phase in plan.memory)


EVERY = """import grpo
algorithm seldom extends grpo { drop actor.update => actor.generate
  actor.update => actor.generate { every = 2, staleness = 2 } }"""
