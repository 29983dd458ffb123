"""What a pass is, and a list of them.

Invariant: passes run in the order of their list, and whatever a pass needs stands before it. Who wants a part of a
list names where it begins and ends, so that one more pass is a file and a line in the list.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ..ir.plan import Plan


class Pass(ABC):
    """`Plan -> Plan`. It `needs` the passes whose parts of the plan it reads; its fields are its options."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def apply(self, plan: Plan) -> Plan:
        """The plan with the part that this pass fills."""

    def verify(self, plan: Plan) -> Iterator[str]:
        """What is wrong with that part, in words, where the parts before it are right: a part of ir/verify.py. Of what
        a pass only notes nothing can be."""
        return iter(())


@dataclass(frozen=True)
class Passes:
    """Some passes, from the first to the last."""

    steps: tuple[Pass, ...]

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.steps)

    def __getitem__(self, name: str) -> Pass:
        return self.steps[self._place(name)]

    def _place(self, name: str) -> int:
        return [step.name for step in self.steps].index(name)

    def until(self, name: str) -> Passes:
        """From the first to the one of that name."""
        return Passes(self.steps[: self._place(name) + 1])

    def after(self, name: str) -> Passes:
        """From the one that follows that name to the last."""
        return Passes(self.steps[self._place(name) + 1 :])

    def only(self, *names: str) -> Passes:
        """Those of these names."""
        return Passes(tuple(step for step in self.steps if step.name in names))

    def apply(self, plan: Plan) -> Plan:
        for step in self.steps:
            plan = step.apply(plan)
        return plan

    def verify(self, plan: Plan) -> Iterator[str]:
        """What is wrong with the parts that these fill. Of several faults the first is sure: what is said after it
        relies on its part."""
        for step in self.steps:
            yield from step.verify(plan)
