"""Runs a function on N real processes joined by torch.distributed over gloo."""

import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing


def run(world, function, *arguments):
    """`function(rank, folder, *arguments)` on each of `world` ranks; fails if one of them fails."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (world, folder, function, arguments), nprocs=world)


def _rank(rank, world, folder, function, arguments):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        function(rank, Path(folder), *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()
