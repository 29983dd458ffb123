"""Values of published weights, read from a model's folder into tensors.

Invariant: only the part of a file that a box needs is read. For a quantized weight, it is the blocks that the box
touches, with their scales. Numbers are multiplied by their scales in float32, and then rounded once, to the type of the
tensor that they are copied to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..hardware.device_kinds import HOST
from ..model.quantization import GROUP, FolderWeight
from ..sharding.layout import elements, slices
from ..sharding.tensors import Box

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

AT_ONCE = 1 << 19  # elements that are multiplied by their scales at one time
# The values of the 16 numbers of 4 bits (e2m1): a sign, two bits of exponent and one of mantissa.
E2M1 = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
EXPONENT_BIAS = 127
Read = Callable[[Box], "torch.Tensor"]


def copy_boxes(weights: Mapping[str, FolderWeight], wanted: Mapping[str, Sequence[tuple[torch.Tensor, Box]]]) -> None:
    """Copy boxes of weights into tensors, one file after the other.

    `wanted` has, by the name of a weight, tensors and the box of the weight that each of them gets. Raises ValueError
    for a weight that cannot be read.
    """
    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        if weights[name].problem:
            raise ValueError(f"`{name}` in {weights[name].values.file} {weights[name].problem}")
        by_file.setdefault(weights[name].values.file, []).append(name)
    for names in by_file.values():
        with ExitStack() as stack:
            open_file = cache(lambda file, stack=stack: _open_file(file, stack))
            for name in names:
                for target, box in wanted[name]:
                    if elements(box):
                        _copy_box(weights[name], target, box, open_file)


def _open_file(file: Path, stack: ExitStack) -> Callable[[str], Any]:
    """Open a weight file, and return a function that finds its tensors by name.

    A tensor can be indexed; only what the index needs is read from the disk.
    """
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        return stack.enter_context(safe_open(file, framework="pt")).get_slice  # type: ignore[no-any-return]
    import torch

    state: dict[str, Any] = torch.load(file, map_location=HOST.torch, weights_only=True, mmap=True)
    stack.callback(state.clear)
    return state.__getitem__


def _copy_box(
    weight: FolderWeight, target: torch.Tensor, box: Box, open_file: Callable[[Path], Callable[[str], Any]]
) -> None:
    values = open_file(weight.values.file)(weight.values.name)
    if weight.scales is None:
        target.copy_(values[slices(box)])
        return
    scales = open_file(weight.scales.file)(weight.scales.name)
    copy, dim = (_copy_mxfp4, -1) if weight.is_mxfp4 else (_copy_fp8, max(-2, -len(box)))
    for part, index in _split_box(box, dim):
        copy(weight, values, scales, target[index], part)


def _split_box(box: Box, dim: int) -> Iterator[tuple[Box, tuple[slice, ...]]]:
    """Yield parts of a box, each with its index in the box.

    A part has one index in each dim but the last two. It has at most AT_ONCE elements, or one index in the dim `dim`,
    -1 or -2.
    """
    leading, matrix = box[:-2], box[-2:]
    start, stop = matrix[dim]
    step = max(1, AT_ONCE * (stop - start) // max(1, elements(matrix)))
    cuts = [(first, min(first + step, stop)) for first in range(start, stop, step)]
    for place in itertools.product(*(range(*extent) for extent in leading)):
        for cut in cuts:
            part = (*((first, first + 1) for first in place), *matrix[:dim], cut, *matrix[len(matrix) + dim + 1 :])
            yield part, tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(part, box, strict=True))


@cache
def _fp8_table() -> NDArray[Any]:
    """Make a table of the 256 numbers of float8_e4m3fn, as float32.

    With it, a CPU is about four times as fast as with torch's conversion.
    """
    import torch

    table: NDArray[Any] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    return table


@cache
def _pair_table() -> NDArray[Any]:
    """Make a table of the two numbers in each of the 256 bytes of MXFP4.

    Two numbers in float32 are one entry of 64 bits.
    """
    import numpy as np

    return np.array([(E2M1[byte & 0xF], E2M1[byte >> 4]) for byte in range(256)], np.float32).view(np.int64).ravel()


def _copy_fp8(weight: FolderWeight, values: Any, scales: Any, target: torch.Tensor, box: Box) -> None:
    import numpy as np
    import torch

    numbers = _fp8_table().take(values[slices(box)].view(torch.uint8).numpy(), mode="clip")
    if weight.block is None:
        assert weight.scales is not None
        factors = scales[tuple(slice(None) for _ in weight.scales.shape) or ...].to(torch.float32).numpy()
    else:
        blocks = [(start // size, -(-stop // size)) for (start, stop), size in zip(box[-2:], weight.block, strict=True)]
        factors = scales[slices((*box[:-2], *blocks))].to(torch.float32).numpy()
        for dim, (start, stop), size in zip((-2, -1), box[-2:], weight.block, strict=True):
            factors = factors.take(np.arange(start, stop) // size - start // size, axis=dim)
    numbers *= factors
    target.copy_(torch.from_numpy(numbers))


def _copy_mxfp4(weight: FolderWeight, blocks: Any, scales: Any, target: torch.Tensor, box: Box) -> None:
    import numpy as np
    import torch

    expert, (start, stop), outputs = box
    groups = (start // GROUP, -(-stop // GROUP))
    packed = blocks[slices((expert, outputs, groups, (0, GROUP // 2)))].numpy()
    exponents = scales[slices((expert, outputs, groups))].numpy().astype(np.int32) - EXPONENT_BIAS
    numbers = _pair_table().take(packed, mode="clip").view(np.float32)
    numbers *= np.ldexp(np.float32(1.0), exponents)[..., None]
    first = groups[0] * GROUP
    inputs = numbers.reshape(*numbers.shape[:2], -1)[..., start - first : stop - first]
    target.copy_(torch.from_numpy(inputs).transpose(-1, -2))
