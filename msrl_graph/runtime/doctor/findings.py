"""The input of rules, and the findings that rules return.

A *reading* is a fact that is read from a machine, such as the text of a file or the output of a command.

Invariant: a rule is a pure function from one host to findings. A rule that compares hosts is a pure function from all
hosts to findings. A check has the same name on every machine.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

from ...hardware.device_kinds import DEVICE_KINDS, DeviceKind
from . import output_parsers
from .machine import ABSENT, HUNG, Command, CommandOutput, HostQuery, MachineReadings, numbers

# A run would fail because of a `wrong` finding. A `warning` slows a run, or may be wrong.
State = Literal["ok", "warning", "wrong"]
CARDS = "/proc/bus/pci/devices"


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    - `check`: the name of the check.
    - `told`: what the check found, in words for the user.
    - `state`: "ok", "warning", or "wrong" if a run would fail.
    - `next`: the next step for the user, including the command to run.
    - `hosts`: the names of the hosts to which the finding applies.
    """

    check: str
    told: str
    state: State = "ok"
    next: str = ""
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExaminedHost:
    """A machine, and the readings (facts) that were read from it.

    For a host of a Ray cluster, these fields are also set:

    - `address`: the address of the host.
    - `resources`: the resources that Ray counts on the host.
    - `apart`: the number of seconds by which the host's clock is ahead of this machine's clock.
    """

    seen: MachineReadings
    address: str = ""
    resources: Mapping[str, float] | None = None
    apart: float = 0.0
    others: int = 0  # number of other hosts in the cluster

    @property
    def title(self) -> str:
        return self.address or self.seen["name"]

    @property
    def variables(self) -> Mapping[str, str]:
        return self.seen["variables"]

    @property
    def packages(self) -> Mapping[str, str]:
        return self.seen["packages"]

    def text(self, *paths: str) -> str:
        """Return the text of the first file of `paths` that exists; "" if no file exists."""
        return next((self.seen["texts"][path] for path in paths if path in self.seen["texts"]), "")

    def said(self, command: str | Sequence[str]) -> CommandOutput:
        words = command if isinstance(command, str) else " ".join(command)
        return self.seen["said"].get(words, CommandOutput(status=ABSENT, text=""))

    def paths(self, pattern: str) -> list[str]:
        return fnmatch.filter(self.seen["paths"], pattern)

    def devices(self, kind: DeviceKind) -> int:
        """Count the machine's devices of a kind, including devices that are not visible.

        A device is not visible if a visibility mask hides it from processes.
        """
        return len(numbers(self.paths(f"/dev/{kind.files}"))) if kind.files else 0

    @cached_property
    def kinds(self) -> list[DeviceKind]:
        """The kinds of devices that the machine has, with or without a driver."""
        cards = output_parsers.cards(self.text(CARDS))
        return [
            kind
            for kind in DEVICE_KINDS.values()
            if self.devices(kind) or any(card.startswith(kind.cards) for card in cards)
        ]

    def anew(self, command: str) -> str:
        """Return `command`, followed by a restart of Ray if the host is in a cluster.

        `command` changes environment variables. Ray's processes have the environment in which `ray start` ran, so the
        change needs a restart.
        """
        return command if self.resources is None else f"{command}; then `ray stop`, and `ray start` again in that shell"


Rule = Callable[[ExaminedHost], Iterable[Finding]]
Comparison = Callable[[Sequence[ExaminedHost]], Iterable[Finding]]


def asking(
    *,
    texts: Iterable[str] = (),
    paths: Iterable[str] = (),
    sizes: Iterable[str] = (),
    marks: Iterable[str] = (),
    variables: Iterable[str] = (),
    packages: Mapping[str, Sequence[str]] | None = None,
    sources: Iterable[str] = (),
    commands: Iterable[Command] = (),
    folders: Iterable[str] = (),
    rooms: Iterable[str] = (),
) -> HostQuery:
    """Build a HostQuery from the fields that are passed; other fields are empty."""
    return HostQuery(
        texts=[*texts],
        paths=[*paths],
        sizes=[*sizes],
        marks=[*marks],
        variables=[*variables],
        packages={name: [*names] for name, names in (packages or {}).items()},
        sources=[*sources],
        commands=[*commands],
        folders=[*folders],
        rooms=[*rooms],
    )


def together(*queries: HostQuery) -> HostQuery:
    """Merge several queries into one query."""
    merged_query: dict[str, Any] = {}
    for part in queries:
        for name, value in cast(dict[str, Any], part).items():
            previous = merged_query.get(name, type(value)())
            merged_query[name] = {**previous, **value} if isinstance(value, dict) else [*previous, *value]
    return cast(HostQuery, merged_query)


def failed(
    output: CommandOutput, command: str, seconds: float, line: Callable[[str], str] = output_parsers.last_line
) -> str:
    """Describe why a command failed; "" if the command succeeded.

    `seconds` is the time limit of the command. `line` gets the output of the command, and returns the line with the
    reason.
    """
    if output["status"] == HUNG:
        return f"`{command}` did not end within {seconds:.0f} s"
    if output["status"] == ABSENT:
        return f"`{command.split()[0]}` is missing"
    return f"`{command}` reports: {line(output['text'])}" if output["status"] != 0 else ""


def judged(rules: Iterable[Rule], hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """Yield the findings of all rules on all hosts, in the order of the rules.

    If a rule has equal findings on several hosts, these findings are yielded as one finding.
    """
    for rule in rules:
        yield from merged(replace(finding, hosts=(host.title,)) for host in hosts for finding in rule(host))


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge equal findings; the merged finding names the hosts of all equal findings.

    Two findings with the state "ok" count as equal if they are of the same check, even if their texts differ. The text
    of the first finding is kept.
    """
    by_key: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        is_ok = finding.state == "ok"
        key = (finding.check,) if is_ok else (finding.check, finding.state, finding.told, finding.next)
        previous = by_key.get(key, replace(finding, hosts=()))
        by_key[key] = replace(previous, hosts=tuple(dict.fromkeys((*previous.hosts, *finding.hosts))))
    return [*by_key.values()]
