"""`place` and `apart`: which states share which devices, and what a plan of several pools says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import page
import pytest
from folders import TESTS
from hypothesis import assume, given
from hypothesis import strategies as st
from sample import examples

from msrl_graph import compile
from msrl_graph.backends import ENGINES
from msrl_graph.backends.spec import BYTES
from msrl_graph.checks import memory as memory_check
from msrl_graph.checks.stage import PlanContext
from msrl_graph.cost import groups
from msrl_graph.diagnostics import Fault
from msrl_graph.emit.html import plan_html
from msrl_graph.emit.placed_graph import build_placed_graph
from msrl_graph.emit.ray import ray_script
from msrl_graph.emit.text import placed_text, plan_text
from msrl_graph.hardware.cluster import Figure
from msrl_graph.hardware.device_kinds import ASCEND
from msrl_graph.ir.plan import Plan, Pool, from_json
from msrl_graph.model.models import load
from msrl_graph.sharding.layout import Layout, Side, elements
from msrl_graph.sharding.redistribute import list_transfers

HERE = TESTS
PAGE = (HERE / "programs" / "grpo_page.rlg").read_text(encoding="utf-8")
APART = {
    name: (HERE / "programs" / f"apart_{name}.rlg").read_text(encoding="utf-8") for name in ("two", "four", "halves")
}
# Without layouts, so that pools are divided by what is stated of them.
BARE = "\n".join(line for line in PAGE.split("\n") if "layout actor" not in line).replace("qwen2.5-32b", "tiny")


def plan(*statements: str) -> Plan:
    return compile("page.rlg", text=BARE.replace("  run {", "\n".join(statements) + "\n  run {"))


GENERATE = ("actor.generate",)
UPDATE = ("actor.infer", "actor.update")
REFERENCE = ("reference.infer",)
BOTH = ("actor.infer", "reference.infer", "actor.update")


EVEN = "set prompts = 720720 set group = 1"  # rows that any number of 16 devices divides
APARTED = "apart actor.generate, actor.update"
ON = ["place actor.generate on nodes 0", "place actor.update on nodes 1"]
HALVES = ("devices 0..3 of nodes 0..1", "devices 4..7 of nodes 0..1")
ODD = {"device 0 of nodes 0..1": REFERENCE, "devices 1..7": GENERATE, "devices 9..15": UPDATE}
CASES: list[tuple[list[str], dict[str, tuple[str, ...]]]] = [
    ([], {"devices": (*GENERATE, *BOTH)}),
    (["place actor.generate, reference together"], {"devices": (*GENERATE, *BOTH)}),
    (["place actor, reference on nodes 0..1 devices 0..7"], {"devices": (*GENERATE, *BOTH)}),
    # Some devices of several nodes, and what is left, in a row or not.
    (["place actor.generate on nodes 0..1 devices 0..3"], {HALVES[0]: GENERATE, HALVES[1]: BOTH}),
    (
        ["place actor.update, reference on nodes 0..1 devices 4..7", "apart actor.generate"],
        {HALVES[0]: GENERATE, HALVES[1]: BOTH},
    ),
    (["place reference on nodes 0..1 devices 0", APARTED, "place actor.update on nodes 1 devices 1..7"], ODD),
    # Unnamed states go with the update.
    ([APARTED], {"devices 0..7": GENERATE, "devices 8..15": BOTH}),
    (["apart actor.update, actor.generate"], {"devices 0..7": BOTH, "devices 8..15": GENERATE}),
    (["apart actor, reference"], {"devices 0..7": (*GENERATE, *UPDATE), "devices 8..15": REFERENCE}),
    (["apart actor.generate"], {"devices 0..7": GENERATE, "devices 8..15": BOTH}),
    (
        [APARTED, "place reference, actor.generate together"],
        {"devices 0..7": (*GENERATE, *REFERENCE), "devices 8..15": UPDATE},
    ),
    # A layout says how many.
    ([APARTED, "layout actor.generate { tp = 2, dp = 2 }"], {"devices 0..3": GENERATE, "devices 4..15": BOTH}),
    ([APARTED, "layout actor.update { dp = 2 }"], {"devices 0..13": GENERATE, "devices 14..15": BOTH}),
    # `place` says where; what is named nowhere takes the rest, or goes with the update.
    (ON[:1], {"devices 0..7": GENERATE, "devices 8..15": BOTH}),
    (["place actor.generate on nodes 1 devices 4..7"], {"devices 0..11": BOTH, "devices 12..15": GENERATE}),
    (["place reference on nodes 0 devices 0"], {"device 0": REFERENCE, "devices 1..15": (*GENERATE, *UPDATE)}),
    ([*ON, "place reference on nodes 1"], {"devices 0..7": GENERATE, "devices 8..15": BOTH}),
    (ON, {"devices 0..7": GENERATE, "devices 8..15": BOTH}),
    ([APARTED, "place actor.update on nodes 0 devices 0..5"], {"devices 0..5": BOTH, "devices 6..15": GENERATE}),
]


@pytest.mark.parametrize(("statements", "pools"), CASES)
def test_who_shares_which_devices(statements: list[str], pools: dict[str, tuple[str, ...]]) -> None:
    found = plan(*statements, EVEN)
    order = [n.name for n in found.graph.nodes]
    assert {p.name: p.nodes for p in found.pools} == {k: tuple(sorted(v, key=order.index)) for k, v in pools.items()}
    for placement in found.placements:
        if placement.pool != "functions":
            pool = found.pool(placement.pool)
            assert (placement.first, placement.each, placement.layout.devices) == (pool.first, pool.each, pool.devices)


def test_what_is_unnamed_says_where_it_went() -> None:
    found = plan("apart actor.generate, actor.update")
    assert (
        found.placement("reference.infer").reason
        == "as actor.update, which has the same model; in no stated pool, so with actor.update"
    )
    assert "in no stated pool" not in found.placement("actor.infer").reason
    assert [p.reason for p in found.pools] == ["an even share", "an even share"]
    assert found.placement("actor.update").layout.devices == 8


def test_devices_that_no_pool_takes_are_told() -> None:
    found = plan("place actor on nodes 0", "place reference on nodes 1 devices 0..3")
    assert [n.text for n in found.notes if n.about == "place"] == ["4 of 16 devices are in no pool and stay idle"]
    assert not [n for n in plan("apart actor, reference").notes if n.about == "place"]


NAMES = ("actor", "reference", "actor.generate", "actor.infer", "actor.update", "reference.infer")


@st.composite
def statements(draw: st.DrawFn) -> str:
    names = ", ".join(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)))
    if draw(st.booleans()):
        return f"apart {names}"
    first = draw(st.integers(0, 7))
    some = f" on nodes {draw(st.sampled_from(('0', '1', '0..1')))} devices {first}..{draw(st.integers(first, 7))}"
    return f"place {names} {draw(st.sampled_from(('together', 'together', some, f' on nodes {first % 2}')))}"


@given(st.lists(statements(), min_size=1, max_size=4))
@examples(60)
def test_whatever_is_stated_every_state_is_in_one_pool_and_no_device_in_two(stated: list[str]) -> None:
    try:
        found = plan(*stated, EVEN)
    except Fault as fault:
        assert {d.code for d in fault.diagnostics} <= {"bad-place", "layout-size"}
        return
    states = [p.node for p in found.placements if p.pool != "functions"]
    assert sorted(n for p in found.pools for n in p.nodes) == sorted(states)
    taken = [p.device(r, 8) for p in found.pools for r in range(p.devices)]
    assert len(taken) == len(set(taken)) and set(taken) <= set(range(16))
    assert found.placement("actor.infer").pool == found.placement("actor.update").pool
    for names in (s.removeprefix("apart ").split(", ") for s in stated if s.startswith("apart")):
        of_names = [
            {found.placement(n).pool for n in states if n == name or n.startswith(f"{name}.")} for name in names
        ]
        assert all(a.isdisjoint(b) for i, a in enumerate(of_names) for b in of_names[:i])


def of(name: str) -> Plan:
    return compile("apart.rlg", text=APART[name])


@pytest.mark.parametrize("name", list(APART))
def test_what_is_shown(name: str, golden: Callable[[str, str], None]) -> None:
    found = of(name)
    golden(f"apart_{name}.plan.txt", plan_text(found))
    golden(f"apart_{name}.placed.txt", placed_text(found))
    script = ray_script(found)
    golden(f"apart_{name}.ray.txt", script[: script.index('PLAN = r"""')])
    assert all(len(line) <= 100 for line in plan_text(found).split("\n"))


