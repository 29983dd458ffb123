"""Passes on the page's program: who is placed where, what leaves the device, in which order things run, and what they
take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import page
import pytest

from msrl_graph import compile
from msrl_graph.backends import ENGINES
from msrl_graph.backends.memory.sizes import LOGITS
from msrl_graph.checks import layout as layout_check
from msrl_graph.checks import memory as memory_check
from msrl_graph.checks import sharing as sharing_check
from msrl_graph.checks.stage import PlanContext
from msrl_graph.cost import groups, holdings
from msrl_graph.cost.kv_cache import KvCache
from msrl_graph.diagnostics import Span
from msrl_graph.hardware.cluster import ClusterSpec, Figure
from msrl_graph.hardware.device_presets import DEVICES
from msrl_graph.ir.graph import Dimension, Edge, Graph, Node, Value, Worker
from msrl_graph.ir.instruction import Instruction
from msrl_graph.ir.options import ReshardOptions
from msrl_graph.ir.plan import EngineChoice, Plan, from_json
from msrl_graph.model.models import load
from msrl_graph.passes.dock import InsertDock
from msrl_graph.planner.place import PlaceNodes
from msrl_graph.sharding.layout import Layout

PLAN = page.plan(page.start(evaluations=(page.EVALUATION,), engines=page.LIGHT))


def on(cluster: ClusterSpec, **deploy: object) -> Plan:
    return replace(page.start(**deploy), cluster=cluster)


def devices(nodes: int, each: int, memory: float | None = None, device: str = "ascend-910c") -> ClusterSpec:
    kind = DEVICES[device]
    kind = replace(kind, memory=Figure(memory, "stated", "the test")) if memory else kind
    return ClusterSpec("some", kind, nodes, each, Figure(300e6, "stated", "the test"))


# place


def test_stated_layouts_stay_and_states_with_the_same_weights_share_one() -> None:
    layouts = {p.node: (p.layout.tp, p.layout.dp) for p in PLAN.placements if p.pool == "devices"}
    eight = (8, 2)
    assert layouts == {"actor.generate": (4, 4), "actor.infer": eight, "reference.infer": eight, "actor.update": eight}
    assert [p.node for p in PLAN.placements] == [n.name for n in PLAN.graph.nodes]
    assert all(p.reason and p.engine.chosen for p in PLAN.placements)


def test_generation_ranks_are_numbered_for_small_groups() -> None:
    assert PLAN.placement("actor.generate").layout.inner == 2
    assert PLAN.reshards[0].ways[0].ranks == 2
    assert "among 2 ranks, not 8" in PLAN.placement("actor.generate").reason


def test_dp_comes_from_the_placement() -> None:
    placed = PlaceNodes(ENGINES).apply(
        page.start(layouts={"actor.update": Layout(tp=4, dp=0), "actor.generate": Layout(tp=2, dp=0)})
    )
    assert placed.placement("actor.update").layout.dp == 4
    assert placed.placement("actor.generate").layout.dp == 8
    assert "dp 4 from 16 devices" in placed.placement("actor.update").reason


def test_what_nobody_decides_is_data_parallel() -> None:
    placed = PlaceNodes(ENGINES).apply(page.start(layouts={}))
    assert all(
        placed.placement(n).layout == Layout(dp=16) for n in ("actor.update", "actor.generate", "reference.infer")
    )
    assert "data-parallel" in placed.placement("actor.update").reason


def test_a_micro_batch_is_planned_for_what_memory_leaves() -> None:
    tokens = {}
    for memory in (160e9, 110e9):
        engines = {
            "actor.update": EngineChoice("fsdp", {"recompute": "none", "offload": "none"}),
            "reference.infer": EngineChoice("fsdp", {"offload": "none"}),
        }
        start = page.start(layouts={"actor.update": Layout(tp=8, dp=2)}, engines=engines)
        graph = replace(
            start.graph,
            columns=tuple(
                replace(c, dims=(Dimension(1024, ragged=True),)) if c.name == "response" else c
                for c in start.graph.columns
            ),
        )
        device = replace(start.cluster.device, memory=Figure(memory, "stated"))
        plan = PlaceNodes(ENGINES).apply(replace(start, graph=graph, cluster=replace(start.cluster, device=device)))
        tokens[memory] = plan.placement("actor.update").engine.options["micro_batch_tokens"]
    assert 3072 < tokens[110e9] < tokens[160e9]
    assert all(size % 1024 == 0 for size in tokens.values())


def test_the_micro_batch_of_an_engine_without_tokens_is_rows() -> None:
    spec = ENGINES["fsdp"]
    options = tuple(name for name in spec.capabilities.options if name != "micro_batch_tokens")
    engines = {**ENGINES, "fsdp": replace(spec, capabilities=replace(spec.capabilities, options=options))}
    stated = {"actor.update": EngineChoice("fsdp", {"recompute": "full"})}
    placed = PlaceNodes(engines).apply(page.start(engines=stated)).placement("actor.update").engine.options
    assert placed["micro_batch"] == 1 and "micro_batch_tokens" not in placed  # of 10,240 tokens


def test_an_infer_takes_its_updates_engine_and_own_options() -> None:
    update = EngineChoice("fsdp", {"dtype": "f32", "micro_batch": 2})
    placed = PlaceNodes(ENGINES).apply(page.start(engines={"actor.update": update}))
    assert placed.placement("actor.infer").engine.options == {"dtype": "f32", "micro_batch_tokens": 16384}
    own = EngineChoice("fsdp", {"micro_batch": 4})
    placed = PlaceNodes(ENGINES).apply(page.start(engines={"actor.update": update, "actor.infer": own}))
    assert placed.placement("actor.infer").engine.options["micro_batch"] == 4


def again(**deploy: object) -> Plan:
    """The page with a second infer of the reference."""
    start = page.start(**deploy)
    second = Node("second", "reference", "infer", ("prompt", "response"), ())
    edges = (*start.graph.edges, Edge("sample", "actor.generate", "second"))
    return replace(start, graph=replace(start.graph, nodes=(*start.graph.nodes, second), edges=edges))


def test_infers_of_one_worker_share_what_is_stated_for_one_of_them() -> None:
    engines = {"second": EngineChoice("fsdp", {"dtype": "f32", "micro_batch": 2})}
    placed = PlaceNodes(ENGINES).apply(
        again(layouts={**page.DEPLOY.layouts, "second": Layout(tp=4, dp=0, zero=3)}, engines=engines)
    )
    first = placed.placement("reference.infer")
    second = placed.placement("second")
    assert first.layout == second.layout == Layout(tp=4, dp=4, zero=3)
    assert (
        first.engine.options == {"dtype": "f32", "micro_batch_tokens": 16384}
        and second.engine.options["micro_batch"] == 2
    )
    assert layout_check.check(placed, PlanContext(ENGINES)) == sharing_check.check(placed, PlanContext(ENGINES)) == []


@pytest.mark.parametrize(
    ("node", "engine", "wrong"),
    [
        ("reference.infer", {"micro_batch": 4}, False),
        ("reference.infer", {"dtype": "f32"}, True),
        ("reference.infer", {"recompute": "none"}, False),
        ("actor.infer", {"micro_batch": 64}, False),
        ("actor.infer", {"dtype": "f32", "recompute": "full"}, False),
        ("actor.infer", {"dtype": "bf16"}, True),
        ("actor.infer", {"recompute": "none"}, True),
    ],
)
def test_only_the_micro_batch_is_a_states_own(node: str, engine: dict[str, Value], wrong: bool) -> None:
    stated = {
        "actor.update": EngineChoice("fsdp", {"dtype": "f32", "recompute": "full"}),
        "second": EngineChoice("fsdp", {"dtype": "bf16"}),
        node: EngineChoice("fsdp", engine),
    }
    placed = PlaceNodes(ENGINES).apply(again(engines=stated))
    assert [d.code for d in sharing_check.check(placed, PlanContext(ENGINES))] == ["bad-value"] * wrong


def test_an_evaluation_with_more_samples_fits_too() -> None:
    many = page.plan(page.start(evaluations=(replace(page.EVALUATION, samples=64),), engines=page.LIGHT))
    size = many.placement("actor.generate").sequences
    assert size == PLAN.placement("actor.generate").sequences
    phase = next(m for m in many.memory if m.place == "device" and m.phase == "generate")
    # The last token of a row is not fed.
    assert phase.items["KV cache"] == size * holdings.kv_sequence(many, "actor.generate") * 10239 // 10240
    assert phase.total - phase.items[groups.BUFFERS] <= 0.9 * phase.capacity.value


# dock


def test_a_controller_for_each_state_and_a_warehouse_on_each_host() -> None:
    assert [c.node for c in PLAN.docks.controllers] == [n.name for n in PLAN.graph.nodes[1:]]
    assert PLAN.docks.warehouses == (0, 1)
    update = PLAN.controller("actor.update")
    assert (update.groups, update.lockstep, update.chunk, update.columns) == (
        2,
        True,
        0,
        PLAN.graph.node("actor.update").reads,
    )
    assert not PLAN.controller("actor.generate").lockstep
    assert PLAN.controller("host.reward").groups == 2


SPREAD = """import grpo
cluster two { device = "h100", nodes = 2, devices_per_node = 2 }
deploy grpo on two {
  model policy = "qwen2.5-7b"
  data source = "deepscaler.jsonl" { prompt = "problem", answer = "answer" }
  layout actor.update { dp = 4 }
  layout actor.generate { dp = 4 }
  dock { mode = distributed }
}
"""


def spread(*changes: tuple[str, str]) -> Plan:
    text = SPREAD
    for old, new in changes:
        text = text.replace(old, new)
    return compile("spread.rlg", text=text)


def test_controllers_are_spread_over_the_hosts() -> None:
    # Four groups of ranks ask, or the functions of two hosts: the next is always where fewer do.
    assert {c.node: (c.host, c.groups) for c in spread().docks.controllers} == {
        "actor.generate": (0, 4),
        "actor.infer": (1, 4),
        "actor.update": (0, 4),
        "reference.infer": (1, 4),
        "host.advantage": (0, 2),
        "host.reward": (1, 2),
    }
    central = spread(("distributed", "central"))
    assert {c.host for c in central.docks.controllers} == {0} == {*central.docks.warehouses}


def test_controllers_are_where_devices_are_idle() -> None:
    plan = spread()
    half = tuple(replace(p, devices=2) for p in plan.pools)  # all on host 0
    found = InsertDock(ENGINES).apply(replace(plan, pools=half))
    assert {c.host for c in found.docks.controllers} == {1}


def test_central_and_stream() -> None:
    start = page.start(dock=replace(page.DEPLOY.dock, mode="central"))
    edges = tuple(
        replace(e, attributes={"stream": page.number(32)}) if e.dst == "host.reward" else e for e in start.graph.edges
    )
    plan = page.plan(replace(start, graph=replace(start.graph, edges=edges)))
    assert plan.docks.warehouses == (0,)
    assert plan.controller("host.reward").chunk == 32
    assert all(t.seconds == t.central_seconds for t in plan.traffic)


# reshard


def test_the_page_releases_8_gigabytes() -> None:
    (r,) = PLAN.reshards
    assert r.released_bytes_per_device == r.update_bytes_per_device == pytest.approx(8.19e9, rel=1e-3)
    assert r.generate_bytes_per_device == pytest.approx(2 * 8.19e9, rel=1e-3)
    assert r.peak_bytes_per_device == r.update_bytes_per_device + r.generate_bytes_per_device + r.bucket_bytes
    assert r.order == "direct"
    assert [s.name for s in r.steps] == [
        "temporary buffer",
        "all-gather by bucket",
        "select slices",
        "swap out (D2H)",
        "release",
    ]
    assert r.swap_in.bytes == r.released_bytes_per_device
    assert r.swap_in.seconds.value == pytest.approx(8.192 / 50, rel=1e-3)


def test_buckets_hold_every_tensor_once_in_order() -> None:
    (r,) = PLAN.reshards
    assert [n for b in r.buckets for n in b] == [t.name for t in PLAN.model("actor.update").weights]
    assert r.bucket_bytes <= 1 << 30
    small = page.plan(page.start(reshard=ReshardOptions(bucket=1000))).reshards[0]
    assert all(len(b) == 1 for b in small.buckets if any("weight" in n and "norm" not in n for n in b))


def test_staged_where_direct_does_not_fit() -> None:
    # 32.8 GB of others' and 25.6 GB for resharding.
    engines = {**page.LIGHT, "actor.update": EngineChoice("fsdp", {"offload": "none"})}
    plan = page.plan(on(devices(2, 8, 50e9), engines=engines))
    (r,) = plan.reshards
    assert r.order == "staged"
    assert "leave first" in r.reason
    assert r.peak_bytes_per_device == max(r.update_bytes_per_device, r.generate_bytes_per_device) + r.bucket_bytes
    assert [s.name for s in r.steps][1] == "swap out (D2H)"


def test_naive_releases_nothing() -> None:
    plan = page.plan(page.start(reshard=ReshardOptions(mode="naive")))
    (r,) = plan.reshards
    assert (r.released_bytes_per_device, r.swap_in.bytes) == (0, 0)
    assert {i.op for s in plan.schedule for i in s.instructions} == {"RESHARD", "RUN", "RELEASE"}
    generating = {m.phase: m for m in plan.memory if m.place == "device"}["generate"]
    assert generating.items["actor weights"] == r.update_bytes_per_device
    assert r.redundant_bytes == pytest.approx(16 * 8.19e9, rel=1e-3)


# schedule


def test_the_order_of_a_step() -> None:
    train, functions, evaluation, scoring = PLAN.schedule
    assert [(i.op, i.node) for i in train.instructions] == [
        ("RESHARD", "actor.update"),
        ("RUN", "actor.generate"),
        ("RELEASE", "actor.generate"),
        ("SWAP_IN", "actor.update"),
        ("RUN", "reference.infer"),
        ("WAIT", "actor.update"),
        ("RUN", "actor.infer"),
        ("RUN", "actor.update"),
    ]
    assert train.instructions[0].other == "actor.generate"
    assert [i.node for i in functions.instructions] == ["source", "host.reward", "host.advantage"]
    assert (evaluation.task, [i.op for i in evaluation.instructions]) == (
        "test",
        ["RESHARD", "RUN", "RELEASE", "SWAP_IN", "WAIT"],
    )
    assert [i.node for i in scoring.instructions] == ["source", "host.reward"]


def test_a_generation_that_needs_an_infer_comes_after_it() -> None:
    graph = Graph(
        name="two",
        params={},
        columns=PLAN.graph.columns,
        workers=(*PLAN.graph.workers, Worker("judge", "policy", True, "policy")),
        nodes=(
            *PLAN.graph.nodes[:4],
            Node("judge.generate", "judge", "generate", ("response", "ref_logp"), ()),
            *PLAN.graph.nodes[4:],
        ),
        edges=(
            *PLAN.graph.edges,
            Edge("sample", "reference.infer", "judge.generate"),
            Edge("sample", "judge.generate", "actor.update"),
        ),
        rows=PLAN.graph.rows,
    )
    train = page.plan(replace(page.start(), graph=graph)).schedule[0].instructions
    runs = [i.node for i in train if i.op == "RUN"]
    assert runs.index("reference.infer") < runs.index("judge.generate") < runs.index("actor.update")
    assert train.index(Instruction("SWAP_IN", "actor.update")) < train.index(Instruction("RUN", "reference.infer"))


# traffic, memory, estimate


def test_a_dock_takes_less_than_a_central_buffer() -> None:
    assert all(t.seconds.value < t.central_seconds.value for t in PLAN.traffic)
    rows = {(t.src, t.dst): (t.rows, t.bytes) for t in PLAN.traffic}
    assert rows["source", "actor.generate"] == (256, 256 * 2048 * 4)
    assert rows["host.advantage", "actor.update"] == (4096, 4096 * 8192 * 4)


def test_each_epoch_reads_its_rows_again() -> None:
    start = page.start()
    nodes = tuple(
        replace(n, attributes={**n.attributes, "epochs": page.number(3)}) if n.verb == "update" else n
        for n in start.graph.nodes
    )
    thrice = page.plan(replace(start, graph=replace(start.graph, nodes=nodes))).traffic
    for once, now in zip(PLAN.traffic, thrice, strict=True):
        times = 3 if once.dst == "actor.update" else 1
        assert now.bytes == times * once.bytes and now.seconds.value == pytest.approx(times * once.seconds.value)
        assert ("3 epochs" in now.how) == (times == 3)


def test_one_host_moves_nothing_over_the_network() -> None:
    plan = page.plan(on(devices(1, 16)))
    assert {t.seconds.value for t in plan.traffic} == {0.0}
    assert {t.how for t in plan.traffic} == {"shared memory of one host"}


def test_memory_by_phase() -> None:
    stated = replace(page.LIGHT["actor.update"], options={"recompute": "full"})
    plan = page.plan(page.start(evaluations=(page.EVALUATION,), engines={**page.LIGHT, "actor.update": stated}))
    phases = {m.phase: m for m in plan.memory if m.place == "device"}
    assert list(phases) == ["load", "reshard", "generate", "swap", "infer", "update"]
    third = 32_763_876_352 / 8
    update = phases["update"].items
    assert update["actor weights"] == pytest.approx(2 * third, rel=1e-3)
    # In float32; those of weights that tp ranks have copies of are summed next to them.
    assert 2 * update["actor weights"] <= update["gradients"] < 2.05 * update["actor weights"]
    assert update["actor optimizer"] == pytest.approx(12 * third / 2, rel=1e-3)
    # Recomputed: of each of 64 layers a rank's share of the inputs of 16,384 tokens, and angles.
    kept = 2 * (16384 // 8 * 64 * 5120 + 2 * 16384 * 128)
    assert kept < update["activations"] < 2 * kept
    assert update["logits"] < 1.5 * LOGITS  # of a part of the vocabulary
    generate = phases["generate"]
    at_once = PLAN.placement("actor.generate").sequences
    # 64 layers, keys and values of 8 heads of 128 over tp 4, 2 bytes, 10,240 tokens.
    assert generate.items["KV cache"] == at_once * 2 * 64 * 2 * 128 * 2 * 10239
    held = generate.total - generate.items[groups.BUFFERS]  # which lie in what generation leaves free
    assert 0.85 < held / 128e9 <= 0.9
    assert f"{at_once} of a group's 1,024 sequences at once" in generate.remark
    hosts = {m.phase: m for m in PLAN.memory if m.place == "host"}
    assert hosts["generate"].items["swapped actor weights"] == 8 * plan.reshards[0].released_bytes_per_device


def test_ranks_of_a_cpu_share_their_machine() -> None:
    layouts = {"actor.update": Layout(dp=4), "actor.generate": Layout(dp=4)}
    cluster = devices(1, 4, 16e9, "cpu")
    plan = page.plan(on(cluster, models={"policy": load("tiny", Path())}, layouts=layouts))
    assert plan.memory[0].capacity.value == 4e9
    assert all(m.items["ranks"] for m in plan.memory if m.place == "host")


def test_zero_divides_what_it_says() -> None:
    def update(zero: int) -> dict[str, int]:
        layouts = {"actor.update": Layout(tp=8, dp=2, zero=zero), "actor.generate": Layout(tp=4, dp=4)}
        engines = {"actor.update": EngineChoice("fsdp", {"recompute": "full"})}
        return next(
            m for m in page.plan(page.start(layouts=layouts, engines=engines)).memory if m.phase == "update"
        ).items

    none, one, two, three = map(update, range(4))
    half = pytest.approx(0.5, rel=1e-3)
    assert one["actor optimizer"] / none["actor optimizer"] == half
    # In float32, and those of a layer before they are summed.
    assert 2 < two["gradients"] / two["actor weights"] < 2.1
    # fsdp keeps weights divided from stage 2 on, and gathers all of them (2), or embedding, head and two layers (3).
    assert two["actor weights"] / one["actor weights"] == half
    assert two["gathered weights"] == one["actor weights"]
    assert three["gathered weights"] < two["gathered weights"] / 8


def test_every_figure_has_a_source_and_a_basis() -> None:
    assert PLAN.estimate is not None
    figures = [p.seconds for p in PLAN.estimate.phases] + [
        PLAN.estimate.iteration_seconds,
        PLAN.estimate.tokens_per_second_per_device,
    ]
    figures += [s.seconds for r in PLAN.reshards for s in (*r.steps, r.swap_in)]
    figures += [f for t in PLAN.traffic for f in (t.seconds, t.central_seconds)]
    assert all(f.source and f.basis for f in figures)
    assert PLAN.estimate.iteration_seconds.source == "assumed"


def test_an_iteration_is_as_long_as_its_critical_path() -> None:
    assert PLAN.estimate is not None
    seconds = {p.name: p.seconds.value for p in PLAN.estimate.phases}
    turns = ("actor.generate", "reference.infer", "actor.infer", "actor.update", "gradient exchange of actor.update")
    # Colocated: one after another, after the reshard; the swap-in hides behind the reference.
    expected = seconds["reshard"] + sum(seconds[t] for t in turns)
    assert PLAN.estimate.iteration_seconds.value == pytest.approx(expected, rel=1e-3)
    tokens = 4096 * 10240 / 16 / PLAN.estimate.iteration_seconds.value
    assert PLAN.estimate.tokens_per_second_per_device.value == pytest.approx(tokens)


def test_a_large_cluster_compiles_quickly() -> None:
    import time

    layouts = {"actor.update": Layout(tp=8, dp=1250), "actor.generate": Layout(tp=4, dp=2500)}
    began = time.perf_counter()
    plan = page.plan(replace(on(devices(1250, 8), layouts=layouts), graph=page.graph(20000, 16)))
    assert plan.reshards[0].ways[0].ranks == 2
    assert time.perf_counter() - began < 5


def test_passes_are_deterministic_and_json_is_the_inverse() -> None:
    again = page.plan(page.start(evaluations=(page.EVALUATION,), engines=page.LIGHT))
    assert again.to_json() == PLAN.to_json()
    assert from_json(PLAN.to_json()) == PLAN


# checks


def told(plan: Plan) -> list[tuple[str, str, str]]:
    placed = PlaceNodes(ENGINES).apply(plan)
    return [(d.code, d.message, d.help) for d in layout_check.check(placed, PlanContext(ENGINES))]


def test_layouts_of_the_page_are_right() -> None:
    assert told(page.start()) == []


@pytest.mark.parametrize(
    ("layout", "code", "message", "help"),
    [
        (
            Layout(tp=8, dp=4),
            "layout-size",
            "takes 32 devices (tp 8 x dp 4); cluster `pod` has 16 (2 x 8)",
            "dp = 2 takes all 16",
        ),
        (Layout(tp=8, dp=1), "layout-size", "takes 8 devices", "dp = 2 takes all 16"),
        (Layout(tp=3, dp=0), "layout-size", "takes 15 devices", "the nearest that works: tp = 4, dp = 4"),
        (
            Layout(tp=16, dp=1),
            "layout-divide",
            "does not divide the 40 heads and the 8 key-value heads",
            "tp = 8, dp = 2",
        ),
        (Layout(ep=2, dp=16), "layout-divide", "ep divides experts, but `qwen2.5-32b` has none", ""),
        (
            Layout(pp=16, dp=1, stages=(4,) * 15 + (3,)),
            "layout-divide",
            "`stages` hold 63 layers, `qwen2.5-32b` has 64",
            "",
        ),
        (Layout(vpp=2, dp=16), "layout-divide", "vpp = 2 needs a pipeline, but pp is 1", ""),
        (Layout(cp=16, dp=1, cp_kind="ulysses"), "layout-divide", "tp x cp = 16 does not divide the 40 heads", ""),
        (Layout(pp=16, vpp=8, dp=1), "layout-divide", "pp x vpp = 128 is more than the 64 layers", ""),
    ],
)
def test_layouts_that_do_not_fit(layout: Layout, code: str, message: str, help: str) -> None:
    layouts = {"actor.update": replace(layout, span=Span("a.rlg", 1, 1, 1, 5)), "actor.generate": Layout(tp=4, dp=4)}
    (found,) = told(page.start(layouts=layouts))
    assert found[0] == code
    assert message in found[1]
    assert help in found[2]


def test_an_infer_of_an_updated_worker_has_no_layout_of_its_own() -> None:
    layouts = {**page.DEPLOY.layouts, "actor.infer": Layout(tp=4, dp=4)}
    (found,) = told(page.start(layouts=layouts))
    assert found[0] == "bad-layout"
    layouts["actor.infer"] = Layout(tp=8, dp=0)
    assert told(page.start(layouts=layouts)) == []


def test_a_mini_batch_is_divided_evenly() -> None:
    start = page.start()
    nodes = tuple(
        replace(n, attributes={**n.attributes, "mini_batch": page.number(7)}) if n.verb == "update" else n
        for n in start.graph.nodes
    )
    (found,) = told(replace(start, graph=replace(start.graph, nodes=nodes)))
    assert found == (
        "mini-batch-divide",
        "dp = 2 of `actor.update` does not divide the mini-batch of 7 rows",
        "mini_batch = 8 is the nearest that dp = 2 divides",
    )
    (found,) = told(replace(start, graph=page.graph(prompts=3, group=1)))
    assert found[1] == "dp = 2 of `actor.update` does not divide the 3 rows of an iteration"


def test_what_does_not_fit_is_told_by_phase() -> None:
    span = Span("a.rlg", 7, 3, 7, 20)
    layouts = {**page.DEPLOY.layouts, "actor.update": Layout(tp=8, dp=2, span=span)}
    stated = {"actor.update": EngineChoice("fsdp", {"recompute": "none", "offload": "none"})}
    plan = page.plan(on(devices(2, 8, 60e9), layouts=layouts, engines=stated))
    (found,) = memory_check.check(plan, PlanContext(ENGINES))
    assert (found.code, found.span) == ("out-of-memory", span)
    assert found.message == "update needs 88.7 GB a device, which has 60.0 GB"
    assert [line.split()[0] for line in found.help.split("\n")[:6]] == [
        "load",
        "reshard",
        "generate",
        "swap",
        "infer",
        "update",
    ]
    assert "recompute = full" in found.help
    assert memory_check.check(PLAN, PlanContext(ENGINES)) == []


def test_recomputation_is_planned_where_nothing_else_fits() -> None:
    stay = EngineChoice("fsdp", {"offload": "none"})
    stated = {**page.LIGHT, "actor.update": stay, "reference.infer": stay}
    plan = page.plan(on(devices(2, 8, 66e9), engines=stated))
    update = plan.placement("actor.update")
    assert (
        update.engine.options["recompute"] == "full"
        and "recomputes activations, which would otherwise take 45.3 GB" in update.reason
    )
    assert memory_check.check(plan, PlanContext(ENGINES)) == []
    # Where it fits, nothing is recomputed.
    roomy = page.plan(on(devices(2, 8, 256e9), engines=page.LIGHT))
    assert "recompute" not in roomy.placement("actor.update").engine.options


def test_the_fastest_recomputation_that_fits_is_planned() -> None:
    """On 88 GB the cheapest parts suffice, on 66 GB only whole layers do (above)."""
    small = devices(2, 8, 88e9)
    seconds = {}
    for choice in ("full", ("mlp", "norms"), ("activation", "norms")):
        stated = {**page.LIGHT, "actor.update": EngineChoice("fsdp", {"recompute": choice})}
        plan = page.plan(on(small, engines=stated))
        assert memory_check.check(plan, PlanContext(ENGINES)) == []
        seconds[choice] = plan.estimate.iteration_seconds.value
    assert sorted(seconds, key=seconds.__getitem__) == [("activation", "norms"), ("mlp", "norms"), "full"]
    chosen = page.plan(on(small, engines=page.LIGHT)).placement("actor.update")
    assert chosen.engine.options["recompute"] == ("activation", "norms")


def test_no_room_for_one_sequence_is_too_little() -> None:
    engines = {"actor.update": EngineChoice("fsdp", {"recompute": "full", "offload": "none"})}
    plan = page.plan(on(devices(2, 8, 50e9), engines=engines))
    assert plan.placement("actor.generate").sequences == 1
    cache = KvCache(plan, ENGINES, "actor.generate")
    assert cache.count_sequences(cache.bound) == pytest.approx(1) and cache.at_once == 1 < cache.sequences
    assert any("needs" in d.message for d in memory_check.check(plan, PlanContext(ENGINES)))
