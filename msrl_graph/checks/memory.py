"""Memory check: no phase may need more memory than a device or a host has.

A phase is a part of an iteration, such as generate or reshard. An item is one use of memory in a phase, such as the KV
cache.

Invariant: each place (a device of a pool, or a host) gets at most one diagnostic. The diagnostic reports all phases
that do not fit, with the size of each item.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from ..backends import ENGINES
from ..cost import holdings
from ..diagnostics import NOWHERE, Diagnostic, Span
from ..ir.graph import Expr
from ..ir.plan import PhaseMemory, Plan
from .stage import PlanContext

ROUND = 1024  # a longer response is advised in multiples of so many tokens


def check(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report phases that need more memory than their device or host has.

    The memory section of the plan must be filled.
    """
    diagnostics = []
    for place, pool in dict.fromkeys((phase.place, phase.pool) for phase in plan.memory):
        phases = [phase for phase in plan.memory if (phase.place, phase.pool) == (place, pool)]
        overfull = [phase for phase in phases if phase.total > phase.capacity.value]
        if overfull:
            worst = max(overfull, key=lambda phase: phase.total)
            where = f"a {place}" if place == "host" or pool == "devices" else f"a device ({pool})"
            message = (
                f"{worst.phase} needs {worst.total / 1e9:.1f} GB {where}, which has {worst.capacity.value / 1e9:.1f} GB"
            )
            shorter = ""
            if place == "device" and worst.phase == "generate":
                figures, shorter = _explain_cache(plan, context, worst)
                message += figures
            span = _span(plan, worst) if place == "device" else plan.cluster.span
            # Advice to shard weights further is useless if the search has found that no layout helps.
            layout = context.find_nearest(plan, worst) if place == "device" else ""
            advice = "" if shorter or layout.startswith(("no other", "this fits")) else _advice(plan, worst)
            help = [table(phases), layout, shorter, advice]
            diagnostics.append(Diagnostic("out-of-memory", message, span, "\n".join(filter(None, help))))
    return diagnostics


def table(phases: list[PhaseMemory]) -> str:
    """Return a table with the total memory and the items of each phase.

    The largest item of a phase is first.
    """
    lines = []
    for phase in phases:
        items = ", ".join(
            f"{name} {size / 1e9:.1f}"
            for name, size in sorted(phase.items.items(), key=lambda item: (-item[1], item[0]))
        )
        mark = "over" if phase.total > phase.capacity.value else ""
        lines.append(f"{phase.phase:<9}{phase.total / 1e9:9.1f} GB  {mark:<5} {items}".rstrip())
    return "\n".join(lines)


def _explain_cache(plan: Plan, context: PlanContext, worst: PhaseMemory) -> tuple[str, str]:
    """Return the figures of one sequence's KV cache, and advice on what fits.

    The advice is the longest response ("": none fits). `worst` is the phase of a generation that does not fit. Its
    cache has room for one sequence only.
    """
    name = worst.remark.partition(":")[0]
    graph = plan.graph
    least = replace(plan.placement(name), sequences=1, cache_bytes=0)

    def count_bytes(response: int) -> int:
        limit = {"max_tokens": Expr("number", response)}
        nodes = (
            replace(node, attributes=node.attributes | limit) if node.name == name else node for node in graph.nodes
        )
        shorter = replace(plan, graph=replace(graph, nodes=tuple(nodes)), placements=(least,))
        return sum(holdings.fullest(shorter, context.engines, name)[1].values())

    work = holdings.work(plan, context.engines, name)
    rest = worst.total - sum(holdings.fullest(plan, context.engines, name)[1].values())
    fits = bisect_right(range(1, work.response), int(worst.capacity.value) - rest, key=count_bytes)
    longest = fits // ROUND * ROUND or fits
    cache = worst.items.get("KV cache", 0)
    left = max(0, int(worst.capacity.value) - worst.total + cache)
    figures = (
        f"; the KV cache of one sequence of {work.prompt:,} + {work.response:,} tokens is {holdings.gigabytes(cache)}, "
        f"and {holdings.gigabytes(left)} are left for it"
    )
    return figures, f"a shorter response fits: `max_tokens = {longest}` in `{name}`" if longest else ""


def _span(plan: Plan, worst: PhaseMemory) -> Span:
    """Return the span of the layout statement that decides the memory of a phase.

    `worst` is the phase, and the statement is the layout of a node in the phase's pool. A phase such as generate is
    named after the verb of this node. For the phases load, reshard and swap, the node is an update, or a generation if
    the pool has no update. If no layout is stated for the node, the result is the span of the deploy.
    """
    nodes = [node for node in plan.graph.nodes if plan.placement(node.name).pool == worst.pool]
    verb = worst.phase
    if verb in ("load", "reshard", "swap"):
        verb = "update" if any(node.verb == "update" for node in nodes) else "generate"
    spans = [
        plan.deploy.layouts[node.name].span for node in nodes if node.verb == verb and node.name in plan.deploy.layouts
    ]
    return next((span for span in spans if span != NOWHERE), plan.deploy.span)


def _advice(plan: Plan, worst: PhaseMemory) -> str:
    """Return advice on the cheapest change that reduces a phase's largest memory item.

    `worst` is the phase.
    """
    largest = max(worst.items, key=lambda name: worst.items[name])
    if worst.place == "host":
        return "add hosts, which share the rows; `reshard { mode = naive }` swaps nothing to the host"
    if largest == "activations":
        node = plan.graph.verb("update")[0].name
        engine = plan.placement(node).engine.name
        recompute = f"`engine {node} = {engine} {{ recompute = full }}`"
        if "recompute" in ENGINES[engine].capabilities.options:
            return f"without another layout, {recompute} keeps only one layer's activations"
        return "a smaller `micro_batch` needs less for activations"
    if largest in ("KV cache", "rows", "ranks"):
        return "a larger tp or a shorter response needs less per sequence"
    if largest == "logits":
        return "a smaller `micro_batch` or a larger tp needs less for logits"
    return "a larger tp shards the weights further, zero = 3 shards them across dp"
