"""Rules for any kind of device: visibility, Ray's count, and use of memory.

A *die* is one device as a process sees it: a chip of an NPU, or a GPU.

Invariant: the rules treat all kinds of devices in the same way. The differences between the kinds come from
device_kinds.py, and from the dies that ascend.py or cuda.py reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...diagnostics.quantities import size
from ...hardware import visibility_masks
from ...hardware.device_kinds import DeviceKind
from .findings import ExaminedHost, Finding
from .output_parsers import DeviceEntry

NAMED = 3  # most items of a list that a message names
IDLE = 0.15  # the share of a die's memory that its own firmware may use: 2.9 of 32 GB was seen on a 910B4


def listed(items: Sequence[str]) -> str:
    return ", ".join(items[:NAMED]) + f" and {len(items) - NAMED} more" * (len(items) > NAMED)


def seen(host: ExaminedHost, kind: DeviceKind) -> int:
    """Return how many of a host's devices the visibility mask shows to processes."""
    return len(visibility_masks.visible_ids(kind, host.variables.get(kind.visible), host.devices(kind)))


def mask(host: ExaminedHost, kind: DeviceKind) -> Iterator[Finding]:
    """Check the visibility mask, which selects the devices that processes see."""
    count = host.devices(kind)
    mask_value = host.variables.get(kind.visible)
    if mask_value is None or not count:
        return
    if message := visibility_masks.describe_problem(kind, mask_value, count):
        usable = sorted(
            {
                int(device_id)
                for device_id in mask_value.split(",")
                if device_id.strip().isdigit() and int(device_id) < count
            }
        )
        fix = f"export {kind.visible}={','.join(map(str, usable))}" if usable else f"unset {kind.visible}"
        yield Finding("mask", message, "wrong", host.anew(fix))
    else:
        yield Finding("mask", f"{kind.visible} shows {seen(host, kind)} of {count}")


def counted(host: ExaminedHost, kind: DeviceKind) -> Iterator[Finding]:
    """On a host of a cluster, check that Ray counts all visible devices."""
    if host.resources is None:
        return
    visible = seen(host, kind)
    counts = host.resources.get(kind.resource, 0)
    if counts == visible:
        return
    number = f"--{kind.asked_as.replace('_', '-')}={visible}"
    custom = f"--resources='{{\"{kind.resource}\": {visible}}}'"
    message = f"Ray counts {counts:g} {kind.resource}, but the host has {visible}"
    yield Finding("ray", message, "wrong", f"ray stop; ray start ... {number if kind.asked_as else custom}")


def held(host: ExaminedHost, dies: Sequence[DeviceEntry], command: str) -> Iterator[Finding]:
    """Check whether processes that already run use memory of the dies.

    `command` is the command that lists these processes.
    """
    with_holders = [die for die in dies if die.holders]
    without_holders = [die for die in dies if not die.holders and die.used > IDLE * die.total]
    if with_holders:
        holder_names = list(
            dict.fromkeys(
                f"{holder.name or 'a process'} ({holder.pid})" for die in with_holders for holder in die.holders
            )
        )
        pids = " ".join(dict.fromkeys(holder.pid for die in with_holders for holder in die.holders))
        most = max(die.used for die in with_holders)
        message = (
            f"{listed([entry.label for entry in with_holders])}: up to {size(most)} in use, by {listed(holder_names)}"
        )
        yield Finding("device-memory", message, "warning", f"wait until they end, or end them: kill {pids}")
    if without_holders:
        message = (
            f"{listed([entry.label for entry in without_holders])}: "
            f"up to {size(max(entry.used for entry in without_holders))} in use, by processes not visible here"
        )
        look = f"look on the host itself, outside of containers: {command}"
        yield Finding("device-memory", message, "warning", look)
    if dies and not with_holders and not without_holders:
        least = min(dies, key=lambda die: die.free)
        yield Finding("device-memory", f"at least {size(least.free)} of {size(least.total)} free")
