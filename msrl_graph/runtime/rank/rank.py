"""A rank: one process on one device, which runs the nodes of its pool in turn.

Invariant: a rank executes the instruction stream of its pool (the ordered instructions that the compiler has planned)
and nothing else. All ranks of a collective make the same calls in the same order, because they execute the same stream
and share every answer of the dock. (Two pools that reshard weights do so in the same order, which the whole graph
defines.) A layout numbers the ranks of one pool, and torch.distributed numbers the ranks of all pools. The field
`first` of a node's placement is used to convert between the two numbers.
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

from ...analysis.async_schedule import count_opening
from ...analysis.sequences import drawn_name, previous_states, temperature_states
from ...backends.devices import TorchDevice
from ...backends.engine_protocols import Shard
from ...data.plan_paths import copy_to_host
from ...hardware import visibility_masks
from ...ir.attributes import UpdateAttributes
from ...ir.graph import Node
from ...ir.instruction import Instruction, InstructionStream, Walker
from ...ir.plan import Plan, from_json
from ..data.columns import ColumnData, ColumnRows
from ..dock.client import Client
from ..dock.messages import Batch, DockAddress
from ..dock.readers import list_node_reads
from ..process import compute_setup, memory
from ..process.cluster_join import set_collective_interface
from ..process.task import Task
from ..process.task_report import RanksNotJoined, Report
from ..weights.reshard import HostSwap
from ..weights.weight_publication import WeightPublication
from ..weights.weight_send import Sender
from . import object_collectives
from .engine_errors import report_engine_errors
from .generation import Generation
from .training import Training

# The instructions that take time. Only these instructions are reported, since a report costs a message.
REPORTED = ("RESHARD", "RUN")


@dataclass(frozen=True)
class InstructionRunner(Walker):
    """The methods that execute the instructions of a task on a rank."""

    rank: Rank
    task: Task
    report: Report

    def run(self, pool: str, node: str) -> None:
        rank = self.rank
        target = self.rank.plan.graph.node(node)
        # The other ranks of a group would only repeat the report of the first one.
        group_report = self.report if rank._is_group_leader(target) else Report(self.report.process)
        with self.report.phase(node):
            rank.fetch_weights(target)
        for proof in [waiting for (_, dst), waiting in rank.proofs.items() if dst == node and waiting.unprobed]:
            with self.report.phase("proof"), report_engine_errors(rank.plan, target, rank.rank, f"in {self.task.key}"):
                proof.probe()
        for batch in rank._batches(target, self.task, self.report):
            graph = rank.plan.graph
            task = self.task
            # States of the run have one value for all rows; other states came with the rows.
            run_values = {state: task.states[state] for state in previous_states(graph, target) if state in task.states}
            run_values |= {
                drawn_name(state): task.draws[state]
                for state in temperature_states(graph, target)
                if state in task.draws
            }
            for name, value in run_values.items():
                batch.columns[name] = ColumnData(np.full(len(batch.rows), value, np.float32))
            parts = rank.compute(target, self.task, batch, group_report)
            while True:
                with (
                    self.report.phase(node),
                    report_engine_errors(rank.plan, target, rank.rank, f"in {self.task.key}", batch.rows),
                ):
                    columns = next(parts, None)
                if columns is None:
                    break
                if columns and rank._is_group_leader(target):
                    rank.client.put_rows(node, self.task, columns)
            if rank._is_group_leader(target) and not target.writes and len(batch.rows):
                rank.client.report_rows_done(node, self.task, len(batch.rows))
        rank.release_weights(target)

    def reshard(self, pools: Sequence[str], src: str, dst: str) -> None:
        rank = self.rank
        edge = self.rank.resharders[src, dst]
        number = self.task.number  # the version, unless the edge has a fetch
        if edge.name in self.task.fetches and not isinstance(edge, WeightPublication):
            number = self.task.fetches[edge.name].version
        proof = rank.proofs[src, dst]
        worker = rank.plan.graph.node(src).worker
        frozen = rank.frozen_copies[src, dst]
        generator = rank.generators.get(dst)  # None on a rank of the sending pool, which fills no generator
        if isinstance(edge, WeightPublication) and not self._due(edge, generator is not None):
            return
        shards: list[Shard] = []

        def allocate() -> list[Shard]:
            shards[:] = generator.allocate() if generator else []
            proof.check_bound(shards)
            frozen.fetch()
            return shards

        with report_engine_errors(
            rank.plan, rank.plan.graph.node(dst), rank.rank, f"in {edge.name} in {self.task.key}"
        ):
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
                    if (src, dst) in rank.sparse and edge.fetched:  # the previous version is still in memory
                        generator.release()
                    edge.fetch(number, allocate)
                else:
                    last = self.task.fetches.get(edge.name)
                    edge.publish(number, last.fetch_count if last else 0)
            if generator:
                with self.report.phase("reshard"):
                    frozen.store(shards)
                with self.report.phase("proof"):
                    proof.digest_experts(shards)
                with self.report.phase("reshard"):
                    generator.filled()
                with self.report.phase("proof"):
                    proof.check(number, shards)
        # For a publication, the seconds of its sending thread since the previous task are included.
        step_seconds = edge.seconds
        edge.seconds = {}
        for step, seconds in step_seconds.items():
            self.report.add_seconds(f"reshard {step}", seconds)
        self.report.bytes[edge.name] = edge.moved

    def _due(self, edge: WeightPublication, fetches: bool) -> bool:
        """Return whether this rank must send or fetch weights over an edge in this task.

        If `fetches` is true, the rank receives weights. It must fetch if it has made fewer fetches over the edge than
        the driver has ordered. If `fetches` is false, the rank sends weights. It must send if the task's `sends`
        contains the edge.
        """
        return self.task.fetches[edge.name].fetch_count > edge.fetched if fetches else edge.name in self.task.sends

    def release(self, pool: str, node: str) -> None:
        self.rank.generators[node].release()

    def swap_in(self, pool: str, node: str) -> None:
        self._swap(node).start_in()

    def wait(self, pool: str, node: str) -> None:
        swap = self._swap(node)
        with self.report.phase("swap in"):
            swap.wait()
        self.report.add_seconds("swap in copy", swap.take_seconds())

    def _swap(self, node: str) -> HostSwap:
        return self.rank.swaps[self.rank.plan.graph.node(node).worker]

    def again(self, pool: str, node: str, rounds: int) -> bool:
        self.report.rounds = rounds
        return self.rank.client.again(node, self.task, rounds)


class Rank(Training, Generation):
    """A rank, which belongs to one of the program's pools of devices."""

    runner: type[InstructionRunner] = InstructionRunner

    def __init__(self, plan: str, rank: int, threads: int, devices: Mapping[str, Sequence[str]]) -> None:
        """Set up the process of rank number `rank`; `plan` is the plan as JSON.

        `devices` maps each Ray resource to the indices of the devices on this host that Ray assigned to the process.
        """
        compute_setup.prepare_process(threads)
        super().__init__(from_json(plan), rank)
        kind = self.plan.cluster.device.kind
        self.device = TorchDevice(
            kind, visibility_masks.torch_index(devices.get(kind.resource, ()), os.environ.get(kind.visible))
        )

    def address(self) -> tuple[str, int]:
        """Open the store through which all ranks find each other (called on rank 0).

        Returns the name of the host that has the store, and a port that the system chose.
        """
        host = set_collective_interface(self.plan.cluster)
        self.store = compute_setup.open_store(host)
        return host, self.store.port

    def start(self, address: tuple[str, int], dock: DockAddress) -> None:
        """Join the other ranks and build the engines."""
        plan = self.plan = copy_to_host(self.plan, data=False)
        host = plan.cluster.host(self.rank)
        kind = plan.cluster.device.kind
        set_collective_interface(plan.cluster)
        self.device.claim()
        self.client = Client(f"rank {self.rank}", list_node_reads(plan), dock, host)
        object_collectives.seal_with(dock.token)
        # Later than the dock's deadline: the dock reports what each process waits for, a collective just times out.
        deadline = timedelta(seconds=plan.docks.deadline + 60)
        world = plan.cluster.devices
        try:
            self.store = self.store or TCPStore(*address, is_master=False, timeout=deadline)
            dist.init_process_group(
                kind.backends(), store=self.store, rank=self.rank, world_size=world, timeout=deadline
            )
        except RuntimeError as error:  # dist.DistError is a RuntimeError, and so are gloo's errors
            reason = str(error).strip().splitlines()[0]
            raise RanksNotJoined(f"rank {self.rank} did not find the other ranks at its start: {reason}") from error
        self.request_executor = ThreadPoolExecutor(1)
        self.requests: dict[str, Future[Batch]] = {}  # by node: the share that was requested from the dock in advance
        self.build()

    def run(self, task: Task, measure: bool) -> Report:
        """Execute those instructions of this rank's pool that a task requests.

        If `measure` is true, the report has the memory before, during and after each instruction.
        """
        report = Report(f"rank {self.rank}")
        self.client.wait_seconds = self.client.move_seconds = 0.0
        self.stepped = False
        here = self.pool.name if self.pool else ""
        streams = [stream for stream in self.plan.schedule if (stream.pool, stream.task) == (here, task.name)]
        instructions = [
            instruction
            for stream in streams
            for instruction in select_instructions(self.plan, stream, task)
            if instruction.op != "RUN" or UpdateAttributes.of(self.plan.graph.node(instruction.node)).due(task.number)
        ]
        runs = [instruction for instruction in instructions if instruction.op in ("RUN", "AGAIN")]
        # The node after a round of prompts is not requested in advance: another round may come first.
        self.following = {
            earlier.node: self.plan.graph.node(later.node)
            for earlier, later in pairwise(runs)
            if (earlier.op, later.op) == ("RUN", "RUN")
        }
        if runs and runs[0].op == "RUN" and self._is_group_leader(first := self.plan.graph.node(runs[0].node)):
            self._request_batch(first, task)

        @contextmanager
        def around(step: Instruction) -> Iterator[None]:
            if step.op in REPORTED:
                self.client.report_activity(f"{step.op} {step.node} in {task.key}")
            if not measure or step.op == "AGAIN":
                yield
                return
            with memory.Peak() as peak:
                yield
            _record_bytes(report, f"before {step.op} {step.node}", peak.before)
            _record_bytes(report, f"peak of {step.op} {step.node}", peak.peak)

        self.client.walk(here, instructions, task, self.runner(self, task, report), around)
        if task.trains and task.part != "opening":
            with report.phase("follow"):
                for follower in self.followers.values():
                    follower.follow(task.number)
        if measure:
            _record_bytes(report, "after", memory.live_bytes())
        self.client.flush(task, report)
        report.seconds["dock wait"] = self.client.wait_seconds
        report.seconds["dock move"] = self.client.move_seconds
        return report

    def compute(self, node: Node, task: Task, batch: Batch, report: Report) -> Iterator[dict[str, ColumnRows]]:
        """Yield the columns that a node writes for a batch, in chunks.

        Each chunk is yielded as soon as it is computed.
        """
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
        """Yield the batches of a node for this rank's data-parallel group.

        The leader of the group requests each batch from the dock and shares it with the group. While the group computes
        a batch, the leader already requests the next batch. While the group computes the last batch of the node, the
        leader requests the first batch of the node that runs next.
        """
        last = False
        while not last:
            with report.phase("dock"):
                if self._is_group_leader(node):
                    self._request_batch(node, task)
                batch = self._share_result(node, self._wait_for_batch, node)
            last = batch.share.last
            following = self.following.get(node.name) if last else node
            if following is not None and self._is_group_leader(following):
                self._request_batch(following, task)
            yield batch

    def _wait_for_batch(self, node: Node) -> Batch:
        return self.client.lines.wait(self.requests.pop(node.name))

    def _request_batch(self, node: Node, task: Task) -> None:
        """Request the group's next rows for a node from the dock, if not yet requested."""
        if node.name not in self.requests:
            group = self.plan.placement(node.name).layout.coordinates(self.local).dp
            self.requests[node.name] = self.request_executor.submit(self.client.take_share, node.name, task, group)


def select_instructions(plan: Plan, stream: InstructionStream, task: Task) -> Sequence[Instruction]:
    """Return those instructions of a pool's `stream` that the task requests."""
    first = count_opening(plan, stream) if task.part != "whole" else 0
    return stream.instructions[:first] if task.part == "opening" else stream.instructions[first:]


def _record_bytes(report: Report, when: str, sizes: dict[str, int]) -> None:
    for place, size in sizes.items():
        report.bytes[f"{when}, {place}"] = size


__all__ = ["Rank"]
