"""The plug-ins that a plan uses, with the versions of their packages.

Invariant: this module imports no code of these packages.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import algorithms, trackers
from ..backends import ENGINES
from ..files.plugins import PlugIn, find_entry_points
from ..hardware.device_kinds import DEVICE_KINDS
from ..hardware.device_presets import DEVICES
from ..ir.graph import Expr
from ..ir.plan import FUNCTIONS, Plan
from ..model.families import FAMILIES


def find_plugins(plan: Plan) -> tuple[PlugIn, ...]:
    """Return the plug-ins of a plan, each once."""
    return tuple(dict.fromkeys(plug_in for plug_in in _iterate_plugins(plan) if plug_in is not None))


def _iterate_plugins(plan: Plan) -> Iterator[PlugIn | None]:
    yield from (ENGINES.find_plug_in(placed.engine.name) for placed in plan.placements if placed.pool != FUNCTIONS)
    yield from (FAMILIES.find_plug_in(model.family) for model in plan.deploy.models.values())
    yield from (trackers.find_package(name) for name in plan.deploy.run.track)
    yield DEVICES.find_plug_in(plan.cluster.device.name)
    yield DEVICE_KINDS.find_plug_in(plan.cluster.device.backend)
    expressions = (expr for node in plan.graph.nodes for expr in node.attributes.values())
    yield from (algorithms.find_package(name) for expr in expressions for name in _list_calls(expr))


def _list_calls(expr: Expr) -> Iterator[str]:
    """Yield the names of all functions that an expression and its arguments call."""
    if expr.kind == "call":
        yield str(expr.value)
    for argument in expr.args:
        yield from _list_calls(argument)


def find_missing(plan: Plan) -> str:
    """Describe a plug-in of a plan that is not installed; "" if there is none."""
    for plug_in in plan.plugins:
        if plug_in.name not in find_entry_points(plug_in.group):
            wanted = f"{plug_in.package} {plug_in.version}"
            install = f"pip install {plug_in.package}=={plug_in.version}"
            return (
                f"it uses the plug-in `{plug_in.name}` of the package {wanted}, which is not installed here ({install})"
            )
    return ""
