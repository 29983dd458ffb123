"""What a search has found, as text for its record.

Invariant: a candidate's losses are relative to the chosen plan, and computed by the same passes.
"""

from __future__ import annotations

from typing import NamedTuple

from ..ir.plan import Plan
from ..ir.search_record import MARGIN, Candidate, SearchRecord
from ..passes.place import format_layout
from .search_space import Space


class FoundPlan(NamedTuple):
    """A combination with its seconds, its plan and, if it does not fit, the reason.

    `plan` is None if the combination was not fully evaluated; `seconds` is then a lower bound.
    """

    seconds: float
    space: Space
    position: tuple[int, ...]
    plan: Plan | None
    reason: str = ""


def describe_candidate(found: FoundPlan, chosen: Plan | None) -> Candidate:
    space = found.space
    layouts = {
        owner.node: ", ".join((format_layout(choice.layout), choice.engine, *_list_options(found.plan, owner.node)))
        for owner, choice in zip(space.owners, space.chosen(found.position), strict=True)
    }
    pools = (
        tuple(f"{pool.name}: {', '.join(pool.nodes)}" for pool in space.division.pools)
        if len(space.division.pools) > 1
        else ()
    )
    loses = {}
    if found.plan is not None and chosen is not None:
        mine = _phase_seconds(chosen)
        theirs = _phase_seconds(found.plan)
        loses = {phase: theirs.get(phase, 0.0) - mine.get(phase, 0.0) for phase in {**mine, **theirs}}
    return Candidate(
        pools,
        layouts,
        found.seconds,
        found.plan is not None,
        {phase: lost for phase, lost in loses.items() if lost},
        found.reason,
    )


def describe_choice(record: SearchRecord) -> str:
    """Return why the chosen plan was chosen, as the reason of its layouts."""
    if record.candidates == 1:
        return "planned: the only possible choice"
    of = f"planned: of {record.candidates:,}"
    if record.optimal:
        return f"{of} the best, optimal in the plan's own model"
    kind = "the fastest"
    if record.fastest is not None:
        simplest = "the simplest" if record.is_simplest else "the simplest found"
        kind = f"{simplest} within {100 * MARGIN:.0f} % of the fastest"
    if record.is_proven:
        return f"{of} {kind}"
    return f"{of} {kind} that was found; no other is better by more than {record.percent}"


def _list_options(plan: Plan | None, node: str) -> list[str]:
    """Return the options of a node that memory or seconds require, as text."""
    if plan is None:
        return []
    stated = plan.deploy.engines.get(node)
    options = plan.placement(node).engine.options
    return [
        f"{option} {options[option]}"
        for option in ("recompute", "offload")
        if options.get(option, "none") != "none" and (stated is None or option not in stated.options)
    ]


def _phase_seconds(plan: Plan) -> dict[str, float]:
    assert plan.estimate is not None
    return {phase.name: phase.seconds.value for phase in plan.estimate.phases}
