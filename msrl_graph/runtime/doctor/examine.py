"""The complete query of a machine, and all rules that judge its answer.

Invariant: this is the only file that knows all rule files. Findings are ordered from the machine (first) to the program
(last), so the first finding that reports a problem is the first to fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...ir.plan import Plan
from . import ascend, cuda, host, hosts, plug_ins, program, torch_probe
from .findings import ExaminedHost, Finding, asking, judged, merged, together
from .machine import HostQuery

WANTS = (host.WANTS, ascend.WANTS, cuda.WANTS, plug_ins.WANTS)
RULES = (*host.FIRST, *torch_probe.BELOW, *torch_probe.RULES, *ascend.ABOVE, *cuda.ABOVE, *host.RULES, *plug_ins.RULES)


def examine(address: str, plan: Plan | None) -> tuple[list[Finding], list[str]]:
    """Examine this machine, or the hosts of the Ray cluster at `address`.

    An empty `address` means this machine. If no host of the cluster answers, this machine is examined instead, and the
    plan is ignored. Returns the findings and the names of the hosts.
    """
    query = question(plan)
    if not address:
        examined = hosts.here(query)
        ray_finding = Finding("ray", "will start on this machine: RAY_ADDRESS is not set")
        return [*judge(examined, plan), ray_finding], [item.title for item in examined]
    examined, absent = hosts.joined(address, query)
    if not examined:  # then examine this machine, without the checks of a cluster
        examined = hosts.here(query)
        return [*absent, *judge(examined)], [item.title for item in examined]
    return [*absent, *judge(examined, plan)], [
        *(item.title for item in examined),
        *(name for finding in absent for name in finding.hosts),
    ]


def question(plan: Plan | None) -> HostQuery:
    """Return the query for every host: what the rules need, and what the plan needs."""
    return together(*WANTS, asking(marks=[str(Path.cwd())]), *([program.wants(plan)] if plan else []))


def judge(examined: Sequence[ExaminedHost], plan: Plan | None = None) -> list[Finding]:
    return [
        *judged(RULES, examined),
        *(finding for compare in host.COMPARISONS for finding in compare(examined)),
        *(merged(program.findings(plan, examined)) if plan else ()),
    ]
