"""Training: what a rank does with weights that it holds and rows that it is handed, the verbs `infer` and `update`.

Invariant: neither how rows fall on ranks nor the micro-batch changes what is computed; all ranks of a group make the same calls on their
engine, ranks without rows too.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from ..graph import Node
from ..plan import Plan
from . import loss, wrong
from .actors import Task
from .columns import Array, Column, offsets_of
from .dock import Batch
from .engines import Engines
from .packing import flat, pack
from .report import Report


class Training(Engines):
    """A rank of one of the pools of devices, as far as it trains: a batch in, the written columns out."""

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self.watch = wrong.Watch(plan)
        self.stepped = False  # whether weights have changed since the task began

    def _micro_batches(self, node: Node, batch: Batch, lengths: Array) -> list[Array]:
        """The positions of each micro-batch, rows of like length together to save padding: as many as the largest group makes, some
        empty."""
        size = int(self.plan.placement(node.name).engine.options.get("micro_batch") or 0) or max(batch.share.most, 1)
        count = max(1, -(-batch.share.most // size))
        return np.array_split(np.argsort(lengths, kind="stable"), count)

    def _as_drawn(self, node: Node, batch: Batch, order: Array) -> Column | None:
        """The log-probabilities that the node's are to be compared with: none once a step has changed the weights."""
        compared = self.watch.comparison
        compares = compared is not None and compared.node == node.name and not self.stepped
        return batch.columns[compared.column].take(order) if compared and compares else None

    def _columns(self, node: Node, batch: Batch, target: str) -> tuple[list[Column], Column, Array]:
        """The context columns and the target's, of a node that reads tokens, and which rows hold tokens that the model does not know."""
        empty = Column(np.zeros(0, np.int32), np.zeros(1, np.int64))
        graph, size = self.plan.graph, self.plan.model(node.name).vocabulary
        names = [c for c in node.reads if graph.column(c).element == "i32" and c != target]
        columns = [batch.columns.get(c, empty) for c in (*names, target)]
        (*contexts, response), strange = wrong.known_tokens(columns, size)
        return contexts, response, strange

    def _temperature(self, target: str) -> float:
        writer = self.plan.graph.writer(target)
        return writer.number("temperature", 1.0) if writer.verb == "generate" else 1.0

    def _infer(self, node: Node, task: Task, batch: Batch, report: Report) -> dict[str, tuple[Array, Column]]:
        (written,) = node.writes
        target = self.plan.graph.column(written).dims[0].like
        contexts, response, known = self._columns(node, batch, target)
        values, micro = [], self._micro_batches(node, batch, _total(contexts, response))
        with torch.no_grad():
            for rows in micro:
                values.append(self.trainers[node.worker].logp(pack(contexts, response, rows), self._temperature(target)))
        if not len(batch.rows):
            return {}
        order = np.concatenate(micro)
        rows, column = batch.rows[order], Column(torch.cat(values).numpy(), offsets_of(response.lengths[order]))
        known = self.watch.logp(node, task, report, rows, column, self._as_drawn(node, batch, order), known[order])
        column.values[np.repeat(known, column.lengths)] = math.nan  # what is wrong with a row goes on to whoever reads it
        return {written: (rows, column)}

    def _update(self, node: Node, task: Task, batch: Batch, report: Report) -> dict[str, tuple[Array, Column]]:
        graph, trainer = self.plan.graph, self.trainers[node.worker]
        target = next(c for c in node.reads if graph.writer(c).verb == "generate" and graph.column(c).element == "i32")
        contexts, response, known = self._columns(node, batch, target)
        for column in batch.columns.values():
            known = known | wrong.not_finite(column)
        whole = loss.Whole(batch.share.elements[target], batch.share.round_units)
        needed = sorted(loss.columns(node))
        micro, logps, losses = self._micro_batches(node, batch, _total(contexts, response)), [], []
        sums: list[tuple[str, float, int]] = []
        for rows in micro:
            lengths = response.lengths[rows]
            logp = trainer.logp(pack(contexts, response, rows), self._temperature(target))
            values = {c: flat(batch.columns[c], rows, lengths) if len(rows) else logp.detach() for c in needed}
            sizes = torch.from_numpy(lengths)
            per_token, parts = loss.evaluate(node, logp, sizes, values)
            total = loss.reduce(node, per_token, sizes, whole)
            trainer.backward(total)
            logps.append(logp.detach())
            losses.append(per_token.detach())
            sums.append(("loss", float(total.detach()), 0))
            sums += [(f"loss/{name}", float(part.detach().sum()), part.numel()) for name, part in parts.items()]
        order = np.concatenate(micro)
        if len(batch.rows):
            numbers, offsets = batch.rows[order], offsets_of(response.lengths[order])
            own, cost = (Column(torch.cat(pieces).numpy(), offsets) for pieces in (logps, losses))
            known = self.watch.logp(node, task, report, numbers, own, self._as_drawn(node, batch, order), known[order])
            known = self.watch.finite(node, task, report, "loss", "a token's loss is {}", numbers, cost, known)
        report.count("rows", len(batch.rows), 0)
        step = self.steps.get(node.name, 0) + 1
        sound = not known.any() and all(math.isfinite(value) for _, value, _ in sums)
        norm = trainer.step(_learning_rate(node, step), node.number("clip_grad", 1.0), sound)
        taken = math.isfinite(norm)
        if taken:
            self.steps[node.name], self.stepped = step, True
            for name, value, weight in sums:
                report.count(name, value, weight)
        if self.local == 0:
            if taken:
                report.count("loss", 0.0, 1)  # the parts of all ranks and micro-batches add up to one loss a step
                report.count("grad_norm", norm, 1)
            report.count("updates", taken, 0)
            report.count("skipped", not taken, 0)
        if not taken and (self.local == 0 or self.watch.stops):
            what = f"the gradient of their mini-batch of {batch.share.round_units} rows has the norm {norm}"
            self.watch.tell(node, task, report, "", batch.rows, what + ("" if self.watch.stops else "; the step is left out"))
        return {}


def _total(contexts: list[Column], response: Column) -> Array:
    """Tokens of each row."""
    lengths: Array = np.sum([c.lengths for c in (*contexts, response)], axis=0)
    return lengths


def _learning_rate(node: Node, step: int) -> float:
    """The learning rate of the step-th optimizer step (from 1): it rises in equal parts over `warmup` steps, then stays."""
    given = node.attributes["optimizer"].options()
    return float(given["lr"]) * min(1.0, step / max(int(given.get("warmup", 1)), 1))
