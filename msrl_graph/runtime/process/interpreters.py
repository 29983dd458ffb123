"""Interpreters of pools: which packages each is to have, the run's own among them, and what another one lacks.

Invariant: looked at before a process of the run starts, on each host that it is to start on: Ray waits for an
interpreter that does not run as it does for one that is slow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...backends import ENGINES
from ...backends.packages import ALIASES
from ...diagnostics import Diagnostic
from ...ir.plan import FUNCTIONS, Placement, Plan
from . import host_facts
from .host_facts import Packages, Versions

NEEDED = ("torch", "ray", "numpy", "msgspec", "tokenizers")
# What processes of one run must have the same of, and how many of the numbers of a version; None: all of it.
SAME = {"Python": 2, "msrl-graph": None, "ray": None}
MEND = (
    "name the interpreter of an environment that has the engine's packages, and the run's own versions of Python, "
    "msrl-graph and ray; a path is from the folder of the file that says it"
)


def packages(plan: Plan, python: str = "") -> Packages:
    """What the processes load that an interpreter runs, "" being the run's own."""
    engines = (ENGINES[p.engine.name] for p in placed(plan, python) if p.engine.name in ENGINES)
    needed = [*NEEDED, *(package for engine in engines for package in engine.needs)]
    return {name: ALIASES.get(name, (name,)) for name in plan.cluster.device.kind.packages(needed)}


def commands(plan: Plan) -> dict[str, list[str]]:
    """Of each interpreter that is not the run's own the command by which it tells what it has of what its processes
    load."""
    code = Path(host_facts.__file__).read_text(encoding="utf-8")
    found = dict.fromkeys(s.python for s in plan.surroundings if s.python)
    return {python: [python, "-P", "-c", code, json.dumps(packages(plan, python))] for python in found}


def check(plan: Plan) -> Iterator[Diagnostic]:
    """What this machine's other interpreters lack."""
    asked = commands(plan)
    own = host_facts.versions(packages(plan)) if asked else {}
    for python, command in asked.items():
        if wrong := lacking(host_facts.told(command), own):
            first = next(placed(plan, python))
            span = first.engine.span if first.engine.span.line else plan.graph.node(first.node).span
            yield Diagnostic("not-installed", f"the interpreter {python} {wrong}", span, MEND)


def lacking(seen: Versions, own: Mapping[str, str]) -> str:
    """What is wrong with an interpreter beside the run's `own` versions, in words that follow its name; "" where it
    will do."""
    if seen["wrong"]:
        return f"does not run: {seen['wrong']}"
    found = seen["found"]
    if missing := [package for package, version in found.items() if not version]:
        return f"lacks {', '.join(missing)}"
    unlike = [p for p, numbers in SAME.items() if _part(found[p], numbers) != _part(own[p], numbers)]
    return f"has {', '.join(f'{p} {found[p]}, and the run {own[p]}' for p in unlike)}" if unlike else ""


def placed(plan: Plan, python: str = "") -> Iterator[Placement]:
    """What an interpreter's processes compute, "" being the run's own."""
    return (p for p in plan.placements if p.pool != FUNCTIONS and plan.around(p.pool).python == python)


def _part(version: str, numbers: int | None) -> str:
    return version if numbers is None else ".".join(version.split(".")[:numbers])
