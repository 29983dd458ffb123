"""Resharding between two pools: the update's weights are sent to generating ranks.

The weights also remain on the update's ranks.

Invariant: after `run`, each generation rank holds exactly its boxes, and their values are bit for bit the values of the
update's weights. The rank also has the numbers that the update reported about the weights (`word`). All ranks go
through the same list of messages, and each rank takes part in the messages that it sends or receives. A rank finishes a
message before its next message, so no two ranks wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from ...backends import hf_modules
from ...backends.engine_protocols import Shard
from ...ir.plan import Plan
from ...ir.resharding_plan import Reshard
from ...model.architecture import Model
from ...sharding.layout import Side, relative_box, slices
from ...sharding.redistribute import BoxTransfer, list_transfers
from ...sharding.tensors import Box


@dataclass(frozen=True)
class Message:
    """A message with boxes of tensors, from one rank to several ranks on one host.

    - `giver`: the sending rank.
    - `takers`: the receiving ranks, which all want the same boxes. The first taker receives the boxes from `giver` and
      broadcasts them to the other takers.
    - `group`: the process group of `takers`, in which the boxes are broadcast.
    - `boxes`: the names of the tensors, with their boxes.
    - `first`: true for the first message to these takers. `Sender.word` is sent with this message.
    """

    giver: int
    takers: tuple[int, ...]
    group: Any
    boxes: list[tuple[str, Box]]
    first: bool


class MessagePlan(NamedTuple):
    """The messages of one delivery of weights that concern this rank, in order.

    `askers` has, for each rank that sends, the receiver of its first message.
    """

    messages: list[Message]
    askers: dict[int, int]


def _plan_messages(
    buckets: Sequence[Sequence[tuple[str, BoxTransfer]]], groups: Mapping[tuple[int, ...], Any], rank: int, most: int
) -> MessagePlan:
    """Return the messages in which `rank` takes part.

    - `buckets`: for each bucket, which boxes of which tensors are fetched from which rank.
    - `groups`: the process group of each set of receivers.
    - `most`: the number of ranks of the larger of the two layouts.
    """
    plan = MessagePlan([], {})
    notified: set[tuple[int, ...]] = set()
    for bucket in buckets:
        wanted: dict[tuple[int, tuple[int, ...]], list[tuple[str, Box]]] = {}
        for name, (giver, takers, box) in bucket:
            wanted.setdefault((giver, takers), []).append((name, box))
        # In a round each source rank has a different target, so that the messages of a round are sent in parallel.
        for giver, takers in sorted(wanted, key=lambda pair: ((pair[1][0] - pair[0]) % most, pair)):
            plan.askers.setdefault(giver, takers[0])
            if rank in (giver, *takers):
                boxes = wanted[giver, takers]
                plan.messages.append(Message(giver, takers, groups[takers], boxes, takers not in notified))
            notified.add(takers)
    return plan


class Sender:
    """One resharding edge between two pools, on one rank.

    - `model`: the model of the weights. It has the type (`dtype`) of the update's weights.
    - `rank`: the number of the rank among the ranks of all pools.
    - `sides`: the layouts of update and generation.
    - `shards`: the update's weights; empty on a rank that generates.
    - `word`: numbers in host memory that the ranks of the update have, and that the ranks of the generation receive.

    All ranks of all pools must make a Sender for the edge, because the constructor makes process groups.
    """

    group: dist.ProcessGroup | None = None  # for messages between pools; None: the group of all ranks

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
        # Tensors that differ in nothing but the name have the same routes.
        alike = {tensor.name: replace(tensor, name="") for tensor in model.weights}
        fetches_by_tensor = {
            tensor: list_transfers(tensor, source, target, per_host) for tensor in dict.fromkeys(alike.values())
        }
        groups: dict[tuple[int, ...], Any] = {}
        for takers in dict.fromkeys(fetch.takers for fetched in fetches_by_tensor.values() for fetch in fetched):
            groups[takers] = dist.new_group(list(takers)) if len(takers) > 1 else None

        def plan_messages(buckets: Sequence[Sequence[str]]) -> MessagePlan:
            fetches = [
                [(name, fetch) for name in names for fetch in fetches_by_tensor[alike[name]]] for names in buckets
            ]
            return _plan_messages(fetches, groups, rank, max(source.devices, target.devices))

        self.first_plan = plan_messages((*edge.first_buckets, *edge.buckets))
        self.later_plan = plan_messages(edge.buckets) if edge.first_buckets else self.first_plan
        self.begun = False  # whether frozen weights were sent
        self.dtype = getattr(torch, hf_modules.DTYPES[model.dtype])
        self.seconds: dict[str, float] = {}
        self.moved = 0  # bytes received in the last run

    def run(self, allocate: Callable[[], list[Shard]]) -> None:
        """Send the update's weights from this rank, or receive weights on this rank.

        `allocate` returns the shards that a receiving rank fills. On a rank that sends, `allocate` returns no shards.
        In later runs the shards of frozen weights have values already.
        """
        self.seconds = {}
        self.moved = 0
        self.pass_on(self.next_plan.messages, (*self.shards, *allocate()))
        self.begun = True

    @property
    def next_plan(self) -> MessagePlan:
        return self.later_plan if self.begun else self.first_plan

    def pass_on(self, messages: Sequence[Message], shards: Sequence[Shard]) -> None:
        """Take part in `messages`: send boxes from `shards`, or receive boxes into them."""
        since = time.perf_counter()

        def timed(name: str) -> None:
            nonlocal since
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - since
            since = time.perf_counter()

        shards_by_name = {shard.name: shard for shard in shards}
        with torch.no_grad():
            for message in messages:
                if message.first and self.word is not None:
                    self._pass(message, self.word)
                    timed("send")
                self._take_part(message, shards_by_name, timed)

    def _pass(self, message: Message, numbers: torch.Tensor) -> None:
        """Send the tensor `numbers` from the giver of a message to all its takers."""
        if self.rank == message.giver:
            dist.send(numbers, message.takers[0], group=self.group)
            return
        if self.rank == message.takers[0]:
            dist.recv(numbers, message.giver, group=self.group)
        if message.group is not None:
            dist.broadcast(numbers, group=message.group, group_src=0)

    def _take_part(self, message: Message, shards: dict[str, Shard], timed: Callable[[str], None]) -> None:
        parts = [shards[name].tensor[slices(relative_box(box, shards[name].box))] for name, box in message.boxes]
        sizes = [part.numel() for part in parts]
        buffer = torch.empty(sum(sizes), dtype=self.dtype, device=parts[0].device)
        # Copied one by one: joining strided parts would copy them twice.
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


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
