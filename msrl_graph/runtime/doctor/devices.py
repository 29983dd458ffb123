"""Rules of any kind of device: which of them processes see, what Ray counts, whose their memory is.

Invariant: kinds differ by what device_kinds.py says of them, and by the dies that their own file reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...emit.humanize import size
from ...hardware import visibility_masks
from ...hardware.device_kinds import DeviceKind
from .findings import ExaminedHost, Finding
from .output_parsers import DeviceEntry

NAMED = 3  # things of a list that are named
IDLE = 0.15  # the share of a die's memory that its own firmware may hold: 2.9 of 32 GB was seen on a 910B4


def listed(items: Sequence[str]) -> str:
    return ", ".join(items[:NAMED]) + f" and {len(items) - NAMED} more" * (len(items) > NAMED)


def seen(host: ExaminedHost, kind: DeviceKind) -> int:
    """How many devices processes see."""
    return len(visibility_masks.seen(kind, host.variables.get(kind.visible), host.devices(kind)))


def mask(host: ExaminedHost, kind: DeviceKind) -> Iterator[Finding]:
    """What the environment leaves processes of the devices."""
    there = host.devices(kind)
    given = host.variables.get(kind.visible)
    if given is None or not there:
        return
    if told := visibility_masks.wrong(kind, given, there):
        usable = sorted({int(i) for i in given.split(",") if i.strip().isdigit() and int(i) < there})
        mend = f"export {kind.visible}={','.join(map(str, usable))}" if usable else f"unset {kind.visible}"
        yield Finding("mask", told, "wrong", host.anew(mend))
    else:
        yield Finding("mask", f"{kind.visible} leaves {seen(host, kind)} of {there}")


def counted(host: ExaminedHost, kind: DeviceKind) -> Iterator[Finding]:
    """What Ray counts on a host of a cluster."""
    if host.resources is None:
        return
    there = seen(host, kind)
    counts = host.resources.get(kind.resource, 0)
    if counts == there:
        return
    number = f"--{kind.asked_as.replace('_', '-')}={there}"
    own = f"--resources='{{\"{kind.resource}\": {there}}}'"
    told = f"Ray counts {counts:g} {kind.resource}, and {there} are there"
    yield Finding("ray", told, "wrong", f"ray stop; ray start ... {number if kind.asked_as else own}")


def held(host: ExaminedHost, dies: Sequence[DeviceEntry], command: str) -> Iterator[Finding]:
    """Who has the memory of dies, as a command lists it."""
    theirs = [die for die in dies if die.holders]
    unseen = [die for die in dies if not die.holders and die.used > IDLE * die.total]
    if theirs:
        who = list(dict.fromkeys(f"{h.name or 'a process'} ({h.pid})" for die in theirs for h in die.holders))
        pids = " ".join(dict.fromkeys(h.pid for die in theirs for h in die.holders))
        most = max(die.used for die in theirs)
        told = f"{listed([d.label for d in theirs])}: up to {size(most)} held, by {listed(who)}"
        yield Finding("device-memory", told, "warning", f"wait until they end, or end them: kill {pids}")
    if unseen:
        told = (
            f"{listed([d.label for d in unseen])}: up to {size(max(d.used for d in unseen))} held, by nobody seen here"
        )
        look = f"look on the host itself, outside of containers: {command}"
        yield Finding("device-memory", told, "warning", look)
    if dies and not theirs and not unseen:
        least = min(dies, key=lambda die: die.free)
        yield Finding("device-memory", f"{size(least.free)} of {size(least.total)} free at least")
