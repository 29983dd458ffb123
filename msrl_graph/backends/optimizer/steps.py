"""Optimizer steps on the local shards of a model whose ranks are a mesh: torch.optim's own (shards.py), and Muon
(muon.py).

Invariant: offloaded or not, the same steps; what is offloaded is on the device a part at a time, and the next one.
Gradients add up over all ranks that hold copies of a weight, dp and cp, of experts those that the experts'
own mesh leaves; the norm counts each element once, and is the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ...ir.optimizer_spec import PARTS, OptimizerSpec, Rule
from ...sharding.layout import Layout, Side, box_at, elements, stages
from ..sizes import CHUNK
from ..spec import OperatorCalls, Shard
from .gradients import add_up
from .muon import Matrices
from .shards import MomentTensors, OptimizerSlice, copies

if TYPE_CHECKING:
    import torch

    from ...sharding.layout import Tensor
    from ..devices import Devices


def calls(layout: Layout) -> OperatorCalls:
    """Of a step, by ranks that have copies of a weight: counted by torch's profiler on Qwen2 models (12 tensors a
    layer; a step goes by tensors)."""
    if layout.dp * layout.cp == 1:
        return OperatorCalls(108, 35)
    return (OperatorCalls(150, 49), OperatorCalls(230, 73), OperatorCalls(122, 43), OperatorCalls(122, 43))[layout.zero]


class ShardRows(NamedTuple):
    """Some rows of the `number`-th shard, or all of it."""

    number: int
    rows: slice

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[self.number] if self.rows == slice(None) else tensors[self.number][self.rows]

    def shard(self, shards: Sequence[Shard]) -> Shard:
        name = (whole := shards[self.number]).name
        box = whole.box
        tensor = whole.tensor
        if self.rows == slice(None):
            return whole
        first = box[0][0]
        return Shard(name, ((first + self.rows.start, first + self.rows.stop), *box[1:]), tensor[self.rows])


class Steps:
    """The optimizer of a model's `tensors`, of which this rank holds `shards`, `divided` over dp or not; those of other
    stages are empty. `offload`: what it keeps lies in host memory between steps."""

    def __init__(
        self,
        optimizer: OptimizerSpec,
        tensors: Sequence[Tensor],
        shards: Sequence[Shard],
        layout: Layout,
        devices: Devices,
        divided: bool,
        offload: bool = False,
    ) -> None:
        import torch

        self.tensors = tensors
        self.layout = layout
        self.devices = devices
        self.divided = divided
        self.shards = shards
        self.copies = {e: copies(layout, devices, divided, e) for e in sorted({t.experts for t in tensors})}
        self.parts: list[OptimizerSlice] = []
        self.at: list[list[ShardRows]] = []  # what each has
        self.offload = offload
        self.mastered = any(s.tensor.dtype != torch.float32 for s in shards)
        kept = sum(self._size(i) * optimizer.of(t).beside(self.mastered) for i, t in enumerate(tensors))
        for rule in optimizer.rules:
            for experts, held_by in self.copies.items():
                at = [i for i, t in enumerate(tensors) if optimizer.of(t) is rule and t.experts is experts]
                for pieces in self._parted(rule, at, kept / PARTS if offload else 0):
                    made = Matrices if rule.whole else OptimizerSlice
                    held = [p.shard(shards) for p in pieces]
                    part = made(rule, [tensors[p.number] for p in pieces], held, layout, devices, divided, held_by)
                    if offload:
                        part.leave()
                    self.parts.append(part)
                    self.at.append(pieces)
        self.rules = optimizer.rules
        self.taken = 0

    def _size(self, i: int) -> int:
        """Elements of the i-th tensor on the busiest rank of this stage: the same number on all of its ranks."""
        here = self.layout.coordinates(self.devices.rank).pp in stages(self.tensors[i], self.layout)
        return elements(box_at(self.tensors[i], Side(self.layout, self.divided), (0, 0, 0))) * here

    def _parted(self, rule: Rule, at: Sequence[int], most: float) -> Iterator[list[ShardRows]]:
        """Some tensors that step by a rule, in parts that keep `most` bytes each: cut between rows, but for whole
        matrices, of which all ranks make the same parts. Without `most`, in one."""
        each = rule.beside(self.mastered)
        if not most or not each:
            if at:  # of a mixture no expert may step by a rule, as by Muon's for all that is no matrix
                yield [piece for i in at for piece in self._apart(rule, i)]
            return
        pieces: list[ShardRows] = []
        room = size = int(most / each)
        for i in at:
            shape = self.shards[i].tensor.shape
            start = 0
            rows, row = (1, self._size(i)) if rule.whole else (shape[0], shape[1:].numel())
            while start < rows and row:
                if pieces and room < row:
                    yield pieces
                    pieces = []
                    room = size
                count = 1 if self._strided(rule, i) else min(rows - start, max(1, room // row))
                pieces.append(ShardRows(i, slice(None) if count == rows else slice(start, start + count)))
                room = room - count * row
                start = start + count
        if pieces:
            yield pieces

    def _strided(self, rule: Rule, i: int) -> bool:
        """Whether a weight that is its own master is a part of another tensor in strides, as gate and up of Megatron's
        experts are: its rows are pieces then, since torch's fused steps take for granted that elements lie end to
        end."""
        import torch

        tensor = self.shards[i].tensor
        return not rule.whole and tensor.dtype == torch.float32 and not tensor.is_contiguous()

    def _apart(self, rule: Rule, i: int) -> list[ShardRows]:
        rows = len(self.shards[i].tensor)
        return (
            [ShardRows(i, slice(e, e + 1)) for e in range(rows)]
            if self._strided(rule, i)
            else [ShardRows(i, slice(None))]
        )

    def _here(self) -> Iterator[OptimizerSlice]:
        """Each part in turn, with all that it keeps on the device."""
        for part, following in zip(self.parts, [*self.parts[1:], None], strict=True):
            if self.offload and part is self.parts[0]:
                part.come()
            if self.offload and following is not None:
                following.come()
            part.arrive()
            yield part
            if self.offload:
                part.leave()

    def step(
        self, gradients: list[torch.Tensor], lr: float, clip_grad: float, sound: bool, optimizer: OptimizerSpec
    ) -> float:
        """As of Trainer; a gradient lives as long as it is in the list, which is emptied."""
        for experts, held_by in self.copies.items():
            if held_by.number > 1:
                # The list goes with the call, or the gradients in it would live as long as the step.
                add_up([g for g, t in zip(gradients, self.tensors, strict=True) if t.experts is experts], held_by.group)
        norm = self._norm(gradients, sound)
        if math.isfinite(norm):
            self._apply(gradients, min(1.0, clip_grad / (norm + 1e-6)) if clip_grad else 1.0, lr, optimizer)
            self.taken += 1
        gradients.clear()
        return norm

    def _apply(self, gradients: list[torch.Tensor], scale: float, lr: float, optimizer: OptimizerSpec) -> None:
        own = [[piece.of(gradients) for piece in pieces] for pieces in self.at]
        gradients.clear()
        stated = dict(zip(self.rules, optimizer.rules, strict=True))
        for part in self._here():
            part.step(own.pop(0), scale, {**stated[part.rule].options, "lr": lr})

    def moments(self) -> dict[str, list[Shard]]:
        """As of Trainer; with the float32 masters where weights are of another type."""
        import torch

        found: dict[str, dict[int, list[torch.Tensor]]] = {}
        for part, pieces in zip(self.parts, self.at, strict=True) if self.taken else ():
            for kind, shards in part.moments().items():
                for piece, shard in zip(pieces, shards, strict=True):
                    found.setdefault(kind, {}).setdefault(piece.number, []).append(shard.tensor)
        return {
            kind: [replace(self.shards[i], tensor=torch.cat(t) if len(t) > 1 else t[0]) for i, t in of.items()]
            for kind, of in found.items()
        }

    def restore(self, moments: MomentTensors, steps: int) -> None:
        self.taken = steps
        for part, pieces in zip(self._here(), self.at, strict=True):
            names = {self.shards[piece.number].name: piece for piece in pieces}
            part.restore(
                {
                    kind: {name: tensor[names[name].rows] for name, tensor in of.items() if name in names}
                    for kind, of in moments.items()
                },
                steps,
            )

    def _holders(self, tensor: Tensor) -> int:
        """How many ranks of a stage have the same part of a tensor's gradient."""
        layout = self.layout
        if tensor.experts:
            return self.copies[True].number * (layout.etp if tensor.tp_dim < 0 else 1)
        return self.copies[False].number * (layout.tp if tensor.tp_dim < 0 else 1)

    def _norm(self, gradients: list[torch.Tensor], sound: bool) -> float:
        """The 2-norm of the whole gradient: parts that are divided add up, copies count once. All ranks take part in
        all sums, so that they agree to the last bit, and on what is not finite."""
        import torch
        from torch import distributed as dist

        layout = self.layout
        place = self.devices.device.place
        sums: dict[int, torch.Tensor] = {}  # by number of holders
        later = layout.pp > 1 and self.devices.axis("pp").get_local_rank() > 0
        for gradient, tensor in zip(gradients, self.tensors, strict=True):
            if tensor.tied and later:
                continue  # the first stage has it too
            if (holders := self._holders(tensor)) not in sums:
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
