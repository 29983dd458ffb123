"""Optimizer steps on the local shards of a model whose ranks are a mesh: torch.optim's own, and Muon.

Invariant: elements step in float32, one by one, so that no layout changes what is computed; what needs a whole matrix
gathers it, and each rank takes its own part of the result. ZeRO 1 divides the tensors of each rule, laid end to end, in
stretches over the ranks that hold copies of them: dp and cp, of experts those that the experts' own mesh leaves.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..ir.stepping import Optimizer, Rule
from ..sharding.layout import Box, Layout, slices
from .devices import release, take
from .peaks import CHUNK
from .spec import Shard

if TYPE_CHECKING:
    import torch

    from ..sharding.layout import Tensor
    from .devices import Devices

ITERATIONS = 5  # of Newton and Schulz
MomentTensors = dict[str, dict[str, "torch.Tensor"]]  # by kind and tensor


@dataclass(frozen=True)
class Copies:
    """The ranks that hold the same boxes of some tensors, each with its own part of their gradient: so many, of which
    this one is the `index`-th."""

    number: int = 1
    index: int = 0
    group: Any = None


def _copies(layout: Layout, devices: Devices, divided: bool, experts: bool) -> Copies:
    """Where weights are `divided` over dp, their gradients come summed over it."""
    if experts:
        number, alike = 1 if divided else layout.edp, "pp ep etp"
    else:
        number, alike = (layout.cp, "pp tp dp") if divided else (layout.cp * layout.dp, "pp tp")
    if number == 1:
        return Copies()
    group = devices.among(layout, *alike.split())
    return Copies(number, group.rank(), group)


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
        self.copies = {e: _copies(layout, devices, divided, e) for e in sorted({t.experts for t in tensors})}
        self.parts: list[_Part] = []
        self.at: list[list[int]] = []  # which tensors each has
        for rule in optimizer.rules:
            for experts, copies in self.copies.items():
                at = [i for i, t in enumerate(tensors) if optimizer.of(t) is rule and t.experts is experts]
                made, held = _Matrices if rule.whole else _Part, [shards[i] for i in at]
                if at:
                    part = made(rule, [tensors[i] for i in at], held, layout, devices, divided, copies)
                    self.parts.append(part)
                    self.at.append(at)
        self.rules = optimizer.rules
        self.taken = 0

    def step(
        self, gradients: list[torch.Tensor], lr: float, clip_grad: float, sound: bool, optimizer: Optimizer
    ) -> float:
        """As of Trainer; a gradient lives as long as it is in the list, which is emptied."""
        for experts, copies in self.copies.items():
            if copies.number > 1:
                self._add_up([g for g, t in zip(gradients, self.tensors, strict=True) if t.experts is experts], copies)
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
            own = sums.setdefault(self._holders(tensor), torch.zeros((), dtype=torch.float64, device=place))
            for part in torch.split(gradient.reshape(-1), CHUNK):
                own.add_(part.double().square().sum())
        total = torch.full((), 0.0 if sound else math.nan, dtype=torch.float64, device=place)
        for holders, own in sums.items():
            total += own / holders
        for axis in ("tp", "cp", "dp", "pp"):
            if getattr(layout, axis) > 1:
                dist.all_reduce(total, group=self.devices.axis(axis).get_group())
        return float(total.sqrt())


class _Part:
    """The tensors that step by one rule, element by element. Of ZeRO 1 this rank owns a stretch of all of them."""

    def __init__(
        self,
        rule: Rule,
        tensors: list[Tensor],
        shards: list[Shard],
        layout: Layout,
        devices: Devices,
        divided: bool,
        copies: Copies,
    ) -> None:
        import torch

        self.copies = copies
        self.tensors, self.shards, self.layout, self.devices, self.divided = tensors, shards, layout, devices, divided
        self.place = devices.device.place
        self.rule, self.keeps = rule, rule.keeps
        self.flat = layout.zero == 1 and copies.number > 1
        self.sizes = [s.tensor.numel() for s in shards]
        if self.flat:
            self.stretch = -(-sum(self.sizes) // copies.number)
            self.masters = [self._stretch([s.tensor for s in shards])]
        else:
            self.masters = [s.tensor if s.tensor.dtype == torch.float32 else s.tensor.float() for s in shards]
        # In float32 the stretch is a copy of the weights: it lives only while a step lasts.
        self.copied = self.flat and all(s.tensor.dtype == torch.float32 for s in shards)
        self.state = self._prepare(rule)
        if self.copied:
            release(self.masters[0])

    def _prepare(self, rule: Rule) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """What is kept of each master."""
        import torch

        self.optimizer = getattr(torch.optim, rule.name)(self.masters, lr=0.0, **rule.options)
        state: dict[torch.Tensor, dict[str, torch.Tensor]] = self.optimizer.state
        return state

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
        """What lies between elements `start` and `stop` of all tensors end to end: the index of a tensor, where it is
        in the range, and which elements of it that are."""
        at = 0
        for i, size in enumerate(self.sizes):
            low, high = max(at, start), min(at + size, stop)
            if low < high:
                yield i, slice(low - start, high - start), slice(low - at, high - at)
            at += size

    def _own(self) -> Iterator[tuple[int, slice, slice]]:
        """What lies in this rank's stretch."""
        return self._overlaps(self.stretch * self.copies.index, self.stretch * (self.copies.index + 1))

    def _stretch(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """This rank's stretch of all tensors, in float32, its end padded with zeros."""
        import torch

        own = torch.zeros(self.stretch, device=self.place)
        for i, where, piece in self._own():
            own[where] = tensors[i].reshape(-1)[piece]
        return own

    def step(self, gradients: list[torch.Tensor], scale: float, options: dict[str, Any]) -> None:
        """A step; the list of gradients is emptied."""
        if self.flat:
            gradients[:] = [self._stretch(gradients)]
        if self.copied:
            take(self.masters[0])
            self.masters[0].copy_(self._stretch([s.tensor for s in self.shards]))
        for master in self.masters:
            gradient = gradients.pop(0)
            master.grad = (gradient.mul_(scale) if scale != 1.0 else gradient).to(master.dtype)
            del gradient
        self._turn(options)
        for master in self.masters:
            master.grad = None
        self._write_back()
        if self.copied:
            release(self.masters[0])

    def _turn(self, options: dict[str, Any]) -> None:
        """From the masters' gradients to the masters."""
        for group in self.optimizer.param_groups:
            group.update(options)
        self.optimizer.step()

    def moments(self) -> dict[str, list[Shard]]:
        """What is kept of each tensor, by kind."""
        import torch
        from torch import distributed as dist

        states = [self.state[m] for m in self.masters]
        kinds = {name: [state[name] for state in states] for name in self.keeps}
        if any(s.tensor.dtype != torch.float32 for s in self.shards):
            kinds["master"] = self.masters
        if self.flat:
            for kind, (own,) in kinds.items():
                flat = torch.empty(self.stretch * self.copies.number, device=self.place)
                dist.all_gather_into_tensor(flat, own, group=self.copies.group)
                kinds[kind] = list(torch.split(flat[: sum(self.sizes)], self.sizes))
        return {
            kind: [Shard(s.name, s.box, t.view(s.tensor.shape)) for s, t in zip(self.shards, tensors, strict=True)]
            for kind, tensors in kinds.items()
        }

    def restore(self, moments: MomentTensors, steps: int) -> None:
        import torch

        self.state.clear()
        kinds = {
            kind: [of[s.name] for s in self.shards]
            for kind, of in moments.items()
            if all(s.name in of for s in self.shards)
        }
        kinds = {kind: tensors for kind, tensors in kinds.items() if kind == "master" or kind in self.keeps}
        if self.flat:
            kinds = {kind: [self._stretch(tensors)] for kind, tensors in kinds.items()}
        masters = kinds.pop("master", None)
        if masters is None and not self.copied:
            weights = [s.tensor for s in self.shards]
            masters = [self._stretch(weights)] if self.flat else weights
        for i, master in enumerate(self.masters):
            if masters is not None and masters[i] is not master:
                master.copy_(masters[i])
            if steps and len(kinds) == len(self.keeps):  # an optimizer that was another one begins anew
                self.state[master] = {"step": torch.tensor(float(steps)), **{kind: of[i] for kind, of in kinds.items()}}

    def _write_back(self) -> None:
        """From the masters to the weights."""
        import torch
        from torch import distributed as dist

        if self.flat:
            weights = [s.tensor.view(-1) for s in self.shards]
            for low in range(0, self.stretch, CHUNK):
                part = self.masters[0][low : low + CHUNK]
                parts = torch.empty(self.copies.number, len(part), device=self.place)
                dist.all_gather_into_tensor(parts.view(-1), part, group=self.copies.group)
                for rank, values in enumerate(parts):
                    start = self.stretch * rank + low
                    for i, where, piece in self._overlaps(start, start + len(part)):
                        weights[i][piece].copy_(values[where])
        else:
            for master, shard in zip(self.masters, self.shards, strict=True):
                if master is not shard.tensor:
                    shard.tensor.copy_(master)


class _Matrices(_Part):
    """Matrices that step by Muon: the momentum of each element is this rank's own, what is made orthogonal is the whole
    matrix, the same on all ranks that have a part of it. Of experts each is a matrix, on the ranks that hold it."""

    def _prepare(self, rule: Rule) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        return defaultdict(dict)

    def _turn(self, options: dict[str, Any]) -> None:
        own = list(self._own()) if self.flat else [(i, slice(None), slice(None)) for i in range(len(self.shards))]
        for i, (tensor, shard) in enumerate(zip(self.tensors, self.shards, strict=True)):
            master = self.masters[0 if self.flat else i]
            # The elements that are this rank's to step: where they are in their master, and in the shard.
            pieces = [(where, piece) for j, where, piece in own if j == i]
            turned = self._whole(self._momenta(master, pieces, shard, options), tensor, shard)
            if tensor.experts:
                for matrix in turned:
                    matrix.copy_(orthogonal(matrix.clone()))
            else:
                turned = orthogonal(turned)
            part = turned[slices(_kept(tensor, shard))].reshape(-1)
            for where, piece in pieces:
                values = master.view(-1)[where]
                values.mul_(1 - options["lr"] * options["weight_decay"]).add_(
                    part[piece], alpha=-options["lr"] * _scale(tensor, options)
                )
            del turned, part  # or the next matrix would have them beside its own

    def _momenta(
        self, master: torch.Tensor, pieces: list[tuple[slice, slice]], shard: Shard, options: dict[str, Any]
    ) -> torch.Tensor:
        """The momentum of a shard, zero where another rank steps."""
        import torch

        made = torch.zeros(shard.tensor.shape, device=self.place)
        for where, piece in pieces:
            made.view(-1)[piece] = self._momentum(master, where, options)
        return made

    def _momentum(self, master: torch.Tensor, where: slice, options: dict[str, Any]) -> torch.Tensor:
        """The momentum of some elements of a master, taken on by their gradient, as Muon takes it: with `nesterov` a
        step ahead."""
        import torch

        if "momentum_buffer" not in self.state[master]:
            self.state[master]["momentum_buffer"] = torch.zeros(master.shape, device=self.place)
        assert master.grad is not None
        buffer, gradient = self.state[master]["momentum_buffer"].view(-1)[where], master.grad.reshape(-1)[where]
        buffer.lerp_(gradient, 1 - options["momentum"])
        return gradient.lerp(buffer, options["momentum"]) if options["nesterov"] else buffer

    def _whole(self, own: torch.Tensor, tensor: Tensor, shard: Shard) -> torch.Tensor:
        """A matrix, or those of a rank's experts, from what ranks have of it, zero where another has it: the sum
        changes no bit, whatever the boxes."""
        import torch
        from torch import distributed as dist

        if self.flat:
            dist.all_reduce(own, group=self.copies.group)
        shape = (len(own), *tensor.shape[1:]) if tensor.experts else tensor.shape
        if own.shape == shape:
            return own
        whole = torch.zeros(shape, device=self.place)
        whole[slices(_kept(tensor, shard))] = own
        if tensor.experts:
            dist.all_reduce(whole, group=self.devices.among(self.layout, "pp", "ep", "edp"))
            return whole
        if self.divided:
            dist.all_reduce(whole, group=self.devices.axis("dp").get_group())
        if self.layout.tp > 1 and tensor.tp_dim >= 0:
            dist.all_reduce(whole, group=self.devices.axis("tp").get_group())
        return whole


def _kept(tensor: Tensor, shard: Shard) -> Box:
    """Where a shard lies in the whole matrix, or in those of the rank's own experts."""
    first, *rest = shard.box
    return ((0, first[1] - first[0]), *rest) if tensor.experts else shard.box


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix with the same singular vectors and singular values near 1, by Newton-Schulz iterations, which take the
    place of `matrix`.

    Coefficients and number are those of torch.optim.Muon (https://kellerjordan.github.io/posts/muon/), which computes
    in bf16. There the last bit of a gradient moved weights by up to 4e-4 in six steps of a rate of 1e-3: layouts would
    differ by as much. This is in float32.
    """
    import torch

    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    del matrix
    x.div_(x.norm().clamp(min=1e-7))
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _scale(tensor: Tensor, options: dict[str, Any]) -> float:
    """What a step is multiplied by for its matrix's shape (arXiv:2502.16982, eq. 4)."""
    rows, columns = tensor.shape[-2:]
    return (
        0.2 * math.sqrt(max(rows, columns))
        if options["adjust"] == "match_rms_adamw"
        else math.sqrt(max(1, rows / columns))
    )
