"""A rank: one process on one device, hosting in turn the nodes of its pool.

Invariant: a rank does what its pool's instruction stream says and nothing else; all ranks of a collective make the same
calls in the same order, since they walk the same stream (pools that reshard meet in one order of the whole graph) and
share every answer of the dock. Layouts number the ranks of a pool, torch.distributed those of all pools: `first` lies
between.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import numpy as np
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from ...backends.devices import TorchDevice
from ...backends.spec import Shard
from ...hardware import visibility_masks
from ...ir.async_schedule import opening
from ...ir.attributes import UpdateAttributes
from ...ir.graph import Node
from ...ir.instruction import Instruction, InstructionStream, Walker
from ...ir.plan import Plan, from_json
from ...ir.plan_paths import here
from ...ir.sequences import as_drawn, heating, latest
from ..data.columns import ColumnData, ColumnRows
from ..dock.client import Client
from ..dock.messages import Batch, DockAddress
from ..dock.readers import readers
from ..process import compute_setup, memory
from ..process.cluster_join import speak
from ..process.task import Task
from ..process.task_report import RanksNotJoined, Report
from ..weights.reshard import HostSwap
from ..weights.weight_publication import WeightPublication
from ..weights.weight_send import Sender
from . import object_collectives
from .engine_errors import telling
from .generation import Generation
from .training import Training

# The instructions that take time: what a process tells of itself costs a message.
TOLD = ("RESHARD", "RUN")


@dataclass(frozen=True)
class InstructionRunner(Walker):
    """What a rank does at the instructions of a task."""

    rank: Rank
    task: Task
    report: Report

    def run(self, pool: str, node: str) -> None:
        rank = self.rank
        found = self.rank.plan.graph.node(node)
        # The other ranks of a group would only repeat what its first one tells.
        told = self.report if rank._first(found) else Report(self.report.process)
        with self.report.phase(node):
            rank.fetch(found)
        for proof in [p for (_, dst), p in rank.proofs.items() if dst == node and p.unprobed]:
            with self.report.phase("proof"), telling(rank.plan, found, rank.rank, f"in {self.task.key}"):
                proof.probe()
        for batch in rank._batches(found, self.task, self.report):
            graph = rank.plan.graph
            task = self.task
            # Of the run: each row has the same; others came with the rows.
            same = {s: task.states[s] for s in latest(graph, found) if s in task.states}
            same |= {as_drawn(s): task.draws[s] for s in heating(graph, found) if s in task.draws}
            for name, value in same.items():
                batch.columns[name] = ColumnData(np.full(len(batch.rows), value, np.float32))
            parts = rank.compute(found, self.task, batch, told)
            while True:
                with self.report.phase(node), telling(rank.plan, found, rank.rank, f"in {self.task.key}", batch.rows):
                    columns = next(parts, None)
                if columns is None:
                    break
                if columns and rank._first(found):
                    rank.client.put(node, self.task, columns)
            if rank._first(found) and not found.writes and len(batch.rows):
                rank.client.did(node, self.task, len(batch.rows))
        rank.leave(found)

    def reshard(self, pools: Sequence[str], src: str, dst: str) -> None:
        rank = self.rank
        edge = self.rank.resharders[src, dst]
        number = self.task.number  # the version, unless the iteration is yet to come
        if edge.name in self.task.fetches and not isinstance(edge, WeightPublication):
            number = self.task.fetches[edge.name].version
        proof = rank.proofs[src, dst]
        worker = rank.plan.graph.node(src).worker
        generator = rank.generators.get(dst)  # none on a rank of a pool that sends: it has nothing to fill
        if isinstance(edge, WeightPublication) and not self._due(edge, generator is not None):
            return
        shards: list[Shard] = []

        def allocate() -> list[Shard]:
            shards[:] = generator.allocate() if generator else []
            proof.bound(shards)
            return shards

        with telling(rank.plan, rank.plan.graph.node(dst), rank.rank, f"in {edge.name} in {self.task.key}"):
            with self.report.phase("reshard"):
                if worker in rank.swaps:
                    rank.swaps[worker].wait()
            with self.report.phase("proof"):
                proof.send(number, again=not isinstance(edge, WeightPublication))
                if isinstance(edge, Sender):
                    proof.settle()
            with self.report.phase("reshard"):
                if not isinstance(edge, WeightPublication):
                    edge.run(allocate)
                elif generator:
                    number = self.task.fetches[edge.name].version
                    if (src, dst) in rank.sparse and edge.fetched:  # what was fetched before is still there
                        generator.release()
                    edge.fetch(number, allocate)
                else:
                    last = self.task.fetches.get(edge.name)
                    edge.publish(number, last.told if last else 0)
            if generator:
                with self.report.phase("proof"):
                    proof.packed(shards)
                with self.report.phase("reshard"):
                    generator.filled()
                with self.report.phase("proof"):
                    proof.check(number, shards)
        taken, edge.seconds = edge.seconds, {}  # of what a copy is sent from, since the last time
        for step, seconds in taken.items():
            self.report.more(f"reshard {step}", seconds)
        self.report.bytes[edge.name] = edge.moved

    def _due(self, edge: WeightPublication, fetches: bool) -> bool:
        """Whether this version is sent, and of whoever fetches, whether it does not have it already."""
        return self.task.fetches[edge.name].told > edge.fetched if fetches else edge.name in self.task.sends

    def release(self, pool: str, node: str) -> None:
        self.rank.generators[node].release()

    def swap_in(self, pool: str, node: str) -> None:
        self._swap(node).start_in()

    def wait(self, pool: str, node: str) -> None:
        swap = self._swap(node)
        with self.report.phase("swap in"):
            swap.wait()
        self.report.more("swap in copy", swap.taken())

    def _swap(self, node: str) -> HostSwap:
        return self.rank.swaps[self.rank.plan.graph.node(node).worker]

    def again(self, pool: str, node: str, rounds: int) -> bool:
        self.report.rounds = rounds
        return self.rank.client.again(node, self.task, rounds)


class Rank(Training, Generation):
    """A rank of one of the pools of devices."""

    doing: type[InstructionRunner] = InstructionRunner

    def __init__(self, plan: str, rank: int, threads: int, given: Mapping[str, Sequence[str]]) -> None:
        """`given`: by resource the devices that Ray has given this process, by their host's numbers."""
        compute_setup.prepare(threads)
        super().__init__(from_json(plan), rank)
        kind = self.plan.cluster.device.kind
        self.device = TorchDevice(
            kind, visibility_masks.index(given.get(kind.resource, ()), os.environ.get(kind.visible))
        )

    def address(self) -> tuple[str, int]:
        """Opens the meeting point of all ranks (called on rank 0): its host and a port that the system chose."""
        host = speak(self.plan.cluster)
        self.store = compute_setup.meeting(host)
        return host, self.store.port

    def start(self, address: tuple[str, int], way: DockAddress) -> None:
        """Joins the other ranks and builds the engines."""
        plan = self.plan = here(self.plan, data=False)
        host = plan.cluster.host(self.rank)
        kind = plan.cluster.device.kind
        speak(plan.cluster)
        self.device.claim()
        self.client = Client(f"rank {self.rank}", readers(plan), way, host)
        object_collectives.seal_with(way.token)
        # Later than the dock's own deadline, which says who waits for what; a collective can only say that it waited.
        deadline = timedelta(seconds=plan.docks.deadline + 60)
        world = plan.cluster.devices
        try:
            self.store = self.store or TCPStore(*address, is_master=False, timeout=deadline)
            dist.init_process_group(
                kind.backends(), store=self.store, rank=self.rank, world_size=world, timeout=deadline
            )
        except RuntimeError as error:  # dist.DistError is one, and so is what gloo raises
            said = str(error).strip().splitlines()[0]
            raise RanksNotJoined(f"rank {self.rank} has not found the other ranks as it started: {said}") from error
        self.asking = ThreadPoolExecutor(1)
        self.asked: dict[str, Future[Batch]] = {}  # by node: the share that the dock was asked for beside what ran
        self.build()

    def run(self, task: Task, measure: bool) -> Report:
        """Walks the stream of this pool for one task, or the part of it that is asked for."""
        report = Report(f"rank {self.rank}")
        self.client.waited = self.client.moving = 0.0
        self.stepped = False
        here = self.pool.name if self.pool else ""
        streams = [s for s in self.plan.schedule if (s.pool, s.task) == (here, task.name)]
        instructions = [
            i
            for stream in streams
            for i in part(self.plan, stream, task)
            if i.op != "RUN" or UpdateAttributes.of(self.plan.graph.node(i.node)).due(task.number)
        ]
        runs = [i for i in instructions if i.op in ("RUN", "AGAIN")]
        # What comes after a round of prompts is not asked for ahead: another round may come first.
        self.following = {
            a.node: self.plan.graph.node(b.node) for a, b in pairwise(runs) if (a.op, b.op) == ("RUN", "RUN")
        }
        if runs and runs[0].op == "RUN" and self._first(first := self.plan.graph.node(runs[0].node)):
            self._ask(first, task)

        @contextmanager
        def around(step: Instruction) -> Iterator[None]:
            if step.op in TOLD:
                self.client.at(f"{step.op} {step.node} in {task.key}")
            if not measure or step.op == "AGAIN":
                yield
                return
            with memory.Peak() as peak:
                yield
            _note(report, f"before {step.op} {step.node}", peak.before)
            _note(report, f"peak of {step.op} {step.node}", peak.peak)

        self.client.walk(here, instructions, task, self.doing(self, task, report), around)
        if task.trains and task.part != "opening":
            with report.phase("follow"):
                for follower in self.followers.values():
                    follower.follow(task.number)
        if measure:
            _note(report, "after", memory.held())
        self.client.flush(task, report)
        report.seconds["dock wait"] = self.client.waited
        report.seconds["dock move"] = self.client.moving
        return report

    def compute(self, node: Node, task: Task, batch: Batch, report: Report) -> Iterator[dict[str, ColumnRows]]:
        """What a node writes of a batch, in parts as they are ready."""
        match node.verb:
            case "generate":
                yield from self._generate(node, task, batch, report)
            case "infer":
                yield self._infer(node, task, batch, report)
            case "update":
                self._update(node, task, batch, report)
            case verb:
                raise AssertionError(f"no rank has the verb `{verb}`")

    def _batches(self, node: Node, task: Task, report: Report) -> Iterator[Batch]:
        """What the dock hands this rank's group, until it closes the iteration: the first rank asks, the group shares
        the answer. While it computes a batch the next is asked for, the next node's after the last."""
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
        return self.client.lines.wait(self.asked.pop(node.name))

    def _ask(self, node: Node, task: Task) -> None:
        """Asks the dock for the node's next share, unless that is under way."""
        if node.name not in self.asked:
            group = self.plan.placement(node.name).layout.coordinates(self.local).dp
            self.asked[node.name] = self.asking.submit(self.client.take, node.name, task, group)


def part(plan: Plan, stream: InstructionStream, task: Task) -> Sequence[Instruction]:
    """What is asked for of a pool's stream."""
    first = opening(plan, stream) if task.part != "whole" else 0
    return stream.instructions[:first] if task.part == "opening" else stream.instructions[first:]


def _note(report: Report, when: str, held: dict[str, int]) -> None:
    for place, size in held.items():
        report.bytes[f"{when}, {place}"] = size


__all__ = ["Rank"]
