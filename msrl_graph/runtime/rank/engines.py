"""The engines of a rank: how they are built, saved and restored.

Invariant: all ranks of all pools make all process groups, in the same order. A rank builds only the engines of its own
pool. Weights and the optimizer's moments are saved and restored by their boxes (index ranges of a tensor), so neither
checkpoints nor exported weights depend on a layout.
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
from ...analysis.async_schedule import fetched_edges, skipping_edges
from ...backends import ENGINES, hf_modules
from ...backends.devices import Devices, TorchDevice
from ...backends.engine_protocols import Generator, Shard, Trainer, Weights
from ...backends.host_offload import HostOffload
from ...backends.spec import EngineSpec
from ...cost import holdings
from ...ir.attributes import UpdateAttributes
from ...ir.graph import Node
from ...ir.plan import Placement, Plan
from ...ir.resharding_plan import Reshard
from ...sharding.layout import Side, owns, slices
from ...sharding.tensors import Box
from ..weights import checkpoint, hf_export
from ..weights.checkpoint import CheckpointSource, Manifest
from ..weights.frozen_copies import FrozenCopies
from ..weights.reshard import HostSwap, Resharder
from ..weights.transfer_routes import make_blocks
from ..weights.weight_publication import WeightPublication
from ..weights.weight_send import Sender
from . import object_collectives
from .engine_errors import BUILT, report_engine_errors
from .followers import AVERAGE, Follower
from .weight_proof import WeightProof, check_complete

T = TypeVar("T")


class Engines:
    """The engines, device meshes and resharding of rank number `rank` in a plan."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.per_host = plan.cluster.devices_per_node
        self.device = TorchDevice(plan.cluster.device.kind)
        self.pool = plan.pool_of(rank)
        self.local = self.pool.rank(rank, self.per_host) if self.pool else 0  # this rank's number in layouts
        self.meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self.trainers: dict[str, Trainer] = {}  # by worker
        self.generators: dict[str, Generator] = {}  # by node
        self.swaps: dict[str, HostSwap] = {}  # by worker
        self.store: Any = None  # the store through which the ranks find each other
        self.resharders: dict[tuple[str, str], Resharder | Sender] = {}
        self.proofs: dict[tuple[str, str], WeightProof] = {}  # of the same edges
        self.frozen_copies: dict[tuple[str, str], FrozenCopies] = {}  # of the same edges
        self.sparse = skipping_edges(plan)
        self.offloads: dict[str, HostOffload] = {}  # by worker: its weights are in host memory unless it computes
        self.followers: dict[str, Follower] = {}  # by worker
        self.steps: dict[str, int] = {}  # by update of this pool: the number of optimizer steps

    def build(self) -> None:
        """Make process groups, engines and resharders; a collective of all ranks."""
        plan = self.plan
        # Process groups are made by all ranks of all pools, in one order; engines by the ranks of their pool.
        for placement in plan.placements:
            if placement.pool != "functions":
                self._mesh(placement)
        generators_first = self.device.kind.groups_beside_sleep
        if generators_first:  # first: they are released from the device again, and resharding brings their weights
            self._build_all("generate")
        self._build_all("infer", "update")
        for worker in plan.graph.workers:
            if worker.follows and worker.name in self.trainers:
                trainers = self.trainers[worker.name], self.trainers[worker.follows]
                self.followers[worker.name] = Follower(worker, *trainers, self.offloads.get(worker.name))
                self.followers[worker.name].build()
        for edge in plan.reshards:
            self._build_reshard(edge.src, edge.dst)
        if not generators_first:  # after all groups are made, with as much free memory as during generation
            swaps = [
                self.swaps[swapped_worker]
                for swapped_worker in {
                    plan.graph.node(reshard.src).worker for reshard in plan.reshards if reshard.mode == "swap"
                }
            ]
            for swap in swaps:
                swap.swap_out()
            self._build_all("generate")
            for name in {edge.dst for edge in plan.reshards} & self.generators.keys():
                self.generators[name].release()
            for swap in swaps:
                swap.wait()
        for (_, dst), proof in self.proofs.items():
            proof.generator = self.generators.get(dst)

    def _build_all(self, *verbs: str) -> None:
        """Build the engines of those nodes of this rank whose verb is in `verbs`.

        Engines whose weights are offloaded to host memory are built first.
        """
        plan = self.plan
        own = [candidate for candidate in plan.placements if self.pool and candidate.pool == self.pool.name]
        for placement in sorted(own, key=lambda candidate: not holdings.offloads(plan, candidate.node, "weights")):
            node = plan.graph.node(placement.node)
            if node.verb in verbs:
                # The options of an update apply to the weights, which all nodes of its worker share.
                node = next(
                    (
                        other
                        for other in self._weight_nodes()
                        if other.worker == node.worker and node.verb != "generate"
                    ),
                    node,
                )
                with report_engine_errors(plan, node, self.rank, BUILT):
                    self._build(node)

    def _mesh(self, placement: Placement) -> DeviceMesh:
        layout = placement.layout
        key = (placement.first, layout.tp, layout.cp, layout.dp, layout.pp, layout.inner)
        if key not in self.meshes:
            axes = tuple(axis for axis in ("pp", "dp", "cp", "tp") if axis in ("dp", "tp") or getattr(layout, axis) > 1)
            sizes = [getattr(layout, axis) for axis in axes]
            coordinates = [dict(zip(axes, indices, strict=True)) for indices in product(*map(range, sizes))]
            ranks = torch.tensor([placement.device(layout.rank(**point), self.per_host) for point in coordinates]).view(
                sizes
            )
            self.meshes[key] = DeviceMesh(self.device.kind.torch, ranks, mesh_dim_names=axes)
        return self.meshes[key]

    def _is_group_leader(self, node: Node) -> bool:
        """Return whether this rank is the leader of its data-parallel group.

        Some ranks of the group have the model's last layers. The leader is the first of these ranks.
        """
        layout = self.plan.placement(node.name).layout
        coordinates = layout.coordinates(self.local)
        return (coordinates.tp, coordinates.cp, coordinates.pp) == (0, 0, layout.pp - 1)

    def _is_leader(self, node: Node) -> bool:
        """Return whether this rank reports the values that a node's ranks have in common.

        Exactly one rank of a node reports these values: the leader of the first data-parallel group.
        """
        return self._is_group_leader(node) and self.plan.placement(node.name).layout.coordinates(self.local).dp == 0

    def _share_result(self, node: Node, find: Callable[..., T], *arguments: Any) -> T:
        """Call `find` on the leader of this rank's data-parallel group; return the result.

        All ranks of the group call this method and return the same value.
        """
        placement = self.plan.placement(node.name)
        shared: Any = find(*arguments) if self._is_group_leader(node) else None
        # One mesh axis after the other, so that each rank receives the value from a rank that already has it.
        for axis, source in (("tp", 0), ("cp", 0), ("pp", placement.layout.pp - 1)):
            if getattr(placement.layout, axis) > 1:
                group = self._mesh(placement)[axis].get_group()
                shared = object_collectives.broadcast(shared, group, source)
        result: T = shared
        return result

    def _build(self, node: Node) -> None:
        plan = self.plan
        placement = self.plan.placement(node.name)
        spec = ENGINES[placement.engine.name]
        model = plan.model(node.name)
        model = replace(model, dtype=str(placement.engine.options.get("dtype") or model.dtype))
        devices = Devices(self.device, self.local, self._mesh(placement), self.per_host)
        weights = Weights(model, node, work=holdings.work(plan, ENGINES, node.name))
        if node.verb == "generate":
            generator = self.generators[node.name] = spec.build_engine(weights, placement, devices)
            if not any(edge.dst == node.name for edge in plan.reshards):
                # No edge reshards into this node: a frozen worker generates with the weights of its model folder.
                hf_modules.fill(model, shards := generator.allocate())
                check_complete(node, placement, self.local, spec.side(placement.layout), model.weights, shards)
                generator.filled()
        elif node.worker not in self.trainers:
            optimizer = algorithms.optimizer(UpdateAttributes.of(node).optimizer) if node.verb == "update" else None
            trainer = spec.build_engine(replace(weights, optimizer=optimizer), placement, devices)
            self.trainers[node.worker] = trainer
            check_complete(node, placement, self.local, spec.side(placement.layout), model.weights, trainer.shards())
            if holdings.offloads(plan, node.name, "weights"):
                offload = self.offloads[node.worker] = HostOffload(
                    self.device, [shard.tensor for shard in trainer.shards()]
                )
                offload.store()
                offload.leave()

    def fetch_weights(self, node: Node) -> None:
        """Copy a node's weights to the device if they are in host memory."""
        if offload := self.offloads.get(node.worker):
            offload.come()
            offload.arrive()

    def release_weights(self, node: Node) -> None:
        """Free the device copy of a node's weights, if host memory also has the weights.

        The weights are not copied back to host memory, because the node has not changed the weights.
        """
        if offload := self.offloads.get(node.worker):
            offload.leave()

    def _spec(self, node: str) -> EngineSpec:
        return ENGINES[self.plan.placement(node).engine.name]

    def _build_reshard(self, src: str, dst: str) -> None:
        plan = self.plan
        edge = next(reshard for reshard in plan.reshards if (reshard.src, reshard.dst) == (src, dst))
        worker = plan.graph.node(src).worker
        source = plan.placement(src)
        model = plan.model(src)
        shards = self.trainers[worker].shards() if self.pool and self.pool.name == source.pool else []
        sides = [
            self._spec(placement.node).side(placement.layout, placement.first, placement.each)
            for placement in (source, plan.placement(dst))
        ]
        self.frozen_copies[src, dst] = FrozenCopies(self.device, model)
        proof = self.proofs[src, dst] = self._proof(edge, (sides[0], sides[1]))
        if edge.mode == "send":
            model = replace(model, dtype=str(source.engine.options.get("dtype") or model.dtype))
            arguments = (plan, edge, model, self.rank, (sides[0], sides[1]), shards, proof.word)
            if (src, dst) in fetched_edges(plan):
                deadline = plan.docks.deadline + 60  # as for collectives
                self.resharders[src, dst] = WeightPublication(*arguments, store=self.store, deadline=deadline)
            else:
                self.resharders[src, dst] = Sender(*arguments)
            return
        neighbours = make_blocks(edge.ways, sides[0], self.per_host, self.rank)
        if shards:
            swap = self.swaps.setdefault(worker, HostSwap(shards, model.frozen_names))
            self.resharders[src, dst] = Resharder(edge, model, self.local, (sides[0], sides[1]), neighbours, swap)

    def _proof(self, edge: Reshard, sides: tuple[Side, Side]) -> WeightProof:
        """Return an object that checks whether weights arrive over a resharding edge.

        weight_proof.py defines the check. This method is a collective of all ranks.
        """
        plan = self.plan
        members = [sides[0].device(index, self.per_host) for index in range(sides[0].devices)]
        team = dist.new_group(members) if len(members) > 1 else None
        pools = [plan.placement(name).pool for name in (edge.src, edge.dst)]
        ends = [self.local if self.pool and self.pool.name == pool else -1 for pool in pools]
        trainer = self.trainers[plan.graph.node(edge.src).worker] if ends[0] >= 0 else None
        return WeightProof(plan, edge, self.device, sides, (ends[0], ends[1]), team, trainer)

    def checkpoint(
        self, folder: str, metadata: dict[str, str]
    ) -> tuple[list[checkpoint.CheckpointFile], dict[str, int], str]:
        """Write this rank's part of a checkpoint: weights and optimizer moments.

        If several ranks hold the same values, only the first of these ranks writes them. `metadata` is written into
        each file. Returns the files, the number of optimizer steps of each update node, and the error message ("" if
        there was no error).
        """
        files = []
        failed = ""
        for node in self._weight_nodes():
            if node.worker in self.swaps:
                self.swaps[node.worker].wait()
            if node.worker not in self.trainers:
                continue
            trainer = self.trainers[node.worker]
            placement = self.plan.placement(node.name)
            side = self._spec(node.name).side(placement.layout)
            owned = {tensor.name for tensor in self.plan.model(node.name).saved if owns(tensor, side, self.local)}
            with self._shards_on_device(node.worker) as shards:
                kinds = {"weights": shards, **self._extra_shards(node.worker, trainer)}
                pieces = [
                    (f"{node.worker}/{kind}", shard)
                    for kind, kind_shards in kinds.items()
                    for shard in kind_shards
                    if shard.name in owned
                ]
                try:
                    name = f"{node.worker}-rank-{self.rank:05d}.safetensors"
                    files.append(
                        checkpoint.write_tensors(
                            Path(folder), name, pieces, metadata | checkpoint.step_metadata(self.steps)
                        )
                    )
                except OSError as error:
                    failed = str(error)  # not raised: the other ranks already wait in the next collective
        return files, self.steps, failed

    def wants(self, manifest: Manifest) -> set[str]:
        """Return the files of a checkpoint that contain values of this rank's shards."""
        source = checkpoint.CheckpointSource(Path(), manifest)
        files = set[str]()
        for node in self._weight_nodes():
            shards = self.trainers[node.worker].shards() if node.worker in self.trainers else []
            for kind in source.kinds(node.worker):
                files |= {
                    file for shard in shards for file in source.files(f"{node.worker}/{kind}/{shard.name}", shard.box)
                }
        return files

    def resume(self, folder: str, manifest: Manifest) -> None:
        """Load weights and optimizer moments from a checkpoint."""
        source = checkpoint.CheckpointSource(Path(folder), manifest)
        # Only updates of this rank's pool: this rank would report outdated counts of other updates.
        here = {placement.node for placement in self.plan.placements if self.pool and placement.pool == self.pool.name}
        self.steps = {name: count for name, count in manifest.steps.items() if name in here}
        for node in self._weight_nodes():
            if node.worker not in self.trainers:
                continue
            trainer = self.trainers[node.worker]
            name = node.worker
            if name in self.followers:
                self._resume_follower(source, name)
                continue
            if name in self.swaps:
                self.swaps[name].offload.forget_constant()
            with torch.no_grad():
                for shard in trainer.shards():
                    shard.tensor.copy_(source.read(f"{name}/weights/{shard.name}", shard.box, shard.tensor.dtype))
                moments = {
                    kind: {
                        shard.name: source.read(f"{name}/{kind}/{shard.name}", shard.box, torch.float32)
                        for shard in trainer.shards()
                        if shard.name in names
                    }
                    for kind, names in source.kinds(name).items()
                    if kind != "weights"
                }
                # The optimizer has taken the steps of all updates of its worker.
                trainer.restore(
                    moments,
                    sum(
                        self.steps.get(update.name, 0)
                        for update in self.plan.graph.verb("update")
                        if update.worker == name
                    ),
                )

    def _resume_follower(self, source: CheckpointSource, name: str) -> None:
        """Load the weights of the worker `name`, which follows another worker.

        If the checkpoint has no weights of this worker, the worker keeps the weights of its model folder.
        """
        follower = self.followers[name]
        kinds = source.kinds(name)
        if "weights" not in kinds:
            return
        with torch.no_grad(), follower.on_device(changes=True) as shards:
            for shard in shards:
                shard.tensor.copy_(source.read(f"{name}/weights/{shard.name}", shard.box, shard.tensor.dtype))
            for shard in follower.averages:
                kind = AVERAGE if AVERAGE in kinds else "weights"
                shard.tensor.copy_(source.read(f"{name}/{kind}/{shard.name}", shard.box, shard.tensor.dtype))

    @contextmanager
    def _shards_on_device(self, worker: str) -> Iterator[list[Shard]]:
        """Yield a worker's shards; inside the context, they are on the device."""
        if worker in self.followers:
            with self.followers[worker].on_device() as shards:
                yield shards
        else:
            yield self.trainers[worker].shards()

    def _extra_shards(self, worker: str, trainer: Trainer) -> dict[str, list[Shard]]:
        """Return the shards that a checkpoint has for a worker in addition to the weights.

        A follower has a moving average of weights, and a trained worker has the optimizer's moments.
        """
        return self.followers[worker].extra_shards() if worker in self.followers else trainer.moments()

    def _weight_nodes(self) -> list[Node]:
        """Return one node for each worker whose weights change.

        For a trained worker, the result has the worker's first update. For a follower, the result has the follower's
        first node.
        """
        return [self.plan.graph.sharing(worker)[0] for worker in self.plan.graph.changing_workers]

    def save(self, worker: str, folder: str) -> None:
        """Write the worker's weights as a Hugging Face folder; a collective of all ranks.

        Rank 0 gathers the shards of all ranks and writes the folder.
        """
        if worker in self.swaps:
            self.swaps[worker].wait()
        own_pieces: list[tuple[str, Box, torch.Tensor]] = []
        if worker in self.trainers:
            with self._shards_on_device(worker) as shards:
                copies = worker in self.offloads  # the shards' storages are freed after this block
                own_pieces = [
                    (shard.name, shard.box, shard.tensor.clone() if copies else shard.tensor) for shard in shards
                ]
        gathered = object_collectives.gather(own_pieces)
        if gathered is None:
            return
        model = self.plan.model(next(node.name for node in self._weight_nodes() if node.worker == worker))
        pieces = [piece for shards in gathered for piece in shards]
        weights = {tensor.name: torch.empty(tensor.shape, dtype=pieces[0][2].dtype) for tensor in model.saved}
        for name, box, values in pieces:
            weights[name][slices(box)] = values
        hf_export.write_folder(model, weights, Path(folder))
