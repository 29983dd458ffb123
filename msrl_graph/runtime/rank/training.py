"""Training: how a rank computes the verbs `infer` and `update`.

Invariant: neither the distribution of rows over ranks nor the micro-batch size changes the results. All ranks of a node
make the same calls on their engine, even ranks without rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from ... import algorithms, noise
from ...analysis.sequences import is_whole_conversation, scores_texts, temperature, temperature_name
from ...backends.engine_protocols import ForwardRequest, Outputs
from ...cost import holdings
from ...ir import graph as ir
from ...ir.attributes import UpdateAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ...analysis.sequences import is_whole_conversation, scores_texts, temperature, temperature_name
from ...ir.workload import micro_batches
from ..data import numerics
from ..data.columns import Array, ColumnData, ColumnRows, offsets_from_lengths
from ..data.tokens import tokenise_columns
from ..dock.messages import Batch
from ..functions.user_traceback import describe_failure
from ..process.task import Task
from ..process.task_report import Report, RunError
from . import joint_loss, loss
from . import learning_rate as rates
from .context import NodeBatch, RankContext
from .engines import Engines
from .micro_batches import MicroBatches, pack
from .packing import PreparedBatch, join_outputs, prepare_batch, scored_column, select_ids

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
        node, task, batch, report = work.node, work.task, work.batch, work.report
        seen = self._prepare_batch(node, task, batch)
        written = [self.context.plan.graph.column(name) for name in node.writes]
        best = max((column.dims[1].size for column in written if len(column.dims) > 1), default=0)
        micro = self._micro_batches(node, batch, seen)
        outputs = self.engines.trainers[node.worker].score(*self._passes(node, seen, micro, best=best))
        if not len(batch.rows) or not outputs:
            return {}
        order = np.concatenate(micro)
        columns = {}
        rows = batch.rows[order]
        wrong = seen.has_unknown_tokens[order]
        for column in written:
            data = columns[column.name] = join_outputs(column, seen, micro, outputs)
            if column.element != "i32":
                wrong = self._check_rows(
                    node, task, report, rows, data, self._sampled_log_probs(node, seen, column, order), wrong
                )
            if data.offsets is None:
                self.context.means.count(report, node, task, column.name, rows, data.values)
        for data in columns.values():
            if data.values.dtype.kind == "f":  # nodes that read a wrong row must notice that the row is wrong
                data.values[np.repeat(wrong, data.lengths)] = math.nan
        return {name: ColumnRows(rows, data) for name, data in columns.items()}

    def update(self, work: NodeBatch) -> None:
        node, task, batch, report = work.node, work.task, work.batch, work.report
        if not batch.share.round_rows:
            if self.context.is_leader(node):
                report.remarks.append(
                    f"`{node.name}` ({node.span.place}) has no rows in iteration {task.number}: it takes no step"
                )
            return
        seen = self._prepare_batch(node, task, batch)
        wrong = seen.has_unknown_tokens
        for name, column in seen.columns.items():
            if name in node.reads or not (self.context.watch.comparison and self.context.watch.comparison.turns):
                wrong = wrong | numerics.rows_not_finite(column)
        wrong = self.context.watch.check_scored(node, task, report, batch.rows, seen.lengths, wrong)
        trainer = self.engines.trainers[node.worker]
        normalizer = self._loss_normalizer(node, batch, seen)
        micro = self._micro_batches(node, batch, seen)
        target = next(iter(seen.lengths))
        packed, asked = self._passes(node, seen, micro, entropy="entropy" in loss.filled_parameters(node))
        join = partial(self._joint_mini_batch, node, task, batch, seen, micro, wrong, normalizer)
        together = loss.needs_mini_batch(node)
        # A single micro-batch is the whole mini-batch, so its loss needs no second forward pass.
        joint = join(trainer.score(packed, asked)) if together and len(micro) > 1 else None
        rounding = self._rounding(node)
        graph = self.context.plan.graph
        by_micro_batch: dict[int, _Told] = {}  # empty on ranks without the last layers

        def compute(output: Outputs, index: int) -> torch.Tensor:
            nonlocal joint
            if together and joint is None:
                joint = join([output])
            rows = micro[index]
            value = (
                joint.value_of_rows(rows)
                if joint
                else self._loss(node, task, loss.make_inputs(graph, node, seen, rows, output, None, rounding))
            )
            lengths = torch.from_numpy(seen.lengths[target][rows]).to(value.loss.device)
            total = loss.reduce(node, value.loss, lengths, normalizer)
            by_micro_batch[index] = _summarize(output, value, total)
            return joint.linearized_loss(output, rows) if joint else total

        trainer.train(packed, compute, asked)
        summaries = [by_micro_batch[index] for index in sorted(by_micro_batch)]
        if len(batch.rows) and summaries:
            order = np.concatenate(micro)
            numbers = batch.rows[order]
            wrong = wrong[order]
            outputs = [summary.outputs for summary in summaries]
            for scored in map(self.context.plan.graph.column, seen.scored):
                as_drawn = self._sampled_log_probs(node, seen, scored, order)
                wrong = self._check_rows(
                    node, task, report, numbers, join_outputs(scored, seen, micro, outputs), as_drawn, wrong
                )
            lengths = next(iter(seen.lengths.values()))[order]
            unit, offsets = ("row", None) if loss.is_per_row(node) else ("token", offsets_from_lengths(lengths))
            cost = ColumnData(torch.cat([summary.loss for summary in summaries]).numpy(), offsets)
            wrong = wrong | (joint is not None and joint.has_wrong_row)  # a wrong row affects the loss of all rows
            wrong = self.context.watch.check_finite(
                node, task, report, "loss", f"a {unit}'s loss is {{}}", numbers, cost, wrong
            )
        sums = [entry for summary in summaries for entry in summary.sums]
        figures = [entry for summary in summaries for entry in summary.figures]
        self._step(node, task, batch, report, bool(wrong.any()), sums, figures)
        if batch.share.epoch == 0 and not [*graph.verb("generate")]:  # a generation would count these tokens
            report.count("prompt_tokens", float(sum(column.lengths.sum() for column in seen.contexts)), 0)
            report.count("response_tokens", float(sum(column.lengths.sum() for column in seen.scored.values())), 0)

    def _step(
        self, node: Node, task: Task, batch: Batch, report: Report, wrong: bool, sums: list[Sum], figures: list[Sum]
    ) -> None:
        """Take an optimizer step, unless rows or gradients are wrong; report metrics.

        `sums` are sums of the loss and its terms; a step is taken only if all sums are finite. `figures` are other
        metrics.
        """
        step = self.engines.steps.get(node.name, 0) + 1
        finite = not wrong and all(math.isfinite(value) for _, value, _ in sums)
        attributes = UpdateAttributes.of(node)
        lr = rates.learning_rate(self.context.plan, node, step, task.states)
        norm = self.engines.trainers[node.worker].step(
            lr, attributes.clip_grad, finite, algorithms.optimizer(attributes.optimizer), node
        )
        stepped = math.isfinite(norm)
        metrics = [*sums, *figures] if stepped else []
        if stepped:
            self.engines.steps[node.name] = step
            self.stepped = True
        if self.context.is_leader(node):
            # The losses of all ranks and micro-batches add up to one loss per step, of weight 1.
            metrics += [("loss", 0.0, 1), ("grad_norm", norm, 1), ("lr", lr, 1)] if stepped else []
            metrics += [("updates", stepped, 0), ("skipped", not stepped, 0)]
        report.count("rows", len(batch.rows), 0)
        # With several updates, each update has its own metrics in addition to the common metrics.
        for metric_prefix in ("", f"{node.name}/") if len([*self.context.plan.graph.verb("update")]) > 1 else ("",):
            for name, value, weight in metrics:
                report.count(metric_prefix + name, value, weight)
        if not stepped and (self.context.is_leader(node) or self.context.watch.stops):
            message = f"the gradient of their mini-batch of {batch.share.round_rows} rows has the norm {norm}"
            message += "" if self.context.watch.stops else "; the step is skipped"
            self.context.watch.report_rows(node, task, report, "", batch.rows, message)

    # From rows to losses.

    def _prepare_batch(self, node: Node, task: Task, batch: Batch) -> PreparedBatch:
        compared = self.context.watch.comparison
        like = {compared.column: compared.response} if compared else {}
        batch = replace(batch, columns=tokenise_columns(self.context.plan, node, batch.columns))
        prepared = prepare_batch(
            self.context.plan.graph, node, batch, self.context.plan.model(node.name).vocabulary, like
        )
        if prepared.contexts and not is_whole_conversation(self.context.plan.graph, node):
            self.context.watch.check_input(
                node, task, batch.rows, np.sum([column.lengths for column in prepared.contexts], axis=0)
            )
        return prepared

    def _micro_batches(self, node: Node, batch: Batch, seen: PreparedBatch) -> list[Array]:
        """Divide a batch into micro-batches; return the row positions of each micro-batch.

        Rows of similar length are in the same micro-batch, to save padding. All data-parallel groups have the same
        number of micro-batches, enough for the largest share; some micro-batches may be empty.
        """
        placement = self.context.plan.placement(node.name)
        size = int(placement.engine.options.get("micro_batch") or 0) or max(batch.share.largest_share_rows, 1)
        count = micro_batches(batch.share.largest_share_rows, size, placement.layout)
        return np.array_split(np.argsort(seen.size, kind="stable"), count)

    def _passes(
        self,
        node: Node,
        seen: PreparedBatch,
        micro: list[Array],
        entropy: bool = False,
        best: int = 0,
    ) -> tuple[MicroBatches, ForwardRequest]:
        """Return the micro-batches for an engine, and what the forward passes must return.

        `best` is the number of likeliest tokens to return for each token. If loss terms read the log-probabilities of a
        column of token ids, the micro-batches also have these ids.
        """
        id_columns = loss.id_columns(self.context.plan.graph, node).values() if node.verb == "update" else ()
        after = scores_texts(self.context.plan.graph, node)
        stated = [temperature(self.context.plan.graph, name) for name in seen.scored]
        # The temperature is one number for all tokens, or one number per token.
        differ = len({*stated}) > 1 or any(value.kind != "number" for value in stated)

        def make(rows: Array) -> TensorDict:
            ids = [select_ids(column, seen, rows) for column in id_columns]
            temperatures = (
                [
                    np.repeat(self._row_temperatures(seen, name, rows), counts[rows])
                    for name, counts in seen.lengths.items()
                ]
                if differ
                else []
            )
            token_temperatures = torch.from_numpy(np.concatenate(temperatures))[:, None] if differ else None
            given_ids = torch.cat(ids, 1) if ids else None
            masks = [seen.masks.get(name) for name in seen.scored]
            begins = [seen.begins.get(name) for name in seen.scored]
            scored = [*seen.scored.values()]
            return pack(
                seen.contexts, scored, rows, masks, after, begins, given=given_ids, temperature=token_temperatures
            )

        fixed_temperature = 1.0 if differ or not stated else float(stated[0].literal())
        return MicroBatches(micro, make), ForwardRequest(fixed_temperature, entropy, best, node)

    def _row_temperatures(self, seen: PreparedBatch, target: str, rows: Array) -> Array:
        """Return the temperature at which each row of the column `target` was sampled."""
        stated = temperature(self.context.plan.graph, target)
        if stated.kind == "number":
            return np.full(len(rows), stated.literal(), np.float32)
        return seen.columns[temperature_name(stated)].values[rows].astype(np.float32)

    def _joint_mini_batch(
        self,
        node: Node,
        task: Task,
        batch: Batch,
        seen: PreparedBatch,
        micro: list[Array],
        wrong: Array,
        normalizer: loss.LossNormalizer,
        outputs: list[Outputs],
    ) -> joint_loss.JointMiniBatch:
        """Gather the outputs of all micro-batches from all ranks; compute the loss."""
        group = self.context.dp_group(node)
        columns = {column: seen.columns[column] for column in sorted(loss.columns_read(node)[0] & seen.columns.keys())}
        joint = joint_loss.JointMiniBatch(
            replace(seen, columns=columns, has_unknown_tokens=wrong), batch.rows, micro, outputs, group
        )
        rng = self._rng(node, task, batch.share.epoch, int(joint.numbers[0]))
        all_rows = np.arange(len(joint.numbers))
        arguments = (self.context.plan.graph, node, joint.prepared, all_rows, joint.outputs, rng, self._rounding(node))
        value = self._loss(node, task, loss.make_inputs(*arguments))
        joint.backward(
            value,
            loss.reduce(node, value.loss, torch.from_numpy(next(iter(joint.prepared.lengths.values()))), normalizer),
        )
        return joint

    def _rounding(self, node: Node) -> float:
        return loss.ROUNDS[holdings.dtype(self.context.plan, node.name)]

    def _rng(self, node: Node, task: Task, epoch: int, first: int) -> np.random.Generator:
        """Return the random generator for terms of the whole mini-batch.

        The random numbers are the same in any layout. `first` is the number of the mini-batch's first row.
        """
        return noise.RandomStream(self.context.plan.deploy.run.seed, "loss", node.name).generator(
            task.number, epoch, first
        )

    def _loss(self, node: Node, task: Task, inputs: loss.LossInputs) -> loss.Value:
        try:
            value = loss.evaluate(node, inputs)
        except Exception as error:
            raise RunError(describe_failure(node, error, f"iteration {task.number}")) from error
        if not value.loss.requires_grad:
            raise RunError(
                f"the loss of `{node.name}` ({node.span.place}) has no gradient: nothing in it depends on the weights"
            )
        return value

    def _loss_normalizer(self, node: Node, batch: Batch, seen: PreparedBatch) -> loss.LossNormalizer:
        """Return the numbers of tokens and rows by which a mini-batch's loss is divided."""
        target = next(iter(seen.scored))
        rows = batch.share.round_rows
        skips = UpdateAttributes.of(node).masked_rows == "skip"
        if not skips and target not in seen.masks and self.context.plan.graph.column(target).element != "text":
            return loss.LossNormalizer(batch.share.elements[target], rows)
        lengths = seen.lengths[target]
        counts = np.array([lengths.sum(), (lengths > 0).sum()])
        tokens, scored_rows = self.context.sum_over_groups(node, counts).tolist()
        return loss.LossNormalizer(tokens, scored_rows if skips else rows)

    # Checks.

    def _sampled_log_probs(
        self, node: Node, seen: PreparedBatch, column: ir.Column, order: Array
    ) -> numerics.SampledLogProbs | None:
        """Return the log-probabilities at sampling, to which `column` will be compared.

        The column is a scored column, or has the log-probabilities of a scored column. Returns None if the node
        compares nothing, or if a step has changed the weights since the task began.
        """
        compared = self.context.watch.comparison
        if compared is None or compared.node != node.name or self.stepped:
            return None
        if compared.response != scored_column(column, seen) or len(column.dims) != 1:
            return None
        return numerics.SampledLogProbs(
            seen.columns[compared.column].take(order),
            self._row_temperatures(seen, compared.response, order).astype(np.float64),
        )

    def _check_rows(
        self,
        node: Node,
        task: Task,
        report: Report,
        rows: Array,
        data: ColumnData,
        as_drawn: numerics.SampledLogProbs | None,
        wrong: Array,
    ) -> Array:
        """Check the values `data` of some rows; return a mask of the rows that are wrong.

        `wrong` is a mask of rows that are known to be wrong; the result also contains these rows.
        """
        if self.context.plan.model(node.name).scores:
            return self.context.watch.check_finite(node, task, report, "value", "its value is {}", rows, data, wrong)
        return self.context.watch.check_logp(node, task, report, rows, data, as_drawn, wrong)


class _Told(NamedTuple):
    """What is reported and checked about a micro-batch; all tensors are detached.

    `loss` is the loss of each token or row.
    """

    outputs: Outputs
    loss: torch.Tensor
    sums: list[Sum]
    figures: list[Sum]


def _summarize(output: Outputs, value: loss.Value, total: torch.Tensor) -> _Told:
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
    return _Told(outputs, value.loss.detach().cpu(), sums, figures)
