"""How simple a plan is: what decides among plans of about the same speed.

Predicted seconds are wrong by more than small differences between plans. So among the plans whose iteration takes at
most `MARGIN` longer than the fastest, the search takes the simplest one: the one that needs the fewest features of
engines, and that people would also choose. Invariant: the order is total on layouts and engines and does not depend on
seconds, so a small change of a figure does not choose between equals.

The fields of `Simplicity` are compared one after the other, and the smaller number is simpler. The order and its
reasons:

1. Fewer pools: separate pools need balanced sizes, and weights that are copied between devices.
2. Generation without pipeline stages: stages wait for each other while they generate, and few recipes have them.
3. Training with fewer pipeline stages: seconds assume that all micro-batches take equally long. With rows of different
   lengths they do not, and stages wait for each other. So a mixture gets ep before pp, and a large dense model tp
   within a host before many stages.
4. Training with fewer kinds of parallelism (tp, cp, pp and ep; data parallelism, with ZeRO or without, is always
   there).
5. Less offloading: it needs host memory, and its copies compete with those of resharding. But it is one option, which
   most public recipes have, and each kind of parallelism has limits of its own.
6. Generation with fewer kinds of parallelism.
7. Less recomputation.
8. The smallest sizes that fit: for training, then for generation, tp, cp and ep; the rest is dp.
9. The preferred engine, the lower ZeRO stage, and the smaller etp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..backends.spec import EngineSpec
from ..cost import holdings
from ..ir.plan import Plan
from ..sharding.layout import Layout
from .owners import Owner, engines


class Simplicity(NamedTuple):
    """The complexity of a plan, or of a part of a plan: the smaller tuple is simpler.

    The tuple of a plan is the sum of its parts' tuples. So a part that becomes simpler makes the plan simpler.
    """

    pools: int = 0
    generation_stages: int = 0  # the number of generations with pipeline stages
    training_pp: int = 0
    training_kinds: int = 0
    offloaded: int = 0  # the number of workers of which the planner offloads weights or optimizer states
    generation_kinds: int = 0
    recomputed: int = 0  # the number of updates of which the planner recomputes activations
    training_tp: int = 0
    training_cp: int = 0
    training_ep: int = 0
    generation_pp: int = 0
    generation_tp: int = 0
    generation_cp: int = 0
    generation_ep: int = 0
    engines: int = 0
    zero: int = 0
    etp: int = 0

    def plus(self, other: Simplicity) -> Simplicity:
        return Simplicity(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


# What a plan has that is simpler than another one, by the first field that differs.
_WORDS = {
    "pools": "fewer pools",
    "generation_stages": "generation without pipeline stages",
    "training_pp": "training with fewer pipeline stages",
    "training_kinds": "training with fewer kinds of parallelism",
    "offloaded": "less offloading",
    "generation_kinds": "generation with fewer kinds of parallelism",
    "recomputed": "less recomputation",
    "training_tp": "training with a smaller tp",
    "training_cp": "training with a smaller cp",
    "training_ep": "training with a smaller ep",
    "generation_pp": "generation with fewer pipeline stages",
    "generation_tp": "generation with a smaller tp",
    "generation_cp": "generation with a smaller cp",
    "generation_ep": "generation with a smaller ep",
    "engines": "preferred engines",
    "zero": "lower ZeRO stages",
    "etp": "a smaller etp",
}


def measure_layout(generates: bool, layout: Layout, engine: int) -> Simplicity:
    """Return the part of a plan's complexity that a layout and an engine decide.

    `generates` is whether the layout is that of a generation. `engine` is the engine's position in the order of
    preference.
    """
    kinds = sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.ep))
    last = {"engines": engine, "zero": layout.zero, "etp": layout.etp}
    if generates:
        return Simplicity(
            generation_stages=int(layout.pp > 1),
            generation_kinds=kinds,
            generation_pp=layout.pp,
            generation_tp=layout.tp,
            generation_cp=layout.cp,
            generation_ep=layout.ep,
            **last,
        )
    return Simplicity(
        training_pp=layout.pp,
        training_kinds=kinds,
        training_tp=layout.tp,
        training_cp=layout.cp,
        training_ep=layout.ep,
        **last,
    )


def measure_choice(plan: Plan, owner: Owner, known: holdings.Engines, layout: Layout, engine: str) -> Simplicity:
    """Return the complexity of an owner's layout and engine.

    What the file states is not counted.
    """
    return measure_layout(
        plan.graph.node(owner.node).verb == "generate", layout, _rank(engines(plan, owner, known), engine)
    )


def measure_plan(plan: Plan, owners: Sequence[Owner], known: holdings.Engines) -> Simplicity:
    """Return the complexity of a plan whose nodes are placed."""
    total = Simplicity(
        pools=len(plan.pools), offloaded=count_chosen(plan, "offload"), recomputed=count_chosen(plan, "recompute")
    )
    for owner in owners:
        placement = plan.placement(owner.node)
        total = total.plus(measure_choice(plan, owner, known, placement.layout, placement.engine.name))
    return total


def describe_difference(simple: Simplicity, other: Simplicity) -> str:
    """Return why a plan is simpler than another one, in words; "" if it is not."""
    for field, mine, theirs in zip(Simplicity._fields, simple, other, strict=True):
        if mine != theirs:
            return _WORDS[field] if mine < theirs else ""
    return ""


def _rank(specs: Sequence[EngineSpec], engine: str) -> int:
    return next((place for place, spec in enumerate(specs) if spec.name == engine), len(specs))


def count_chosen(plan: Plan, option: str) -> int:
    """Return the number of workers whose option the planner set to not `none`."""
    workers = set()
    for placement in plan.placements:
        stated = plan.deploy.engines.get(placement.node)
        is_stated = stated is not None and option in stated.options
        if placement.engine.options.get(option, "none") != "none" and not is_stated:
            workers.add(plan.graph.node(placement.node).worker)
    return len(workers)
