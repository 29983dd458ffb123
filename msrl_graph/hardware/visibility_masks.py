"""Masks: which of its host's devices a process sees, and by which numbers.

A mask is a variable such as ASCEND_RT_VISIBLE_DEVICES=4,5,6,7. It lists devices by the host's numbers; torch calls the
first that it lists 0, the next 1, and so on. Ray hands out devices by the host's numbers, and shows a process its own
alone, unless RAY_EXPERIMENTAL_NOSET_… keeps it from that: then the process sees all that the mask lists.

Invariant: the host's numbers become torch's here and nowhere else. Drivers say nothing of what they leave out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .device_kinds import DeviceKind


def read(kind: DeviceKind, mask: str, there: int) -> tuple[list[str], str]:
    """The ids that a driver reads of a mask on a host of so many devices, and why it reads no further: it stops at the
    first that it cannot use. Ids by which only the driver knows devices (GPU-…, MIG-…) are taken as they stand."""
    ids = mask.split(",") if mask.strip() else []
    found = list[str]()
    if mask.startswith(("GPU-", "MIG-")):
        return ids, ""
    for i in ids if kind.rising else [i.strip() for i in ids]:
        if not i.isdigit():
            return found, f"`{i}` is no number"
        if int(i) >= there:
            return found, f"there is no {i}, only {'0' if there == 1 else f'0 to {there - 1}'}"
        if i in found:  # of such CUDA takes none
            return found if kind.rising else [], f"{i} stands there twice"
        if kind.rising and found and int(i) < int(found[-1]):
            return found, f"{i} comes after {found[-1]}, and ids have to rise"
        found.append(i)
    return found, ""


def seen(kind: DeviceKind, mask: str | None, there: int) -> list[str]:
    """The ids, in torch's order, of the devices that a process with a mask sees of so many; without one (None) all."""
    return [*map(str, range(there))] if mask is None else read(kind, mask, there)[0]


def wrong(kind: DeviceKind, mask: str | None, there: int) -> str:
    """What a mask lists and does not show, in words; "" where it shows all of it."""
    if mask is None or not there:
        return ""
    found, why = read(kind, mask, there)
    if not found and not why:
        return f"{kind.visible} is empty: no device is seen"
    ids = mask.split(",")
    what = f"{len(found)} of {len(ids)} ids are read" if found else "none of its ids is read"
    return f"{kind.visible}={mask}: {why}; {what}" if why else ""


def index(given: Sequence[str], mask: str | None) -> int:
    """Torch's number of the device that Ray has given a process: where it stands in the mask that the process sees.
    Without a mask the host's number is torch's. ValueError: the mask does not list it."""
    if not given:
        return 0
    if mask is None:
        return int(given[0])
    found = [i.strip() for i in mask.split(",")]
    if given[0] not in found:
        raise ValueError(f"Ray gave this process the device {given[0]}, and its mask lists {mask or 'none'}")
    return found.index(given[0])
