"""The plan of resharding edges: routes, buckets, steps, with bytes and seconds.

Invariant: the classes are plain data. The pass in passes/reshard.py makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..hardware.cluster import Figure
from ..sharding.tensors import Tensor


@dataclass(frozen=True)
class Step:
    """A step of a resharding, with its bytes and its seconds per device."""

    name: str
    bytes: int
    seconds: Figure


@dataclass(frozen=True)
class ReshardRoute:
    """How one kind of weights is moved to the ranks that generate with them.

    - `of`: the kind of weights: experts, embeddings, or weights (all others). `how`: in place, all-gather, all-to-all
      or send.
    - `block`: the number of consecutive ranks that exchange weights. If it is 2, ranks 0 and 1 form one block, ranks 2
      and 3 the next block.
    - `across`: whether layers are moved to other pipeline stages. If so, ranks also exchange weights with the same
      block of every other stage.
    - `ranks`: the number of ranks that take part, in all stages. `bytes`: the bytes that the busiest device receives.
    """

    of: str
    how: str
    block: int
    across: bool
    ranks: int
    bytes: int


@dataclass(frozen=True)
class Reshard:
    """The plan of a resharding edge: an allgather-swap, or a `send` to another pool.

    The first resharding moves all weights. The bytes and seconds are those of the later ones, which leave out frozen
    weights. If the other pool may run ahead, the update sends a copy of its weights. The update makes this copy when it
    begins (`copied`). Each number of bytes per device is the number for the busiest device.
    """

    src: str
    dst: str
    mode: str
    order: str
    reason: str
    ways: tuple[ReshardRoute, ...]
    bucket_bytes: int
    buckets: tuple[tuple[str, ...], ...]  # names of the weights that each resharding moves
    first_buckets: tuple[tuple[str, ...], ...]  # names of frozen weights, which only the first resharding moves
    steps: tuple[Step, ...]
    swap_in: Step
    update_bytes_per_device: int
    generate_bytes_per_device: int
    released_bytes_per_device: int
    peak_bytes_per_device: int
    redundant_bytes: int  # what naive resharding would leave on all devices (eq. 3)
    copied: Step | None = None

    @property
    def name(self) -> str:
        """The edge as the program writes it; ranks report the edge's bytes by this name."""
        return f"{self.src} => {self.dst}"

    @property
    def received_bytes_per_device(self) -> int:
        """The bytes that a device receives each time the weights are sent."""
        return next((step.bytes for step in self.steps if step.name.endswith("by bucket")), 0)

    def route_of(self, tensor: Tensor) -> ReshardRoute:
        """Return the route of a tensor.

        An embedding or an expert uses the route of the kind `weights` if the plan has no route of its own kind.
        """
        kind = "experts" if tensor.experts else "embeddings" if tensor.padded else "weights"
        ways = {way.of: way for way in self.ways}
        return ways[kind if kind in ways else "weights"]
