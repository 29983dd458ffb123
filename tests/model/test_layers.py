"""What plans of models count whose layers are of several kinds, by hand."""

from dataclasses import replace as replaced
from functools import partial
from pathlib import Path

import page
import pytest
from msgspec.structs import replace

from msrl_graph.backends import ENGINES
from msrl_graph.backends.divisibility import find_misfits
from msrl_graph.cost import default_activations
from msrl_graph.cost.collectives import Collectives
from msrl_graph.cost.operators import ForwardWork
from msrl_graph.cost.time import Costs
from msrl_graph.ir.workload import Workload, kv_bytes
from msrl_graph.model import models
from msrl_graph.model.layers import DenseMlp, ExpertMlp, GroupedQueryAttention, Layer, LayerNorms
from msrl_graph.sharding.layout import Layout
from msrl_graph.sharding.tensors import Tensor

WINDOW = 1024
FULL = GroupedQueryAttention(16, 8, 64)
SLIDING = GroupedQueryAttention(16, 8, 64, window=WINDOW)
NARROW = GroupedQueryAttention(12, 6, 64)
DENSE = DenseMlp(3072)
EXPERTS = ExpertMlp(16, 2, 512)
BASE = models.load("qwen2.5-7b", Path())


def stacked(*layers):
    return replaced(BASE, stack=layers)


HYBRID = stacked(*(Layer(SLIDING, DENSE, 3), Layer(FULL, DENSE)) * 2)


def test_kinds_of_layers_are_counted_on_any_stretch():
    assert HYBRID.layer_kinds == (Layer(SLIDING, DENSE, 6), Layer(FULL, DENSE, 2)) and HYBRID.layers == 8
    assert HYBRID.count_kinds((0, 4)) == (3, 1) and HYBRID.count_kinds((2, 3), (5, 8)) == (3, 1)
    with pytest.raises(ValueError, match="too many values"):
        _ = HYBRID.mixer


def test_a_window_bounds_the_cache():
    element = 2 * 8 * 64
    assert kv_bytes(HYBRID, Layout(), 100, 1) == 8 * 100 * element
    assert kv_bytes(HYBRID, Layout(tp=2), 5000, 1) == (6 * WINDOW + 2 * 5000) * element / 2
    # The stage that holds the largest cache has both layers of full attention.
    stages = stacked(Layer(SLIDING, DENSE, 6), Layer(FULL, DENSE, 2))
    assert kv_bytes(stages, Layout(pp=2), 5000, 1) == (2 * WINDOW + 2 * 5000) * element


@pytest.mark.parametrize("tokens", [500, 1024, 1500, 5000])
def test_a_window_bounds_the_keys_of_a_query(tokens):
    """Position i sees min(window, i) keys; half a whole square stands for a causal one."""
    pairs = sum(min(WINDOW, i) for i in range(1, tokens + 1))
    assert SLIDING.share_of_pairs(tokens, False) * tokens**2 / 2 == pytest.approx(pairs, rel=2e-3)
    assert SLIDING.share_of_pairs(tokens, True) * tokens == min(WINDOW, tokens)
    assert FULL.share_of_pairs(tokens, False) == 1


def test_seconds_are_the_sum_over_kinds_of_layers():
    plan = page.plan(page.start())

    def attention(*layers):
        model = stacked(*layers)
        costs = Costs(plan, ENGINES, "actor.infer")
        costs.__dict__["model"] = model
        work = (costs._pass("infer", make_work(8192.0, squares)).value for squares in (8192.0**2, 0.0))
        return next(work) - next(work)

    full = attention(Layer(FULL, DENSE, 8))
    sliding = attention(Layer(SLIDING, DENSE, 8))
    share = 1 / 8 * (2 - 1 / 8)
    assert sliding == pytest.approx(share * full)
    assert attention(*HYBRID.stack) == pytest.approx(full * (2 + 6 * share) / 8)


def make_work(tokens, squares):
    return ForwardWork(tokens, 0.0, 1.0, tokens, squares, 0.0)


