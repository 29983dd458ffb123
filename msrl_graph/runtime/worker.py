"""A rank: one process on one device, hosting in turn the states of all workers that are placed on it.

Invariant: a rank does what its pool's instruction stream says and nothing else; all ranks of a collective make the same calls in the
same order, since they walk the same stream and share every answer of the dock.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh

from ..backends import transformer
from ..engine import Generator, Sampling, Trainer
from ..graph import Node
from ..layout import Layout
from ..plan import Instruction, Plan, from_json
from . import loss, memory
from .actors import Client, Task, settle
from .columns import Array, Column, offsets_of, ragged
from .dock import Batch, expand, home, readers
from .packing import flat, pack
from .report import Report
from .reshard import Resharder, Side, Swap


@ray.remote
class Rank:
    """A rank of the pool `devices`."""

    def __init__(self, plan: str, rank: int, threads: int, folder: str) -> None:
        settle(folder)
        # gloo and torch would otherwise each take a thread for every core of the machine.
        torch.set_num_threads(threads)
        self.plan: Plan = from_json(plan)
        self.rank = rank
        self.seed = self.plan.deploy.run.seed
        self.store: Any = None

    def address(self) -> tuple[str, int]:
        """Opens the meeting point of all ranks (called on rank 0): its host and a port that the system chose."""
        host = ray.util.get_node_ip_address()
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def start(self, address: tuple[str, int], controllers: dict[str, Any], warehouses: list[Any]) -> int:
        """Joins the other ranks and builds the engines; this process's id."""
        plan = self.plan
        host = plan.cluster.host(self.rank)
        self.client = Client(readers(plan), controllers, warehouses, host, home(plan, host, self.rank))
        # Later than the dock's own deadline, which says who waits for what; a collective can only say that it waited.
        deadline = timedelta(seconds=plan.docks.deadline + 60)
        store = self.store or TCPStore(*address, is_master=False, timeout=deadline)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=plan.cluster.devices, timeout=deadline)
        self.meshes: dict[tuple[int, int, int], DeviceMesh] = {}
        self.trainers: dict[str, Trainer] = {}  # by worker
        self.generators: dict[str, Generator] = {}  # by node
        self.swaps: dict[str, Swap] = {}  # by worker
        self.resharders: dict[tuple[str, str], Resharder] = {}
        self.steps: dict[str, int] = {}  # optimizer steps taken, by update
        self.asking = ThreadPoolExecutor(1)
        self.asked: dict[str, Future[Batch]] = {}  # by node: the share that the dock was asked for beside what ran
        for placement in plan.placements:
            if placement.pool != "functions":
                self._build(plan.graph.node(placement.node))
        for edge in plan.reshards:
            self._build_reshard(edge.src, edge.dst)
        return os.getpid()

    def _mesh(self, layout: Layout) -> DeviceMesh:
        key = (layout.tp, layout.dp, layout.inner)
        if key not in self.meshes:
            ranks = [[layout.rank(tp, dp) for tp in range(layout.tp)] for dp in range(layout.dp)]
            self.meshes[key] = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
        return self.meshes[key]

    def _build(self, node: Node) -> None:
        plan, placement = self.plan, self.plan.placement(node.name)
        engine = import_module(f"msrl_graph.backends.{placement.engine.name}").Engine
        layout, options = placement.layout, placement.engine.options
        model = plan.model(node.name)
        model = replace(model, dtype=str(options.get("dtype") or model.dtype))
        mesh = self._mesh(layout)
        if node.verb == "generate":
            self.generators[node.name] = engine(model, layout, self.rank, mesh, int(options.get("micro_batch") or 0))
            if not any(edge.dst == node.name for edge in plan.reshards):
                # Nothing will ever reshard into it: a frozen worker generates with the weights of its folder.
                shards = self.generators[node.name].allocate()
                tensors = {t.name: t for t in model.tensors}
                found = transformer.read(model, {s.name: (tensors[s.name], s.box) for s in shards})
                for piece in shards:
                    piece.tensor.copy_(found[piece.name])
        elif node.worker not in self.trainers:
            update = next((n for n in plan.graph.verb("update") if n.worker == node.worker), None)
            if update is not None and update.name != node.name:
                return self._build(update)  # what an update states holds for the weights that its other states share
            recompute = options.get("recompute") == "full"
            self.trainers[node.worker] = engine(model, layout, self.rank, mesh, recompute, _optimizer(node) if update else None)

    def _build_reshard(self, src: str, dst: str) -> None:
        plan = self.plan
        edge = next(r for r in plan.reshards if (r.src, r.dst) == (src, dst))
        worker = plan.graph.node(src).worker
        swap = self.swaps.setdefault(worker, Swap(self.trainers[worker].shards()))
        block = None
        for first in range(0, plan.cluster.devices, edge.group):
            members = list(range(first, first + edge.group))
            group = dist.new_group(members) if edge.group > 1 else None
            if self.rank in members:
                block = group
        sides = []
        for node in (src, dst):
            placement = plan.placement(node)
            spec = import_module(f"msrl_graph.backends.{placement.engine.name}").SPEC
            sides.append(Side(placement.layout, spec.divided(placement.layout)))
        self.resharders[src, dst] = Resharder(edge, plan.model(src), self.rank, sides[0], sides[1], block, swap)

    # The instructions, by name.

    def run(self, task: Task, measure: bool = False) -> Report:
        """Walks the stream of this pool for one task."""
        report = Report(f"rank {self.rank}")
        self.client.waited = self.client.moving = 0.0
        stream = next(s for s in self.plan.schedule if s.pool == "devices" and s.task == task.name)
        nodes = [self.plan.graph.node(i.node) for i in stream.instructions if i.op == "RUN"]
        self.following = {a.name: b for a, b in pairwise(nodes)}
        for instruction in stream.instructions:
            if measure:
                _note(report, f"before {instruction.op} {instruction.node}")
            getattr(self, f"_{instruction.op.lower()}")(instruction, task, report, measure)
        if measure:
            _note(report, "after")
        self.client.flush()
        report.seconds["dock wait"], report.seconds["dock move"] = self.client.waited, self.client.moving
        return report

    def _reshard(self, instruction: Instruction, task: Task, report: Report, measure: bool) -> None:
        edge = self.resharders[instruction.node, instruction.other]
        with report.phase("reshard"):
            edge.swap.wait()
            edge.run(self.generators[instruction.other].allocate, measure)
        report.seconds.update({f"reshard {step}": seconds for step, seconds in edge.seconds.items()})
        report.bytes[f"{instruction.node} => {instruction.other}"] = edge.moved
        if measure:
            report.bytes.update({f"peak of RESHARD, {place}": size for place, size in edge.peak.items()})

    def _release(self, instruction: Instruction, task: Task, report: Report, measure: bool) -> None:
        self.generators[instruction.node].release()

    def _swap_in(self, instruction: Instruction, task: Task, report: Report, measure: bool) -> None:
        self.swaps[self.plan.graph.node(instruction.node).worker].start_in()

    def _wait(self, instruction: Instruction, task: Task, report: Report, measure: bool) -> None:
        swap = self.swaps[self.plan.graph.node(instruction.node).worker]
        with report.phase("swap in"):
            swap.wait()
        report.seconds["swap in copy"] = swap.seconds

    def _run(self, instruction: Instruction, task: Task, report: Report, measure: bool) -> None:
        node = self.plan.graph.node(instruction.node)
        for batch in self._batches(node, task, report):
            with report.phase(node.name):
                columns = getattr(self, f"_{node.verb}")(node, task, batch, report)
            if columns and self._first(node):
                self.client.put(node.name, task, columns)

    def _first(self, node: Node) -> bool:
        """Whether this rank speaks for its data-parallel group."""
        return self.plan.placement(node.name).layout.coordinates(self.rank)[0] == 0

    def _batches(self, node: Node, task: Task, report: Report) -> Iterator[Batch]:
        """What the dock hands this rank's group, until it closes the iteration: the first rank asks, the group shares the answer. While
        it computes a batch the next is asked for, the next node's after the last."""
        layout = self.plan.placement(node.name).layout
        last = False
        while not last:
            answer: list[Any] = [None]
            with report.phase("dock"):
                if self._first(node):
                    self._ask(node, task)
                    answer = [self.asked.pop(node.name).result()]
                if layout.tp > 1:
                    dist.broadcast_object_list(answer, group=self._mesh(layout)["tp"].get_group(), group_src=0)
            last = answer[0].share.last
            following = self.following.get(node.name) if last else node
            if following is not None and self._first(following):
                self._ask(following, task)
            yield answer[0]

    def _ask(self, node: Node, task: Task) -> None:
        """Asks the dock for the node's next share, unless that is under way."""
        if node.name not in self.asked:
            group = self.plan.placement(node.name).layout.coordinates(self.rank)[1]
            self.asked[node.name] = self.asking.submit(self.client.take, node.name, task, group)

    # The verbs: a batch in, the written columns out.

    def _generate(self, node: Node, task: Task, batch: Batch, report: Report) -> dict[str, tuple[Array, Column]]:
        greedy = next((e.temperature for e in self.plan.deploy.evaluations if e.data == task.name), None)
        (response,) = node.writes
        sampling = Sampling(
            samples=task.fan,
            max_tokens=int(node.number("max_tokens", self.plan.graph.bound(response))),
            temperature=node.number("temperature", 1.0) if greedy is None else greedy,
            top_p=node.number("top_p", 1.0),
            top_k=int(node.number("top_k", 0)),
            seed=self.seed,
            iteration=task.number,
        )
        prompts = [batch.columns[c] for c in node.reads]
        context = [np.concatenate([c[i] for c in prompts]) for i in range(len(batch.rows))]
        rows = expand(batch.rows, 0, 1, task.fan)
        if not len(rows):
            return {}
        out = self.generators[node.name].generate(context, rows, sampling)
        column = ragged(out, np.int32)
        if self._first(node):
            report.count("response_length", float(len(column.values)), len(column))
            report.count("prompt_tokens", float(sum(map(len, context)) * task.fan), 0)
            report.count("response_tokens", float(len(column.values)), 0)
        return {response: (rows, column)}

    def _micro_batches(self, node: Node, batch: Batch, lengths: Array) -> list[Array]:
        """The positions of each micro-batch, rows of like length together to save padding: as many as the largest group makes, some
        empty."""
        size = int(self.plan.placement(node.name).engine.options.get("micro_batch") or 0) or max(batch.share.most, 1)
        count = max(1, -(-batch.share.most // size))
        return np.array_split(np.argsort(lengths, kind="stable"), count)

    def _columns(self, node: Node, batch: Batch, target: str) -> tuple[list[Column], Column]:
        """The context columns and the target's, of a node that reads tokens."""
        empty = Column(np.zeros(0, np.int32), np.zeros(1, np.int64))
        graph = self.plan.graph
        tokens = [c for c in node.reads if graph.column(c).element == "i32" and c != target]
        return [batch.columns.get(c, empty) for c in tokens], batch.columns.get(target, empty)

    def _temperature(self, target: str) -> float:
        writer = self.plan.graph.writer(target)
        return writer.number("temperature", 1.0) if writer.verb == "generate" else 1.0

    def _infer(self, node: Node, task: Task, batch: Batch, report: Report) -> dict[str, tuple[Array, Column]]:
        (written,) = node.writes
        target = self.plan.graph.column(written).dims[0].like
        contexts, response = self._columns(node, batch, target)
        values, micro = [], self._micro_batches(node, batch, _total(contexts, response))
        with torch.no_grad():
            for rows in micro:
                values.append(self.trainers[node.worker].logp(pack(contexts, response, rows), self._temperature(target)))
        if not len(batch.rows):
            return {}
        order = np.concatenate(micro)
        return {written: (batch.rows[order], Column(torch.cat(values).numpy(), offsets_of(response.lengths[order])))}

    def _update(self, node: Node, task: Task, batch: Batch, report: Report) -> dict[str, tuple[Array, Column]]:
        graph, trainer, first = self.plan.graph, self.trainers[node.worker], self._first(node)
        target = next(c for c in node.reads if graph.writer(c).verb == "generate")
        contexts, response = self._columns(node, batch, target)
        whole = loss.Whole(batch.share.elements[target], batch.share.round_units)
        needed = sorted(loss.columns(node))
        for rows in self._micro_batches(node, batch, _total(contexts, response)):
            lengths = response.lengths[rows]
            logp = trainer.logp(pack(contexts, response, rows), self._temperature(target))
            values = {c: flat(batch.columns[c], rows, lengths) if len(rows) else logp.detach() for c in needed}
            per_token, parts = loss.evaluate(node, logp, values)
            total = loss.reduce(node, per_token, torch.from_numpy(lengths), whole)
            trainer.backward(total)
            if first:
                report.count("loss", float(total.detach()), 0)
                for name, part in parts.items():
                    report.count(f"loss/{name}", float(part.detach().sum()), part.numel())
        self.steps[node.name] = self.steps.get(node.name, 0) + 1
        norm = trainer.step(_learning_rate(node, self.steps[node.name]), node.number("clip_grad", 1.0))
        if self.rank == 0:
            report.count("loss", 0.0, 1)  # the parts of all ranks and micro-batches add up to one loss a step
            report.count("grad_norm", norm, 1)
            report.count("updates", 1, 0)
        return {}

    def save(self, worker: str, folder: str) -> None:
        """Writes the worker's weights as a Hugging Face folder: rank 0 lays the shards of all ranks together."""
        if worker in self.swaps:
            self.swaps[worker].wait()
        mine = [(s.name, s.box, s.tensor) for s in self.trainers[worker].shards()]
        everyone: list[Any] | None = [None] * dist.get_world_size() if self.rank == 0 else None
        dist.gather_object(mine, everyone, dst=0)
        if everyone is None:
            return
        model = self.plan.deploy.models[self.plan.graph.worker(worker).model]
        whole = {t.name: torch.empty(t.shape, dtype=mine[0][2].dtype) for t in model.tensors}
        for shards in everyone:
            for name, box, values in shards:
                whole[name][tuple(slice(a, b) for a, b in box)] = values
        target = Path(folder)
        target.mkdir(parents=True)
        save_file(whole, target / "model.safetensors", metadata={"format": "pt"})
        for file in Path(model.path).iterdir():
            if file.suffix == ".json" and not file.name.endswith(".index.json"):
                shutil.copy(file, target)


def _total(contexts: list[Column], response: Column) -> Array:
    """Tokens of each row."""
    lengths: Array = np.sum([c.lengths for c in (*contexts, response)], axis=0)
    return lengths


def _optimizer(node: Node) -> dict[str, Any]:
    """The options of torch's AdamW as the node states them; the learning rate comes with each step."""
    return {k: v for k, v in node.attributes["optimizer"].options().items() if k in ("betas", "eps", "weight_decay")}


def _learning_rate(node: Node, step: int) -> float:
    """The learning rate of the step-th optimizer step (from 1): it rises in equal parts over `warmup` steps, then stays."""
    given = node.attributes["optimizer"].options()
    return float(given["lr"]) * min(1.0, step / max(int(given.get("warmup", 1)), 1))


def _note(report: Report, when: str) -> None:
    for place, size in memory.held().items():
        report.bytes[f"{when}, {place}"] = size


__all__ = ["Rank"]
