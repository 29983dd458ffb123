"""Checks of states, the values that an algorithm keeps between iterations.

Invariant: a state is not a column. A node that reads a state gets the value that the state had at the end of the
previous iteration. So reading a state needs no path of sample edges and makes no cycle.
"""

from __future__ import annotations

from ..diagnostics import Diagnostic
from ..ir.graph import Graph, Node, State
from .columns import Library


def two_setters(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report states that several nodes set, at each of these nodes except the first."""
    diagnostics = []
    for state in graph.states:
        setters = sorted((node for node in graph.nodes if state.name in node.sets), key=lambda node: node.span)
        for other in setters[1:]:
            message = f"`{other.name}` sets the state `{state.name}`, which `{setters[0].name}` sets too"
            help = "let one node compute the next value from the outputs of both"
            diagnostics.append(
                Diagnostic(
                    "two-writers",
                    message,
                    other.span,
                    help,
                    related=((setters[0].span, f"`{state.name}` is set here"),),
                )
            )
    return diagnostics


def scope_mistakes(graph: Graph, node: Node) -> list[State]:
    """Return the states set by a node whose `per` does not match the state's rows.

    A node that sets a state with one value for the run must have `per = batch`. If a state has one value per row of a
    column, the node that sets the state must have this column as its `per`.
    """
    return [state for state in graph.states if state.name in node.sets and node.per != (state.per or "batch")]


def state_scope(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report nodes whose rows do not match the rows of a state that they set or read.

    - A state can have one value for each row of a column. A node that sets the state must get, in one call, all rows
      below one row of this column.
    - A state can have one value for the run. A node that sets the state must get all rows of the batch in one call.
    - Only a function may set a state.
    - For each row of a node that reads a state, the state must have exactly one value.
    """
    diagnostics = []
    kinds = {worker.name: worker.kind for worker in graph.workers}
    for state in graph.states:
        for node in graph.nodes:
            if state.name in node.sets and kinds.get(node.worker, "function") != "function":
                message = f"`{node.name}` sets the state `{state.name}`, which only a function can do"
                diagnostics.append(
                    Diagnostic(
                        "bad-scope", message, node.span, "let a `function` worker compute it from what this node writes"
                    )
                )
            elif state in scope_mistakes(graph, node):
                scope = f"one value for each `{state.per}`" if state.per else "one value for the run"
                message = f"`{node.name}` sets the state `{state.name}`, {scope}, but has `per = {node.per}`"
                diagnostics.append(Diagnostic("bad-scope", message, node.span, f"add `per = {state.per or 'batch'}`"))
            elif (
                state.name in node.states
                and state.per
                and not _is_above(graph, graph.column(state.per).level, graph.level(node))
            ):
                message = (
                    f"`{node.name}` reads the state `{state.name}`, one value for each `{state.per}`, but works on "
                    "rows that have several"
                )
                diagnostics.append(
                    Diagnostic(
                        "bad-scope", message, node.span, f"read it in a node whose rows have one `{state.per}` each"
                    )
                )
    return diagnostics


def equal_weights(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report a source whose sampling weights are equal for all rows.

    The weights are equal if they depend on no column of the data and on no state with one value per row.
    """
    source = graph.node("source")
    states = {state.name: state for state in graph.states}
    read = [states[name] for name in source.states]
    if not read or source.weight_columns or any(state.per for state in read):
        return []
    first = next(iter(source.writes), "prompt")
    message = f"`source` draws rows by `{read[0].name}`, one value for the run, so all rows have the same weight"
    help = f"declare `state {read[0].name} : {read[0].element} per {first} = …`"
    return [Diagnostic("bad-scope", message, source.span_of("weights"), help)]


def _is_above(graph: Graph, level: int, other: int) -> bool:
    return graph.common(level, other) == level


def unread(graph: Graph, library: Library) -> list[Diagnostic]:
    """Warn of states that are never read."""
    read = {state for node in graph.nodes for state in node.states}
    unread = [state for state in graph.states if state.name not in read]
    return [
        Diagnostic("unused-column", f"the state `{state.name}` is never read", state.span, "remove it", "warning")
        for state in unread
    ]


def unset(graph: Graph, library: Library) -> list[Diagnostic]:
    """Warn of states that are read but never set, so that their value never changes.

    A state that is neither read nor set is reported only by the check `unread`.
    """
    read = {state for node in graph.nodes for state in node.states}
    constant = read - {state for node in graph.nodes for state in node.sets}
    help = "make it a `param`, or let a function node write it"
    return [
        Diagnostic(
            "unused-column",
            f"the state `{state.name}` is never set: it stays {state.initial}",
            state.span,
            help,
            "warning",
        )
        for state in graph.states
        if state.name in constant
    ]