def test_pools_meet_to_reshard_and_nothing_is_swapped() -> None:
    streams = {(s.task, s.pool): [(i.op, i.node) for i in s.instructions] for s in of("four").schedule}
    meet = ("RESHARD", "actor.update")
    assert streams["train", "devices 2..3"] == [meet, ("RUN", "actor.generate"), ("RELEASE", "actor.generate")]
    assert streams["train", "devices 0..1"] == [
        meet,
        ("RUN", "reference.infer"),
        ("RUN", "actor.infer"),
        ("RUN", "actor.update"),
    ]
    assert streams["test", "devices 0..1"] == [meet]
    assert streams["test", "devices 2..3"] == streams["train", "devices 2..3"]


def test_a_send_leaves_the_update_weights_and_fills_the_other_pool() -> None:
    found = of("four")
    (r,) = found.reshards
    assert (r.mode, r.released_bytes_per_device, r.swap_in.bytes) == ("send", 0, 0)
    assert r.generate_bytes_per_device == pytest.approx(r.update_bytes_per_device / 2, rel=1e-3)
    assert r.peak_bytes_per_device == r.update_bytes_per_device + r.bucket_bytes
    # Both halves go through the links of one host's two devices to the other host.
    seconds = next(s.seconds for s in r.steps if s.name == "send by bucket")
    assert seconds.value == pytest.approx(2 * r.generate_bytes_per_device / found.cluster.between(2).value, rel=1e-3)
    phases = {(m.pool, m.phase): m.items for m in found.memory if m.place == "device"}
    assert set(phases) == {("devices 0..1", p) for p in ("load", "reshard", "infer", "update")} | {
        ("devices 2..3", p) for p in ("load", "reshard", "generate")
    }
    assert phases["devices 2..3", "reshard"] == {
        "generation weights": r.generate_bytes_per_device,
        "bucket": r.bucket_bytes,
        groups.BUFFERS: 2 * ASCEND.group_bytes,  # of both who generate, and of all who send
    }
    items = {"generation weights", "KV cache", "logits", groups.BUFFERS}
    assert set(phases["devices 2..3", "generate"]) == items
    assert phases["devices 0..1", "reshard"]["actor weights"] == r.update_bytes_per_device
    assert "generation weights" not in phases["devices 0..1", "reshard"]
    assert {c.host for c in found.docks.controllers} == {0, 1}


