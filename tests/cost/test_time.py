"""What pieces of an iteration cost: never less for more, and in keeping with each other."""

from __future__ import annotations

from dataclasses import replace

import page
import pytest
from hypothesis import given
from hypothesis import strategies as st
from place import EXAMPLE

from msrl_graph import compile
from msrl_graph.backends import ENGINES
from msrl_graph.cost.lengths import Rows
from msrl_graph.cost.operators import ForwardWork
from msrl_graph.cost.time import Costs
from msrl_graph.hardware.cluster import SHARES, Device
from msrl_graph.hardware.device_presets import DEVICES
from msrl_graph.ir.plan import EngineChoice, Plan

PLAN = page.plan(page.start(engines={"actor.update": EngineChoice("fsdp", {"recompute": "none"})}))
GENERATE, INFER, UPDATE = (Costs(PLAN, ENGINES, n) for n in ("actor.generate", "actor.infer", "actor.update"))
LENGTHS = st.lists(st.tuples(st.integers(1, 2048), st.integers(1, 8192)), min_size=1, max_size=20)


@given(LENGTHS, st.integers(0, 19), st.integers(1, 100))
def test_longer_rows_never_take_less(lengths: list[tuple[int, int]], which: int, more: int) -> None:
    which %= len(lengths)
    longer = [(p, r + more * (i == which)) for i, (p, r) in enumerate(lengths)]
    for state in (INFER, UPDATE):
        short, long = (state.micro_batch(Rows.from_lengths(x)).value for x in (lengths, longer))
        assert 0 < short < long
        assert state.micro_batch(Rows.from_lengths(lengths[:-1])).value < short


@given(st.lists(st.integers(1, 2048), min_size=1, max_size=20), st.integers(1, 100))
def test_more_prompts_never_prefill_in_less(lengths: list[int], more: int) -> None:
    seconds = GENERATE.prefill(lengths).value
    assert 0 < seconds < GENERATE.prefill([*lengths, more]).value
    assert seconds < GENERATE.prefill([lengths[0] + more, *lengths[1:]]).value


@given(st.integers(1, 4096), st.integers(1, 10**6), st.integers(0, 1000))
def test_a_step_of_more_sequences_never_takes_less(sequences: int, cached: int, more: int) -> None:
    step = GENERATE.decode_step(sequences, cached).value
    assert 0 < step <= GENERATE.decode_step(sequences + more, cached).value
    assert step <= GENERATE.decode_step(sequences, cached + more).value


@given(st.integers(1, 50), st.integers(1, 2048), st.integers(1, 8192))
def test_rows_alike_are_rows_of_their_lengths(count: int, prompt: int, response: int) -> None:
    assert Rows.equal_rows(count, prompt, response) == Rows.from_lengths([(prompt, response)] * count)


def test_an_update_is_three_forward_passes() -> None:
    rows = Rows.equal_rows(4, 2048, 8192)
    host = rows.count * PLAN.cluster.device.overheads.row.value
    forward, both = (state.micro_batch(rows).value - host for state in (INFER, UPDATE))
    forward_sums = INFER.collectives.tensor_parallel(rows.tokens, rows.response).value
    sums = UPDATE.collectives.tensor_parallel(rows.tokens, rows.response, backward=True).value
    assert both - sums == pytest.approx(3 * (forward - forward_sums), rel=0.01)


def test_a_loss_of_the_whole_mini_batch_takes_a_forward_pass_more() -> None:
    rows = Rows.equal_rows(4, 2048, 8192)

    def seconds(whole: bool, micro_batch: int) -> float:
        engines = {"actor.update": EngineChoice("fsdp", {"recompute": "none", "micro_batch": micro_batch})}
        plan = page.plan(page.start(engines=engines))
        nodes = tuple(replace(n, whole=whole and n.verb == "update") for n in plan.graph.nodes)
        plan = replace(plan, graph=replace(plan.graph, nodes=nodes))
        return Costs(plan, ENGINES, "actor.update").micro_batch(rows).value

    forward = INFER.micro_batch(rows).value - rows.count * PLAN.cluster.device.overheads.row.value
    assert seconds(True, 4) == pytest.approx(seconds(False, 4) + forward)
    assert seconds(True, 10**6) == seconds(False, 10**6)  # one micro-batch: its pass is the first


def test_attention_is_counted_once_and_grows_with_the_square() -> None:
    """Of one row alone, by hand: 2 x parameters x tokens, and 2 x tokens^2 x heads x size of a causal layer."""
    model = PLAN.model("actor.infer")
    rate = PLAN.cluster.device.flops["bf16"].value * 0.4 * INFER.group

    def flops(tokens: int) -> float:
        work = ForwardWork(tokens, tokens, 1, tokens, tokens**2, 0.0)
        return INFER._pass("infer", work).value * rate

    inside = model.parameters - model.vocabulary * model.hidden  # the embedding is looked up
    for tokens in (20_000, 200_000):  # so many that launching is hidden
        attention = 2 * model.layers * model.mixer.heads * model.mixer.head_dim * tokens**2
        assert flops(tokens) == pytest.approx(2 * inside * tokens + attention)


