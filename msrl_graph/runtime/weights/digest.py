"""An additive digest of tensors: the sum of the digests of a tensor's parts.

Invariant: the digest is the sum of bits(e) * weight(position of e in the whole tensor) over all elements e, modulo
2^64. In each dimension, each index has an odd pseudo-random number. The weight of a position is the product of the odd
numbers of its indices. An odd number times a change of at most 32 bits is never 0, so a change of one element always
changes the digest. Any other change, for example if rows swap places or the values are of another version, leaves the
digest equal only by chance. If only signs change, this chance is less than 1 in 10^8. In all other cases it is far
smaller. The digest does not depend on layout, device or order, because it is a sum of integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ... import noise
from ...sharding.tensors import Box
from ..process.memory import unmeasured

_STREAM = noise.RandomStream(0, "digest")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element
WIDTH = 8  # bytes of an element while it is summed
Odd = list[torch.Tensor]  # by dim, the odd numbers of a range of indices


class Digest:
    """The computation of digests for tensors on one device.

    - `shapes`: the shapes of the whole tensors. Parts of these tensors will be digested. In each dimension, the number
      of odd numbers is the largest size that any of these tensors has in this dimension.
    - `dtype`: the type to which elements are converted before they are digested.
    - `place`: the device.
    - `at_once`: the number of elements that are summed at a time, in a buffer with WIDTH bytes for each element.
    """

    def __init__(
        self, shapes: Iterable[Sequence[int]], dtype: torch.dtype, place: str | torch.device, at_once: int
    ) -> None:
        self.dtype = dtype
        self.at_once = at_once
        self._bits = _INTEGERS[dtype.itemsize]
        most: dict[int, int] = {}  # the largest size of each dim
        for shape in shapes:
            for dim, size in enumerate(shape):
                most[dim] = max(size, most.get(dim, 0))
        self._odd = [
            torch.from_numpy((_STREAM.keys(dim, np.arange(most[dim])) | np.uint64(1)).view(np.int64)).to(place)
            for dim in sorted(most)
        ]

    def position_weights(self, box: Box) -> Odd:
        """Return one tensor of odd integers for each dimension of a box.

        The coefficient of an element in the digest is the product of the integers at its index in each dimension.
        """
        return [self._odd[dim][start:stop] for dim, (start, stop) in enumerate(box)]

    def make_buffer(self, device: torch.device) -> torch.Tensor:
        """Return a buffer in which `digests` computes its sums.

        One buffer is used for many digests, because it takes time to get fresh memory of the host from the system.
        """
        return torch.empty(self.at_once, dtype=torch.int64, device=device)

    def digests(
        self, values: Sequence[torch.Tensor], axis_weights: Odd, room: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the digests of tensors that have the same box.

        The result has one number for each tensor, on the device of the tensors. `axis_weights` are the
        `position_weights` of this box. `room` is a buffer from `make_buffer`.
        """
        first = values[0]
        room = self.make_buffer(first.device) if room is None else room
        dim = next((axis for axis, length in enumerate(first.shape) if length > 1), None)
        if len(values) > 1 and first.numel() * len(values) > self.at_once:
            count = max(1, self.at_once // first.numel())
            return torch.cat(
                [
                    self.digests(values[start : start + count], axis_weights, room)
                    for start in range(0, len(values), count)
                ]
            )
        if first.numel() > self.at_once and dim is not None:
            step = max(1, self.at_once * first.shape[dim] // first.numel())
            total = torch.zeros(1, dtype=torch.int64, device=first.device)
            parts = zip(torch.split(first, step, dim), torch.split(axis_weights[dim], step), strict=True)
            part, own = next(parts)  # the largest
            total += self.digests([part], [*axis_weights[:dim], own, *axis_weights[dim + 1 :]], room)
            with unmeasured():  # a large model needs a million of these operations
                for part, own in parts:
                    total += self.digests([part], [*axis_weights[:dim], own, *axis_weights[dim + 1 :]], room)
            return total
        terms = room[: first.numel() * len(values)].view(len(values), *first.shape)
        for place, tensor in zip(terms.unbind(), values, strict=True):
            place.copy_((tensor if tensor.dtype == self.dtype else tensor.to(self.dtype)).view(self._bits))
        for weights in reversed(axis_weights):
            terms = _sum_on_host(terms, weights) if terms.is_cpu else terms.mul_(weights).sum(-1)
        return terms


def _sum_on_host(terms: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sums of products over the last dimension, by vector instructions."""
    return torch.from_numpy(np.asarray(np.einsum("...i,i->...", terms.numpy(), weights.numpy())))
