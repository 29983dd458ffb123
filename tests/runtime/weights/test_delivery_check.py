"""Weights that arrive are what was sent: digests add up however tensors are cut, and whatever goes wrong on the way is
told with its tensor, in the iteration in which it does."""

import re
from dataclasses import replace

import deliveries
import layouts
import pytest
import ranks
import torch
from deliveries import COLUMNS, ROWS, WAYS, planned
from hypothesis import given
from hypothesis import strategies as st
from sample import examples
from stage import Stage, one_rank

from msrl_graph.backends import fsdp, hf
from msrl_graph.backends.engine_protocols import Shard
from msrl_graph.runtime.process.task import Task
from msrl_graph.runtime.process.task_report import Report, WeightsNotDelivered
from msrl_graph.runtime.rank import weight_proof
from msrl_graph.runtime.rank.rank import InstructionRunner
from msrl_graph.runtime.weights.delivery_check import Delivery, describe_mismatch
from msrl_graph.runtime.weights.digest import Digest
from msrl_graph.sharding.layout import elements, full_box, shard, slices

# The policy that generates is frozen.
NAMED = (
    ("  actor.generate -> ", "  reference.generate -> "),
    ("source -> actor.generate", "source -> reference.generate"),
)
NAMED += (("layout actor.generate", "layout reference.generate"),)
FLOATS = (torch.float32, torch.bfloat16)


def digest(tensors, dtype=torch.float32, at_once=7):
    return Digest([t.shape for t in tensors], dtype, "cpu", at_once)


