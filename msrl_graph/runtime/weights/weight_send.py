"""Resharding between two pools: the update's weights are sent to the ranks that generate, and stay where they are.

Invariant: after `run`, each generation rank holds exactly its boxes, bit for bit the values of the update's, and what
the update said of them (`word`). Every rank walks the same list of messages and takes part in its own, each of which
all ends finish before their next: so no two ranks wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed as dist

from ...backends import hf_modules
from ...backends.spec import Shard
from ...ir.plan import Plan, Reshard
from ...model.architecture import Model
from ...sharding.layout import Box, Side, slices, within
from ...sharding.redistribute import fetches


@dataclass(frozen=True)
class Message:
    """Boxes of tensors, from a rank to the first of some on one host that want the same (`group`), which hands them
    on; with the `first` one for these goes the word."""

    giver: int
    takers: tuple[int, ...]
    group: Any
    boxes: list[tuple[str, Box]]
    first: bool


class Sender:
    """One resharding edge on one rank; `rank` counts through all pools. `model` has the update's type, `sides` are the
    update's and the generation's, `shards` the update's weights, none on a rank that generates. `word` are numbers in
    the host's memory, which the ranks of the update all have, and those of the generation get. All ranks of all pools
    make one: it makes process groups."""

    group: dist.ProcessGroup | None = None  # where messages between pools pass; None: where all ranks are

    def __init__(
        self,
        plan: Plan,
        edge: Reshard,
        model: Model,
        rank: int,
        sides: tuple[Side, Side],
        shards: Sequence[Shard],
        word: torch.Tensor | None = None,
    ) -> None:
        self.name = edge.name
        self.rank = rank
        self.shards = shards
        self.word = word
        source, target = sides
        per_host = plan.cluster.devices_per_node
        # What holds for a tensor holds for all that differ from it in nothing but the name.
        alike = {t.name: replace(t, name="") for t in model.tensors}
        found = {t: fetches(t, source, target, per_host) for t in dict.fromkeys(alike.values())}
        groups: dict[tuple[int, ...], Any] = {}
        for takers in dict.fromkeys(f.takers for fetched in found.values() for f in fetched):
            groups[takers] = dist.new_group(list(takers)) if len(takers) > 1 else None
        self.messages: list[Message] = []
        self.first: dict[int, int] = {}  # by rank that sends, the one that its first message goes to
        told: set[tuple[int, ...]] = set()
        most = max(source.devices, target.devices)
        for names in edge.buckets:
            wanted: dict[tuple[int, tuple[int, ...]], list[tuple[str, Box]]] = {}
            for name in names:
                for giver, takers, box in found[alike[name]]:
                    wanted.setdefault((giver, takers), []).append((name, box))
            # In a round each source rank has another target, so that messages of a round pass side by side.
            for giver, takers in sorted(wanted, key=lambda pair: ((pair[1][0] - pair[0]) % most, pair)):
                self.first.setdefault(giver, takers[0])
                if rank in (giver, *takers):
                    boxes = wanted[giver, takers]
                    self.messages.append(Message(giver, takers, groups[takers], boxes, takers not in told))
                told.add(takers)
        self.dtype = getattr(torch, hf_modules.DTYPES[model.dtype])
        self.seconds: dict[str, float] = {}
        self.moved = 0  # bytes received in the last run

    def run(self, allocate: Callable[[], list[Shard]]) -> None:
        """Sends or receives all buckets; `allocate` gives the shards to fill, none on a rank that sends."""
        self.seconds = {}
        self.moved = 0
        self.pass_on(self.messages, (*self.shards, *allocate()))

    def pass_on(self, messages: Sequence[Message], shards: Sequence[Shard]) -> None:
        """Takes part in messages, out of these shards or into them."""
        since = time.perf_counter()

        def timed(name: str) -> None:
            nonlocal since
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - since
            since = time.perf_counter()

        held = {s.name: s for s in shards}
        with torch.no_grad():
            for message in messages:
                if message.first and self.word is not None:
                    self._pass(message, self.word)
                    timed("send")
                self._take_part(message, held, timed)

    def _pass(self, message: Message, numbers: torch.Tensor) -> None:
        """From the giver of a message to all of its takers."""
        if self.rank == message.giver:
            dist.send(numbers, message.takers[0], group=self.group)
            return
        if self.rank == message.takers[0]:
            dist.recv(numbers, message.giver, group=self.group)
        if message.group is not None:
            dist.broadcast(numbers, group=message.group, group_src=0)

    def _take_part(self, message: Message, held: dict[str, Shard], timed: Callable[[str], None]) -> None:
        parts = [held[name].tensor[slices(within(box, held[name].box))] for name, box in message.boxes]
        sizes = [part.numel() for part in parts]
        buffer = torch.empty(sum(sizes), dtype=self.dtype, device=parts[0].device)
        # Laid down one by one: parts that lie in strides would be copied twice where they were joined.
        rooms = [room.view(p.shape) for p, room in zip(parts, torch.split(buffer, sizes), strict=True)]
        if self.rank == message.giver:
            _copy(parts, rooms)
            timed("buffer")
            self._pass(message, buffer)
            timed("send")
            return
        timed("buffer")
        self._pass(message, buffer)
        self.moved += buffer.nbytes
        timed("send")
        _copy(rooms, parts)
        timed("select")


def _copy(given: Sequence[torch.Tensor], goal: Sequence[torch.Tensor]) -> None:
    for one, other in zip(given, goal, strict=True):
        other.copy_(one)
