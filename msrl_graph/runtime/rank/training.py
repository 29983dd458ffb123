"""Training: what a rank does with weights that it holds and rows that it is handed, the verbs `infer` and `update`.

Invariant: neither how rows fall on ranks nor the micro-batch changes what is computed; all ranks of a group make the
same calls on their engine, ranks without rows too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import distributed as dist

from ... import algorithms, noise
from ...backends.spec import ForwardRequest, Outputs
from ...cost import holdings
from ...ir import graph as ir
from ...ir.attributes import UpdateAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.sequences import heat, scores_texts, temperature, whole
from ...ir.workload import micro_batches
from ..data import numerics
from ..data.columns import Array, ColumnData, ColumnRows, offsets_of
from ..data.tokens import tokenised
from ..dock.messages import Batch
from ..functions.user_traceback import blame
from ..metrics.reward_variance import ColumnMeans
from ..process.task import Task
from ..process.task_report import Report, RunError
from . import joint_loss, loss
from . import learning_rate as rates
from .engines import Engines
from .micro_batches import MicroBatches, pack
from .packing import PreparedBatch, flat, given

Sum = tuple[str, float, float]  # name, total, weight


class Training(Engines):
    """A rank of one of the pools of devices, as far as it trains: a batch in, the written columns out."""

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self.watch = numerics.NumericsWatch(plan)
        self.means = ColumnMeans(plan)
        self.stepped = False  # whether weights have changed since the task began

    def _infer(self, node: Node, task: Task, batch: Batch, report: Report) -> dict[str, ColumnRows]:
        seen = self._given(node, task, batch)
        written = [self.plan.graph.column(c) for c in node.writes]
        best = max((c.dims[1].size for c in written if len(c.dims) > 1), default=0)
        micro = self._micro_batches(node, batch, seen)
        outputs = self.trainers[node.worker].score(*self._passes(node, seen, micro, best=best))
        if not len(batch.rows) or not outputs:
            return {}
        order = np.concatenate(micro)
        found = {}
        rows = batch.rows[order]
        known = seen.strange[order]
        for column in written:
            made = found[column.name] = _made(column, seen, micro, outputs)
            if column.element != "i32":
                known = self._look(node, task, report, rows, made, self._as_drawn(node, seen, column, order), known)
            if made.offsets is None:
                self.means.count(report, node, task, column.name, rows, made.values)
        for made in found.values():
            if made.values.dtype.kind == "f":  # what is wrong with a row goes on to whoever reads it
                made.values[np.repeat(known, made.lengths)] = math.nan
        return {name: ColumnRows(rows, made) for name, made in found.items()}

    def _update(self, node: Node, task: Task, batch: Batch, report: Report) -> None:
        if not batch.share.round_units:
            if self._leads(node):
                report.remarks.append(
                    f"`{node.name}` ({node.span.place}) has no rows in iteration {task.number}: it takes no step"
                )
            return
        seen = self._given(node, task, batch)
        known = seen.strange
        for name, column in seen.columns.items():
            if name in node.reads or not (self.watch.comparison and self.watch.comparison.turns):
                known = known | numerics.not_finite(column)
        known = self.watch.unscored(node, task, report, batch.rows, seen.lengths, known)
        trainer = self.trainers[node.worker]
        whole = self._whole(node, batch, seen)
        micro = self._micro_batches(node, batch, seen)
        target = next(iter(seen.lengths))
        packed, asked = self._passes(node, seen, micro, entropy="entropy" in loss.fills(node))
        join = partial(self._joint, node, task, batch, seen, micro, known, whole)
        together = loss.of_mini_batch(node)
        # One micro-batch is the whole: its loss is computed once it was passed forward, and no second pass is needed.
        joint = join(trainer.score(packed, asked)) if together and len(micro) > 1 else None
        rounding = self._rounding(node)
        told: dict[int, _Told] = {}  # by micro-batch; none where the last layers are not

        def compute(made: Outputs, i: int) -> torch.Tensor:
            nonlocal joint
            if together and joint is None:
                joint = join([made])
            rows = micro[i]
            found = (
                joint.found(rows)
                if joint
                else self._loss(node, task, loss.inputs(self.plan.graph, node, seen, rows, made, None, rounding))
            )
            lengths = torch.from_numpy(seen.lengths[target][rows]).to(found.loss.device)
            total = loss.reduce(node, found.loss, lengths, whole)
            told[i] = _told(made, found, total)
            return joint.linear(made, rows) if joint else total

        trainer.train(packed, compute, asked)
        every = [told[i] for i in sorted(told)]
        if len(batch.rows) and every:
            order = np.concatenate(micro)
            numbers = batch.rows[order]
            known = known[order]
            outputs = [t.outputs for t in every]
            for scored in map(self.plan.graph.column, seen.scored):
                as_drawn = self._as_drawn(node, seen, scored, order)
                known = self._look(node, task, report, numbers, _made(scored, seen, micro, outputs), as_drawn, known)
            lengths = next(iter(seen.lengths.values()))[order]
            each, offsets = ("row", None) if loss.of_rows(node) else ("token", offsets_of(lengths))
            cost = ColumnData(torch.cat([t.loss for t in every]).numpy(), offsets)
            known = known | (joint is not None and joint.spoilt)  # a statistic of a wrong row is in the loss of all
            known = self.watch.finite(node, task, report, "loss", f"a {each}'s loss is {{}}", numbers, cost, known)
        sums = [s for t in every for s in t.sums]
        figures = [f for t in every for f in t.figures]
        self._step(node, task, batch, report, bool(known.any()), sums, figures)
        if batch.share.epoch == 0 and not [*self.plan.graph.verb("generate")]:  # which would have counted them
            report.count("prompt_tokens", float(sum(c.lengths.sum() for c in seen.contexts)), 0)
            report.count("response_tokens", float(sum(c.lengths.sum() for c in seen.scored.values())), 0)

    def _step(
        self, node: Node, task: Task, batch: Batch, report: Report, wrong: bool, sums: list[Sum], figures: list[Sum]
    ) -> None:
        """Takes an optimizer step, but for gradients that are not finite or of rows that are wrong, and tells of it:
        `sums` are of losses, all finite where nothing is wrong, `figures` of what terms tell beside."""
        step = self.steps.get(node.name, 0) + 1
        sound = not wrong and all(math.isfinite(value) for _, value, _ in sums)
        said = UpdateAttributes.of(node)
        lr = rates.rate(self.plan, node, step, task.states)
        norm = self.trainers[node.worker].step(lr, said.clip_grad, sound, algorithms.optimizer(said.optimizer), node)
        taken = math.isfinite(norm)
        told = [*sums, *figures] if taken else []
        if taken:
            self.steps[node.name] = step
            self.stepped = True
        if self._leads(node):
            # The parts of all ranks and micro-batches add up to one loss a step.
            told += [("loss", 0.0, 1), ("grad_norm", norm, 1), ("lr", lr, 1)] if taken else []
            told += [("updates", taken, 0), ("skipped", not taken, 0)]
        report.count("rows", len(batch.rows), 0)
        # Where there are several updates each has its own metrics beside those of all.
        for of in ("", f"{node.name}/") if len([*self.plan.graph.verb("update")]) > 1 else ("",):
            for name, value, weight in told:
                report.count(of + name, value, weight)
        if not taken and (self._leads(node) or self.watch.stops):
            what = f"the gradient of their mini-batch of {batch.share.round_units} rows has the norm {norm}"
            self.watch.tell(
                node, task, report, "", batch.rows, what + ("" if self.watch.stops else "; the step is left out")
            )

    # From rows to what is computed of them.

    def _given(self, node: Node, task: Task, batch: Batch) -> PreparedBatch:
        compared = self.watch.comparison
        like = {compared.column: compared.response} if compared else {}
        batch = replace(batch, columns=tokenised(self.plan, node, batch.columns))
        found = given(self.plan.graph, node, batch, self.plan.model(node.name).vocabulary, like)
        if found.contexts and not whole(self.plan.graph, node):
            self.watch.begun(node, task, batch.rows, np.sum([c.lengths for c in found.contexts], axis=0))
        return found

    def _micro_batches(self, node: Node, batch: Batch, seen: PreparedBatch) -> list[Array]:
        """The positions of each micro-batch, rows of like length together to save padding: as many as the largest group
        makes, some empty."""
        placement = self.plan.placement(node.name)
        size = int(placement.engine.options.get("micro_batch") or 0) or max(batch.share.most, 1)
        count = micro_batches(batch.share.most, size, placement.layout)
        return np.array_split(np.argsort(seen.size, kind="stable"), count)

    def _passes(
        self,
        node: Node,
        seen: PreparedBatch,
        micro: list[Array],
        entropy: bool = False,
        best: int = 0,
    ) -> tuple[MicroBatches, ForwardRequest]:
        """Micro-batches as an engine takes them, with the ids whose log-probabilities terms want; and what is asked."""
        beside = loss.beside(self.plan.graph, node).values() if node.verb == "update" else ()
        after = scores_texts(self.plan.graph, node)
        stated = [temperature(self.plan.graph, c) for c in seen.scored]
        # One number of all tokens, or one a token.
        differ = len({*stated}) > 1 or any(s.kind != "number" for s in stated)

        def make(rows: Array) -> TensorDict:
            ids = [_ids(column, seen, rows) for column in beside]
            each = [np.repeat(self._heat(seen, c, rows), n[rows]) for c, n in seen.lengths.items()] if differ else []
            heat = torch.from_numpy(np.concatenate(each))[:, None] if differ else None
            given = torch.cat(ids, 1) if ids else None
            masks = [seen.masks.get(c) for c in seen.scored]
            begins = [seen.begins.get(c) for c in seen.scored]
            scored = [*seen.scored.values()]
            return pack(seen.contexts, scored, rows, masks, after, begins, given=given, temperature=heat)

        heat = 1.0 if differ or not stated else float(stated[0].literal())
        return MicroBatches(micro, make), ForwardRequest(heat, entropy, best, node)

    def _heat(self, seen: PreparedBatch, target: str, rows: Array) -> Array:
        """The temperature that the tokens of a column were drawn at, of each row."""
        stated = temperature(self.plan.graph, target)
        if stated.kind == "number":
            return np.full(len(rows), stated.literal(), np.float32)
        return seen.columns[heat(stated)].values[rows].astype(np.float32)

    def _joint(
        self,
        node: Node,
        task: Task,
        batch: Batch,
        seen: PreparedBatch,
        micro: list[Array],
        known: Array,
        whole: loss.LossNormalizer,
        passed: list[Outputs],
    ) -> joint_loss.JointMiniBatch:
        """The loss of the whole mini-batch, of what forward passes over its micro-batches gave."""
        placement = self.plan.placement(node.name)
        group = self._mesh(placement)["dp"].get_group() if placement.layout.dp > 1 else None
        held = {c: seen.columns[c] for c in sorted(loss.columns(node)[0] & seen.columns.keys())}
        joint = joint_loss.JointMiniBatch(replace(seen, columns=held, strange=known), batch.rows, micro, passed, group)
        rng = self._rng(node, task, batch.share.epoch, int(joint.numbers[0]))
        everyone = np.arange(len(joint.numbers))
        of = (self.plan.graph, node, joint.seen, everyone, joint.outputs, rng, self._rounding(node))
        found = self._loss(node, task, loss.inputs(*of))
        joint.back(
            found, loss.reduce(node, found.loss, torch.from_numpy(next(iter(joint.seen.lengths.values()))), whole)
        )
        return joint

    def _rounding(self, node: Node) -> float:
        return loss.ROUNDS[holdings.dtype(self.plan, node.name)]

    def _rng(self, node: Node, task: Task, epoch: int, first: int) -> np.random.Generator:
        """What terms of the whole mini-batch draw by, of which `first` is the first row: the rows of a mini-batch are
        the same on any layout, and so is what they draw."""
        return noise.RandomStream(self.plan.deploy.run.seed, "loss", node.name).generator(task.number, epoch, first)

    def _loss(self, node: Node, task: Task, inputs: loss.LossInputs) -> loss.Value:
        try:
            found = loss.evaluate(node, inputs)
        except Exception as error:
            raise RunError(blame(node, error, f"iteration {task.number}")) from error
        if not found.loss.requires_grad:
            raise RunError(
                f"the loss of `{node.name}` ({node.span.place}) has no gradient: nothing in it depends on the weights"
            )
        return found

    def _whole(self, node: Node, batch: Batch, seen: PreparedBatch) -> loss.LossNormalizer:
        """Count the tokens and rows of the mini-batch that the loss is over, on all ranks."""
        target = next(iter(seen.scored))
        rows = batch.share.round_units
        skips = UpdateAttributes.of(node).masked_rows == "skip"
        if not skips and target not in seen.masks and self.plan.graph.column(target).element != "text":
            return loss.LossNormalizer(batch.share.elements[target], rows)
        lengths = seen.lengths[target]
        counts = torch.tensor([int(lengths.sum()), int((lengths > 0).sum())])
        placement = self.plan.placement(node.name)
        if placement.layout.dp > 1:
            dist.all_reduce(counts, group=self._mesh(placement)["dp"].get_group())
        tokens, scored_rows = counts.tolist()
        return loss.LossNormalizer(tokens, scored_rows if skips else rows)

    # What is looked at.

    def _as_drawn(
        self, node: Node, seen: PreparedBatch, column: ir.Column, order: Array
    ) -> numerics.SampledLogProbs | None:
        """The log-probabilities that those of a column's tokens, or a column of those, are to be compared with: none
        once a step has changed the weights."""
        compared = self.watch.comparison
        if compared is None or compared.node != node.name or self.stepped:
            return None
        if compared.response != _of(column, seen) or len(column.dims) != 1:
            return None
        return numerics.SampledLogProbs(
            seen.columns[compared.column].take(order), self._heat(seen, compared.response, order).astype(np.float64)
        )

    def _look(
        self,
        node: Node,
        task: Task,
        report: Report,
        rows: Array,
        made: ColumnData,
        as_drawn: numerics.SampledLogProbs | None,
        known: Array,
    ) -> Array:
        """The rows that are `known` to be wrong, or hold what is."""
        if self.plan.model(node.name).scores:
            return self.watch.finite(node, task, report, "value", "its value is {}", rows, made, known)
        return self.watch.logp(node, task, report, rows, made, as_drawn, known)


class _Told(NamedTuple):
    """What is looked at of a micro-batch, apart from its graph: `outputs`, and the loss of each token or row; and what
    is told of it."""

    outputs: Outputs
    loss: torch.Tensor
    sums: list[Sum]
    figures: list[Sum]


def _told(made: Outputs, found: loss.Value, total: torch.Tensor) -> _Told:
    sums: list[Sum] = [("loss", float(total.detach()), 0)]
    sums += [(f"loss/{name}", float(part.detach().sum()), part.numel()) for name, part in found.terms.items()]
    figures: list[Sum] = [(name, float(part.sum()), part.numel()) for name, part in found.figures.items()]
    for name, part in found.figures.items():
        if name.endswith("/ratio"):  # for the effective sample size (metrics/derived.py)
            square = part.double().square().sum()
            figures.append((f"{name.removesuffix('ratio')}_ratio_square", float(square), part.numel()))
    if made.entropy is not None:
        figures.append(("entropy", float(made.entropy.detach().sum()), made.entropy.numel()))
    outputs = Outputs(*(x if x is None else x.detach().cpu() for x in made[:2]))
    return _Told(outputs, found.loss.detach().cpu(), sums, figures)


def _of(column: ir.Column, seen: PreparedBatch) -> str:
    """The scored column whose tokens a column has values of, itself perhaps; "" where it has one value a row."""
    return column.name if column.name in seen.scored else column.dims[0].like if column.dims else ""


def _made(column: ir.Column, seen: PreparedBatch, micro: list[Array], outputs: list[Outputs]) -> ColumnData:
    """What forward passes gave for a column that is written, or of the tokens of a column that is scored, in the order
    of the passes."""
    of = _of(column, seen)
    width = column.dims[1].size if len(column.dims) > 1 else 0
    parts = []
    for rows, found in zip(micro, outputs, strict=True):
        one = found.logp if found.values is None else found.values
        values = one if not width else found.ids if column.element == "i32" else found.best
        assert values is not None
        parts.append(seen.split(rows, values)[of] if of else values)
    joined = torch.cat(parts).cpu().numpy()
    if width:
        joined = np.ascontiguousarray(
            joined[:, :width].astype(np.int32) if column.element == "i32" else joined[:, :width]
        )
    return ColumnData(joined, offsets_of(seen.lengths[of][np.concatenate(micro)]) if of else None)


def _ids(column: ir.Column, seen: PreparedBatch, rows: Array) -> torch.Tensor:
    """The ids that a column has of each token, [tokens, k]; of another column's tokens zeros."""
    ids = flat(seen.columns[column.name], rows).reshape(-1, math.prod(d.size for d in column.dims[1:]))
    counts = {c: int(n[rows].sum()) for c, n in seen.lengths.items()}
    return torch.cat([ids if c == column.dims[0].like else ids.new_zeros(n, ids.shape[1]) for c, n in counts.items()])
