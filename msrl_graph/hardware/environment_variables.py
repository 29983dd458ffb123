"""Environment variables that a run sets, for a device kind or an engine.

Invariant: each variable has a reason and the source of the reason. If the user has set a variable, its value is not
changed, but reported (`find_overridden`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """An environment variable with its value, the reason, and the reason's source.

    `fails` is a regular expression for values that are known to be harmful: they cause an error, or they cause wrong
    weights or tokens without an error.
    """

    name: str
    value: str
    why: str
    source: str
    fails: str = ""

    def refuses(self, value: str) -> bool:
        return bool(self.fails and re.fullmatch(self.fails, value))


@dataclass(frozen=True)
class SettingConditions:
    """Those properties of a run that settings depend on.

    The run fails if it waits longer than `deadline` seconds. `deterministic` means that the same seed must give the
    same rows and weights.
    """

    deadline: float
    deterministic: bool


Settings = Callable[[SettingConditions], Iterable[Setting]]


def no_settings(wants: SettingConditions) -> Iterable[Setting]:
    return ()


def find_overridden(settings: Iterable[Setting], environment: Mapping[str, str]) -> list[tuple[Setting, str]]:
    """Return the settings whose variables have other values in `environment`.

    Each setting is returned with the variable's value in `environment`.
    """
    return [
        (setting, environment[setting.name])
        for setting in settings
        if environment.get(setting.name, setting.value) != setting.value
    ]


def missing_settings(settings: Iterable[Setting], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the names and values of settings whose variables `environment` lacks."""
    return {setting.name: setting.value for setting in settings if setting.name not in environment}
