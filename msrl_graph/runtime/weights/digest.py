"""A digest of a tensor's part that adds up: however a tensor is cut, the digests of its parts sum to that of the whole.

Invariant: it is the sum of bits(e) * weight(position of e in the whole tensor) modulo 2^64, where a position's weight
is the product of one odd pseudo-random number for its index in each dim. An odd number times a change of at most 32
bits is never 0, so a change of one element always shows; whatever else happens to a tensor (rows or elements that
change places, values of another version) is missed by chance alone: where nothing but signs changes, less than once in
10^8, else far less often. Nothing of it depends on layout, device or order: these are integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ... import noise
from ...sharding.layout import Box
from ..process.memory import unmeasured

_STREAM = noise.RandomStream(0, "digest")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element
WIDTH = 8  # bytes of an element while it is summed
Odd = list[torch.Tensor]  # the numbers of a stretch of indices, by dim


class Digest:
    """Digests of tensors of at most these `shapes`, whose elements lie on `place` and count as `dtype`; `at_once` are
    summed at a time, in so many times WIDTH bytes."""

    def __init__(
        self, shapes: Iterable[Sequence[int]], dtype: torch.dtype, place: str | torch.device, at_once: int
    ) -> None:
        self.dtype = dtype
        self.at_once = at_once
        self._bits = _INTEGERS[dtype.itemsize]
        most: dict[int, int] = {}  # by dim, the largest size
        for shape in shapes:
            for dim, size in enumerate(shape):
                most[dim] = max(size, most.get(dim, 0))
        self._odd = [
            torch.from_numpy((_STREAM.keys(dim, np.arange(most[dim])) | np.uint64(1)).view(np.int64)).to(place)
            for dim in sorted(most)
        ]

    def at(self, box: Box) -> Odd:
        """The numbers of a box's positions."""
        return [self._odd[dim][start:stop] for dim, (start, stop) in enumerate(box)]

    def room(self, device: torch.device) -> torch.Tensor:
        """Where elements are summed: taken once for many digests, since a host's system gives pages one by one."""
        return torch.empty(self.at_once, dtype=torch.int64, device=device)

    def of(self, values: Sequence[torch.Tensor], at: Odd, room: torch.Tensor | None = None) -> torch.Tensor:
        """Those of what lies at the same positions of some tensors: a number for each, on their device."""
        first = values[0]
        room = self.room(first.device) if room is None else room
        dim = next((d for d, length in enumerate(first.shape) if length > 1), None)
        if len(values) > 1 and first.numel() * len(values) > self.at_once:
            some = max(1, self.at_once // first.numel())
            return torch.cat([self.of(values[i : i + some], at, room) for i in range(0, len(values), some)])
        if first.numel() > self.at_once and dim is not None:
            each = max(1, self.at_once * first.shape[dim] // first.numel())
            total = torch.zeros(1, dtype=torch.int64, device=first.device)
            parts = zip(torch.split(first, each, dim), torch.split(at[dim], each), strict=True)
            part, own = next(parts)  # the largest
            total += self.of([part], [*at[:dim], own, *at[dim + 1 :]], room)
            with unmeasured():  # of a large model they are a million operations
                for part, own in parts:
                    total += self.of([part], [*at[:dim], own, *at[dim + 1 :]], room)
            return total
        found = room[: first.numel() * len(values)].view(len(values), *first.shape)
        for place, one in zip(found.unbind(), values, strict=True):
            place.copy_((one if one.dtype == self.dtype else one.to(self.dtype)).view(self._bits))
        for weights in reversed(at):  # of integers only a host's cores have a product, which takes less
            found = found @ weights if found.is_cpu else found.mul_(weights).sum(-1)
        return found
