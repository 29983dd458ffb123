"""Generation by agents: what a rank draws for programs that ask by themselves.

Invariant: all ranks of a group draw the same batches, which the first one hears of from the process of its agents. What
is drawn for a request is a function of (seed, iteration, row), of what stands before it and of the weights: not of who
else asked at the time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...backends.spec import Sampling
from ...ir.attributes import Generate
from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.sequences import of_response
from ..agents.beside import Beside
from ..agents.wire import Begin, Drawn, Over, Wanted
from ..data import wrong
from ..data.columns import Array, Column
from ..dock.wire import Batch
from ..process.report import Report
from ..process.task import Task
from .engines import Engines
from .packing import kept


class Conversing(Engines):
    """A rank of one of the pools of devices, as far as agents ask it."""

    watch: wrong.Watch

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self.agents: dict[str, Beside] = {}  # by node, on the first rank of a group

    def build(self) -> None:
        # Before the engines, which take their time, as the process does.
        for name in [p.node for p in self.plan.placements if self.pool and p.pool == self.pool.name]:
            node = self.plan.graph.node(name)
            if node.verb == "generate" and Generate.of(node).agent is not None and self._first(node):
                self.agents[name] = Beside(self.plan, node)
        super().build()

    def _conversations(
        self,
        node: Node,
        task: Task,
        batch: Batch,
        rows: Array,
        context: list[Array],
        sampling: Sampling,
        report: Report,
        head: str,
    ) -> tuple[dict[str, Column], dict[str, Column]]:
        """What the node writes of its response, and, on the first rank of the group, what agents have returned."""
        contexts = [context[i // sampling.samples] for i in range(len(rows))]
        if self._first(node):
            self.agents[node.name].begin(Begin(task.number, batch, rows, contexts, sampling.max_tokens))
        drawn: list[Drawn] = []
        while True:
            with report.phase("agent"):
                found = self._shared(node, self._wanted, node, drawn)
            if isinstance(found, Over):
                break
            drawn = self._drawn(node, found, sampling)
        ids, logp, mask = found.response
        self.watch.response(node, task, report, rows, ids, kept(logp, mask), self.plan.model(node.name).vocabulary)
        report.count(f"{head}turns", float(found.figures.pop("answers")), len(rows))
        report.count(f"{head}policy_tokens", float(mask.values.sum()), 0)
        report.count(f"{head}environment_tokens", float((~mask.values).sum()), 0)
        for name, number in found.figures.items():
            report.count(head + name, float(number), 0)
        report.remarks += found.remarks
        response, as_drawn = wrong.drawn(self.plan.graph, node)
        masks = {name: mask} if (name := of_response(self.plan.graph, node, "bool")) else {}
        return {response: ids, as_drawn: logp} | masks, found.columns if self._first(node) else {}

    def _wanted(self, node: Node, drawn: list[Drawn]) -> list[Wanted] | Over:
        return self.agents[node.name].next(drawn)

    def _drawn(self, node: Node, wanted: list[Wanted], sampling: Sampling) -> list[Drawn]:
        """What is drawn for some requests. An engine draws a batch by one bound and the same stop strings: what is
        longer than a request wants is what it would have got, and more."""
        found: list[Drawn] = []
        for stop in dict.fromkeys(w.stop for w in wanted):
            some = [w for w in wanted if w.stop == stop]
            begun = np.array([w.begun for w in some])
            how = replace(
                sampling.of(np.array([w.place for w in some])),
                max_tokens=max(w.begun + w.most for w in some),
                stop=tuple(dict.fromkeys((*sampling.stop, *stop))),
            )
            keys = np.array([w.key for w in some], np.int64)
            tokens, logps = self.generators[node.name].generate([w.tokens for w in some], keys, how, begun)
            found += [Drawn(w.number, t[: w.most], p[: w.most]) for w, t, p in zip(some, tokens, logps, strict=True)]
        return found
