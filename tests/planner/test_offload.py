"""Where states are while others compute: what the planner chooses, and programs that fit by it."""

import pytest

from msrl_graph import compile
from msrl_graph.diagnostics import Fault

pytestmark = pytest.mark.filterwarnings("ignore::msrl_graph.diagnostics.ProgramWarning")  # the data is not there

SMALL = """import grpo
cluster four {{ device = "ascend-910c", nodes = 2, devices_per_node = 2, network = 25 GB/s,
  memory = {memory} GB, host_link = 50 GB/s }}
deploy grpo on four {{
  set prompts = 8
  set group = 4
  set prompt_len = 128
  set response_len = 512
  model policy = "qwen2.5-7b"
  data source = "deepscaler.jsonl" {{ prompt = "problem", answer = "answer" }}
  layout actor.update, reference.infer {{ dp = 4, zero = 3 }}
  layout actor.generate {{ dp = 4 }}
  engine actor.update = fsdp {{ micro_batch = 1, recompute = full, gradients = bf16{update} }}
  engine reference.infer = fsdp {{ micro_batch = 1, offload = weights }}
  engine actor.infer = fsdp {{ micro_batch = 1 }}
  engine actor.generate = vllm {{ micro_batch = 1 }}
}}
"""
# One micro-batch of 4,096 tokens on each of eight devices, experts on eight, nothing recomputed.
MIXTURE = """import grpo
cluster host {{ device = "h100", nodes = 1, devices_per_node = 8 }}
deploy grpo on host {{
  set prompts = 128
  set group = 8
  set prompt_len = 1024
  set response_len = 3072
  model policy = "qwen3-30b-a3b"
  data source = "deepscaler.jsonl" {{ prompt = "problem", answer = "answer" }}
  layout actor.update, reference.infer {{ dp = 8, ep = 8 }}
  layout actor.generate {{ tp = 4 }}
  engine actor.update = {engine} {{ micro_batch = 1, recompute = none{types} }}
  engine reference.infer = {engine} {{ micro_batch = 1, offload = weights }}
  engine actor.generate = vllm {{ micro_batch = 1 }}
}}
"""
BF16 = ", gradients = bf16, moments = bf16"


def small(memory, update=""):
    return compile("small.rlg", text=SMALL.format(memory=memory, update=update))


def offloaded(plan):
    chosen = {p.node: p.engine.options.get("offload") for p in plan.placements}
    return {node: value for node, value in chosen.items() if value not in (None, "none")}


def peaks(plan):
    return {m.phase: m.total for m in plan.memory if m.place == "device"}


def test_states_leave_as_a_whole_where_their_update_has_room_for_them():
    update = {"reference.infer": "weights"}
    assert offloaded(small(128)) == update
    kept = peaks(small(128))
    plan = small(38)
    assert kept["generate"] > 38e9 > kept["update"]
    assert offloaded(plan) == {**update, "actor.update": "phase", "actor.infer": "phase"}
    (note,) = [n.text for n in plan.notes if n.about == "offload"]
    assert "the optimizer states of actor.update (as a whole); otherwise generate needs" in note
    plan = small(34)  # less than the update needs with its states
    assert offloaded(plan) == {**update, "actor.update": "optimizer", "actor.infer": "optimizer"}
    assert max(peaks(plan).values()) <= 34e9


def test_a_stated_value_stays():
    assert offloaded(small(128, ", offload = phase"))["actor.update"] == "phase"
    with pytest.raises(Fault, match="out-of-memory"):
        small(34, ", offload = phase")


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_a_mixture_of_30b_trains_on_eight_devices_without_recomputation(engine):
    """Beside its activations, an update in bf16 needs 10 GB less, and 15 GB less where its states stay."""
    found = {}
    for types in ("", BF16):
        for memory, offload in (("400 GB", "none"), ("80 GB", "optimizer")):
            text = MIXTURE.format(engine=engine, types=f"{types}, offload = {offload}")
            plan = compile("mixture.rlg", text=text.replace('"h100"', f'"h100", memory = {memory}'))
            found[types, offload] = peaks(plan)
    assert max(found[BF16, "optimizer"].values()) <= 80e9
    saved = {how: found["", how]["update"] - found[BF16, how]["update"] for how in ("none", "optimizer")}
    assert saved == pytest.approx({"none": 25.6e9, "optimizer": 10.3e9}, rel=0.05)


CACHE = """import grpo
cluster pod {{ device = "ascend-910b", nodes = 2, devices_per_node = 8, memory = {memory} GB }}
deploy grpo on pod {{
  set prompts = 512
  set prompt_len = 2048
  set response_len = 8192
  model policy = "qwen3-32b"
  data source = "train.jsonl" {{ prompt = "problem", answer = "answer" }}
  layout actor.update {{ tp = 8 }}
  layout actor.generate {{ tp = 4 }}
  engine actor.update = megatron {{ {options} }}
}}
"""


def test_states_leave_where_a_generation_is_much_faster_with_their_memory():
    def plan(memory, options=""):
        return compile("cache.rlg", text=CACHE.format(memory=memory, options=options))

    kept = plan(64, "offload = none")
    chosen = plan(64)
    assert offloaded(kept) == {"reference.infer": "weights"}  # the update would not fit with them
    assert offloaded(chosen) == {"actor.update": "optimizer", "actor.infer": "optimizer"}
    (note,) = [n.text for n in chosen.notes if n.about == "offload"]
    assert "the optimizer states of actor.update; otherwise the nodes would take 4" in note
    seconds = [one.estimate.iteration_seconds.value for one in (chosen, kept)]
    assert seconds[0] * 1.1 < seconds[1]
    caches = [one.placement("actor.generate").cache_bytes for one in (chosen, kept)]
    assert caches[0] > 2 * caches[1]
    assert offloaded(plan(256)) == {}  # there the cache has room in any case
