"""Sample edges: when which rows are there for whom.

Invariant: a state gets every unit of an iteration once (an update: once an epoch). Without `stream` it begins when all its rows are there
and moved; with it, batches go on as soon as they are ready, one after another along each edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ..graph import Node
from ..passes import costs
from ..plan import Plan, Traffic
from .rows import Draws, deal


@dataclass(frozen=True)
class Done:
    """When each row of a level that a state wrote was there."""

    level: int
    times: list[float]
    last: float

    @classmethod
    def at(cls, level: int, rows: int, time: float) -> Done:
        return cls(level, [time] * rows, time)


@dataclass(frozen=True)
class Batch:
    """Units that are handed out together, by group; `by` is who made them wait."""

    ready: float
    by: str
    parts: list[list[int]]


@dataclass(frozen=True)
class Flow:
    """What the docks of a plan do."""

    plan: Plan
    draws: Draws

    def rows(self, level: int) -> int:
        return self.plan.graph.rows[min(level, len(self.plan.graph.rows) - 1)]

    @cached_property
    def fan(self) -> int:
        return max(1, self.rows(1) // max(1, self.rows(0)))

    def row_level(self, node: Node) -> int:
        """The level of the rows that a state writes."""
        graph = self.plan.graph
        return min(max([graph.level(node), *(graph.column(c).level for c in node.writes)]), 1)

    def units(self, node: Node) -> int:
        return 1 if node.per == "batch" else self.rows(self.plan.graph.unit_level(node))

    def rows_of(self, node: Node, units: list[int], level: int) -> list[int]:
        """The rows of a level that belong to units of a state, ascending."""
        if node.per == "batch":
            return list(range(self.rows(level))) if units else []
        unit_level = min(self.plan.graph.unit_level(node), 1)
        if level == unit_level:
            return units
        if level > unit_level:
            return [u * self.fan + s for u in units for s in range(self.fan)]
        return sorted({u // self.fan for u in units})

    def batches(self, node: Node, iteration: int, done: Mapping[str, Done], weight: list[float] | None) -> list[Batch]:
        """What a state gets of an iteration, in order; `weight` of each unit where it balances."""
        edges = [(e.src, self._traffic(e.src, node.name)) for e in self.plan.graph.samples() if e.dst == node.name]
        controller = self.plan.controller(node.name)
        units, handover = self.units(node), costs.handover(self.plan).value
        loads = dict(enumerate(weight)) if weight is not None else None
        if node.verb == "update":
            size = int(node.number("mini_batch", 0)) or units
            epochs = range(int(node.number("epochs", 1)))
            rounds = [r for e in epochs for r in self.draws.mini_batches(node.name, iteration, e, units, size)]
        elif not controller.chunk:
            rounds = [list(range(units))]
        if not controller.chunk:
            ready, by = max(((done[s].last + costs.dispatch(t).value + handover, s) for s, t in edges), default=(0.0, ""))
            return [Batch(ready, by, deal(r, loads, controller.groups)) for r in rounds]
        times = [self._there(node, done[s]) for s, _ in edges]
        if node.verb != "update":
            order = sorted(range(units), key=lambda u: (max(t[u] for t in times), u))
            rounds = [order[i : i + controller.chunk] for i in range(0, units, controller.chunk)]
        found, link = [], [0.0] * len(edges)
        for r in rounds:
            for i, ((_, traffic), there) in enumerate(zip(edges, times, strict=True)):
                link[i] = max(link[i], max(there[u] for u in r)) + costs.dispatch(traffic, 1 / len(rounds)).value
            ready, by = max((t, s) for t, (s, _) in zip(link, edges, strict=True))
            found.append(Batch(ready + handover, by, deal(sorted(r), loads, controller.groups)))
        return found

    def _traffic(self, src: str, dst: str) -> Traffic:
        return next(t for t in self.plan.traffic if (t.src, t.dst) == (src, dst))

    def _there(self, node: Node, done: Done) -> list[float]:
        """When all rows of another state that a unit needs are there, by unit."""
        if node.per == "batch":
            return [done.last]
        level, fan = min(self.plan.graph.unit_level(node), 1), self.fan
        if done.level == level:
            return done.times
        if done.level < level:
            return [done.times[u // fan] for u in range(self.rows(level))]
        return [max(done.times[u * fan : (u + 1) * fan]) for u in range(self.rows(level))]
