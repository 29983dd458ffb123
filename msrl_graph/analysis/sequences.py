"""The token columns that a node with weights computes on.

A node scores a column if it computes a number for each token of the column, such as a log-probability or a value. The
other token columns that the node reads are context.

Invariant: for each row and each column that a node scores, the node computes on one sequence: the context, followed by
the scored column. A node that scores no column computes on one sequence per row, the context alone. For a generation,
the columns that it writes count as scored columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..ir.attributes import GenerateAttributes
from ..ir.graph import Column, Expr, Graph, Node, Worker

# Tokens of a text of unknown length.
TEXT_TOKENS = 1024


@dataclass(frozen=True)
class Sequences:
    """The columns of a node's sequences.

    Each sequence has all columns of `context`, in the order in which the node reads them, followed by one column of
    `scored`.
    """

    context: tuple[str, ...]
    scored: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of sequences per row."""
        return max(1, len(self.scored))


def sequences(graph: Graph, node: Node) -> Sequences:
    """Return the sequences of a node with weights.

    The columns that a node scores depend on its verb:

    - A generation scores the columns of tokens that it writes.
    - An infer scores a column of tokens if it writes a column of the same length. For example, it scores `response` if
      it writes a column of the type `f32[response]`.
    - An update scores `response` if it reads a column of a type such as `f32[response]`, or if a loss term uses the
      score of `response`. If these rules give no column, an update scores the generated columns that it reads. If it
      reads no generated column, it scores the last column of tokens that it reads.
    """
    tokens = [column for column in node.reads if _is_read(graph, node, column)]
    if node.verb == "generate":
        return Sequences(tuple(tokens), tuple(column for column in node.writes if is_tokens(graph, column)))
    columns = [
        column
        for column in map(graph.column, node.reads if node.verb == "update" else node.writes)
        if not is_routing(column)
    ]
    scored = {*node.scores, *(dim.like for column in columns for dim in column.dims)} & {*tokens}
    if node.verb == "update" and not scored:
        generated = {column for generation in graph.verb("generate") for column in generation.writes}
        scored = generated & {*tokens} or {*tokens[-1:]}
    return Sequences(
        tuple(column for column in tokens if column not in scored),
        tuple(column for column in tokens if column in scored),
    )


def scores_texts(graph: Graph, node: Node) -> bool:
    """Return whether a node scores, at each token, the text that ends with the token.

    The result is True for a reward model; the score at the last token is the score of the row. For other workers, the
    number of a token is computed from the hidden state before the token. This number is the prediction of a policy, or
    the value of a value worker.
    """
    return graph.worker(node.worker).kind == "reward_model"


def is_tokens(graph: Graph, column: str) -> bool:
    """Return whether a column holds tokens, and no other column determines its length."""
    kind = graph.column(column)
    return kind.element in ("i32", "i64") and len(kind.dims) == 1 and not kind.dims[0].like


def is_routing(column: Column) -> bool:
    """Return whether a column holds routes of tokens.

    A route has the experts that the routers chose, [layers with experts, experts per token]. A token's value is the
    route of the position before the token, whose state predicts the token. So the routing columns of all token columns
    of a sequence have the routes of all positions that a policy computes. The first token of a sequence has no route.
    """
    return column.element == "i16" and len(column.dims) == 3 and bool(column.dims[0].like)


def routing_columns(graph: Graph, columns: Iterable[str]) -> dict[str, str]:
    """Return the routing columns among `columns`, by their column of tokens."""
    return {column.dims[0].like: column.name for column in map(graph.column, columns) if is_routing(column)}


def length_columns(graph: Graph, node: Node) -> dict[str, int]:
    """Return the columns whose lengths add up to the length of a node's row.

    Each column is mapped to the number of times that its length counts. For a node with weights, the columns are the
    token columns that the node computes on; a context column counts once for each scored column. The responses that a
    generation writes are left out, since they do not exist before the generation. For a function, the columns are the
    token columns that the function reads, or all columns that the function reads if none has tokens.
    """
    if graph.worker(node.worker).kind != "function":
        read = sequences(graph, node)
        scored = read.scored if node.verb != "generate" else ()  # they do not exist yet
        context = read.context or (() if scored else node.reads)  # only an agent or an environment may read
        return dict.fromkeys(context, max(1, len(scored))) | dict.fromkeys(scored, 1)
    return dict.fromkeys([column for column in node.reads if is_tokens(graph, column)] or node.reads, 1)


