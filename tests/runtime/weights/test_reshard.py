"""Resharding on real ranks: from any layout to any other, dense and with experts, each rank gets its boxes bit for bit,
and the update its own back; what moves is what the plan says, and frozen weights move once."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import layouts
import pytest
import ranks
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st
from sample import examples
from torch import distributed as dist

from msrl_graph.backends import devices
from msrl_graph.backends.engine_protocols import Shard
from msrl_graph.hardware.cluster import Figure
from msrl_graph.ir.resharding_plan import Reshard, Step
from msrl_graph.passes.reshard import list_routes
from msrl_graph.runtime.weights.frozen_copies import FrozenCopies, HostRanks
from msrl_graph.runtime.weights.reshard import HostSwap, Resharder
from msrl_graph.runtime.weights.transfer_routes import Block
from msrl_graph.sharding.layout import Layout, Side, elements, group_by_kind, shard, slices
from msrl_graph.sharding.redistribute import list_gather_groups
from msrl_graph.sharding.tensors import Tensor

ITEM = {torch.float32: 4, torch.bfloat16: 2}


def moving(rank):
    """Each case on a rank: the bytes that it received, by way."""
    groups = {}

    def group(members):
        if members not in groups:
            groups[members] = dist.new_group(members) if len(members) > 1 else None
        return groups[members]

    store = dist.distributed_c10d._get_default_store()
    counter = itertools.count()

    def move(tensors, source, target, mode, order, cut, dtype):
        frozen = {t.name for t in tensors if t.frozen}
        model = SimpleNamespace(weights=tensors, kinds=group_by_kind(tensors), frozen_names=frozen)
        whole = {t.name: torch.arange(t.elements).reshape(t.shape).add(i).to(dtype) for i, t in enumerate(tensors)}

        def holding(side, fill):
            boxes = [(t.name, shard(t, side, rank)) for t in tensors]
            return [Shard(name, box, fill(whole[name][slices(box)])) for name, box in boxes]

        given = holding(source, torch.clone)
        wanted = holding(target, torch.zeros_like)
        ways = [way for way, _ in list_routes(model.kinds, source, target, 8, ITEM[dtype])]
        blocks = {}
        for way in ways:
            for members in list_gather_groups(source, way.across, way.block):
                made = group(members)
                if rank in members:
                    blocks[way.of] = Block(members, made)
        some = [[t.name for t in tensors if t.frozen is once] for once in (False, True)]
        buckets = [tuple(tuple(names[i : i + cut]) for i in range(0, len(names), cut)) for names in some]
        nothing = Step("", 0, Figure(0, "assumed"))
        edge = Reshard("a", "b", mode, order, "", tuple(ways), 0, *buckets, (), nothing, 0, 0, 0, 0, 0)
        swap = HostSwap(given, frozen)
        mover = Resharder(edge, model, rank, (source, target), blocks, swap)
        size = -(-target.devices // 2)  # two hosts
        host = tuple(other for other in range(target.devices) if other // size == rank // size)
        ranks_of_host = HostRanks(target, rank, host, store, f"case {next(counter)}", 60)
        copies = FrozenCopies(devices.device_of(given[0].tensor), model, ranks_of_host)

        def allocate():
            copies.fetch()
            return wanted

        for turn in range(3):
            mover.run(allocate)
            copies.store(wanted)
            for piece in wanted:
                assert torch.equal(piece.tensor, whole[piece.name][slices(piece.box)]), piece.name
                piece.tensor.zero_()
            size = sum(ITEM[dtype] * elements(p.box) for p in given)
            assert sum(p.tensor.untyped_storage().nbytes() for p in given) == (0 if mode == "swap" else size)
            assert sum(h.nbytes for h in swap.host) == (size if mode == "swap" else 0)
            if turn:
                swap.start_in()
            swap.wait()
            assert not swap.host
            for piece in given:
                assert torch.equal(piece.tensor, whole[piece.name][slices(piece.box)]), piece.name
                if piece.name not in frozen:
                    piece.tensor.add_(1)
            for name in whole.keys() - frozen:
                whole[name].add_(1)
        assert mover.moved == sum(mover.received.values()) <= mover.first_moved
        return mover.received

    return move


@pytest.fixture(scope="module", params=[1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def team(request):
    team = ranks.Team(request.param, moving)
    yield team
    team.close()


def named(tensors):
    return tuple(replace(t, name=f"{i}") for i, t in enumerate(tensors))


@st.composite
def cases(draw):
    """Tensors, and what of a case does not hang on the number of ranks; layouts are drawn for each."""
    tensors = named(draw(st.lists(layouts.tensors(), min_size=1, max_size=6)))
    tensors = tuple(replace(t, frozen=t is not tensors[0] and draw(st.booleans())) for t in tensors)
    mode, order = draw(st.sampled_from([("swap", "direct"), ("swap", "staged"), ("naive", "direct")]))
    return tensors, mode, order, draw(st.integers(1, 6)), draw(st.sampled_from([torch.float32, torch.bfloat16]))


# A matrix, a norm, an embedding, and experts, as models have them.
USUAL = named(
    [
        Tensor("", (16, 4), 0, padded=True, layer=-1, layers=5),
        *(Tensor("", (8, 4), 0, unit=2, layer=i, layers=5) for i in range(5)),
        *(Tensor("", (4,), layer=i, layers=5) for i in range(5)),
        *(Tensor("", (8, 6, 4), 1, experts=True, layer=i, layers=5) for i in range(5)),
    ]
)


@examples(25, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(case=cases(), data=st.data())
def test_any_layout_to_any_layout(team, case, data):
    tensors, mode, order, cut, dtype = case
    source = data.draw(layouts.sides(team.world), "source")
    target = replace(data.draw(layouts.sides(team.world), "target"), divided=False)
    agree(team, (tensors, source, target, mode, order, cut, dtype))


def agree(team, case):
    """Ranks move it, and receive what the plan says that the busiest does: up to the largest box more or less where
    several have the same, and an all-gather leaves it to one of them."""
    tensors, source, target, *_, dtype = case
    found = team.ask(*case)
    largest = max(t.elements for t in tensors)
    for way, _ in list_routes(group_by_kind(tensors), source, target, 8, ITEM[dtype]):
        most = max(moved[way.of] for moved in found)
        slack = largest * ITEM[dtype] if way.how == "all-gather" else 0
        assert abs(most - way.bytes) <= slack, way


LAYOUTS = {
    2: [Layout(pp=2), Layout(tp=2), Layout(dp=2), Layout(dp=2, ep=2), Layout(tp=2, etp=2), Layout(cp=2, ep=2)],
    4: [Layout(pp=2, dp=2, ep=2), Layout(pp=2, tp=2, vpp=2), Layout(tp=2, dp=2, ep=2, etp=2), Layout(tp=4, ep=4)],
}


def test_usual_layouts_to_each_other(team):
    some = LAYOUTS.get(team.world, [])
    for source in some:
        for target in some:
            for divided in (False, True):
                agree(
                    team, (USUAL, Side(source, divided), Side(target, multiple=4), "swap", "direct", 5, torch.float32)
                )
