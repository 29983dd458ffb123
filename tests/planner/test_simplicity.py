"""What is simpler, by its order, and that the choice does not move with small changes of figures."""

from __future__ import annotations

import re
import warnings
from itertools import pairwise

import pytest

from msrl_graph import compile
from msrl_graph.emit.search_report import why_text
from msrl_graph.hardware.device_presets import DEVICES
from msrl_graph.ir.plan import Plan
from msrl_graph.ir.search_record import MARGIN
from msrl_graph.planner.simplicity import Simplicity, describe_difference, measure_layout
from msrl_graph.sharding.layout import Layout

ONE = Layout()


def measure(update: Layout, generate: Layout, **more: int) -> Simplicity:
    parts = measure_layout(False, update, 0), measure_layout(True, generate, 0)
    return Simplicity(pools=1, **more).plus(parts[0]).plus(parts[1])


# Each is simpler than the next one, for the reason next to it.
ORDER = [
    (measure(ONE, ONE), "lower ZeRO stages"),
    (measure(Layout(zero=3), ONE), "preferred engines"),
    (measure(ONE, ONE, engines=1), "less recomputation"),
    (measure(ONE, ONE, recomputed=1), "generation with fewer kinds of parallelism"),
    (measure(ONE, Layout(tp=2)), "generation with a smaller tp"),
    (measure(ONE, Layout(tp=4)), "generation with fewer kinds of parallelism"),
    (measure(ONE, Layout(tp=2, ep=2)), "less offloading"),
    (measure(ONE, ONE, offloaded=1), "training with fewer kinds of parallelism"),
    (measure(Layout(ep=8), ONE), "training with a smaller tp"),
    (measure(Layout(tp=2), ONE), "training with a smaller tp"),
    (measure(Layout(tp=8), ONE), "training with fewer kinds of parallelism"),
    (measure(Layout(tp=2, ep=2), ONE), "training with fewer pipeline stages"),
    (measure(Layout(pp=2), ONE), "training with fewer kinds of parallelism"),
    (measure(Layout(tp=8, pp=2), ONE), "training with fewer pipeline stages"),
    (measure(Layout(pp=4), ONE), "generation without pipeline stages"),
    (measure(ONE, Layout(pp=2)), "fewer pools"),
    (measure(ONE, ONE)._replace(pools=2), ""),
]


def test_the_order_and_its_words() -> None:
    for (simple, why), (other, _) in pairwise(ORDER):
        assert simple < other and describe_difference(simple, other) == why
        assert describe_difference(other, simple) == describe_difference(simple, simple) == ""


def program(model: str, device: str, hosts: int, more: str = "", stated: str = "") -> str:
    return f"""import grpo
cluster pod {{ device = "{device}", nodes = {hosts}, devices_per_node = 8{more} }}
deploy grpo on pod {{
  set prompts = 512
  model policy = "{model}"
  data source = "train.jsonl" {{ prompt = "problem" }}
  {stated}
}}
"""


def planned(*arguments: str | int, **more: str) -> Plan:
    with warnings.catch_warnings(action="ignore"):
        return compile("p.rlg", text=program(*arguments, **more))


def shape(plan: Plan) -> list[object]:
    return [(p.pool, p.node, p.layout, p.engine.name) for p in plan.placements]


CASES = [("qwen3-8b", "h100", 1), ("qwen3-32b", "ascend-910b", 2), ("qwen3-30b-a3b", "h100", 1)]


@pytest.mark.parametrize("case", CASES)
def test_generation_has_no_stages_and_why_shows_the_fastest(case: tuple[str, str, int]) -> None:
    plan = planned(*case)
    record = plan.search
    assert record is not None and record.fastest is not None and record.is_proven and record.is_simplest
    assert record.fastest_seconds < record.seconds <= record.fastest_seconds * (1 + MARGIN)
    assert plan.placement("actor.generate").layout.pp == 1 and record.reason == "generation without pipeline stages"
    told = why_text(plan)
    assert re.search(r"^  chosen ", told, re.M) and re.search(r"^  fastest .* faster by ", told, re.M)
    reason = plan.placement("actor.update").reason
    assert f"of {record.candidates:,} the simplest within 10 % of the fastest" in reason
    assert "optimal" not in told + reason


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_figures_that_are_a_little_different_choose_the_same_plan(case: tuple[str, str, int]) -> None:
    device = DEVICES[case[1]]
    plan = planned(*case)
    for by in (0.98, 1.02):
        bandwidth = f", memory_bandwidth = {device.memory_bandwidth.value * by / 1e12:.6g} TB/s"
        other = planned(*case, more=bandwidth)
        assert plan.search is not None and other.search is not None
        assert other.search.seconds != plan.search.seconds and shape(other) == shape(plan)


def test_optimal_is_not_said_of_equals() -> None:
    """Where two engines are about equally fast. tests/planner/test_search.py counts all plans that are near."""
    stated = "layout actor.update { dp = 8, zero = 1 }\n  layout actor.generate { tp = 8 }"
    plan = planned("qwen3-1.7b", "h100", 1, stated=stated)
    record = plan.search
    assert record is not None and record.candidates == 2 and record.is_proven and not record.optimal
    assert record.runners[0].seconds <= record.seconds * (1 + MARGIN)
    assert "optimal" not in plan.placement("actor.update").reason + why_text(plan)
