"""An engine that the file leaves open: among which the plan chooses, what it takes, and what it says of that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import page
import pytest

from msrl_graph.backends import ENGINES
from msrl_graph.compiler.pipeline import PASSES
from msrl_graph.hardware.device_presets import DEVICES
from msrl_graph.ir.plan import EngineChoice, Plan
from msrl_graph.model.models import load
from msrl_graph.planner.owners import engines, owners
from msrl_graph.planner.place import PlaceNodes
from msrl_graph.planner.pools import divide
from msrl_graph.sharding.layout import Layout


def started(device: str, model: str = "qwen2.5-7b", **layouts: Layout) -> Plan:
    named = {f"actor.{verb}": layout for verb, layout in layouts.items()}
    plan = page.start(models={"policy": load(model, Path())}, layouts=named)
    return replace(plan, cluster=replace(plan.cluster, device=DEVICES[device], nodes=1, devices_per_node=8))


def choices(plan: Plan) -> list[list[str]]:
    """Of the generation and the update."""
    return [[e.name for e in engines(plan, o, ENGINES)] for o in owners(plan, divide(plan))]


DENSE = "qwen2.5-7b"
LATENT = "deepseek-r1-671b"


@pytest.mark.parametrize(
    ("device", "model", "layout", "among"),
    [
        ("cpu", DENSE, None, ["fsdp"]),
        ("cpu", DENSE, Layout(pp=2, dp=4), ["megatron"]),  # the light one has no stages
        ("cpu", LATENT, None, ["fsdp"]),
        ("h100", DENSE, None, ["megatron", "fsdp"]),
        ("ascend-910b", DENSE, Layout(dp=8), ["megatron", "fsdp"]),
        ("h100", DENSE, Layout(dp=8, zero=3), ["fsdp"]),
        ("h100", DENSE, Layout(tp=2, pp=2, dp=2), ["megatron"]),
        ("h100", LATENT, None, ["megatron", "fsdp"]),
        ("h100", LATENT, Layout(dp=8, zero=3), ["fsdp"]),
        ("h100", DENSE, Layout(dp=4, pp=2, zero=3), ["megatron", "fsdp"]),  # none can: the checks tell
    ],
)
def test_among_which_engines_an_update_is_chosen(
    device: str, model: str, layout: Layout | None, among: list[str]
) -> None:
    plan = started(device, model, **({"update": layout} if layout else {}))
    assert choices(plan) == [["hf"] if device == "cpu" else ["vllm"], among]


def test_what_is_stated_has_no_rival() -> None:
    plan = started("h100", update=Layout(dp=8))
    plan = replace(plan, deploy=replace(plan.deploy, engines={"actor.update": EngineChoice("fsdp")}))
    assert choices(plan) == [["vllm"], ["fsdp"]]


def placed(plan: Plan) -> Plan:
    found = PASSES["place"].apply(plan)
    return PASSES.after("place").apply(found)


@pytest.mark.parametrize("tp", [1, 4])
def test_of_two_engines_for_one_layout_the_preferred_is_taken_unless_it_is_slower(tp: int) -> None:
    """Slower by more than 10 %: less than that is within the error of predicted seconds."""
    layouts = {"update": Layout(tp=tp, dp=8 // tp), "generate": Layout(tp=4, dp=2)}
    plan = started("h100", **layouts)
    found = placed(plan)
    assert found.search is not None and found.search.is_proven and found.search.candidates == 2
    seconds = {}
    for name in ("megatron", "fsdp"):
        stated = replace(plan.deploy, engines={"actor.update": EngineChoice(name)})
        other = placed(replace(plan, deploy=stated))
        assert other.search is None and other.estimate is not None
        if all(m.total <= m.capacity.value for m in other.memory):
            seconds[name] = other.estimate.iteration_seconds.value
    taken = found.placement("actor.update").engine
    near = [name for name, value in seconds.items() if value <= 1.1 * min(seconds.values())]
    assert near and taken.name == near[0]
    assert taken.chosen == "the plan, for its layout"
    generate = found.placement("actor.generate").engine
    assert (generate.name, generate.chosen) == ("vllm", "default")


def test_a_plan_says_why_another_engine_was_not_taken() -> None:
    def chosen(plan: Plan) -> str:
        return PlaceNodes(ENGINES).apply(plan).placement("actor.update").engine.chosen

    assert chosen(started("h100", update=Layout(dp=8, zero=3))) == "the plan: `megatron` has no ZeRO 3"
    assert chosen(started("cpu", update=Layout(pp=2, dp=4))) == "the plan: `fsdp` has no pp"
    assert chosen(started("cpu", update=Layout(dp=8))) == "default"
