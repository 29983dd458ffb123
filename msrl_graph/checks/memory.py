"""Memory: no phase may need more than a device or a host has.

Invariant: all phases that do not fit are told in one diagnostic a place (a device of a pool, a host), with what takes
how much.
"""

from __future__ import annotations

from collections.abc import Callable

from ..diagnostics import NOWHERE, Diagnostic, Span
from ..ir.plan import PhaseMemory, Plan


def check(plan: Plan, nearest: Callable[[PhaseMemory], str] = lambda worst: "") -> list[Diagnostic]:
    """What does not fit in a plan whose memory is counted; `nearest` finds a layout that fits in place of the one of a
    phase."""
    found = []
    for place, pool in dict.fromkeys((m.place, m.pool) for m in plan.memory):
        phases = [m for m in plan.memory if (m.place, m.pool) == (place, pool)]
        over = [m for m in phases if m.total > m.capacity.value]
        if over:
            worst = max(over, key=lambda m: m.total)
            where = f"a {place}" if place == "host" or pool == "devices" else f"a device ({pool})"
            message = (
                f"{worst.phase} needs {worst.total / 1e9:.1f} GB {where}, which has {worst.capacity.value / 1e9:.1f} GB"
            )
            span = _span(plan, worst) if place == "device" else plan.cluster.span
            # Advice that would move weights is empty words where the search has found that no layout helps.
            layout = nearest(worst) if place == "device" else ""
            help = [table(phases), layout, "" if layout.startswith(("no other", "this fits")) else _advice(plan, worst)]
            found.append(Diagnostic("out-of-memory", message, span, "\n".join(filter(None, help))))
    return found


def table(phases: list[PhaseMemory]) -> str:
    """By phase, the sum and the items from the largest on."""
    lines = []
    for m in phases:
        items = ", ".join(f"{k} {v / 1e9:.1f}" for k, v in sorted(m.items.items(), key=lambda i: (-i[1], i[0])))
        mark = "over" if m.total > m.capacity.value else ""
        lines.append(f"{m.phase:<9}{m.total / 1e9:9.1f} GB  {mark:<5} {items}".rstrip())
    return "\n".join(lines)


def _span(plan: Plan, worst: PhaseMemory) -> Span:
    """The layout statement of a node of the phase, in the pool; the reshard's is that of its source, where that is
    there."""
    here = [n for n in plan.graph.nodes if plan.placement(n.name).pool == worst.pool]
    verb = worst.phase
    if verb in ("load", "reshard", "swap"):
        verb = "update" if any(n.verb == "update" for n in here) else "generate"
    spans = [plan.deploy.layouts[n.name].span for n in here if n.verb == verb and n.name in plan.deploy.layouts]
    return next((s for s in spans if s != NOWHERE), plan.deploy.span)


def _advice(plan: Plan, worst: PhaseMemory) -> str:
    """The cheapest change that takes away the largest item."""
    largest = max(worst.items, key=lambda k: worst.items[k])
    if worst.place == "host":
        return "more hosts share the rows; `reshard { mode = naive }` swaps nothing to the host"
    if largest == "activations":
        node = plan.graph.verb("update")[0].name
        return (
            f"less without another layout: `engine {node} = fsdp {{ recompute = full }}` keeps one layer's activations"
        )
    if largest in ("KV cache", "rows", "ranks"):
        return "a larger tp, or a shorter response, needs less a sequence"
    if largest == "logits":
        return "a smaller `micro_batch` or a larger tp needs less for logits"
    return "a larger tp divides the weights further, zero = 3 divides them over dp"