def test_one_data_parallel_group_exchanges_nothing() -> None:
    alone = page.plan(page.start(layouts={}))
    assert Costs(alone, ENGINES, "actor.infer").exchange().value == 0
    assert UPDATE.exchange().value > 0


def stated(device: str, **figures: str) -> Plan:
    """A small model on two hosts of a preset, some of its figures stated."""
    more = "".join(f", {name} = {figure}" for name, figure in figures.items())
    return compile(
        "p.rlg",
        text=f"""import grpo
cluster pod {{ device = "{device}", nodes = 2, devices_per_node = 4{more} }}
deploy grpo on pod {{
  set response_len = 1024
  model policy = "tiny"
  data source  = "rows.jsonl" {{ prompt = "p", answer = "a" }}
  layout actor.update   {{ tp = 2, dp = 4, zero = 3 }}
  layout actor.generate {{ tp = 1, dp = 8 }}
  run {{ iterations = 1 }}
}}
""",
    )


@pytest.mark.filterwarnings("ignore::msrl_graph.ProgramWarning")
@pytest.mark.parametrize("device", [d for d in DEVICES if d != "here"])
def test_a_stated_figure_counts_as_the_presets_same_figure(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSRL_HERE", "")
    preset = DEVICES[device]
    alone = stated(device)
    assert alone.estimate is not None
    known = {name: figure for name in SHARES if (figure := preset.figure(name))}
    assert {"memory_bandwidth", "device_link", "host_link", "flops_bf16"} <= known.keys()
    every = stated(
        device, **{name: f"{figure.value} {'FLOP' if 'flops' in name else 'B'}/s" for name, figure in known.items()}
    )
    assert every.estimate is not None
    assert [(p.name, p.seconds.value) for p in every.estimate.phases] == [
        (p.name, p.seconds.value) for p in alone.estimate.phases
    ]
    assert [s.seconds.value for r in every.reshards for s in r.steps] == [
        s.seconds.value for r in alone.reshards for s in r.steps
    ]


def test_all_presets_of_one_kind_of_figure_have_one_nature() -> None:
    """What no data sheet tells of the 910B is a peak, as its like of the 910C is: both decode as fast, where their
    figures are the same."""
    like = DEVICES["ascend-910b"]
    other = DEVICES["ascend-910c-die"]
    assert like.peaks == other.peaks
    assert like.rate("memory_bandwidth", 0).value == other.rate("memory_bandwidth", 0).value == 0.7 * 1.6e12
    assert (
        DEVICES["h100"].copies.value == 0.8 * 64e9 and like.copies.value == 50e9
    )  # a data sheet's, and one that the paper measured


@pytest.mark.parametrize("name", ["memory_bandwidth", "host_link", "device_link", "fabric", "flops_bf16"])
def test_no_second_counts_a_peak_whole(name: str) -> None:
    """Twice the peak at half the share is the same device: nothing reads the peak itself."""
    halved = {**SHARES, name: replace(SHARES[name], value=SHARES[name].value / 2)}

    def seconds(device: Device) -> list[float]:
        plan = page.plan(replace(page.start(), cluster=replace(page.CLUSTER, device=device)))
        assert plan.estimate is not None
        return [p.seconds.value for p in plan.estimate.phases]

    device = DEVICES["h100"]
    before = seconds(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("msrl_graph.hardware.cluster.SHARES", halved)
        if name.startswith("flops_"):
            twice = replace(device, flops={k: replace(f, value=2 * f.value) for k, f in device.flops.items()})
        else:
            twice = replace(device, **{name: replace(getattr(device, name), value=2 * getattr(device, name).value)})
        assert seconds(twice) == pytest.approx(before)
        assert seconds(replace(device)) != pytest.approx(before) or name == "fabric"


def _on_this_host(**engines: str) -> dict[str, Costs]:
    """The example's states on one rank of a host, by these engines."""
    chosen = "".join(f"\n  engine actor.{node} = {name}" for node, name in engines.items())
    text = (EXAMPLE / "one_rank.rlg").read_text().replace("  drop layout", f"{chosen}\n  drop layout")
    plan = compile(EXAMPLE / "one_rank.rlg", text=text)
    return {n: Costs(plan, ENGINES, f"actor.{n}") for n in ("generate", "infer", "update")}


def test_operators_of_megatron_and_vllm_count_on_a_host() -> None:
    """By operators a large engine takes about as much as a light one, or more; rows that are alike less than others."""
    light = _on_this_host(update="fsdp", generate="hf")
    large = _on_this_host(update="megatron", generate="vllm")
    rows = Rows.equal_rows(512, 6, 5, samples=8)
    twins = replace(rows, alike_response=1000, twins=200)
    for node in ("infer", "update"):
        assert large[node].micro_batch(rows).value > 0.95 * light[node].micro_batch(rows).value
        assert large[node].micro_batch(twins).value < large[node].micro_batch(rows).value
    generate = large["generate"]
    assert generate.decode_step(100, 1000).value < generate.decode_step(100, 1000, 10, 6).value
    assert generate.decode_step(100, 1000, 10, 32).value < generate.decode_step(100, 1000, 10, 31).value  # whole blocks
    assert light["generate"].decode_step(100, 1000) == light["generate"].decode_step(100, 1000, 10, 6)
