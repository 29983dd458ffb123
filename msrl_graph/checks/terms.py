"""Checks of loss terms: their inputs, and whether they can be combined.

Invariant: the signature of a loss term states the inputs that the term needs (ir/signatures.py). The inputs that an
update provides follow from the kind of its worker and from the columns for whose tokens the update computes
log-probabilities or values.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..analysis.sequences import find_response_column, is_tokens, routing_columns, sequences, temperature_exprs
from ..diagnostics import Diagnostic
from ..ir.attributes import GenerateAttributes, UpdateAttributes
from ..ir.graph import ELEMENTS, Graph, Node
from ..ir.signatures import FILLED, ROUNDING
from .columns import Library
from .scope import kind_of, known_calls, loss_columns, missing_inputs, span
from .staleness import stale_logp_columns

WORKERS = {"policy": "a policy", "value": "a value worker", "reward_model": "a reward model"}
# Inputs of terms, in words; all others are log-probabilities.
TAKEN = {"values": "predictions of values", "entropy": "entropies", "Scores": "scores of rows"}


def term_worker(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report loss terms that need an input which the update's worker does not provide."""
    diagnostics = []
    for node in graph.verb("update"):
        kind = kind_of(graph, node.worker)
        for call, signature in known_calls(node, library):
            if without := missing_inputs(graph, node, signature):
                need = TAKEN.get(without[0], "log-probabilities of tokens")
                message = (
                    f"`{signature.name}` needs {need}, which {WORKERS[kind]} such as `{node.worker}` does not give"
                )
                help = _list_fitting_terms(library, kind)
                diagnostics.append(Diagnostic("term-worker", message, span(call, node), help))
    return diagnostics


def _list_fitting_terms(library: Library, kind: str) -> str:
    """Return a help text that lists the loss terms for workers of the kind `kind`."""
    known = [signature for (call_kind, _), (signature, _) in sorted(library.items()) if call_kind == "loss"]
    terms = [
        signature
        for signature in known
        if {*signature.fills} - {"lengths", ROUNDING} or signature.logps or signature.scores
    ]
    fitting = [f"`{signature.name}`" for signature in terms if not signature.unfit(kind)]
    return f"terms for it: {', '.join(fitting)}" if fitting else ""


