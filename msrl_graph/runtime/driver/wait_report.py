"""Texts about the statuses of docks: what processes do, and which processes wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..dock.messages import Status


def places(statuses: Sequence[Status], names: Iterable[str]) -> list[str]:
    """Return, for each process, a text about what the process did last.

    The texts come from the last report of each process to a dock. A process without a report is left out.
    """
    # A process reports its work to the dock of its host; another host's dock may know a share that it took since.
    activities = sorted(
        (item for status in statuses for item in status.doing.items()), key=lambda item: -item[1].seconds
    )
    doing = {name: str(activity) for name, activity in activities}
    return [f"in {doing[name]}" for name in names if name in doing]


def waits(statuses: Sequence[Status], reported: str) -> list[str]:
    """Return a line for each process that waits or works.

    `reported` is a message that was already shown. Waits that are in this message are left out.
    """
    lines = [
        str(wait) for status in statuses for wait in status.waits if str(wait).split(" has waited ")[0] not in reported
    ]
    return lines + [
        f"{name} has been in {current.activity} for {current.seconds:.0f} s{': ' * bool(current.rows)}{current.rows}"
        for status in statuses
        for name, current in sorted(status.doing.items())
    ]


def describe_lost_hosts(addresses: Sequence[str]) -> str:
    """Describe hosts that are lost."""
    subject = f"the host {addresses[0]} does" if len(addresses) == 1 else f"the hosts {', '.join(addresses)} do"
    return f"{subject} not answer any more"
