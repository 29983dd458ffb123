"""What a plan says of the temporary buffer of a resharding is what the ranks take, from any stages to any others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import page
from hypothesis import example, given
from hypothesis import strategies as st

from msrl_graph.backends import ENGINES
from msrl_graph.backends.spec import BYTES
from msrl_graph.cost import holdings
from msrl_graph.ir.plan import EngineChoice
from msrl_graph.model.models import load
from msrl_graph.runtime.weights.transfer_routes import PADDING, Block, TransferRoute
from msrl_graph.sharding.layout import Layout
from msrl_graph.sharding.redistribute import list_gather_groups

MODEL = load("tiny", Path())


@st.composite
def divided(draw: st.DrawFn, pp: int, rest: int) -> Layout:
    tp = draw(st.sampled_from([n for n in (1, 2) if rest % n == 0]))
    if pp == 1 or draw(st.booleans()):
        return Layout(tp=tp, pp=pp, dp=rest // tp)
    cuts = sorted(draw(st.permutations(range(1, MODEL.layers)))[: pp - 1])
    stages = tuple(b - a for a, b in zip([0, *cuts], [*cuts, MODEL.layers], strict=True))
    return Layout(tp=tp, pp=pp, dp=rest // tp, stages=stages)


@st.composite
def both(draw: st.DrawFn) -> tuple[Layout, Layout, int]:
    """Layouts of an update and a generation, and a bucket's bytes."""
    devices = draw(st.sampled_from([2, 4, 8]))
    ends = [draw(st.sampled_from([n for n in (1, 2, 4) if n <= min(devices, MODEL.layers)])) for _ in range(2)]
    source, target = (draw(divided(pp, devices // pp)) for pp in ends)
    return source, target, draw(st.sampled_from([0, 1000, 100_000, 1 << 30]))


@given(both())
@example((Layout(pp=2), Layout(pp=2, stages=(1, MODEL.layers - 1)), 1000))  # the first layer is in place, others move
@example(
    (Layout(tp=2, dp=2), Layout(dp=2, pp=2, stages=(1, MODEL.layers - 1)), 1 << 30)
)  # half of a bucket reaches each
def test_a_plan_counts_the_buffer_that_ranks_take(case: tuple[Layout, Layout, int]) -> None:
    source, target, bucket = case
    start = page.start(
        models={"policy": MODEL},
        layouts={"actor.update": source, "actor.generate": target},
        engines={n: EngineChoice(e) for n, e in (("actor.update", "megatron"), ("actor.generate", "vllm"))},
        reshard=replace(page.DEPLOY.reshard, bucket=bucket),
    )
    plan = page.plan(replace(start, cluster=replace(start.cluster, nodes=1, devices_per_node=source.devices)))
    (edge,) = plan.reshards
    model = plan.model(edge.src)
    sides = tuple(holdings.side(plan, ENGINES, n) for n in (edge.src, edge.dst))
    most = 0
    for rank in range(source.devices):
        routes = []
        for way in edge.ways:
            (ranks,) = (r for r in list_gather_groups(sides[0], way.across, way.block) if rank in r)
            routes.append(
                TransferRoute(way, [t for t in model.tensors if edge.route_of(t) is way], Block(ranks), rank, sides)
            )
        for names in edge.buckets:
            at = 0
            for route in routes:
                at = route.load(names, at).stretch.stop
            most = max(most, at)
    taken = most * BYTES[holdings.dtype(plan, edge.src)]
    assert edge.bucket_bytes <= taken <= PADDING * edge.bucket_bytes or any(w.how == "all-to-all" for w in edge.ways)
    assert taken <= PADDING * edge.bucket_bytes
