"""Generation by agents: sampling for programs that send their own requests.

Invariant: all ranks of a data-parallel group sample the same batches. One rank, the leader of the group, gets the
batches from its agent process and shares them. What is sampled for a request is a function of (seed, node, iteration,
row), of the tokens before the sampled tokens and of the weights. What is sampled does not depend on the other requests
that arrive at the same time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ... import noise
from ...backends.engine_protocols import Sampling, collect_responses
from ...ir.attributes import GenerateAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ..agents.rank_protocol import AgentsFinished, BatchStart, SampleReply, SampleRequest
from ..process import row_progress
from ..process.task import Task
from ..process.task_report import Report
from .engines import Engines

if TYPE_CHECKING:
    from ..agents.agent_process import AgentProcess


class AgentGeneration(Engines):
    """The methods of a rank for generation by agents."""

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self.agents: dict[str, AgentProcess] = {}  # by node, on the first rank of a group

    def build(self) -> None:
        # The agent process starts before the engines are built: both take time.
        for name in [
            placement.node for placement in self.plan.placements if self.pool and placement.pool == self.pool.name
        ]:
            node = self.plan.graph.node(name)
            if (
                node.verb == "generate"
                and GenerateAttributes.of(node).agent is not None
                and self._is_group_leader(node)
            ):
                from ..agents.agent_process import AgentProcess  # aiohttp comes with it

                self.agents[name] = AgentProcess(self.plan, node)
        super().build()

    def _random_stream(self, node: Node, task: Task) -> noise.RandomStream:
        """Return the random stream from which a generation's tokens are sampled."""
        return noise.RandomStream(self.plan.deploy.run.seed, "token", node.name, task.name)

    def _run_agents(
        self, node: Node, task: Task, begin: BatchStart, sampling: Sampling, report: Report
    ) -> AgentsFinished:
        """Answer the requests of a batch's agents until all agents have finished."""
        if self._is_group_leader(node):
            self.agents[node.name].begin(begin)
        replies = list[SampleReply]()
        answers = 0
        while True:
            with report.phase("agent"):
                wanted = self._share_result(node, self._next_requests, node, replies)
            if isinstance(wanted, AgentsFinished):
                return wanted
            replies = self._sample_replies(node, task, wanted, sampling)
            answers += len(replies)
            row_progress.report(answers, 0, f"the policy has given agents {answers} answers")

    def _next_requests(self, node: Node, replies: list[SampleReply]) -> list[SampleRequest] | AgentsFinished:
        return self.agents[node.name].next(replies)

    def _sample_replies(
        self, node: Node, task: Task, wanted: list[SampleRequest], sampling: Sampling
    ) -> list[SampleReply]:
        """Sample a reply to each request in `wanted`.

        An engine samples all replies of a batch with the same maximal length and the same stop strings. So a reply can
        be longer than its request permits; this reply is cut. The tokens before the cut are the same as if the engine
        had stopped at the cut.
        """
        replies: list[SampleReply] = []
        for stop in dict.fromkeys(request.stop for request in wanted):
            requests = [request for request in wanted if request.stop == stop]
            begun = np.array([request.response_tokens for request in requests])
            batch_sampling = replace(
                sampling.select(np.array([request.place for request in requests])),
                max_tokens=max(request.response_tokens + request.most for request in requests),
                stop=tuple(dict.fromkeys((*sampling.stop, *stop))),
            )
            keys = self._random_stream(node, task).keys(task.number, [request.key for request in requests])
            responses = self.generators[node.name].generate(
                [request.tokens for request in requests], keys, batch_sampling, begun
            )
            tokens, logps = collect_responses(responses)
            replies += [
                SampleReply(request.number, ids[: request.most], id_logps[: request.most])
                for request, ids, id_logps in zip(requests, tokens, logps, strict=True)
            ]
        return replies
