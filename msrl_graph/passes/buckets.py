"""The buckets of a resharding edge: the tensors that are moved together.

Invariant: each tensor is in one bucket, and a bucket with several tensors has at most the limit of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..model.architecture import Model
from ..sharding.layout import Side, stages
from ..sharding.tensors import Tensor

GIB = 1 << 30
# Small models are also cut into a few buckets, so that gathering and selecting can overlap.
FEW = 4


def order_by_stage(
    tensors: tuple[Tensor, ...], sizes: Mapping[str, int], source: Side, across: bool
) -> Mapping[str, int]:
    """Return the sizes of tensors, in the order in which tensors are put into buckets.

    The order is normally the model's order. If layers change their pipeline stage (`across`), the order takes one layer
    of each stage in turn, so that all stages send at the same time.
    """
    if not across:
        return {tensor.name: sizes[tensor.name] for tensor in tensors}
    order = []
    for stage in range(source.layout.pp):
        layers = list(dict.fromkeys(tensor.layer for tensor in tensors if stages(tensor, source.layout)[0] == stage))
        order += [(layers.index(tensor.layer), stage, tensor.name) for tensor in tensors if tensor.layer in set(layers)]
    return {name: sizes[name] for _, _, name in sorted(order, key=lambda entry: entry[:2])}


def split_by_turn(
    model: Model, sizes: Mapping[str, int], limit: int
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Return the buckets of each resharding, and those of only the first one.

    `limit` is the stated size of a bucket in bytes; 0 if none is stated.
    """
    most = limit or min(GIB, -(-sum(sizes.values()) // FEW))
    moved = {tensor.name for tensor in model.moved}
    turns = [{name: size for name, size in sizes.items() if (name in moved) is each} for each in (True, False)]
    return split_into_buckets(turns[0], most), split_into_buckets(turns[1], most)


def split_into_buckets(sizes: Mapping[str, int], limit: int) -> tuple[tuple[str, ...], ...]:
    """Split tensors, in order, into buckets of at most `limit` bytes.

    A tensor that is larger than `limit` gets a bucket of its own.
    """
    buckets: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not buckets or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return tuple(map(tuple, buckets))
