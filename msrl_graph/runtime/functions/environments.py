"""Environments: a user's class that answers a policy over several turns.

Each row has its own instance of the class.

Invariant: a row whose environment fails never continues as if the environment had answered. With `on_failure = stop`,
the failure ends the run with a message that has the node, its line, the row, the turn and the error. With any other
`on_failure`, the episode of the row ends and the row leaves the iteration. With `drop_group`, the row's group leaves
with the row. The values of the remaining rows fit the columns that the node writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from ...analysis.rowsets import rowsets
from ...analysis.sequences import find_response_column, is_tokens
from ...ir.attributes import GenerateAttributes
from ...ir.graph import Node
from ...ir.plan import Plan
from ...ir.signatures import read_classes
from ..data import numerics
from ..data.columns import Array, ColumnData, Verdicts
from ..data.tokens import column_tokenizer
from ..dock.messages import Batch
from ..process import shipped_files
from ..process.task import Task
from ..process.task_report import Report
from .fork_client import Nest
from .instances import Ask, ClassSignature, EnvironmentReply, EpisodeStart, Failure, Instances, Utterance
from .isolation import EnvironmentSpec, IsolatedInstances, split_rows
from .own_process import guard_exit
from .surviving_rows import SurvivingRows
from .user_traceback import BadResult
from .values import InjectedArguments, ReturnChecker, import_user_file, values_for_function

MAX_CONCURRENT_CALLS = 64  # concurrent calls of instances, which wait for networks and processes more than they compute


class EnvironmentClass:
    """The user's environment class that a generation node names.

    `columns` are the columns that the node writes in addition to the response, the log-probabilities and the mask.
    `verdicts` is the name of the dock's column that says which rows failed, or "" if a failure ends the run.
    """

    def __init__(self, node: Node, plan: Plan) -> None:
        self.node = node
        self.plan = plan
        self.graph = plan.graph
        attributes = GenerateAttributes.of(node)
        call = attributes.environment
        assert call is not None
        path, _, name = str(call.value).rpartition(":")
        self.call = call
        self.path = path
        self.name = name
        self.signature = read_classes(shipped_files.find_copy(path).read_text(encoding="utf-8-sig"))[name]["reset"]
        # A gymnasium class gets everything that the node reads as options, tokens as text.
        seeded = self.signature.seeded
        signature = self.signature
        self.reads = [column for column in (node.reads if seeded else signature.columns) if column in node.reads]
        self.text = (
            frozenset(column for column in self.reads if is_tokens(plan.graph, column)) if seeded else signature.text
        )
        self.tokens = {
            column: column_tokenizer(plan, column)
            for column in self.reads
            if column in self.text and is_tokens(plan.graph, column)
        }
        self.injected_arguments = InjectedArguments(self.signature, node, plan)
        own_columns = {
            *numerics.sampled_columns(plan.graph, node),
            *(find_response_column(plan.graph, node, element) for element in ("bool", "i32")),
        }
        self.columns = tuple(column for column in node.writes if column not in own_columns)
        self.return_checker = ReturnChecker(plan, self.columns)
        self.timeout = attributes.timeout
        self.on_failure = attributes.on_failure
        self.memory = attributes.memory
        reward = next((column for column in plan.graph.columns if column.name == "reward"), None)
        self.gym: Literal["", "sum", "each"] = "" if not seeded else "each" if reward and reward.dims else "sum"
        sieve = rowsets(plan.graph).sieves.get(node.name)
        self.verdicts = sieve.column if sieve else ""

    def start(self) -> None:
        """Import the file that defines the class.

        If a failed row ends the run, this process imports the file. If a failed row does not end the run, a separate
        process imports the file, so that the user's code cannot harm this process.
        """
        if self.verdicts:
            folder = shipped_files.shipped_folder()
            settings = (self.injected_arguments, self.columns, self.timeout, self.gym)
            self.nest = Nest(EnvironmentSpec(folder, self.path, self.name, self.call, *settings))
        else:
            guard_exit()  # before the import: the file may copy functions of `os`
            make = getattr(import_user_file(self.path, self.call), self.name)
            self.called = ClassSignature(make, self.injected_arguments, self.columns, self.timeout, self.gym)

    def instances(self, rows: int, fan: int) -> Instances | IsolatedInstances:
        """Return the instances of the class for `rows` responses, one for each response.

        `fan` consecutive responses belong to the same prompt.
        """
        if not self.verdicts:
            return Instances(self.called, MAX_CONCURRENT_CALLS)
        return IsolatedInstances(
            self.nest, split_rows(rows, fan if self.on_failure == "drop_group" else 1), self.memory
        )

    def begin(self, batch: Batch, rows: Array, task: Task) -> Episodes:
        """Return the episodes of some responses, with one episode for each response.

        `batch` has the rows of the prompts. `rows` has the numbers of the responses' rows. Each prompt has the same
        number of responses.
        """
        return Episodes(self, batch, rows, task)

    def reset_arguments(self, batch: Batch, fan: int) -> list[dict[str, Any]]:
        """Return, for each episode, the arguments of `reset` that come from columns.

        Each row of the batch has `fan` episodes. Each episode has its own copies of the values, because an environment
        may change the values.
        """
        episodes: list[dict[str, Any]] = [{} for _ in range(len(batch.rows) * fan)]
        for name in self.reads:
            text = name in self.text
            element = self.graph.column(name).element
            column = batch.columns[name]
            times = 1
            if not text and element != "text":  # text is immutable, and may be slow to decode
                column = column.take(np.repeat(np.arange(len(column)), fan))
                times = fan
            values = values_for_function(column, element, range(len(column)), text, self.tokens.get(name))
            for i, episode in enumerate(episodes):
                episode[name] = values[i * times // fan]
        return episodes


class Episodes:
    """The episodes of the responses to the prompts of a batch.

    `rows` has the numbers of the responses' rows. An episode is identified by the position of its row in `rows`.
    `surviving_rows` records which rows continue. The episode of a row that does not continue is over.
    """

    def __init__(self, environment: EnvironmentClass, batch: Batch, rows: Array, task: Task) -> None:
        self.environment = environment
        self.rows = rows
        self.task = task
        self.batch = batch
        self.fan = len(rows) // len(batch.rows)
        self.values: list[tuple[Any, ...]] = [()] * len(rows)  # values of the additional columns, from the last step
        self.checked: dict[str, list[Any]] = {}
        self.surviving_rows = SurvivingRows(environment.node, environment.plan, rows, self.fan, task.number)
        self.instances: Instances | IsolatedInstances | None = None  # until the first rank of its group begins

    def reset(self) -> list[tuple[Utterance, bool]]:
        """Start all episodes, and return the environment's first text for each row.

        Each text comes with a flag that is true if the episode is already over.
        """
        self.instances = self.environment.instances(len(self.rows), self.fan)
        arguments = self.environment.reset_arguments(self.batch, self.fan)
        task = self.task
        requests: dict[int, Ask] = {
            i: EpisodeStart(task.name, task.number, int(row), arguments[i]) for i, row in enumerate(self.rows)
        }
        return self._ask(requests, "the beginning")

    def step(self, positions: Array, texts: list[str], turn: int) -> list[tuple[Utterance, bool]]:
        """Return the environment's answers to the texts that the policy wrote in a turn.

        `positions` has, for each text, the position of the text's row in the field `rows`. The first turn is 1. Each
        answer comes with a flag that is true if the answer ends the episode.
        """
        return self._ask(dict(zip(positions.tolist(), texts, strict=True)), f"turn {turn}")

    def refuse(self, position: int, reason: str, when: str) -> None:
        """Record the failure of a row whose environment returned something unusable.

        `reason` says what is wrong with the returned value, and `when` says in words when it was returned.
        """
        self._fail(position, Failure.from_error(BadResult(reason)), when)

    def end(self, lengths: Mapping[str, Array]) -> Array:
        """End all instances, and return which rows remain (True) or are lost (False).

        `lengths` has, for each column that the generation wrote, the length of each row.
        """
        try:
            return self._check_values(lengths)
        finally:  # after the check: an instance may change its returned values when it is closed
            if self.instances is not None:
                self.instances.end()

    def _check_values(self, lengths: Mapping[str, Array]) -> Array:
        """Check the column values of all environments, and return which rows remain.

        A row fails if one of its values does not fit its column.
        """
        returned = self.environment.return_checker
        for index, name in enumerate(self.environment.columns):
            values = self.checked[name] = [None] * len(self.rows)
            for i in np.flatnonzero(~self.surviving_rows.lost).tolist():
                try:
                    own_lengths = {column: int(length[i]) for column, length in lengths.items()}
                    values[i] = returned.check(name, self.values[i][index], own_lengths)
                except (BadResult, TypeError, ValueError) as error:
                    self._fail(i, Failure("rubbish", Failure.from_error(error).summary), "the last turn")
        return ~self.surviving_rows.lost

    def columns(self) -> dict[str, ColumnData]:
        """Return the columns that the environments fill, for the remaining rows."""
        stay = np.flatnonzero(~self.surviving_rows.lost)
        return {
            name: self.environment.return_checker.column(name, [values[i] for i in stay])
            for name, values in self.checked.items()
        }

    def verdicts(self, report: Report, metric_prefix: str) -> dict[str, Verdicts]:
        """Return a dictionary with one column of the dock: the verdicts on the rows.

        The key is the name of the column. A verdict says whether a row remains or is lost. Lost rows are counted and
        reported in `report`. The metrics that count failed rows have names that begin with `metric_prefix`. Returns {}
        if a failure ends the run, because a run with this setting never loses rows.
        """
        return self.surviving_rows.make_verdicts(report, metric_prefix)

    def _ask(self, requests: Mapping[int, Ask], when: str) -> list[tuple[Utterance, bool]]:
        """Return the environment's reply to each request, in the order of the requests.

        A reply is a text (or messages), and a flag that is true if the episode is over. The reply for a lost row is an
        empty text with the flag True. `when` names the turn in words.
        """
        alive = {position: request for position, request in requests.items() if not self.surviving_rows.lost[position]}
        replies: dict[int, tuple[Utterance, bool]] = {}
        stops = not self.environment.verdicts
        assert self.instances is not None
        where = f"`{self.environment.name}` in {when} of {numerics.format_rows(self.rows[[*alive]])}"
        for position, answer in self.instances.answers(alive, stops, where).items():
            if isinstance(answer, EnvironmentReply):
                replies[position] = (answer.utterance, answer.ended)
                self.values[position] = answer.values
            else:
                request = requests[position]
                self._fail(
                    position,
                    answer,
                    when,
                    request.arguments if isinstance(request, EpisodeStart) else {"text": request},
                )
        return [("", True) if self.surviving_rows.lost[i] else replies[i] for i in requests]

    def _fail(self, position: int, failure: Failure, when: str, given: Mapping[str, Any] | None = None) -> None:
        lost_positions = self.surviving_rows.fail(position, failure, when, given)
        if isinstance(self.instances, IsolatedInstances):
            self.instances.lose(lost_positions)
