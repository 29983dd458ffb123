"""Environment variables that a run wants of its processes: of a kind of device, or of an engine.

Invariant: each has why, and where that is said. What a user has set stays as it is, and is told (`differing`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """A variable with its value, why, and the source that says so. `fails` is the pattern of those values that are
    known to end in an error, or in weights or tokens that are wrong without one."""

    name: str
    value: str
    why: str
    source: str
    fails: str = ""

    def refuses(self, value: str) -> bool:
        return bool(self.fails and re.fullmatch(self.fails, value))


@dataclass(frozen=True)
class SettingConditions:
    """What of a run settings go by: the seconds after which it gives up waiting, and whether its rows and weights are
    to follow from the seed."""

    deadline: float
    deterministic: bool


Settings = Callable[[SettingConditions], Iterable[Setting]]


def nothing(wants: SettingConditions) -> Iterable[Setting]:
    return ()


def differing(settings: Iterable[Setting], environment: Mapping[str, str]) -> list[tuple[Setting, str]]:
    """What is set otherwise in an environment, each with its value there."""
    return [(s, environment[s.name]) for s in settings if environment.get(s.name, s.value) != s.value]


def applied(settings: Iterable[Setting], environment: Mapping[str, str]) -> dict[str, str]:
    """What is to be set in an environment."""
    return {s.name: s.value for s in settings if s.name not in environment}
