"""sequences: which columns of tokens a worker state with weights computes on.

Invariant: of each row that it works on a node makes one sequence for each column that it scores: the context, then that
column; where it scores none, the context alone. What a generation writes stands where another node has what it scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .attributes import GenerateAttributes
from .graph import Expr, Graph, Node, Worker

# Tokens of a text that nothing is known of.
TEXT_TOKENS = 1024


@dataclass(frozen=True)
class Sequences:
    """`context` in the order of the reads, then one of `scored`."""

    context: tuple[str, ...]
    scored: tuple[str, ...]

    @property
    def count(self) -> int:
        """Sequences of a row."""
        return max(1, len(self.scored))


def sequences(graph: Graph, node: Node) -> Sequences:
    """Of a node with weights. What is scored: of an infer the columns whose length it writes; of an update those whose
    length a column that it reads has and those whose scores a term takes, else what was generated, else its last column
    of tokens."""
    tokens = [c for c in node.reads if _is_read(graph, node, c)]
    if node.verb == "generate":
        return Sequences(tuple(tokens), tuple(c for c in node.writes if is_tokens(graph, c)))
    beside = node.reads if node.verb == "update" else node.writes
    scored = {*node.scores, *(d.like for c in beside for d in graph.column(c).dims)} & {*tokens}
    if node.verb == "update" and not scored:
        generated = {c for n in graph.verb("generate") for c in n.writes}
        scored = generated & {*tokens} or {*tokens[-1:]}
    return Sequences(tuple(c for c in tokens if c not in scored), tuple(c for c in tokens if c in scored))


def scores_texts(graph: Graph, node: Node) -> bool:
    """Whether a number of a token is the score of the text that ends with it, as a reward model's is: the last one is
    that of the row. Else it is of the state before the token: a policy's prediction of it, a value worker's value."""
    return graph.worker(node.worker).kind == "reward_model"


def is_tokens(graph: Graph, column: str) -> bool:
    """Whether a column holds tokens, of a length of its own."""
    found = graph.column(column)
    return found.element in ("i32", "i64") and len(found.dims) == 1 and not found.dims[0].like


def weighs(graph: Graph, node: Node) -> dict[str, int]:
    """The columns by whose lengths a node's rows are as long as they are, and how often each counts: the tokens that it
    computes on; of a function those that it reads, or where it reads none all that it does."""
    if graph.worker(node.worker).kind != "function":
        found = sequences(graph, node)
        scored = found.scored if node.verb != "generate" else ()  # are not there yet
        context = found.context or (() if scored else node.reads)  # an agent or an environment may be all who reads
        return dict.fromkeys(context, max(1, len(scored))) | dict.fromkeys(scored, 1)
    return dict.fromkeys([c for c in node.reads if is_tokens(graph, c)] or node.reads, 1)


def of_response(graph: Graph, node: Node, element: str) -> str:
    """The first column of an element that a generation writes of each token of its response: its log-probabilities, its
    mask; "" where it writes none."""
    responses = [c for c in node.writes if is_tokens(graph, c)]
    columns = (c for c in map(graph.column, node.writes) if c.element == element)
    return next((c.name for c in columns if [d.like for d in c.dims] == responses[:1]), "")


def temperature(graph: Graph, column: str) -> Expr:
    """What the tokens of a column were drawn at: a number, or the column or state that holds each row's; 1 where they
    were not drawn."""
    drawn = (GenerateAttributes.of(n).temperature for n in graph.writers.get(column, ()) if n.verb == "generate")
    return next(drawn, GenerateAttributes.temperature)


def tempered(graph: Graph, node: Node) -> tuple[Expr, ...]:
    """The columns and states that say at which temperatures a node draws, or a policy scores what was drawn."""
    if node.verb == "generate":
        found = [GenerateAttributes.of(node).temperature]
    elif node.verb in ("infer", "update") and graph.worker(node.worker).kind == "policy":
        found = [temperature(graph, c) for c in sequences(graph, node).scored]
    else:
        found = []
    return tuple(e for e in found if e.kind in ("column", "state"))


def as_drawn(state: str) -> str:
    """The name of a state's value as the rows of an iteration were drawn by it, which may be older than the one that
    the iteration before left."""
    return f"{state}/drawn"


def heat(stated: Expr) -> str:
    """The name of the values of a temperature that a column or a state holds."""
    return as_drawn(str(stated.value)) if stated.kind == "state" else str(stated.value)


def heating(graph: Graph, node: Node) -> tuple[str, ...]:
    """The states that a node takes temperatures from, as its rows were drawn."""
    return tuple(dict.fromkeys(str(e.value) for e in tempered(graph, node) if e.kind == "state"))


def latest(graph: Graph, node: Node) -> tuple[str, ...]:
    """The states of which a node reads what the iteration before left. Models before the update read none but
    temperatures, and the source none but for its weights: these draw rows, which may be done ahead."""
    return () if node.verb in ("source", "generate", "infer") else node.states


def whole(graph: Graph, node: Node) -> bool:
    """Whether what a node computes on begins with nothing, since it is the conversation of an agent or an environment,
    which has what stands before the policy's first word in it."""
    read = sequences(graph, node)
    partnered = [n for n in graph.verb("generate") if GenerateAttributes.of(n).partner is not None]
    spoken = {c for n in partnered for c in sequences(graph, n).scored if not sequences(graph, n).context}
    return not read.context and bool(read.scored) and {*read.scored} <= spoken


