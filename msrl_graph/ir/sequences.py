"""The token columns that a node with weights computes on.

Invariant: a node makes one sequence per row for each column that it scores: the context, then that column. If it scores
none, the sequence is the context alone. The columns that a generation writes count as the columns that it scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .attributes import GenerateAttributes
from .graph import Expr, Graph, Node, Worker

# Tokens of a text of unknown length.
TEXT_TOKENS = 1024


@dataclass(frozen=True)
class Sequences:
    """The columns of a node's sequences: all of `context`, then one of `scored`.

    `context` is in the order of the reads.
    """

    context: tuple[str, ...]
    scored: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of sequences per row."""
        return max(1, len(self.scored))


def sequences(graph: Graph, node: Node) -> Sequences:
    """Return the sequences of a node with weights.

    An infer scores the columns whose length its outputs have. An update scores the columns whose length a column that
    it reads has, and those whose scores a term uses; otherwise the generated columns, otherwise its last column of
    tokens.
    """
    tokens = [column for column in node.reads if _is_read(graph, node, column)]
    if node.verb == "generate":
        return Sequences(tuple(tokens), tuple(column for column in node.writes if is_tokens(graph, column)))
    columns = node.reads if node.verb == "update" else node.writes
    scored = {*node.scores, *(dim.like for column in columns for dim in graph.column(column).dims)} & {*tokens}
    if node.verb == "update" and not scored:
        generated = {column for generation in graph.verb("generate") for column in generation.writes}
        scored = generated & {*tokens} or {*tokens[-1:]}
    return Sequences(
        tuple(column for column in tokens if column not in scored),
        tuple(column for column in tokens if column in scored),
    )


def scores_texts(graph: Graph, node: Node) -> bool:
    """Return whether the number of a token is the score of the text up to it.

    A reward model gives such scores, and the last one is that of the row. Otherwise the number belongs to the state
    before the token: the prediction of a policy, the value of a value worker.
    """
    return graph.worker(node.worker).kind == "reward_model"


def is_tokens(graph: Graph, column: str) -> bool:
    """Return whether a column holds tokens and has a length of its own."""
    kind = graph.column(column)
    return kind.element in ("i32", "i64") and len(kind.dims) == 1 and not kind.dims[0].like


def length_columns(graph: Graph, node: Node) -> dict[str, int]:
    """Return the columns that determine the length of a node's rows.

    Each has the number of times that it counts. These are the tokens that the node computes on. For a function they are
    the token columns that it reads, or all columns that it reads if there are none.
    """
    if graph.worker(node.worker).kind != "function":
        read = sequences(graph, node)
        scored = read.scored if node.verb != "generate" else ()  # they do not exist yet
        context = read.context or (() if scored else node.reads)  # only an agent or an environment may read
        return dict.fromkeys(context, max(1, len(scored))) | dict.fromkeys(scored, 1)
    return dict.fromkeys([column for column in node.reads if is_tokens(graph, column)] or node.reads, 1)


def find_response_column(graph: Graph, node: Node, element: str) -> str:
    """Return the column of an element type that a generation writes for each token.

    It is the column of log-probabilities (f32), of the mask (bool) or of versions (i32); "" if there is none.
    """
    responses = [column for column in node.writes if is_tokens(graph, column)]
    columns = (column for column in map(graph.column, node.writes) if column.element == element)
    return next((column.name for column in columns if [dim.like for dim in column.dims] == responses[:1]), "")


def temperature(graph: Graph, column: str) -> Expr:
    """Return the temperature at which the tokens of a column were sampled.

    It is a number, or the column or state that holds the temperature of each row; 1 if they were not sampled.
    """
    drawn = (
        GenerateAttributes.of(writer).temperature
        for writer in graph.writers.get(column, ())
        if writer.verb == "generate"
    )
    return next(drawn, GenerateAttributes.temperature)


def temperature_exprs(graph: Graph, node: Node) -> tuple[Expr, ...]:
    """Return the columns and states with the temperatures of a node's samples.

    The node samples with them, or scores what was sampled with them.
    """
    if node.verb == "generate":
        exprs = [GenerateAttributes.of(node).temperature]
    elif node.verb in ("infer", "update") and graph.worker(node.worker).kind == "policy":
        exprs = [temperature(graph, name) for name in sequences(graph, node).scored]
    else:
        exprs = []
    return tuple(expr for expr in exprs if expr.kind in ("column", "state"))


