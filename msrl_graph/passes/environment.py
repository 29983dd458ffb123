"""The Python interpreter and the environment variables of each pool's processes.

The variables are those that the pool's devices and engines need. Invariant: a variable occurs once in a pool. If
devices or engines need different values of a variable, the value for the devices is used, or else the value for the
engine whose node is first in the graph. A note reports the other values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..backends.spec import Situation
from ..diagnostics.sheet import Sheet
from ..hardware.environment_variables import Setting, SettingConditions
from ..ir.plan import FUNCTIONS, Plan, PlanNote, ProcessEnvironment
from .facts import Fact, Section
from .spec import Pass


@dataclass(frozen=True)
class PrepareEnvironments(Pass):
    """The pass that fills in process environments."""

    name = "environment"
    title = "Environment"
    needs = ("place",)
    fills = ("surroundings",)

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

    @classmethod
    def write(cls, page: Sheet, plan: Plan) -> None:
        if not plan.surroundings:
            return
        page.heading("Environment", "of the ranks' processes; variables that are already set keep their values")
        for environment in (environment for environment in plan.surroundings if environment.python):
            page.line(f"interpreter of {environment.pool}: {environment.python}")
        pools_of: dict[Setting, list[str]] = {}
        for environment in plan.surroundings:
            for setting in environment.settings:
                pools_of.setdefault(setting, []).append(environment.pool)
        apart = len(plan.pools) > 1
        rows = [
            (
                f"{setting.name}={setting.value}",
                f"{setting.why} ({setting.source})",
                "all" if len(pools) == len(plan.pools) else ", ".join(pools),
            )
            for setting, pools in pools_of.items()
        ]
        if rows:
            page.table(("variable", "why", "pools")[: 2 + apart], [row[: 2 + apart] for row in rows], (), (0,))

    @staticmethod
    def facts(plan: Plan) -> Section:
        section = {
            f"{environment.pool}, interpreter": {"": Fact(environment.python)}
            for environment in plan.surroundings
            if environment.python
        }
        return section | {
            f"{environment.pool}, {setting.name}": {"": Fact(setting.value)}
            for environment in plan.surroundings
            for setting in environment.settings
        }


def _conflict_note(pool: str, own: Setting, other: Setting) -> PlanNote:
    return PlanNote(
        "environment", f"{own.name} is {own.value} on {pool} ({own.why}), and not {other.value}: {other.why}"
    )
