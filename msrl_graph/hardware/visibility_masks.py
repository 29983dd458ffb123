"""Visibility masks: which devices of a host a process can see, and their numbers.

A mask is an environment variable such as ASCEND_RT_VISIBLE_DEVICES=4,5,6,7. It lists devices by the host's numbers.
torch numbers the listed devices 0, 1 and so on. Ray assigns devices by the host's numbers, and a process sees only the
devices that Ray assigned to it. If RAY_EXPERIMENTAL_NOSET_… is set, a process sees all devices that the mask lists.

Invariant: only this module converts the host's numbers to torch's numbers. Drivers do not report which devices of a
mask they ignore, so this module repeats the rules of the drivers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .device_kinds import DeviceKind


def parse_mask(kind: DeviceKind, mask: str, count: int) -> tuple[list[str], str]:
    """Parse a visibility mask; return the accepted ids and why parsing stopped.

    `count` is the number of devices of the host. Like a driver, this function stops at the first id that the driver
    cannot use. Ids that only the driver can resolve (GPU-…, MIG-…) are accepted without a check.
    """
    ids = mask.split(",") if mask.strip() else []
    accepted = list[str]()
    if mask.startswith(("GPU-", "MIG-")):
        return ids, ""
    for device_id in ids if kind.rising else [device_id.strip() for device_id in ids]:
        if not device_id.isdigit():
            return accepted, f"`{device_id}` is not a number"
        if int(device_id) >= count:
            return accepted, f"there is no {device_id}, only {'0' if count == 1 else f'0 to {count - 1}'}"
        if device_id in accepted:  # CUDA ignores the whole mask then
            return accepted if kind.rising else [], f"{device_id} is listed twice"
        if kind.rising and accepted and int(device_id) < int(accepted[-1]):
            return accepted, f"{device_id} comes after {accepted[-1]}, but ids must rise"
        accepted.append(device_id)
    return accepted, ""


def visible_ids(kind: DeviceKind, mask: str | None, count: int) -> list[str]:
    """Return the ids of the visible devices in torch's order; without a mask, all ids.

    `count` is the number of devices of the host.
    """
    return [*map(str, range(count))] if mask is None else parse_mask(kind, mask, count)[0]


def describe_problem(kind: DeviceKind, mask: str | None, count: int) -> str:
    """Say which ids in a mask are not visible; return "" if all ids are visible.

    `count` is the number of devices of the host.
    """
    if mask is None or not count:
        return ""
    accepted, reason = parse_mask(kind, mask, count)
    if not accepted and not reason:
        return f"{kind.visible} is empty: no device is visible"
    ids = mask.split(",")
    accepted_part = f"{len(accepted)} of {len(ids)} ids are read" if accepted else "none of its ids is read"
    return f"{kind.visible}={mask}: {reason}; {accepted_part}" if reason else ""


def torch_index(assigned: Sequence[str], mask: str | None) -> int:
    """Return torch's number for the device that Ray assigned to this process.

    The number is the position of the device in the process's mask. Without a mask, torch's number is the host's number
    for the device. Raises ValueError if the mask does not list the device.
    """
    if not assigned:
        return 0
    if mask is None:
        return int(assigned[0])
    listed = [device_id.strip() for device_id in mask.split(",")]
    if assigned[0] not in listed:
        raise ValueError(f"Ray gave this process the device {assigned[0]}, but its mask lists {mask or 'none'}")
    return listed.index(assigned[0])
