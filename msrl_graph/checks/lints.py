"""Warnings about settings that are slow, or that fail without another setting.

The nodes of the plan must be placed.

Invariant: a warning that applies to one engine is in the spec of that engine. A warning that applies to all engines is
in this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..backends.spec import Lint, Situation
from ..diagnostics import NOWHERE, Diagnostic
from ..ir.plan import Placement, Plan
from .stage import PlanContext


def check(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Return the warnings of a plan; each message occurs once.

    If several nodes cause the same message, the warning is at the statement of the first of these nodes.
    """
    warnings: dict[str, Diagnostic] = {diagnostic.message: diagnostic for diagnostic in _check_dies(plan)}
    for placement in plan.placements:
        if placement.pool == "functions":
            continue
        situation = Situation.from_plan(plan, placement)
        layout = plan.deploy.layouts.get(placement.node)
        spans = [
            statement.span for statement in (layout, placement.engine) if statement is not None and statement.span.line
        ]
        everywhere = (
            () if layout is None and _shares_stated_layout(plan, placement) else _check_hosts(placement, situation)
        )
        for lint in (*context.engines[placement.engine.name].capabilities.lints(situation), *everywhere):
            span = spans[0] if spans else plan.deploy.span
            warning = Diagnostic("known-bad", lint.message, span, lint.help, "warning")
            warnings.setdefault(lint.message, warning)
    return list(warnings.values())


def _check_dies(plan: Plan) -> Iterator[Diagnostic]:
    """Warn of a cluster with more devices on a host than such hosts have.

    The reason may be that the cluster counts dies, although its device is a package of dies. A die is one of the chips
    in a package. The `devices_per_node` of the cluster must be the number of packages.
    """
    cluster = plan.cluster
    device = plan.cluster.device
    per_host = cluster.devices_per_node
    dies = cluster.devices_per_node * device.dies
    if dies > device.host_dies > 0:
        packages = device.host_dies // device.dies
        kind = f"`{device.name}` of {device.dies} dies each" if device.dies > 1 else f"`{device.name}`"
        message = f"hosts have {packages} {kind}, but {per_host} are stated"
        help = f"`devices_per_node = {packages}`"
        help += f', or `device = "{device.name}-die"` to count dies' if device.dies > 1 else ""
        yield Diagnostic("known-bad", message, cluster.span, help, "warning")


def _shares_stated_layout(plan: Plan, placement: Placement) -> bool:
    """Return whether the layout of a node equals a layout that the program states.

    `placement` is the placement of the node. Only layouts stated for nodes in the same pool are compared. A mistake in
    such a layout is reported at the node for which the layout is stated.
    """
    stated = [plan.placement(node) for node in plan.deploy.layouts]
    return any(
        other.pool == placement.pool and replace(other.layout, span=NOWHERE) == replace(placement.layout, span=NOWHERE)
        for other in stated
    )


def _check_hosts(placement: Placement, situation: Situation) -> Iterator[Lint]:
    layout = situation.layout
    per_host = situation.per_host
    if layout.tp > per_host or (layout.tp > 1 and per_host % layout.tp and layout.devices > per_host):
        message = (
            f"the {layout.tp} tensor-parallel ranks of `{placement.node}` span hosts of {per_host} devices: each layer "
            "waits for the link between hosts"
        )
        yield Lint(message, "choose a tp that divides the devices of a host; pp or zero = 3 shard the model further")
