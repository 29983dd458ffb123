"""Nodes that compute with the same weights: an update and the infers of its worker, or the infers of a worker without
update.

Invariant: the runtime builds such weights once, so their layout and engine are stated once, or alike; the micro-batch
is each node's own. An infer's layout beside its update's is judged in layout.py.
"""

from __future__ import annotations

from dataclasses import replace

from ..diagnostics import NOWHERE, Diagnostic, Span
from ..ir.graph import Node, Value
from ..ir.options import EngineOptions
from ..ir.plan import EngineChoice, Plan
from ..sharding.layout import Layout


def check(plan: Plan) -> list[Diagnostic]:
    """What nodes of the same weights say against each other, in a plan whose nodes are placed."""
    found: list[Diagnostic] = []
    for worker in plan.graph.workers:
        nodes = plan.graph.sharing(worker.name)
        if worker.kind == "function" or not nodes:
            continue
        updated = nodes[0].verb == "update"
        laid_out = [n for n in nodes if n.name in plan.deploy.layouts and not updated]
        for node in laid_out[1:]:
            found += _layout(plan, laid_out[0], node)
        chosen = [n for n in nodes if n.name in plan.deploy.engines]
        first = nodes[0] if updated else next(iter(chosen), nodes[0])
        for node in chosen:
            if node.name != first.name:
                found += _engine(plan, first, node)
    # Nodes that share a statement share its fault.
    return list({(d.code, d.span): d for d in reversed(found)}.values())[::-1]


def _layout(plan: Plan, first: Node, node: Node) -> list[Diagnostic]:
    theirs, own = (replace(plan.placement(n.name).layout, span=NOWHERE, inner=1) for n in (first, node))
    if own == theirs:
        return []
    message = (
        f"`{node.name}` and `{first.name}` share the weights of one worker, so they have one layout: "
        f"{_sizes(theirs, own)}"
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


def _sizes(layout: Layout, other: Layout) -> str:
    return f"{layout} zero{layout.zero}" if layout.zero != other.zero else str(layout)


def _engine(plan: Plan, first: Node, node: Node) -> list[Diagnostic]:
    theirs = plan.placement(first.name).engine
    own = plan.deploy.engines[node.name]
    note = _note(theirs.span, f"the engine of `{first.name}`")
    what = f"`{node.name}` computes with the weights of `{first.name}`, so it has"
    if own.name != theirs.name:
        help = f"leave `{node.name}` out of the engines"
        return [
            Diagnostic(
                "bad-value", f"{what} that engine, `{theirs.name}`, not `{own.name}`", own.span, help, related=note
            )
        ]
    wrong = {
        k: (_value(plan, first, theirs, k), v) for k, v in own.shared().items() if v != _value(plan, first, theirs, k)
    }
    return [
        Diagnostic(
            "bad-value",
            f"{what} `{key} = {wanted}`, not `{value}`",
            own.span,
            f"leave `{key}` out here, or state it for `{first.name}`; only `micro_batch` is a state's own",
            related=note,
        )
        for key, (wanted, value) in list(wrong.items())[:1]
    ]


def _value(plan: Plan, node: Node, engine: EngineChoice, key: str) -> Value:
    """An option of a node, or what holds where it is not stated."""
    default: Value = plan.model(node.name).dtype if key == "dtype" else EngineOptions.declared()[key].default
    return engine.options.get(key, default)


def _note(span: Span, text: str) -> tuple[tuple[Span, str], ...]:
    return ((span, text),) if span.line else ()
