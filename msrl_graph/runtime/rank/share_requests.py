"""The requests of a rank for its shares of rows.

Invariant: the ranks of a data-parallel group get the same batches in the same order. The leader of the group requests
each batch from the dock, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import pairwise

from ...ir.graph import Node
from ...ir.instruction import Instruction
from ..dock.client import Client
from ..dock.messages import Batch
from ..process.task import Task
from ..process.task_report import Report
from .context import RankContext


class ShareRequests:
    """The shares that a rank requests from the dock, some of them in advance."""

    def __init__(self, context: RankContext, client: Client, executor: Executor) -> None:
        self.context = context
        self.client = client
        self.executor = executor
        self.requests: dict[str, Future[Batch]] = {}  # by node: the share that was requested in advance
        self.following: dict[str, Node] = {}  # by node: the node that runs next

    def begin(self, instructions: Sequence[Instruction], task: Task) -> None:
        """Request the first share for the instructions that the rank will execute."""
        graph = self.context.plan.graph
        runs = [instruction for instruction in instructions if instruction.op in ("RUN", "AGAIN")]
        # The node after a round of prompts is not requested in advance: another round may come first.
        self.following = {
            earlier.node: graph.node(later.node)
            for earlier, later in pairwise(runs)
            if (earlier.op, later.op) == ("RUN", "RUN")
        }
        if runs and runs[0].op == "RUN":
            self._request(graph.node(runs[0].node), task)

    def batches(self, node: Node, task: Task, report: Report) -> Iterator[Batch]:
        """Yield the batches of a node for this rank's data-parallel group.

        The leader of the group requests each batch from the dock and shares it with the group. While the group computes
        a batch, the leader already requests the next batch. While the group computes the last batch of the node, the
        leader requests the first batch of the node that runs next.
        """
        last = False
        while not last:
            with report.phase("dock"):
                self._request(node, task)
                batch = self.context.share_result(node, lambda: self.client.lines.wait(self.requests.pop(node.name)))
            last = batch.share.last
            following = self.following.get(node.name) if last else node
            if following is not None:
                self._request(following, task)
            yield batch

    def _request(self, node: Node, task: Task) -> None:
        """Request the next rows of a group that this rank leads, if not yet requested."""
        if node.name not in self.requests and self.context.is_group_leader(node):
            group = self.context.plan.placement(node.name).layout.coordinates(self.context.local).dp
            self.requests[node.name] = self.executor.submit(self.client.take_share, node.name, task, group)
