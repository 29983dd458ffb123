"""Sample edges: when which rows are available to which node.

Invariant: a node gets every unit of an iteration once (an update: once an epoch). Without `stream` it begins when all
its rows exist and were moved; with it, batches continue as soon as they are ready, one after another along each edge.
Rows are assigned to groups as the docks of a run assign them, as if all were on one host.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from ..cost import transfers as costs
from ..ir.attributes import SampleEdgeAttributes, UpdateAttributes
from ..ir.graph import Node
from ..ir.plan import ControllerSpec, Plan, Traffic
from ..ir.row_assignment import Units, deal
from ..ir.sequences import weighs
from .rows import RowSampler

Lengths = Mapping[str, list[int]]  # by token column, of the rows of an iteration


@dataclass(frozen=True)
class RowTimes:
    """When each row of a level was written by a node."""

    level: int
    times: list[float]
    last: float

    @classmethod
    def at(cls, level: int, rows: int, time: float) -> RowTimes:
        return cls(level, [time] * rows, time)


@dataclass(frozen=True)
class UnitBatch:
    """Units that are handed out together, by group; `by` is the node they waited for."""

    ready: float
    by: str
    parts: list[list[int]]


@dataclass(frozen=True)
class SimulatedDocks:
    """The docks of a plan, as a simulation needs them."""

    plan: Plan
    draws: RowSampler

    def rows(self, level: int) -> int:
        return self.plan.graph.rows[level]

    def units(self, node: Node) -> int:
        return 1 if node.per == "batch" else self.rows(self.plan.graph.unit_level(node))

    def rows_of(self, node: Node, units: list[int], level: int) -> list[int]:
        """Return the rows of a level that belong to units of a node, ascending."""
        if node.per == "batch":
            return list(range(self.rows(level))) if units else []
        graph = self.plan.graph
        at = graph.unit_level(node)
        above = graph.common(at, level)
        up = graph.fan(at, above)
        down = graph.fan(level, above)
        found = units if up == 1 else sorted({u // up for u in units})
        return found if down == 1 else [u * down + s for u in found for s in range(down)]

    def tokens(self, node: Node, lengths: Lengths) -> list[float]:
        """Return the tokens of each unit of a node, as a run's controller counts them."""
        graph = self.plan.graph
        units = self.units(node)
        level = graph.level(node)
        rows = self.rows(level)
        found = [0.0] * units
        for name, times in weighs(graph, node).items():
            column = graph.column(name)
            known = lengths.get(next((d.like for d in column.dims if d.like), name))
            below = graph.fan(level, column.level)
            for row in range(rows):
                found[row * units // rows] += times * (known[row // below] if known else 1)
        return found

    def batches(self, node: Node, iteration: int, done: Mapping[str, RowTimes], lengths: Lengths) -> list[UnitBatch]:
        """Return the batches that a node gets in an iteration, in order."""
        controller = self.plan.controller(node.name)
        balanced = any(SampleEdgeAttributes.of(e).balance for e in self.plan.graph.into(node.name))
        tokens = self.tokens(node, lengths) if balanced or controller.chunk_tokens else []
        edges = [(e.src, self._traffic(e.src, node.name)) for e in self.plan.graph.samples() if e.dst == node.name]
        units = self.units(node)
        handover = costs.handover(self.plan).value
        had = [0.0] * controller.groups

        def dealt(some: list[int]) -> list[list[int]]:
            one = [0] * len(some)
            each = 1 if node.per == "batch" else self.plan.graph.fan(self.plan.graph.unit_level(node), 0)
            shared = Units([u // each for u in some], one, [tokens[u] for u in some] if balanced else None)
            found = deal(shared, [0] * controller.groups, had=had)
            had[:] = [h + shared.load(part) for h, part in zip(had, found, strict=True)]
            return [[some[i] for i in part] for part in found]

        if node.verb == "update":
            said = UpdateAttributes.of(node)
            epochs = range(said.epochs)
            size = said.step_rows(units)
            rounds = [r for e in epochs for r in self.draws.mini_batches(node.name, iteration, e, units, size)]
        elif not controller.streams:
            rounds = [list(range(units))]
        if not controller.streams:
            ready, by = max(
                ((done[s].last + costs.dispatch(t).value + handover, s) for s, t in edges), default=(0.0, "")
            )
            return [UnitBatch(ready, by, dealt(r)) for r in rounds]
        times = [self._there(node, done[s]) for s, _ in edges]
        if node.verb != "update":
            order = sorted(range(units), key=lambda u: (max(t[u] for t in times), u))
            rounds = _cut(order, controller, tokens)
        found = []
        link = [0.0] * len(edges)
        for r in rounds:
            for i, ((_, traffic), there) in enumerate(zip(edges, times, strict=True)):
                link[i] = max(link[i], max(there[u] for u in r)) + costs.dispatch(traffic, 1 / len(rounds)).value
            ready, by = max((t, s) for t, (s, _) in zip(link, edges, strict=True))
            found.append(UnitBatch(ready + handover, by, dealt(sorted(r))))
        return found

    def _traffic(self, src: str, dst: str) -> Traffic:
        return next(t for t in self.plan.traffic if (t.src, t.dst) == (src, dst))

    def _there(self, node: Node, done: RowTimes) -> list[float]:
        """Return, by unit, when all rows of another node that it needs are available."""
        if node.per == "batch":
            return [done.last]
        graph = self.plan.graph
        level = graph.unit_level(node)
        above = graph.common(done.level, level)
        up = graph.fan(done.level, above)
        down = graph.fan(level, above)
        times = done.times if up == 1 else [max(done.times[u * up : (u + 1) * up]) for u in range(self.rows(above))]
        return times if down == 1 else [times[u // down] for u in range(self.rows(level))]


def _cut(order: list[int], controller: ControllerSpec, tokens: list[float]) -> list[list[int]]:
    """Cut units, in the order in which they become ready, into a controller's batches.

    A batch has the lowest numbers of the ready units, as soon as they are enough; the last has the rest.
    """
    found = list[list[int]]()
    ready = list[int]()
    held = 0.0
    for unit in order:
        insort(ready, unit)
        held += tokens[unit] if tokens else 0
        count = controller.chunk
        if 0 < controller.chunk_tokens <= held:
            count = bisect_left([*accumulate(tokens[u] for u in ready)], controller.chunk_tokens) + 1
        if 0 < count <= len(ready):
            found.append(ready[:count])
            ready = ready[count:]
            held = sum(tokens[u] for u in ready) if tokens else 0
    return [*found, ready] if ready else found
