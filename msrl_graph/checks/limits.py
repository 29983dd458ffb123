"""What the language can say and this version cannot compile, where it takes the whole graph to see it.

Invariant: each construct is named once, with what to use meanwhile; when one is built its check goes.
"""

from __future__ import annotations

from ..diagnostics import Diagnostic, Span
from ..graph import ELEMENTS, Graph
from .columns import Library


def not_yet(graph: Graph, library: Library) -> list[Diagnostic]:
    found: list[Diagnostic] = []

    def tell(message: str, span: Span, help: str) -> None:
        found.append(Diagnostic("not-yet", message, span, help))

    for worker in graph.workers:
        if worker.kind in ("value", "reward_model"):
            help = "score in a function node" if worker.kind == "reward_model" else "estimate advantages from the rewards of a group"
            tell(f"a worker of the kind `{worker.kind}` cannot be compiled yet", worker.span, help)
    kinds = {w.name: w.kind for w in graph.workers}
    generates = [n for n in graph.verb("generate") if kinds.get(n.worker) != "function"]
    for node in generates[1:]:
        tell("a second state that generates cannot be compiled yet", node.span, "one state generates all the responses of a prompt")
    for node in generates[:1]:
        if graph.level(node) > 0:
            tell("generating from responses cannot be compiled yet", node.span, "generate from columns of the source")
    responses = {c for n in generates for c in n.writes if graph.column(c).element not in ("f32", "text")}
    for worker in graph.workers:
        for node in [n for n in graph.verb("update") if n.worker == worker.name][1:]:
            tell(f"a second update of `{worker.name}` cannot be compiled yet", node.span, "one update a worker: add its terms to the first")
    for node in graph.verb("update"):
        if kinds.get(node.worker) == "policy" and not responses & set(node.reads) and (responses or not generates):
            tell(f"`{node.name}` reads no generated response; training on data alone cannot be compiled yet", node.span, "")
    for node in graph.nodes:
        if kinds.get(node.worker) in ("policy", "value", "reward_model") and node.verb in ("generate", "infer"):
            for column in map(graph.column, node.reads):
                own = "environment" in node.attributes and column.element in ("text", "json")  # read by the environment, not by the model
                if column.element in ELEMENTS and (column.element != "i32" or not column.dims) and not own:
                    message = f"`{node.name}` reads `{column.name}`; a model cannot read a column of `{column.element}` yet"
                    tell(message, node.span, "declare it as tokens, `i32[<= n]`")
    return found
