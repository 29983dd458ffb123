"""Wrong numbers: values that are not finite, tokens that a model does not know, empty responses, and log-probabilities
of the trainer that are not those of the generator.

Invariant: a wrong number is told once, by the process that makes it, in the iteration in which it does. Under `on_nan =
stop` telling it ends the run; under `skip` it is counted and said, and goes on as it is, so that the update leaves out
the step that it is in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...cost.holdings import dtype
from ...ir.attributes import GenerateAttributes, place_of_call
from ...ir.graph import Graph, Node
from ...ir.instruction import nodes_run
from ...ir.plan import Plan
from ...ir.sequences import is_tokens, models, of_response, sequences, tempered
from ..process.task_report import Report, RunError
from .columns import Array, ColumnData

if TYPE_CHECKING:
    from ..process.task import Task

# The most that the log-probabilities of trainer and generator may differ, in nats, mean over the tokens of a batch, at
# temperature 1. Both sum the same products in another order. A float32 logit near 32 is exact to 2e-6, and layers add a
# few such errors: below 1e-5 is usual, so 1e-3 is no rounding. A bfloat16 logit near 32 is a multiple of 1/8, off by
# 1/32 on average at the last rounding alone: 0.1 is three times that. Weights that are not the trainer's are off by
# more than either, a training step that was missed aside.
TOLERANCE = {"f32": 1e-3, "bf16": 0.1}


@dataclass(frozen=True)
class Comparison:
    """Where the log-probabilities of a response's tokens are compared with those that they were drawn with.

    The node `node` computes those of `response` with the generator's weights, and reads beside them `column`, those
    as drawn. They may differ by `tolerance` nats on average, where the weights are of the same version: `edge` is the
    resharding edge that the generator has them by. `turns`: the response is of several turns, and what the environment
    wrote in it was not drawn: `column` holds NaN there.
    """

    node: str
    column: str
    response: str
    tolerance: float
    turns: bool = False
    edge: str = ""

    def behind(self, task: Task) -> int:
        """How many versions the weights that drew a task's rows are behind those that it trains."""
        fetch = task.fetches.get(self.edge)
        return task.number - fetch.version if fetch and task.trains else 0


@dataclass(frozen=True)
class SampledLogProbs:
    """The log-probabilities of some rows' tokens as they were drawn, and the temperature that each row was drawn at."""

    logp: ColumnData
    heat: Array


def drawn(graph: Graph, node: Node) -> tuple[str, str]:
    """What a generation makes: the response's column, and that of its log-probabilities as sampled: the declared one,
    else one that only the dock knows."""
    response = next(c for c in node.writes if graph.column(c).element == "i32" and is_tokens(graph, c))
    return response, of_response(graph, node, "f32") or f"{response}.logp"


def comparison(plan: Plan) -> Comparison | None:
    """Who compares: the first node after the generation that computes the response's log-probabilities with the
    generator's weights."""
    graph = plan.graph
    # The nodes of one worker are in one pool, so the order of the pools does not matter.
    order = [graph.node(name) for name in nodes_run(plan.schedule)]
    for node in graph.verb("generate"):
        if node.cuts:  # whose responses may be of several versions
            continue
        response, column = drawn(graph, node)
        edges = [e for e in graph.reshards() if e.dst == node.name]
        worker = graph.node(edges[0].src).worker if edges else node.worker
        fed = (*sequences(graph, node).context, response)
        for other in order:
            read = sequences(graph, other)
            gives = other.verb == "update" or any(
                [d.like for d in graph.column(c).dims] == [response] for c in other.writes
            )
            if other.worker == worker and other.verb != "generate" and gives and (*read.context, *read.scored) == fed:
                kinds = {dtype(plan, node.name), dtype(plan, other.name)}
                return Comparison(
                    other.name,
                    column,
                    response,
                    max(TOLERANCE[k] for k in kinds),
                    GenerateAttributes.of(node).partner is not None,
                    f"{edges[0].src} => {node.name}" if edges else "",
                )
    return None


def vocabulary(plan: Plan, column: str) -> int:
    """How many tokens all models know that read a column; 0 where none does."""
    readers = [n for n in plan.graph.nodes if column in n.reads and n.verb in ("generate", "infer", "update")]
    tokens = plan.graph.column(column).element == "i32"
    return (
        min((plan.model(n.name).vocabulary for n in readers if plan.graph.worker(n.worker).model), default=0)
        if tokens
        else 0
    )


