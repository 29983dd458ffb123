"""What dividing a state costs, against textbook figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import page
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrl_graph.backends import ENGINES
from msrl_graph.cost.collectives import Collectives
from msrl_graph.cost.lengths import Rows
from msrl_graph.cost.time import Costs
from msrl_graph.hardware.cluster import SHARES, ClusterSpec, Figure
from msrl_graph.hardware.device_presets import DEVICES
from msrl_graph.ir.plan import EngineChoice, Placement
from msrl_graph.model.models import load
from msrl_graph.sharding.layout import Layout

POD = ClusterSpec("pod", replace(DEVICES["h100"], latency=Figure(0.0, "assumed")), 2, 8, Figure(1e9, "stated"))
NEAR = 450e9 * SHARES["device_link"].value
FAR = 50e9 * SHARES["fabric"].value


def of(layout: Layout, model: str = "llama3-8b", first: int = 0, cluster: ClusterSpec = POD) -> Collectives:
    placement = Placement("n", "devices", layout, first, EngineChoice("megatron"), "")
    return Collectives(cluster, placement, load(model, Path()), ENGINES["megatron"], "bf16")


@pytest.mark.parametrize(
    ("layout", "near"),
    [
        (Layout(tp=8, dp=2), {"tp": True, "dp": False}),
        (Layout(tp=4, cp=2, dp=2), {"tp": True, "cp": True, "dp": False}),
        (Layout(tp=4, pp=2, dp=2), {"tp": True, "dp": True, "pp": False}),
        (Layout(tp=16), {"tp": False}),
        (Layout(tp=2, dp=8, ep=4, etp=2), {"ep": True, "edp": False}),
        (Layout(tp=3, dp=5), {"tp": False}),
        (Layout(tp=2, dp=4), {"dp": True}),  # 8 devices of one host
    ],
)
def test_which_groups_lie_on_one_host(layout: Layout, near: dict[str, bool]) -> None:
    assert {axis: of(layout).is_on_one_host(axis) for axis in near} == near  # type: ignore[arg-type]
    if layout.devices == 8:
        assert not of(layout, first=4).is_on_one_host("dp")


def test_a_group_on_a_mesh_uses_the_links_between_its_ranks() -> None:
    host = ClusterSpec("host", replace(DEVICES["ascend-910b"], latency=Figure(0.0, "assumed")), 1, 8, POD.network)
    assert host.device.device_link.value == 7 * 28e9
    for ranks in (2, 4, 8):
        found = of(Layout(tp=ranks, dp=8 // ranks), cluster=host).seconds("all_gather", "tp", 1e9)
        assert found.value == pytest.approx(1e9 / ((ranks - 1) * 28e9 * SHARES["device_link"].value))
    for ranks in (2, 8):  # a switch gives each device its whole bandwidth
        found = of(Layout(tp=ranks, dp=16 // ranks)).seconds("all_gather", "tp", 1e9)
        assert found.value == pytest.approx(1e9 / NEAR)


def test_tensor_parallelism_sums_hidden_states() -> None:
    # Megatron (arXiv:1909.08053): two all-reduces a layer forward, two backward, 2 (tp - 1) / tp x tokens x hidden
    # each.
    model = load("llama3-8b", Path())
    hidden = 1000 * model.hidden * 2 * 2 * 7 / 8
    # The head: four numbers of a token are reduced, and the gradients of its states.
    numbers = 10 * 4 * 4 * 2 * 7 / 8
    forward = of(Layout(tp=8, dp=2)).tensor_parallel(1000, 10).value
    assert forward == pytest.approx(((1 + 2 * model.layers) * hidden + numbers) / NEAR)
    both = of(Layout(tp=8, dp=2)).tensor_parallel(1000, 10, backward=True).value
    states = 10 * model.hidden * 2 * 2 * 7 / 8
    assert both - forward == pytest.approx((2 * model.layers * hidden + states) / NEAR)
    # To draw tokens, each rank needs all logits, and the tokens.
    logits = 10 * model.vocabulary * 2 * 7 / 8
    drawn = of(Layout(tp=8, dp=2)).tensor_parallel(1000, 10, drawn=True).value
    assert drawn > forward + (logits - numbers) / NEAR
    assert of(Layout(tp=16)).tensor_parallel(1000, 10).value > 5 * forward


def test_gradients_go_round_all_replicas() -> None:
    model = load("llama3-8b", Path())
    whole = model.parameters * 4  # in float32
    found = of(Layout(dp=16, zero=0)).exchange()
    assert found.value == pytest.approx(2 * whole * 15 / 16 / FAR)
    assert of(Layout()).exchange().value == 0
    # Scattered as they are summed, then the weights gathered, in bf16.
    divided = of(Layout(dp=16, zero=1)).exchange()
    assert divided.value == pytest.approx(model.parameters * (4 + 2) * 15 / 16 / FAR)
    # Two stages hold about half each; their replicas are on one host.
    halves = of(Layout(pp=2, dp=8, zero=0)).exchange().value
    assert halves == pytest.approx(2 * whole / 2 * 7 / 8 / NEAR, rel=0.01)


def test_experts_gradients_go_round_their_own_replicas() -> None:
    model = load("qwen3-30b-a3b", Path())
    experts = sum(t.elements for t in model.tensors if t.experts) * 4 / 8
    dense = sum(t.elements for t in model.tensors if not t.experts) * 4
    found = of(Layout(dp=16, ep=8, zero=0), "qwen3-30b-a3b")
    assert not found.is_on_one_host("edp")
    assert found.exchange().value == pytest.approx(2 * dense * 15 / 16 / FAR + 2 * experts * 1 / 2 / FAR)


def test_tokens_go_to_their_experts_and_back() -> None:
    model = load("qwen3-30b-a3b", Path())
    each = 1000 * 8 * model.hidden * 2 * 7 / 8
    assert of(Layout(dp=16, ep=8), "qwen3-30b-a3b").experts(1000, 1).value == pytest.approx(
        2 * each * model.layers / NEAR
    )
    assert of(Layout(dp=16, ep=8), "qwen3-30b-a3b").experts(1000, 3).value == pytest.approx(
        6 * each * model.layers / NEAR
    )
    assert of(Layout(dp=16), "qwen3-30b-a3b").experts(1000, 1).value == 0


def test_parts_of_experts_are_handed_what_arrives() -> None:
    """Megatron's dispatcher sends a rank's own tokens over ep, and what arrives to all of etp; within vLLM's tp nothing
    travels but the sum that ends a layer."""
    model = load("qwen3-30b-a3b", Path())
    layout = Layout(tp=2, dp=4, ep=4, etp=2)
    each = 1000 / 2 * 8 * model.hidden * 2 * model.layers
    found = of(layout, "qwen3-30b-a3b").experts(1000, 1).value
    assert found == pytest.approx(2 * each * 3 / 4 / NEAR + 2 * each / NEAR)
    for within in (Layout(tp=8, etp=8), Layout(tp=8, ep=8)):
        assert replace(of(within, "qwen3-30b-a3b"), spec=ENGINES["vllm"]).experts(1000, 1).value == 0


def test_a_ring_passes_keys_and_values_on() -> None:
    model = load("llama3-8b", Path())
    received = 3 / 4 * 8000 * 2 * model.mixer.kv_heads * model.mixer.head_dim * 2 * model.layers
    assert of(Layout(cp=4, dp=4)).context(8000, 1).value == pytest.approx(received / NEAR)
    heads = 3 / 4 * 2000 * 2 * model.query_key_size * 2
    assert of(Layout(cp=4, dp=4, cp_kind="ulysses")).context(8000, 1).value == pytest.approx(heads / NEAR)


def test_a_pipeline_fills_and_drains() -> None:
    """(pp - 1) / (vpp x micro-batches) more, arXiv:2104.04473, equations of section 2.2."""

    def seconds(layout: Layout, micro_batch: int) -> tuple[float, Costs]:
        engine = EngineChoice("megatron", {"micro_batch": micro_batch})
        layouts = {"actor.update": layout, "actor.generate": Layout(tp=4, dp=4)}
        plan = page.plan(page.start(layouts=layouts, engines={"actor.update": engine}))
        state = Costs(plan, ENGINES, "actor.update")
        return state.micro_batch(Rows.equal_rows(micro_batch, 100, 100)).value, state

    plain, state = seconds(Layout(tp=4, pp=4, dp=1), 1)
    number = state.batches.steps * state.batches.count_in_step()
    assert number == 4096
    bubbles, _ = seconds(Layout(tp=4, pp=4, dp=1), 1024)
    assert state._bubble_factor(number) == pytest.approx(1 + 3 / number)
    few, many = (
        interleaved._bubble_factor(interleaved.batches.count_in_step())
        for interleaved in (seconds(Layout(tp=4, pp=4, dp=1, vpp=v), 1024)[1] for v in (1, 4))
    )
    assert (few, many) == (1 + 3 / 4, 1 + 3 / 16)
    assert bubbles > 1024 * plain
    # 64 layers as 13, 17, 17, 17: the slowest stage has a 17/16 of the mean.
    uneven, _ = seconds(Layout(tp=4, pp=4, dp=1, stages=(13, 17, 17, 17)), 1)
    assert uneven / plain == pytest.approx(17 / 16)


@given(
    st.sampled_from(["llama3-8b", "qwen3-30b-a3b", "deepseek-r1-671b"]), st.integers(1, 10_000), st.integers(0, 1000)
)
def test_more_tokens_never_take_less(model: str, tokens: int, more: int) -> None:
    found = of(Layout(tp=4, pp=2, dp=2, **({} if model == "llama3-8b" else {"ep": 4})), model)
    for cost in (found.experts, found.context):
        assert cost(tokens, 1).value <= cost(tokens + more, 1).value
    assert 0 < found.tensor_parallel(tokens, 1).value <= found.tensor_parallel(tokens + more, 1).value


def test_decoding_reads_the_experts_that_are_touched() -> None:
    layouts = {"actor.update": Layout(tp=4, pp=4, dp=1, ep=4), "actor.generate": Layout(tp=2, dp=8, ep=16)}
    chosen = {"actor.update": EngineChoice("megatron"), "actor.generate": EngineChoice("vllm")}
    plan = page.plan(page.start(models={"policy": load("qwen3-30b-a3b", Path())}, layouts=layouts, engines=chosen))
    state = Costs(plan, ENGINES, "actor.generate")
    dense, routed = state.collectives.device_parameters
    # One sequence a group is 8 tokens over 16 expert ranks: each of 128 experts is missed by all with (1 - 8 / 128) **
    # 8.
    assert state._decode_weight_bytes(1) == pytest.approx(2 * (dense + routed * (1 - (1 - 8 / 128) ** 8)), rel=1e-3)
    assert state._decode_weight_bytes(10_000) == pytest.approx(state._weights)
