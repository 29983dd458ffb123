"""Visibility masks: the host's devices that a process sees, and their numbers.

A mask is a variable such as ASCEND_RT_VISIBLE_DEVICES=4,5,6,7. It lists devices by the host's numbers; torch
numbers the listed devices 0, 1 and so on. Ray assigns devices by the host's numbers and shows a process only its
own, unless RAY_EXPERIMENTAL_NOSET_… disables that: then the process sees all devices that the mask lists.

Invariant: only this file converts the host's numbers to torch's. Drivers do not report the devices that they leave
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .device_kinds import DeviceKind


def parse_mask(kind: DeviceKind, mask: str, count: int) -> tuple[list[str], str]:
    """Parse a visibility mask; return the accepted ids and why parsing stopped.

    `there` is the number of devices of the host. A driver stops at the first id that it cannot use. Ids that only
    the driver can resolve (GPU-…, MIG-…) are accepted unchecked.
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
    """Return the ids, in torch's order, of the visible devices; all without a mask.

    `there` is the number of devices of the host.
    """
    return [*map(str, range(count))] if mask is None else parse_mask(kind, mask, count)[0]


def describe_problem(kind: DeviceKind, mask: str | None, count: int) -> str:
    """Describe the ids of a mask that are not visible; "" if all are."""
    if mask is None or not count:
        return ""
    accepted, reason = parse_mask(kind, mask, count)
    if not accepted and not reason:
        return f"{kind.visible} is empty: no device is visible"
    ids = mask.split(",")
    accepted_part = f"{len(accepted)} of {len(ids)} ids are read" if accepted else "none of its ids is read"
    return f"{kind.visible}={mask}: {reason}; {accepted_part}" if reason else ""


def torch_index(assigned: Sequence[str], mask: str | None) -> int:
    """Return torch's number of the device that Ray assigned to this process.

    It is the device's position in the mask of the process; without a mask it is the host's number. Raises
    ValueError if the mask does not list it.
    """
    if not assigned:
        return 0
    if mask is None:
        return int(assigned[0])
    listed = [device_id.strip() for device_id in mask.split(",")]
    if assigned[0] not in listed:
        raise ValueError(f"Ray gave this process the device {assigned[0]}, but its mask lists {mask or 'none'}")
    return listed.index(assigned[0])
