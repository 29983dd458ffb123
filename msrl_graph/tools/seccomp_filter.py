"""The seccomp filter of the sandbox: the system calls that the kernel refuses.

Invariant: a process with this filter can start threads, but no other process. So the limits of the process cover
everything that the code does. The process cannot open a socket, and all memory that it allocates counts towards the
process's limits.
"""

from __future__ import annotations

import errno
import platform
import struct

_THREAD = 0x10000  # CLONE_THREAD
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_OF = 0x45
_RETURN = 0x06
# Offsets in the data that the kernel passes to a filter.
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16
_X32 = 0x40000000  # system calls of the x32 interface of an x86-64 kernel
# By machine: its audit architecture, and the numbers of clone, clone3, and of fork and vfork.
_MACHINES = {"x86_64": (0xC000003E, 56, 435, (57, 58)), "aarch64": (0xC00000B7, 220, 435, ())}
# The refused calls, with their numbers on these machines.
_REFUSED = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "shmget": (29, 194),  # memory that outlives the process
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}


def build_filter() -> bytes | None:
    """Return the filter in the kernel's format, or None for an unknown machine type."""
    machine = platform.machine()
    if machine not in _MACHINES:
        return None
    architecture, clone, clone3, forks = _MACHINES[machine]
    refused = [*forks, *(numbers[list(_MACHINES).index(machine)] for numbers in _REFUSED.values())]
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_EQUAL, 0, 1, clone3),  # a filter cannot read its flags; on ENOSYS, libc falls back to clone
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    lines += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_OF, 1, 0, _THREAD),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
