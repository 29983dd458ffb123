"""The learning rate of an optimizer step.

Invariant: a function of the step's number, of states of the run as the iteration before left them, and of the plan: all
ranks find the same, and a run that goes on finds what it would have been.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ...cost.holdings import row_count
from ...ir.attributes import UpdateAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ..functions.user_traceback import BadResult, blame
from ..functions.values import brief, called
from ..process.task_report import RunError


def rate(plan: Plan, node: Node, step: int, states: Mapping[str, float]) -> float:
    """The rate of an update's step-th step, from 1. RunError where a function gives none, or a state is none."""
    said = UpdateAttributes.of(node)
    stated = said.rate
    warmup = int(said.optimizer.options().get("warmup", 1))
    if stated.kind == "number":
        return float(stated.literal()) * min(1.0, step / warmup)
    try:
        if stated.kind == "state":
            return _sound(states[str(stated.value)], f"the state `{stated.value}` is") * min(1.0, step / warmup)
        schedule, signature = called(stated, "schedule")
        filled = {"step": step, "last": said.steps_in_run(row_count(plan, node.name), plan.deploy.run.iterations)}
        given: dict[str, float] = {name: filled[name] for name in signature.fills}
        binds = {p: stated.columns().get(p, p) for p in signature.columns}
        given |= {p: states[name] for p, name in binds.items() if name in node.states}
        return _sound(schedule(**given, **stated.options()), "it returned")
    except Exception as error:
        at = replace(node, attributes={"optimizer": said.optimizer})  # not where the loss stands
        raise RunError(blame(at, error, f"the learning rate of step {step}")) from error


def _sound(value: object, what: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise BadResult(f"{what} {brief(value)}, where a number of 0 or more belongs")
    return number
