"""Weights that two ranks send each other."""

import time

from torch import distributed as dist
from torch.distributed import TCPStore


def met(rank, folder):
    """A store where all ranks meet."""
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(folder / "port")
    while not (folder / "port").exists():
        time.sleep(0.01)
    dist.barrier()
    return store if rank == 0 else TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False)
