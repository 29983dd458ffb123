"""Resharding between two pools, one of which may run ahead (`staleness`).

The update's ranks publish each version of their weights: they make a copy of the weights and then continue to train.
The generation's ranks fetch the copy when they need it.

Invariant: a generation gets exactly the version that it was ordered to fetch, even if the update's weights change in
the meantime. A copy is overwritten only after all ranks that were ordered to fetch the copy have received it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from ...backends.engine_protocols import Shard
from .weight_send import Sender

LOOK = timedelta(seconds=1)  # timeout of one wait for a request


class WeightPublication(Sender):
    """A resharding edge with `staleness`, on one rank.

    `arguments` are the arguments of Sender. Requests for weights are exchanged through `store`, the store of all ranks.
    If a rank must wait longer than `deadline` seconds, an error is raised.
    """

    def __init__(self, *arguments: Any, store: TCPStore, deadline: float) -> None:
        super().__init__(*arguments)
        self.group = dist.new_group()  # only this edge sends in it
        self.store = store
        self.deadline = deadline
        self.first_given, self.later_given = (
            [message for message in plan.messages if message.giver == self.rank]
            for plan in (self.first_plan, self.later_plan)
        )
        self.fetched = 0  # versions that this rank has requested
        self.version = -1  # of the copy
        self.sent_count = 0  # versions that were sent
        self.failed: BaseException | None = None
        self.changed = threading.Condition()
        if self.first_given:
            names = {name for message in self.first_given for name, _ in message.boxes}
            self.live = [shard for shard in self.shards if shard.name in names]
            self.copies = [
                Shard(shard.name, shard.box, torch.empty_like(shard.tensor, dtype=self.dtype)) for shard in self.live
            ]
            self.live_word = self.word
            self.word = None if self.word is None else self.word.clone()
            threading.Thread(target=self._serve_requests, daemon=True).start()

    def publish(self, version: int, fetch_count: int) -> None:
        """Copy the update's weights, so that generating ranks can fetch the copy.

        The copy also has the numbers that the update reported about the weights (`Sender.word`). `version` is the
        version of the weights. If the copy already has this version, nothing is done. `fetch_count` is the number of
        fetches that the driver has ordered in the run. The copy is overwritten only after all of these fetches have
        been served.
        """
        if not self.first_given or version == self.version:
            return
        if not self.later_given:  # the copy has frozen weights only, and is fetched once
            fetch_count = min(fetch_count, 1)
        changed = {name for message in self.later_given for name, _ in message.boxes}
        with self.changed:
            released = self.changed.wait_for(lambda: self.failed or self.sent_count >= fetch_count, self.deadline)
            if self.failed is not None:
                raise RuntimeError(f"version {self.version} of the weights was not sent") from self.failed
            if not released:
                raise RuntimeError(f"version {self.version} of the weights was not fetched within {self.deadline:g} s")
            with torch.no_grad():
                for copy, shard in zip(self.copies, self.live, strict=True):
                    if shard.name in changed or self.version < 0:
                        copy.tensor.copy_(shard.tensor)
            if self.word is not None and self.live_word is not None:
                self.word.copy_(self.live_word)
            self.version = version
            self.changed.notify_all()

    def fetch(self, version: int, allocate: Callable[[], list[Shard]]) -> None:
        """Receive a version of the weights into the shards that `allocate` returns."""
        for giver, asks in self.next_plan.askers.items():
            if asks == self.rank:
                self.store.set(self._request(giver, self.fetched), str(version))
        self.fetched += 1
        self.run(allocate)

    def _request(self, giver: int, count: int) -> str:
        return f"{self.name}, {giver}, {count}"

    def _serve_requests(self) -> None:
        """Send the copy whenever ranks of the generation request it.

        This function runs in a thread of its own. The thread has its own connection to the store, because a wait blocks
        a connection.
        """
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
                    # The fetch is ordered when the update begins with the version, so the copy may not exist yet.
                    if not self.changed.wait_for(lambda version=version: self.version == version, self.deadline):  # type: ignore[misc]
                        raise RuntimeError(
                            f"version {version} was requested, but the copy is of version {self.version}"
                        )
                self.pass_on(self.later_given if self.sent_count else self.first_given, self.copies)
                with self.changed:
                    self.sent_count += 1
                    self.changed.notify_all()
        except BaseException as error:
            with self.changed:
                self.failed = error
                self.changed.notify_all()