def find_response_column(graph: Graph, node: Node, element: str) -> str:
    """Return a generation's output column that has one value per response token.

    `element` is the column's element type, which decides its content: log-probabilities (f32), the mask (bool) or
    versions (i32). The result is "" if the generation writes no such column.
    """
    responses = [column for column in node.writes if is_tokens(graph, column)]
    columns = (column for column in map(graph.column, node.writes) if column.element == element)
    return next((column.name for column in columns if [dim.like for dim in column.dims] == responses[:1]), "")


def temperature(graph: Graph, column: str) -> Expr:
    """Return the temperature at which the tokens of a column were sampled.

    The temperature is a number, or a column or state that holds the temperature of each row. If the tokens were not
    sampled, the temperature is 1.
    """
    drawn = (
        GenerateAttributes.of(writer).temperature
        for writer in graph.writers.get(column, ())
        if writer.verb == "generate"
    )
    return next(drawn, GenerateAttributes.temperature)


def temperature_exprs(graph: Graph, node: Node) -> tuple[Expr, ...]:
    """Return the columns and states that hold the temperatures for a node.

    A generation samples at these temperatures. Other nodes of a policy score tokens that were sampled at these
    temperatures.
    """
    if node.verb == "generate":
        exprs = [GenerateAttributes.of(node).temperature]
    elif node.verb in ("infer", "update") and graph.worker(node.worker).kind == "policy":
        exprs = [temperature(graph, name) for name in sequences(graph, node).scored]
    else:
        exprs = []
    return tuple(expr for expr in exprs if expr.kind in ("column", "state"))


def drawn_name(state: str) -> str:
    """Return the name of the batch's column that holds the values of a state.

    The column holds the value that the state had when each row was drawn. This value may be older than the value that
    the previous iteration left.
    """
    return f"{state}/drawn"


def temperature_name(stated: Expr) -> str:
    """Return the name of the batch's column that holds the values of a temperature.

    If `stated` is a column, the result is the name of this column. If `stated` is a state, the result is the name that
    `drawn_name` returns for the state.
    """
    return drawn_name(str(stated.value)) if stated.kind == "state" else str(stated.value)


def temperature_states(graph: Graph, node: Node) -> tuple[str, ...]:
    """Return the states that hold the temperatures of a node's rows."""
    return tuple(dict.fromkeys(str(expr.value) for expr in temperature_exprs(graph, node) if expr.kind == "state"))


def previous_states(graph: Graph, node: Node) -> tuple[str, ...]:
    """Return the states that a node reads with the value from the previous iteration.

    The result is empty for the source, generations and infers. The source reads states only as sampling weights, and
    generations and infers read states only as temperatures. Sampling weights and temperatures affect how rows are
    drawn. Rows can be drawn ahead of the updates, and the states then have an older value.
    """
    return () if node.verb in ("source", "generate", "infer") else node.states


def is_whole_conversation(graph: Graph, node: Node) -> bool:
    """Return whether a node scores only whole conversations and has no context.

    An agent or an environment can write responses that also contain the text before the policy's first token. Such a
    response is a whole conversation.
    """
    read = sequences(graph, node)
    partnered = [
        generation for generation in graph.verb("generate") if GenerateAttributes.of(generation).partner is not None
    ]
    spoken = {
        column
        for generation in partnered
        for column in sequences(graph, generation).scored
        if not sequences(graph, generation).context
    }
    return not read.context and bool(read.scored) and {*read.scored} <= spoken


def conversations(graph: Graph, column: str) -> int:
    """Return the maximum number of conversations in one value of a response column.

    Each conversation is a separate sequence.
    """
    return max(
        (
            GenerateAttributes.of(writer).conversations
            for writer in graph.writers.get(column, ())
            if writer.verb == "generate"
        ),
        default=1,
    )


def begins_columns(graph: Graph, node: Node) -> dict[str, str]:
    """Return the begins column of each scored column that has several conversations.

    The begins column marks the tokens at which conversations begin. Only the dock has this column; the program does not
    declare it.
    """
    columns = (
        name for name in sequences(graph, node).scored if is_tokens(graph, name) and conversations(graph, name) > 1
    )
    return {column: f"{column}.begins" for column in columns}


