"""Check of the ranks' environment variables against the values that a plan wants.

Invariant: a value that is known to make a run fail is an error. Any other value that differs is a warning. No variable
is overwritten.
"""

from __future__ import annotations

import os

from ...diagnostics import Diagnostic, Severity
from ...hardware.environment_variables import Setting, find_overridden
from ...ir.plan import Plan

FAILING = "failing-variable"
KEPT = "kept-variable"


def check(plan: Plan) -> list[Diagnostic]:
    """Check the environment variables of this process, which the run's ranks inherit.

    Ranks on a cluster that was started before the run do not inherit these variables. For such a run, the result is
    empty.
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
    """Return the severity, code and help text for a variable with an unwanted value.

    The three values are for a diagnostic. `setting` has the environment variable and the value that the plan wants.
    `value` is the variable's actual, different value.
    """
    if setting.refuses(value):
        return "error", FAILING, f"unset {setting.name}, or set it to {setting.value} ({setting.source})"
    return "warning", KEPT, "unset it, or leave it if it is intended"


def wanted_settings(plan: Plan, host: int | None = None) -> list[Setting]:
    """Return the environment settings that the plan wants for the ranks of a host.

    Each setting is listed once. If `host` is None, the settings are for the ranks of all hosts.
    """
    devices_per_node = plan.cluster.devices_per_node
    devices = (
        range(plan.cluster.devices) if host is None else range(host * devices_per_node, (host + 1) * devices_per_node)
    )
    return [*dict.fromkeys(setting for device in devices for setting in plan.environment_of(device).settings)]
