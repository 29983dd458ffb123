"""What Megatron holds beside weights and optimizer states is what its spec says, on every layout; and what a whole
program by Megatron and vLLM holds is what its plan says."""

import pytest
import ranks
from held import EXPERTS, assert_close, peaks, small
from walk import CASES as WALKS
from walk import measured, predicted
from walk_adapters import HEAVY as ADAPTED
from walk_frozen import HEAVY

from msrl_graph.backends.memory.sizes import CHUNK
from msrl_graph.model.lora import ALL_LINEAR, adapt
from msrl_graph.model.lora_settings import Lora
from msrl_graph.sharding.layout import Layout

CASES = {
    "one rank": (Layout(), {}),
    "tied": (Layout(), {"tie_word_embeddings": True}),
    "bf16": (Layout(), {"dtype": "bfloat16"}),
    "experts": (Layout(), EXPERTS),
    "tp 2": (Layout(tp=2), {}),
    "pp 2": (Layout(pp=2), {}),
    "vpp 2": (Layout(pp=2, vpp=2), {}),
    "dp 2, zero 0": (Layout(dp=2, zero=0), {}),
    "dp 2, zero 1": (Layout(dp=2), {}),
    "cp 2": (Layout(cp=2), {}),
    "experts, tp 2, ep 2": (Layout(tp=2, ep=2), EXPERTS),
    "experts, tp 2, etp 2": (Layout(tp=2, etp=2), EXPERTS),
}

NAMES = ("qwen2, tied, deep, megatron and vllm", "experts, dp 2 x ep 2, megatron and vllm")
PROGRAMS = (*(walk for walk in WALKS if walk.name in NAMES), *HEAVY, *ADAPTED)


@pytest.mark.parametrize(("layout", "changes"), CASES.values(), ids=CASES)
def test_it_holds_what_is_said(layout, changes, tmp_path):
    assert_close(peaks("megatron", small(tmp_path, **changes), layout))


@pytest.mark.parametrize(("layout", "changes"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("targets", [(ALL_LINEAR,), ("q_proj", "v_proj")], ids=len)
def test_so_it_does_of_an_adapter(layout, changes, targets, tmp_path):
    adapted = adapt(small(tmp_path, **changes), Lora(8, 16.0, targets))
    assert_close(peaks("megatron", adapted, layout))


@pytest.mark.parametrize("name", ["experts", "tp 2", "pp 2", "dp 2, zero 1", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_so_it_does_of_gradients_and_moments_in_bf16(name, dtype, tmp_path):
    layout, changes = CASES[name]
    model = small(tmp_path, **changes, dtype=dtype)
    for chunk in (1 << 10, CHUNK):  # the smaller one shows the moments besides the optimizer's step
        assert_close(peaks("megatron", model, layout, gradients="bf16", moments="bf16", chunk=chunk))


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_so_it_does_of_dropout_whose_masks_are_not_kept(layout, tmp_path):
    adapted = adapt(small(tmp_path), Lora(8, 16.0, (ALL_LINEAR,), dropout=0.1))
    assert_close(peaks("megatron", adapted, layout))


OPTIONS = [{"recompute": choice} for choice in ("full", 2, ("attention", "norms"), ("mlp",))] + [{"entropy": True}]


@pytest.mark.parametrize("more", OPTIONS, ids=str)
def test_so_it_does_of_what_is_computed_again_and_of_entropies(more, tmp_path):
    assert_close(peaks("megatron", small(tmp_path), Layout(), **more))
    assert_close(peaks("megatron", adapt(small(tmp_path), Lora(8, 16.0, (ALL_LINEAR,))), Layout(), **more))


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, ep=2)], ids=str)
def test_so_it_does_of_experts_that_are_computed_again(layout, tmp_path):
    assert_close(peaks("megatron", small(tmp_path, **EXPERTS), layout, recompute=("moe", "norms")))


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_so_it_does_of_a_model_that_scores(layout, tmp_path):
    assert_close(peaks("megatron", small(tmp_path).scoring, layout))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_so_it_does_of_a_program_in_each_of_its_phases(program, tmp_path):
    """Weights and optimizer states among it, and what vLLM holds as it is built."""
    plan = program.write(tmp_path)
    found = measured(plan)
    ranks.end()
    for (place, phase), (wanted, _) in predicted(plan).items():
        assert wanted == pytest.approx(found[place, phase][0], rel=0.05), (place, phase)
