"""What the environments in which a run's ranks begin have set otherwise than the plan wants.

Invariant: what is known to fail is an error, all else a warning; nothing is set over.
"""

from __future__ import annotations

import os

from ...diagnostics import Diagnostic, Severity
from ...hardware.environment_variables import Setting, differing
from ...ir.plan import Plan

FAILING = "failing-variable"
KEPT = "kept-variable"


def check(plan: Plan) -> list[Diagnostic]:
    """This process's environment, which ranks begin with unless they are on a cluster that has begun already."""
    if os.environ.get("RAY_ADDRESS"):
        return []
    found = []
    for setting, value in differing(wanted(plan), os.environ):
        severity, code, help = judged(setting, value)
        message = f"{setting.name} is {value!r} in your environment{'' if code == FAILING else ' and stays so'}"
        message += f"; the plan wants {setting.value!r}: {setting.why}"
        found.append(Diagnostic(code, message, help=help, severity=severity))
    return found


def judged(setting: Setting, value: str) -> tuple[Severity, str, str]:
    """Of a value that is not the plan's: how grave it is, by which code, and what to do."""
    if setting.refuses(value):
        return "error", FAILING, f"unset {setting.name}, or set it to {setting.value} ({setting.source})"
    return "warning", KEPT, "unset it, or leave it where it is meant"


def wanted(plan: Plan, host: int | None = None) -> list[Setting]:
    """What the ranks of a host want, or those of all hosts, each once."""
    each = plan.cluster.devices_per_node
    devices = range(plan.cluster.devices) if host is None else range(host * each, (host + 1) * each)
    return [*dict.fromkeys(setting for device in devices for setting in plan.around(device).settings)]
