"""The simulation of nodes with weights: the time that a node takes for its rows.

Invariant: all seconds come from cost/time.py, for the actual lengths of the rows. If data-parallel groups have a common
collective, they wait for each other at the collective. An update has a common collective at each optimizer step. An
engine that shards weights over dp has one at each micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..analysis.row_assignment import split
from ..analysis.row_packing import MicroBatchLimit, group_by_prompt
from ..analysis.sequences import sequences
from ..backends.spec import EngineSpec
from ..cost import holdings
from ..cost.lengths import Rows
from ..cost.time import Costs
from ..ir.graph import Node
from ..ir.plan import Plan
from .flow import Lengths, RowTimes, SimulatedDocks, UnitBatch
from .generation import Generated, Sequence, generate
from .lanes import Lanes, LaneSpan
from .rollout import Group, SimulatedRollout


@dataclass
class NodeTiming:
    """The times at which a node wrote its rows in an iteration, and what delayed it.

    `cause` is the node for which the slowest data-parallel group of this node waited. For a generation, `stretches` has
    intervals as (begin, end, number of live sequences).
    """

    done: RowTimes
    cause: str
    stretches: list[tuple[float, float, int]] = field(default_factory=list)


@dataclass
class ModelNode:
    """A node that computes with the weights of a model: infer, update or generate."""

    plan: Plan
    flow: SimulatedDocks
    costs: Costs
    spec: EngineSpec
    lanes: Lanes
    record: Callable[[LaneSpan], None]

    def __post_init__(self) -> None:
        plan = self.plan
        name = self.costs.node
        graph = plan.graph
        self.node: Node = graph.node(name)
        self.level = graph.level(self.node)
        generates = self.node.verb == "generate"
        row = sequences(graph, self.node)

        def fan(column: str) -> tuple[str, int]:
            return column, graph.fan(self.level, graph.column(column).level)

        # Each column, with the number of this node's rows that share one value of the column.
        self.context = [fan(column_name) for column_name in row.context]
        self.scored = [] if generates else [fan(column_name) for column_name in row.scored]
        self.count = 1 if generates else row.count
        self.fan = min((fan_out for _, fan_out in self.context), default=1)
        self.known: dict[tuple[Rows, int], float] = {}  # seconds of micro-batches
        self.limit = MicroBatchLimit.of(plan, name)
        self.lockstep = plan.controller(name).lockstep
        self.groups = self.lanes.groups[name]
        self.slow = [self.lanes.slowest(group) for group in self.groups]
        self.written = row.scored[0] if generates and row.scored else ""

    def _sum_tokens(self, rows: list[int], lengths: Lengths) -> tuple[list[int], list[int]]:
        """Return two lists: each row's number of context tokens, and of scored tokens."""

        def total(columns: list[tuple[str, int]]) -> list[int]:
            return [sum(lengths[column][row // fan] for column, fan in columns) for row in rows]

        return total(self.context), total(self.scored)

    # An infer or an update.

    def compute(self, batches: list[UnitBatch], iteration: int, lengths: Lengths) -> NodeTiming:
        times = [0.0] * self.flow.rows(self.level)
        free = [self.lanes.free(group) for group in self.groups]
        causes = [self.lanes.last_node[group[0]] for group in self.groups]
        update = self.node.verb == "update"
        in_step = self.costs.spec.needs_equal_calls(self.costs.layout)
        fetch = self.costs.fetch().value
        for batch in batches:
            rows = [self.flow.rows_of(self.node, part, self.level) for part in batch.parts]
            packed = self._pack(rows, lengths)
            shares = [
                [self.slow[index] * self._batch_seconds(own, len(part)) for own in part]
                for index, part in enumerate(packed)
            ]
            begins = [max(free_at, batch.ready) for free_at in free]
            causes = [batch.by if batch.ready > free_at else cause for free_at, cause in zip(free, causes, strict=True)]
            if in_step:
                begin = max(begins)
                end = begin + fetch + sum(max(step) for step in zip(*shares, strict=True))
                ends = [end] * len(shares)
                begins = [begin] * len(shares)
            else:
                ends = [begin_time + fetch + sum(share) for begin_time, share in zip(begins, shares, strict=True)]
            for group_index, (begin, seconds) in enumerate(zip(begins, shares, strict=True)):
                self._record_span(group_index, iteration, begin, begin + fetch + sum(seconds))
            fetch = 0.0  # once an iteration
            if update:
                ends = self._step(ends, iteration)
            free = ends
            for end, own in zip(ends, rows, strict=True):
                for row in own:
                    times[row] = end
        return self._finish_node(free, causes, RowTimes(self.level, times, max(free)))

    def _step(self, ends: list[float], iteration: int) -> list[float]:
        """Simulate the gradient exchange and the optimizer step of all groups together.

        `ends` has the time at which each data-parallel group ended its backward pass. Returns the time at which each
        group ends the optimizer step.
        """
        begin = max(ends)
        end = begin + self.costs.exchange().value + self.costs.optimizer_step().value * max(self.slow)
        for group_index in range(len(self.groups)):
            self._record_span(group_index, iteration, begin, end)
        return [end] * len(ends)

    def _pack(self, shares: list[list[int]], lengths: Lengths) -> list[list[list[tuple[int, int, int]]]]:
        """Return the micro-batches of each data-parallel group, as in a run.

        They can be empty. An entry of a micro-batch is (context tokens, scored tokens, row number).
        """
        entries = [[*zip(*self._sum_tokens(rows, lengths), rows, strict=True)] for rows in shares]
        most = max(map(len, shares))

        def pack(own: list[tuple[int, int, int]], least: int = 1) -> list[list[int]]:
            tokens = [self.count * context + scored for context, scored, _ in own]
            prompts = group_by_prompt(self.plan.graph, self.node, [row for *_, row in own])
            return self.limit.pack(tokens, prompts, most, least)

        packed = [pack(own) for own in entries]
        if self.lockstep:
            number = max(map(len, packed))
            packed = [
                part if len(part) == number else pack(own, number) for own, part in zip(entries, packed, strict=True)
            ]
        return [
            [[own[position] for position in positions] for positions in part]
            for own, part in zip(entries, packed, strict=True)
        ]

    def _batch_seconds(self, rows: list[tuple[int, int, int]], batches: int) -> float:
        """Return the seconds of a micro-batch, one of `batches`.

        Each entry of `rows` is (context tokens, scored tokens, row number). Each group of `self.fan` rows with
        consecutive numbers has one context, such as a prompt. The tokens of the context are computed once per group.
        """
        if not rows:
            return 0.0
        count = self.count
        batch = Rows.from_lengths((context, scored / count) for context, scored, _ in rows for _ in range(count))
        if batch.count > 1:
            prompts = {number // self.fan: context for context, _, number in rows}
            batch = replace(batch, alike_prompt=batch.prompt - sum(prompts.values()))
        if (batch, batches) not in self.known:
            self.known[batch, batches] = self.costs.micro_batch(batch, batches).value
        return self.known[batch, batches]

    # A generation.

    def generate(self, batches: list[UnitBatch], iteration: int, lengths: Lengths) -> NodeTiming:
        """Simulate a generation that completes all responses of its iteration."""
        level = self.plan.graph.row_level(self.node)
        samples = holdings.samples(self.plan, self.node.name)
        tokens = lengths[self.written]
        times = [0.0] * self.flow.rows(level)
        rounds = []
        for batch in batches:
            parts = []
            for part in batch.parts:
                sequences = []
                for unit, context in zip(part, self._sum_tokens(part, lengths)[0], strict=True):
                    rows = range(unit * samples, (unit + 1) * samples)
                    sequences += [Sequence(row, context, context if row == rows[0] else 0, tokens[row]) for row in rows]
                parts.append(sequences)
            rounds.append((batch.ready, batch.by, parts))
        return self._decode(rounds, iteration, times)

    def rollout(
        self, ready: float, by: str, iteration: int, version: int, rollout: SimulatedRollout
    ) -> tuple[NodeTiming, list[Group]]:
        """Simulate a partial rollout until the groups of an iteration are complete.

        A group is the responses to one prompt. Returns the node's times, and the groups that the iteration uses.
        `ready` is the time at which the prompts are available, and `by` is the node that wrote the prompts.
        """
        stretches: list[tuple[float, float, int]] = []
        cause = by
        begin = max(ready, max(map(self.lanes.free, self.groups)))
        working = rollout.begin(version)
        begins = True
        while not rollout.is_done(working):
            parts = [
                [sequence for index in part for sequence in working[index].sequences(index, rollout.most, begins)]
                for part in split(range(len(working)), len(self.groups))
            ]
            times = [0.0] * (len(working) * rollout.samples)
            ran = self._decode([(ready, by, parts)], iteration, times)
            rollout.grow(working, times)
            begins = False
            ready = ran.done.last
            by = self.node.name
            stretches = stretches + ran.stretches
            cause = ran.cause if ran.cause != self.node.name else cause
        finished = rollout.take(working)
        times = [max(begin, group.end) for group in finished for _ in range(rollout.samples)]
        return NodeTiming(RowTimes(self.plan.graph.row_level(self.node), times, max(times)), cause, stretches), finished

    def _decode(
        self, rounds: list[tuple[float, str, list[list[Sequence]]]], iteration: int, times: list[float]
    ) -> NodeTiming:
        """Simulate the generation of sequences, by round and data-parallel group.

        A round is a tuple (ready, by, parts): the time at which the round's prompts are available, the node that wrote
        the prompts, and the sequences of each data-parallel group. The time at which each row becomes available is
        written into `times`. In a continuous engine, this time is the end of the row. In other engines, it is the end
        of all rows of the data-parallel group.
        """
        cache = self.costs.cache
        slots = cache.at_once
        room = cache.bound * cache.count_sequences(cache.bound) if cache.is_full else math.inf
        ends = []
        causes = []
        stretches: list[tuple[float, float, int]] = []
        for group_index, devices in enumerate(self.groups):
            free = self.lanes.free(devices)
            cause = self.lanes.last_node[devices[0]]
            for ready, by, parts in rounds:
                begin = max(free, ready)
                cause = by if ready > free else cause
                result: Generated = generate(
                    self.costs,
                    parts[group_index],
                    slots,
                    self.spec.time.continuous,
                    self.slow[group_index],
                    begin,
                    room,
                )
                for sequence in parts[group_index]:
                    times[sequence.row] = result.ends[sequence.row] if self.spec.time.continuous else result.end
                stretches += result.stretches
                self._record_span(group_index, iteration, begin, result.end)
                free = result.end
            ends.append(free)
            causes.append(cause)
        return self._finish_node(
            ends, causes, RowTimes(self.plan.graph.row_level(self.node), times, max(ends)), stretches
        )

    def _record_span(self, group: int, iteration: int, begin: float, end: float) -> None:
        devices = self.groups[group]
        if end > begin:
            self.record(
                LaneSpan(
                    self.lanes.pool, self.lanes.devices[devices[0]], self.node.name, iteration, begin, end, len(devices)
                )
            )

    def _finish_node(
        self,
        ends: list[float],
        causes: list[str],
        done: RowTimes,
        stretches: list[tuple[float, float, int]] | None = None,
    ) -> NodeTiming:
        for devices, end in zip(self.groups, ends, strict=True):
            self.lanes.set(devices, end, self.node.name)
        return NodeTiming(done, causes[ends.index(max(ends))], stretches or [])
