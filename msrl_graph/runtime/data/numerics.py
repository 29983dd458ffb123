"""Detection of wrong numbers in a run.

Wrong numbers are values that are not finite, tokens outside a model's vocabulary, and empty responses. A trainer's
log-probabilities are also wrong if they differ from the generator's log-probabilities.

Invariant: the process that produces a wrong number reports it once, in the same iteration. With `on_nan = stop` the
report ends the run. With `skip` the number is counted, reported and passed on unchanged, and the update skips the
optimizer step that contains the number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...analysis.sequences import find_response_column, is_tokens, nodes_with_weights, sequences, temperature_exprs
from ...cost.holdings import dtype
from ...ir.attributes import GenerateAttributes, place_of_call
from ...ir.graph import Graph, Node
from ...ir.instruction import nodes_run
from ...ir.plan import Plan
from ..process.task_report import Report, RunError
from .columns import Array, ColumnData

if TYPE_CHECKING:
    from ..process.task import Task

# The largest allowed difference between the log-probabilities of trainer and generator: in nats, mean over the tokens
# of a batch, at temperature 1. Both sum the same products in different orders. A float32 logit near 32 is exact to
# 2e-6, and layers add a few such errors: below 1e-5 is usual, so 1e-3 is not rounding. A bfloat16 logit near 32 is a
# multiple of 1/8, so the last rounding alone adds an error of 1/32 on average: 0.1 is three times that. Wrong weights
# cause a larger difference than both tolerances, unless the weights only lack one training step.
TOLERANCE = {"f32": 1e-3, "bf16": 0.1}


@dataclass(frozen=True)
class Comparison:
    """A check of log-probabilities against the log-probabilities at sampling.

    - `node`: the node that computes log-probabilities with the generator's weights, and also reads the
      log-probabilities at sampling.
    - `response`: the column whose log-probabilities are compared.
    - `column`: the column of the log-probabilities at sampling.
    - `tolerance`: the largest allowed difference in nats, as the mean over the tokens of a batch. It applies if node
      and generator use the same version of the weights.
    - `turns`: true if the response has several turns. In this case, `column` has NaN for tokens that the environment
      wrote.
    - `edge`: the resharding edge through which the generator receives its weights.
    """

    node: str
    column: str
    response: str
    tolerance: float
    turns: bool = False
    edge: str = ""

    def weights_age(self, task: Task) -> int:
        """Return by how many versions the generator's weights are behind the trainer's."""
        fetch = task.fetches.get(self.edge)
        return task.number - fetch.version if fetch and task.trains else 0


@dataclass(frozen=True)
class SampledLogProbs:
    """The log-probabilities of rows' tokens at sampling, and each row's temperature."""

    logp: ColumnData
    temperature: Array


def sampled_columns(graph: Graph, node: Node) -> tuple[str, str]:
    """Return the names of the columns for a generation's tokens and log-probabilities.

    If the program declares no column for the log-probabilities, the second name is an undeclared column of the dock.
    """
    response = next(
        column for column in node.writes if graph.column(column).element == "i32" and is_tokens(graph, column)
    )
    return response, find_response_column(graph, node, "f32") or f"{response}.logp"


def find_comparison(plan: Plan) -> Comparison | None:
    """Find a node that can check the log-probabilities which a generation recorded.

    The result has the first suitable node after the generation. A node is suitable if it computes log-probabilities of
    the response with the generator's weights.
    """
    graph = plan.graph
    # The nodes of one worker are in one pool, so the order of the pools does not matter.
    order = [graph.node(name) for name in nodes_run(plan.schedule)]
    for node in graph.verb("generate"):
        if node.cuts:  # a response may be sampled with several versions
            continue
        response, column = sampled_columns(graph, node)
        edges = [edge for edge in graph.reshards() if edge.dst == node.name]
        worker = graph.node(edges[0].src).worker if edges else node.worker
        generated_sequence = (*sequences(graph, node).context, response)
        for other in order:
            sequence = sequences(graph, other)
            computes_logp = other.verb == "update" or any(
                [dim.like for dim in graph.column(written).dims] == [response] for written in other.writes
            )
            if (
                other.worker == worker
                and not other.base_of
                and other.verb != "generate"
                and computes_logp
                and (*sequence.context, *sequence.scored) == generated_sequence
            ):
                kinds = {dtype(plan, node.name), dtype(plan, other.name)}
                return Comparison(
                    other.name,
                    column,
                    response,
                    max(TOLERANCE[kind] for kind in kinds),
                    GenerateAttributes.of(node).partner is not None,
                    f"{edges[0].src} => {node.name}" if edges else "",
                )
    return None


def vocabulary_size(plan: Plan, column: str) -> int:
    """Return the size of the smallest vocabulary of the models that read a column.

    The result is 0 if no model reads the column, or if the column has no token ids.
    """
    readers = [
        node for node in plan.graph.nodes if column in node.reads and node.verb in ("generate", "infer", "update")
    ]
    tokens = plan.graph.column(column).element == "i32"
    return (
        min((plan.model(node.name).vocabulary for node in readers if plan.graph.worker(node.worker).model), default=0)
        if tokens
        else 0
    )


class NumericsWatch:
    """Checks of the values that nodes produce.

    A mask that a method accepts or returns has one entry per row: True if the row has a wrong number.
    """

    def __init__(self, plan: Plan) -> None:
        self.graph = plan.graph
        self.stops = plan.deploy.run.on_nan == "stop"
        self.comparison = find_comparison(plan)

    def report_rows(self, node: Node, task: Task, report: Report, reason: str, rows: Array, problem: str) -> None:
        """Report a problem with some rows; the setting `on_nan` decides the effect.

        `problem` is the message. With `on_nan = stop`, the problem ends the run. With `skip`, the message is added to
        `report`, and the rows are counted under `reason`, unless `reason` is empty.
        """
        message = _format_message(node, task, rows, problem)
        if self.stops:
            raise RunError(message)
        if reason:
            report.count(f"wrong/{reason}", len(rows), 0)
        report.remarks.append(message)

    def check_input(self, node: Node, task: Task, rows: Array, lengths: Array) -> None:
        """End the run if a row has no input token before the model's first prediction.

        `lengths` is the number of input tokens of each row. This error ends the run with any `on_nan` setting.
        """
        if len(empty_rows := rows[lengths == 0]):
            raise RunError(
                _format_message(
                    node, task, empty_rows, "the input of its model holds no token, so there is nothing to predict from"
                )
            )

    def check_temperature(self, node: Node, task: Task, rows: Array, name: str, values: Array) -> None:
        """End the run if a sampling temperature cannot be used.

        A temperature must be finite and not negative, and it must not be 0 if a policy scores the response. This error
        ends the run with any `on_nan` setting.
        """
        response, _ = sampled_columns(self.graph, node)
        scores = [
            other.name
            for other in nodes_with_weights(self.graph)
            if other.verb != "generate" and response in sequences(self.graph, other).scored
        ]
        scores = [name for name in scores if temperature_exprs(self.graph, self.graph.node(name))]
        bad = ~np.isfinite(values) | (values < 0) | ((values == 0) & bool(scores))
        if bad.any():
            requirement = (
                f"it must be above 0, since `{scores[0]}` scores `{response}`" if scores else "it must be 0 or more"
            )
            problem = f"the temperature `{name}` is {values[bad][0]:g}: {requirement}"
            raise RunError(_format_message(node, task, rows[bad], problem))

    def check_finite(
        self,
        node: Node,
        task: Task,
        report: Report,
        reason: str,
        problem: str,
        rows: Array,
        column: ColumnData,
        known: Array | None = None,
    ) -> Array:
        """Report rows with a value that is not finite; return the mask of all such rows.

        `problem` is the message; its `{}` is replaced by the value. Rows that are already `known` to be wrong are not
        reported again, but are in the result.
        """
        bad = rows_not_finite(column)
        known = np.zeros(len(bad), bool) if known is None else known
        if len(new_rows := np.flatnonzero(bad & ~known)):
            values = column.take(new_rows).values
            self.report_rows(
                node, task, report, reason, rows[new_rows], problem.format(values[~np.isfinite(values)][0])
            )
        return bad | known

    def check_results(
        self,
        node: Node,
        task: Task,
        report: Report,
        name: str,
        rows: Array,
        column: ColumnData,
        known: Array | None = None,
    ) -> None:
        """Check the values that a function returned for a column.

        If the program allows that a row has no value in this column, missing values are counted, but are not an error.
        """
        if name not in self.graph.optional:
            self.check_finite(node, task, report, "result", f"it returned {{}} for `{name}`", rows, column, known)
        elif absent := int(rows_not_finite(column).sum()):
            report.count(f"without/{name}", absent, 0)

    def check_scored(
        self, node: Node, task: Task, report: Report, rows: Array, lengths: dict[str, Array], known: Array
    ) -> Array:
        """Report rows without a token in a column that the node's model scores.

        Returns a mask of these rows and of the rows that are already `known` to be wrong.
        """
        for column in node.scores:
            empty = lengths[column] == 0
            if (empty & ~known).any():
                problem = f"`{column}` holds no token, so it has no score"
                self.report_rows(node, task, report, "empty", rows[empty & ~known], problem)
            known = known | empty
        return known

    def check_logp(
        self,
        node: Node,
        task: Task,
        report: Report,
        rows: Array,
        logp: ColumnData,
        as_drawn: SampledLogProbs | None,
        known: Array,
    ) -> Array:
        """Check a trainer's log-probabilities; return a mask of the wrong rows.

        In training, the log-probabilities are compared with `as_drawn`, the log-probabilities at sampling. In an
        evaluation they are not compared, because an evaluation has its own temperature.
        """
        known = self.check_finite(node, task, report, "logp", "a token's log-probability is {}", rows, logp, known)
        return (
            known
            if as_drawn is None or task.name != "train"
            else self.check_drift(node, task, report, rows, logp, as_drawn, known)
        )

    def check_response(
        self, node: Node, task: Task, report: Report, rows: Array, tokens: ColumnData, logp: ColumnData, vocabulary: int
    ) -> None:
        """Check the tokens and log-probabilities that a generation sampled.

        In a response of several turns, `logp` has log-probabilities only for the policy's tokens.
        """
        unknown = rows_outside_vocabulary(tokens, vocabulary)
        if len(bad_rows := np.flatnonzero(unknown)):
            values = tokens.take(bad_rows).values
            token = values[(values < 0) | (values >= vocabulary)][0]
            self.report_rows(
                node,
                task,
                report,
                "token",
                rows[bad_rows],
                f"it drew the token {token}, outside the vocabulary of {vocabulary}",
            )
        if len(bad_rows := np.flatnonzero(tokens.lengths == 0)):
            self.report_rows(node, task, report, "empty", rows[bad_rows], "the response is empty")
        self.check_finite(
            node, task, report, "logp", "it drew a token with the log-probability {}", rows, logp, unknown
        )

    def check_drift(
        self,
        node: Node,
        task: Task,
        report: Report,
        rows: Array,
        logp: ColumnData,
        sampled: SampledLogProbs,
        known: Array,
    ) -> Array:
        """Compare log-probabilities with the log-probabilities at sampling.

        Returns a mask of the rows that cannot be compared or differ too much. If the weights at sampling were older,
        the policy has changed since sampling, so the difference is only recorded as a metric.
        """
        assert self.comparison is not None
        age = self.comparison.weights_age(task)
        as_drawn = sampled.logp
        written = ~np.isnan(as_drawn.values) if self.comparison.turns else np.ones(len(as_drawn.values), bool)
        known = known | _rows_with(as_drawn, written & ~np.isfinite(as_drawn.values))
        row = np.repeat(np.arange(len(rows)), logp.lengths)
        compared = written & ~known[row]
        difference = np.abs(logp.values - as_drawn.values)[compared].astype(np.float64)
        row = row[compared]
        if not len(difference):
            return known
        suffix = f"/{age}" if age else ""
        report.count(f"logp_drift{suffix}", float(difference.sum()), len(difference))
        report.peak(f"logp_drift_max{suffix}", float(difference.max()))
        if age:
            return known
        tolerance = self.comparison.tolerance / np.minimum(
            1.0, sampled.temperature
        )  # temperatures below 1 magnify the errors of logits
        if difference.mean() <= tolerance[row].mean():
            return known
        by_row = np.bincount(row, difference, len(rows)) / np.maximum(np.bincount(row, minlength=len(rows)), 1)
        far_rows = np.flatnonzero(by_row > tolerance)
        far_rows = far_rows[np.argsort(-by_row[far_rows], kind="stable")]
        writer = self.graph.writer(self.comparison.response)
        problem = (
            f"the log-probabilities of `{self.comparison.response}` are not those that `{writer.name}` "
            f"({writer.span.place}) drew it "
            f"with: off by {by_row[far_rows[0]]:.3g} nats on row {rows[far_rows[0]]}, "
            f"by {difference.mean():.3g} on average, where rounding makes at most {tolerance[far_rows[0]]:.3g}"
        )
        self.report_rows(node, task, report, "drift", rows[far_rows], problem)
        known[far_rows] = True
        return known


def _format_message(node: Node, task: Task, rows: Array, problem: str) -> str:
    when = (
        f"iteration {task.number}"
        if task.name == "train"
        else f"the evaluation of {task.name} after {task.number} iterations"
    )
    place = place_of_call(node) if node.stated("call") else node.span.place
    return f"`{node.name}` ({place}) on {format_rows(rows)} of {when}: {problem}"


def rows_not_finite(column: ColumnData) -> Array:
    return _rows_with(column, ~np.isfinite(column.values))


def rows_outside_vocabulary(tokens: ColumnData, vocabulary: int) -> Array:
    """Return a mask of the rows with a token outside `vocabulary`."""
    return _rows_with(tokens, (tokens.values < 0) | (tokens.values >= vocabulary))


def clip_tokens(columns: list[ColumnData], size: int) -> tuple[list[ColumnData], Array]:
    """Clip tokens to a model's vocabulary of `size` tokens.

    Also returns a mask of the rows that had an unknown token. Without clipping, such a token would end the process, or
    would be ignored silently under tensor parallelism.
    """
    unknown = np.any([rows_outside_vocabulary(column, size) for column in columns], axis=0)
    return [
        replace(column, values=column.values.clip(0, size - 1)) for column in columns
    ] if unknown.any() else columns, unknown


def _rows_with(column: ColumnData, bad: Array) -> Array:
    """Return a mask of the rows with at least one element for which `bad` is true."""
    elements = bad.any(axis=tuple(range(1, bad.ndim)))
    rows: Array = np.bincount(np.repeat(np.arange(len(column)), column.lengths)[elements], minlength=len(column)) > 0
    return rows


def format_rows(rows: Array) -> str:
    """Format row numbers for a message."""
    first = ", ".join(map(str, rows[:5])) or "none"
    return (
        f"row {first}" if len(rows) == 1 else f"rows {first}" if len(rows) <= 5 else f"{len(rows)} rows ({first}, ...)"
    )
