"""States, the values that outlive an iteration: who sets them, over which rows.

Invariant: a state is no column: it needs no path and makes no cycle, since what is read is the value that the iteration
before left.
"""

from __future__ import annotations

from ..diagnostics import Diagnostic
from ..ir.graph import Graph, Node, State
from .columns import Library


def two_setters(graph: Graph, library: Library) -> list[Diagnostic]:
    found = []
    for state in graph.states:
        setters = sorted((n for n in graph.nodes if state.name in n.sets), key=lambda n: n.span)
        for other in setters[1:]:
            message = f"`{other.name}` sets the state `{state.name}`, which `{setters[0].name}` sets too"
            help = "let one of them compute the next value from what both give"
            found.append(
                Diagnostic(
                    "two-writers",
                    message,
                    other.span,
                    help,
                    related=((setters[0].span, f"`{state.name}` is set here"),),
                )
            )
    return found


def missets(graph: Graph, node: Node) -> list[State]:
    """The states that a node sets, and whose rows it is not handed together."""
    return [s for s in graph.states if s.name in node.sets and node.per != (s.per or "batch")]


def state_scope(graph: Graph, library: Library) -> list[Diagnostic]:
    """A state of each row of a column is set where all that is under the row is at hand, one of the run where all rows
    are; and it is read where each row has one."""
    found = []
    kinds = {w.name: w.kind for w in graph.workers}
    for state in graph.states:
        for node in graph.nodes:
            if state.name in node.sets and kinds.get(node.worker, "function") != "function":
                message = f"`{node.name}` sets the state `{state.name}`, which only a function can"
                found.append(
                    Diagnostic(
                        "bad-scope", message, node.span, "let a `function` worker compute it from what this node writes"
                    )
                )
            elif state in missets(graph, node):
                what = f"one for each `{state.per}`" if state.per else "one for the run"
                message = f"`{node.name}` sets the state `{state.name}`, {what}, and has `per = {node.per}`"
                found.append(Diagnostic("bad-scope", message, node.span, f"add `per = {state.per or 'batch'}`"))
            elif (
                state.name in node.states
                and state.per
                and not _above(graph, graph.column(state.per).level, graph.level(node))
            ):
                message = (
                    f"`{node.name}` reads the state `{state.name}`, one for each `{state.per}`, and works on "
                    "rows that have several"
                )
                found.append(
                    Diagnostic(
                        "bad-scope", message, node.span, f"read it where there is one row for each `{state.per}`"
                    )
                )
    return found


def weighed(graph: Graph, library: Library) -> list[Diagnostic]:
    """Weights of a source that no state of its rows tells apart."""
    source = graph.node("source")
    states = {s.name: s for s in graph.states}
    read = [states[name] for name in source.states]
    if not read or source.weighs or any(s.per for s in read):
        return []
    first = next(iter(source.writes), "prompt")
    message = f"`source` draws rows by `{read[0].name}`, which is one for the run: it tells no row from another"
    help = f"declare `state {read[0].name} : {read[0].element} per {first} = …`"
    return [Diagnostic("bad-scope", message, source.at("weights"), help)]


def _above(graph: Graph, level: int, other: int) -> bool:
    return graph.common(level, other) == level


def unread(graph: Graph, library: Library) -> list[Diagnostic]:
    """States that nobody reads: those that are only set."""
    read = {s for n in graph.nodes for s in n.states}
    unread = [s for s in graph.states if s.name not in read]
    return [
        Diagnostic("unused-column", f"nobody reads the state `{s.name}`", s.span, "remove it", "warning")
        for s in unread
    ]


def unset(graph: Graph, library: Library) -> list[Diagnostic]:
    """States that keep their first value, since nobody sets them; of those that nobody reads either that is told
    already."""
    read = {s for n in graph.nodes for s in n.states}
    kept = read - {s for n in graph.nodes for s in n.sets}
    help = "make it a `param`, or let a function node write it"
    return [
        Diagnostic("unused-column", f"nobody sets the state `{s.name}`: it stays {s.initial}", s.span, help, "warning")
        for s in graph.states
        if s.name in kept
    ]
