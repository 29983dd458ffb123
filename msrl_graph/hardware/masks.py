"""Masks: which of its host's devices a process sees, and by which numbers.

A mask is a variable such as ASCEND_RT_VISIBLE_DEVICES=4,5,6,7. It lists devices by the host's numbers; torch calls the
first that it lists 0, the next 1, and so on. Ray hands out devices by the host's numbers, and shows a process its own
alone, unless RAY_EXPERIMENTAL_NOSET_… keeps it from that: then the process sees all that the mask lists.

Invariant: the host's numbers become torch's here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .device_kinds import DeviceKind


def listed(mask: str) -> list[str]:
    return [number for part in mask.split(",") if (number := part.strip())]


def seen(kind: DeviceKind, mask: str | None, there: int) -> list[str]:
    """The host's numbers, in torch's order, of those devices that a process with a mask sees of so many; without a mask
    (None) all."""
    if mask is None:
        return [*map(str, range(there))]
    found = listed(mask)
    bad = [i for i, number in enumerate(found) if _bad(number, there) or number in found[:i]]
    if kind.mask_rises:
        numbers = [int(n) for i, n in enumerate(found) if i not in bad]
        return [*map(str, numbers)] if numbers == sorted(numbers) else []
    return found[: bad[0]] if bad else found


def wrong(kind: DeviceKind, mask: str | None, there: int) -> str:
    """What hides devices that a mask lists, in words; "" where it shows all of them."""
    if mask is None or (found := listed(mask)) == seen(kind, mask, there):
        return ""
    said = f"{kind.visible} is '{mask}'"
    if twice := sorted({number for number in found if found.count(number) > 1}):
        return f"{said}, which has {', '.join(twice)} more than once"
    if absent := [number for number in found if _bad(number, there)]:
        alone = "are left out" if len(absent) > 1 else "is left out"
        hidden = alone if kind.mask_rises else "and what comes after it are left out"
        return f"{said}, and of its numbers {', '.join(absent)} {hidden}: the host has {there}, which begin with 0"
    return f"{said}, whose numbers do not rise: none of them is seen"


def index(given: Sequence[str], mask: str | None) -> int:
    """Torch's number of the device that Ray has given a process: where it stands in the mask that the process sees.
    Without a mask the host's number is torch's. ValueError: the mask does not list it."""
    if not given:
        return 0
    if mask is None:
        return int(given[0])
    found = listed(mask)
    if given[0] not in found:
        raise ValueError(f"Ray gave this process the device {given[0]}, and its mask lists {mask or 'none'}")
    return found.index(given[0])


def _bad(number: str, there: int) -> bool:
    """Whether no device has it; what is no number names one by its serial number, which only its driver knows."""
    return number.lstrip("-").isdecimal() and not 0 <= int(number) < there
