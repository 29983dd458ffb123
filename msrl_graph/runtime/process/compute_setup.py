"""Set-up of a compute process: a rank, or a process that only measures.

Invariant: no setting in this module changes a computed result.
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
    """Return the TCPStore through which ranks find each other.

    The store listens at the address `host` only. By default, a TCPStore listens at every address of the machine. Anyone
    who can connect to such a store can read and overwrite what the ranks store in it.
    """
    listening = listen(host)
    port = listening.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def prepare_process(threads: int) -> None:
    """Set torch's number of threads, and make the C library reuse freed memory.

    Each eager operator allocates and frees megabytes. Without reuse, the system provides fresh memory for each
    operator, and handles a page fault for every 4 KiB of this memory. These page faults take longer than most operators
    run. With a C library other than glibc, the memory settings do not change.
    """
    # gloo and torch would otherwise each start a thread for every core of the machine.
    torch.set_num_threads(threads)
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(MMAP, LARGEST)
        library.mallopt(TRIM, KEPT)