def filled(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def holding(tensors, whole, side, rank):
    held = [(t.name, shard(t, side, rank)) for t in tensors]
    return [Shard(name, box, whole[name][slices(box)].clone()) for name, box in held]


# The digest.


@examples(60)
@given(st.data())
def test_parts_of_any_layout_sum_to_what_ranks_of_any_other_hold(data):
    tensors = [
        replace(t, name=f"{i}") for i, t in enumerate(data.draw(st.lists(layouts.tensors(), min_size=1, max_size=4)))
    ]
    source = data.draw(layouts.sides(), "source")
    target = data.draw(layouts.sides(), "target")
    target = replace(target, divided=False)
    dtype = data.draw(st.sampled_from(FLOATS))
    whole = {t.name: filled(t.shape, i) for i, t in enumerate(tensors)}
    of = digest(tensors, dtype, data.draw(st.integers(1, 100)))
    ends = [Delivery(tensors, (source, target), (rank, -1), of) for rank in range(source.devices)]
    sent = sum(end.sent_digests(holding(tensors, whole, source, rank)) for rank, end in enumerate(ends))
    work = [sum(elements(part.box) for part in end.parts) for end in ends]
    assert sum(work) == sum(elements(box) for t in tensors for box in {*boxes(t, target)}), "each element once"
    wide = data.draw(st.booleans())  # as an engine may hold them
    for rank in range(target.devices):
        end = Delivery(tensors, (source, target), (-1, rank), of)
        shards = [s for s in holding(tensors, whole, target, rank) if s.tensor.numel()]
        shards = [replace(s, tensor=s.tensor.to(dtype).to(torch.float64 if wide else dtype)) for s in shards]
        assert end.find_differences(end.held_digests(shards), sent) == []
        if shards:
            changed = data.draw(st.sampled_from(shards))
            flat = changed.tensor.view(-1)
            flat[data.draw(st.integers(0, flat.numel() - 1))] += 1
            assert end.find_differences(end.held_digests(shards), sent) == [changed.name]


def boxes(tensor, side):
    return [box for rank in range(side.devices) if elements(box := shard(tensor, side, rank))]


@given(st.data())
def test_any_change_of_an_element_and_any_exchange_show(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from(FLOATS))
    of = Digest([shape], dtype, "cpu", data.draw(st.integers(1, 50)))
    box = full_box(tuple(shape))
    values = filled(shape, data.draw(st.integers(0, 99))).to(dtype)
    before = int(of.digests([values], of.position_weights(box)))
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    place = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    other = values.clone()
    size = 8 * dtype.itemsize
    bit = data.draw(st.integers(0, size - 1))
    other.view(bits)[place] ^= 1 << bit if bit < size - 1 else torch.iinfo(bits).min
    assert int(of.digests([other], of.position_weights(box))) != before
    there = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    exchanged = values.clone()
    exchanged[place] = values[there]
    exchanged[there] = values[place]
    assert (int(of.digests([exchanged], of.position_weights(box))) == before) == bool(values[place] == values[there])
    dim = data.draw(st.integers(0, len(shape) - 1))
    order = torch.arange(shape[dim])
    order[[place[dim], there[dim]]] = order[[there[dim], place[dim]]]
    rows = values.index_select(dim, order)
    assert (int(of.digests([rows], of.position_weights(box))) == before) == torch.equal(rows, values)


@pytest.mark.parametrize("dtype", FLOATS)
def test_signs_alone_show_where_elements_change_places(dtype):
    """Bits that differ in the highest place alone."""
    values = torch.full((40, 40), 1.5, dtype=dtype)
    of = digest([values], dtype, 100)
    found = set()
    for i in range(40):
        one = values.clone()
        one[i, (7 * i) % 40] = -1.5
        found.add(int(of.digests([one], of.position_weights(full_box((40, 40))))))
    assert len(found) == 40


# What is bound.


def test_what_an_engine_does_not_have_is_told_by_name():
    declared = {"a": ((0, 2), (0, 3)), "b": ((1, 3),)}
    a = Shard("a", declared["a"], torch.zeros(2, 3))
    b = Shard("b", declared["b"], torch.zeros(2))
    nothing = Shard("of another stage", ((0, 0),), torch.zeros(0))
    assert describe_mismatch(declared, [a, b, nothing]) == ""
    assert describe_mismatch(declared, [a]) == "1 tensors, but its layout declares 2: `b` is missing"
    assert describe_mismatch(declared, [b, a, a]) == "3 tensors, but its layout declares 2: `a` is there 2 times"
    other = replace(b, name="c")
    assert describe_mismatch(declared, [a, other]) == (
        "2 tensors, but its layout declares 2: `b` is missing, and 1 more"
    )
    assert describe_mismatch(declared, [a, b, other]).endswith("`c` is not part of it")
    flat = replace(a, tensor=torch.zeros(6))
    assert describe_mismatch(declared, [flat, b]).endswith("`a` has shape [6] instead of [2, 3]")


@pytest.mark.usefixtures("alone")
def test_an_engine_that_lacks_a_tensor_ends_the_run_as_it_is_built_or_as_weights_come(monkeypatch):
    for engine, method, what in (
        (hf.HfEngine, "allocate", None),
        (fsdp.FsdpEngine, "shards", "`actor.update` (line 28"),
    ):
        with monkeypatch.context() as patch:
            whole = getattr(engine, method)
            patch.setattr(engine, method, lambda self, whole=whole: [s for s in whole(self) if s.name != COLUMNS])
            with pytest.raises(WeightsNotDelivered) as error:
                reshard(Stage(one_rank()))
            assert f"50 tensors, but its layout declares 51: `{COLUMNS}` is missing" in str(error.value)
            assert str(error.value).startswith(
                what or "`actor.update => actor.generate` (line 39 of grpo.rlg) on rank 0"
            )


@pytest.mark.usefixtures("alone")
def test_a_frozen_generator_that_lacks_a_tensor_ends_the_run_as_it_is_built(monkeypatch):
    whole = hf.HfEngine.allocate
    monkeypatch.setattr(hf.HfEngine, "allocate", lambda self: whole(self)[1:])
    plan = one_rank(
        ("  actor.update => actor.generate\n", ""), ("actor.generate(prompt)", "reference.generate(prompt)"), *NAMED
    )
    with pytest.raises(
        WeightsNotDelivered,
        match=r"^`reference.generate` \(line 23 of grpo.rlg\), engine hf: rank 0 of its layout has 50",
    ):
        Stage(plan)


def reshard(stage, number=0):
    report = Report("rank")
    InstructionRunner(stage, Task("train", number, 4, 2), report).reshard((), "actor.update", "actor.generate")
    return report


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("share", "probed"), [(-1.0, [0, 1, 101]), (1e9, [*range(110)])])
def test_probes_are_as_many_as_time_allows_and_one_of_so_many_at_least(share, probed, monkeypatch):
    monkeypatch.setattr(weight_proof, "SHARE", share)
    stage = Stage(one_rank())
    found = []
    (one,) = stage.engines.proofs.values()
    for number in range(110):
        assert reshard(stage, number).seconds["proof"] > 0
        if one.unprobed:
            found.append(number)
            one.probe()
    assert found == probed


