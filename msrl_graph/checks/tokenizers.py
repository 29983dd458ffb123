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
    """Report each node of a model at one column that it would misread: a scored one if there is any."""
    found = []
    for node in plan.graph.nodes:
        if node.verb == "source" or plan.graph.worker(node.worker).kind not in KINDS:
            continue
        own = plan.model(node.name)
        misread: dict[str, Model] = {}
        for column in filter(_tokens, map(plan.graph.column, node.reads)):
            writer = _writer(plan.graph, plan.graph.writer(column.name))
            if writer is not None and _differ(theirs := plan.deploy.models[writer.model], own):
                misread[column.name] = theirs
        if not misread:
            continue
        scored = sequences(plan.graph, node).scored
        name = next((c for c in misread if c in scored), next(iter(misread)))
        theirs = misread[name]
        message = (
            f"`{node.name}` reads `{name}`, tokens of `{theirs.name}`; its model `{own.name}` has another tokenizer"
        )
        help = f"use a model with the tokenizer of `{theirs.name}`{_instead(plan.graph, node, name)}"
        notes = [(m.span, f"`{m.name}`") for m in (theirs, own) if m.span != NOWHERE]
        found.append(Diagnostic("other-tokenizer", message, node.span, help, related=tuple(notes)))
    return found


def _instead(graph: Graph, node: Node, column: str) -> str:
    """Say how models with different tokenizers can work together: by text, which has no scores of tokens."""
    host = next((w.name for w in graph.workers if w.kind == "function"), "host")
    as_text = f"`node {host}.said({column}) -> said {{ call = text() }}`"
    if column in sequences(graph, node).scored:
        return (
            f": scores of single tokens need one. Between tokenizers only text passes: train on text that "
            f"`{node.worker}` generates (`sft()`), or let it judge a column `said : text`, written by {as_text}"
        )
    if graph.writer(column).verb == "source":
        return f"; or declare `{column} : text`, which each model reads by its own tokenizer"
    return f"; or read a column `said : text` instead, which {as_text} writes"


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
    written = tokens(writer.path)
    read = tokens(reader.path)
    return written is not None and read is not None and not written.items() <= read.items()
