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

from ...backends.engine_protocols import GenerateRequest, Generator, collect_responses
from ...ir.graph import Node
from ..agents.rank_protocol import AgentsFinished, BatchStart, SampleReply, SampleRequest
from ..functions.surviving_rows import SurvivingRows
from ..functions.values import ReturnChecker
from ..process import row_progress
from .context import RankContext
from .rollout import MixedResponses, Rollout

if TYPE_CHECKING:
    from ..agents.agent_process import AgentProcess


class AgentPartner:
    """The agents with which a generation's policy exchanges tokens."""

    def __init__(self, context: RankContext, node: Node) -> None:
        self.context = context
        self.agents: AgentProcess | None = None  # on the first rank of a group
        if context.is_group_leader(node):
            from ..agents.agent_process import AgentProcess  # aiohttp comes with it

            self.agents = AgentProcess(context.plan, node)

    def play(self, rollout: Rollout, generator: Generator) -> MixedResponses:
        """Run an agent for each response."""
        node = rollout.node
        rows = rollout.rows
        finished = self._run_agents(rollout, generator)
        survivors = SurvivingRows(node, self.context.plan, rows, rollout.sampling.samples, rollout.task.number)
        for position, (failure, arguments) in sorted(finished.failed.items()):
            survivors.fail(position, failure, given=arguments)
        for name, number in finished.figures.items():
            rollout.count(name, float(number))
        rollout.report.remarks += finished.remarks
        alive = np.flatnonzero(~survivors.lost)
        verdicts = survivors.make_verdicts(rollout.report, rollout.metric_prefix)
        returned = ReturnChecker(self.context.plan, tuple(finished.values) if self.agents is not None else ())
        return MixedResponses(
            rows[alive],
            [column.take(alive) for column in finished.response],
            {name: returned.column(name, [finished.values[name][i] for i in alive]) for name in returned.vocabularies},
            verdicts,
            np.array(finished.last, int)[alive],
            finished.answers,
        )

    def _run_agents(self, rollout: Rollout, generator: Generator) -> AgentsFinished:
        """Answer the requests of a batch's agents until all agents have finished."""
        task = rollout.task
        if self.agents is not None:
            bound = int(rollout.sampling.max_tokens)
            self.agents.begin(
                BatchStart(task.name, task.number, rollout.batch, rollout.rows, rollout.response_contexts, bound)
            )
        replies = list[SampleReply]()
        answers = 0
        while True:
            with rollout.report.phase("agent"):
                wanted = self.context.share_result(rollout.node, self._next_requests, replies)
            if isinstance(wanted, AgentsFinished):
                return wanted
            replies = _sample_replies(rollout, generator, wanted)
            answers += len(replies)
            row_progress.report(answers, 0, f"the policy has given agents {answers} answers")

    def _next_requests(self, replies: list[SampleReply]) -> list[SampleRequest] | AgentsFinished:
        assert self.agents is not None
        return self.agents.next(replies)


def _sample_replies(rollout: Rollout, generator: Generator, wanted: list[SampleRequest]) -> list[SampleReply]:
    """Sample a reply to each request in `wanted`.

    An engine samples all replies of a batch with the same maximal length and the same stop strings. So a reply can be
    longer than its request permits; this reply is cut. The tokens before the cut are the same as if the engine had
    stopped at the cut.
    """
    replies: list[SampleReply] = []
    for stop in dict.fromkeys(request.stop for request in wanted):
        requests = [request for request in wanted if request.stop == stop]
        begun = np.array([request.response_tokens for request in requests])
        batch_sampling = replace(
            rollout.sampling.select(np.array([request.place for request in requests])),
            max_tokens=max(request.response_tokens + request.most for request in requests),
            stop=tuple(dict.fromkeys((*rollout.sampling.stop, *stop))),
        )
        keys = rollout.stream.keys(rollout.task.number, [request.key for request in requests])
        prompts = [request.tokens for request in requests]
        responses = generator.generate(GenerateRequest(prompts, keys, batch_sampling, begun))
        tokens, logps = collect_responses(responses)
        replies += [
            SampleReply(request.number, ids[: request.most], id_logps[: request.most])
            for request, ids, id_logps in zip(requests, tokens, logps, strict=True)
        ]
    return replies
