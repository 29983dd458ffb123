"""A rank: one process on one device, hosting in turn the states of its pool.

Invariant: a rank does what its pool's instruction stream says and nothing else; all ranks of a collective make the same calls in the
same order, since they walk the same stream (pools that reshard meet in one order of the whole graph) and share every answer of the dock.
Layouts number the ranks of a pool, torch.distributed those of all pools: `first` lies between.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import ray
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from ...ir.graph import Node
from ...ir.plan import Instruction, from_json
from ..data.columns import Column
from ..dock.client import Client
from ..dock.controller import Batch
from ..dock.readers import home, readers
from ..process import computing, memory
from ..process.joining import speak
from ..process.report import Report
from ..process.surroundings import settle
from ..process.task import Task
from .generation import Generation
from .training import Training, due

# The instructions that take time: what a process tells of itself costs a message.
TOLD = ("RESHARD", "RUN")


class Rank(Training, Generation):
    """A rank of one of the pools of devices."""

    def __init__(self, plan: str, rank: int, threads: int, folder: str, logs: str) -> None:
        settle(folder, logs, f"rank {rank}")
        computing.prepare(threads)
        super().__init__(from_json(plan), rank)
        self.store: Any = None

    def address(self) -> tuple[str, int]:
        """Opens the meeting point of all ranks (called on rank 0): its host and a port that the system chose."""
        host = ray.util.get_node_ip_address()
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def start(self, address: tuple[str, int], controllers: dict[str, str], warehouses: list[str]) -> None:
        """Joins the other ranks and builds the engines."""
        plan = self.plan
        host = plan.cluster.host(self.rank)
        speak(plan.cluster.nodes)
        self.client = Client(f"rank {self.rank}", readers(plan), controllers, warehouses, host, home(plan, host, self.rank))
        # Later than the dock's own deadline, which says who waits for what; a collective can only say that it waited.
        deadline = timedelta(seconds=plan.docks.deadline + 60)
        store = self.store or TCPStore(*address, is_master=False, timeout=deadline)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=plan.cluster.devices, timeout=deadline)
        self.asking = ThreadPoolExecutor(1)
        self.asked: dict[str, Future[Batch]] = {}  # by node: the share that the dock was asked for beside what ran
        self.build()

    # The instructions, by name.

    def run(self, task: Task, measure: bool) -> Report:
        """Walks the stream of this pool for one task."""
        report = Report(f"rank {self.rank}")
        self.client.waited = self.client.moving = 0.0
        self.stepped = False
        here = self.pool.name if self.pool else ""
        streams = [s.instructions for s in self.plan.schedule if (s.pool, s.task) == (here, task.name)]
        instructions = [i for stream in streams for i in stream if i.op != "RUN" or due(self.plan.graph.node(i.node), task.number)]
        runs = [i for i in instructions if i.op in ("RUN", "AGAIN")]
        # What comes after a round of prompts is not asked for ahead: another round may come first.
        self.following = {a.node: self.plan.graph.node(b.node) for a, b in pairwise(runs) if (a.op, b.op) == ("RUN", "RUN")}
        if runs and runs[0].op == "RUN" and self._first(first := self.plan.graph.node(runs[0].node)):
            self._ask(first, task)
        for instruction in self.client.walk(instructions, task):
            if instruction.op in TOLD:
                self.client.at(f"{instruction.op} {instruction.node} in {task.key}")
            act = getattr(self, f"_{instruction.op.lower()}")
            if not measure:
                act(instruction, task, report)
                continue
            name = f"{instruction.op} {instruction.node}"
            _note(report, f"before {name}", memory.held())
            with memory.Peak() as peak:
                act(instruction, task, report)
            _note(report, f"peak of {name}", peak.peak)
        if measure:
            _note(report, "after", memory.held())
        report.here = self.client.flush(task)
        report.seconds["dock wait"], report.seconds["dock move"] = self.client.waited, self.client.moving
        return report

    def _reshard(self, instruction: Instruction, task: Task, report: Report) -> None:
        edge, worker = self.resharders[instruction.node, instruction.other], self.plan.graph.node(instruction.node).worker
        with report.phase("reshard"):
            if worker in self.swaps:
                self.swaps[worker].wait()
            # A rank of the pool that sends has nothing to fill.
            edge.run(self.generators[instruction.other].allocate if instruction.other in self.generators else list)
        for step, seconds in edge.seconds.items():
            report.more(f"reshard {step}", seconds)
        report.bytes[edge.name] = edge.moved

    def _release(self, instruction: Instruction, task: Task, report: Report) -> None:
        self.generators[instruction.node].release()

    def _swap_in(self, instruction: Instruction, task: Task, report: Report) -> None:
        self.swaps[self.plan.graph.node(instruction.node).worker].start_in()

    def _wait(self, instruction: Instruction, task: Task, report: Report) -> None:
        swap = self.swaps[self.plan.graph.node(instruction.node).worker]
        with report.phase("swap in"):
            swap.wait()
        report.more("swap in copy", swap.taken())

    def _run(self, instruction: Instruction, task: Task, report: Report) -> None:
        node = self.plan.graph.node(instruction.node)
        # The other ranks of a group would only repeat what its first one tells.
        told = report if self._first(node) else Report(report.process)
        for batch in self._batches(node, task, report):
            for name in node.states:
                if name in task.states:  # of the run: each row has the same; others came with the rows
                    batch.columns[name] = Column(np.full(len(batch.rows), task.states[name], np.float32))
            with report.phase(node.name):
                columns = getattr(self, f"_{node.verb}")(node, task, batch, told)
            if columns and self._first(node):
                self.client.put(node.name, task, columns)

    def _batches(self, node: Node, task: Task, report: Report) -> Iterator[Batch]:
        """What the dock hands this rank's group, until it closes the iteration: the first rank asks, the group shares the answer. While
        it computes a batch the next is asked for, the next node's after the last."""
        last = False
        while not last:
            with report.phase("dock"):
                if self._first(node):
                    self._ask(node, task)
                batch = self._shared(node, self._answered, node)
            last = batch.share.last
            following = self.following.get(node.name) if last else node
            if following is not None and self._first(following):
                self._ask(following, task)
            yield batch

    def _answered(self, node: Node) -> Batch:
        return self.asked.pop(node.name).result()

    def _ask(self, node: Node, task: Task) -> None:
        """Asks the dock for the node's next share, unless that is under way."""
        if node.name not in self.asked:
            group = self.plan.placement(node.name).layout.coordinates(self.local).dp
            self.asked[node.name] = self.asking.submit(self.client.take, node.name, task, group)


def _note(report: Report, when: str, held: dict[str, int]) -> None:
    for place, size in held.items():
        report.bytes[f"{when}, {place}"] = size


__all__ = ["Rank"]
