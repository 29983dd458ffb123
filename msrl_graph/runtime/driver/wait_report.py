"""What the docks told of a run, in words: who is where, and who waits for what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..dock.messages import Status


def places(statuses: Sequence[Status], names: Iterable[str]) -> list[str]:
    """What these processes did when they were last heard of, as far as they said."""
    # A process tells the dock of its host what it does; that of another may know of a share that it has taken since.
    heard = sorted((item for s in statuses for item in s.doing.items()), key=lambda item: -item[1].seconds)
    doing = {name: str(told) for name, told in heard}
    return [f"in {doing[name]}" for name in names if name in doing]


def waits(statuses: Sequence[Status], told: str) -> list[str]:
    """The wait-for graph in lines, without the wait that was `told` already."""
    lines = [str(wait) for s in statuses for wait in s.waits if str(wait).split(" has waited ")[0] not in told]
    return lines + [
        f"{name} has been in {d.what} for {d.seconds:.0f} s{': ' * bool(d.rows)}{d.rows}"
        for s in statuses
        for name, d in sorted(s.doing.items())
    ]


def silent(addresses: Sequence[str]) -> str:
    """Hosts that are lost."""
    who = f"the host {addresses[0]} does" if len(addresses) == 1 else f"the hosts {', '.join(addresses)} do"
    return f"{who} not answer any more"
