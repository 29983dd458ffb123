"""The temporary buffer of a resharding: a plan counts what the ranks take, from any stages to any others."""

from __future__ import annotations

from collections import Counter
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
from msrl_graph.sharding.layout import Layout, elements
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
    item = BYTES[holdings.dtype(plan, edge.src)]
    taken = 0
    needed: dict[tuple[tuple[int, ...], str], int] = {}  # by the ranks that move a tensor together, and its name
    for rank in range(source.devices):
        routes = []
        for way in edge.ways:
            (ranks,) = (r for r in list_gather_groups(sides[0], way.across, way.block) if rank in r)
            routes.append(
                TransferRoute(way, [t for t in model.weights if edge.route_of(t) is way], Block(ranks), rank, sides)
            )
        for names in edge.buckets:
            at = 0
            for route in routes:
                at = route.load(names, at).stretch.stop
            taken = max(taken, at)
        for route in routes:
            for name in route.target if route.index == 0 else ():
                received = Counter[int]()
                for move in route.moves.get(name, ()):
                    received[move.taker] += elements(move.box) * (move.giver != move.taker)
                gathered = sum(elements(box) for _, box in route.gathered.get(name, ()))
                needed[route.ranks, name] = max(gathered, *(2 * count for count in received.values()), 0)
    assert taken * item <= PADDING * edge.bucket_bytes, "it suffices"
    if all(way.how != "all-to-all" for way in edge.ways):
        assert taken * item >= edge.bucket_bytes, "none of it is wasted"
    # In an all-to-all ranks receive different amounts. The plan counts, for each tensor, the busiest rank twice: what
    # it sends and what it receives.
    blocks = {ranks for ranks, _ in needed}
    counted = max(sum(needed[ranks, name] for name in names) for ranks in blocks for names in edge.buckets)
    assert item * counted <= PADDING * edge.bucket_bytes
    assert item * counted >= edge.bucket_bytes
