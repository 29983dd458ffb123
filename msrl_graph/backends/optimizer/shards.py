"""Tensors of a model that step by one rule: the part of them that a rank owns, and what it keeps of it.

Invariant: elements step in float32, one by one, so that no layout changes what is computed. Of ZeRO 1 a rank owns a
stretch of all tensors, laid end to end, over the ranks that hold copies of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ir.optimizer_spec import Rule
from ...sharding.layout import Layout
from ..devices import release, take
from ..host_offload import HostOffload
from ..sizes import CHUNK
from ..spec import Shard

if TYPE_CHECKING:
    import torch

    from ...sharding.layout import Tensor
    from ..devices import Devices

MomentTensors = dict[str, dict[str, "torch.Tensor"]]  # by kind and tensor


@dataclass(frozen=True)
class ReplicaGroup:
    """The ranks that hold the same boxes of some tensors, each with its own part of their gradient: so many, of which
    this one is the `index`-th."""

    number: int = 1
    index: int = 0
    group: Any = None


def copies(layout: Layout, devices: Devices, divided: bool, experts: bool) -> ReplicaGroup:
    """Where weights are `divided` over dp, their gradients come summed over it."""
    if experts:
        number = 1 if divided else layout.edp
        alike = "pp ep etp"
    else:
        number, alike = (layout.cp, "pp tp dp") if divided else (layout.cp * layout.dp, "pp tp")
    if number == 1:
        return ReplicaGroup()
    group = devices.among(layout, *alike.split())
    return ReplicaGroup(number, group.rank(), group)


class OptimizerSlice:
    """Tensors, or rows of them, that step by one rule, element by element. Of ZeRO 1 this rank owns a stretch of all of
    them. Between `leave` and `arrive` what it keeps lies in host memory."""

    def __init__(
        self,
        rule: Rule,
        tensors: list[Tensor],
        shards: list[Shard],
        layout: Layout,
        devices: Devices,
        divided: bool,
        copies: ReplicaGroup,
    ) -> None:
        import torch

        self.copies = copies
        self.tensors = tensors
        self.shards = shards
        self.layout = layout
        self.devices = devices
        self.divided = divided
        self.place = devices.device.place
        self.rule = rule
        self.keeps = rule.keeps
        self.flat = layout.zero == 1 and copies.number > 1
        self.sizes = [s.tensor.numel() for s in shards]
        if self.flat:
            self.stretch = -(-sum(self.sizes) // copies.number)
            self.masters = [self._stretch([s.tensor for s in shards])]
        else:
            # Weights in float32 are their own.
            self.masters = [
                s.tensor
                if s.tensor.dtype == torch.float32
                else s.tensor.to(torch.float32, memory_format=torch.contiguous_format)
                for s in shards
            ]
        # In float32 the stretch is a copy of the weights: it lives only while a step lasts.
        self.copied = self.flat and all(s.tensor.dtype == torch.float32 for s in shards)
        self.state = self._prepare(rule)
        self.away: HostOffload | None = None
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
            low = max(at, start)
            high = min(at + size, stop)
            if low < high:
                yield i, slice(low - start, high - start), slice(low - at, high - at)
            at += size

    def _own(self) -> Iterator[tuple[int, slice, slice]]:
        """What lies in this rank's stretch."""
        return self._overlaps(self.stretch * self.copies.index, self.stretch * (self.copies.index + 1))

    def _stretch(self, tensors: list[torch.Tensor], own: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's stretch of all tensors, in float32, its end padded with zeros; in `own`, if that is given."""
        import torch

        own = torch.zeros(self.stretch, device=self.place) if own is None else own.zero_()
        for i, where, piece in self._own():
            own[where] = tensors[i].reshape(-1)[piece]
        return own

    # In host memory between steps.

    def leave(self) -> None:
        kept = self._kept()
        if self.away is None or [*map(id, self.away.tensors)] != [*map(id, kept)]:  # some come with the first step
            self.away = HostOffload(self.devices.device, kept)
        self.away.store()
        self.away.leave()

    def come(self) -> None:
        """Begins the way back."""
        if self.away is not None:
            self.away.come()

    def arrive(self) -> None:
        if self.away is not None:
            self.away.arrive()

    def _kept(self) -> list[torch.Tensor]:
        """All that is held beside the weights: states, and masters that are no weights themselves."""
        weights = {id(s.tensor) for s in self.shards}
        masters = [] if self.copied else [m for m in self.masters if id(m) not in weights]
        states = [self.state[m].get(kind) for m in self.masters if m in self.state for kind in self.keeps]
        return masters + [s for s in states if s is not None]

    def _seen(self, kept: torch.Tensor) -> torch.Tensor:
        """What is kept, wherever it lies."""
        return kept if self.away is None else self.away.stored(kept)

    def step(self, gradients: list[torch.Tensor], scale: float, options: dict[str, Any]) -> None:
        """A step; the list of gradients is emptied."""
        if self.flat:
            own = {i for i, _, _ in self._own()}  # what others step by goes first, so that no more is held than before
            gradients[:] = [g if i in own else g.new_empty(0) for i, g in enumerate(gradients)]
            gradients[:] = [self._stretch(gradients)]
        if self.copied:
            take(self.masters[0])
            self._stretch([s.tensor for s in self.shards], self.masters[0])
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
        kinds = {name: [self._seen(state[name]) for state in states] for name in self.keeps}
        if any(s.tensor.dtype != torch.float32 for s in self.shards):
            kinds["master"] = [*map(self._seen, self.masters)]
        if self.flat:
            for kind, (own,) in kinds.items():
                flat = torch.empty(self.stretch * self.copies.number, device=self.place)
                dist.all_gather_into_tensor(flat, own.to(self.place), group=self.copies.group)
                flat = flat.to(own.device)
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
                # What leaves releases its storage, which must be its own.
                kept = {kind: of[i].to(self.place, copy=self.away is not None) for kind, of in kinds.items()}
                # Where torch counts them: fused kernels do on the device.
                counts = self.place if self.rule.options.get("fused") else None
                self.state[master] = {"step": torch.tensor(float(steps), device=counts), **kept}

    def _write_back(self) -> None:
        """From the masters to the weights."""
        import torch
        from torch import distributed as dist

        if self.flat:
            weights = [s.tensor for s in self.shards]
            for low in range(0, self.stretch, CHUNK):
                part = self.masters[0][low : low + CHUNK]
                parts = torch.empty(self.copies.number, len(part), device=self.place)
                dist.all_gather_into_tensor(parts.view(-1), part, group=self.copies.group)
                for rank, values in enumerate(parts):
                    start = self.stretch * rank + low
                    for i, where, piece in self._overlaps(start, start + len(part)):
                        _put(weights[i], piece, values[where])
                del parts, values  # or the next would be beside them
        else:
            for master, shard in zip(self.masters, self.shards, strict=True):
                if master is not shard.tensor:
                    shard.tensor.copy_(master)


def _put(tensor: torch.Tensor, piece: slice, values: torch.Tensor) -> None:
    """Writes some elements of a tensor, which may be a part of another."""
    flat = tensor.reshape(-1)  # a view of it, or a copy
    flat[piece].copy_(values)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
