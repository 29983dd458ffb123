"""Environments: which packages are beside each other. A pool's processes have one interpreter, their own or the run's.

Invariant: what the engines of an environment need can be installed in one, as far as is known (hardware/stacks.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..backends.spec import EngineSpec
from ..diagnostics import NOWHERE, Diagnostic, Span
from ..hardware.stacks import clash
from ..ir.plan import FUNCTIONS, Placement, Plan

OWN = "msrl-graph"


def check(plan: Plan, engines: Mapping[str, EngineSpec]) -> list[Diagnostic]:
    """What is wrong with the environments of a plan, in which they stand."""
    placed = [p for p in plan.placements if p.pool != FUNCTIONS]
    return [*_interpreters(plan, placed)] or [*_packages(plan, placed, engines)]


def _interpreters(plan: Plan, placed: list[Placement]) -> Iterator[Diagnostic]:
    """Pools of which two are stated."""
    first: dict[str, Placement] = {}
    for own in placed:
        if not (python := own.engine.options.get("python")):
            continue
        other = first.setdefault(own.pool, own)
        if (theirs := other.engine.options["python"]) != python:
            message = (
                f"`{own.node}` and `{other.node}` are computed by the same processes, which have one interpreter: "
                f'"{theirs}" or "{python}"'
            )
            help = f"state it for one of the two, or part them: `apart {other.node}, {own.node}`"
            yield Diagnostic("bad-value", message, own.engine.span, help, related=_note(other))
            return


def _packages(plan: Plan, placed: list[Placement], engines: Mapping[str, EngineSpec]) -> Iterator[Diagnostic]:
    """Environments whose engines need what cannot be beside each other, each once."""
    kind = plan.cluster.device.kind
    needs: dict[str, dict[str, Placement]] = {}  # by interpreter, who needs a package first
    for p in sorted(placed, key=lambda p: p.node not in plan.deploy.engines):  # who states an engine before who follows
        first = needs.setdefault(plan.around(p.pool).python, {})
        for package in kind.packages(engines[p.engine.name].needs):
            first.setdefault(package, p)
    for python, first in needs.items():
        if (found := clash([OWN, *first])) is None:
            continue
        *others, last = (first[r.package] for r in (found.first, found.second) if r.package in first)
        pair = f"`{found.first.package}` and `{found.second.package}`"
        message = f"{pair} cannot be in one environment{f' ({python})' if python else ''}: {found}"
        engine = f'engine {last.node} = {last.engine.name} {{ python = "…" }}'
        alone = f"give `{last.node}` an interpreter of its own: `{engine}`"
        beside = [f"`apart {o.node}, {last.node}`" for o in others if o.pool == last.pool]
        part = f", on devices of its own: {beside[0]}" if beside else ""
        help = f"{alone}{part}" if others else f"take another engine for `{last.node}`"
        span = last.engine.span if last.engine.span.line else plan.graph.node(last.node).span
        yield Diagnostic("clashing-packages", message, span, help, related=_note(*others))


def _note(*placements: Placement) -> tuple[tuple[Span, str], ...]:
    return tuple((p.engine.span, f"the engine of `{p.node}`") for p in placements if p.engine.span != NOWHERE)
