"""Optimizer steps on the local shards of a model whose ranks are a mesh: torch.optim's own (parts.py), and Muon
(muon.py).

Invariant: gradients add up over all ranks that hold copies of a weight, dp and cp, of experts those that the experts'
own mesh leaves; the norm counts each element once, and is the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..ir.stepping import Optimizer
from ..sharding.layout import Layout
from .muon import Matrices
from .parts import Copies, MomentTensors, Part, copies
from .peaks import CHUNK
from .spec import Shard

if TYPE_CHECKING:
    import torch

    from ..sharding.layout import Tensor
    from .devices import Devices


class Steps:
    """The optimizer of a model's `tensors`, of which this rank holds `shards`, `divided` over dp or not; those of other
    stages are empty."""

    def __init__(
        self,
        optimizer: Optimizer,
        tensors: Sequence[Tensor],
        shards: Sequence[Shard],
        layout: Layout,
        devices: Devices,
        divided: bool,
    ) -> None:
        self.tensors, self.layout, self.devices, self.divided = tensors, layout, devices, divided
        self.copies = {e: copies(layout, devices, divided, e) for e in sorted({t.experts for t in tensors})}
        self.parts: list[Part] = []
        self.at: list[list[int]] = []  # which tensors each has
        for rule in optimizer.rules:
            for experts, held_by in self.copies.items():
                at = [i for i, t in enumerate(tensors) if optimizer.of(t) is rule and t.experts is experts]
                made, held = Matrices if rule.whole else Part, [shards[i] for i in at]
                if at:
                    part = made(rule, [tensors[i] for i in at], held, layout, devices, divided, held_by)
                    self.parts.append(part)
                    self.at.append(at)
        self.rules = optimizer.rules
        self.taken = 0

    def step(
        self, gradients: list[torch.Tensor], lr: float, clip_grad: float, sound: bool, optimizer: Optimizer
    ) -> float:
        """As of Trainer; a gradient lives as long as it is in the list, which is emptied."""
        for experts, held_by in self.copies.items():
            if held_by.number > 1:
                self._add_up([g for g, t in zip(gradients, self.tensors, strict=True) if t.experts is experts], held_by)
        norm = self._norm(gradients, sound)
        if math.isfinite(norm):
            self._apply(gradients, min(1.0, clip_grad / (norm + 1e-6)) if clip_grad else 1.0, lr, optimizer)
            self.taken += 1
        gradients.clear()
        return norm

    def _apply(self, gradients: list[torch.Tensor], scale: float, lr: float, optimizer: Optimizer) -> None:
        own = [[gradients[i] for i in at] for at in self.at]
        gradients.clear()
        stated = dict(zip(self.rules, optimizer.rules, strict=True))
        for part in self.parts:
            part.step(own.pop(0), scale, {**stated[part.rule].options, "lr": lr})

    def moments(self) -> dict[str, list[Shard]]:
        """As of Trainer; with the float32 masters where weights are of another type."""
        found: dict[str, list[Shard]] = {}
        for part in self.parts if self.taken else ():
            for kind, shards in part.moments().items():
                found.setdefault(kind, []).extend(shards)
        return found

    def restore(self, moments: MomentTensors, steps: int) -> None:
        self.taken = steps
        for part in self.parts:
            part.restore(moments, steps)

    def _add_up(self, gradients: list[torch.Tensor], copies: Copies) -> None:
        """Sums gradients in place over the ranks that hold copies of the weights, bucket by bucket."""
        import torch
        from torch import distributed as dist

        bucket: list[torch.Tensor] = []
        for i, gradient in enumerate(gradients):
            bucket.append(gradient)
            if i + 1 == len(gradients) or sum(g.numel() for g in bucket) + gradients[i + 1].numel() > CHUNK:
                flat = torch.cat([g.reshape(-1) for g in bucket])
                dist.all_reduce(flat, group=copies.group)
                for g, total in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                    g.copy_(total.view(g.shape))
                bucket = []

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

        layout, place = self.layout, self.devices.device.place
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
