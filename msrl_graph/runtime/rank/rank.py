"""A rank: one process on one device, which runs the nodes of its pool in turn.

Invariant: a rank executes the instruction stream of its pool (the ordered instructions that the compiler has planned)
and nothing else. All ranks of a collective make the same calls in the same order, because they execute the same stream
and share every answer of the dock. (Two pools that reshard weights do so in the same order, which the whole graph
defines.) A layout numbers the ranks of one pool, and torch.distributed numbers the ranks of all pools. The field
`first` of a node's placement is used to convert between the two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from ...analysis.async_schedule import count_opening
from ...analysis.sequences import drawn_name, previous_states, temperature_states
from ...backends.engine_protocols import Shard
from ...data.plan_paths import copy_to_host
from ...ir.attributes import UpdateAttributes
from ...ir.instruction import Instruction, InstructionStream, Walker
from ...ir.plan import Plan
from ..data.columns import ColumnData
from ..dock.client import Client
from ..dock.messages import DockAddress
from ..dock.readers import list_node_reads
from ..process import compute_setup, memory
from ..process.cluster_join import set_collective_interface
from ..process.task import Task
from ..process.task_report import RanksNotJoined, Report
from ..weights.reshard import HostSwap
from ..weights.weight_publication import WeightPublication
from ..weights.weight_send import Sender
from . import object_collectives
from .checkpoints import RankCheckpoints
from .context import NodeBatch, RankContext
from .engine_errors import report_engine_errors
from .engines import Engines
from .generation import GeneratorRole
from .share_requests import ShareRequests
from .training import TrainerRole

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
        engines = rank.engines
        graph = rank.context.plan.graph
        target = graph.node(node)
        task = self.task
        leads = rank.context.is_group_leader(target)
        # The other ranks of a group would only repeat the report of the first one.
        group_report = self.report if leads else Report(self.report.process)
        with self.report.phase(node):
            engines.begin_phase(target)
        for proof in [waiting for (_, dst), waiting in engines.proofs.items() if dst == node and waiting.unprobed]:
            with self.report.phase("proof"), report_engine_errors(rank.context, target, f"in {task.key}"):
                proof.probe()
        # States of the run have one value for all rows; other states came with the rows.
        run_values = {state: task.states[state] for state in previous_states(graph, target) if state in task.states}
        run_values |= {
            drawn_name(state): task.draws[state] for state in temperature_states(graph, target) if state in task.draws
        }
        for batch in rank.shares.batches(target, task, self.report):
            for name, value in run_values.items():
                batch.columns[name] = ColumnData(np.full(len(batch.rows), value, np.float32))
            parts = rank.roles[target.verb].compute(NodeBatch(target, task, batch, group_report))
            while True:
                with self.report.phase(node), report_engine_errors(rank.context, target, f"in {task.key}", batch.rows):
                    columns = next(parts, None)
                if columns is None:
                    break
                if columns and leads:
                    rank.client.put_rows(node, task, columns)
            if leads and not target.writes and len(batch.rows):
                rank.client.report_rows_done(node, task, len(batch.rows))
        with self.report.phase(node):
            engines.end_phase(target)

    def reshard(self, pools: Sequence[str], src: str, dst: str) -> None:
        engines = self.rank.engines
        graph = self.rank.context.plan.graph
        edge = engines.resharders[src, dst]
        number = self.task.number  # the version, unless the edge has a fetch
        if edge.name in self.task.fetches and not isinstance(edge, WeightPublication):
            number = self.task.fetches[edge.name].version
        proof = engines.proofs[src, dst]
        worker = graph.node(src).worker
        frozen = engines.frozen_copies[src, dst]
        generator = engines.generators.get(dst)  # None on a rank of the sending pool, which fills no generator
        if isinstance(edge, WeightPublication) and not self._due(edge, generator is not None):
            return
        merge = engines.merges.get(dst)
        shards: list[Shard] = []

        def allocate() -> list[Shard]:
            shards[:] = [*generator.allocate(), *(merge.allocate() if merge else ())] if generator else []
            proof.check_bound(shards)
            frozen.fetch()
            return shards

        with report_engine_errors(self.rank.context, graph.node(dst), f"in {edge.name} in {self.task.key}"):
            with self.report.phase("reshard"):
                if worker in engines.swaps:
                    engines.swaps[worker].wait()
            with self.report.phase("proof"):
                proof.send(number, again=not isinstance(edge, WeightPublication))
                if isinstance(edge, Sender):
                    proof.settle()
            with self.report.phase("reshard"):
                if not isinstance(edge, WeightPublication):
                    edge.run(allocate)
                elif generator:
                    number = self.task.fetches[edge.name].version
                    if (src, dst) in engines.sparse and edge.fetched:  # the previous version is still in memory
                        engines.release_generation(dst)
                    edge.fetch(number, allocate)
                else:
                    last = self.task.fetches.get(edge.name)
                    edge.publish(number, last.fetch_count if last else 0)
            if generator:
                with self.report.phase("reshard"):
                    frozen.store(shards)
                with self.report.phase("proof"):
                    proof.digest_changing(shards, merge.adapted if merge else ())
                if merge:
                    with self.report.phase("reshard"):
                        merge.merge(shards)
                    with self.report.phase("proof"):
                        proof.check_merged(number, shards, merge.adapted)
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
        self.rank.engines.release_generation(node)

    def swap_in(self, pool: str, node: str) -> None:
        self._swap(node).start_in()

    def wait(self, pool: str, node: str) -> None:
        swap = self._swap(node)
        with self.report.phase("swap in"):
            swap.wait()
        self.report.add_seconds("swap in copy", swap.take_seconds())

    def _swap(self, node: str) -> HostSwap:
        return self.rank.engines.swaps[self.rank.context.plan.graph.node(node).worker]

    def again(self, pool: str, node: str, rounds: int) -> bool:
        self.report.rounds = rounds
        return self.rank.client.again(node, self.task, rounds)


class Rank:
    """A rank, which belongs to one of the program's pools of devices.

    - `generation`, `training`: compute the nodes of the rank's pool. `roles`: the one that computes a node, by verb.
    - `client`, `shares`: the connection to the dock, and the requests for rows.
    """

    runner: type[InstructionRunner] = InstructionRunner
    client: Client
    shares: ShareRequests

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.engines = Engines(context)
        self.checkpoints = RankCheckpoints(context, self.engines)
        self.generation = GeneratorRole(context, self.engines)
        self.training = TrainerRole(context, self.engines)
        self.roles: dict[str, GeneratorRole | TrainerRole] = {"generate": self.generation}
        self.roles |= dict.fromkeys(("infer", "update"), self.training)

    def address(self) -> tuple[str, int]:
        """Open the store through which all ranks find each other (called on rank 0).

        Returns the name of the host that has the store, and a port that the system chose.
        """
        host = set_collective_interface(self.context.plan.cluster)
        self.context.store = compute_setup.open_store(host)
        return host, self.context.store.port

    def start(self, address: tuple[str, int], dock: DockAddress) -> None:
        """Join the other ranks and build the engines."""
        context = self.context
        plan = context.plan = copy_to_host(context.plan, data=False)
        kind = plan.cluster.device.kind
        set_collective_interface(plan.cluster)
        context.device.claim()
        host = plan.cluster.host(context.rank)
        self.client = Client(f"rank {context.rank}", list_node_reads(plan), dock, host)
        object_collectives.seal_with(dock.token)
        # Later than the dock's deadline: the dock reports what each process waits for, a collective just times out.
        deadline = timedelta(seconds=plan.docks.deadline + 60)
        world = plan.cluster.devices
        try:
            context.store = context.store or TCPStore(*address, is_master=False, timeout=deadline)
            dist.init_process_group(
                kind.backends(), store=context.store, rank=context.rank, world_size=world, timeout=deadline
            )
        except RuntimeError as error:  # dist.DistError is a RuntimeError, and so are gloo's errors
            reason = str(error).strip().splitlines()[0]
            raise RanksNotJoined(f"rank {context.rank} did not find the other ranks at its start: {reason}") from error
        self.shares = ShareRequests(context, self.client, ThreadPoolExecutor(1))
        self.build()

    def build(self) -> None:
        """Build the engines and what the roles need; a collective of all ranks."""
        self.generation.start_agents()
        self.engines.build()
        self.generation.build()

    def run(self, task: Task, measure: bool) -> Report:
        """Execute those instructions of this rank's pool that a task requests.

        If `measure` is true, the report has the memory before, during and after each instruction.
        """
        plan = self.context.plan
        report = Report(f"rank {self.context.rank}")
        self.client.wait_seconds = self.client.move_seconds = 0.0
        self.training.begin_task()
        here = self.context.pool.name if self.context.pool else ""
        streams = [stream for stream in plan.schedule if (stream.pool, stream.task) == (here, task.name)]
        instructions = [
            instruction
            for stream in streams
            for instruction in select_instructions(plan, stream, task)
            if instruction.op != "RUN" or UpdateAttributes.of(plan.graph.node(instruction.node)).due(task.number)
        ]
        self.shares.begin(instructions, task)

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
                for follower in self.engines.followers.values():
                    follower.follow(task.number)
        if measure:
            _record_bytes(report, "after", memory.live_bytes())
        self.client.flush(task, report)
        report.seconds["dock wait"] = self.client.wait_seconds
        report.seconds["dock move"] = self.client.move_seconds
        return report


def select_instructions(plan: Plan, stream: InstructionStream, task: Task) -> Sequence[Instruction]:
    """Return those instructions of a pool's `stream` that the task requests."""
    first = count_opening(plan, stream) if task.part != "whole" else 0
    return stream.instructions[:first] if task.part == "opening" else stream.instructions[first:]


def _record_bytes(report: Report, when: str, sizes: dict[str, int]) -> None:
    for place, size in sizes.items():
        report.bytes[f"{when}, {place}"] = size