def test_pools_that_do_not_wait_for_each_other_work_side_by_side() -> None:
    pools = (Pool(GENERATE, 0, 8), Pool(REFERENCE, 8, 4), Pool(UPDATE, 12, 4))
    found = page.plan(page.start(layouts={}, pools=pools))
    assert found.estimate is not None
    seconds = {p.name: p.seconds.value for p in found.estimate.phases}
    infers = seconds["reference.infer"], seconds["actor.infer"]
    update = seconds["actor.update"] + seconds.get("gradient exchange of actor.update", 0.0)
    expected = seconds["reshard"] + seconds["actor.generate"] + max(infers) + update
    moved = seconds["dispatch, all sample edges"]
    assert expected < found.estimate.iteration_seconds.value < expected + moved < expected + min(infers) / 10
    assert {p.pool for p in found.estimate.phases if p.name in ("reshard", "actor.generate")} == {
        found.placement("actor.generate").pool
    }


def test_memory_of_each_pool_is_judged() -> None:
    found = of("four")
    small = tuple(replace(m, capacity=Figure(1e9, "stated")) for m in found.memory if m.place == "device")
    told = memory_check.check(replace(found, memory=small), PlanContext(ENGINES))
    lines = [
        APART["four"][: APART["four"].index(f"layout {n} ")].count("\n") + 1 for n in ("actor.update", "actor.generate")
    ]
    assert [(d.message.split(" GB ", 1)[1].split(";")[0], d.span.line) for d in told] == [
        ("a device (devices 0..1), which has 1.0 GB", lines[0]),
        ("a device (devices 2..3), which has 1.0 GB", lines[1]),
    ]


def test_the_ranks_of_a_host_of_cpus_share_its_memory_whatever_their_pool() -> None:
    found = compile("apart.rlg", text=APART["two"].replace("ascend-910c", "cpu"))
    held = {(m.pool, m.phase): m.total for m in found.memory if m.place == "device"}
    most = {pool: max(v for (p, _), v in held.items() if p == pool) for pool in ("device 0", "device 1")}
    ranks = {m.phase: m.items["ranks"] for m in found.memory if m.place == "host"}
    assert ranks["reshard"] == held["device 0", "reshard"] + held["device 1", "reshard"]
    assert ranks["generate"] == held["device 0", "generate"] + most["device 1"]
    assert ranks["update"] == most["device 0"] + held["device 1", "update"]


