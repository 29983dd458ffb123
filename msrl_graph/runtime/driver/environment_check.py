"""Environment variables of ranks whose values differ from what the plan wants.

Invariant: a value that is known to fail is an error, any other a warning. No variable is overwritten.
"""

from __future__ import annotations

import os

from ...diagnostics import Diagnostic, Severity
from ...hardware.environment_variables import Setting, find_overridden
from ...ir.plan import Plan

FAILING = "failing-variable"
KEPT = "kept-variable"


def check(plan: Plan) -> list[Diagnostic]:
    """Check this process's environment.

    Ranks inherit it, unless they are on a cluster that is running already.
    """
    if os.environ.get("RAY_ADDRESS"):
        return []
    diagnostics = []
    for setting, value in find_overridden(wanted_settings(plan), os.environ):
        severity, code, help = judge_value(setting, value)
        message = f"{setting.name} is {value!r} in your environment{'' if code == FAILING else ' and is kept'}"
        message += f"; the plan wants {setting.value!r}: {setting.why}"
        diagnostics.append(Diagnostic(code, message, help=help, severity=severity))
    return diagnostics


def judge_value(setting: Setting, value: str) -> tuple[Severity, str, str]:
    """Return severity, code and help for a value that is not the plan's."""
    if setting.refuses(value):
        return "error", FAILING, f"unset {setting.name}, or set it to {setting.value} ({setting.source})"
    return "warning", KEPT, "unset it, or leave it if it is intended"


def wanted_settings(plan: Plan, host: int | None = None) -> list[Setting]:
    """Return the settings that the ranks of a host want, each once; None: all hosts."""
    devices_per_node = plan.cluster.devices_per_node
    devices = (
        range(plan.cluster.devices) if host is None else range(host * devices_per_node, (host + 1) * devices_per_node)
    )
    return [*dict.fromkeys(setting for device in devices for setting in plan.environment_of(device).settings)]
