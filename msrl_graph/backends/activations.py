"""What layers keep for their backward pass, in host memory in between: all of it, or where layers are computed again
their inputs.

Invariant: what backward sees is what forward kept, bit for bit, and what shared a storage shares one again. Storages
are copied as layers make them and given back a layer later; on the way back the next layer's are brought while one is
passed. Weights stay where they are, and so does what is no floating-point number: all layers have the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .devices import Lane, TorchDevice, content, local

if TYPE_CHECKING:
    import torch

LEAST = 1 << 10  # bytes; copying less gains nothing


class Activations:
    """Of the `layers` of a model on a device."""

    def __init__(self, device: TorchDevice, layers: Sequence[torch.nn.Module]) -> None:
        self.device = device
        self.lanes = (Lane(device), Lane(device))
        self.now: _Pass | None = None  # a forward pass that keeps
        for layer in layers:
            layer.register_forward_pre_hook(self._enter)
        layers[-1].register_forward_hook(self._leave)

    @contextmanager
    def kept_away(self) -> Iterator[None]:
        """Around a forward pass."""
        import torch

        if not torch.is_grad_enabled():
            yield
            return
        self.now = _Pass(self.device, *self.lanes)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.now.pack, self.now.unpack):
                yield
        finally:
            self.now = None

    def _enter(self, layer: Any, _: Any) -> None:
        if self.now is not None:  # in a backward pass a layer is computed again
            self.now.begin({local(p).untyped_storage()._cdata for p in layer.parameters()})

    def _leave(self, *_: Any) -> None:
        if self.now is not None:
            self.now.end()


class _Kept:
    """A storage that some tensors are saved of, `uses` times."""

    def __init__(self, storage: torch.UntypedStorage, buffer: torch.Tensor, group: int) -> None:
        self.here: torch.UntypedStorage | None = storage  # on the device
        self.buffer = buffer
        self.group = group
        self.uses = 0
        self.mark: Any = None  # of its way back


@dataclass(frozen=True)
class _Saved:
    """A tensor of a storage; of a DTensor also how it is wrapped."""

    kept: _Kept
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    spec: Any


class _Pass:
    """What one forward pass keeps, layer by layer: a group each."""

    def __init__(self, device: TorchDevice, out: Lane, back: Lane) -> None:
        self.device = device
        self.out = out
        self.back = back
        self.groups: list[list[_Kept]] = [[]]
        self.known: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Kept]] = {}
        self.weights: set[int] = set()
        self.over = False
        self.low = -1  # the last group that was brought back
        self.marks: list[Any] = []  # of the ways out, by group

    # Forward.

    def begin(self, weights: set[int]) -> None:
        """A layer begins: what the layer before the last kept leaves the device."""
        self.weights = weights
        self.marks.append(self.out.mark())
        self.groups.append([])
        if len(self.groups) > 2:
            self._leave(len(self.groups) - 3)

    def end(self) -> None:
        """The last layer ends, and what all have kept leaves."""
        self.over = True
        self.marks.append(self.out.mark())
        for group in range(len(self.groups)):
            self._leave(group)
        self.low = len(self.groups)

    def _leave(self, group: int) -> None:
        self.out.join(self.marks[group])
        for kept in self.groups[group]:
            kept.here = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        inner = local(tensor)
        storage = inner.untyped_storage()
        if self.over or not inner.is_floating_point() or storage.nbytes() < LEAST or storage._cdata in self.weights:
            return tensor
        seen = self.known.get(storage._cdata)
        if seen is None or seen[0]() is None:  # an address may be taken again
            seen = weakref.ref(storage), self._copied(storage)
            self.known[storage._cdata] = seen
        kept = seen[1]
        kept.uses += 1
        spec = getattr(tensor, "_spec", None)  # of a DTensor
        return _Saved(kept, inner.dtype, int(inner.storage_offset()), inner.size(), inner.stride(), spec)

    def _copied(self, storage: torch.UntypedStorage) -> _Kept:
        whole = content(storage)
        buffer = self.device.host_buffer(whole)
        with self.out.begin():
            buffer.copy_(whole, non_blocking=True)
        kept = _Kept(storage, buffer, len(self.groups) - 1)
        self.groups[-1].append(kept)
        return kept

    # Backward.

    def unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        import torch

        if not isinstance(saved, _Saved):
            return saved
        kept = saved.kept
        if kept.group == self.low or (kept.here is None and kept.group == self._below(self.low)):  # a layer begins
            self._come(self.groups[kept.group])
            self.low = self._below(kept.group)
            self._come(self.groups[self.low] if self.low >= 0 else [])
        elif kept.here is None:  # several layers have it
            self._come([kept])
        self.back.join(kept.mark)
        assert kept.here is not None
        found = torch.empty(0, dtype=saved.dtype, device=kept.here.device)
        found.set_(kept.here, saved.offset, saved.size, saved.stride)
        kept.uses -= 1
        if not kept.uses:
            kept.here = None
        if saved.spec is None:
            return found
        from torch.distributed.tensor import DTensor

        return DTensor(found, saved.spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def _below(self, group: int) -> int:
        """The next group on the way back that holds something; -1: none does."""
        return next((i for i in range(group - 1, -1, -1) if self.groups[i]), -1)

    def _come(self, some: Sequence[_Kept]) -> None:
        import torch

        some = [kept for kept in some if kept.here is None and kept.uses]
        places = [torch.empty(kept.buffer.shape, dtype=torch.uint8, device=self.device.place) for kept in some]
        with self.back.begin():
            for kept, place in zip(some, places, strict=True):
                place.copy_(kept.buffer, non_blocking=True)
        mark = self.back.mark()
        for kept, place in zip(some, places, strict=True):
            kept.here = place.untyped_storage()
            kept.mark = mark
