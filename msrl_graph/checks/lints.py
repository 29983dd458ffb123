"""Combinations that are known to crawl, or to fail without a setting, of a plan whose nodes are placed.

Invariant: what an engine knows stands in its spec; what holds for all engines stands here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..backends.spec import EngineSpec, Lint, Situation
from ..diagnostics import NOWHERE, Diagnostic
from ..ir.plan import Placement, Plan


def check(plan: Plan, engines: Mapping[str, EngineSpec]) -> list[Diagnostic]:
    """One diagnostic a message: nodes that share a statement share it."""
    found: dict[str, Diagnostic] = {d.message: d for d in _dies(plan)}
    for placement in plan.placements:
        if placement.pool == "functions":
            continue
        situation = Situation.of(plan, placement)
        layout = plan.deploy.layouts.get(placement.node)
        spans = [s.span for s in (layout, placement.engine) if s is not None and s.span.line]
        everywhere = () if layout is None and _follows(plan, placement) else _everywhere(placement, situation)
        for lint in (*engines[placement.engine.name].lints(situation), *everywhere):
            span = spans[0] if spans else plan.deploy.span
            told = Diagnostic("known-bad", lint.message, span, lint.help, "warning")
            found.setdefault(lint.message, told)
    return list(found.values())


def _dies(plan: Plan) -> Iterator[Diagnostic]:
    """A cluster that counts packages as dies, or dies as packages."""
    cluster = plan.cluster
    device = plan.cluster.device
    each = cluster.devices_per_node
    dies = cluster.devices_per_node * device.dies
    if device.dies > 1 and dies > device.host_dies > 0:
        whole = device.host_dies // device.dies
        message = f"hosts have {whole} `{device.name}`, of {device.dies} dies each, and {each} are stated"
        help = f'`devices_per_node = {whole}`, or `device = "{device.name}-die"` to count dies'
        yield Diagnostic("known-bad", message, cluster.span, help, "warning")


def _follows(plan: Plan, placement: Placement) -> bool:
    """Whether a node has the layout that is stated of another one: what is wrong with it is told there."""
    stated = [plan.placement(node) for node in plan.deploy.layouts]
    return any(
        p.pool == placement.pool and replace(p.layout, span=NOWHERE) == replace(placement.layout, span=NOWHERE)
        for p in stated
    )


def _everywhere(placement: Placement, situation: Situation) -> Iterator[Lint]:
    layout = situation.layout
    each = situation.per_host
    if layout.tp > each or (layout.tp > 1 and each % layout.tp and layout.devices > each):
        message = (
            f"the {layout.tp} tensor-parallel ranks of `{placement.node}` lie on hosts of {each}: each layer "
            "waits for the link"
        )
        yield Lint(
            message, "a tp that divides the devices of a host keeps them together; pp or zero = 3 divide further"
        )
