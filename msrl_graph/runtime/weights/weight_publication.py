"""Resharding between two pools of which one may be ahead of the other (`staleness`): the update's ranks publish each
version of their weights as a copy, and go on; the generation's ranks fetch it when they need one.

Invariant: a generation has the version that it was told to fetch, whole, whatever the update does meanwhile: a copy is
given up for the next one only when whoever was told to fetch it has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from ...backends.spec import Shard
from .weight_send import Sender

LOOK = timedelta(seconds=1)  # how long a request is waited for at a time


class WeightPublication(Sender):
    """One edge on one rank, `of` what a Sender is made of. Requests go through the ranks' `store`; nothing waits longer
    than `deadline` seconds."""

    def __init__(self, *of: Any, store: TCPStore, deadline: float) -> None:
        super().__init__(*of)
        self.group = dist.new_group()  # nobody else sends in it meanwhile
        self.store = store
        self.deadline = deadline
        self.gives = [m for m in self.messages if m.giver == self.rank]
        self.fetched = 0  # versions that this rank has asked for
        self.version = -1  # of the copy
        self.given = 0  # versions that were sent
        self.failed: BaseException | None = None
        self.changed = threading.Condition()
        if self.gives:
            names = {name for message in self.gives for name, _ in message.boxes}
            self.live = [s for s in self.shards if s.name in names]
            self.copies = [Shard(s.name, s.box, torch.empty_like(s.tensor, dtype=self.dtype)) for s in self.live]
            self.said = self.word
            self.word = None if self.word is None else self.word.clone()
            threading.Thread(target=self._give, daemon=True).start()

    def publish(self, version: int, told: int) -> None:
        """Copies the weights as they are, which are those of `version`, and the word, for whoever fetches them; so many
        times was somebody `told` to fetch one so far, this one perhaps among them."""
        if not self.gives or version == self.version:
            return
        with self.changed:
            given = self.changed.wait_for(lambda: self.failed or self.given >= told, self.deadline)
            if self.failed is not None:
                raise RuntimeError(f"version {self.version} of the weights was not sent") from self.failed
            if not given:
                raise RuntimeError(f"nobody has fetched version {self.version} of the weights in {self.deadline:g} s")
            with torch.no_grad():
                for copy, shard in zip(self.copies, self.live, strict=True):
                    copy.tensor.copy_(shard.tensor)
            if self.word is not None and self.said is not None:
                self.word.copy_(self.said)
            self.version = version
            self.changed.notify_all()

    def fetch(self, version: int, allocate: Callable[[], list[Shard]]) -> None:
        """Receives a version of the weights into the shards that `allocate` gives."""
        for giver, asks in self.first.items():
            if asks == self.rank:
                self.store.set(self._request(giver, self.fetched), str(version))
        self.fetched += 1
        self.run(allocate)

    def _request(self, giver: int, count: int) -> str:
        return f"{self.name}, {giver}, {count}"

    def _give(self) -> None:
        """Sends the copy whenever it is asked for; a thread of its own, which has a connection of its own, since a wait
        holds one."""
        count = 0
        try:
            store = TCPStore(self.store.host, self.store.port, is_master=False)
            while True:
                key = self._request(self.rank, count)
                try:
                    store.wait([key], LOOK)
                except dist.DistStoreError:
                    continue
                version = int(store.get(key))
                count = count + 1
                store.delete_key(key)
                with self.changed:
                    # Told to be fetched as the update begins with it, so that its copy may be yet to come.
                    if not self.changed.wait_for(lambda version=version: self.version == version, self.deadline):  # type: ignore[misc]
                        raise RuntimeError(f"version {version} is asked for, and {self.version} is there")
                self.pass_on(self.gives, self.copies)
                with self.changed:
                    self.given += 1
                    self.changed.notify_all()
        except BaseException as error:
            with self.changed:
                self.failed = error
                self.changed.notify_all()