def conversations(graph: Graph, column: str) -> int:
    """How many conversations a response may hold, each of which is a sequence of its own."""
    return max(
        (GenerateAttributes.of(n).conversations for n in graph.writers.get(column, ()) if n.verb == "generate"),
        default=1,
    )


def beginnings(graph: Graph, node: Node) -> dict[str, str]:
    """The columns that a node scores and that may hold several conversations, each with the column that only the dock
    knows: at which tokens these begin."""
    found = (c for c in sequences(graph, node).scored if is_tokens(graph, c) and conversations(graph, c) > 1)
    return {column: f"{column}.begins" for column in found}


def speaker(graph: Graph) -> Worker | None:
    """The worker whose tokenizer the source's tokens are of: a policy, else another with weights, and of these the
    first that is trained, else the first."""
    trained = {n.worker for n in graph.verb("update")}
    found = [w for w in graph.workers if w.kind != "function"]
    return min(found, key=lambda w: (w.kind != "policy", w.name not in trained), default=None)


def models(graph: Graph) -> list[Node]:
    """The nodes with weights."""
    kinds = {w.name: w.kind for w in graph.workers}
    return [n for n in graph.nodes if kinds.get(n.worker, "function") != "function"]


def responses(graph: Graph) -> dict[str, tuple[str, ...]]:
    """The source's columns that some node scores and none has before what it scores: a response that was not generated.
    Each with the source's columns that stand before it."""
    found = [sequences(graph, n) for n in models(graph)]
    given = {c for n in graph.verb("source") for c in n.writes}
    before = {c for s in found for c in s.context}
    return {c: tuple(x for x in s.context if x in given) for s in found for c in s.scored if c in given - before}


def preceding(graph: Graph) -> dict[str, tuple[str, ...]]:
    """The columns that no node reads first, each with the columns before it in a sequence."""
    found: dict[str, tuple[str, ...]] = {}
    first = set[str]()
    for read in (sequences(graph, n) for n in models(graph)):
        first |= {*read.context[:1]} or {*read.scored}
        found |= {c: read.context[:i] for i, c in enumerate(read.context)} | dict.fromkeys(read.scored, read.context)
    return {c: before for c, before in found.items() if c not in first}


def token_columns(graph: Graph) -> list[str]:
    """All columns of tokens, and the texts that models read."""
    read = {c for n in models(graph) for c in sequences(graph, n).context}
    return [c.name for c in graph.columns if is_tokens(graph, c.name) or c.name in read]


def _is_read(graph: Graph, node: Node, column: str) -> bool:
    """Whether a node's model reads a column: tokens, or text that is tokenised; environments and agents read their own
    text."""
    return is_tokens(graph, column) or (
        graph.column(column).element == "text" and GenerateAttributes.of(node).partner is None
    )


def bound(graph: Graph, column: str) -> int:
    """The most tokens of a column. Of a text that states none: as many as all that its writer reads, which is known of
    tokens and of text that states them, TEXT_TOKENS at least."""
    found = graph.column(column)
    if found.element != "text" or found.dims:
        return graph.bound(column)
    known = (
        c
        for c in map(graph.column, graph.writer(column).reads)
        if is_tokens(graph, c.name) or (c.element == "text" and c.dims)
    )
    return max(TEXT_TOKENS, sum(bound(graph, c.name) for c in known))


def reads_tempered(graph: Graph, node: Node) -> Node:
    """The node, which reads the temperatures that what it scores was drawn at, too: what it computes depends on
    them."""
    if node.verb == "source":
        return node
    reads = dict.fromkeys((*node.reads, *(str(e.value) for e in tempered(graph, node) if e.kind == "column")))
    states = dict.fromkeys((*node.states, *(str(e.value) for e in tempered(graph, node) if e.kind == "state")))
    return replace(node, reads=tuple(reads), states=tuple(states))
