"""Terms of a loss: whether the update gives what they are computed from, and whether what they give can be joined.

Invariant: what a term needs stands in its signature (signatures.py); what an update gives, from its worker's kind and
what it scores.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..diagnostics import Diagnostic
from ..ir.attributes import GenerateAttributes, UpdateAttributes
from ..ir.graph import ELEMENTS, Graph, Node
from ..ir.sequences import is_tokens, of_response, sequences, tempered
from ..ir.signatures import FILLED, ROUNDING
from .columns import Library
from .scope import calls, kind_of, lacking, span, taken
from .staleness import sampled

WORKERS = {"policy": "a policy", "value": "a value worker", "reward_model": "a reward model"}
# What a term takes, in words; all else are log-probabilities.
TAKEN = {"values": "predictions of values", "entropy": "entropies", "Scores": "scores of rows"}


def term_worker(graph: Graph, library: Library) -> list[Diagnostic]:
    """Terms of a loss that need what the weights that are updated do not give."""
    found = []
    for node in graph.verb("update"):
        kind = kind_of(graph, node.worker)
        for call, signature in calls(node, library):
            if without := lacking(graph, node, signature):
                what = TAKEN.get(without[0], "log-probabilities of tokens")
                message = (
                    f"`{signature.name}` needs {what}, which {WORKERS[kind]} such as `{node.worker}` does not give"
                )
                help = _others(library, kind)
                found.append(Diagnostic("term-worker", message, span(call, node), help))
    return found


def _others(library: Library, kind: str) -> str:
    """The terms that take what the weights of a worker of this kind give."""
    known = [s for (k, _), (s, _) in sorted(library.items()) if k == "loss"]
    terms = [s for s in known if {*s.fills} - {"lengths", ROUNDING} or s.logps or s.scores]
    fitting = [f"`{s.name}`" for s in terms if not s.unfit(kind)]
    return f"terms for it: {', '.join(fitting)}" if fitting else ""


def token_columns(graph: Graph, library: Library) -> list[Diagnostic]:
    """Parameters that stand for the log-probabilities of tokens, or the score of a text that they end, and whose column
    holds none, or none that are scored."""
    found = []
    for node in graph.verb("update"):
        for call, signature in calls(node, library):
            for parameter in sorted(signature.logps | signature.scores):
                name = call.columns().get(parameter, parameter)
                column = next((c for c in graph.columns if c.name == name and name in node.reads), None)
                if column is not None and column.element in ELEMENTS and (column.element != "i32" or not column.dims):
                    message = (
                        f"`{parameter}` of `{signature.name}` takes a column of tokens, and `{name}` holds "
                        f"`{column.element}`"
                    )
                    help = f"name one, `{signature.name}({parameter} = COLUMN)`, declared as `i32[…]`"
                    found.append(Diagnostic("term-column", message, span(call, node), help))
                elif column is not None and is_tokens(graph, name) and name not in sequences(graph, node).scored:
                    message = (
                        f"`{parameter}` of `{signature.name}` takes log-probabilities, and `{name}` is context "
                        f"to `{node.name}`"
                    )
                    help = f"what is scored is told by what is read beside: a column of the type `f32[{name}]`"
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
            message = (
                f"`{signature.name}` gives one number a row, and `{other.name}` one a token: they cannot be joined"
            )
            found.append(Diagnostic("bad-value", message, span(call, node), "leave one of them out"))
        elif rows and node.stated("reduce") is not None:
            message = f"`reduce` is for terms of tokens, and `{rows[0][1].name}` gives one number a row"
            help = "leave it out: the loss is the mean over rows"
            found.append(Diagnostic("bad-value", message, node.at("reduce"), help))
        if node.stated("masked_rows") is not None and (rows or str(UpdateAttributes.of(node).reduce.value) == "tokens"):
            over = "rows" if rows else "tokens"
            message = f"`masked_rows` of `{node.name}` has no effect: its loss is the mean over {over}"
            help = "leave it out" if rows else "leave it out, or state `reduce = sequences`"
            found.append(Diagnostic("bad-value", message, node.at("masked_rows"), help))
    return found


def _typed_updates(graph: Graph) -> list[Node]:
    """Without those that read a column whose type is wrong, as is told where it is declared."""
    return [n for n in graph.verb("update") if all(graph.column(c).element in ELEMENTS for c in n.reads)]


def one_column(graph: Graph, library: Library) -> list[Diagnostic]:
    """Terms of tokens in an update that scores several columns: of which one they are cannot be told."""
    found = []
    for node in _typed_updates(graph):
        scored = sequences(graph, node).scored
        for call, signature in calls(node, library):
            if len(scored) > 1 and ({*signature.fills} & {*FILLED} or not signature.rows):
                message = (
                    f"`{signature.name}` is of the tokens of one column, and `{node.name}` scores "
                    f"{' and '.join(f'`{c}`' for c in scored)}"
                )
                help = "take a term that names its columns, as `dpo` does, or read one of them"
                found.append(Diagnostic("term-column", message, span(call, node), help))
    return found


def joined_pair(graph: Graph, library: Library) -> list[Diagnostic]:
    """Updates that read a chosen and a rejected response as one text."""
    found = []
    for node in _typed_updates(graph):
        read = sequences(graph, node)
        if not {"chosen", "rejected"} <= {*read.context, *read.scored} or {"chosen", "rejected"} <= {*read.scored}:
            continue
        if any(signature.logps for _, signature in calls(node, library)):
            continue  # which is told of its term
        one, other = (c for c in (*read.context, *read.scored) if c in ("chosen", "rejected"))
        message = (
            f"`{node.name}` reads `chosen` and `rejected` as one text: it trains on `{other}` as what follows `{one}`"
        )
        help = {
            "policy": f"to learn what was chosen, leave `rejected` out of what `{node.name}` reads; to learn from "
            "pairs, `loss = dpo()`, with the log-probabilities of both by a reference",
            "reward_model": "to learn from pairs, `loss = bradley_terry()`",
        }.get(kind_of(graph, node.worker), f"leave one of them out of what `{node.name}` reads")
        found.append(Diagnostic("joined-pair", message, node.span, help, "warning"))
    return found


def unused_reads(graph: Graph, library: Library) -> list[Diagnostic]:
    """Columns that an update reads and no term of its loss does: they are computed and moved for nothing."""
    found = []
    for node in _typed_updates(graph):
        used = taken(node, library) | sampled(graph, node)
        read = sequences(graph, node)
        used |= {*read.context, *read.scored, *(str(e.value) for e in tempered(graph, node))}
        idle = [c for c in node.reads if c not in used and graph.column(c).element != "bool"]
        # One of them may be what says which tokens are scored.
        idle = [
            c for c in idle if sequences(graph, replace(node, reads=tuple(r for r in node.reads if r != c))) == read
        ]
        at = node.at("loss")
        for column in idle:
            message = f"`{node.name}` reads `{column}`, which no term of its loss uses"
            where = ((node.span, f"`{column}` is read here"),) if at.file != node.span.file else ()
            found.append(Diagnostic("unused-column", message, at, _without(graph, node, column), "warning", where))
    return found


def _without(graph: Graph, node: Node, column: str) -> str:
    """How to do without a column, and without what computes it for this node alone."""
    help = "leave it out of what it reads"
    if column not in graph.writers:  # which another check tells
        return help
    writer = graph.writer(column)
    if writer.verb == "source" or any(column in n.reads for n in graph.nodes if n != node):
        return help
    help += f", or `drop {column}`"
    if writer.writes != (column,) or writer.sets:
        return help
    alone = len(graph.sharing(writer.worker)) == 1
    return f"{help} and `drop {writer.worker if alone else writer.name}`, which gives nothing else"


def unread_mask(graph: Graph, library: Library) -> list[Diagnostic]:
    """Updates that train on what an environment or an agent wrote, and functions that know of masks and take it for the
    policy's."""
    found = []
    for node in (n for n in graph.verb("generate") if GenerateAttributes.of(n).partner is not None):
        partner = "environment" if GenerateAttributes.of(node).environment is not None else "agent"
        mask = of_response(graph, node, "bool")
        responses = [c for c in node.writes if is_tokens(graph, c)]
        for other in graph.nodes:
            whole = [c for c in _unmasked(graph, other, library) if c in responses]
            if not whole:
                continue
            does = (
                f"trains on all of `{whole[0]}`"
                if other.verb == "update"
                else f"takes all of `{whole[0]}` for the policy's"
            )
            message = f"`{other.name}` {does}, and parts of it the {partner} of `{node.name}` wrote"
            own = (
                f"declare `mask : bool[{whole[0]}]`, let `{node.name}` write it beside `{whole[0]}`, and "
                f"`{other.name}` read it"
            )
            help = f"read `{mask}` in `{other.name}`" if mask else own
            found.append(Diagnostic("unread-mask", message, other.span, help, "warning"))
    return found


def _unmasked(graph: Graph, node: Node, library: Library) -> Collection[str]:
    """The columns of tokens that a node takes whole, where a mask could leave some out."""
    if any(graph.column(c).element == "bool" for c in node.reads):
        return ()
    if node.verb == "update":
        return sequences(graph, node).scored
    return node.reads if any("mask" in signature.optional for _, signature in calls(node, library)) else ()
