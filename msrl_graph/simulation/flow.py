"""The times at which each node gets its rows over the sample edges.

Invariant: a node gets each unit of an iteration once; an update gets each unit once per epoch. Without `stream`, a node
begins when all of its rows have been written and moved. With `stream`, a batch is moved as soon as it is ready, and the
batches of an edge are moved one after another. The docks of a simulation assign rows to data-parallel groups like the
docks of a run in which all rows are on one host.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from ..analysis.row_assignment import Units, assign_units
from ..analysis.sequences import length_columns
from ..cost import transfers as costs
from ..ir.attributes import SampleEdgeAttributes, UpdateAttributes
from ..ir.graph import Node
from ..ir.plan import ControllerSpec, Plan, Traffic
from .rows import RowSampler

Lengths = Mapping[str, list[int]]  # by token column, of the rows of an iteration


@dataclass(frozen=True)
class RowTimes:
    """The time at which a node wrote each row of a level.

    A level is all rows of one depth of the tree of rows. `last` is the time at which the last row was written.
    """

    level: int
    times: list[float]
    last: float

    @classmethod
    def all_at(cls, level: int, rows: int, time: float) -> RowTimes:
        return cls(level, [time] * rows, time)


@dataclass(frozen=True)
class UnitBatch:
    """Units that a node gets together.

    - `ready`: the time at which the batch is available.
    - `by`: the node whose rows arrived last.
    - `parts`: for each data-parallel group, the units of the batch that the group gets.
    """

    ready: float
    by: str
    parts: list[list[int]]


@dataclass(frozen=True)
class SimulatedDocks:
    """The docks of a simulated plan; they say which rows each node gets, and when."""

    plan: Plan
    draws: RowSampler

    def rows(self, level: int) -> int:
        return self.plan.graph.rows[level]

    def units(self, node: Node) -> int:
        return 1 if node.per == "batch" else self.rows(self.plan.graph.unit_level(node))

    def rows_of(self, node: Node, units: list[int], level: int) -> list[int]:
        """Return the rows of a level that belong to the given units of a node.

        The rows are in ascending order.
        """
        if node.per == "batch":
            return list(range(self.rows(level))) if units else []
        graph = self.plan.graph
        unit_level = graph.unit_level(node)
        above = graph.common(unit_level, level)
        up = graph.fan(unit_level, above)
        down = graph.fan(level, above)
        ancestors = units if up == 1 else sorted({unit // up for unit in units})
        return (
            ancestors if down == 1 else [ancestor * down + offset for ancestor in ancestors for offset in range(down)]
        )

    def tokens(self, node: Node, lengths: Lengths) -> list[float]:
        """Return the number of tokens of each unit of a node.

        The tokens are counted as the node's controller counts them. `lengths` has the number of tokens of each row, by
        column.
        """
        graph = self.plan.graph
        units = self.units(node)
        level = graph.level(node)
        rows = self.rows(level)
        unit_tokens = [0.0] * units
        for name, times in length_columns(graph, node).items():
            column = graph.column(name)
            known = lengths.get(next((dim.like for dim in column.dims if dim.like), name))
            below = graph.fan(level, column.level)
            for row in range(rows):
                unit_tokens[row * units // rows] += times * (known[row // below] if known else 1)
        return unit_tokens

    def batches(self, node: Node, iteration: int, done: Mapping[str, RowTimes], lengths: Lengths) -> list[UnitBatch]:
        """Return the batches of units that a node gets in an iteration, in order.

        `done` has, by node, the times at which the node wrote its rows. `lengths` has the number of tokens of each row,
        by column.
        """
        controller = self.plan.controller(node.name)
        balanced = any(SampleEdgeAttributes.of(edge).balance for edge in self.plan.graph.into(node.name))
        tokens = self.tokens(node, lengths) if balanced or controller.chunk_tokens else []
        edges = [
            (edge.src, self._traffic(edge.src, node.name))
            for edge in self.plan.graph.samples()
            if edge.dst == node.name
        ]
        units = self.units(node)
        handover = costs.handover(self.plan).value
        load = [0.0] * controller.groups

        def deal_units(chosen: list[int]) -> list[list[int]]:
            hosts = [0] * len(chosen)
            units_per_prompt = 1 if node.per == "batch" else self.plan.graph.fan(self.plan.graph.unit_level(node), 0)
            shared = Units(
                [unit // units_per_prompt for unit in chosen],
                hosts,
                [tokens[unit] for unit in chosen] if balanced else None,
            )
            shares = assign_units(shared, [0] * controller.groups, had=load)
            load[:] = [load_before + shared.load(part) for load_before, part in zip(load, shares, strict=True)]
            return [[chosen[index] for index in part] for part in shares]

        if node.verb == "update":
            attributes = UpdateAttributes.of(node)
            epochs = range(attributes.epochs)
            size = attributes.step_rows(units)
            rounds = [
                drawn for epoch in epochs for drawn in self.draws.mini_batches(node.name, iteration, epoch, units, size)
            ]
        elif not controller.streams:
            rounds = [list(range(units))]
        if not controller.streams:
            ready, by = max(
                ((done[src].last + costs.dispatch(traffic).value + handover, src) for src, traffic in edges),
                default=(0.0, ""),
            )
            return [UnitBatch(ready, by, deal_units(round_units)) for round_units in rounds]
        times = [self._times_by_unit(node, done[src]) for src, _ in edges]
        if node.verb != "update":
            order = sorted(range(units), key=lambda unit: (max(unit_times[unit] for unit_times in times), unit))
            rounds = _cut_batches(order, controller, tokens)
        handed_out = []
        link = [0.0] * len(edges)
        for round_units in rounds:
            for edge_index, ((_, traffic), unit_times) in enumerate(zip(edges, times, strict=True)):
                link[edge_index] = (
                    max(link[edge_index], max(unit_times[unit] for unit in round_units))
                    + costs.dispatch(traffic, 1 / len(rounds)).value
                )
            ready, by = max((arrival, src) for arrival, (src, _) in zip(link, edges, strict=True))
            handed_out.append(UnitBatch(ready + handover, by, deal_units(sorted(round_units))))
        return handed_out

    def _traffic(self, src: str, dst: str) -> Traffic:
        return next(traffic for traffic in self.plan.traffic if (traffic.src, traffic.dst) == (src, dst))

    def _times_by_unit(self, node: Node, done: RowTimes) -> list[float]:
        """Return the time at which all rows of each unit of `node` were written.

        `done` has the times at which another node wrote the rows that `node` reads.
        """
        if node.per == "batch":
            return [done.last]
        graph = self.plan.graph
        level = graph.unit_level(node)
        above = graph.common(done.level, level)
        up = graph.fan(done.level, above)
        down = graph.fan(level, above)
        times = (
            done.times
            if up == 1
            else [max(done.times[ancestor * up : (ancestor + 1) * up]) for ancestor in range(self.rows(above))]
        )
        return times if down == 1 else [times[unit // down] for unit in range(self.rows(level))]


def _cut_batches(order: list[int], controller: ControllerSpec, tokens: list[float]) -> list[list[int]]:
    """Divide units into the batches that a controller assigns.

    `order` has the units in the order in which they become ready. When enough units for a batch are ready, the batch
    gets the ready units with the lowest numbers. The last batch gets the remaining units.
    """
    batches = list[list[int]]()
    ready = list[int]()
    ready_tokens = 0.0
    for unit in order:
        insort(ready, unit)
        ready_tokens += tokens[unit] if tokens else 0
        count = controller.chunk
        if 0 < controller.chunk_tokens <= ready_tokens:
            count = bisect_left([*accumulate(tokens[other] for other in ready)], controller.chunk_tokens) + 1
        if 0 < count <= len(ready):
            batches.append(ready[:count])
            ready = ready[count:]
            ready_tokens = sum(tokens[other] for other in ready) if tokens else 0
    return [*batches, ready] if ready else batches
