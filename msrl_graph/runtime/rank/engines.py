"""The engines of a rank: built for its pool, saved, and restored.

Invariant: process groups are made by all ranks of all pools in one order; a rank builds the engines of its own pool
only. Weights and moments leave and enter by their boxes, so that neither checkpoints nor exported weights know a
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ... import algorithms
from ...backends import ENGINES, hf_modules
from ...backends.devices import Devices, TorchDevice
from ...backends.host_offload import HostOffload
from ...backends.spec import EngineSpec, Generator, Shard, Trainer, Weights
from ...cost import holdings
from ...ir.async_schedule import fetched, sparse
from ...ir.attributes import UpdateAttributes
from ...ir.graph import Node
from ...ir.plan import Placement, Plan, Reshard
from ...sharding.layout import Box, Side, owns, slices
from ..weights import checkpoint, hf_export
from ..weights.checkpoint import CheckpointSource, Manifest
from ..weights.reshard import HostSwap, Resharder
from ..weights.transfer_routes import blocks
from ..weights.weight_publication import WeightPublication
from ..weights.weight_send import Sender
from . import object_collectives
from .engine_errors import BUILT, telling
from .followers import AVERAGE, Follower
from .weight_proof import WeightProof, complete

T = TypeVar("T")


class Engines:
    """What rank `rank` of a plan holds."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.per_host = plan.cluster.devices_per_node
        self.device = TorchDevice(plan.cluster.device.kind)
        self.pool = plan.pool_of(rank)
        self.local = self.pool.rank(rank, self.per_host) if self.pool else 0  # what layouts call this rank
        self.meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self.trainers: dict[str, Trainer] = {}  # by worker
        self.generators: dict[str, Generator] = {}  # by node
        self.swaps: dict[str, HostSwap] = {}  # by worker
        self.store: Any = None  # where the ranks meet
        self.resharders: dict[tuple[str, str], Resharder | Sender] = {}
        self.proofs: dict[tuple[str, str], WeightProof] = {}  # of the same edges
        self.sparse = sparse(plan)
        self.away: dict[str, HostOffload] = {}  # by worker, weights that lie in host memory unless it computes
        self.followers: dict[str, Follower] = {}  # by worker
        self.steps: dict[str, int] = {}  # optimizer steps taken, by update of its pool

    def build(self) -> None:
        """Makes process groups, engines and resharding; a collective of all ranks."""
        plan = self.plan
        # Process groups are made by all ranks of all pools, in one order; engines by the ranks of their pool.
        for placement in plan.placements:
            if placement.pool != "functions":
                self._mesh(placement)
        early = self.device.kind.groups_beside_sleep
        if early:  # first what leaves the device again: their weights come with resharding
            self._build_all("generate")
        self._build_all("infer", "update")
        for worker in plan.graph.workers:
            if worker.follows and worker.name in self.trainers:
                trainers = self.trainers[worker.name], self.trainers[worker.follows]
                self.followers[worker.name] = Follower(worker, *trainers, self.away.get(worker.name))
                self.followers[worker.name].build()
        for edge in plan.reshards:
            self._build_reshard(edge.src, edge.dst)
        if not early:  # when all groups are made, and beside no more than there is while they generate
            away = [self.swaps[w] for w in {plan.graph.node(e.src).worker for e in plan.reshards if e.mode == "swap"}]
            for swap in away:
                swap.swap_out()
            self._build_all("generate")
            for name in {edge.dst for edge in plan.reshards} & self.generators.keys():
                self.generators[name].release()
            for swap in away:
                swap.wait()
        for (_, dst), proof in self.proofs.items():
            proof.generator = self.generators.get(dst)

    def _build_all(self, *verbs: str) -> None:
        """Builds the engines of this rank's nodes, first those whose weights go to host memory."""
        plan = self.plan
        own = [p for p in plan.placements if self.pool and p.pool == self.pool.name]
        for placement in sorted(own, key=lambda p: not holdings.offloads(plan, p.node, "weights")):
            node = plan.graph.node(placement.node)
            if node.verb in verbs:
                # What an update states holds for the weights that its worker's other nodes share.
                node = next((n for n in self._changing() if n.worker == node.worker and node.verb != "generate"), node)
                with telling(plan, node, self.rank, BUILT):
                    self._build(node)

    def _mesh(self, placement: Placement) -> DeviceMesh:
        layout = placement.layout
        key = (placement.first, layout.tp, layout.cp, layout.dp, layout.pp, layout.inner)
        if key not in self.meshes:
            axes = tuple(a for a in ("pp", "dp", "cp", "tp") if a in ("dp", "tp") or getattr(layout, a) > 1)
            sizes = [getattr(layout, a) for a in axes]
            places = [dict(zip(axes, at, strict=True)) for at in product(*map(range, sizes))]
            ranks = torch.tensor([placement.device(layout.rank(**at), self.per_host) for at in places]).view(sizes)
            self.meshes[key] = DeviceMesh(self.device.kind.torch, ranks, mesh_dim_names=axes)
        return self.meshes[key]

    def _first(self, node: Node) -> bool:
        """Whether this rank speaks for its data-parallel group: the first of those that have a model's last layers."""
        layout = self.plan.placement(node.name).layout
        at = layout.coordinates(self.local)
        return (at.tp, at.cp, at.pp) == (0, 0, layout.pp - 1)

    def _leads(self, node: Node) -> bool:
        """Whether it is the one rank that tells what is of all groups."""
        return self._first(node) and self.plan.placement(node.name).layout.coordinates(self.local).dp == 0

    def _shared(self, node: Node, find: Callable[..., T], *arguments: Any) -> T:
        """What the first rank of a node's data-parallel group finds, on all of its ranks."""
        placement = self.plan.placement(node.name)
        shared: Any = find(*arguments) if self._first(node) else None
        # Along one axis after the other, so that each rank hears it from one that knows.
        for axis, source in (("tp", 0), ("cp", 0), ("pp", placement.layout.pp - 1)):
            if getattr(placement.layout, axis) > 1:
                group = self._mesh(placement)[axis].get_group()
                shared = object_collectives.broadcast(shared, group, source)
        found: T = shared
        return found

    def _build(self, node: Node) -> None:
        plan = self.plan
        placement = self.plan.placement(node.name)
        spec = ENGINES[placement.engine.name]
        model = plan.model(node.name)
        model = replace(model, dtype=str(placement.engine.options.get("dtype") or model.dtype))
        devices = Devices(self.device, self.local, self._mesh(placement), self.per_host)
        weights = Weights(model, node, work=holdings.work(plan, ENGINES, node.name))
        if node.verb == "generate":
            generator = self.generators[node.name] = spec.built(weights, placement, devices)
            if not any(edge.dst == node.name for edge in plan.reshards):
                # Nothing will ever reshard into it: a frozen worker generates with the weights of its folder.
                hf_modules.fill(model, shards := generator.allocate())
                complete(node, placement, self.local, spec.side(placement.layout), model.tensors, shards)
                generator.filled()
        elif node.worker not in self.trainers:
            steps = algorithms.optimizer(UpdateAttributes.of(node).optimizer) if node.verb == "update" else None
            trainer = spec.built(replace(weights, optimizer=steps), placement, devices)
            self.trainers[node.worker] = trainer
            complete(node, placement, self.local, spec.side(placement.layout), model.tensors, trainer.shards())
            if holdings.offloads(plan, node.name, "weights"):
                away = self.away[node.worker] = HostOffload(self.device, [s.tensor for s in trainer.shards()])
                away.store()
                away.leave()

    def fetch(self, node: Node) -> None:
        """Brings the weights of a node that lie in host memory while others compute."""
        if away := self.away.get(node.worker):
            away.come()
            away.arrive()

    def leave(self, node: Node) -> None:
        """Gives them back: they never change, so that nothing is copied."""
        if away := self.away.get(node.worker):
            away.leave()

    def _spec(self, node: str) -> EngineSpec:
        return ENGINES[self.plan.placement(node).engine.name]

    def _build_reshard(self, src: str, dst: str) -> None:
        plan = self.plan
        edge = next(r for r in plan.reshards if (r.src, r.dst) == (src, dst))
        worker = plan.graph.node(src).worker
        source = plan.placement(src)
        model = plan.model(src)
        shards = self.trainers[worker].shards() if self.pool and self.pool.name == source.pool else []
        sides = [self._spec(p.node).side(p.layout, p.first, p.each) for p in (source, plan.placement(dst))]
        proof = self.proofs[src, dst] = self._proof(edge, (sides[0], sides[1]))
        if edge.mode == "send":
            model = replace(model, dtype=str(source.engine.options.get("dtype") or model.dtype))
            of = (plan, edge, model, self.rank, (sides[0], sides[1]), shards, proof.word)
            if (src, dst) in fetched(plan):
                late = plan.docks.deadline + 60  # as for collectives
                self.resharders[src, dst] = WeightPublication(*of, store=self.store, deadline=late)
            else:
                self.resharders[src, dst] = Sender(*of)
            return
        neighbours = blocks(edge.ways, sides[0], self.per_host, self.rank)
        if shards:
            swap = self.swaps.setdefault(worker, HostSwap(shards))
            self.resharders[src, dst] = Resharder(edge, model, self.local, (sides[0], sides[1]), neighbours, swap)

    def _proof(self, edge: Reshard, sides: tuple[Side, Side]) -> WeightProof:
        """What proves a delivery of an edge; a collective of all ranks."""
        plan = self.plan
        members = [sides[0].device(r, self.per_host) for r in range(sides[0].devices)]
        team = dist.new_group(members) if len(members) > 1 else None
        pools = [plan.placement(n).pool for n in (edge.src, edge.dst)]
        ends = [self.local if self.pool and self.pool.name == pool else -1 for pool in pools]
        trainer = self.trainers[plan.graph.node(edge.src).worker] if ends[0] >= 0 else None
        return WeightProof(plan, edge, self.device, sides, (ends[0], ends[1]), team, trainer)

    def checkpoint(
        self, folder: str, says: dict[str, str]
    ) -> tuple[list[checkpoint.CheckpointFile], dict[str, int], str]:
        """Writes the weights and moments of which this rank is the first holder, `says` into each file: the files,
        optimizer steps by update, and what went wrong."""
        files = []
        failed = ""
        for node in self._changing():
            if node.worker in self.swaps:
                self.swaps[node.worker].wait()
            if node.worker not in self.trainers:
                continue
            trainer = self.trainers[node.worker]
            placement = self.plan.placement(node.name)
            side = self._spec(node.name).side(placement.layout)
            owned = {t.name for t in self.plan.model(node.name).tensors if owns(t, side, self.local)}
            with self._held(node.worker) as shards:
                kinds = {"weights": shards, **self._beside(node.worker, trainer)}
                pieces = [(f"{node.worker}/{k}", s) for k, some in kinds.items() for s in some if s.name in owned]
                try:
                    name = f"{node.worker}-rank-{self.rank:05d}.safetensors"
                    files.append(checkpoint.write(Path(folder), name, pieces, says | checkpoint.taken(self.steps)))
                except OSError as error:
                    failed = str(error)  # not raised: the other ranks are on their way to the next collective
        return files, self.steps, failed

    def wants(self, manifest: Manifest) -> set[str]:
        """The files of a checkpoint that hold something of what this rank has."""
        source = checkpoint.CheckpointSource(Path(), manifest)
        found = set[str]()
        for node in self._changing():
            shards = self.trainers[node.worker].shards() if node.worker in self.trainers else []
            for kind in source.kinds(node.worker):
                found |= {f for s in shards for f in source.files(f"{node.worker}/{kind}/{s.name}", s.box)}
        return found

    def resume(self, folder: str, manifest: Manifest) -> None:
        """Takes weights and moments from a checkpoint."""
        source = checkpoint.CheckpointSource(Path(folder), manifest)
        # Those of this rank's pool: of others it takes none, and would tell of old ones.
        here = {p.node for p in self.plan.placements if self.pool and p.pool == self.pool.name}
        self.steps = {name: count for name, count in manifest.steps.items() if name in here}
        for node in self._changing():
            if node.worker not in self.trainers:
                continue
            trainer = self.trainers[node.worker]
            name = node.worker
            if name in self.followers:
                self._resume_follower(source, name)
                continue
            with torch.no_grad():
                for s in trainer.shards():
                    s.tensor.copy_(source.read(f"{name}/weights/{s.name}", s.box, s.tensor.dtype))
                moments = {
                    kind: {
                        s.name: source.read(f"{name}/{kind}/{s.name}", s.box, torch.float32)
                        for s in trainer.shards()
                        if s.name in of
                    }
                    for kind, of in source.kinds(name).items()
                    if kind != "weights"
                }
                # Its optimizer has taken the steps of all of a worker's updates.
                trainer.restore(
                    moments, sum(self.steps.get(n.name, 0) for n in self.plan.graph.verb("update") if n.worker == name)
                )

    def _resume_follower(self, source: CheckpointSource, name: str) -> None:
        """Take the weights of a worker that follows; those of its model stay where the checkpoint is of a program in
        which it did not."""
        follower = self.followers[name]
        kinds = source.kinds(name)
        if "weights" not in kinds:
            return
        with torch.no_grad(), follower.held(changes=True) as shards:
            for s in shards:
                s.tensor.copy_(source.read(f"{name}/weights/{s.name}", s.box, s.tensor.dtype))
            for s in follower.averages:
                kind = AVERAGE if AVERAGE in kinds else "weights"
                s.tensor.copy_(source.read(f"{name}/{kind}/{s.name}", s.box, s.tensor.dtype))

    @contextmanager
    def _held(self, worker: str) -> Iterator[list[Shard]]:
        """A worker's shards on the device."""
        if worker in self.followers:
            with self.followers[worker].held() as shards:
                yield shards
        else:
            yield self.trainers[worker].shards()

    def _beside(self, worker: str, trainer: Trainer) -> dict[str, list[Shard]]:
        """What a checkpoint keeps of a worker beside its weights."""
        return self.followers[worker].kinds() if worker in self.followers else trainer.moments()

    def _changing(self) -> list[Node]:
        """The first update of each worker that has one, and the first node of each that follows one."""
        return [self.plan.graph.sharing(worker)[0] for worker in self.plan.graph.weighty]

    def save(self, worker: str, folder: str) -> None:
        """Writes the worker's weights as a Hugging Face folder: rank 0 lays together the shards of all ranks that have
        some."""
        if worker in self.swaps:
            self.swaps[worker].wait()
        mine: list[tuple[str, Box, torch.Tensor]] = []
        if worker in self.trainers:
            with self._held(worker) as shards:
                copies = worker in self.away  # whose storages go again
                mine = [(s.name, s.box, s.tensor.clone() if copies else s.tensor) for s in shards]
        everyone = object_collectives.gather(mine)
        if everyone is None:
            return
        model = self.plan.model(next(n.name for n in self._changing() if n.worker == worker))
        given = [piece for shards in everyone for piece in shards]
        whole = {t.name: torch.empty(t.shape, dtype=given[0][2].dtype) for t in model.tensors}
        for name, box, values in given:
            whole[name][slices(box)] = values
        hf_export.write_folder(model, whole, Path(folder))
