"""The interface of a pass, and sequences of passes.

Invariant: passes run in the order of their sequence, each after the passes that it needs. A pass fills its own part of
the plan, and it also says how this part is verified, shown and compared. Therefore a new pass needs only one file and
one line in the list of passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..backends.spec import EngineSpec
from ..diagnostics.sheet import Sheet
from ..ir.plan import Plan
from .facts import Section, format_value


@dataclass(frozen=True)
class Pass(ABC):
    """A function `Plan -> Plan`, and the part of the plan that it fills in.

    - `name`: the name of the pass. It is also the key of the pass's results in `Plan.parts`.
    - `title`: the heading of the part in a comparison of two plans.
    - `needs`: the names of the passes whose results this pass reads.
    - `fills`: the fields of Plan that the pass fills in. A pass without such fields keeps its results in `Plan.parts`
      (`plan.with_part(name, results)`).
    - `engines`: the engine specs by name.

    The other fields of a subclass are its options. The methods `verify`, `write` and `facts` describe the part in any
    plan, also one that was read from a file. If the part is empty, `write` writes nothing.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    fills: ClassVar[tuple[str, ...]] = ()

    engines: Mapping[str, EngineSpec]

    @abstractmethod
    def apply(self, plan: Plan) -> Plan:
        """Return the plan with the part that this pass fills in."""

    @staticmethod
    def verify(plan: Plan) -> Iterator[str]:
        """Yield the errors in the part, as text.

        The parts of all earlier passes are correct. A pass that only adds notes yields no errors. There is no need to
        compute the part again: a plan that is run is compared with what the passes compute (compiler/loading.py).
        """
        return iter(())

    @classmethod
    def write(cls, page: Sheet, plan: Plan) -> None:
        """Write the part to a page of text or HTML.

        By default, the facts are written as a table.
        """
        rows = [
            (item, name, format_value(fact.value, fact.unit))
            for item, facts in cls.facts(plan).items()
            for name, fact in facts.items()
        ]
        if rows:
            page.heading(cls.title)
            page.table(("item", "property", "value"), rows, (2,))

    @staticmethod
    def facts(plan: Plan) -> Section:
        """Return the values of the part that can differ between two plans."""
        return {}


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

    def replace(self, other: Pass) -> Passes:
        """Return the passes with `other` instead of the pass of the same name."""
        return Passes(tuple(other if step.name == other.name else step for step in self.steps))

    def apply(self, plan: Plan) -> Plan:
        for step in self.steps:
            plan = step.apply(plan)
        return plan

    def verify(self, plan: Plan) -> Iterator[str]:
        """Yield the errors in the parts of the plan that these passes fill in.

        Only the first error is certain, because each check assumes that the parts of earlier passes are correct.
        """
        for step in self.steps:
            yield from step.verify(plan)


def describe_incomplete(name: str) -> str:
    return f"the part of the pass `{name}` is incomplete"


def has_every_node(plan: Plan, names: Iterable[str]) -> bool:
    """Return whether `names` has the name of each node of the plan once."""
    return sorted(names) == sorted(node.name for node in plan.graph.nodes)
