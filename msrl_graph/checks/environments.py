"""Checks of Python environments: packages that must be installed together.

The processes of a pool share one Python interpreter: the interpreter that the program states for the pool, or else the
interpreter of the run.

Invariant: in a plan that passes the checks, the packages that the engines of one environment need can be installed
together, as far as hardware/stacks.py knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..backends.spec import EngineSpec
from ..diagnostics import NOWHERE, Diagnostic, Span
from ..hardware.stacks import find_conflict
from ..ir.plan import FUNCTIONS, Placement, Plan
from .stage import PlanContext

OWN = "msrl-graph"


def check(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Check the Python environments of a plan.

    Each pool of the plan must already have its environment.
    """
    placed = [placement for placement in plan.placements if placement.pool != FUNCTIONS]
    return [*_check_interpreters(plan, placed)] or [*_check_packages(plan, placed, context.engines)]


def _check_interpreters(plan: Plan, placed: list[Placement]) -> Iterator[Diagnostic]:
    """Report a pool for which two different interpreters are stated."""
    first: dict[str, Placement] = {}
    for own in placed:
        if not (python := own.engine.options.get("python")):
            continue
        other = first.setdefault(own.pool, own)
        if (theirs := other.engine.options["python"]) != python:
            message = (
                f"`{own.node}` and `{other.node}` run in the same processes, which have one interpreter: "
                f'"{theirs}" or "{python}"'
            )
            help = f"state `python` for one of them, or separate them: `apart {other.node}, {own.node}`"
            yield Diagnostic("bad-value", message, own.engine.span, help, related=_note(other))
            return


def _check_packages(plan: Plan, placed: list[Placement], engines: Mapping[str, EngineSpec]) -> Iterator[Diagnostic]:
    """Report each environment whose engines need packages that exclude each other."""
    kind = plan.cluster.device.kind
    needs: dict[str, dict[str, Placement]] = {}  # by interpreter and package, the first placement that needs it
    # Nodes with a stated engine come before nodes that follow them.
    for placement in sorted(placed, key=lambda placement: placement.node not in plan.deploy.engines):
        first = needs.setdefault(plan.environment_of(placement.pool).python, {})
        for package in engines[placement.engine.name].packages.on(kind):
            first.setdefault(package, placement)
    names = dict.fromkeys(placement.engine.name for placement in placed)
    releases = [release for name in names for release in engines[name].packages.releases]
    for python, first in needs.items():
        if (conflict := find_conflict([OWN, *first], releases)) is None:
            continue
        *others, last = (
            first[requirement.package]
            for requirement in (conflict.first, conflict.second)
            if requirement.package in first
        )
        pair = f"`{conflict.first.package}` and `{conflict.second.package}`"
        message = f"{pair} cannot be in one environment{f' ({python})' if python else ''}: {conflict}"
        engine = f'engine {last.node} = {last.engine.name} {{ python = "…" }}'
        alone = f"give `{last.node}` an interpreter of its own: `{engine}`"
        separations = [f"`apart {other.node}, {last.node}`" for other in others if other.pool == last.pool]
        separation = f", on devices of its own: {separations[0]}" if separations else ""
        help = f"{alone}{separation}" if others else f"use another engine for `{last.node}`"
        span = last.engine.span if last.engine.span.line else plan.graph.node(last.node).span
        yield Diagnostic("clashing-packages", message, span, help, related=_note(*others))


def _note(*placements: Placement) -> tuple[tuple[Span, str], ...]:
    return tuple(
        (placement.engine.span, f"the engine of `{placement.node}`")
        for placement in placements
        if placement.engine.span != NOWHERE
    )
