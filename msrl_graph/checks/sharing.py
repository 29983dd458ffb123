"""Checks of nodes that share weights: their layouts and engines must agree.

The nodes that share weights are the updates and infers of one worker.

Invariant: the runtime builds shared weights once. So a program states the layout and the engine for one of the nodes
that share weights, or the same layout and engine for each of these nodes. Only the micro-batch may differ between the
nodes. checks/layout.py compares the layout of an infer with the layout of its worker's update. This module compares the
layouts of infers whose worker has no update.
"""

from __future__ import annotations

from dataclasses import replace

from ..diagnostics import NOWHERE, Diagnostic, Span
from ..ir.expr import format_option
from ..ir.graph import Node, OptionValue
from ..ir.options import EngineOptions
from ..ir.plan import MICRO_BATCH, EngineChoice, Plan
from ..sharding.layout import Layout
from .stage import PlanContext


def check(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report layouts and engines that differ between nodes that share weights.

    All nodes of the plan must have a placement.
    """
    diagnostics: list[Diagnostic] = []
    for worker in plan.graph.workers:
        nodes = plan.graph.sharing(worker.name)
        if worker.kind == "function" or not nodes:
            continue
        updated = nodes[0].verb == "update"
        laid_out = [node for node in nodes if node.name in plan.deploy.layouts and not updated]
        for node in laid_out[1:]:
            diagnostics += _compare_layouts(plan, laid_out[0], node)
        chosen = [node for node in nodes if node.name in plan.deploy.engines]
        first = nodes[0] if updated else next(iter(chosen), nodes[0])
        for node in chosen:
            if node.name != first.name:
                diagnostics += _compare_engines(plan, first, node)
    # Nodes that share a layout or engine statement share its diagnostic.
    return list({(diagnostic.code, diagnostic.span): diagnostic for diagnostic in reversed(diagnostics)}.values())[::-1]


def _compare_layouts(plan: Plan, first: Node, node: Node) -> list[Diagnostic]:
    theirs, own = (replace(plan.placement(other.name).layout, span=NOWHERE, inner=1) for other in (first, node))
    if own == theirs:
        return []
    message = (
        f"`{node.name}` and `{first.name}` share the weights of one worker, so they must have the same layout: "
        f"{_format_layout(theirs, own)}"
    )
    note = _note(plan.deploy.layouts[first.name].span, f"the layout of `{first.name}`")
    return [
        Diagnostic(
            "bad-layout",
            message,
            plan.deploy.layouts[node.name].span,
            f"leave `{node.name}` out of the layouts",
            related=note,
        )
    ]


def _format_layout(layout: Layout, other: Layout) -> str:
    return f"{layout} zero{layout.zero}" if layout.zero != other.zero else str(layout)


def _compare_engines(plan: Plan, first: Node, node: Node) -> list[Diagnostic]:
    theirs = plan.placement(first.name).engine
    own = plan.deploy.engines[node.name]
    note = _note(theirs.span, f"the engine of `{first.name}`")
    prefix = f"`{node.name}` shares the weights of `{first.name}`, so it must have"
    if own.name != theirs.name:
        help = f"leave `{node.name}` out of the engines"
        return [
            Diagnostic(
                "bad-value",
                f"{prefix} the same engine, `{theirs.name}`, not `{own.name}`",
                own.span,
                help,
                related=note,
            )
        ]
    wrong = {
        key: (_option_value(plan, first, theirs, key), value)
        for key, value in own.shared().items()
        if value != _option_value(plan, first, theirs, key)
    }
    return [
        Diagnostic(
            "bad-value",
            f"{prefix} `{key} = {format_option(wanted)}`, not `{format_option(value)}`",
            own.span,
            f"leave `{key}` out here, or state it for `{first.name}`; only `{'` and `'.join(MICRO_BATCH)}` may differ",
            related=note,
        )
        for key, (wanted, value) in list(wrong.items())[:1]
    ]


def _option_value(plan: Plan, node: Node, engine: EngineChoice, key: str) -> OptionValue:
    """Return the value of an engine option for a node, or the option's default."""
    default: OptionValue = plan.model(node.name).dtype if key == "dtype" else EngineOptions.declared()[key].default
    return engine.options.get(key, default)


def _note(span: Span, text: str) -> tuple[tuple[Span, str], ...]:
    return ((span, text),) if span.line else ()