def test_activations_are_those_of_each_stage():
    work = Workload(stacked(Layer(FULL, DENSE, 2), Layer(FULL, EXPERTS, 2)), Layout(pp=2), "bf16", 1, 1, 10, 10)
    spec = ENGINES["megatron"]
    dense, routed = (default_activations.layer_elements(work, spec, layer) for layer in work.model.stack)
    moments = default_activations.moments("update", work, spec)
    by_stage = [moments[f"stage {stage} of 2"]["activations"] for stage in (1, 2)]
    assert by_stage == [20 * 2 * 2 * dense, 20 * 2 * 2 * routed]


def test_each_kind_of_layer_must_be_divided():
    model = stacked(Layer(FULL, DENSE), Layer(NARROW, DenseMlp(100)))
    (told,) = find_misfits(model, ENGINES["fsdp"], Layout(tp=8))
    assert told == (
        f"tp = 8 does not divide the 12 heads, the 6 key-value heads and the intermediate size of 100 of `{BASE.name}`"
    )
    assert not [*find_misfits(model, ENGINES["fsdp"], Layout(tp=2))]
    (told,) = find_misfits(model, ENGINES["fsdp"], Layout(cp=8, cp_kind="ulysses"))
    assert told.startswith("tp x cp = 8 does not divide the 12 heads")


def test_tokens_are_sent_to_experts_in_the_layers_that_have_them():
    plan = page.plan(page.start())
    placement = replaced(plan.placement("actor.infer"), layout=Layout(dp=16, ep=2))

    def seconds(*layers):
        model = stacked(*layers)
        return Collectives(plan.cluster, placement, model, ENGINES["fsdp"], "bf16").experts(1000, 1).value

    alternating = (Layer(FULL, DENSE), Layer(FULL, EXPERTS)) * 3
    assert seconds(*alternating) == pytest.approx(seconds(Layer(FULL, EXPERTS, 3)))
    assert seconds(Layer(FULL, DENSE, 6)) == 0


def test_the_slowest_stage_is_that_with_the_most_work():
    plan = page.plan(page.start())
    costs = Costs(plan, ENGINES, "actor.infer")

    def factor(*layers):
        own = Costs(plan, ENGINES, "actor.infer")
        own.__dict__.update(model=stacked(*layers), layout=Layout(pp=2, dp=8))
        return own._slowest_stage_factor

    assert costs._slowest_stage_factor == 1
    assert factor(Layer(FULL, DENSE, 4)) == 1 and factor(Layer(FULL, DENSE, 3)) == pytest.approx(4 / 3)
    assert factor(*HYBRID.stack) == 1, "each stage has three layers with a window and one without"
    assert 1 < factor(Layer(SLIDING, DENSE, 2), Layer(FULL, DENSE, 2)) < 2
    narrow = DenseMlp(DENSE.intermediate // 2)
    assert 1.1 < factor(Layer(FULL, narrow, 2), Layer(FULL, DENSE, 2)) < 4 / 3


def test_norms_and_capped_scores_are_counted_by_layer():
    sandwich = LayerNorms(("a", "b"), ("c", "d"))
    capped = replace(FULL, cap=50.0)
    model = stacked(Layer(FULL, DENSE, 3, sandwich), Layer(capped, DENSE, 2), Layer(capped, EXPERTS, 1, sandwich))
    assert [layer.norms.number * layer.count for layer in model.layer_kinds] == [12, 4, 4]
    assert [layer.count for layer in model.layer_kinds] == [3, 2, 1]
    assert model.count_capped(100) == 3 * 16 * 100**2 / 2 and stacked(Layer(FULL, DENSE)).count_capped(100) == 0
    named = [t.name for t in sandwich.list_tensors(lambda name, shape: Tensor(name, shape), 8)]
    assert named == ["a.weight", "b.weight", "c.weight", "d.weight"]


def test_a_tensor_of_a_fused_one_is_a_part_of_its_rows():
    made = [*replace(FULL, fused=True).list_tensors(partial(Tensor), 8)]
    (q, k, v), (name,) = made[:3], {name for t in made[:3] for name, _, _ in t.in_files(((0, 64), (0, 8)))}
    assert name == "self_attn.qkv_proj.weight" and (q.start, k.start, v.start) == (0, 16 * 64, 24 * 64)
    assert [*v.in_files(((64, 128), (0, 8)))] == [(name, (), ((25 * 64, 26 * 64), (0, 8)))]
