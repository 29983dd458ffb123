"""Several updates of one worker: one layout, one optimizer, weights that come back before the first of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from msrl_graph import compile
from msrl_graph.backends import ENGINES
from msrl_graph.cost import holdings
from msrl_graph.cost.offloading import step_moments
from msrl_graph.ir.plan import Plan
from msrl_graph.simulation import simulate

TEXT = """
import grpo
algorithm again extends grpo {
  node more: actor.update(prompt, response, old_logp, advantage) { loss = clip(0.1), optimizer = adamw(lr = 1e-6) }
  host.advantage, actor.infer -> more
  drop actor.update => actor.generate
  FROM => actor.generate
}
cluster pod { device = "ascend-910c", nodes = 1, devices_per_node = 8 }
deploy again on pod {
  model policy = "qwen2.5-7b"
  set prompt_len = 512
  set response_len = 1024
  MORE
}
"""
pytestmark = pytest.mark.filterwarnings("ignore::msrl_graph.diagnostics.ProgramWarning")  # there are no data


def planned(source: str, more: str = "") -> Plan:
    return compile("again.rlg", text=TEXT.replace("FROM", source).replace("MORE", more))


@pytest.mark.parametrize("source", ["actor.update", "more"])
def test_two_updates_share_what_a_worker_has(source: str) -> None:
    plan = planned(source)
    first = plan.placement("actor.update")
    second = plan.placement("more")
    assert (first.layout, first.engine.name) == (second.layout, second.engine.name)
    stream = next(s for s in plan.schedule if s.task == "train" and s.pool == first.pool)
    steps = [(i.op, i.node) for i in stream.instructions]
    assert steps.count(("SWAP_IN", source)) == steps.count(("WAIT", source)) == 1
    assert steps.index(("WAIT", source)) < min(steps.index(("RUN", n)) for n in ("actor.infer", "actor.update", "more"))
    update = next(m for m in plan.memory if m.phase == "update")
    assert update.items["actor optimizer"] == holdings.optimizer(plan, ENGINES, "actor.update")
    assert simulate(plan, iterations=2).iterations[1].seconds > 0


def test_a_layout_that_is_stated_of_one_is_that_of_both() -> None:
    plan = planned("actor.update", "layout actor.update { tp = 2, dp = 4 }")
    assert plan.placement("more").layout.tp == 2


def test_an_optimizer_in_host_memory_comes_in_parts_to_either() -> None:
    plan = planned("actor.update", "engine actor.update = megatron { offload = optimizer }")
    whole = holdings.optimizer(plan, ENGINES, "actor.update")
    for node in ("more", "actor.update", "actor.infer"):
        assert "actor optimizer" not in holdings.resident(plan, ENGINES, plan.placement(node).pool, node)
    for node in ("more", "actor.update"):  # a part, and the next one
        made = holdings.work(plan, ENGINES, node)
        (step,) = step_moments(made, 0).values()
        assert made.optimizer_away == whole and 7 < whole / step["optimizer's parts"] < 9


@pytest.mark.parametrize(
    ("loss", "more"),
    [("clip()", False), ("clip() - 0.001 * entropy()", True), ('clip() + 0.1 * "own.py:calm"()', True)],
)
def test_a_term_with_the_entropy_in_its_signature_needs_its_gradient(loss: str, more: bool, tmp_path: Path) -> None:
    """A term of a file may have it."""
    (tmp_path / "own.py").write_text("def calm(entropy):\n    return entropy\n")
    text = TEXT.replace("FROM", "more").replace("MORE", "").replace("clip(0.1)", loss)
    plan = compile(str(tmp_path / "again.rlg"), text=text)
    assert not holdings.work(plan, ENGINES, "actor.update").entropy
    assert holdings.work(plan, ENGINES, "more").entropy == more
