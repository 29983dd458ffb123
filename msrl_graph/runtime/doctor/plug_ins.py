"""A rule for plug-ins: which ones are installed, and whether they can be loaded.

`python -m msrl_graph.runtime.doctor.plug_ins` prints the plug-ins as JSON. The doctor runs it on each host.

Invariant: the rule loads no plug-in. It reads the output of a process that loads all of them, within a time limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ... import trackers
from ...backends import ENGINES
from ...diagnostics import Fault
from ...files import plugins
from ...files.plugins import GROUPS, PlugInTable
from ...hardware.device_kinds import DEVICE_KINDS
from ...hardware.device_presets import DEVICES
from ...model.families import FAMILIES
from .findings import ExaminedHost, Finding, Rule, asking, failed
from .machine import ABSENT, LONG, OWN, PYTHON, Command

_TABLES: tuple[PlugInTable[Any], ...] = (ENGINES, FAMILIES, DEVICES, DEVICE_KINDS)
TABLES = {table.group: table for table in _TABLES}
COMMAND = [PYTHON, "-P", "-m", __name__]
WANTS = asking(commands=[Command(words=COMMAND, each="", where="", seconds=LONG)])


@dataclass(frozen=True)
class InstalledPlugIn:
    """A plug-in of an installed package.

    - `kind`: its group without `msrl_graph.`, such as `engines`.
    - `source`: the package and its version.
    - `wrong`: why it cannot be used, and `next`: what to do; both "" if it can be loaded.
    """

    kind: str
    name: str
    source: str
    wrong: str = ""
    next: str = ""


def list_plug_ins() -> Iterator[InstalledPlugIn]:
    """Load the plug-ins of all groups."""
    for group in GROUPS:
        for name in sorted(plugins.find_entry_points(group)):
            described = plugins.describe(group, name)
            source = f"{described.package} {described.version}"
            found = InstalledPlugIn(group.rpartition(".")[2], name, source)
            try:
                _load(group, name)
            except Fault as fault:
                (diagnostic,) = fault.diagnostics
                found = replace(found, wrong=diagnostic.message, next=diagnostic.help)
            if _is_taken(group, name):
                wrong = f"the plug-in `{name}` of the package {source} is not used: the name is taken"
                found = replace(found, wrong=wrong, next=f"report it to the authors of {described.package}")
            yield found


def _is_taken(group: str, name: str) -> bool:
    """Return whether something built-in has the name of a plug-in."""
    if group == trackers.PLUG_INS:
        return trackers.find_package(name) is None
    return group in TABLES and name in TABLES[group].built_in


def _load(group: str, name: str) -> None:
    if group in TABLES:
        TABLES[group][name]
    elif group == trackers.PLUG_INS:
        trackers.find_tracker(name)
    else:
        plugins.load(group, name)


def plug_ins(host: ExaminedHost) -> Iterator[Finding]:
    """List the plug-ins that can be loaded by package, and warn of all others."""
    output = host.said(COMMAND)
    if output["status"] == ABSENT or OWN not in host.packages:
        return
    if failure := failed(output, shown := f"python {' '.join(COMMAND[1:])}", LONG):
        yield Finding("plug-ins", failure, "warning", f"see its output: {shown}")
        return
    found = [InstalledPlugIn(**entry) for entry in json.loads(output["text"].strip().splitlines()[-1])]
    usable: dict[str, list[str]] = {}
    for plug_in in found:
        if plug_in.wrong:
            yield Finding("plug-ins", plug_in.wrong, "warning", plug_in.next)
        else:
            usable.setdefault(plug_in.source, []).append(f"{plug_in.kind} {plug_in.name}")
    if usable:
        yield Finding("plug-ins", "; ".join(f"{source} has {', '.join(names)}" for source, names in usable.items()))


RULES: tuple[Rule, ...] = (plug_ins,)

if __name__ == "__main__":
    print("\n" + json.dumps([asdict(plug_in) for plug_in in list_plug_ins()]))
