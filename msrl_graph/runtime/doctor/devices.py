"""Rules of any kind of device: which of them processes see, what Ray counts, whose their memory is.

Invariant: kinds differ by what device_kinds.py says of them, and by the dies that their own file reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...emit.words import size
from ...hardware.device_kinds import DeviceKind
from .finding import Finding, Host
from .formats import Die

NAMED = 3  # things of a list that are named
IDLE = 0.15  # the share of a die's memory that its own firmware may hold: 2.9 of 32 GB was seen on a 910B4
OFF = ("", "0", "false")


def listed(items: Sequence[str]) -> str:
    return ", ".join(items[:NAMED]) + f" and {len(items) - NAMED} more" * (len(items) > NAMED)


def noset(kind: DeviceKind) -> str:
    """The variable by which Ray leaves processes all devices."""
    return f"RAY_EXPERIMENTAL_NOSET_{kind.visible}"


def _read(host: Host, kind: DeviceKind) -> tuple[list[str], str]:
    """The ids that a driver reads of what the environment leaves processes, and why it reads no further: it stops at
    the first that it cannot use."""
    there, read = host.devices(kind), list[str]()
    ids = host.variables[kind.visible].split(",")
    for i in ids if kind.rising else [i.strip() for i in ids]:
        if not i.isdigit():
            return read, f"`{i}` is no number"
        if int(i) >= there:
            return read, f"there is no {i}, only {'0' if there == 1 else f'0 to {there - 1}'}"
        if i in read:  # of such CUDA takes none
            return read if kind.rising else [], f"{i} stands there twice"
        if kind.rising and read and int(i) < int(read[-1]):
            return read, f"{i} comes after {read[-1]}, and ids have to rise"
        read.append(i)
    return read, ""


def _by_name(host: Host, kind: DeviceKind) -> bool:
    """Whether devices are left by names that only their driver knows."""
    return host.variables.get(kind.visible, "").startswith(("GPU-", "MIG-"))


def seen(host: Host, kind: DeviceKind) -> int:
    """How many devices processes see."""
    if kind.visible not in host.variables or not host.devices(kind):
        return host.devices(kind)
    named = host.variables[kind.visible].split(",")
    return len(named) if _by_name(host, kind) else len(_read(host, kind)[0])


def mask(host: Host, kind: DeviceKind) -> Iterator[Finding]:
    """What the environment leaves processes of the devices."""
    there, name = host.devices(kind), kind.visible
    if host.variables.get(noset(kind), "").lower() not in OFF:
        told = f"{noset(kind)} is set: Ray leaves every rank all devices, and each takes the first"
        yield Finding("mask", told, "wrong", host.anew(f"unset {noset(kind)}"))
    if name not in host.variables or not there or _by_name(host, kind):
        return
    ids = host.variables[name].split(",")
    usable = sorted({int(i) for i in ids if i.strip().isdigit() and int(i) < there})
    mend = host.anew(f"export {name}={','.join(map(str, usable))}" if usable else f"unset {name}")
    read, why = _read(host, kind)
    if ids == [""]:
        yield Finding("mask", f"{name} is empty: no device is seen", "wrong", mend)
    elif why:
        what = f"{len(read)} of {len(ids)} ids are read" if read else "none of its ids is read"
        yield Finding("mask", f"{name}={','.join(ids)}: {why}; {what}", "wrong", mend)
    else:
        yield Finding("mask", f"{name} leaves {len(read)} of {there}")


def counted(host: Host, kind: DeviceKind) -> Iterator[Finding]:
    """What Ray counts on a host of a cluster."""
    if host.resources is None:
        return
    there, counts = seen(host, kind), host.resources.get(kind.resource, 0)
    if counts == there:
        return
    number = f"--{kind.asked_as.replace('_', '-')}={there}"
    own = f"--resources='{{\"{kind.resource}\": {there}}}'"
    told = f"Ray counts {counts:g} {kind.resource}, and {there} are there"
    yield Finding("ray", told, "wrong", f"ray stop; ray start ... {number if kind.asked_as else own}")


def held(host: Host, dies: Sequence[Die], command: str) -> Iterator[Finding]:
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
