"""Checks of one stage, and when each of them runs.

Invariant: checks run in the order of their list. Whether a check runs, and which of its diagnostics count, depends only
on the checks before it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..backends.spec import EngineSpec
from ..diagnostics import Diagnostic
from ..ir.plan import PhaseMemory, Plan


class When(enum.Enum):
    """When a check runs, or which of its diagnostics are reported."""

    ALWAYS = "also if some statements of the program could not be read"
    COMPLETE = "if all statements could be read, because a missing statement may cause what the check would report"
    COUNTED = "if all statements and all numbers of rows could be read"
    ELSEWHERE = "as COMPLETE; what is reported at the place of an earlier diagnostic of the stage is left out"
    CLEAN = "if no earlier check of the stage has reported anything"


@dataclass(frozen=True)
class Check:
    """A function that returns diagnostics, and when it runs."""

    find: Callable[..., Iterable[Diagnostic]]
    when: When = When.COMPLETE


@dataclass(frozen=True)
class PlanContext:
    """What the checks of a plan know besides the plan.

    `engines` are the engine specs by name. `find_nearest` searches for a layout with which a phase fits in memory, and
    returns advice as text.
    """

    engines: Mapping[str, EngineSpec]
    find_nearest: Callable[[Plan, PhaseMemory], str] = lambda plan, worst: ""


def run_checks(
    checks: Sequence[Check],
    *arguments: Any,
    earlier: Sequence[Diagnostic] = (),
    skipped: Collection[When] = (),
) -> list[Diagnostic]:
    """Run checks with `arguments`, and return their diagnostics.

    - `earlier`: diagnostics of other checks of the same stage.
    - `skipped`: checks with one of these values of `when` do not run.
    """
    found: list[Diagnostic] = []
    for check in checks:
        reported = [*earlier, *found]
        if check.when in skipped or (check.when is When.CLEAN and reported):
            continue
        diagnostics = check.find(*arguments)
        if check.when is When.ELSEWHERE:
            places = {diagnostic.span for diagnostic in reported}
            diagnostics = [diagnostic for diagnostic in diagnostics if diagnostic.span not in places]
        found += diagnostics
    return found
