"""Checks of routing columns: who writes and reads them, and their sizes.

Invariant: a routing column (analysis/sequences.py) that passes these checks fits the model of each node that reads or
writes it, and belongs to tokens of the node's sequences. Whether an engine can compute it is checked when the run
starts (compiler/unsupported.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from ..analysis.sequences import is_routing, is_tokens, sequences
from ..diagnostics import Diagnostic
from ..diagnostics.quantities import plural
from ..ir.graph import ELEMENTS, Column, Graph, Node
from ..ir.plan import Plan
from .columns import Library
from .scope import kind_of
from .stage import PlanContext


def check_nodes(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report nodes that read or write routes of tokens that they do not compute."""
    diagnostics: dict[str, Diagnostic] = {}  # by column: its first mistake may be the reason for others
    for node in graph.nodes:
        if kind_of(graph, node.worker) == "function" or any(
            graph.column(name).element not in ELEMENTS for name in (*node.reads, *node.writes)
        ):
            continue
        for column, message, help in _find_misuses(graph, node):
            diagnostics.setdefault(column, Diagnostic("bad-value", f"`{node.name}` {message}", node.span, help))
    return [*diagnostics.values()]


def _find_misuses(graph: Graph, node: Node) -> Iterator[tuple[str, str, str]]:
    """Yield the routing columns of a node that are wrong: a message and a help text."""
    computed = sequences(graph, node)
    for does, names in (("reads", node.reads), ("writes", node.writes)):
        seen: dict[str, str] = {}
        for column in filter(is_routing, map(graph.column, names)):
            like = column.dims[0].like
            message = ""
            help = f"leave `{column.name}` out"
            if node.verb == "source" or kind_of(graph, node.worker) != "policy":
                message = f"{does} routes, `{column.name}`, but only a policy has them"
            elif like not in (*computed.context, *computed.scored):
                message = f"{does} `{column.name}`, the routes of `{like}`, but its model does not read `{like}`"
                help += f", or add `{like}` to what it reads"
            elif not is_tokens(graph, like):
                message = f"{does} `{column.name}`, the routes of `{like}`, which is text: its number of tokens is open"
                help += f", or declare `{like}` as `i32[<= n]`"
            elif like in seen:
                message = f"{does} two columns of routes of `{like}`, `{seen[like]}` and `{column.name}`"
            elif does == "writes" and len(computed.scored) > 1 and like not in computed.scored:
                message = f"scores {plural(len(computed.scored), 'column')}, so `{like}` has no one route in each row"
            if message:
                yield column.name, message, help
            seen[like] = column.name


def check_sizes(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report routing columns whose sizes are not those of the model."""
    diagnostics = []
    reported = set()
    for node in plan.graph.nodes:
        if node.verb == "source" or not plan.graph.worker(node.worker).model:
            continue
        for column in filter(is_routing, map(plan.graph.column, (*node.reads, *node.writes))):
            diagnostic = None if column.name in reported else _check_size(plan, node, column)
            if diagnostic is not None:
                reported.add(column.name)
                diagnostics.append(diagnostic)
    return diagnostics


def _check_size(plan: Plan, node: Node, column: Column) -> Diagnostic | None:
    """Return a diagnostic if a routing column does not fit a node's model."""
    model = plan.model(node.name)
    like = column.dims[0].like
    stated = tuple(dim.size for dim in column.dims[1:])
    if not model.experts:
        message = f"`{column.name}` holds routes, but the model `{model.name}` of `{node.name}` has no experts"
        return Diagnostic("bad-value", message, column.span, f"leave `{column.name}` out")
    active = {experts.active for experts in model.experts}
    right = (len(model.expert_layers), max(active))
    if stated == right and len(active) == 1:
        return None
    has = f"{plural(right[0], 'layer')} with experts and {right[1]} experts per token"
    message = f"`{column.name}` is `i16[{like}, {stated[0]}, {stated[1]}]`, but `{model.name}` has {has}"
    help = f"declare it as `i16[{like}, {right[0]}, {right[1]}]`"
    return Diagnostic("bad-value", message, column.span, help)
