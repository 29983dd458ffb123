"""Tokens: what a number in a token column stands for is known to its writer's tokenizer; the source's columns are the
policy's.

Invariant: refused only where both tokenizers are known, a preset's by name and a folder's by its tokenizer.json, and
the reader's has not the writer's every token at the same number.
"""

from __future__ import annotations

from ..diagnostics import NOWHERE, Diagnostic
from ..ir.graph import Column, Graph, Node, Worker
from ..ir.plan import Plan
from ..ir.sequences import sequences, speaker
from ..model.architecture import Model
from ..model.models import tokens
from ..model.presets import tokenizer

KINDS = ("policy", "value", "reward_model")


def check(plan: Plan) -> list[Diagnostic]:
    """One diagnostic a node of a model, at the first column that it would misread."""
    found = []
    for node in plan.graph.nodes:
        if node.verb == "source" or plan.graph.worker(node.worker).kind not in KINDS:
            continue
        for column in filter(_tokens, map(plan.graph.column, node.reads)):
            writer = _writer(plan.graph, plan.graph.writer(column.name))
            theirs, own = writer and plan.deploy.models[writer.model], plan.model(node.name)
            if theirs and _differ(theirs, own):
                message = (
                    f"`{node.name}` reads `{column.name}`, tokens of `{theirs.name}`; its model `{own.name}` "
                    "has another tokenizer"
                )
                help = f"take a model with the tokenizer of `{theirs.name}`{_instead(plan.graph, node, column.name)}"
                notes = [(m.span, f"`{m.name}`") for m in (theirs, own) if m.span != NOWHERE]
                found.append(Diagnostic("other-tokenizer", message, node.span, help, related=tuple(notes)))
                break
    return found


def _instead(graph: Graph, node: Node, column: str) -> str:
    """How a model may read what another wrote: as text, where it scores none of it."""
    if column in sequences(graph, node).scored:
        return ""
    if graph.writer(column).verb == "source":
        return f"; or declare `{column} : text`, which each model reads by its own tokenizer"
    host = next((w.name for w in graph.workers if w.kind == "function"), "host")
    return (
        f"; or read a column `said : text` instead, which `node {host}.said({column}) -> said {{ call = text() "
        "}` writes"
    )


def _tokens(column: Column) -> bool:
    return column.element == "i32" and bool(column.dims) and column.dims[0].ragged


def _writer(graph: Graph, node: Node) -> Worker | None:
    """The worker whose tokenizer a node's tokens are of; None where a function wrote them."""
    if node.verb == "source":
        return speaker(graph)
    worker = graph.worker(node.worker)
    return worker if worker.kind in KINDS else None


def _differ(writer: Model, reader: Model) -> bool:
    if not writer.path and not reader.path:
        names = tokenizer(writer.name), tokenizer(reader.name)
        return None not in names and names[0] != names[1]
    if writer.path == reader.path or not (writer.path and reader.path):
        return False
    written, read = tokens(writer.path), tokens(reader.path)
    return written is not None and read is not None and not written.items() <= read.items()
