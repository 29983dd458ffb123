"""Optimizer steps on a rank's shards of a model's weights.

The update rules are torch.optim's rules (shards.py) and Muon (muon.py).

Invariant: offloading optimizer states does not change the result of a step. With the residency "parts", the device
holds the optimizer states of at most two optimizer slices at a time: the slice that is updated, and the next slice.
Gradients are summed over all ranks that hold copies of a weight. Copies of a dense weight are on ranks that differ only
in dp and cp. Copies of an expert are on ranks that differ only in edp (the data parallelism of experts), the last axis
of the experts' mesh. The gradient's norm counts each element once, and is the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ...ir.optimizer_spec import PARTS, OptimizerSpec, Rule
from ...sharding.layout import Layout, Side, box_at, elements, stages
from ..engine_protocols import Shard, StepRequest
from ..memory.sizes import CHUNK
from ..spec import Residency
from .gradients import add_up
from .muon import Matrices
from .shards import MomentTensors, OptimizerSlice, make_replica_group

if TYPE_CHECKING:
    import torch

    from ...sharding.tensors import Tensor
    from ..devices import Devices


class ShardRows(NamedTuple):
    """Some rows of the shard with index `number`, or the whole shard."""

    number: int
    rows: slice

    def select(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[self.number] if self.rows == slice(None) else tensors[self.number][self.rows]

    def cut(self, shards: Sequence[Shard]) -> Shard:
        name = (full_shard := shards[self.number]).name
        box = full_shard.box
        tensor = full_shard.tensor
        if self.rows == slice(None):
            return full_shard
        first = box[0][0]
        return Shard(name, ((first + self.rows.start, first + self.rows.stop), *box[1:]), tensor[self.rows])


class Steps:
    """The optimizer of a model on one rank.

    - `tensors`: the model's weights. `shards`: this rank's shard of each weight. Frozen weights are left out.
    - `divided`: whether the weights are sharded over dp.
    - `residency`: when the optimizer states are on the device (spec.py). With "phase", they are there from
      `fetch_states` or the first step to `release_states`.

    If a weight is on another pipeline stage, this rank's shard of the weight is empty.
    """

    def __init__(
        self,
        optimizer: OptimizerSpec,
        tensors: Sequence[Tensor],
        shards: Sequence[Shard],
        layout: Layout,
        devices: Devices,
        divided: bool,
        residency: Residency = "always",
    ) -> None:
        import torch

        trained = [(tensor, shard) for tensor, shard in zip(tensors, shards, strict=True) if tensor.is_trained]
        tensors = self.tensors = [tensor for tensor, _ in trained]
        shards = [shard for _, shard in trained]
        self.layout = layout
        self.devices = devices
        self.divided = divided
        self.shards = shards
        self.copies = {
            for_experts: make_replica_group(layout, devices, divided, for_experts)
            for for_experts in sorted({tensor.experts for tensor in tensors})
        }
        self.parts: list[OptimizerSlice] = []
        self.pieces: list[list[ShardRows]] = []  # the rows of each optimizer slice in `parts`
        self.residency = residency
        by_parts = residency == "parts"
        self.has_masters = any(shard.tensor.dtype != torch.float32 for shard in shards)
        kept_bytes = sum(
            self._count_elements(i) * optimizer.rule_of(tensor).state_bytes(self.has_masters)
            for i, tensor in enumerate(tensors)
        )
        for rule in optimizer.rules:
            for experts, replicas in self.copies.items():
                indices = [
                    i
                    for i, tensor in enumerate(tensors)
                    if optimizer.rule_of(tensor) is rule and tensor.experts is experts
                ]
                for pieces in self._partition_tensors(rule, indices, kept_bytes / PARTS if by_parts else 0):
                    slice_class = Matrices if rule.whole else OptimizerSlice
                    piece_shards = [piece.cut(shards) for piece in pieces]
                    part = slice_class(
                        rule,
                        [tensors[piece.number] for piece in pieces],
                        piece_shards,
                        layout,
                        devices,
                        divided,
                        replicas,
                    )
                    if residency != "always":
                        part.leave()
                    self.parts.append(part)
                    self.pieces.append(pieces)
        self.rules = optimizer.rules
        self.steps_taken = 0

    def _count_elements(self, i: int) -> int:
        """Return the size of the largest shard of the i-th tensor on this pipeline stage.

        The size is a number of elements, and is the same on all ranks of the stage. It is 0 if the tensor is on other
        stages only.
        """
        here = self.layout.coordinates(self.devices.rank).pp in stages(self.tensors[i], self.layout)
        return elements(box_at(self.tensors[i], Side(self.layout, self.divided), (0, 0, 0))) * here

    def _partition_tensors(self, rule: Rule, indices: Sequence[int], max_bytes: float) -> Iterator[list[ShardRows]]:
        """Yield lists of rows of tensors; each list becomes one optimizer slice.

        The optimizer states of one list have at most `max_bytes` bytes, unless a single row or an uncut tensor needs
        more. If `max_bytes` is 0 there is one list. `indices` are the indices of the tensors that have the update rule
        `rule`. Tensors are cut between rows. If the rule needs whole matrices, no tensor is cut, and all ranks make the
        same lists.
        """
        bytes_per_element = rule.state_bytes(self.has_masters)
        if not max_bytes or not bytes_per_element:
            if indices:  # a mixture may have no expert tensor for a rule, such as Muon's rule for non-matrices
                yield [piece for i in indices for piece in self._list_pieces(rule, i)]
            return
        pieces: list[ShardRows] = []
        room = capacity = int(max_bytes / bytes_per_element)
        for i in indices:
            shape = self.shards[i].tensor.shape
            start = 0
            rows, row = (1, self._count_elements(i)) if rule.whole else (shape[0], shape[1:].numel())
            while start < rows and row:
                if pieces and room < row:
                    yield pieces
                    pieces = []
                    room = capacity
                count = 1 if self._is_strided(rule, i) else min(rows - start, max(1, room // row))
                pieces.append(ShardRows(i, slice(None) if count == rows else slice(start, start + count)))
                room = room - count * row
                start = start + count
        if pieces:
            yield pieces

    def _is_strided(self, rule: Rule, i: int) -> bool:
        """Return whether each row of the i-th shard must be updated separately.

        Rows are updated separately if the shard is a float32 weight that is a non-contiguous view of another tensor,
        because torch's fused steps assume contiguous elements. The gate and up projections of Megatron's experts are
        such views. A shard whose rule needs whole matrices is never updated by rows.
        """
        import torch

        tensor = self.shards[i].tensor
        return not rule.whole and tensor.dtype == torch.float32 and not tensor.is_contiguous()

    def _list_pieces(self, rule: Rule, i: int) -> list[ShardRows]:
        rows = len(self.shards[i].tensor)
        return (
            [ShardRows(i, slice(row, row + 1)) for row in range(rows)]
            if self._is_strided(rule, i)
            else [ShardRows(i, slice(None))]
        )

    def _iterate_on_device(self) -> Iterator[OptimizerSlice]:
        """Yield each optimizer slice in turn, with its optimizer states on the device."""
        by_parts = self.residency == "parts"
        for part, following in zip(self.parts, [*self.parts[1:], None], strict=True):
            part.come()
            if by_parts and following is not None:
                following.come()
            part.arrive()
            yield part
            if by_parts:
                part.leave()

    def fetch_states(self) -> None:
        """Start the copies of all states to the device, if the residency is "phase"."""
        if self.residency == "phase":
            for part in self.parts:
                part.come()

    def release_states(self) -> None:
        """Move all optimizer states to host memory, if the residency is "phase"."""
        if self.residency == "phase":
            for part in self.parts:
                part.arrive()
                if not part.away:
                    part.leave()

    def step(self, gradients: list[torch.Tensor], request: StepRequest) -> float:
        """Make an optimizer step; return the gradient's norm before clipping.

        This method implements `Trainer.step` (engine_protocols.py). A gradient is freed as soon as it is removed from
        the list `gradients`.
        """
        for experts, replicas in self.copies.items():
            if replicas.number > 1:
                # The list must have no name, so that its gradients are freed before the step ends.
                add_up(
                    [
                        gradient
                        for gradient, tensor in zip(gradients, self.tensors, strict=True)
                        if tensor.experts is experts
                    ],
                    replicas.group,
                )
        norm = self._compute_norm(gradients, request.sound)
        if math.isfinite(norm):
            clip = request.clip_grad
            self._apply(gradients, min(1.0, clip / (norm + 1e-6)) if clip else 1.0, request)
            self.steps_taken += 1
        gradients.clear()
        return norm

    def _apply(self, gradients: list[torch.Tensor], scale: float, request: StepRequest) -> None:
        own = [[piece.select(gradients) for piece in pieces] for pieces in self.pieces]
        gradients.clear()
        stated_rules = request.optimizer.rules if request.optimizer else self.rules
        stated = dict(zip(self.rules, stated_rules, strict=True))
        for part in self._iterate_on_device():
            part.step(own.pop(0), scale, {**stated[part.rule].options, "lr": request.lr})

    def moments(self) -> dict[str, list[Shard]]:
        """Return the optimizer states; the keys of the result are the kinds of states.

        This method implements `Trainer.moments` (engine_protocols.py). If weights are not float32, the result includes
        the masters (float32 copies of the weights).
        """
        import torch

        tensors_by_kind: dict[str, dict[int, list[torch.Tensor]]] = {}
        for part, pieces in zip(self.parts, self.pieces, strict=True) if self.steps_taken else ():
            for kind, shards in part.moments().items():
                for piece, shard in zip(pieces, shards, strict=True):
                    tensors_by_kind.setdefault(kind, {}).setdefault(piece.number, []).append(shard.tensor)
        return {
            kind: [
                replace(self.shards[i], tensor=torch.cat(parts) if len(parts) > 1 else parts[0])
                for i, parts in by_number.items()
            ]
            for kind, by_number in tensors_by_kind.items()
        }

    def restore(self, moments: MomentTensors, steps: int) -> None:
        self.steps_taken = steps
        for part, pieces in zip(self._iterate_on_device(), self.pieces, strict=True):
            names = {self.shards[piece.number].name: piece for piece in pieces}
            part.restore(
                {
                    kind: {name: tensor[names[name].rows] for name, tensor in tensors.items() if name in names}
                    for kind, tensors in moments.items()
                },
                steps,
            )
        self.release_states()

    def _count_holders(self, tensor: Tensor) -> int:
        """Return how many ranks of a pipeline stage hold the same part of a gradient.

        The gradient is the gradient of the weight `tensor`.
        """
        layout = self.layout
        if tensor.experts:
            return self.copies[True].number * (layout.etp if tensor.tp_dim < 0 else 1)
        return self.copies[False].number * (layout.tp if tensor.tp_dim < 0 else 1)

    def _compute_norm(self, gradients: list[torch.Tensor], sound: bool) -> float:
        """Return the 2-norm of the whole gradient, or NaN if `sound` is false on any rank.

        `sound` is false if the caller found an error in this step's loss. The squares of all elements are summed; an
        element that several ranks hold counts once. All ranks take part in all sums. So all ranks get the same bits,
        and agree on whether the norm is finite.
        """
        import torch
        from torch import distributed as dist

        layout = self.layout
        place = self.devices.device.place
        sums: dict[int, torch.Tensor] = {}  # by number of holders
        later = layout.pp > 1 and self.devices.axis("pp").get_local_rank() > 0
        for gradient, tensor in zip(gradients, self.tensors, strict=True):
            if tensor.tied and later:
                continue  # the first stage counts the tied weight
            if (holders := self._count_holders(tensor)) not in sums:
                sums[holders] = torch.zeros((), dtype=torch.float64, device=place)
            for part in torch.split(gradient.reshape(-1), CHUNK):
                sums[holders].add_(part.double().square().sum())
        total = torch.full((), 0.0 if sound else math.nan, dtype=torch.float64, device=place)
        for holders, own in sums.items():
            total += own / holders
        for axis in ("tp", "cp", "dp", "pp"):
            if getattr(layout, axis) > 1:
                dist.all_reduce(total, group=self.devices.axis(axis).get_group())
        return float(total.sqrt())
