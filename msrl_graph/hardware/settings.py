"""Environment variables that a run wants of its processes: of a kind of device, or of an engine.

Invariant: each has why, and where that is said. What a user has set stays as it is, and is told (`kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """A variable with its value, why, and the source that says so."""

    name: str
    value: str
    why: str
    source: str


@dataclass(frozen=True)
class Wants:
    """What of a run settings go by: the seconds after which it gives up waiting, and whether its rows and weights are
    to follow from the seed."""

    deadline: float
    deterministic: bool


Settings = Callable[[Wants], Iterable[Setting]]


def nothing(wants: Wants) -> Iterable[Setting]:
    return ()


def kept(settings: Iterable[Setting], environment: Mapping[str, str]) -> list[str]:
    """Of what the user has set otherwise, in words, what stays."""
    return [
        f"{s.name} is {environment[s.name]!r} in your environment and stays so; the plan wants {s.value!r}: {s.why}"
        for s in settings
        if environment.get(s.name, s.value) != s.value
    ]


def applied(settings: Iterable[Setting], environment: Mapping[str, str]) -> dict[str, str]:
    """What is to be set in an environment."""
    return {s.name: s.value for s in settings if s.name not in environment}