class NumericsWatch:
    """Looks at what a node makes. Masks have one entry a row: True where the row holds a wrong number."""

    def __init__(self, plan: Plan) -> None:
        self.graph = plan.graph
        self.stops = plan.deploy.run.on_nan == "stop"
        self.comparison = comparison(plan)

    def tell(self, node: Node, task: Task, report: Report, reason: str, rows: Array, what: str) -> None:
        """Ends the run, or counts the rows under `reason`, if there is one, and has it said."""
        message = _message(node, task, rows, what)
        if self.stops:
            raise RunError(message)
        if reason:
            report.count(f"wrong/{reason}", len(rows), 0)
        report.remarks.append(message)

    def begun(self, node: Node, task: Task, rows: Array, lengths: Array) -> None:
        """Ends the run where what a model reads before what it predicts has no token, which no `on_nan` helps."""
        if len(bare := rows[lengths == 0]):
            raise RunError(
                _message(
                    node, task, bare, "what its model reads first holds no token, from which nothing can be predicted"
                )
            )

    def temperature(self, node: Node, task: Task, rows: Array, name: str, values: Array) -> None:
        """Ends the run where a response would be drawn at no temperature, or at 0 where a policy scores it, which no
        `on_nan` helps."""
        response, _ = drawn(self.graph, node)
        scores = [
            n.name for n in models(self.graph) if n.verb != "generate" and response in sequences(self.graph, n).scored
        ]
        scores = [name for name in scores if tempered(self.graph, self.graph.node(name))]
        bad = ~np.isfinite(values) | (values < 0) | ((values == 0) & bool(scores))
        if bad.any():
            wanted = (
                f"a number above 0 belongs, since `{scores[0]}` scores `{response}`"
                if scores
                else "a number of 0 or more belongs"
            )
            what = f"the temperature `{name}` is {values[bad][0]:g}, where {wanted}"
            raise RunError(_message(node, task, rows[bad], what))

    def finite(
        self,
        node: Node,
        task: Task,
        report: Report,
        reason: str,
        what: str,
        rows: Array,
        column: ColumnData,
        known: Array | None = None,
    ) -> Array:
        """Tells the rows with a value (`{}` in `what`) that is not finite, those aside that are `known` to be wrong;
        all of them."""
        bad = not_finite(column)
        known = np.zeros(len(bad), bool) if known is None else known
        if len(new := np.flatnonzero(bad & ~known)):
            values = column.take(new).values
            self.tell(node, task, report, reason, rows[new], what.format(values[~np.isfinite(values)][0]))
        return bad | known

    def results(
        self,
        node: Node,
        task: Task,
        report: Report,
        name: str,
        rows: Array,
        column: ColumnData,
        known: Array | None = None,
    ) -> None:
        """Looks at what was returned for a column. Of one that a row may have no value of, those are counted."""
        if name not in self.graph.optional:
            self.finite(node, task, report, "result", f"it returned {{}} for `{name}`", rows, column, known)
        elif absent := int(not_finite(column).sum()):
            report.count(f"without/{name}", absent, 0)

    def unscored(
        self, node: Node, task: Task, report: Report, rows: Array, lengths: dict[str, Array], known: Array
    ) -> Array:
        """Reports rows whose score a term takes and that have none, and adds them to the `known` ones."""
        for column in node.scores:
            empty = lengths[column] == 0
            if (empty & ~known).any():
                what = f"`{column}` holds no token, so it has no score"
                self.tell(node, task, report, "empty", rows[empty & ~known], what)
            known = known | empty
        return known

    def logp(
        self,
        node: Node,
        task: Task,
        report: Report,
        rows: Array,
        logp: ColumnData,
        as_drawn: SampledLogProbs | None,
        known: Array,
    ) -> Array:
        """Looks at log-probabilities that a trainer computed, beside those as drawn in training (an evaluation has its
        own temperature)."""
        known = self.finite(node, task, report, "logp", "a token's log-probability is {}", rows, logp, known)
        return (
            known
            if as_drawn is None or task.name != "train"
            else self.drift(node, task, report, rows, logp, as_drawn, known)
        )

    def response(
        self, node: Node, task: Task, report: Report, rows: Array, tokens: ColumnData, logp: ColumnData, vocabulary: int
    ) -> None:
        """Looks at what was generated, of several turns at what the policy wrote."""
        strange = outside(tokens, vocabulary)
        if len(new := np.flatnonzero(strange)):
            values = tokens.take(new).values
            token = values[(values < 0) | (values >= vocabulary)][0]
            self.tell(
                node,
                task,
                report,
                "token",
                rows[new],
                f"it drew the token {token}, outside the vocabulary of {vocabulary}",
            )
        if len(new := np.flatnonzero(tokens.lengths == 0)):
            self.tell(node, task, report, "empty", rows[new], "the response is empty")
        self.finite(node, task, report, "logp", "it drew a token with the log-probability {}", rows, logp, strange)

    def drift(
        self,
        node: Node,
        task: Task,
        report: Report,
        rows: Array,
        logp: ColumnData,
        found: SampledLogProbs,
        known: Array,
    ) -> Array:
        """Compares log-probabilities with those that the tokens were drawn with; the rows that cannot be compared or
        are too far off. Of older weights they may be as far off as the policy has gone since: that is only counted."""
        assert self.comparison is not None
        behind = self.comparison.behind(task)
        as_drawn = found.logp
        written = ~np.isnan(as_drawn.values) if self.comparison.turns else np.ones(len(as_drawn.values), bool)
        known = known | _any(as_drawn, written & ~np.isfinite(as_drawn.values))
        row = np.repeat(np.arange(len(rows)), logp.lengths)
        compared = written & ~known[row]
        off = np.abs(logp.values - as_drawn.values)[compared].astype(np.float64)
        row = row[compared]
        if not len(off):
            return known
        of = f"/{behind}" if behind else ""
        report.count(f"logp_drift{of}", float(off.sum()), len(off))
        report.peak(f"logp_drift_max{of}", float(off.max()))
        if behind:
            return known
        tolerance = self.comparison.tolerance / np.minimum(
            1.0, found.heat
        )  # temperatures below 1 stretch the errors of logits
        if off.mean() <= tolerance[row].mean():
            return known
        by_row = np.bincount(row, off, len(rows)) / np.maximum(np.bincount(row, minlength=len(rows)), 1)
        far = np.flatnonzero(by_row > tolerance)
        far = far[np.argsort(-by_row[far], kind="stable")]
        writer = self.graph.writer(self.comparison.response)
        what = (
            f"the log-probabilities of `{self.comparison.response}` are not those that `{writer.name}` "
            f"({writer.span.place}) drew it "
            f"with: off by {by_row[far[0]]:.3g} nats on row {rows[far[0]]}, by {off.mean():.3g} on average, where "
            "rounding makes at most "
            f"{tolerance[far[0]]:.3g}"
        )
        self.tell(node, task, report, "drift", rows[far], what)
        known[far] = True
        return known


