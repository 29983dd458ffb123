"""The learning rate of an optimizer step.

Invariant: the learning rate is a function of the step's number, of the plan, and of the algorithm's states after the
previous iteration. So all ranks compute the same rate, and a resumed run computes the same rates as an uninterrupted
run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ...cost.holdings import row_count
from ...ir.attributes import UpdateAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ..functions.user_traceback import BadResult, describe_failure
from ..functions.values import describe_briefly, load_with_signature
from ..process.task_report import RunError


def learning_rate(plan: Plan, node: Node, step: int, states: Mapping[str, float]) -> float:
    """Return an update's learning rate for its optimizer step number `step`.

    Steps are counted from 1. Raises RunError if the function or the state that defines the rate gives an invalid rate.
    """
    attributes = UpdateAttributes.of(node)
    stated = attributes.rate
    warmup = int(attributes.optimizer.options().get("warmup", 1))
    if stated.kind == "number":
        return float(stated.literal()) * min(1.0, step / warmup)
    try:
        if stated.kind == "state":
            return _check_rate(states[str(stated.value)], f"the state `{stated.value}` is") * min(1.0, step / warmup)
        schedule, signature = load_with_signature(stated, "schedule")
        filled = {"step": step, "last": attributes.steps_in_run(row_count(plan, node.name), plan.deploy.run.iterations)}
        arguments: dict[str, float] = {name: filled[name] for name in signature.fills}
        binds = {parameter: stated.columns().get(parameter, parameter) for parameter in signature.columns}
        arguments |= {parameter: states[name] for parameter, name in binds.items() if name in node.states}
        return _check_rate(schedule(**arguments, **stated.options()), "it returned")
    except Exception as error:
        # The node without its loss, so that the error does not point at the loss.
        optimizer_node = replace(node, attributes={"optimizer": attributes.optimizer})
        raise RunError(describe_failure(optimizer_node, error, f"the learning rate of step {step}")) from error


def _check_rate(value: object, subject: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise BadResult(f"{subject} {describe_briefly(value)} instead of a number of at least 0")
    return number
