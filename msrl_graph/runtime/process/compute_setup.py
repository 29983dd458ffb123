"""How a process that computes is set up: a rank of a run, and what stands for it where this machine is measured.

Invariant: nothing here changes a result.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch
from torch._C._distributed_c10d import TCPStore

from .connection_gate import listen

# Of mallopt(3): the size from which memory is the system's own, and how much free memory at the end of the heap goes
# back.
TRIM = -1
MMAP = -3
LARGEST = 32 << 20  # bytes; glibc allows no more
KEPT = 256 << 20  # bytes


def meeting(host: str) -> TCPStore:
    """Return the store by which ranks find each other, which listens at this address of the host only.

    By itself a TCPStore listens at every address, and whoever reaches it may read and write what ranks say there.
    """
    listening = listen(host)
    port = listening.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def prepare(threads: int) -> None:
    """Takes so many threads, and keeps what tensors give back for the next ones: eager operators make and drop
    megabytes each, and fresh memory costs more than most of them (a page fault for every 4 KiB). Where the C library is
    another one, memory is as it is there."""
    # gloo and torch would otherwise each take a thread for every core of the machine.
    torch.set_num_threads(threads)
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(MMAP, LARGEST)
        library.mallopt(TRIM, KEPT)
