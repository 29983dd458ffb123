"""Tokenizer check: a node must read tokens with the tokenizer that wrote them.

The columns of the source are tokens of the policy's tokenizer.

Invariant: a mismatch is reported only if both tokenizers are known and differ. The tokenizer of a preset is identified
by its name, and the tokenizer of a folder by the folder's tokenizer.json. Two tokenizers of folders differ if some
token of the writer's tokenizer does not have the same id in the reader's tokenizer.
"""

from __future__ import annotations

from ..analysis.sequences import sequences, source_worker
from ..diagnostics import NOWHERE, Diagnostic
from ..ir.graph import Column, Graph, Node, Worker
from ..ir.plan import Plan
from ..model.architecture import Model
from ..model.models import read_token_texts
from ..model.preset_names import find_tokenizer_name
from .stage import PlanContext

KINDS = ("policy", "value", "reward_model")


def check(plan: Plan, context: PlanContext) -> list[Diagnostic]:
    """Report each node whose model would misread tokens that another tokenizer made.

    Each node gets at most one diagnostic. If possible, the diagnostic names a column that the node scores.
    """
    diagnostics = []
    for node in plan.graph.nodes:
        if node.verb == "source" or plan.graph.worker(node.worker).kind not in KINDS:
            continue
        own = plan.model(node.name)
        misread: dict[str, Model] = {}
        for column in filter(_is_tokens, map(plan.graph.column, node.reads)):
            writer = _find_writer(plan.graph, plan.graph.writer(column.name))
            if writer is not None and _differ(theirs := plan.deploy.models[writer.model], own):
                misread[column.name] = theirs
        if not misread:
            continue
        scored = sequences(plan.graph, node).scored
        name = next((column for column in misread if column in scored), next(iter(misread)))
        theirs = misread[name]
        message = (
            f"`{node.name}` reads `{name}`, tokens of `{theirs.name}`; its model `{own.name}` has another tokenizer"
        )
        help = f"use a model with the tokenizer of `{theirs.name}`{_suggest_text(plan.graph, node, name)}"
        notes = [(model.span, f"`{model.name}`") for model in (theirs, own) if model.span != NOWHERE]
        diagnostics.append(Diagnostic("other-tokenizer", message, node.span, help, related=tuple(notes)))
    return diagnostics


def _suggest_text(graph: Graph, node: Node, column: str) -> str:
    """Return advice on exchanging text between models with different tokenizers."""
    host = next((worker.name for worker in graph.workers if worker.kind == "function"), "host")
    as_text = f"`node {host}.said({column}) -> said {{ call = text() }}`"
    if column in sequences(graph, node).scored:
        return (
            f": scores of single tokens need the same one. Otherwise only text can be exchanged: train on text that "
            f"`{node.worker}` generates (`sft()`), or let it judge a column `said : text`, written by {as_text}"
        )
    if graph.writer(column).verb == "source":
        return f"; or declare `{column} : text`, which each model reads with its own tokenizer"
    return f"; or read a column `said : text` instead, which {as_text} writes"


def _is_tokens(column: Column) -> bool:
    return column.element == "i32" and bool(column.dims) and column.dims[0].ragged


def _find_writer(graph: Graph, node: Node) -> Worker | None:
    """Return the worker whose tokenizer makes the tokens that a node writes.

    Return None if the node is a function.
    """
    if node.verb == "source":
        return source_worker(graph)
    worker = graph.worker(node.worker)
    return worker if worker.kind in KINDS else None


def _differ(writer: Model, reader: Model) -> bool:
    if not writer.path and not reader.path:
        names = find_tokenizer_name(writer.name), find_tokenizer_name(reader.name)
        return None not in names and names[0] != names[1]
    if writer.path == reader.path or not (writer.path and reader.path):
        return False
    written = read_token_texts(writer.path)
    read = read_token_texts(reader.path)
    return written is not None and read is not None and not written.items() <= read.items()
