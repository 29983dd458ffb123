"""Host copies of frozen weights: ranks of a host share them, and each can still read them if others have ended."""

import gc
import os
import time
from pathlib import Path
from types import SimpleNamespace

import ranks
import torch
from torch import distributed as dist

from msrl_graph.backends.devices import TorchDevice
from msrl_graph.backends.engine_protocols import Shard
from msrl_graph.runtime.process.memory import live_bytes
from msrl_graph.runtime.weights.frozen_copies import FrozenCopies, HostRanks
from msrl_graph.sharding.layout import Layout, Side, count_host_elements, full_box, group_by_kind, shard, slices
from msrl_graph.sharding.tensors import Tensor

TENSORS = (
    Tensor("whole", (5, 7), layer=-1, frozen=True),
    Tensor("halves", (8, 6), 0, layer=-1, frozen=True),
    Tensor("trained", (3,), layer=-1),
)
LAYOUT = Layout(tp=2, dp=2)
SIDE = Side(LAYOUT)
WHOLE = {tensor.name: torch.arange(tensor.elements).reshape(tensor.shape) + 0.5 for tensor in TENSORS}


def hold(rank):
    boxes = {tensor.name: shard(tensor, SIDE, rank) for tensor in TENSORS}
    return [Shard(name, box, WHOLE[name][slices(box)].clone()) for name, box in boxes.items()]


def make_copies(rank, hosts):
    """Make copies on ranks of `hosts` hosts."""
    size = LAYOUT.devices // hosts
    peers = tuple(other for other in range(LAYOUT.devices) if other // size == rank // size)
    store = dist.PrefixStore(f"{hosts} hosts", dist.distributed_c10d._get_default_store())
    model = SimpleNamespace(weights=TENSORS)
    return FrozenCopies(TorchDevice(), model, HostRanks(SIDE, rank, peers, store, "key", 60))


def share(rank, _, folder, hosts):
    gc.collect()
    before = live_bytes()["host"]
    shards = hold(rank)
    copies = make_copies(rank, hosts)
    copies.fetch()  # nothing is stored yet
    copies.store(shards)
    dist.barrier()
    for part in shards:
        part.tensor.zero_()
    copies.store(shards)  # they stay as they were first
    copies.fetch()
    for part in shards:
        wanted = WHOLE[part.name][slices(part.box)]
        assert torch.equal(part.tensor, torch.zeros_like(wanted) if part.name == "trained" else wanted)
    (folder / f"bytes {rank}").write_text(str(live_bytes()["host"] - before))
    dist.barrier()


def test_a_host_has_one_copy_of_each_box(tmp_path):
    frozen = group_by_kind([tensor for tensor in TENSORS if tensor.frozen])
    # One host: "whole" once, and both halves. Two hosts: the same on each.
    for hosts, elements in ((1, 35 + 48), (2, 35 + 48), (4, 35 + 24)):
        folder = tmp_path / str(hosts)
        folder.mkdir()
        ranks.run(LAYOUT.devices, share, folder, hosts)
        size = LAYOUT.devices // hosts
        found = [int((folder / f"bytes {rank}").read_text()) for rank in range(LAYOUT.devices)]
        on_hosts = [sum(found[first : first + size]) for first in range(0, LAYOUT.devices, size)]
        assert count_host_elements(frozen, SIDE, size) == elements
        # Each tensor that is shared begins at a multiple of 64 bytes.
        assert all(4 * elements <= held < 4 * elements + 4 * 64 for held in on_hosts), on_hosts


def lose_owner(rank, folder):
    """The owner of the copies ends, as if it was killed; the other rank still reads them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    shards = [Shard(tensor.name, full_box(tensor.shape), WHOLE[tensor.name].clone()) for tensor in TENSORS]
    store = dist.distributed_c10d._get_default_store()
    peers = HostRanks(Side(Layout(dp=2)), rank, (0, 1), store, "key", 60)
    copies = FrozenCopies(TorchDevice(), SimpleNamespace(weights=TENSORS), peers)
    copies.store(shards)
    dist.barrier()
    if rank:
        owner = int(store.get("key/0/0").split()[0])
        while Path(f"/proc/{owner}").exists():
            time.sleep(0.01)
        for part in shards:
            part.tensor.zero_()
        copies.fetch()
        assert all(torch.equal(part.tensor, WHOLE[part.name]) for part in shards[:2])
        (folder / "read").touch()
    os._exit(9)


def test_a_copy_outlives_its_owner(tmp_path):
    owner, other = (ranks._context.Process(target=lose_owner, args=(rank, tmp_path)) for rank in range(2))
    owner.start()
    other.start()
    owner.join(100)
    other.join(100)
    assert (tmp_path / "read").exists()
