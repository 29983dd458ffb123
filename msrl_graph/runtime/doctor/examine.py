"""All that is asked of machines, and all that is judged of them.

Invariant: the one place that knows every file of rules. Findings come from the bottom up, the machine first and the
program last, so that the first that is wrong is the first to mend.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...ir.plan import Plan
from . import ascend, cuda, host, hosts, program, torch_probe
from .findings import ExaminedHost, Finding, asking, judged, merged, together
from .machine import HostQuery

WANTS = (host.WANTS, ascend.WANTS, cuda.WANTS)
RULES = (*host.FIRST, *torch_probe.BELOW, *torch_probe.RULES, *ascend.ABOVE, *cuda.ABOVE, *host.RULES)


def examine(address: str, plan: Plan | None) -> tuple[list[Finding], list[str]]:
    """What is found of this machine, or of the hosts of the Ray cluster at an address, and who they are."""
    asked = question(plan)
    if not address:
        found = hosts.here(asked)
        alone = Finding("ray", "starts on this machine: RAY_ADDRESS is not set")
        return [*judge(found, plan), alone], [h.title for h in found]
    found, absent = hosts.joined(address, asked)
    if not found:  # then of this machine, without what it would have of the cluster
        found = hosts.here(asked)
        return [*absent, *judge(found)], [h.title for h in found]
    return [*absent, *judge(found, plan)], [*(h.title for h in found), *(name for f in absent for name in f.hosts)]


def question(plan: Plan | None) -> HostQuery:
    """What is read of every host."""
    return together(*WANTS, asking(marks=[str(Path.cwd())]), *([program.wants(plan)] if plan else []))


def judge(found: Sequence[ExaminedHost], plan: Plan | None = None) -> list[Finding]:
    return [
        *judged(RULES, found),
        *(f for compare in host.COMPARISONS for f in compare(found)),
        *(merged(program.findings(plan, found)) if plan else ()),
    ]
