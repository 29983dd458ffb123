"""Values of published weights, read from a model's folder into tensors.

Invariant: only the part of a file that a box needs is read. For a quantized weight, it is the blocks that the box
touches, with their scales. Numbers are multiplied by their scales in float32, and then rounded once, to the type of the
tensor that they are copied to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..model.quantization import GROUP, FolderWeight
from ..sharding.layout import elements, slices
from ..sharding.tensors import Box

if TYPE_CHECKING:
    import torch

AT_ONCE = 1 << 22  # elements that are multiplied by their scales at one time
# The values of the 16 numbers of 4 bits (e2m1): a sign, two bits of exponent and one of mantissa.
E2M1 = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
EXPONENT_BIAS = 127
Read = Callable[[Box], "torch.Tensor"]


def copy_boxes(
    weights: Mapping[str, FolderWeight], wanted: Mapping[str, Sequence[tuple[torch.Tensor, Box]]]
) -> None:
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

    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
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
    copy = _copy_mxfp4 if weight.is_mxfp4 else _copy_fp8
    for part, index in _split_box(box):
        copy(weight, values, scales, target[index], part)


def _split_box(box: Box) -> Iterator[tuple[Box, tuple[Any, ...]]]:
    """Yield parts of a box, each with its index in the box.

    A part has at most AT_ONCE elements, or is one row. It has one index in each dim but the last two.
    """
    if len(box) > 2:
        for place, first in enumerate(range(*box[0])):
            for part, index in _split_box(box[1:]):
                yield ((first, first + 1), *part), (slice(place, place + 1), *index)
        return
    start, stop = box[0] if len(box) > 1 else (0, 1)
    rows = max(1, AT_ONCE // max(1, elements(box[-1:])))
    for row in range(start, stop, rows):
        end = min(row + rows, stop)
        if len(box) > 1:
            yield ((row, end), *box[1:]), (slice(row - start, end - start),)
        else:
            yield box, ()


def _copy_fp8(weight: FolderWeight, values: Any, scales: Any, target: torch.Tensor, box: Box) -> None:
    import torch

    numbers = values[slices(box)].to(torch.float32)
    if weight.block is None:
        assert weight.scales is not None
        whole = tuple(slice(None) for _ in weight.scales.shape)
        target.copy_(numbers * scales[whole or ...].to(torch.float32))
        return
    blocks = [(start // size, -(-stop // size)) for (start, stop), size in zip(box[-2:], weight.block, strict=True)]
    part = scales[slices((*box[:-2], *blocks))].to(torch.float32)
    for dim, (start, stop), size in zip((-2, -1), box[-2:], weight.block, strict=True):
        block_of = torch.arange(start, stop) // size - start // size
        part = part.index_select(dim, block_of)
    target.copy_(numbers.mul_(part))


def _copy_mxfp4(weight: FolderWeight, blocks: Any, scales: Any, target: torch.Tensor, box: Box) -> None:
    import torch

    expert, (start, stop), outputs = box
    groups = (start // GROUP, -(-stop // GROUP))
    packed = blocks[slices((expert, outputs, groups, (0, GROUP // 2)))]
    exponents = scales[slices((expert, outputs, groups))].to(torch.int32) - EXPONENT_BIAS
    table = torch.tensor(E2M1)
    pairs = torch.stack((packed & 0xF, packed >> 4), -1).to(torch.int32)
    numbers = torch.ldexp(table[pairs].flatten(-2), exponents[..., None]).flatten(-2)
    first = groups[0] * GROUP
    target.copy_(numbers[..., start - first : stop - first].transpose(-1, -2))
