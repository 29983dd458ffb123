"""Which ranks have which experts: what each engine makes of a layout, and that what is advised compiles."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
from folders import TESTS

from msrl_graph import compile
from msrl_graph.backends import ENGINES
from msrl_graph.diagnostics import Fault
from msrl_graph.ir.plan import Plan
from msrl_graph.model.models import load
from msrl_graph.sharding.layout import Layout

PAGE = (TESTS / "programs" / "grpo_page.rlg").read_text(encoding="utf-8")
QWEN = "qwen3-30b-a3b"
DEEPSEEK = "deepseek-r1-671b"


def text(model: str, device: str, hosts: int, *statements: str) -> str:
    """The page's program with another model and cluster, and these statements in place of its layouts."""
    lines = [line for line in PAGE.split("\n") if not line.strip().startswith("layout ")]
    made = "\n".join(lines).replace("qwen2.5-32b", model).replace("ascend-910c", device)
    made = made.replace("nodes            = 2", f"nodes            = {hosts}")
    return made.replace("  run {", "\n".join([*(f"  {s}" for s in statements), "  run {"]))


def planned(*program: object) -> Plan:
    return compile("p.rlg", text=text(*program))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "layout", "etp", "has"),
    [
        ("vllm", Layout(tp=4, dp=2), 4, True),
        ("vllm", Layout(tp=4, dp=2, ep=4), 1, True),
        ("vllm", Layout(tp=4, dp=2, ep=8), 1, True),
        ("vllm", Layout(tp=4, dp=2, ep=2), 1, False),
        ("vllm", Layout(tp=4, dp=3, ep=8), 1, False),
        ("megatron", Layout(tp=4, dp=2, ep=2), 4, True),
        ("megatron", Layout(tp=4, dp=2, ep=4), 4, False),
        ("fsdp", Layout(tp=2, dp=4, ep=8), 1, True),
        ("fsdp", Layout(dp=4, ep=8), 1, False),
        ("hf", Layout(tp=2, dp=2), 1, True),
        ("hf", Layout(dp=2, ep=2), 1, False),
    ],
)
def test_what_an_engine_makes_of_a_layout(engine: str, layout: Layout, etp: int, has: bool) -> None:
    spread = ENGINES[engine].sharding.spread
    model = load(QWEN, Path())
    open_ = Layout(tp=layout.tp, dp=layout.dp, ep=layout.ep, etp=0)
    settled = spread.settle_etp(open_, model)
    assert (settled.etp, spread.has(settled)) == (etp, has)
    assert spread.settle_etp(open_, load("qwen2.5-7b", Path())).etp == 1, "a dense model has nothing to divide"


