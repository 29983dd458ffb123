"""Terms of a loss: whether the update gives what they are computed from, and whether what they give can be joined.

Invariant: what a term needs stands in its signature (functions.py); what an update gives follows from its worker's kind and what it scores.
"""

from __future__ import annotations

from ..diagnostics import Diagnostic
from ..functions import FILLED
from ..graph import ELEMENTS, KINDS, Graph
from ..sequences import sequences
from .columns import Library
from .scope import calls, span

WORKERS = {"policy": "a policy", "value": "a value worker", "reward_model": "a reward model"}


def term_worker(graph: Graph, library: Library) -> list[Diagnostic]:
    """Terms of a loss that need what the weights that are updated do not give."""
    kinds = {w.name: w.kind for w in graph.workers}
    found = []
    for node in graph.verb("update"):
        kind = kinds.get(node.worker, "")
        none = ("values",) if kind == "policy" else ("logp", "entropy")
        for call, signature in calls(node, library) if kind in KINDS else ():
            lacking = [f for f in none if f in signature.fills] or sorted(signature.logps if kind != "policy" else ())
            if lacking:
                what = {"values": "predictions of values", "entropy": "entropies"}.get(lacking[0], "log-probabilities of tokens")
                message = f"`{signature.name}` needs {what}, which {WORKERS[kind]} such as `{node.worker}` does not give"
                help = _others(library, none, kind != "policy")
                found.append(Diagnostic("term-worker", message, span(call, node), help))
    return found


def _others(library: Library, none: tuple[str, ...], no_logps: bool) -> str:
    """The terms that need none of this."""
    terms = [s for (k, _), (s, _) in sorted(library.items()) if k == "loss" and (s.fills or s.logps)]
    fitting = [f"`{s.name}`" for s in terms if not set(s.fills) & set(none) and not (no_logps and s.logps)]
    return f"terms for it: {', '.join(fitting)}" if fitting else ""


def token_columns(graph: Graph, library: Library) -> list[Diagnostic]:
    """Parameters that stand for the log-probabilities of tokens, and whose column holds none."""
    found = []
    for node in graph.verb("update"):
        for call, signature in calls(node, library):
            for parameter in sorted(signature.logps):
                name = call.columns().get(parameter, parameter)
                column = next((c for c in graph.columns if c.name == name and name in node.reads), None)
                if column is not None and column.element in ELEMENTS and (column.element != "i32" or not column.dims):
                    message = f"`{parameter}` of `{signature.name}` takes a column of tokens, and `{name}` holds `{column.element}`"
                    help = f"name one, `{signature.name}({parameter} = COLUMN)`, declared as `i32[…]`"
                    found.append(Diagnostic("term-column", message, span(call, node), help))
    return found


def of_rows(graph: Graph, library: Library) -> list[Diagnostic]:
    """Terms that give one number a row, beside such as give one a token, and where tokens are to be reduced."""
    found = []
    for node in graph.verb("update"):
        terms = list(calls(node, library))
        rows, tokens = ([(c, s) for c, s in terms if s.rows == how] for how in (True, False))
        if rows and tokens:
            (call, signature), (_, other) = rows[0], tokens[0]
            message = f"`{signature.name}` gives one number a row, and `{other.name}` one a token: they cannot be joined"
            found.append(Diagnostic("bad-value", message, span(call, node), "leave one of them out"))
        elif rows and "reduce" in node.attributes:
            message = f"`reduce` is for terms of tokens, and `{rows[0][1].name}` gives one number a row"
            at = node.attributes["reduce"].span
            help = "leave it out: the loss is the mean over rows"
            found.append(Diagnostic("bad-value", message, at if at.line else node.span, help))
    return found


def one_column(graph: Graph, library: Library) -> list[Diagnostic]:
    """Terms of the tokens of one column in an update that scores several: which one they mean cannot be told."""
    found = []
    for node in graph.verb("update"):
        if any(graph.column(c).element not in ELEMENTS for c in node.reads):
            continue  # told where the column is declared
        scored = sequences(graph, node).scored
        for call, signature in calls(node, library):
            if len(scored) > 1 and {*signature.fills} & {*FILLED}:
                message = (
                    f"`{signature.name}` is of the tokens of one column, and `{node.name}` scores {' and '.join(f'`{c}`' for c in scored)}"
                )
                help = "take a term that names its columns, as `dpo` does, or read one of them"
                found.append(Diagnostic("term-column", message, span(call, node), help))
    return found
