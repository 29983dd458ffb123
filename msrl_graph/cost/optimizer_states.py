"""The optimizer states of an update: their types, bytes and residency.

Invariant: the functions read only the placement, the optimizer and the model of the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .. import algorithms
from ..backends.spec import BYTES, EngineSpec, optimizer_residency
from ..ir import optimizer_spec
from ..ir.attributes import UpdateAttributes
from ..ir.options import EngineOptions
from ..ir.plan import Plan
from ..sharding.layout import Side, stage_parts


def optimizer_spec_of(plan: Plan, node: str) -> optimizer_spec.OptimizerSpec:
    """Return the optimizer of an update.

    Its states have the type that the option `moments` of the update's engine states.
    """
    optimizer = algorithms.optimizer(UpdateAttributes.of(plan.graph.node(node)).optimizer)
    stated = str(plan.placement(node).engine.options.get("moments") or EngineOptions.moments)
    return optimizer_spec.with_moments(optimizer, BYTES[stated])


def count_state_bytes(plan: Plan, spec: EngineSpec, node: str, bytes_of: Callable[[optimizer_spec.Rule], float]) -> int:
    """Return the optimizer-state bytes of the busiest rank (`bytes_of`: per weight)."""
    layout = plan.placement(node).layout
    update_optimizer = optimizer_spec_of(plan, node)
    at_rest = Side(layout, layout.zero >= 1, spec.multiple(layout))
    copies = layout.cp if layout.zero == 1 else 1  # where weights are sharded over dp, so are their states
    by_stage = [0.0] * layout.pp
    for rule, kinds in optimizer_spec.kinds_by_rule(update_optimizer, plan.model(node).trained_kinds):
        for stage, (dense, experts) in enumerate(stage_parts(kinds, at_rest)):
            by_stage[stage] += bytes_of(rule) * (-(-dense // copies) + experts)
    return math.ceil(max(by_stage))


def fetches_states(plan: Plan, node: str) -> bool:
    """Return whether a node begins with a copy of all its optimizer states.

    The copy is from host memory to the device.
    """
    return plan.graph.node(node).verb == "update" and optimizer_residency(plan.placement(node)) == "phase"