def source_worker(graph: Graph) -> Worker | None:
    """Return the worker whose tokenizer makes the tokens of the source.

    The worker is a policy. If the graph has no policy, it is any other worker with weights. Of several possible
    workers, the first trained worker is returned, or the first worker if none is trained. The result is None if no
    worker has weights.
    """
    trained = {node.worker for node in graph.verb("update")}
    candidates = [worker for worker in graph.workers if worker.kind != "function"]
    return min(candidates, key=lambda worker: (worker.kind != "policy", worker.name not in trained), default=None)


def nodes_with_weights(graph: Graph) -> list[Node]:
    """Return the nodes of all workers with weights."""
    kinds = {worker.name: worker.kind for worker in graph.workers}
    return [node for node in graph.nodes if kinds.get(node.worker, "function") != "function"]


def responses(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the source's columns that are responses, each with its context.

    A column of the source is a response if some node scores the column and no node has the column as context. The
    context of a response consists of the source's columns that precede the response in a sequence.
    """
    read = [sequences(graph, node) for node in nodes_with_weights(graph)]
    source_columns = {column for node in graph.verb("source") for column in node.writes}
    before = {column for sequence in read for column in sequence.context}
    return {
        column: tuple(name for name in sequence.context if name in source_columns)
        for sequence in read
        for column in sequence.scored
        if column in source_columns - before
    }


def columns_before(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return, for each column of a sequence, the columns that precede it.

    A column that is the first column of any sequence is left out.
    """
    contexts: dict[str, tuple[str, ...]] = {}
    first = set[str]()
    for read in (sequences(graph, node) for node in nodes_with_weights(graph)):
        first |= {*read.context[:1]} or {*read.scored}
        contexts |= {column: read.context[:index] for index, column in enumerate(read.context)} | dict.fromkeys(
            read.scored, read.context
        )
    return {column: before for column, before in contexts.items() if column not in first}


def token_columns(graph: Graph) -> list[str]:
    """Return all columns of tokens, and the columns of text that models read."""
    read = {column for node in nodes_with_weights(graph) for column in sequences(graph, node).context}
    return [column.name for column in graph.columns if is_tokens(graph, column.name) or column.name in read]


def prompt_columns(graph: Graph) -> frozenset[str]:
    """Return the columns of the source with which a model's sequence begins."""
    written = {column for node in graph.verb("source") for column in node.writes}
    read = {name for node in nodes_with_weights(graph) for name in sequences(graph, node).context[:1]}
    return frozenset((written & read) - columns_before(graph).keys())


def _is_read(graph: Graph, node: Node, column: str) -> bool:
    """Return whether a node's model reads a column: tokens, or text to be tokenized.

    A generation with an environment or agent does not read text with the model, since the environment or agent reads
    it.
    """
    return is_tokens(graph, column) or (
        graph.column(column).element == "text" and GenerateAttributes.of(node).partner is None
    )


def bound(graph: Graph, column: str) -> int:
    """Return the maximum number of tokens of a column in one row.

    If a text column has no stated maximum, the result is the sum of the maximums of the columns that the text's writer
    reads, but at least TEXT_TOKENS. Columns whose maximum is unknown are left out of the sum.
    """
    kind = graph.column(column)
    if kind.element != "text" or kind.dims:
        return graph.bound(column)
    known = (
        source
        for source in map(graph.column, graph.writer(column).reads)
        if is_tokens(graph, source.name) or (source.element == "text" and source.dims)
    )
    return max(TEXT_TOKENS, sum(bound(graph, source.name) for source in known))


def reads_tempered(graph: Graph, node: Node) -> Node:
    """Return a copy of a node, with the node's temperatures added to its inputs.

    The added inputs are the columns and states that `temperature_exprs` returns, since the results of the node depend
    on them.
    """
    if node.verb == "source":
        return node
    reads = dict.fromkeys(
        (*node.reads, *(str(expr.value) for expr in temperature_exprs(graph, node) if expr.kind == "column"))
    )
    states = dict.fromkeys(
        (*node.states, *(str(expr.value) for expr in temperature_exprs(graph, node) if expr.kind == "state"))
    )
    return replace(node, reads=tuple(reads), states=tuple(states))
