"""The controllers of the transfer dock (arXiv:2507.19017, figure 4).

A controller knows which rows are ready for one node and where these rows are stored. It hands out *units*: a unit is
one row, or with `per = prompt` all rows below one prompt.

Invariant: which rows form a mini-batch of an update is a function of (seed, node, iteration, epoch, row) and nothing
else. A controller only chooses which data-parallel group computes a unit. Every unit of an iteration is handed out once
(for an update: once per epoch), and a request for the n-th share of a group always gets the same share. The state of a
controller consists of its decisions (`Round`) and of the news (`RowsReady`) that it received: `restore` rebuilds this
state from the warehouses. This module imports neither Ray nor torch; host.py runs controllers in processes.

All decisions for a node are made in this module: which units each group gets next, whether the filter needs another
round of prompts, when an iteration is closed, and which decisions must be stored. Each question that a rank or a
function host can ask is a `ControllerRequest` (at the end of this file), which client.py sends.

The sets of rows are defined in analysis/rowsets.py. A filter decides how often each row continues (its *verdict*). A
node after a filter gets only the rows that the filter passes, and is done when all verdicts are known. With a refill,
the nodes up to the filter work in rounds of prompts, and the first prompts with rows that pass the filter continue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ... import noise
from ...analysis.row_assignment import Units, assign_units
from ..data.columns import Array
from ..process.task import Task
from ..process.task_report import RunError
from .messages import Round, RowsReady, Share, WorkShare
from .progress import Progress
from .readers import NodeReads

T_co = TypeVar("T_co", covariant=True)
ALL = "nothing: all its rows are there"


@dataclass
class MiniBatches:
    """The mini-batches of an update in one iteration.

    `todo` has the mini-batches that are not yet handed out, as pairs (epoch, rows). `done` is the number of
    mini-batches that were handed out. `missing_rows` has, for each mini-batch of the first epoch, the number of its
    rows that are not ready. `mini_batch_of_row[i]` is the index of the first epoch's mini-batch that contains
    `rows[i]`.
    """

    todo: deque[tuple[int, Array]]
    rows: Array
    mini_batch_of_row: Array
    missing_rows: Array
    done: int = 0

    @classmethod
    def cut(cls, reader: NodeReads, iteration: int, rows: Array) -> MiniBatches:
        """Cut the ascending row numbers of an iteration into mini-batches, for each epoch."""
        size = reader.mini_batch or max(len(rows), 1)
        stream = noise.RandomStream(reader.seed, "mini_batch", reader.node)
        todo: deque[tuple[int, Array]] = deque()
        mini_batch = np.zeros(len(rows), np.int64)
        for epoch in range(reader.epochs):
            order = np.argsort(stream.keys(iteration, epoch, rows), kind="stable")
            if epoch == 0:
                mini_batch[order] = np.arange(len(rows)) // size
            todo.extend((epoch, np.sort(rows[order[i : i + size]])) for i in range(0, max(len(rows), 1), size))
        return cls(todo, rows, mini_batch, np.bincount(mini_batch, minlength=1))

    def ready(self, rows: Array) -> list[tuple[int, Array]]:
        """Record that `rows` are ready; return the mini-batches to hand out next."""
        self.missing_rows -= np.bincount(
            self.mini_batch_of_row[np.searchsorted(self.rows, rows)], minlength=len(self.missing_rows)
        )
        due: list[tuple[int, Array]] = []
        # In a later epoch all rows were handed out before.
        while self.todo and (self.todo[0][0] or not self.missing_rows[self.done]):
            due.append(self.todo.popleft())
            self.done += 1
        return due


@dataclass
class IterationState:
    """What a controller knows of one iteration.

    `shares` has the shares that were handed out, by group, and `loads` has the total load (tokens or units) of each
    group. `tokens` is the number of tokens of the ready units; always 0 if the node's `chunk_tokens` is 0.
    """

    task: Task
    progress: Progress
    shares: list[list[Share]]
    loads: list[float]
    tokens: float = 0.0
    mini_batches: MiniBatches | None = None  # of an update whose rows are all known


class Controller:
    """The controller of one node: it knows the node's ready rows, and assigns them.

    `open`, `take_in_news` and `restore` return the decisions (`Round`) that they made. If the property `keeps` is true,
    the caller first stores the new decisions in a warehouse. Then the caller passes each decision, in order, to
    `hand_out`, which makes the shares that `decided_shares` returns.
    """

    def __init__(self, reader: NodeReads) -> None:
        self.reader = reader
        self.states: dict[str, IterationState] = {}

    @property
    def keeps(self) -> bool:
        """Whether the decisions on this node depend on the order in which rows arrive.

        True if rows are assigned as soon as a chunk of them is ready. Such a decision must be stored before its shares
        are announced. Other decisions depend only on the warehouse of each row, which is the same if the row is written
        again. So the replacement of a controller makes the same decisions.
        """
        return (self.reader.chunk > 0 or self.reader.chunk_tokens > 0) and not self.reader.update

    def open(self, task: Task) -> list[Round]:
        """Begin a task, unless it has already begun; return the decisions of this call.

        A node that reads only states of the algorithm waits for no rows: this call makes all its decisions.
        """
        if task.key in self.states:
            return []
        self._begin(task)
        return self._deal(self.states[task.key])

    def _begin(self, task: Task) -> None:
        groups = len(self.reader.group_warehouses)
        self.states[task.key] = IterationState(
            task, Progress(self.reader, task), [[] for _ in range(groups)], [0.0] * groups
        )

    def close(self, key: str) -> None:
        self.states.pop(key, None)

    def take_in_news(self, key: str, news: Iterable[RowsReady]) -> list[Round]:
        """Record the news of arrived rows; return the decisions that this call makes."""
        if (state := self.states.get(key)) is None or not self._record_news(state, news):
            return []
        return self._deal(state)

    def _record_news(self, state: IterationState, news: Iterable[RowsReady]) -> bool:
        """Record the news; return whether any entry is about a column that the node needs."""
        relevant = [entry for entry in news if entry.column in self.reader.needed_columns]
        for entry in relevant:
            state.progress.note(entry)
        return bool(relevant)

    def restore(self, task: Task, news: Iterable[RowsReady], rounds: Iterable[Round]) -> list[Round]:
        """Rebuild the state of a controller from its news and its stored decisions.

        `news` is all news of the iteration, and `rounds` are the decisions that this controller stored before its
        process died. Returns the further decisions that this call makes.
        """
        self._begin(task)
        state = self.states[task.key]
        self._record_news(state, news)
        for round in rounds:
            for group, part in enumerate(round.parts):
                state.progress.deal(part.units)
                state.loads[group] += self._weigh_units(state, part.rows, part.sizes).load(range(len(part.units)))
            if round.last:
                state.progress.end()
            self.hand_out(task.key, round)
        return self._deal(state)

    def hand_out(self, key: str, round: Round) -> None:
        """Make a share for each group from a decision; do nothing if the task is closed."""
        if (state := self.states.get(key)) is None:
            return
        progress = state.progress
        columns = [(read.column, read.rows) for read in self.reader.reads]
        all_rows = np.concatenate([share_of_round.rows for share_of_round in round.parts])
        largest = max(len(share_of_round.rows) for share_of_round in round.parts)
        elements = {
            column: int(progress.heard[column].get(progress.rows_above(all_rows, rows)).sum())
            for column, rows in columns
        }
        for shares, part in zip(state.shares, round.parts, strict=True):
            above = {rows: np.unique(progress.rows_above(part.rows, rows)) for rows in {rows for _, rows in columns}}
            places = {column: progress.where[column].get(above[rows]) for column, rows in columns}
            used_places = np.unique(np.concatenate([*places.values(), part.rows[:0]]))
            where = {column: np.searchsorted(used_places, column_places) for column, column_places in places.items()}
            locations = tuple(progress.places[i] for i in used_places)
            round_rows = len(all_rows)
            shares.append(
                Share(
                    part.units,
                    part.sizes,
                    part.rows,
                    where,
                    locations,
                    largest,
                    round_rows,
                    elements,
                    round.epoch,
                    round.last,
                )
            )

    def decided_shares(self, key: str, group: int) -> list[Share]:
        """Return all shares of a task that were made for one group, oldest first."""
        return self.states[key].shares[group]

    def needs_refill(self, key: str, rounds: int) -> bool | None:
        """Return whether the graph's filter with `refill` needs another round of prompts.

        `rounds` is the number of rounds of prompts already drawn. Returns None while a filter's verdict on some row is
        missing. Raises RunError if another round is needed but the maximum number of rounds is reached.
        """
        state = self.states[key]
        filter = self.reader.refilling
        assert filter is not None
        _, decided, count = state.progress.find_surviving_prompts(rounds)
        if not decided.all():
            return None
        if count >= state.task.target:
            return False
        if rounds >= state.task.rounds(filter.refill):
            prompts_drawn = rounds * state.task.prompts
            message = (
                f"{count} of {prompts_drawn} prompts in {rounds} rounds have rows that pass the filter, "
                f"{state.task.target} are needed"
            )
            raise RunError(
                f"`{filter.node}` in iteration {state.task.number}: {message}; raise `refill`, ask for fewer prompts, "
                "or check the filter"
            )
        return True

    def count_rows(self, key: str) -> tuple[int, int]:
        """Return how many rows of a task are handed out, and how many are known to exist.

        Both numbers count a row once per epoch.
        """
        state = self.states[key]
        handed = sum(len(share.rows) for shares in state.shares for share in shares)
        return handed, max(handed, len(state.progress.rows_under_way[0]) * self.reader.epochs)

    def describe_missing_rows(self, key: str) -> str:
        """Return a message text about the rows and verdicts for which the node waits."""
        progress = self.states[key].progress
        reader = self.reader
        parts = list[str]()
        if progress.ended and not reader.loops:  # later news does not concern the node
            return ALL
        rows, known = progress.rows_under_way
        for read in reader.reads:
            wanted = np.unique(progress.rows_above(rows, read.rows))
            absent = wanted[progress.where[read.column].get(wanted) < 0]
            if len(absent):
                first = ", ".join(map(str, absent[:5])) + (", ..." if len(absent) > 5 else "")
                parts.append(
                    f"`{read.column}` from `{read.writer}` ({len(absent)} of {len(wanted)} rows missing: {first})"
                )
        if not progress.complete:
            filters = ", ".join(f"`{sieve.node}`" for sieve in (reader.passed or (reader.refilling,)) if sieve)
            parts.append(
                f"the verdict of {filters} on {int((~known).sum())} of {len(rows)} rows" if filters else "more prompts"
            )
        return "; ".join(parts) or ALL

    def _deal(self, state: IterationState) -> list[Round]:
        if self.reader.update:
            return self._deal_update(state)
        rounds: list[Round] = []
        progress = state.progress
        while progress.ended < (progress.opened if self.reader.loops else 1):
            self._add_ready_tokens(state, progress.look(), 1)
            new_rounds = self._deal_units(state)
            rounds += new_rounds
            if not new_rounds or not new_rounds[-1].last:
                break
            progress.end()
        return rounds

    def _deal_units(self, state: IterationState) -> list[Round]:
        """Hand out ready units in batches until too few are left for another batch."""
        progress = state.progress
        rounds = list[Round]()
        while progress.undealt_count or not progress.complete:
            if not (count := self._next_batch_size(state)):
                return rounds
            last = progress.complete and progress.undealt_count == count
            units = progress.deal_next(count)
            self._add_ready_tokens(state, units, -1)
            rounds.append(self._assign_round(state, 0, units, last))
        # The units that were handed out before may have been all of them.
        return rounds or [self._assign_round(state, 0, progress.deal_next(0), True)]

    def _next_batch_size(self, state: IterationState) -> int:
        """Return how many of the ready units make the next batch; 0 if they are too few."""
        progress = state.progress
        reader = self.reader
        counts = list[int]()
        if 0 < reader.chunk <= progress.ready_count:
            counts.append(reader.chunk)
        if 0 < reader.chunk_tokens <= state.tokens:
            cumulative_tokens = np.cumsum(self._count_tokens(state, *progress.rows_of(progress.ready_units)))
            counts.append(int(np.searchsorted(cumulative_tokens, reader.chunk_tokens)) + 1)
        rest = progress.ready_count if progress.complete and progress.undealt_count == progress.ready_count else 0
        return min(counts, default=rest)

    def _add_ready_tokens(self, state: IterationState, units: Array, sign: int) -> None:
        """Add the tokens of `units`, times `sign` (1 or -1), to the count of ready tokens."""
        if self.reader.chunk_tokens and len(units):
            state.tokens += sign * float(self._count_tokens(state, *state.progress.rows_of(units)).sum())

    def _deal_update(self, state: IterationState) -> list[Round]:
        progress = state.progress
        rows = progress.look()
        if state.mini_batches is None:
            if not progress.complete:
                return []
            state.mini_batches = MiniBatches.cut(self.reader, state.task.number, np.sort(progress.rows_under_way[0]))
            rows = np.concatenate([*progress.ready, rows[:0]])
        ready = state.mini_batches.ready(rows)
        last = 0 if state.mini_batches.todo else len(ready)
        return [self._assign_round(state, epoch, units, i == last) for i, (epoch, units) in enumerate(ready, 1)]

    def _assign_round(self, state: IterationState, epoch: int, units: Array, last: bool) -> Round:
        """Assign units to the data-parallel groups; return the decision."""
        reader = self.reader
        rows, sizes = state.progress.rows_of(units)
        starts = np.cumsum(sizes) - sizes
        parts = []
        weighted_units = self._weigh_units(state, rows, sizes)
        for group, positions in enumerate(
            assign_units(weighted_units, reader.group_warehouses, reader.imbalance, state.loads)
        ):
            unit_rows = [rows[starts[i] : starts[i] + sizes[i]] for i in positions]
            indices = np.array(positions, np.int64)
            parts.append(WorkShare(units[indices], sizes[indices], np.concatenate([*unit_rows, rows[:0]])))
            state.loads[group] += weighted_units.load(positions)
        return Round(epoch, tuple(parts), last)

    def _weigh_units(self, state: IterationState, rows: Array, sizes: Array) -> Units:
        """Return, for each unit, the properties by which its group is chosen."""
        progress = state.progress
        warehouses = state.progress.warehouses
        unit = np.repeat(np.arange(len(sizes)), sizes)
        lengths = np.zeros((len(sizes), int(warehouses.max()) + 1))
        for read in self.reader.reads:
            above = progress.rows_above(rows, read.rows)
            length = progress.heard[read.column].get(above)
            cell = unit * lengths.shape[1] + warehouses[progress.where[read.column].get(above)]
            lengths += np.bincount(cell, length, lengths.size).reshape(lengths.shape)
        first = np.cumsum(sizes) - sizes
        return Units(
            progress.rows_above(rows, 0)[first[first < len(rows)]].tolist(),
            lengths.argmax(1).tolist(),
            self._count_tokens(state, rows, sizes).tolist() if self.reader.balance else None,
            lengths.sum(1).tolist(),
        )

    def _count_tokens(self, state: IterationState, rows: Array, sizes: Array) -> Array:
        """Return the number of tokens of each unit."""
        progress = state.progress
        unit = np.repeat(np.arange(len(sizes)), sizes)
        tokens = np.zeros(len(sizes))
        for read in self.reader.reads:
            if times := self.reader.tokens.get(read.column):
                length = progress.heard[read.column].get(progress.rows_above(rows, read.rows))
                tokens += times * np.bincount(unit, length, len(sizes))
        return tokens


@dataclass(frozen=True)
class ControllerRequest(ABC, Generic[T_co]):
    """A question about the task `key` to the controller of `node`; the sender waits."""

    node: str
    key: str

    @abstractmethod
    def answer(self, controller: Controller) -> T_co | None:
        """Return the answer, or None while the controller cannot answer yet."""

    @property
    def group_index(self) -> int:
        """The data-parallel group that asks; -1 if the answer is the same for all groups."""
        return -1

    @property
    def waiter(self) -> str:
        """Text for messages: the waiting node, and its group if only this group waits."""
        return f"`{self.node}`" + (f" (group {self.group_index})" if self.group_index >= 0 else "")


@dataclass(frozen=True)
class ShareRequest(ControllerRequest[list[Share]]):
    """A request for those shares of a group that have the index `index` or higher."""

    group: int
    index: int

    def answer(self, controller: Controller) -> list[Share] | None:
        return controller.decided_shares(self.key, self.group)[self.index :] or None

    @property
    def group_index(self) -> int:
        return self.group


@dataclass(frozen=True)
class RefillRequest(ControllerRequest[bool]):
    """The question whether the filter `node` needs more than `rounds` prompt rounds."""

    rounds: int

    def answer(self, controller: Controller) -> bool | None:
        return controller.needs_refill(self.key, self.rounds)
