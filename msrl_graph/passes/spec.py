"""The interface of a pass, and sequences of passes.

Invariant: passes run in the order of their sequence, each after the passes that it needs. A caller that wants only some
passes of a sequence selects them by name. Therefore a new pass needs only one file and one line in the list of passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..ir.plan import Plan


class Pass(ABC):
    """A function `Plan -> Plan`.

    A pass reads fields of the plan that other passes fill in. `needs` are the names of these other passes. The fields
    of a subclass are its options.
    """

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def apply(self, plan: Plan) -> Plan:
        """Return the plan with the fields that this pass fills in."""

    def verify(self, plan: Plan) -> Iterator[str]:
        """Yield the errors in the fields of the plan that this pass fills in, as text.

        The checks are in ir/verify.py. They assume that the fields of all earlier passes are correct. A pass that only
        adds notes yields no errors.
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
        """Return the passes from the first one to the one with the name `name`."""
        return Passes(self.steps[: self._place(name) + 1])

    def after(self, name: str) -> Passes:
        """Return the passes that follow the pass with the name `name`."""
        return Passes(self.steps[self._place(name) + 1 :])

    def only(self, *names: str) -> Passes:
        """Return the passes with these names."""
        return Passes(tuple(step for step in self.steps if step.name in names))

    def apply(self, plan: Plan) -> Plan:
        for step in self.steps:
            plan = step.apply(plan)
        return plan

    def verify(self, plan: Plan) -> Iterator[str]:
        """Yield the errors in the fields of the plan that these passes fill in.

        Only the first error is certain, because each check assumes that the fields of earlier passes are correct.
        """
        for step in self.steps:
            yield from step.verify(plan)
