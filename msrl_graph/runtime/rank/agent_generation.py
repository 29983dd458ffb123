"""Generation by agents: what a rank draws for programs that ask by themselves.

Invariant: all ranks of a group draw the same batches, which the first one hears of from the process of its agents. What
is drawn for a request is a function of (seed, node, iteration, row), of what stands before it and of the weights: not
of who else asked at the time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ... import noise
from ...backends.spec import Sampling, collected
from ...ir.attributes import GenerateAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ..agents.agent_process import AgentProcess
from ..agents.rank_protocol import AgentsFinished, BatchStart, SampleReply, SampleRequest
from ..process import row_progress
from ..process.task import Task
from ..process.task_report import Report
from .engines import Engines


class AgentGeneration(Engines):
    """A rank of one of the pools of devices, as far as agents ask it."""

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self.agents: dict[str, AgentProcess] = {}  # by node, on the first rank of a group

    def build(self) -> None:
        # Before the engines, which take their time, as the process does.
        for name in [p.node for p in self.plan.placements if self.pool and p.pool == self.pool.name]:
            node = self.plan.graph.node(name)
            if node.verb == "generate" and GenerateAttributes.of(node).agent is not None and self._first(node):
                self.agents[name] = AgentProcess(self.plan, node)
        super().build()

    def _stream(self, node: Node, task: Task) -> noise.RandomStream:
        """What a generation's tokens are drawn by."""
        return noise.RandomStream(self.plan.deploy.run.seed, "token", node.name, task.name)

    def _conversed(
        self, node: Node, task: Task, begin: BatchStart, sampling: Sampling, report: Report
    ) -> AgentsFinished:
        """What comes of the agents of a batch."""
        if self._first(node):
            self.agents[node.name].begin(begin)
        drawn = list[SampleReply]()
        answers = 0
        while True:
            with report.phase("agent"):
                found = self._shared(node, self._wanted, node, drawn)
            if isinstance(found, AgentsFinished):
                return found
            drawn = self._drawn(node, task, found, sampling)
            answers += len(drawn)
            row_progress.report(answers, 0, f"the policy has given agents {answers} answers")

    def _wanted(self, node: Node, drawn: list[SampleReply]) -> list[SampleRequest] | AgentsFinished:
        return self.agents[node.name].next(drawn)

    def _drawn(self, node: Node, task: Task, wanted: list[SampleRequest], sampling: Sampling) -> list[SampleReply]:
        """What is drawn for some requests. An engine draws a batch by one bound and the same stop strings: what is
        longer than a request wants is what it would have got, and more."""
        found: list[SampleReply] = []
        for stop in dict.fromkeys(w.stop for w in wanted):
            some = [w for w in wanted if w.stop == stop]
            begun = np.array([w.begun for w in some])
            how = replace(
                sampling.of(np.array([w.place for w in some])),
                max_tokens=max(w.begun + w.most for w in some),
                stop=tuple(dict.fromkeys((*sampling.stop, *stop))),
            )
            keys = self._stream(node, task).keys(task.number, [w.key for w in some])
            ended = self.generators[node.name].generate([w.tokens for w in some], keys, how, begun)
            tokens, logps = collected(ended)
            found += [
                SampleReply(w.number, t[: w.most], p[: w.most]) for w, t, p in zip(some, tokens, logps, strict=True)
            ]
        return found
