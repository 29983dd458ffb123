"""Findings as a table, and as JSON.

Invariant: pure. A next step is never broken into lines, so that a command can be copied; keys of the JSON are those of
docs/clusters.md, and stay.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from .findings import Finding, State

VERSION = 1
COLOURS: dict[State, str] = {"ok": "\x1b[32m", "warning": "\x1b[33m", "wrong": "\x1b[1;31m"}
NAMED = 3  # hosts of a row that are named


def status(findings: Sequence[Finding]) -> int:
    """The exit status: 1 where a run would fail."""
    return int(any(f.state == "wrong" for f in findings))


def table(findings: Sequence[Finding], hosts: Sequence[str], width: int, colour: bool = False) -> str:
    """A row for each finding, with its next step below; of a cluster with the hosts that it is told of."""
    name = max((len(f.check) for f in findings), default=0)
    indent = len("warning") + name + 4
    lines = []
    for finding in findings:
        mark = finding.state.ljust(len("warning"))
        shown = f"{COLOURS[finding.state]}{mark}\x1b[0m" if colour else mark
        some = finding.hosts and {*finding.hosts} != {*hosts}
        where = f"{_where(finding.hosts)}: " if some else ""
        first, *rest = textwrap.wrap(where + finding.told, max(20, width - indent), break_on_hyphens=False) or [""]
        lines += [f"{shown}  {finding.check.ljust(name)}  {first}", *(" " * indent + line for line in rest)]
        if finding.next:
            lines.append(f"{' ' * (indent - 2)}> {finding.next}")
    return "\n".join(lines) + f"\n\n{_sum(findings, hosts)}\n"


def document(findings: Sequence[Finding], hosts: Sequence[str]) -> str:
    told = {
        "version": VERSION,
        "status": status(findings),
        "hosts": [*hosts],
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(told, indent=2) + "\n"


def _where(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:NAMED]) + f" and {len(hosts) - NAMED} more" * (len(hosts) > NAMED)


def _sum(findings: Sequence[Finding], hosts: Sequence[str]) -> str:
    counts = {state: sum(f.state == state for f in findings) for state in COLOURS}
    what = f"{len(hosts)} hosts" if len(hosts) > 1 else "this machine" if hosts else "nothing"
    if counts["wrong"]:
        return f"{what}: {counts['wrong']} wrong, {counts['warning']} to look at; begin with the first that is wrong"
    if counts["warning"]:
        return f"{what}: nothing is wrong, {counts['warning']} to look at"
    return f"{what}: nothing is wrong"