def _message(node: Node, task: Task, rows: Array, what: str) -> str:
    when = (
        f"iteration {task.number}"
        if task.name == "train"
        else f"the evaluation of {task.name} after {task.number} iterations"
    )
    place = place_of_call(node) if node.stated("call") else node.span.place
    return f"`{node.name}` ({place}) on {listed(rows)} of {when}: {what}"


def not_finite(column: ColumnData) -> Array:
    return _any(column, ~np.isfinite(column.values))


def outside(tokens: ColumnData, vocabulary: int) -> Array:
    """The rows with a token that an embedding of `vocabulary` rows does not have."""
    return _any(tokens, (tokens.values < 0) | (tokens.values >= vocabulary))


def known_tokens(columns: list[ColumnData], size: int) -> tuple[list[ColumnData], Array]:
    """The columns as a model of `size` tokens can be fed with them, and which rows had a token that it does not know.

    In those rows the token is put within bounds. Fed as it is, it would end the process, or pass for nothing under
    tensor parallelism.
    """
    strange = np.any([outside(c, size) for c in columns], axis=0)
    return [replace(c, values=c.values.clip(0, size - 1)) for c in columns] if strange.any() else columns, strange


def _any(column: ColumnData, bad: Array) -> Array:
    """The rows of which one element is bad."""
    elements = bad.any(axis=tuple(range(1, bad.ndim)))
    rows: Array = np.bincount(np.repeat(np.arange(len(column)), column.lengths)[elements], minlength=len(column)) > 0
    return rows


def listed(rows: Array) -> str:
    """Row numbers for a sentence."""
    first = ", ".join(map(str, rows[:5])) or "none"
    return (
        f"row {first}" if len(rows) == 1 else f"rows {first}" if len(rows) <= 5 else f"{len(rows)} rows ({first}, ...)"
    )
