"""The engines of a rank, and what moves weights between them.

Invariant: all ranks of all pools make all process groups, in the same order. A rank builds only the engines of its own
pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ...analysis.async_schedule import fetched_edges, skipping_edges
from ...backends import ENGINES, hf_modules
from ...backends.devices import Devices
from ...backends.engine_protocols import Generator, Shard, Trainer, Weights
from ...backends.host_offload import HostOffload
from ...cost import holdings
from ...cost.optimizer_states import fetches_states, optimizer_spec_of
from ...ir.graph import Node
from ...ir.resharding_plan import Reshard
from ...sharding.layout import Side
from ..weights.adapter_merge import AdapterMerge
from ..weights.frozen_copies import FrozenCopies, HostRanks
from ..weights.reshard import HostSwap, Resharder
from ..weights.transfer_routes import make_blocks
from ..weights.weight_publication import WeightPublication
from ..weights.weight_send import Sender
from .context import RankContext
from .engine_errors import BUILT, report_engine_errors
from .followers import Follower
from .weight_proof import WeightProof, check_complete


class Engines:
    """The engines of a rank, with their resharding, host copies and followers."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.trainers: dict[str, Trainer] = {}  # by worker
        self.generators: dict[str, Generator] = {}  # by node
        self.swaps: dict[str, HostSwap] = {}  # by worker
        self.resharders: dict[tuple[str, str], Resharder | Sender] = {}
        self.proofs: dict[tuple[str, str], WeightProof] = {}  # of the same edges
        self.frozen_copies: dict[tuple[str, str], FrozenCopies] = {}  # of the same edges
        self.merges: dict[str, AdapterMerge] = {}  # by generation with an adapter
        self.sparse = skipping_edges(context.plan)
        self.offloads: dict[str, HostOffload] = {}  # by worker: its weights are in host memory unless it computes
        self.followers: dict[str, Follower] = {}  # by worker
        self.steps: dict[str, int] = {}  # by update of this pool: the number of optimizer steps

    def build(self) -> None:
        """Make process groups, engines and resharders; a collective of all ranks."""
        plan = self.context.plan
        # Process groups are made by all ranks of all pools, in one order; engines by the ranks of their pool.
        for placement in plan.placements:
            if placement.pool != "functions":
                self.context.mesh(placement)
        generators_first = self.context.device.kind.groups_beside_sleep
        if generators_first:  # first: they are released from the device again, and resharding brings their weights
            self._build_all("generate")
        self._build_all("infer", "update")
        for worker in plan.graph.workers:
            if worker.follows and worker.name in self.trainers:
                trainers = self.trainers[worker.name], self.trainers[worker.follows]
                self.followers[worker.name] = Follower(worker, *trainers, self.offloads.get(worker.name))
        for edge in plan.reshards:
            self._build_reshard(edge)
        if not generators_first:  # after all groups are made, with as much free memory as during generation
            swapped = {plan.graph.node(edge.src).worker for edge in plan.reshards if edge.mode == "swap"}
            swaps = [self.swaps[worker] for worker in swapped]
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
        plan = self.context.plan
        own = self.context.placements
        for placement in sorted(own, key=lambda candidate: not holdings.offloads(plan, candidate.node, "weights")):
            node = plan.graph.node(placement.node)
            if node.verb in verbs:
                # The options of an update apply to the weights, which all nodes of its worker share.
                if node.verb != "generate":
                    node = next((other for other in self.weight_nodes() if other.worker == node.worker), node)
                with report_engine_errors(self.context, node, BUILT):
                    self._build(node)

    def _build(self, node: Node) -> None:
        context = self.context
        plan = context.plan
        placement = plan.placement(node.name)
        spec = ENGINES[placement.engine.name]
        model = plan.model(node.name)
        model = replace(model, dtype=str(placement.engine.options.get("dtype") or model.dtype))
        devices = Devices(context.device, context.local, context.mesh(placement), context.per_host)
        weights = Weights(model, node, work=holdings.work(plan, ENGINES, node.name))
        if node.verb == "generate":
            weights = replace(weights, model=replace(model.base or model, dtype=model.dtype))
            generator = self.generators[node.name] = spec.build_engine(weights, placement, devices)
            if model.lora:
                dtype = getattr(torch, hf_modules.DTYPES[model.dtype])
                arguments = self.side(node.name), context.local, dtype, context.device.place
                self.merges[node.name] = AdapterMerge(model, *arguments)
            if not any(edge.dst == node.name for edge in plan.reshards):
                # No edge reshards into this node: a frozen worker generates with the weights of its model folder.
                merge = self.merges.get(node.name)
                hf_modules.fill(model, shards := [*generator.allocate(), *(merge.allocate() if merge else ())])
                check_complete(context, node, shards)
                if merge:
                    merge.merge(shards)
                generator.filled()
        elif node.worker not in self.trainers:
            optimizer = optimizer_spec_of(plan, node.name) if node.verb == "update" else None
            trainer = spec.build_engine(replace(weights, optimizer=optimizer), placement, devices)
            self.trainers[node.worker] = trainer
            check_complete(context, node, trainer.shards())
            if holdings.offloads(plan, node.name, "weights"):
                tensors = [shard.tensor for shard in trainer.shards()]
                offload = self.offloads[node.worker] = HostOffload(context.device, tensors)
                offload.store()
                offload.leave()

    def begin_phase(self, node: Node) -> None:
        """Copy what a node needs from host memory to the device."""
        if offload := self.offloads.get(node.worker):
            offload.come()
            offload.arrive()
        if fetches_states(self.context.plan, node.name):
            self.trainers[node.worker].fetch_states()

    def end_phase(self, node: Node) -> None:
        """Free the device memory of what is in host memory while other nodes compute.

        Frozen weights are not copied back to host memory, because the node has not changed them.
        """
        if offload := self.offloads.get(node.worker):
            offload.leave()
        if fetches_states(self.context.plan, node.name):
            self.trainers[node.worker].release_states()

    def release_generation(self, node: str) -> None:
        """Release the memory of the weights that a node generates with."""
        self.generators[node].release()
        if merge := self.merges.get(node):
            merge.release()

    def side(self, node: str) -> Side:
        """Return which rank holds which part of a node's weights, with the ranks' devices."""
        placement = self.context.plan.placement(node)
        return ENGINES[placement.engine.name].side(placement.layout, placement.first, placement.each)

    def _build_reshard(self, edge: Reshard) -> None:
        context = self.context
        plan = context.plan
        worker = plan.graph.node(edge.src).worker
        source = plan.placement(edge.src)
        model = plan.model(edge.src)
        trainer = self.trainers[worker] if context.is_here(edge.src) else None
        shards = trainer.shards() if trainer else []
        sides = (self.side(edge.src), self.side(edge.dst))
        key = (edge.src, edge.dst)
        self.frozen_copies[key] = FrozenCopies(context.device, model, self._find_sharing_ranks(edge, sides[1]))
        proof = self.proofs[key] = WeightProof(context, edge, sides, trainer)
        if edge.mode == "send":
            model = replace(model, dtype=str(source.engine.options.get("dtype") or model.dtype))
            arguments = (plan, edge, model, context.rank, sides, shards, proof.word)
            if key in fetched_edges(plan):
                deadline = plan.docks.deadline + 60  # as for collectives
                self.resharders[key] = WeightPublication(*arguments, store=context.store, deadline=deadline)
            else:
                self.resharders[key] = Sender(*arguments)
            return
        neighbours = make_blocks(edge.ways, sides[0], context.per_host, context.rank)
        if shards:
            swap = self.swaps.setdefault(worker, HostSwap(shards, model.frozen_names))
            self.resharders[key] = Resharder(edge, model, context.local, sides, neighbours, swap)

    def _find_sharing_ranks(self, edge: Reshard, side: Side) -> HostRanks | None:
        """Return the ranks of this host that generate with the weights of an edge."""
        context = self.context
        if context.store is None or not context.is_here(edge.dst):
            return None
        placement = context.plan.placement(edge.dst)
        host = context.rank // context.per_host
        devices = [placement.device(rank, context.per_host) for rank in range(side.devices)]
        ranks = tuple(rank for rank, device in enumerate(devices) if device // context.per_host == host)
        deadline = context.plan.docks.deadline + 60  # as for collectives
        return HostRanks(side, context.local, ranks, context.store, f"frozen {edge.src} {edge.dst}", deadline)

    @contextmanager
    def shards_on_device(self, worker: str) -> Iterator[list[Shard]]:
        """Yield a worker's shards; inside the context, they are on the device."""
        if worker in self.followers:
            with self.followers[worker].on_device() as shards:
                yield shards
        else:
            yield self.trainers[worker].shards()

    def weight_nodes(self) -> list[Node]:
        """Return one node for each worker whose weights change.

        For a trained worker, the result has the worker's first update. For a follower, the result has the follower's
        first node.
        """
        graph = self.context.plan.graph
        return [graph.sharing(worker)[0] for worker in graph.changing_workers]