@st.composite
def ends(draw: st.DrawFn) -> tuple[Layout, Layout, int, int]:
    """Layouts of an update and a generation, the hosts' devices, and a bucket's bytes."""
    source = Layout(
        tp=draw(st.sampled_from([1, 2])), dp=draw(st.integers(1, 5)), zero=draw(st.sampled_from([0, 1, 2, 3]))
    )
    target = Layout(tp=draw(st.sampled_from([1, 2])), dp=draw(st.integers(1, 5)))
    return source, target, draw(st.integers(1, 4)), draw(st.sampled_from([0, 10_000, 1 << 30]))


@given(ends())
def test_a_plan_counts_the_bytes_that_move(case: tuple[Layout, Layout, int, int]) -> None:
    source, target, per_host, bucket = case
    devices = source.devices + target.devices
    assume(devices % per_host == 0)
    start = page.start(
        models={"policy": load("tiny", Path())},
        layouts={"actor.update": source, "actor.generate": target},
        pools=(Pool(GENERATE), Pool(BOTH)),
        reshard=replace(page.DEPLOY.reshard, bucket=bucket),
    )
    found = page.plan(
        replace(start, cluster=replace(start.cluster, nodes=devices // per_host, devices_per_node=per_host))
    )
    (r,) = found.reshards
    ends = [found.placement(n) for n in (r.src, r.dst)]
    sides = tuple(
        Side(e.layout, n == 0 and e.layout.zero >= 2 and e.layout.dp > 1, 1, e.first, e.each)
        for n, e in enumerate(ends)
    )
    tensors = {t.name: t for t in found.model("actor.update").weights}
    item = BYTES["f32"]
    received = Counter[int]()
    largest = 0
    for names in r.buckets:
        messages = Counter[tuple[int, ...]]()
        for name in names:
            for giver, takers, box in list_transfers(tensors[name], *sides, per_host):
                messages[giver, *takers] += item * elements(box)
        for (_, *takers), size in messages.items():
            received.update(dict.fromkeys(takers, size))
        largest = max(largest, *messages.values())
    steps = {s.name: s.bytes for s in r.steps}
    assert steps["send by bucket"] == max(received.values()) == r.generate_bytes_per_device == r.ways[0].bytes
    assert largest <= steps["temporary buffer"] == r.bucket_bytes
    assert all(size == r.generate_bytes_per_device for size in received.values())
    assert (r.released_bytes_per_device, r.redundant_bytes) == (0, 0)
    assert from_json(found.to_json()) == found


def test_what_a_page_shows_of_pools_on_the_same_hosts() -> None:
    found = of("halves")
    text = plan_html(found)
    hosts = text[text.index('<div class="hosts">') : text.index('<div class="pools">')]
    assert re.findall(r"<span>(.*?)</span>", hosts) == ["hosts 0..1, 2 equal ones"]
    halves = ["devices 0..1 of nodes 0..1", "devices 2..3 of nodes 0..1"]
    assert re.findall('title="(.*?)"', hosts) == [h for h in halves for _ in range(2)]
    (r,) = found.reshards
    assert "links" not in r.steps[1].seconds.basis, "weights stay on their host"


def test_a_plan_that_passes_have_not_finished_can_be_shown() -> None:
    found = page.start(pools=(Pool(GENERATE), Pool(BOTH)))
    for step in page.PASSES:
        found = step.apply(found)
        assert plan_text(found)


def test_every_edge_of_the_placed_graph_goes_through_a_send() -> None:
    vertices, arcs = build_placed_graph(of("four"))
    (send,) = [v for v in vertices if v.kind == "send"]
    assert send.where == "devices 0..1 to devices 2..3"
    assert {(a.src, a.dst) for a in arcs if a.kind == "reshard"} == {
        ("actor.update", send.name),
        (send.name, "actor.generate"),
    }


def test_many_devices_cost_little() -> None:
    import time

    layouts = {"actor.update": Layout(tp=8, dp=512), "actor.generate": Layout(tp=4, dp=1024)}
    start = replace(page.start(layouts=layouts, pools=(Pool(GENERATE), Pool(BOTH))), graph=page.graph(16384, 16))
    began = time.perf_counter()
    found = page.plan(replace(start, cluster=replace(start.cluster, nodes=1024)))
    assert found.reshards[0].mode == "send"
    assert time.perf_counter() - began < 5
