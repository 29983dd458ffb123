"""Environments: the user's class that answers a policy over several turns, one instance a row.

Invariant: a row whose environment fails is never taken for one that has an answer. Under `on_failure = stop` it ends
the run with the node, its line, the row, the turn and what went wrong; else its episode is over, and it leaves the
iteration, with its group under `drop_group`. What stays fits the columns that the node writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from ...ir.attributes import GenerateAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.rowsets import rowsets
from ...ir.sequences import is_tokens, of_response
from ...ir.signatures import classes
from ..data import numerics
from ..data.columns import Array, ColumnData, Verdicts
from ..data.tokens import of_column
from ..dock.messages import Batch
from ..process import shipped_files
from ..process.task import Task
from ..process.task_report import Report
from .fork_client import Nest
from .instances import Ask, ClassSignature, EnvironmentReply, EpisodeStart, Failure, Instances, Utterance
from .isolation import EnvironmentSpec, IsolatedInstances, parts
from .own_process import guard_exit
from .surviving_rows import SurvivingRows
from .user_traceback import BadResult
from .values import InjectedArguments, ReturnChecker, imported, seen

AT_ONCE = 64  # instances that are asked side by side: they wait for networks and processes more than they compute


class EnvironmentClass:
    """The class that a generation names. `columns` are those that it writes beside the response, its log-probabilities
    and its mask; `verdicts` the dock's name for which rows failed, "" where they end the run."""

    def __init__(self, node: Node, plan: Plan) -> None:
        self.node = node
        self.plan = plan
        self.graph = plan.graph
        said = GenerateAttributes.of(node)
        call = said.environment
        assert call is not None
        path, _, name = str(call.value).rpartition(":")
        self.call = call
        self.path = path
        self.name = name
        self.signature = classes(shipped_files.found(path).read_text(encoding="utf-8-sig"))[name]["reset"]
        # As gymnasium has it, all that the node reads are options, tokens as text.
        seeded = self.signature.seeded
        signature = self.signature
        self.reads = [c for c in (node.reads if seeded else signature.columns) if c in node.reads]
        self.text = frozenset(c for c in self.reads if is_tokens(plan.graph, c)) if seeded else signature.text
        self.tokens = {c: of_column(plan, c) for c in self.reads if c in self.text and is_tokens(plan.graph, c)}
        self.filled = InjectedArguments(self.signature, node, plan)
        own = {*numerics.drawn(plan.graph, node), *(of_response(plan.graph, node, e) for e in ("bool", "i32"))}
        self.columns = tuple(c for c in node.writes if c not in own)
        self.returned = ReturnChecker(plan, self.columns)
        self.timeout = said.timeout
        self.on_failure = said.on_failure
        self.memory = said.memory
        reward = next((c for c in plan.graph.columns if c.name == "reward"), None)
        self.gym: Literal["", "sum", "each"] = "" if not seeded else "each" if reward and reward.dims else "sum"
        sieve = rowsets(plan.graph).sieves.get(node.name)
        self.verdicts = sieve.column if sieve else ""

    def start(self) -> None:
        """Imports the user's file: here, or where it cannot harm this process."""
        if self.verdicts:
            folder = shipped_files.folder()
            of = (self.filled, self.columns, self.timeout, self.gym)
            self.nest = Nest(EnvironmentSpec(folder, self.path, self.name, self.call, *of))
        else:
            guard_exit()  # first: the file may have a name of its own for what it takes from `os`
            make = getattr(imported(self.path, self.call), self.name)
            self.called = ClassSignature(make, self.filled, self.columns, self.timeout, self.gym)

    def instances(self, rows: int, fan: int) -> Instances | IsolatedInstances:
        """Of so many rows, `fan` of which belong together."""
        if not self.verdicts:
            return Instances(self.called, AT_ONCE)
        return IsolatedInstances(self.nest, parts(rows, fan if self.on_failure == "drop_group" else 1), self.memory)

    def begin(self, batch: Batch, rows: Array, task: Task) -> Episodes:
        """An instance for each of the rows, of which equally many belong to each row of the batch."""
        return Episodes(self, batch, rows, task)

    def given(self, batch: Batch, fan: int) -> list[dict[str, Any]]:
        """What `reset` is given in each episode, `fan` of which belong to each row of a batch: values of its own, which
        an environment may change."""
        found: list[dict[str, Any]] = [{} for _ in range(len(batch.rows) * fan)]
        for name in self.reads:
            text = name in self.text
            element = self.graph.column(name).element
            column = batch.columns[name]
            times = 1
            if not text and element != "text":  # texts cannot be changed, and may take long to decode
                column = column.take(np.repeat(np.arange(len(column)), fan))
                times = fan
            values = seen(column, element, range(len(column)), text, self.tokens.get(name))
            for i, episode in enumerate(found):
                episode[name] = values[i * times // fan]
        return found


class Episodes:
    """The episodes of some rows, which are called by their positions.

    `standing` says which are lost: these are over."""

    def __init__(self, environment: EnvironmentClass, batch: Batch, rows: Array, task: Task) -> None:
        self.environment = environment
        self.rows = rows
        self.task = task
        self.batch = batch
        self.fan = len(rows) // len(batch.rows)
        self.values: list[tuple[Any, ...]] = [()] * len(rows)  # of the other columns, as the last step returned them
        self.checked: dict[str, list[Any]] = {}
        self.standing = SurvivingRows(environment.node, environment.plan, rows, self.fan, task.number)
        self.instances: Instances | IsolatedInstances | None = None  # until the first rank of its group begins

    def reset(self) -> list[tuple[Utterance, bool]]:
        """What the environment says first in each row, and whether the episode is over already."""
        self.instances = self.environment.instances(len(self.rows), self.fan)
        given = self.environment.given(self.batch, self.fan)
        task = self.task
        asked: dict[int, Ask] = {
            i: EpisodeStart(task.name, task.number, int(row), given[i]) for i, row in enumerate(self.rows)
        }
        return self._asked(asked, "the beginning")

    def step(self, positions: Array, texts: list[str], turn: int) -> list[tuple[Utterance, bool]]:
        """What the environment says to what the policy wrote in these rows in a turn, the first is 1, and whether that
        ends the episode."""
        return self._asked(dict(zip(positions.tolist(), texts, strict=True)), f"turn {turn}")

    def refuse(self, position: int, what: str, when: str) -> None:
        """What the environment said there cannot go on."""
        self._fail(position, Failure.of(BadResult(what)), when)

    def end(self, lengths: Mapping[str, Array]) -> Array:
        """Ends the instances; which rows stay, True. `lengths` are those of what the generation wrote."""
        try:
            return self._checked(lengths)
        finally:  # only now: an instance that is closed may change what it returned
            if self.instances is not None:
                self.instances.end()

    def _checked(self, lengths: Mapping[str, Array]) -> Array:
        """Which rows have values that fit their columns."""
        returned = self.environment.returned
        for place, name in enumerate(self.environment.columns):
            values = self.checked[name] = [None] * len(self.rows)
            for i in np.flatnonzero(~self.standing.lost).tolist():
                try:
                    own = {column: int(n[i]) for column, n in lengths.items()}
                    values[i] = returned.checked(name, self.values[i][place], own)
                except (BadResult, TypeError, ValueError) as error:
                    self._fail(i, Failure("rubbish", Failure.of(error).told), "the last turn")
        return ~self.standing.lost

    def columns(self) -> dict[str, ColumnData]:
        """The other columns that the node writes, of the rows that stay."""
        stay = np.flatnonzero(~self.standing.lost)
        return {name: self.environment.returned.column(name, [v[i] for i in stay]) for name, v in self.checked.items()}

    def verdicts(self, report: Report, head: str) -> dict[str, Verdicts]:
        """Which rows stay, for the dock, where rows may fail; counts and tells of those that do not."""
        return self.standing.verdicts(report, head)

    def _asked(self, asked: Mapping[int, Ask], when: str) -> list[tuple[Utterance, bool]]:
        """What each of these rows is told; nothing more where it is lost."""
        alive = {position: ask for position, ask in asked.items() if not self.standing.lost[position]}
        said: dict[int, tuple[Utterance, bool]] = {}
        stops = not self.environment.verdicts
        assert self.instances is not None
        where = f"`{self.environment.name}` in {when} of {numerics.listed(self.rows[[*alive]])}"
        for position, answer in self.instances.answers(alive, stops, where).items():
            if isinstance(answer, EnvironmentReply):
                said[position] = (answer.said, answer.over)
                self.values[position] = answer.values
            else:
                ask = asked[position]
                self._fail(position, answer, when, ask.given if isinstance(ask, EpisodeStart) else {"text": ask})
        return [("", True) if self.standing.lost[i] else said[i] for i in asked]

    def _fail(self, position: int, failure: Failure, when: str, given: Mapping[str, Any] | None = None) -> None:
        gone = self.standing.fail(position, failure, when, given)
        if isinstance(self.instances, IsolatedInstances):
            self.instances.lose(gone)