def token_columns(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report parameters that need a column of scored tokens, but get another column.

    A parameter of this kind belongs to a loss term. It receives the log-probabilities of the column's tokens, or the
    score of a text that ends with these tokens.
    """
    diagnostics = []
    for node in graph.verb("update"):
        for call, signature in known_calls(node, library):
            for parameter in sorted(signature.logps | signature.scores):
                name = call.columns().get(parameter, parameter)
                column = next(
                    (candidate for candidate in graph.columns if candidate.name == name and name in node.reads), None
                )
                if column is not None and column.element in ELEMENTS and (column.element != "i32" or not column.dims):
                    message = (
                        f"`{parameter}` of `{signature.name}` takes a column of tokens, but `{name}` holds "
                        f"`{column.element}`"
                    )
                    help = f"name one, `{signature.name}({parameter} = COLUMN)`, declared as `i32[…]`"
                    diagnostics.append(Diagnostic("term-column", message, span(call, node), help))
                elif column is not None and is_tokens(graph, name) and name not in sequences(graph, node).scored:
                    message = (
                        f"`{parameter}` of `{signature.name}` takes log-probabilities, but `{name}` is only context "
                        f"in `{node.name}`"
                    )
                    help = f"to score `{name}`, also read a column of the type `f32[{name}]`"
                    diagnostics.append(Diagnostic("term-column", message, span(call, node), help))
    return diagnostics


def mixed_row_terms(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report losses that mix terms per row with terms or options per token.

    A term per row returns one number per row; other terms return one number per token. The options per token are
    `reduce` and `masked_rows`. `masked_rows` is also reported if the loss is a mean over tokens, since `masked_rows`
    then has no effect.
    """
    diagnostics = []
    for node in graph.verb("update"):
        terms = list(known_calls(node, library))
        rows, tokens = (
            [(call, signature) for call, signature in terms if signature.rows == how] for how in (True, False)
        )
        if rows and tokens:
            call, signature = rows[0]
            _, other = tokens[0]
            message = (
                f"`{signature.name}` gives one number per row, `{other.name}` one per token: they cannot be combined"
            )
            diagnostics.append(Diagnostic("bad-value", message, span(call, node), "leave one of them out"))
        elif rows and node.stated("reduce") is not None:
            message = f"`reduce` is for terms of tokens, but `{rows[0][1].name}` gives one number per row"
            help = "leave it out: the loss is the mean over rows"
            diagnostics.append(Diagnostic("bad-value", message, node.span_of("reduce"), help))
        if node.stated("masked_rows") is not None and (rows or str(UpdateAttributes.of(node).reduce.value) == "tokens"):
            unit = "rows" if rows else "tokens"
            message = f"`masked_rows` of `{node.name}` has no effect: its loss is the mean over {unit}"
            help = "leave it out" if rows else "leave it out, or state `reduce = sequences`"
            diagnostics.append(Diagnostic("bad-value", message, node.span_of("masked_rows"), help))
    return diagnostics


def _typed_updates(graph: Graph) -> list[Node]:
    """Return the updates whose columns all have known types.

    An unknown type is reported where the column is declared.
    """
    return [
        node for node in graph.verb("update") if all(graph.column(column).element in ELEMENTS for column in node.reads)
    ]


def one_column(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report loss terms per token in an update that scores several columns.

    A term per token uses the tokens of one column, and it is not clear which of the scored columns is meant.
    """
    diagnostics = []
    for node in _typed_updates(graph):
        scored = sequences(graph, node).scored
        for call, signature in known_calls(node, library):
            if len(scored) > 1 and ({*signature.fills} & {*FILLED} or not signature.rows):
                message = (
                    f"`{signature.name}` works on the tokens of one column, but `{node.name}` scores "
                    f"{' and '.join(f'`{column}`' for column in scored)}"
                )
                help = "use a term that names its columns, such as `dpo`, or read only one of them"
                diagnostics.append(Diagnostic("term-column", message, span(call, node), help))
    return diagnostics


def joined_pair(graph: Graph, library: Library) -> list[Diagnostic]:
    """Warn of updates that read a chosen and a rejected response as one text."""
    diagnostics = []
    for node in _typed_updates(graph):
        read = sequences(graph, node)
        if not {"chosen", "rejected"} <= {*read.context, *read.scored} or {"chosen", "rejected"} <= {*read.scored}:
            continue
        if any(signature.logps for _, signature in known_calls(node, library)):
            continue  # reported at the term
        one, other = (column for column in (*read.context, *read.scored) if column in ("chosen", "rejected"))
        message = (
            f"`{node.name}` reads `chosen` and `rejected` as one text: it trains on `{other}` as a continuation of "
            f"`{one}`"
        )
        help = {
            "policy": f"to learn from `chosen` alone, leave `rejected` out of what `{node.name}` reads; to learn from "
            "pairs, use `loss = dpo()` with the log-probabilities of both from a reference",
            "reward_model": "to learn from pairs, use `loss = bradley_terry()`",
        }.get(kind_of(graph, node.worker), f"leave one of them out of what `{node.name}` reads")
        diagnostics.append(Diagnostic("joined-pair", message, node.span, help, "warning"))
    return diagnostics


def unused_reads(graph: Graph, library: Library) -> list[Diagnostic]:
    """Warn of columns that an update reads but no loss term uses.

    Such a column is computed and sent without need.
    """
    diagnostics = []
    for node in _typed_updates(graph):
        used = loss_columns(node, library) | stale_logp_columns(graph, node)
        read = sequences(graph, node)
        used |= {*read.context, *read.scored, *routing_columns(graph, node.reads).values()}
        used |= {str(expr.value) for expr in temperature_exprs(graph, node)}
        idle = [column for column in node.reads if column not in used and graph.column(column).element != "bool"]
        # A column is also needed if it decides which tokens are scored.
        idle = [
            column
            for column in idle
            if sequences(graph, replace(node, reads=tuple(name for name in node.reads if name != column))) == read
        ]
        loss_span = node.span_of("loss")
        for column in idle:
            message = f"`{node.name}` reads `{column}`, which no term of its loss uses"
            where = ((node.span, f"`{column}` is read here"),) if loss_span.file != node.span.file else ()
            diagnostics.append(
                Diagnostic("unused-column", message, loss_span, _suggest_removal(graph, node, column), "warning", where)
            )
    return diagnostics


def _suggest_removal(graph: Graph, node: Node, column: str) -> str:
    """Return a help text that says how to remove a column.

    If the writer of the column writes nothing else, the text also says to drop the writer's node or worker.
    """
    help = f"leave it out of what `{node.name}` reads"
    if column not in graph.writers:  # reported by another check
        return help
    writer = graph.writer(column)
    if writer.verb == "source" or any(column in other.reads for other in graph.nodes if other != node):
        return help
    help += f", or `drop {column}`"
    if writer.writes != (column,) or writer.sets:
        return help
    alone = len(graph.sharing(writer.worker)) == 1
    return f"{help} and `drop {writer.worker if alone else writer.name}`, which writes nothing else"


def unread_mask(graph: Graph, library: Library) -> list[Diagnostic]:
    """Warn of nodes that treat an environment's or agent's text as the policy's text.

    Such a node is an update that trains on the text without a mask, or a node that passes no mask to a function with an
    optional parameter for a mask.
    """
    diagnostics = []
    for node in (
        candidate for candidate in graph.verb("generate") if GenerateAttributes.of(candidate).partner is not None
    ):
        partner = "environment" if GenerateAttributes.of(node).environment is not None else "agent"
        mask = find_response_column(graph, node, "bool")
        responses = [column for column in node.writes if is_tokens(graph, column)]
        for other in graph.nodes:
            unmasked = [column for column in _list_unmasked(graph, other, library) if column in responses]
            if not unmasked:
                continue
            does = (
                f"trains on all of `{unmasked[0]}`"
                if other.verb == "update"
                else f"treats all of `{unmasked[0]}` as the policy's"
            )
            message = f"`{other.name}` {does}, but the {partner} of `{node.name}` wrote parts of it"
            own = (
                f"declare `mask : bool[{unmasked[0]}]`, let `{node.name}` write it next to `{unmasked[0]}`, and "
                f"`{other.name}` read it"
            )
            help = f"read `{mask}` in `{other.name}`" if mask else own
            diagnostics.append(Diagnostic("unread-mask", message, other.span, help, "warning"))
    return diagnostics


def _list_unmasked(graph: Graph, node: Node, library: Library) -> Collection[str]:
    """Return the columns of a node that may contain text which the node does not mask.

    If the node reads a column of type bool, this column is a mask, and the result is empty. If not, the result depends
    on the node:

    - An update: the columns that the update scores.
    - A function with an optional mask: all columns that the function reads.
    - Any other node: no columns.
    """
    if any(graph.column(column).element == "bool" for column in node.reads):
        return ()
    if node.verb == "update":
        return sequences(graph, node).scored
    return node.reads if any("mask" in signature.optional for _, signature in known_calls(node, library)) else ()