def test_a_replica_of_vllm_counts_ranks_and_experts_alike_whoever_its_neighbours_are() -> None:
    """vLLM counts a replica's ranks in their order, tp fastest, and gives each its experts, or its part of all, by its
    tp."""
    for tp, pp, dp, inner in product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2, 4)):
        for ep in {1, tp} if dp % inner == 0 else ():
            layout = Layout(tp=tp, pp=pp, dp=dp, inner=inner, ep=ep, etp=tp // ep)
            assert ENGINES["vllm"].sharding.spread.has(layout)
            for replica in range(dp):
                ranks = [at for at in map(layout.coordinates, range(layout.devices)) if at.dp == replica]
                assert [(at.pp, at.tp) for at in ranks] == [*product(range(pp), range(tp))]
                assert all((at.ep, at.etp) == ((at.tp, 0) if ep > 1 else (0, at.tp)) for at in ranks)


def test_experts_are_held_as_the_engines_hold_them() -> None:
    """Qwen3-30B-A3B at tp 2: vLLM has halves of all experts, Megatron's etp is tp."""
    both = "engine actor.update = megatron", "engine actor.generate = vllm"
    layouts = "layout actor.update { tp = 4, ep = 4 }", "layout actor.generate { tp = 2 }"
    plan = planned(QWEN, "ascend-910c", 2, *layouts, *both)
    update = plan.placement("actor.update")
    generate = plan.placement("actor.generate")
    assert (update.layout.etp, update.layout.edp) == (4, 1) and (generate.layout.etp, generate.layout.edp) == (2, 8)
    routed = sum(t.elements for t in load(QWEN, Path()).tensors if t.experts)
    whole = planned(QWEN, "ascend-910c", 2, layouts[0], "layout actor.generate { tp = 2, ep = 2 }", *both)
    assert whole.placement("actor.generate").weight_bytes == generate.weight_bytes
    assert generate.weight_bytes < 2 * routed * 0.55 and update.weight_bytes < 2 * routed * 0.15


def test_a_wide_generation_of_a_large_model_fits() -> None:
    plan = planned(DEEPSEEK, "h100", 16, "layout actor.generate { tp = 32 }", "layout actor.update { pp = 16, ep = 8 }")
    assert plan.placement("actor.generate").weight_bytes < 50e9


ADVISED = [
    (QWEN, "h100", 1, "layout actor.generate { tp = 8, ep = 4 }", "engine actor.generate = vllm"),
    (QWEN, "h100", 2, "layout actor.update { tp = 4, ep = 8 }", "engine actor.update = megatron"),
    (QWEN, "h100", 2, "layout actor.update { tp = 3 }", "engine actor.update = megatron"),
    (QWEN, "h100", 2, "layout actor.update { tp = 4, dp = 4, etp = 1 }", "engine actor.update = megatron"),
    (
        *(QWEN, "h100", 1, "layout actor.generate { dp = 8 }", "layout actor.update { dp = 8, ep = 8, zero = 1 }"),
        "engine actor.update = fsdp { offload = none }",
    ),
    ("qwen2.5-32b", "h100", 1, "layout actor.generate { tp = 8 }", "layout actor.update { dp = 8 }"),
]


@pytest.mark.parametrize("program", ADVISED, ids=lambda p: p[3])
def test_what_is_advised_compiles(program: tuple[str, ...]) -> None:
    with pytest.raises(Fault) as fault:
        planned(*program)
    (told,) = fault.value.diagnostics
    statements = dict.fromkeys(program[3:])
    if found := re.search(r"the nearest that works: (.*)", told.help):
        node = next(s for s in statements if s.startswith("layout actor.update") or "ep = 4" in s).split(" {")[0]
        fixes = [f"{node} {{ {found[1]} }}"]
    else:
        assert "fits" in told.help, told.help
        line = next(x for x in told.help.split("\n") if "fits:" in x or "fit:" in x)
        fixes = re.findall(r"`([^`]*)`", line)
    assert fixes, told.help
    named = {fix.split(" {")[0].split(" =")[0] for fix in fixes}
    kept = [s for s in statements if s.split(" {")[0].split(" =")[0] not in named]
    planned(*program[:3], *kept, *fixes)


def test_experts_are_left_whole_before_tp_is_changed() -> None:
    """As nearly every public recipe states it: etp = 1."""
    with pytest.raises(Fault) as fault:
        planned(*ADVISED[1])
    assert fault.value.diagnostics[0].help == "the nearest that works: tp = 4, dp = 4, ep = 8, etp = 1"


def test_nothing_is_ruled_out_that_was_not_tried() -> None:
    """Where the other states' layouts are what does not fit, these are told to be others, too."""
    stated = "layout actor.update { dp = 16, zero = 1 }", "layout actor.generate { dp = 16 }"
    with pytest.raises(Fault) as fault:
        planned("qwen2.5-32b", "h100", 2, *stated, "engine actor.update = fsdp")
    assert "no other layout" not in fault.value.diagnostics[0].help
    with pytest.raises(Fault) as fault:
        planned(DEEPSEEK, "h100", 1)
    assert "no other layout of actor.update fits either" in fault.value.diagnostics[0].help
