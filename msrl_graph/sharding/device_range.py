"""Device ranges: the devices on which the ranks of a pool run.

Devices are numbered from 0 over all hosts, with `per_host` devices on each host. A range whose `each` is 0 consists of
consecutive devices. Any other range consists of `each` devices on each of several consecutive hosts, at the same
positions on each host. Invariant: the ranks of a range follow the order of its devices.
"""

from __future__ import annotations

from collections.abc import Iterator


class DeviceRange:
    """A range of devices, given by `first` and `each`.

    `first` is the device of rank 0. If the range has only some devices of each host, `each` is the number of these
    devices per host. If the range is contiguous, `each` is 0.
    """

    first: int
    each: int

    def device(self, rank: int, per_host: int) -> int:
        if not self.each:
            return self.first + rank
        return self.first + rank // self.each * per_host + rank % self.each

    def rank(self, device: int, per_host: int) -> int:
        """Return the rank of a device.

        If the device is not in the range, the result is below 0 or beyond the last rank.
        """
        if not self.each:
            return device - self.first
        host, place = divmod(device - self.first, per_host)
        return host * self.each + place if place < self.each else -1

    def on_host(self, devices: int, per_host: int) -> int:
        """Return the most devices that a range of `devices` devices has on one host."""
        return min(devices, self.each or per_host)


def iterate_runs(first: int, devices: int, each: int, per_host: int) -> Iterator[tuple[int, int]]:
    """Yield a range's runs of consecutive devices as (first, one beyond the last).

    If `each` is 0, the range is one run. Otherwise, it has one run on each host.
    """
    if not each:
        yield first, first + devices
        return
    for host in range(devices // each):
        yield first + host * per_host, first + host * per_host + each


def ranges_overlap(one: tuple[int, int, int], other: tuple[int, int, int], per_host: int) -> bool:
    """Return whether two ranges, each as (first, devices, each), share a device."""
    first_runs, second_runs = (iterate_runs(*stretch, per_host) for stretch in sorted((one, other)))
    # Both are in the order of their devices: the run that ends first is replaced by the next.
    start, stop = next(first_runs)
    begin, end = next(second_runs)
    while not (start < end and begin < stop):
        following = next(first_runs if stop <= begin else second_runs, None)
        if following is None:
            return False
        if stop <= begin:
            start, stop = following
        else:
            begin, end = following
    return True


def format_device_range(first: int, devices: int, each: int = 0, per_host: int = 1) -> str:
    """Format a range: `device 3`, `devices 0..7`, `devices 0..3 of nodes 0..1`."""
    if each:
        node = first // per_host
        return f"{format_device_range(first % per_host, each)} of nodes {node}..{node + devices // each - 1}"
    return f"device {first}" if devices == 1 else f"devices {first}..{first + devices - 1}"
