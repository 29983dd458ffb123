"""Checks of the columns that each verb reads and writes: types, names, lengths.

Invariant: these checks use only declared types, verbs and kinds of workers. Function nodes may read and write any
column.
"""

from __future__ import annotations

from collections.abc import Callable

from ..analysis.sequences import (
    find_response_column,
    is_routing,
    is_tokens,
    is_whole_conversation,
    sequences,
    temperature_exprs,
)
from ..diagnostics import Diagnostic
from ..ir.attributes import GenerateAttributes
from ..ir.graph import ELEMENTS, Column, Graph, Node
from ..ir.metrics import RESERVED
from ..ir.plan import is_reported
from .columns import Library
from .scope import kind_of


def check_written_columns(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report columns that a node cannot write or read because of its verb."""
    diagnostics: list[Diagnostic] = []

    def wrong(node: Node, message: str, help: str) -> None:
        diagnostics.append(Diagnostic("bad-value", f"`{node.name}` {message}", node.span, help))

    for node in graph.nodes:
        columns = [graph.column(name) for name in node.writes]
        if kind_of(graph, node.worker) == "function" or any(
            graph.column(name).element not in ELEMENTS for name in (*node.reads, *node.writes)
        ):
            continue  # an unknown type of a column is reported elsewhere
        if node.verb != "source":
            _check_reads(graph, node, wrong)
        if node.verb == "generate":
            if node.cuts and graph.level(node):
                help = "leave `partial` out: each row is then generated completely"
                wrong(
                    node,
                    "generates from responses, but with `partial` an iteration takes complete prompts only",
                    help,
                )
            responses = [
                column for column in columns if column.element == "i32" and [dim for dim in column.dims if dim.ragged]
            ]
            if len(responses) != 1:
                wrong(
                    node,
                    "must write exactly one column of tokens, the response",
                    "declare it as `i32[<= n]`, where n is the maximum number of tokens",
                )
            like = responses[0].name if len(responses) == 1 else ""
            logps = [
                column
                for column in columns
                if column.element == "f32" and like and [dim.like for dim in column.dims] == [like]
            ]
            masks = [
                column
                for column in columns
                if column.element == "bool" and like and [dim.like for dim in column.dims] == [like]
            ]
            versions = [
                column
                for column in columns
                if column.element == "i32" and like and [dim.like for dim in column.dims] == [like]
            ]
            for column in columns:
                own = [*responses, *logps[:1], *masks[:1], *versions[:1]]
                is_produced = column in own or is_routing(column)
                if not is_produced and like and GenerateAttributes.of(node).partner is None:
                    help = (
                        f"declare log-probabilities as `f32[{like}]`, a mask as `bool[{like}]`, versions as "
                        f"`i32[{like}]`, routes as `i16[{like}, layers, k]`; other columns are written by functions"
                    )
                    wrong(node, f"writes `{column.name}`, which generation does not produce", help)
        elif node.verb == "infer":
            _check_inferred(graph, node, [column for column in columns if not is_routing(column)], wrong)
        elif node.verb == "update" and columns:
            wrong(node, "cannot write columns: an update only changes weights", f"remove `-> {', '.join(node.writes)}`")
    return diagnostics


def _check_reads(graph: Graph, node: Node, wrong: Callable[[Node, str, str], None]) -> None:
    """Call `wrong` for each input column of a node that the node's model cannot read.

    `wrong` reports a diagnostic: its arguments are the node, the message and the help text. The model of a node reads
    columns of tokens or text. An update also reads the columns that its loss terms need: one number for each token of a
    column that the update reads, or one number for each row.
    """
    tokens = {name for name in node.reads if is_tokens(graph, name) or graph.column(name).element == "text"}
    for column in map(graph.column, node.reads):
        is_option = GenerateAttributes.of(node).partner is not None and column.element == "json"
        is_option = is_option or any(
            (expr.kind, expr.value) == ("column", column.name) for expr in temperature_exprs(graph, node)
        )
        is_option = is_option or (node.verb == "infer" and is_routing(column))  # routing.py checks it
        if node.verb != "update" and column.name not in tokens and not is_option:
            wrong(
                node,
                f"reads `{column.name}`, which is neither tokens nor text",
                "a model reads columns such as `i32[<= 1024]`, and `text`",
            )
        elif (
            node.verb == "update"
            and not is_routing(column)
            and column.dims
            and (like := column.dims[0].like)
            and like not in tokens
        ):
            tokens.add(like)  # report it once
            wrong(
                node,
                f"reads `{column.name}`, a number for each token of `{like}`, but not `{like}`",
                f"add `{like}` to what it reads",
            )
    if not tokens and node.verb != "generate":
        wrong(node, "reads no tokens", "add the token columns that its model computes on, in order")
    read = sequences(graph, node)
    predicts = node.verb in ("infer", "update") and kind_of(graph, node.worker) != "reward_model"
    if predicts and read.scored and not read.context and tokens <= {*node.reads}:
        response = read.scored[0]
        problem = f"scores `{response}` with nothing before it to predict its first token from"
        if not is_whole_conversation(graph, node):
            wrong(node, problem, "read a prompt, another column of tokens, before it")
        elif node.verb == "update" and not _reads_mask(graph, node, response):
            mask = find_response_column(graph, graph.writer(response), "bool")
            declare = f"declare `mask : bool[{response}]`, let `{graph.writer(response).name}` write it and "
            wrong(
                node,
                problem,
                f"read `{mask}`, which excludes that token" if mask else f"{declare}`{node.name}` read it",
            )


def _reads_mask(graph: Graph, node: Node, response: str) -> bool:
    """Return whether a node reads a mask of a response."""
    columns = (graph.column(name) for name in node.reads)
    return any(column.element == "bool" and [dim.like for dim in column.dims] == [response] for column in columns)


def _check_inferred(graph: Graph, node: Node, columns: list[Column], wrong: Callable[[Node, str, str], None]) -> None:
    """Call `wrong` if an infer node writes columns that it cannot write.

    `columns` are the columns that the node writes. `wrong` reports a diagnostic: its arguments are the node, the
    message and the help text. An infer node may write one number for each token of a column that it reads. A policy may
    also write the k highest log-probabilities for each token, together with their token ids. A reward model may also
    write one number per row.
    """
    if (
        kind_of(graph, node.worker) == "reward_model"
        and len(columns) == 1
        and columns[0].element == "f32"
        and not columns[0].dims
    ):
        return
    tokens = {name for name in node.reads if graph.column(name).element == "i32"}
    likes = [column.dims[0].like if column.dims else "" for column in columns]
    one = [
        column
        for column, like in zip(columns, likes, strict=True)
        if column.element == "f32" and len(column.dims) == 1 and like in tokens
    ]
    kinds = ("f32", "i32") if kind_of(graph, node.worker) == "policy" else ()  # others have no k best
    best = [
        column
        for column, like in zip(columns, likes, strict=True)
        if column.element in kinds and len(column.dims) == 2 and like in tokens
    ]
    pairs = {(column.element, column.dims) for column in best}
    paired = len(best) == len(pairs) == 2 * len({dims for _, dims in pairs}) and {element for element, _ in pairs} == {
        "f32",
        "i32",
    }
    alone = len({column.dims[0].like for column in one}) == len(one)
    if (
        len(best) == len(columns) == 2
        and {column.element for column in best} == {"f32", "i32"}
        and len({column.dims[1] for column in best}) == 2
    ):
        counts = " and ".join(f"{column.dims[1].size} as `{column.name}`" for column in best)
        wrong(
            node,
            f"writes different numbers of the best of each token: {counts}",
            "declare the ids with the same number as their log-probabilities",
        )
    elif not columns or len(one) + len(best) < len(columns) or not alone or (best and not paired):
        help = (
            "declare it as `f32[response]`, and read `response`; the k best as `f32[response, k]` with their ids, "
            "`i32[response, k]`"
        )
        wrong(node, "must write one number for each token of a column that it reads, or the k best of each", help)


def too_long(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report generations that can write more tokens than their response column holds."""
    diagnostics = []
    for node in graph.verb("generate"):
        wanted = GenerateAttributes.of(node).max_tokens
        responses = [
            column
            for column in map(graph.column, node.writes)
            if column.element == "i32" and column.dims and column.dims[0].ragged
        ]
        for column in responses:
            bound = graph.bound(column.name)
            if wanted is not None and wanted > bound:
                message = f"`max_tokens` is {wanted:,}, but `{column.name}` holds at most {bound:,}"
                help = f"declare `{column.name} : i32[<= {wanted}]`, or leave `max_tokens` out"
                note = ((column.span, f"`{column.name}` holds at most {bound:,} tokens"),)
                diagnostics.append(Diagnostic("bad-value", message, node.span_of("max_tokens"), help, related=note))
    return diagnostics


def own_metric(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report columns that have the name of a built-in metric."""
    diagnostics = []
    for node in graph.nodes:
        for column in map(graph.column, node.writes):
            if column.name in RESERVED and is_reported(graph, column.name):
                help = f"give the column another name, such as `row_{column.name}`"
                diagnostics.append(
                    Diagnostic("bad-value", f"`{column.name}` is the name of a metric of every run", column.span, help)
                )
    return diagnostics
