"""A rank's part of checkpoints and of exported weights.

Invariant: weights and the optimizer's moments are saved and restored by their boxes (index ranges of a tensor), so
neither checkpoints nor exported weights depend on a layout.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ...backends.engine_protocols import Trainer
from ...sharding.layout import owns, slices
from ...sharding.tensors import Box
from ..weights import checkpoint, hf_export
from ..weights.checkpoint import CheckpointSource, Manifest
from . import object_collectives
from .context import RankContext
from .engines import Engines
from .followers import AVERAGE


class RankCheckpoints:
    """The part of a rank that saves and restores weights and optimizer states."""

    def __init__(self, context: RankContext, engines: Engines) -> None:
        self.context = context
        self.engines = engines

    def write(
        self, folder: str, metadata: dict[str, str]
    ) -> tuple[list[checkpoint.CheckpointFile], dict[str, int], str]:
        """Write this rank's part of a checkpoint: weights and optimizer moments.

        If several ranks hold the same values, only the first of these ranks writes them. `metadata` is written into
        each file. Returns the files, the number of optimizer steps of each update node, and the error message ("" if
        there was no error).
        """
        engines = self.engines
        files = []
        failed = ""
        for node in engines.weight_nodes():
            if node.worker in engines.swaps:
                engines.swaps[node.worker].wait()
            if node.worker not in engines.trainers:
                continue
            side = engines.side(node.name)
            saved = self.context.plan.model(node.name).saved
            owned = {tensor.name for tensor in saved if owns(tensor, side, self.context.local)}
            with engines.shards_on_device(node.worker) as shards:
                # A follower has a moving average of weights, and a trained worker has the optimizer's moments.
                follower = engines.followers.get(node.worker)
                extra = follower.extra_shards() if follower else engines.trainers[node.worker].moments()
                kinds = {"weights": shards, **extra}
                pieces = [
                    (f"{node.worker}/{kind}", shard)
                    for kind, kind_shards in kinds.items()
                    for shard in kind_shards
                    if shard.name in owned
                ]
                try:
                    name = f"{node.worker}-rank-{self.context.rank:05d}.safetensors"
                    facts = metadata | checkpoint.step_metadata(engines.steps)
                    files.append(checkpoint.write_tensors(Path(folder), name, pieces, facts))
                except OSError as error:
                    failed = str(error)  # not raised: the other ranks already wait in the next collective
        return files, engines.steps, failed

    def _node(self, worker: str) -> str:
        """Return the first node of a worker."""
        return self.context.plan.graph.sharing(worker)[0].name

    def _trainers(self) -> list[tuple[str, Trainer]]:
        """Return this rank's trainers whose weights change, with their workers."""
        trainers = self.engines.trainers
        return [(node.worker, trainers[node.worker]) for node in self.engines.weight_nodes() if node.worker in trainers]

    def wants(self, manifest: Manifest) -> set[str]:
        """Return the files of a checkpoint that contain values of this rank's shards."""
        source = checkpoint.CheckpointSource(Path(), manifest)
        files = set[str]()
        for worker, trainer in self._trainers():
            for kind in source.kinds(worker):
                for shard in trainer.shards():
                    files.update(source.files(f"{worker}/{kind}/{shard.name}", shard.box))
        return files

    def resume(self, folder: str, manifest: Manifest) -> None:
        """Load weights and optimizer moments from a checkpoint."""
        source = checkpoint.CheckpointSource(Path(folder), manifest)
        # Only updates of this rank's pool: this rank would report outdated counts of other updates.
        here = {placement.node for placement in self.context.placements}
        steps = {name: count for name, count in manifest.steps.items() if name in here}
        self.engines.steps = steps
        for name, trainer in self._trainers():
            if name in self.engines.followers:
                self._resume_follower(source, name)
                continue
            saved = {tensor.name for tensor in self.context.plan.model(self._node(name)).saved}
            if name in self.engines.swaps:
                self.engines.swaps[name].offload.forget_constant()
            with torch.no_grad():
                for shard in trainer.shards():
                    if shard.name in saved:
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
                updates = [update for update in self.context.plan.graph.verb("update") if update.worker == name]
                trainer.restore(moments, sum(steps.get(update.name, 0) for update in updates))

    def _resume_follower(self, source: CheckpointSource, name: str) -> None:
        """Load the weights of the worker `name`, which follows another worker.

        If the checkpoint has no weights of this worker, the worker keeps the weights of its model folder.
        """
        follower = self.engines.followers[name]
        kinds = source.kinds(name)
        if "weights" not in kinds:
            return
        with torch.no_grad(), follower.on_device(changes=True) as shards:
            for shard in shards:
                shard.tensor.copy_(source.read(f"{name}/weights/{shard.name}", shard.box, shard.tensor.dtype))
            for shard in follower.averages:
                kind = AVERAGE if AVERAGE in kinds else "weights"
                shard.tensor.copy_(source.read(f"{name}/{kind}/{shard.name}", shard.box, shard.tensor.dtype))

    def save(self, worker: str, folder: str) -> None:
        """Write the worker's weights as a Hugging Face folder; a collective of all ranks.

        Rank 0 gathers the shards of all ranks and writes the folder.
        """
        if worker in self.engines.swaps:
            self.engines.swaps[worker].wait()
        own_pieces: list[tuple[str, Box, torch.Tensor]] = []
        if worker in self.engines.trainers:
            with self.engines.shards_on_device(worker) as shards:
                copies = worker in self.engines.offloads  # the shards' storages are freed after this block
                own_pieces = [
                    (shard.name, shard.box, shard.tensor.clone() if copies else shard.tensor) for shard in shards
                ]
        gathered = object_collectives.gather(own_pieces)
        if gathered is None:
            return
        model = self.context.plan.model(self._node(worker))
        pieces = [piece for shards in gathered for piece in shards]
        weights = {tensor.name: torch.empty(tensor.shape, dtype=pieces[0][2].dtype) for tensor in model.saved}
        for name, box, values in pieces:
            if name in weights:  # frozen weights of a model with an adapter are not saved
                weights[name][slices(box)] = values
        hf_export.write_folder(model, weights, Path(folder))
