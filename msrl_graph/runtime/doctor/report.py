"""Findings as a table and as JSON.

Invariant: all functions are pure. A next step is never broken into lines, so that the user can copy its command.
docs/guides/setup.md documents the keys of the JSON; these keys do not change.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from .findings import Finding, State

VERSION = 1
COLOURS: dict[State, str] = {"ok": "\x1b[32m", "warning": "\x1b[33m", "wrong": "\x1b[1;31m"}
NAMED = 3  # most hosts that a row names


def status(findings: Sequence[Finding]) -> int:
    """Return the exit status of msrl-doctor: 1 if a run would fail, else 0."""
    return int(any(finding.state == "wrong" for finding in findings))


def table(findings: Sequence[Finding], hosts: Sequence[str], width: int, colour: bool = False) -> str:
    """Format one table row per finding, with the finding's next step below the row.

    If a finding applies to only some hosts of a cluster, its row names these hosts.
    """
    name = max((len(item.check) for item in findings), default=0)
    indent = len("warning") + name + 4
    lines = []
    for finding in findings:
        mark = finding.state.ljust(len("warning"))
        shown = f"{COLOURS[finding.state]}{mark}\x1b[0m" if colour else mark
        is_partial = finding.hosts and {*finding.hosts} != {*hosts}
        host_prefix = f"{_name_hosts(finding.hosts)}: " if is_partial else ""
        first, *rest = textwrap.wrap(host_prefix + finding.told, max(20, width - indent), break_on_hyphens=False) or [
            ""
        ]
        lines += [f"{shown}  {finding.check.ljust(name)}  {first}", *(" " * indent + line for line in rest)]
        if finding.next:
            lines.append(f"{' ' * (indent - 2)}> {finding.next}")
    return "\n".join(lines) + f"\n\n{_summarize(findings, hosts)}\n"


def document(findings: Sequence[Finding], hosts: Sequence[str]) -> str:
    content = {
        "version": VERSION,
        "status": status(findings),
        "hosts": [*hosts],
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(content, indent=2) + "\n"


def _name_hosts(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:NAMED]) + f" and {len(hosts) - NAMED} more" * (len(hosts) > NAMED)


def _summarize(findings: Sequence[Finding], hosts: Sequence[str]) -> str:
    counts = {state: sum(finding.state == state for finding in findings) for state in COLOURS}
    subject = f"{len(hosts)} hosts" if len(hosts) > 1 else "this machine" if hosts else "nothing"
    if counts["wrong"]:
        return f"{subject}: {counts['wrong']} wrong, {counts['warning']} to look at; begin with the first that is wrong"
    if counts["warning"]:
        return f"{subject}: nothing is wrong, {counts['warning']} to look at"
    return f"{subject}: nothing is wrong"
