"""Training: how a rank computes the verbs `infer` and `update`.

Invariant: neither the distribution of rows over ranks nor the micro-batch size changes the results. All ranks of a node
make the same calls on their engine, even ranks without rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import algorithms, noise
from ...analysis.sequences import is_whole_conversation, routing_columns
from ...backends.engine_protocols import ForwardRequest, Outputs, StepRequest, fill_fields
from ...cost import holdings
from ...ir import graph as ir
from ...ir.attributes import UpdateAttributes
from ...ir.graph import Node
from ..data import numerics
from ..data.columns import Array, ColumnData, ColumnRows, offsets_from_lengths
from ..functions.user_traceback import describe_failure
from ..process.task import Task
from ..process.task_report import RunError
from . import joint_loss, loss
from . import learning_rate as rates
from .context import NodeBatch, RankContext
from .engines import Engines
from .packing import PreparedBatch, prepare_batch

Sum = tuple[str, float, float]  # name, total, weight


class TrainerRole:
    """The part of a rank that computes `infer` and `update` for a batch."""

    def __init__(self, context: RankContext, engines: Engines) -> None:
        self.context = context
        self.engines = engines
        self.stepped = False  # whether weights have changed since the task began

    def begin_task(self) -> None:
        """Note that a task begins, before which no weights change."""
        self.stepped = False

    def compute(self, work: NodeBatch) -> Iterator[dict[str, ColumnRows]]:
        """Yield the columns that an `infer` writes, or take an optimizer step."""
        if work.node.verb == "infer":
            yield self.infer(work)
        else:
            self.update(work)

    def infer(self, work: NodeBatch) -> dict[str, ColumnRows]:
        node = work.node
        batch = self._prepare(work)
        written = [self.context.plan.graph.column(name) for name in node.writes]
        best = max((column.dims[1].size for column in written if len(column.dims) == 2), default=0)
        routing = routing_columns(self.context.plan.graph, node.writes)
        adapter = not node.base_of
        request = ForwardRequest(batch.pass_temperature, best=best, routes=bool(routing), node=node, adapter=adapter)
        outputs = self.engines.trainers[node.worker].score(batch, request)
        if not len(batch.rows) or not outputs:
            return {}
        columns: dict[str, ColumnData] = {}
        rows = batch.rows[batch.order]
        wrong = batch.wrong[batch.order]
        routes = batch.join_routes(outputs) if routing else {}
        columns |= {column: routes[name] for name, column in routing.items()}
        for column in [column for column in written if column.name not in columns]:
            data = columns[column.name] = batch.join_outputs(column, outputs)
            if column.element != "i32":
                wrong = self._check_rows(work, batch, column, data, wrong)
            if data.offsets is None:
                self.context.means.count(work.report, node, work.task, column.name, rows, data.values)
        for data in columns.values():
            if data.values.dtype.kind == "f":  # nodes that read a wrong row must notice that the row is wrong
                data.values[np.repeat(wrong, data.lengths)] = math.nan
        return {name: ColumnRows(rows, data) for name, data in columns.items()}

    def update(self, work: NodeBatch) -> None:
        node = work.node
        task = work.task
        report = work.report
        if not work.batch.share.round_rows:
            if self.context.is_leader(node):
                report.remarks.append(
                    f"`{node.name}` ({node.span.place}) has no rows in iteration {task.number}: it takes no step"
                )
            return
        watch = self.context.watch
        graph = self.context.plan.graph
        batch = self._prepare(work)
        wrong = batch.wrong
        for name, column in batch.columns.items():
            if name in node.reads or not (watch.comparison and watch.comparison.turns):
                wrong = wrong | numerics.rows_not_finite(column)
        wrong = watch.check_scored(node, task, report, batch.rows, batch.lengths, wrong)
        batch = replace(batch, wrong=wrong)
        trainer = self.engines.trainers[node.worker]
        normalizer = self._loss_normalizer(work, batch)
        target = next(iter(batch.lengths))
        request = ForwardRequest(
            batch.pass_temperature,
            entropy="entropy" in loss.filled_parameters(node),
            node=node,
            dropout=self._dropout_key(node),
        )
        together = loss.needs_mini_batch(node)
        # A single micro-batch is the whole mini-batch, so its loss needs no second forward pass.
        joint = None
        if together and len(batch) > 1:
            joint = self._joint_mini_batch(work, batch, normalizer, trainer.score(batch, request))
        by_micro_batch: dict[int, _LossSummary] = {}  # empty on ranks without the last layers

        def compute(output: Outputs, index: int) -> torch.Tensor:
            nonlocal joint
            if together and joint is None:
                joint = self._joint_mini_batch(work, batch, normalizer, [output])
            rows = batch.micro[index]
            value = joint.value_of_rows(rows) if joint else self._loss(work, batch, rows, output)
            lengths = torch.from_numpy(batch.lengths[target][rows]).to(value.loss.device)
            total = loss.reduce(node, value.loss, lengths, normalizer)
            by_micro_batch[index] = _summarize(output, value, total)
            return joint.linearized_loss(output, rows) if joint else total

        trainer.train(batch, compute, request)
        summaries = [by_micro_batch[index] for index in sorted(by_micro_batch)]
        if len(batch.rows) and summaries:
            order = batch.order
            wrong = wrong[order]
            outputs = [summary.outputs for summary in summaries]
            for scored in map(graph.column, batch.scored):
                wrong = self._check_rows(work, batch, scored, batch.join_outputs(scored, outputs), wrong)
            unit, offsets = ("row", None)
            if not loss.is_per_row(node):
                unit, offsets = ("token", offsets_from_lengths(batch.lengths[target][order]))
            cost = ColumnData(torch.cat([summary.loss for summary in summaries]).numpy(), offsets)
            wrong = wrong | (joint is not None and joint.has_wrong_row)  # a wrong row affects the loss of all rows
            problem = f"a {unit}'s loss is {{}}"
            wrong = watch.check_finite(node, task, report, "loss", problem, batch.rows[order], cost, wrong)
        self._step(work, bool(wrong.any()), summaries)
        if work.batch.share.epoch == 0 and not [*graph.verb("generate")]:  # a generation would count these tokens
            report.count("prompt_tokens", float(sum(column.lengths.sum() for column in batch.contexts)), 0)
            report.count("response_tokens", float(sum(column.lengths.sum() for column in batch.scored.values())), 0)

    def _step(self, work: NodeBatch, wrong: bool, summaries: list[_LossSummary]) -> None:
        """Take an optimizer step, unless rows or gradients are wrong; report metrics.

        A step is taken only if all sums of the loss and its terms are finite.
        """
        node = work.node
        watch = self.context.watch
        sums = [entry for summary in summaries for entry in summary.sums]
        figures = [entry for summary in summaries for entry in summary.figures]
        step = self.engines.steps.get(node.name, 0) + 1
        finite = not wrong and all(math.isfinite(value) for _, value, _ in sums)
        attributes = UpdateAttributes.of(node)
        lr = rates.learning_rate(self.context.plan, node, step, work.task.states)
        optimizer = algorithms.optimizer(attributes.optimizer)
        request = fill_fields(StepRequest, attributes, lr=lr, sound=finite, optimizer=optimizer, node=node)
        norm = self.engines.trainers[node.worker].step(request)
        stepped = math.isfinite(norm)
        metrics = [*sums, *figures] if stepped else []
        if stepped:
            self.engines.steps[node.name] = step
            self.stepped = True
        if self.context.is_leader(node):
            # The losses of all ranks and micro-batches add up to one loss per step, of weight 1.
            metrics += [("loss", 0.0, 1), ("grad_norm", norm, 1), ("lr", lr, 1)] if stepped else []
            metrics += [("updates", stepped, 0), ("skipped", not stepped, 0)]
        work.report.count("rows", len(work.batch.rows), 0)
        # With several updates, each update has its own metrics in addition to the common metrics.
        for metric_prefix in ("", f"{node.name}/") if len([*self.context.plan.graph.verb("update")]) > 1 else ("",):
            for name, value, weight in metrics:
                work.report.count(metric_prefix + name, value, weight)
        if not stepped and (self.context.is_leader(node) or watch.stops):
            message = f"the gradient of their mini-batch of {work.batch.share.round_rows} rows has the norm {norm}"
            message += "" if watch.stops else "; the step is skipped"
            watch.report_rows(node, work.task, work.report, "", work.batch.rows, message)

    # From rows to losses.

    def _prepare(self, work: NodeBatch) -> PreparedBatch:
        node = work.node
        plan = self.context.plan
        compared = self.context.watch.comparison
        like = {compared.column: compared.response} if compared else {}
        given = [*loss.id_columns(plan.graph, node).values()] if node.verb == "update" else []
        lockstep = plan.controller(node.name).lockstep
        agree = partial(self.context.largest_over_groups, node) if lockstep else int
        batch = prepare_batch(plan, node, work.batch, like, given, agree)
        if batch.contexts and not is_whole_conversation(plan.graph, node):
            lengths = np.sum([column.lengths for column in batch.contexts], axis=0)
            self.context.watch.check_input(node, work.task, batch.rows, lengths)
        return batch

    def _joint_mini_batch(
        self, work: NodeBatch, batch: PreparedBatch, normalizer: loss.LossNormalizer, outputs: list[Outputs]
    ) -> joint_loss.JointMiniBatch:
        """Gather the outputs of all micro-batches from all ranks; compute the loss."""
        node = work.node
        columns = {name: batch.columns[name] for name in sorted(loss.columns_read(node)[0] & batch.columns.keys())}
        joint = joint_loss.JointMiniBatch(replace(batch, columns=columns), outputs, self.context.dp_group(node))
        numbers = joint.prepared.rows
        rng = self._rng(node, work.task, work.batch.share.epoch, int(numbers[0]))
        value = self._loss(work, joint.prepared, np.arange(len(numbers)), joint.outputs, rng=rng)
        lengths = torch.from_numpy(next(iter(joint.prepared.lengths.values())))
        joint.backward(value, loss.reduce(node, value.loss, lengths, normalizer))
        return joint

    def _rng(self, node: Node, task: Task, epoch: int, first: int) -> np.random.Generator:
        """Return the random generator for terms of the whole mini-batch.

        The random numbers are the same in any layout. `first` is the number of the mini-batch's first row.
        """
        seed = self.context.plan.deploy.run.seed
        return noise.RandomStream(seed, "loss", node.name).generator(task.number, epoch, first)

    def _dropout_key(self, node: Node) -> int | None:
        """Return the key of an adapter's dropout in the next optimizer step.

        Returns None if the node's model has no such dropout.
        """
        lora = self.context.plan.model(node.name).lora
        if lora is None or not lora.dropout:
            return None
        step = self.engines.steps.get(node.name, 0) + 1
        return int(noise.RandomStream(self.context.plan.deploy.run.seed, "dropout", node.name).keys(step))

    def _loss(self, work: NodeBatch, batch: PreparedBatch, rows: Array, output: Outputs, **fills: Any) -> loss.Value:
        """Return the loss of some rows, from the output of a forward pass over them."""
        node = work.node
        plan = self.context.plan
        rounding = loss.ROUNDS[holdings.dtype(plan, node.name)]
        inputs = loss.make_inputs(plan.graph, node, batch, rows, output, rounding=rounding, **fills)
        try:
            value = loss.evaluate(node, inputs)
        except Exception as error:
            raise RunError(describe_failure(node, error, f"iteration {work.task.number}")) from error
        if not value.loss.requires_grad:
            raise RunError(
                f"the loss of `{node.name}` ({node.span.place}) has no gradient: nothing in it depends on the weights"
            )
        return value

    def _loss_normalizer(self, work: NodeBatch, batch: PreparedBatch) -> loss.LossNormalizer:
        """Return the numbers of tokens and rows by which a mini-batch's loss is divided."""
        node = work.node
        target = next(iter(batch.scored))
        rows = work.batch.share.round_rows
        skips = UpdateAttributes.of(node).masked_rows == "skip"
        if not skips and target not in batch.masks and self.context.plan.graph.column(target).element != "text":
            return loss.LossNormalizer(work.batch.share.elements[target], rows)
        lengths = batch.lengths[target]
        counts = np.array([lengths.sum(), (lengths > 0).sum()])
        tokens, scored_rows = self.context.sum_over_groups(node, counts).tolist()
        return loss.LossNormalizer(tokens, scored_rows if skips else rows)

    # Checks.

    def _sampled_log_probs(
        self, node: Node, batch: PreparedBatch, column: ir.Column
    ) -> numerics.SampledLogProbs | None:
        """Return the log-probabilities at sampling, to which `column` will be compared.

        The column is a scored column, or has the log-probabilities of a scored column. Returns None if the node
        compares nothing, or if a step has changed the weights since the task began.
        """
        compared = self.context.watch.comparison
        if compared is None or compared.node != node.name or self.stepped:
            return None
        if compared.response != batch.find_scored(column) or len(column.dims) != 1:
            return None
        return numerics.SampledLogProbs(
            batch.columns[compared.column].take(batch.order),
            batch.row_temperatures(compared.response, batch.order).astype(np.float64),
        )

    def _check_rows(
        self, work: NodeBatch, batch: PreparedBatch, column: ir.Column, data: ColumnData, wrong: Array
    ) -> Array:
        """Check the values `data` of a column; return a mask of the rows that are wrong.

        The rows are in the order of the micro-batches. `wrong` is a mask of rows that are known to be wrong; the result
        also contains these rows.
        """
        where = (work.node, work.task, work.report)
        rows = batch.rows[batch.order]
        if self.context.plan.model(work.node.name).scores:
            return self.context.watch.check_finite(*where, "value", "its value is {}", rows, data, wrong)
        as_drawn = self._sampled_log_probs(work.node, batch, column)
        return self.context.watch.check_logp(*where, rows, data, as_drawn, wrong)


class _LossSummary(NamedTuple):
    """What is reported and checked about a micro-batch; all tensors are detached.

    `loss` is the loss of each token or row.
    """

    outputs: Outputs
    loss: torch.Tensor
    sums: list[Sum]
    figures: list[Sum]


def _summarize(output: Outputs, value: loss.Value, total: torch.Tensor) -> _LossSummary:
    sums: list[Sum] = [("loss", float(total.detach()), 0)]
    sums += [(f"loss/{name}", float(part.detach().sum()), part.numel()) for name, part in value.terms.items()]
    figures: list[Sum] = [(name, float(part.sum()), part.numel()) for name, part in value.figures.items()]
    for name, part in value.figures.items():
        if name.endswith("/ratio"):  # for the effective sample size (metrics/derived.py)
            square = part.double().square().sum()
            figures.append((f"{name.removesuffix('ratio')}_ratio_square", float(square), part.numel()))
    if output.entropy is not None:
        figures.append(("entropy", float(output.entropy.detach().sum()), output.entropy.numel()))
    outputs = Outputs(*(tensor if tensor is None else tensor.detach().cpu() for tensor in output[:2]))
    return _LossSummary(outputs, value.loss.detach().cpu(), sums, figures)