# Deliveries, on ranks.


@pytest.mark.parametrize("how", [*deliveries.BREAKS])
@pytest.mark.parametrize("way", [*WAYS])
def test_what_breaks_on_the_way_is_told_with_its_tensor(way, how, tmp_path):
    plan = planned(way)
    ranks.run(WAYS[way][0], deliveries.broken, plan.to_json(), how, str(tmp_path))
    words = [w for file in sorted(tmp_path.iterdir()) if (w := file.read_text())]
    tensor = ROWS if (how, way) in (("cut_wrongly", "send"), ("cut_wrongly", "fetch")) else COLUMNS
    line = next(e.span.line for e in plan.graph.reshards())
    old = " and equals version 1" if how in ("not_sent", "sent_as_it_was") else ""
    expected = (
        rf"`actor.update => actor.generate` \(line {line} of grpo.rlg\) on rank \d: `{re.escape(tensor)}` differs from "
        rf"version 2 of `actor.update`{old} \(1 of 51 tensors differ\)"
    )
    assert words and all(re.fullmatch(expected, w) for w in words), words


@pytest.mark.parametrize("way", [*WAYS])
@pytest.mark.parametrize("types", [("f32", "bf16"), ("bf16", "bf16"), ("bf16", "f32")])
def test_types_that_differ_are_no_mistake(way, types, tmp_path):
    """The digest is of what the update has in the generation's type, and a probe bears what such a type rounds."""
    update, generate = types
    stated = f"engine actor.update = fsdp {{ dtype = {update} }}\n  engine actor.generate = hf {{ dtype = {generate} }}"
    plan = planned(way, ("  run {", f"  {stated}\n  run {{"))
    ranks.run(WAYS[way][0], deliveries.keeping, plan.to_json(), "Plain", str(tmp_path))
    assert [file.read_text() for file in tmp_path.iterdir()] == ["\n\n"] * WAYS[way][0]


@pytest.mark.parametrize("way", [*WAYS])
@pytest.mark.parametrize("engine", ["Copying", "Prefixes"])
def test_what_an_engine_keeps_of_old_weights_is_told(way, engine, tmp_path):
    """Digests of what it holds are right: the probe tells."""
    bad = {"Copying": "CopyingOnce", "Prefixes": "PrefixesOfOld"}[engine]
    for name in (engine, bad):
        (out := tmp_path / name).mkdir()
        ranks.run(WAYS[way][0], deliveries.keeping, planned(way).to_json(), name, str(out))
        first, second, _ = zip(*(file.read_text().split("\n") for file in sorted(out.iterdir())), strict=True)
        assert not any(first)
        if name == engine:
            assert not any(second)
            continue
        words = [w for w in second if w]
        assert words
        for w in words:
            assert "it holds version 1 of the weights, but does not compute what `actor.update` computes" in w, w
            assert "off by" in w or "not one of the trainer's 8 likeliest" in w


def test_an_engine_with_kernels_of_its_own_can_be_left():
    """The statement that the message proposes compiles."""
    assert weight_proof.suggest_other_kernels("actor.generate", "hf") == ""
    (statement,) = re.findall("`(.*)`", weight_proof.suggest_other_kernels("actor.generate", "vllm"))
    plan = planned("swap", ("  run {", f"  {statement}\n  run {{"))
    assert plan.placement("actor.generate").engine.name == "hf"


@pytest.mark.parametrize(
    ("spent", "probing", "since", "probed"), [(0.7, 0.2, 1, True), (0.9, 0.2, 1, False), (9, 9, 99, True)]
)
def test_a_delivery_is_probed_where_the_proof_stays_within_its_share_with_that_and_at_least_now_and_then(
    monkeypatch, spent, probing, since, probed
):
    monkeypatch.setattr(weight_proof.time, "perf_counter", lambda: 101.0)
    one = object.__new__(weight_proof.WeightProof)
    one.began = 1.0
    one.spent = spent
    one.probing = probing
    one.since = since
    assert one._affords() == probed