def drawn_name(state: str) -> str:
    """Return the name of the value of a state with which rows were drawn.

    It may be older than the value that the previous iteration left.
    """
    return f"{state}/drawn"


def temperature_name(stated: Expr) -> str:
    """Return the name of the values of a temperature that a column or a state holds."""
    return drawn_name(str(stated.value)) if stated.kind == "state" else str(stated.value)


def temperature_states(graph: Graph, node: Node) -> tuple[str, ...]:
    """Return the states from which a node takes the temperatures of its rows."""
    return tuple(dict.fromkeys(str(expr.value) for expr in temperature_exprs(graph, node) if expr.kind == "state"))


def previous_states(graph: Graph, node: Node) -> tuple[str, ...]:
    """Return the states that a node reads as the previous iteration left them.

    Models before the update read only temperatures from states, and the source only weights. Both draw rows, which may
    happen ahead of the updates.
    """
    return () if node.verb in ("source", "generate", "infer") else node.states


def is_whole_conversation(graph: Graph, node: Node) -> bool:
    """Return whether a node computes on conversations without a context.

    The conversation of an agent or an environment contains the text before the policy's first token.
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
    """Return how many conversations, each a sequence, a response may hold."""
    return max(
        (
            GenerateAttributes.of(writer).conversations
            for writer in graph.writers.get(column, ())
            if writer.verb == "generate"
        ),
        default=1,
    )


def begins_columns(graph: Graph, node: Node) -> dict[str, str]:
    """Return scored columns with several conversations, and their begins columns.

    That column, known only to the dock, has the tokens at which the conversations begin.
    """
    columns = (
        name for name in sequences(graph, node).scored if is_tokens(graph, name) and conversations(graph, name) > 1
    )
    return {column: f"{column}.begins" for column in columns}


def source_worker(graph: Graph) -> Worker | None:
    """Return the worker whose tokenizer made the tokens of the source.

    It is a policy, or else another worker with weights; of these the first trained one, or else the first.
    """
    trained = {node.worker for node in graph.verb("update")}
    candidates = [worker for worker in graph.workers if worker.kind != "function"]
    return min(candidates, key=lambda worker: (worker.kind != "policy", worker.name not in trained), default=None)


def nodes_with_weights(graph: Graph) -> list[Node]:
    """Return the nodes with weights."""
    kinds = {worker.name: worker.kind for worker in graph.workers}
    return [node for node in graph.nodes if kinds.get(node.worker, "function") != "function"]


def responses(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the responses of the source, with the columns before each.

    These are columns of the source that some node scores and no node has as context.
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
    """Return columns that are never first in a sequence, with the columns before each."""
    contexts: dict[str, tuple[str, ...]] = {}
    first = set[str]()
    for read in (sequences(graph, node) for node in nodes_with_weights(graph)):
        first |= {*read.context[:1]} or {*read.scored}
        contexts |= {column: read.context[:index] for index, column in enumerate(read.context)} | dict.fromkeys(
            read.scored, read.context
        )
    return {column: before for column, before in contexts.items() if column not in first}


def token_columns(graph: Graph) -> list[str]:
    """Return all columns of tokens, and the texts that models read."""
    read = {column for node in nodes_with_weights(graph) for column in sequences(graph, node).context}
    return [column.name for column in graph.columns if is_tokens(graph, column.name) or column.name in read]


def _is_read(graph: Graph, node: Node, column: str) -> bool:
    """Return whether a node's model reads a column: tokens, or text that is tokenized.

    Environments and agents read their text themselves.
    """
    return is_tokens(graph, column) or (
        graph.column(column).element == "text" and GenerateAttributes.of(node).partner is None
    )


def bound(graph: Graph, column: str) -> int:
    """Return the most tokens of a column.

    A text without a stated bound has as many tokens as all columns together that its writer reads and whose bound is
    known, at least TEXT_TOKENS.
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
    """Add the temperatures of its samples to the reads of a node.

    Its results depend on them.
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
