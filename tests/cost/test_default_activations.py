"""What engines without an account of their own hold, against sums done by hand."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph import compile
from msrl_graph.backends import ENGINES
from msrl_graph.cost import default_activations, holdings
from msrl_graph.cost.time import Costs
from msrl_graph.ir.workload import Recomputation, Workload, in_flight, micro_batches
from msrl_graph.model.models import load
from msrl_graph.sharding.layout import Layout

MEGATRON = ENGINES["megatron"]


def work(name, layout, rows=1, batches=8, **more):
    return Workload(load(name, Path()), layout, "bf16", rows, rows, 1024, 3072, batches=batches, **more)


def update(name, layout, **more):
    return default_activations.moments("update", work(name, layout, **more), MEGATRON)


def test_a_dense_layer_by_hand():
    """Llama 3 8B over tp 2: 4,096 tokens, 32 layers, in each 4 h + 2 a d + 2 k d + 4 f elements of 2 bytes, all of it
    divided."""
    (moment,) = update("llama3-8b", Layout(tp=2)).values()
    assert moment["activations"] == 4096 * 32 * 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336) // 2
    assert moment["logits"] == 3072 * 128256 // 2 * (2 + 4 + 4)
    (kept,) = update("llama3-8b", Layout(tp=2), recompute=Recomputation.of_option("full")).values()
    assert kept["activations"] == 4096 * 2 * (32 * 4096 + 4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336) // 2


def test_gradients_are_summed_in_float32():
    model = load("llama3-8b", Path())
    assert default_activations.gradients(work("llama3-8b", Layout()), MEGATRON) == 4 * model.parameters


def test_stages_keep_the_micro_batches_that_are_under_way():
    stages = update("llama3-8b", Layout(pp=4))
    kept = [m["activations"] for m in stages.values()]
    assert [k / kept[-1] for k in kept] == [4, 3, 2, 1]
    assert [bool(m["logits"]) for m in stages.values()] == [False, False, False, True]
    # As many chunks as Megatron warms up with, and one: 2 (4 - 0 - 1) + (2 - 1) 4 + 1 = 11 of half the layers.
    assert in_flight(work("llama3-8b", Layout(pp=4, vpp=2)), 0) == 11 / 2
    # No more than there are.
    assert in_flight(work("llama3-8b", Layout(pp=4), batches=2), 0) == 2
    assert in_flight(work("llama3-8b", Layout(pp=4, vpp=2), batches=2), 0) == 2


@given(st.integers(0, 200), st.integers(1, 64), st.integers(1, 8), st.integers(1, 4))
def test_interleaved_stages_take_micro_batches_as_many_at_a_time_as_there_are(rows, size, pp, vpp):
    number = micro_batches(rows, size, Layout(pp=pp, vpp=vpp if pp > 1 else 1))
    least = max(1, -(-rows // size))
    if pp == 1 or vpp == 1:
        assert number == least
    else:
        assert number % pp == 0 and least <= number < least + pp


INTERLEAVED = """import grpo
cluster pod { device = "h100", devices_per_node = 8 }
deploy grpo on pod {
  set prompts = 6
  set group   = 4
  model policy = "qwen2.5-7b"
  data source  = "train.jsonl" { prompt = "problem", answer = "answer" }
  engine actor.update = megatron { micro_batch = 5 }
  layout actor.update { tp = 2, pp = 4, vpp = 7 }
}"""


def test_a_program_with_interleaved_stages_is_planned_for_as_many():
    """24 rows by at most 5 make 5 micro-batches, and 8 are planned, of 3 rows; of the reference, whose micro-batch the
    plan chooses, a multiple of 4 too."""
    plan = compile("interleaved.rlg", text=INTERLEAVED)
    made = {n: holdings.work(plan, ENGINES, n) for n in ("actor.update", "actor.infer", "reference.infer")}
    assert (made["actor.update"].batches, made["actor.update"].rows) == (8, 3)
    assert all(w.batches % 4 == 0 and w.layout.vpp == 7 for w in made.values())
    assert Costs(plan, ENGINES, "actor.update").batches.count_in_step() == 8


def test_context_parallelism_divides_tokens():
    (one,), (two,) = (update("llama3-8b", Layout(cp=c)).values() for c in (1, 2))
    assert (two["activations"], two["logits"]) == (one["activations"] // 2, one["logits"] // 2)


@pytest.mark.parametrize(("tp", "etp"), [(1, 1), (4, 1), (4, 4)])
def test_experts_by_hand(tp, etp):
    """Qwen3 30B A3B: 48 layers, 8 of 128 experts of width 768 a token, hidden 2048, 32 heads and 4 key-value heads of
    128."""
    layout = Layout(tp=tp, ep=2 if etp == 1 else 1, dp=2, etp=etp)
    state = work("qwen3-30b-a3b", layout)
    attention = 4 * 2048 + 128 + 2 * 32 * 128 + 2 * 4 * 128
    routed = 8 * (2 * 2048 * etp + 4 * 768)
    assert default_activations.layer_elements(state, MEGATRON, state.model.stack[0]) == pytest.approx(
        (attention + routed) / tp, abs=1
    )


def test_latent_attention_by_hand():
    """DeepSeek-V3: the first three layers are dense; latents of 1536 and 512 + 64, 128 heads of 128 + 64 and 128."""
    state = work("deepseek-r1-671b", Layout(tp=8))
    attention = 4 * 7168 + 1536 + 512 + 64 + 128 * (2 * 192 + 2 * 128)
    dense, routed = (default_activations.layer_elements(state, MEGATRON, layer) for layer in state.model.stack)
    assert dense == pytest.approx((attention + 4 * 18432) / 8, abs=1)
    assert routed == pytest.approx((attention + 256 + 4 * 2048 + 8 * (2 * 7168 + 4 * 2048)) / 8, abs=1)
