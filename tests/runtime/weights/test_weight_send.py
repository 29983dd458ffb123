"""Resharding between pools on real ranks: whatever the two layouts, every generation rank gets its boxes, and the
update keeps its own. Frozen weights are sent once."""

import random
import time
from dataclasses import replace
from itertools import product

import page
import pytest
import ranks
import torch
from rank_models import model
from torch import distributed as dist
from weight_sends import met

from msrl_graph.backends.engine_protocols import Shard
from msrl_graph.ir.plan import Pool
from msrl_graph.model.freezing import freeze
from msrl_graph.runtime.process import memory
from msrl_graph.runtime.weights.weight_publication import WeightPublication
from msrl_graph.runtime.weights.weight_send import Sender
from msrl_graph.sharding.layout import Layout, Side, elements, full_box, shard


def planned(source, target, first, hosts, bucket, frozen=()):
    """A plan of two pools, the generation's on device 0 or after the update's, or both on each host (`beside`)."""
    names = (("actor.infer", "reference.infer", "actor.update"), ("actor.generate",))
    pools = [Pool(names[0], 0, source.devices), Pool(names[1], source.devices, target.devices)]
    if first == "generate":
        pools = [Pool(names[0], target.devices, source.devices), Pool(names[1], 0, target.devices)]
    if first == "beside":
        some = source.devices // hosts
        more = target.devices // hosts
        pools = [Pool(names[0], 0, source.devices, each=some), Pool(names[1], some, target.devices, each=more)]
    start = page.start(
        models={"policy": freeze(model(), frozen)},
        layouts={"actor.update": source, "actor.generate": target},
        pools=tuple(pools),
        reshard=replace(page.DEPLOY.reshard, bucket=bucket),
    )
    devices = source.devices + target.devices
    return page.plan(replace(start, cluster=replace(start.cluster, nodes=hosts, devices_per_node=devices // hosts)))


def part(box, name):
    """What a box of the model's weights holds: no two numbers of a tensor are alike."""
    return WHOLE[name][tuple(slice(a, b) for a, b in box)].clone()


FROZEN = (
    "embeddings",
    "attention",
    "mlp",
    "head",
    "model.layers.*.input_layernorm.*",
)  # few are left: some ranks give none
WHOLE = {
    t.name: torch.arange(t.elements, dtype=torch.float32).reshape(t.shape) + i for i, t in enumerate(model().weights)
}


def both(rank, case):
    """What the two ends of a case's edge are on a rank: the arguments of a Sender, the update's shards the last of
    them, and the shards to fill."""
    plan = planned(*case)
    m = plan.model("actor.update")
    (edge,) = plan.reshards
    ends = [plan.placement(n) for n in (edge.src, edge.dst)]
    divided = case[0].dp > 1 and case[0].zero >= 2
    source, target = sides = tuple(Side(e.layout, divided and e is ends[0], 1, e.first, e.each) for e in ends)
    local = [end.rank(rank, plan.cluster.devices_per_node) for end in ends]
    given = []
    wanted = []
    if 0 <= local[0] < source.layout.devices:
        boxes = [(t.name, shard(t, source, local[0])) for t in m.weights]
        given = [Shard(name, box, part(box, name)) for name, box in boxes]
    if 0 <= local[1] < target.layout.devices:
        boxes = [(t.name, shard(t, target, local[1])) for t in m.weights]
        wanted = [Shard(name, box, torch.zeros([b - a for a, b in box])) for name, box in boxes]
    return (plan, edge, m, rank, sides, given), wanted


def send(rank, folder, cases):
    for case in cases:
        arguments, wanted = both(rank, case)
        edge = arguments[1]
        given = arguments[-1]
        sender = Sender(*arguments)
        moved = {t.name for t in arguments[2].moved}
        for turn in range(2):
            sender.run(lambda w=wanted: w)
            for piece in (*given, *wanted):
                assert torch.equal(piece.tensor, part(piece.box, piece.name)), (case, piece.name)
            assert sender.moved == sum(4 * elements(p.box) for p in wanted if not turn or p.name in moved)
            assert sender.moved <= (edge.received_bytes_per_device if turn else edge.generate_bytes_per_device)
            for piece in wanted:
                if piece.name in moved:
                    piece.tensor.zero_()


def publish(rank, folder, cases):
    """The update goes on from version to version, which are all weights plus the version; the generation fetches some
    of them, as it was told, and lags behind."""
    store = met(rank, folder)
    for case in cases:
        arguments, wanted = both(rank, case)
        given, sender = arguments[-1], WeightPublication(*arguments, store=store, deadline=60.0)
        moved = {t.name for t in arguments[2].moved}
        told = 0
        for version, fetches in enumerate((1, 0, 1, 2, 0, 0, 1)):
            if given:
                sender.publish(version, told)
                for piece in given:
                    piece.tensor.add_(piece.name in moved)  # an optimizer step, while what was published is fetched
            told += fetches
            for _ in range(fetches if wanted else 0):
                time.sleep(0.02 * (version % 2))
                sender.fetch(version, lambda w=wanted: w)
                for piece in wanted:
                    expected = part(piece.box, piece.name) + version * (piece.name in moved)
                    assert torch.equal(piece.tensor, expected), (case, version, piece.name)
        dist.barrier()


def pairs(world):
    """Layouts of two pools that the model's 4 heads and 2 key-value heads allow, and what makes up `world` ranks."""
    for devices in range(1, world):
        sources = [Layout(tp=tp, dp=devices // tp, zero=z) for tp in (1, 2) if devices % tp == 0 for z in (1, 3)]
        rest = world - devices
        targets = [Layout(tp=tp, dp=rest // tp) for tp in (1, 2) if rest % tp == 0]
        hosts = [n for n in (1, 2) if world % n == 0]
        yield from product(sources, targets, ("update", "generate"), hosts, (0, 50_000))
        beside = [n for n in hosts if n > 1 and devices % n == 0 and rest % n == 0]
        yield from product(sources, targets, ("beside",), beside, (0, 50_000))


@pytest.mark.core
@pytest.mark.parametrize(
    "world", [2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(6, marks=pytest.mark.slow)]
)
def test_any_layout_to_any_layout_of_another_pool(world):
    cases = list(pairs(world))
    random.Random(world).shuffle(cases)
    ranks.run(world, send, cases[:12] + [(*case, FROZEN) for case in cases[:6]])


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_generation_has_the_version_that_it_fetches_whatever_the_update_does_meanwhile(world):
    cases = list(pairs(world))
    random.Random(world).shuffle(cases)
    ranks.run(world, publish, cases[:6] + [(*case, FROZEN) for case in cases[6:12]])


def test_pools_beside_each_other_on_each_host():
    ranks.run(4, send, [case for case in pairs(4) if case[2] == "beside" and case[4]])


def half(rank, folder):
    """An update in bf16, a generation in f32: what arrives are the update's values."""
    m = model()
    plan = planned(Layout(), Layout(), "update", 1, 0)
    (edge,) = plan.reshards
    torch.manual_seed(0)
    whole = {t.name: torch.randn(t.shape, dtype=torch.bfloat16) for t in m.weights}
    boxes = {t.name: shard(t, Side(Layout()), 0) for t in m.weights}
    given = [Shard(n, boxes[n], whole[n]) for n in whole] if rank == 0 else []
    wanted = [Shard(n, boxes[n], torch.zeros(whole[n].shape)) for n in whole] if rank == 1 else []
    sender = Sender(plan, edge, replace(m, dtype="bf16"), rank, (Side(Layout()), Side(Layout(), first=1)), given)
    sender.run(lambda: wanted)
    assert all(torch.equal(piece.tensor, whole[piece.name].float()) for piece in wanted)
    assert sender.moved == sum(2 * v.numel() for v in whole.values()) * rank


def test_bytes_go_in_the_updates_type():
    ranks.run(2, half)


def strided(rank, _):
    """What lies in strides, as an engine's experts may, is laid into the message and nowhere else."""
    plan = planned(Layout(), Layout(), "update", 1, 0)
    (edge,) = plan.reshards
    m = model()
    sides = tuple(Side(Layout(), False, 1, first) for first in (0, 1))
    shards = []
    for t in m.weights:
        wide = torch.zeros([*t.shape[:-1], 2 * t.shape[-1]])
        shards.append(Shard(t.name, full_box(t.shape), wide[..., : t.shape[-1]]))
    sender = Sender(plan, edge, m, rank, sides, shards if rank == 0 else [])
    before = memory.live_bytes()["device"]
    with memory.Peak() as peak:
        sender.run(lambda: shards if rank else [])
    assert peak.peak["device"] - before == edge.bucket_bytes


def test_a_message_takes_its_bucket_and_no_more():
    ranks.run(2, strided)
