"""The Python interpreters that pools use, and checks of their packages.

Invariant: an interpreter is checked before any process of the run starts, on each host where a process will use it.
Without this check, Ray would wait for an interpreter that cannot run. Ray cannot distinguish such an interpreter from
an interpreter that starts slowly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from ... import trackers
from ...backends import ENGINES
from ...diagnostics import Diagnostic
from ...ir.plan import FUNCTIONS, Placement, Plan
from . import host_facts
from .host_facts import Packages, Versions

NEEDED = ("torch", "ray", "numpy", "msgspec", "tokenizers")
# Packages that must be the same in all processes of a run, and how many numbers of the version must be equal. None:
# all of them.
SAME = {"Python": 2, "msrl-graph": None, "ray": None}
MEND = (
    "name the interpreter of an environment that has the engine's packages, and the run's own versions of Python, "
    "msrl-graph and ray; a path is relative to the folder of the file that states it"
)


def packages(plan: Plan, python: str = "") -> Packages:
    """Return the packages that one of the run's Python interpreters must have.

    `python` is the path of the interpreter, or "" for the interpreter that runs the driver. The result maps each
    package to the names under which the package may be installed.
    """
    engines = (
        ENGINES[placement.engine.name] for placement in placements_of(plan, python) if placement.engine.name in ENGINES
    )
    # Trackers run next to the driver, which has loaded them.
    needed = [*NEEDED, *(plug_in.package for plug_in in plan.plugins if plug_in.group != trackers.PLUG_INS)]
    kind = plan.cluster.device.kind
    names = {package: (package,) for package in kind.packages(needed)}
    return names | {package: spec.packages.names(package) for spec in engines for package in spec.packages.on(kind)}


def commands(plan: Plan) -> dict[str, list[str]]:
    """Return the commands that print the package versions of the pools' interpreters.

    The keys are the paths of the interpreters that the deploy states for pools. The interpreter that runs the driver is
    not included.
    """
    code = Path(host_facts.__file__).read_text(encoding="utf-8")
    interpreters = dict.fromkeys(
        pool_environment.python for pool_environment in plan.surroundings if pool_environment.python
    )
    return {python: [python, "-P", "-c", code, json.dumps(packages(plan, python))] for python in interpreters}


def check_interpreters(plan: Plan) -> Iterator[Diagnostic]:
    """Yield an error for each of this machine's interpreters that the run cannot use.

    An interpreter is unusable if `find_mismatch` returns a reason. The interpreter that runs the driver is not checked.
    """
    asked = commands(plan)
    own = host_facts.versions(packages(plan)) if asked else {}
    for python, command in asked.items():
        if wrong := find_mismatch(host_facts.query_interpreter(command), own):
            first = next(placements_of(plan, python))
            span = first.engine.span if first.engine.span.line else plan.graph.node(first.node).span
            yield Diagnostic("not-installed", f"the interpreter {python} {wrong}", span, MEND)


def find_mismatch(seen: Versions, own: Mapping[str, str]) -> str:
    """Return why the run cannot use an interpreter, or "" if the run can use it.

    The result continues a sentence that begins with the interpreter's name. `seen` has the package versions of this
    interpreter. `own` has the package versions of the interpreter that runs the driver.
    """
    if seen["wrong"]:
        return f"does not run: {seen['wrong']}"
    installed = seen["found"]
    if missing := [package for package, version in installed.items() if not version]:
        return f"lacks {', '.join(missing)}"
    unlike = [
        package
        for package, numbers in SAME.items()
        if _part(installed[package], numbers) != _part(own[package], numbers)
    ]
    return (
        f"has {', '.join(f'{package} {installed[package]} (the run has {own[package]})' for package in unlike)}"
        if unlike
        else ""
    )


def placements_of(plan: Plan, python: str = "") -> Iterator[Placement]:
    """Yield the placements of the nodes whose pool uses a given Python interpreter.

    `python` is the path of the interpreter, or "" for the interpreter that runs the driver. Function nodes are left
    out.
    """
    return (
        placement
        for placement in plan.placements
        if placement.pool != FUNCTIONS and plan.environment_of(placement.pool).python == python
    )


def _part(version: str, numbers: int | None) -> str:
    return version if numbers is None else ".".join(version.split(".")[:numbers])
