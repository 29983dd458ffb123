"""Training: what a rank does with weights that it holds and rows that it is handed, the verbs `infer` and `update`.

Invariant: neither how rows fall on ranks nor the micro-batch changes what is computed; all ranks of a group make the same calls on their
engine, ranks without rows too.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from ... import algorithms, noise
from ...backends.spec import Asked, Outputs
from ...ir import graph as ir
from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.sequences import temperature
from ..data import wrong
from ..data.columns import Array, Column, offsets_of
from ..data.tokens import tokenised
from ..dock.controller import Batch
from ..functions.blame import blame
from ..metrics.spread import Means
from ..process.report import Report, RunError
from ..process.task import Task
from . import ahead, loss
from . import learning_rate as rates
from .engines import Engines
from .packing import Given, flat, given

Sum = tuple[str, float, float]  # name, total, weight


class Training(Engines):
    """A rank of one of the pools of devices, as far as it trains: a batch in, the written columns out."""

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self.watch, self.means = wrong.Watch(plan), Means(plan)
        self.stepped = False  # whether weights have changed since the task began

    def _infer(self, node: Node, task: Task, batch: Batch, report: Report) -> dict[str, tuple[Array, Column]]:
        seen, written = self._given(node, task, batch), [self.plan.graph.column(c) for c in node.writes]
        best = max((c.dims[1].size for c in written if len(c.dims) > 1), default=0)
        micro = self._micro_batches(node, batch, seen)
        with torch.no_grad():
            outputs = [self._forward(node, seen, rows, best=best) for rows in micro]
        if not len(batch.rows):
            return {}
        order, found = np.concatenate(micro), {}
        rows, known = batch.rows[order], seen.strange[order]
        for column in written:
            made = found[column.name] = _made(column, seen, micro, outputs)
            if column.element != "i32":
                known = self._look(node, task, report, rows, made, self._as_drawn(node, seen, column, order), known)
            if made.offsets is None:
                self.means.count(report, node, task, column.name, rows, made.values)
        for made in found.values():
            if made.values.dtype.kind == "f":  # what is wrong with a row goes on to whoever reads it
                made.values[np.repeat(known, made.lengths)] = math.nan
        return {name: (rows, made) for name, made in found.items()}

    def _update(self, node: Node, task: Task, batch: Batch, report: Report) -> dict[str, tuple[Array, Column]]:
        if not batch.share.round_units:
            if self.local == 0:
                report.remarks.append(f"`{node.name}` ({node.span.place}) has no rows in iteration {task.number}: it takes no step")
            return {}
        trainer, seen = self.trainers[node.worker], self._given(node, task, batch)
        known = seen.strange
        for name, column in seen.columns.items():
            if name in node.reads or not (self.watch.comparison and self.watch.comparison.turns):
                known = known | wrong.not_finite(column)
        whole = loss.Whole(self._tokens(node, batch, seen), batch.share.round_units)
        micro, target = self._micro_batches(node, batch, seen), next(iter(seen.lengths))
        joint, passed = self._ahead(node, task, batch, seen, micro, known, whole) if loss.of_mini_batch(node) else (None, [])
        outputs, losses = [], []
        sums: list[Sum] = []
        figures: list[Sum] = []
        for i, rows in enumerate(micro):
            made = passed[i] if passed else self._asked(node, seen, rows)
            found = joint.found(rows) if joint else self._loss(node, task, loss.inputs(self.plan.graph, node, seen, rows, made))
            total = loss.reduce(node, found.loss, torch.from_numpy(seen.lengths[target][rows]), whole)
            trainer.backward(joint.linear(made, rows) if joint else total)
            outputs.append(detached(made))
            losses.append(found.loss.detach())
            sums.append(("loss", float(total.detach()), 0))
            sums += [(f"loss/{name}", float(part.detach().sum()), part.numel()) for name, part in found.terms.items()]
            figures += [(name, float(part.sum()), part.numel()) for name, part in found.figures.items()]
            if made.entropy is not None:
                figures.append(("entropy", float(made.entropy.detach().sum()), made.entropy.numel()))
            del made, found, total  # or the next micro-batch would have them beside its own
        order = np.concatenate(micro)
        if len(batch.rows):
            numbers, known = batch.rows[order], known[order]
            for scored in map(self.plan.graph.column, seen.scored):
                as_drawn = self._as_drawn(node, seen, scored, order)
                known = self._look(node, task, report, numbers, _made(scored, seen, micro, outputs), as_drawn, known)
            each, offsets = ("row", None) if loss.of_rows(node) else ("token", offsets_of(next(iter(seen.lengths.values()))[order]))
            cost = Column(torch.cat(losses).numpy(), offsets)
            known = known | (joint is not None and joint.spoilt)  # a statistic of a wrong row is in the loss of all
            known = self.watch.finite(node, task, report, "loss", f"a {each}'s loss is {{}}", numbers, cost, known)
        self._step(node, task, batch, report, bool(known.any()), sums, figures)
        if batch.share.epoch == 0 and not [*self.plan.graph.verb("generate")]:  # which would have counted them
            report.count("prompt_tokens", float(sum(c.lengths.sum() for c in seen.contexts)), 0)
            report.count("response_tokens", float(sum(c.lengths.sum() for c in seen.scored.values())), 0)
        return {}

    def _step(self, node: Node, task: Task, batch: Batch, report: Report, wrong: bool, sums: list[Sum], figures: list[Sum]) -> None:
        """Takes an optimizer step, but for gradients that are not finite or of rows that are wrong, and tells of it: `sums` are of losses,
        all finite where nothing is wrong, `figures` of what terms tell beside."""
        step = self.steps.get(node.name, 0) + 1
        sound = not wrong and all(math.isfinite(value) for _, value, _ in sums)
        clip = node.number("clip_grad", 1.0)
        lr = rates.rate(self.plan, node, step, task.states)
        norm = self.trainers[node.worker].step(lr, clip, sound, algorithms.optimizer(node.attributes["optimizer"]))
        taken = math.isfinite(norm)
        told = [*sums, *figures] if taken else []
        if taken:
            self.steps[node.name], self.stepped = step, True
        if self.local == 0:
            # The parts of all ranks and micro-batches add up to one loss a step.
            told += [("loss", 0.0, 1), ("grad_norm", norm, 1), ("lr", lr, 1)] if taken else []
            told += [("updates", taken, 0), ("skipped", not taken, 0)]
        report.count("rows", len(batch.rows), 0)
        # Where there are several updates each has its own metrics beside those of all.
        for of in ("", f"{node.name}/") if len([*self.plan.graph.verb("update")]) > 1 else ("",):
            for name, value, weight in told:
                report.count(of + name, value, weight)
        if not taken and (self.local == 0 or self.watch.stops):
            what = f"the gradient of their mini-batch of {batch.share.round_units} rows has the norm {norm}"
            self.watch.tell(node, task, report, "", batch.rows, what + ("" if self.watch.stops else "; the step is left out"))

    # From rows to what is computed of them.

    def _given(self, node: Node, task: Task, batch: Batch) -> Given:
        compared = self.watch.comparison
        like = {compared.column: compared.response} if compared else {}
        batch = replace(batch, columns=tokenised(self.plan, node, batch.columns))
        found = given(self.plan.graph, node, batch, self.plan.model(node.name).vocabulary, like)
        self.watch.begun(node, task, batch.rows, np.sum([c.lengths for c in found.contexts], axis=0))
        return found

    def _micro_batches(self, node: Node, batch: Batch, seen: Given) -> list[Array]:
        """The positions of each micro-batch, rows of like length together to save padding: as many as the largest group makes, some
        empty."""
        size = int(self.plan.placement(node.name).engine.options.get("micro_batch") or 0) or max(batch.share.most, 1)
        count = max(1, -(-batch.share.most // size))
        return np.array_split(np.argsort(seen.size, kind="stable"), count)

    def _forward(self, node: Node, seen: Given, rows: Array, **asked: Any) -> Outputs:
        """One pass over the sequences of the rows at these positions."""
        stated = [temperature(self.plan.graph, c) for c in seen.scored]
        heat: float | torch.Tensor = 1.0
        if len({*stated}) == 1 and stated[0].kind == "number":
            heat = float(stated[0].literal())
        elif stated:
            each = [np.repeat(self._heat(seen, c, rows), n[rows]) for c, n in seen.lengths.items()]
            heat = torch.from_numpy(np.concatenate(each))[:, None]
        return self.trainers[node.worker].forward(seen.pack(rows), Asked(heat, **asked))

    def _heat(self, seen: Given, target: str, rows: Array) -> Array:
        """The temperature that the tokens of a column were drawn at, of each row."""
        stated = temperature(self.plan.graph, target)
        if stated.kind == "number":
            return np.full(len(rows), stated.literal(), np.float32)
        return seen.columns[str(stated.value)].values[rows].astype(np.float32)

    def _asked(self, node: Node, seen: Given, rows: Array) -> Outputs:
        """A forward pass with all that the terms of an update want."""
        ids = [_ids(column, seen, rows) for column in loss.beside(self.plan.graph, node).values()]
        return self._forward(node, seen, rows, entropy="entropy" in loss.fills(node), given=torch.cat(ids, 1) if ids else None)

    def _ahead(
        self, node: Node, task: Task, batch: Batch, seen: Given, micro: list[Array], known: Array, whole: loss.Whole
    ) -> tuple[ahead.Joint, list[Outputs]]:
        """The loss of the whole mini-batch, before its micro-batches are trained on; and what those gave, if it has a gradient: where
        there is one, no second pass over it is needed."""
        with torch.set_grad_enabled(len(micro) == 1):
            passed = [self._asked(node, seen, rows) for rows in micro]
        placement = self.plan.placement(node.name)
        group = self._mesh(placement)["dp"].get_group() if placement.layout.dp > 1 else None
        held = {c: seen.columns[c] for c in sorted(loss.columns(node)[0] & seen.columns.keys())}
        joint = ahead.Joint(replace(seen, columns=held, strange=known), batch.rows, micro, passed, group)
        # Which rows are a mini-batch's is the same on any layout, and what they draw is to be.
        key = (task.number, zlib.crc32(node.name.encode()), batch.share.epoch, int(joint.numbers[0]))
        rng = noise.generator(self.plan.deploy.run.seed, *key)
        everyone = np.arange(len(joint.numbers))
        found = self._loss(node, task, loss.inputs(self.plan.graph, node, joint.seen, everyone, joint.outputs, rng))
        joint.back(found, loss.reduce(node, found.loss, torch.from_numpy(next(iter(joint.seen.lengths.values()))), whole))
        return joint, passed if len(micro) == 1 else []

    def _loss(self, node: Node, task: Task, inputs: loss.Inputs) -> loss.Value:
        try:
            found = loss.evaluate(node, inputs)
        except Exception as error:
            raise RunError(blame(node, error, f"iteration {task.number}")) from error
        if not found.loss.requires_grad:
            raise RunError(f"the loss of `{node.name}` ({node.span.place}) has no gradient: nothing in it depends on the weights")
        return found

    def _tokens(self, node: Node, batch: Batch, seen: Given) -> int:
        """Tokens that enter the loss, over all ranks."""
        target = next(iter(seen.scored))
        if target not in seen.masks and self.plan.graph.column(target).element != "text":
            return batch.share.elements[target]
        count = torch.tensor(int(seen.lengths[target].sum()))
        placement = self.plan.placement(node.name)
        if placement.layout.dp > 1:
            dist.all_reduce(count, group=self._mesh(placement)["dp"].get_group())
        return int(count)

    # What is looked at.

    def _as_drawn(self, node: Node, seen: Given, column: ir.Column, order: Array) -> wrong.Drawn | None:
        """The log-probabilities that those of a column's tokens, or a column of those, are to be compared with: none once a step has
        changed the weights."""
        compared = self.watch.comparison
        if compared is None or compared.node != node.name or self.stepped:
            return None
        if compared.response != _of(column, seen) or len(column.dims) != 1:
            return None
        return wrong.Drawn(seen.columns[compared.column].take(order), self._heat(seen, compared.response, order).astype(np.float64))

    def _look(self, node: Node, task: Task, report: Report, rows: Array, made: Column, as_drawn: wrong.Drawn | None, known: Array) -> Array:
        """The rows that are `known` to be wrong, or hold what is."""
        if self.plan.model(node.name).scores:
            return self.watch.finite(node, task, report, "value", "its value is {}", rows, made, known)
        return self.watch.logp(node, task, report, rows, made, as_drawn, known)


def detached(made: Outputs) -> Outputs:
    """What is looked at of a forward pass, apart from its graph."""
    return Outputs(*(x if x is None else x.detach() for x in made[:2]))


def due(node: Node, iteration: int) -> bool:
    """Whether a state runs in an iteration: an update from `after` on, in every so many-th."""
    begin = int(node.number("after", 0))
    return iteration >= begin and (iteration - begin) % int(node.number("every", 1)) == 0


def _of(column: ir.Column, seen: Given) -> str:
    """The scored column whose tokens a column has values of, itself perhaps; "" where it has one value a row."""
    return column.name if column.name in seen.scored else column.dims[0].like if column.dims else ""


def _made(column: ir.Column, seen: Given, micro: list[Array], outputs: list[Outputs]) -> Column:
    """What forward passes gave for a column that is written, or of the tokens of a column that is scored, in the order of the passes."""
    of = _of(column, seen)
    width = column.dims[1].size if len(column.dims) > 1 else 0
    parts = []
    for rows, found in zip(micro, outputs, strict=True):
        one = found.logp if found.values is None else found.values
        values = one if not width else found.ids if column.element == "i32" else found.best
        assert values is not None
        parts.append(seen.split(rows, values)[of] if of else values)
    joined = torch.cat(parts).numpy()
    if width:
        joined = np.ascontiguousarray(joined[:, :width].astype(np.int32) if column.element == "i32" else joined[:, :width])
    return Column(joined, offsets_of(seen.lengths[of][np.concatenate(micro)]) if of else None)


def _ids(column: ir.Column, seen: Given, rows: Array) -> torch.Tensor:
    """The ids that a column has of each token, [tokens, k]; of another column's tokens zeros."""
    ids = flat(seen.columns[column.name], rows).reshape(-1, math.prod(d.size for d in column.dims[1:]))
    counts = {c: int(n[rows].sum()) for c, n in seen.lengths.items()}
    return torch.cat([ids if c == column.dims[0].like else ids.new_zeros(n, ids.shape[1]) for c, n in counts.items()])
