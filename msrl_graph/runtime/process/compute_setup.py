"""The setup of a process that computes: a rank, or its stand-in for measurements.

Invariant: nothing here changes a result.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch
from torch._C._distributed_c10d import TCPStore

from .connection_gate import listen

# Parameters of mallopt(3): the size from which an allocation is mapped by itself, and how much free memory at the end
# of the heap is returned to the system.
TRIM = -1
MMAP = -3
LARGEST = 32 << 20  # bytes; glibc allows no more
KEPT = 256 << 20  # bytes


def open_store(host: str) -> TCPStore:
    """Return the store by which ranks find each other; it listens at one address only.

    By itself a TCPStore listens at every address, and anyone who reaches it may read and write what ranks store there.
    """
    listening = listen(host)
    port = listening.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def prepare_process(threads: int) -> None:
    """Set the number of threads, and keep memory that tensors free for later tensors.

    Eager operators allocate and free megabytes each, and fresh memory costs more than most of them (a page fault for
    every 4 KiB). With a C library other than glibc, memory is left as it is.
    """
    # gloo and torch would otherwise each start a thread for every core of the machine.
    torch.set_num_threads(threads)
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(MMAP, LARGEST)
        library.mallopt(TRIM, KEPT)
