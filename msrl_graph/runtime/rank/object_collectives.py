"""Collectives for Python objects.

Invariant: a rank unpickles only bytes that a rank of this run has pickled. Collectives do not authenticate (neither
gloo nor NCCL checks who connects). Therefore each message begins with a digest that only a process with the run's token
can compute, and the receiver checks the digest before it unpickles.
"""

from __future__ import annotations

import hmac
import pickle
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist

from ..process.task_report import RunError

T = TypeVar("T")
_DIGEST = 32  # bytes, of SHA-256
_token = b""  # none: nothing is sealed or unsealed


def seal_with(token: bytes) -> None:
    """Set the secret token of the run, with which this rank makes and checks digests."""
    global _token
    _token = token


def seal(value: Any) -> torch.Tensor:
    """Return the pickled value as bytes that begin with a digest."""
    data = pickle.dumps(value, protocol=5)
    sealed = bytearray(_digest(memoryview(data)) + data)
    return torch.from_numpy(np.frombuffer(sealed, np.uint8))


def unseal(sealed: torch.Tensor) -> Any:
    """Return the value that `seal` has pickled.

    Raises RunError if no rank of this run made these bytes.
    """
    data = sealed.numpy().data
    if not hmac.compare_digest(data[:_DIGEST], _digest(data[_DIGEST:])):
        raise RunError("a collective delivered data that no rank of this run sent: another program is connected to it")
    return pickle.loads(data[_DIGEST:])


def _digest(data: memoryview) -> bytes:
    if not _token:  # everybody can compute digests without a secret
        raise RunError("this rank has no token of its run")
    return hmac.digest(_token, data, "sha256")


def broadcast(value: T, group: dist.ProcessGroup, source: int) -> T:
    """Return the value of a group's rank `source`, on every rank of the group."""
    mine = dist.get_rank(group) == source
    sealed = seal(value) if mine else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(sealed)])
    dist.broadcast(size, group=group, group_src=source)
    if not mine:
        sealed = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(sealed, group=group, group_src=source)
    if mine:
        return value
    received: T = unseal(sealed)
    return received


def all_gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a group, on every rank of the group.

    The values are in the order of ranks.
    """
    sealed = seal(value)
    size_tensors = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(size_tensors, torch.tensor([len(sealed)]), group=group)
    sizes = [int(size) for size in size_tensors]
    padded = torch.nn.functional.pad(sealed, (0, max(sizes) - len(sealed)))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [unseal(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def gather(value: T) -> list[T] | None:
    """Return the values of all ranks on rank 0, in the order of ranks; elsewhere None.

    Rank 0 receives one value at a time, because a value may be all the weights of a model.
    """
    if dist.get_rank() > 0:
        sealed = seal(value)
        dist.send(torch.tensor([len(sealed)]), 0)
        dist.send(sealed, 0)
        return None
    return [value, *(_receive(rank) for rank in range(1, dist.get_world_size()))]


def _receive(rank: int) -> Any:
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, rank)
    sealed = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(sealed, rank)
    return unseal(sealed)
