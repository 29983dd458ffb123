"""The Python interpreter and the environment variables of each pool's processes.

The variables are those that the pool's devices and engines need. Invariant: a variable occurs once in a pool. If
devices or engines need different values of a variable, the value for the devices is used, or else the value for the
engine whose node is first in the graph. A note reports the other values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..backends.spec import EngineSpec, Situation
from ..hardware.environment_variables import Setting, SettingConditions
from ..ir.plan import FUNCTIONS, Plan, PlanNote, ProcessEnvironment
from .spec import Pass


@dataclass(frozen=True)
class PrepareEnvironments(Pass):
    """The pass that fills in process environments; `engines` are specs by name."""

    name = "environment"
    needs = ("place",)

    engines: Mapping[str, EngineSpec]

    def apply(self, plan: Plan) -> Plan:
        wants = SettingConditions(plan.deploy.dock.deadline, plan.deploy.run.deterministic)
        environments = list[ProcessEnvironment]()
        notes = list[PlanNote]()
        for pool in plan.pools:
            settings = {setting.name: setting for setting in plan.cluster.device.kind.settings(wants)}
            for placement in (candidate for candidate in plan.placements if candidate.pool == pool.name != FUNCTIONS):
                for other in self.engines[placement.engine.name].capabilities.settings(
                    Situation.from_plan(plan, placement)
                ):
                    own = settings.setdefault(other.name, other)
                    if own.value != other.value:
                        notes.append(_conflict_note(pool.name, own, other))
            stated = (
                placement.engine.options.get("python") for placement in plan.placements if placement.pool == pool.name
            )
            python = str(next(filter(None, stated), ""))  # a check reports two different ones
            if settings or python:
                environments.append(ProcessEnvironment(pool.name, tuple(settings.values()), python))
        return replace(plan, surroundings=tuple(environments), notes=(*plan.notes, *dict.fromkeys(notes)))


def _conflict_note(pool: str, own: Setting, other: Setting) -> PlanNote:
    return PlanNote(
        "environment", f"{own.name} is {own.value} on {pool} ({own.why}), and not {other.value}: {other.why}"
    )
