"""Stretches of devices: which devices the ranks of a pool are.

Invariant: devices are counted from 0 through all hosts of `per_host` each. A stretch is devices in a row or, where
`each` is stated, the same `each` devices of some hosts in a row; its ranks count through its devices in their order.
"""

from __future__ import annotations

from collections.abc import Iterator


class DeviceRange:
    """What has `first`, the device of rank 0, and `each`: 0, or the devices of each host where others of the host are
    not in it."""

    first: int
    each: int

    def device(self, rank: int, per_host: int) -> int:
        if not self.each:
            return self.first + rank
        return self.first + rank // self.each * per_host + rank % self.each

    def rank(self, device: int, per_host: int) -> int:
        """The rank of a device; below 0, or beyond the stretch's last rank, for a device that is not in it."""
        if not self.each:
            return device - self.first
        host, place = divmod(device - self.first, per_host)
        return host * self.each + place if place < self.each else -1

    def on_host(self, devices: int, per_host: int) -> int:
        """The most of so many devices of the stretch that are on one host."""
        return min(devices, self.each or per_host)


def runs(first: int, devices: int, each: int, per_host: int) -> Iterator[tuple[int, int]]:
    """Devices in a row, as (first, one beyond the last): one run, or one on each host."""
    if not each:
        yield first, first + devices
        return
    for n in range(devices // each):
        yield first + n * per_host, first + n * per_host + each


def meet(one: tuple[int, int, int], other: tuple[int, int, int], per_host: int) -> bool:
    """Whether two stretches, each as (first, devices, each), have a device in common."""
    a, b = (runs(*s, per_host) for s in sorted((one, other)))
    # Both in the order of their devices: whichever run ends first makes way.
    (start, stop), (begin, end) = next(a), next(b)
    while not (start < end and begin < stop):
        following = next(a if stop <= begin else b, None)
        if following is None:
            return False
        if stop <= begin:
            start, stop = following
        else:
            begin, end = following
    return True


def device_range(first: int, devices: int, each: int = 0, per_host: int = 1) -> str:
    """A stretch in words: `device 3`, `devices 0..7`, `devices 0..3 of nodes 0..1`."""
    if each:
        node = first // per_host
        return f"{device_range(first % per_host, each)} of nodes {node}..{node + devices // each - 1}"
    return f"device {first}" if devices == 1 else f"devices {first}..{first + devices - 1}"
