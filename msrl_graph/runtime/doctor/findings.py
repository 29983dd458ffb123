"""What rules are given, and what they find.

Invariant: a rule is a pure function from a host to findings, one from all hosts where it compares them; what is told of
a check has the same name on every machine.
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

# What is wrong a run would fail of; a warning is of what slows it, or may be wrong.
State = Literal["ok", "warning", "wrong"]
CARDS = "/proc/bus/pci/devices"


@dataclass(frozen=True)
class Finding:
    """`check` names what was looked at, `told` is what there is or what is wrong, `next` the next step, with its
    command, and `hosts` are those of which it is told."""

    check: str
    told: str
    state: State = "ok"
    next: str = ""
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExaminedHost:
    """What was read of a machine; of a host of a Ray cluster also its address, what Ray counts there, and the seconds
    by which its clock is ahead."""

    seen: MachineReadings
    address: str = ""
    resources: Mapping[str, float] | None = None
    apart: float = 0.0
    others: int = 0  # hosts of the cluster besides

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
        """The text of the first of these files that is there."""
        return next((self.seen["texts"][path] for path in paths if path in self.seen["texts"]), "")

    def said(self, command: str | Sequence[str]) -> CommandOutput:
        words = command if isinstance(command, str) else " ".join(command)
        return self.seen["said"].get(words, CommandOutput(status=ABSENT, text=""))

    def paths(self, pattern: str) -> list[str]:
        return fnmatch.filter(self.seen["paths"], pattern)

    def devices(self, kind: DeviceKind) -> int:
        """How many are there, whatever processes may see of them."""
        return len(numbers(self.paths(f"/dev/{kind.files}"))) if kind.files else 0

    @cached_property
    def kinds(self) -> list[DeviceKind]:
        """The kinds of devices that the machine has, with a driver or without."""
        cards = output_parsers.cards(self.text(CARDS))
        return [k for k in DEVICE_KINDS.values() if self.devices(k) or any(c.startswith(k.cards) for c in cards)]

    def anew(self, command: str) -> str:
        """A step that changes the environment: Ray's processes have that in which `ray start` was."""
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
    """A question of these, and of nothing else."""
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


def together(*asked: HostQuery) -> HostQuery:
    """One question of several."""
    found: dict[str, Any] = {}
    for part in asked:
        for name, value in cast(dict[str, Any], part).items():
            before = found.get(name, type(value)())
            found[name] = {**before, **value} if isinstance(value, dict) else [*before, *value]
    return cast(HostQuery, found)


def failed(
    said: CommandOutput, what: str, seconds: float, line: Callable[[str], str] = output_parsers.last_line
) -> str:
    """Why a command gave nothing, in words; "" where it did. `line` is the one of what it printed that says so."""
    if said["status"] == HUNG:
        return f"`{what}` does not end within {seconds:.0f} s"
    if said["status"] == ABSENT:
        return f"`{what.split()[0]}` is not there"
    return f"`{what}` says: {line(said['text'])}" if said["status"] != 0 else ""


def judged(rules: Iterable[Rule], hosts: Sequence[ExaminedHost]) -> Iterator[Finding]:
    """What rules find on hosts, rule by rule; what is told of several hosts is told once."""
    for rule in rules:
        yield from merged(replace(f, hosts=(host.title,)) for host in hosts for f in rule(host))


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of one check that are the same, as one of all their hosts. Of those that are fine the first is told."""
    found: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        fine = finding.state == "ok"
        key = (finding.check,) if fine else (finding.check, finding.state, finding.told, finding.next)
        before = found.get(key, replace(finding, hosts=()))
        found[key] = replace(before, hosts=tuple(dict.fromkeys((*before.hosts, *finding.hosts))))
    return [*found.values()]
