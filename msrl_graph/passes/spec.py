"""The interface of a pass, and a list of passes.

Invariant: passes run in the order of their list, after the passes that they need. A caller that wants part of a list
names its first and last pass, so that a new pass is one file and one line in the list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..ir.plan import Plan


class Pass(ABC):
    """A function `Plan -> Plan`.

    It `needs` the passes whose parts of the plan it reads. Its fields are its options.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def apply(self, plan: Plan) -> Plan:
        """Return the plan with the part that this pass fills."""

    def verify(self, plan: Plan) -> Iterator[str]:
        """Yield the errors in that part, in words: a part of ir/verify.py.

        The parts before it must be correct. A pass that only adds notes has nothing to verify.
        """
        return iter(())


@dataclass(frozen=True)
class Passes:
    """A sequence of passes."""

    steps: tuple[Pass, ...]

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.steps)

    def __getitem__(self, name: str) -> Pass:
        return self.steps[self._place(name)]

    def _place(self, name: str) -> int:
        return [step.name for step in self.steps].index(name)

    def until(self, name: str) -> Passes:
        """Return the passes from the first to the named one."""
        return Passes(self.steps[: self._place(name) + 1])

    def after(self, name: str) -> Passes:
        """Return the passes that follow the named one."""
        return Passes(self.steps[self._place(name) + 1 :])

    def only(self, *names: str) -> Passes:
        """Return the passes with these names."""
        return Passes(tuple(step for step in self.steps if step.name in names))

    def apply(self, plan: Plan) -> Plan:
        for step in self.steps:
            plan = step.apply(plan)
        return plan

    def verify(self, plan: Plan) -> Iterator[str]:
        """Yield the errors in the parts that these passes fill.

        Only the first error is certain: later passes rely on the part that it is in.
        """
        for step in self.steps:
            yield from step.verify(plan)
