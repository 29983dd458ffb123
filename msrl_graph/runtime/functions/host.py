"""Function hosts: processes on CPUs that run the source and the Python functions.

The *source* is the node that draws rows of the data as prompts.

Invariant: between tasks, a function host keeps only what a replacement process can load or compute again: the data
files, the functions, and the rows that a task draws. Values that outlive an iteration arrive with the task and are
returned in the report.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import ray

from ...algorithms.registry import take_amounts
from ...analysis.async_schedule import count_opening
from ...analysis.sequences import drawn_name, previous_states, temperature_states
from ...data.plan_paths import copy_to_host
from ...diagnostics import Diagnostic, Fault
from ...ir.attributes import CallAttributes, SourceAttributes
from ...ir.graph import Node, State
from ...ir.instruction import Instruction, Walker
from ...ir.plan import FUNCTIONS, from_json
from ..data import row_files as rows
from ..data.columns import Array, ColumnData, ColumnRows, Verdicts
from ..data.dataset import Dataset
from ..data.mixture import Mixture, load_data
from ..data.numerics import NumericsWatch
from ..dock.client import Client
from ..dock.messages import DockAddress
from ..dock.readers import list_node_reads
from ..metrics.evaluation_figures import evaluation_figures
from ..metrics.reward_variance import ColumnMeans
from ..process import log, shipped_files
from ..process.environment import set_up_process
from ..process.task import Tables, Task
from ..process.task_report import Loaded, NextValues, Report, RunError
from .crash_journal import CrashJournal, ProcessDied
from .draw_weights import DrawWeights, remark_scarce_weights
from .function_node import FunctionNode, Results
from .user_traceback import describe_failure
from .workers import Workers, WorkerSpec, uses_workers

PARTIAL_WRITE_INTERVAL = (
    1.0  # seconds after which finished rows are written, although others of their share are not finished
)


@dataclass
class _Calls(Walker):
    """The methods that execute a function host's instruction stream for one task.

    The instruction stream is the list of instructions that the plan gives to all function hosts. Its instructions call
    functions and never move weights. `drawn` is the number of rounds of prompts that were drawn in the task.
    """

    host: FunctionHost
    functions: Mapping[str, FunctionNode]
    task: Task
    tables: Tables
    report: Report
    drawn: int = 0

    def run(self, pool: str, node: str) -> None:
        if node != "source":
            self.host._run_function(self.functions[node], self.task, self.report)
        elif self.host.host == 0:
            self.host.client.report_activity(f"source in {self.task.key}")
            with self.report.phase("source"):
                self.host._run_source(self.task, self.drawn, self.tables, self.report)
            self.drawn += 1

    def again(self, pool: str, node: str, rounds: int) -> bool:
        return self.host.client.again(node, self.task, rounds)

    def _refuse(self, *names: object) -> None:
        raise AssertionError("a function has no weights")

    reshard = release = swap_in = wait = _refuse


@ray.remote(num_cpus=0)
class FunctionHost:
    """The process of one host that runs function nodes.

    - `plan`: the plan, as compressed JSON.
    - `host`: the number of the host. Host 0 also runs the source.
    - `called`: the name of the process.
    - `folder`, `logs`: the run's temporary folder on this host, and the folder of log files.
    - `again`: true if this process replaces a process that died.
    - `digests`: for each data file, a digest that was computed when the run began. It covers the size of the file and
      samples of its content.
    """

    def __init__(
        self,
        plan: bytes,
        host: int,
        called: str,
        folder: str,
        logs: str,
        dock_address: DockAddress,
        again: bool,
        digests: Mapping[str, str],
        deadline: float = 0.0,
    ) -> None:
        set_up_process(folder, logs, called, deadline)
        self.note = CrashJournal(Path(folder) / f"{called.replace(' ', '-')}.note", again)
        self.plan = from_json(zlib.decompress(plan))
        self.host = host
        self.called = called
        self.digests = digests
        self.readers = {reader.node: reader for reader in list_node_reads(self.plan)}
        node_reads = list(self.readers.values())
        self.client = Client(called, node_reads, dock_address, host)
        self.functions: dict[str, FunctionNode] | None = None
        graph = self.plan.graph
        nodes = [node for node in self.plan.graph.nodes if node.verb != "source"]
        # The states per prompt that some node reads, by their names in the dock.
        per_prompt = {state.name: state for state in graph.states if state.per}
        self.read = {
            name: per_prompt[name] for node in nodes for name in previous_states(graph, node) if name in per_prompt
        }
        self.drawing = {
            drawn_name(name): per_prompt[name]
            for node in nodes
            for name in temperature_states(graph, node)
            if name in per_prompt
        }
        self.drawn: dict[tuple[str, int], Array] = {}  # by task and round, the numbers of rows of the data

    def fetch(self) -> tuple[str, tuple[Diagnostic, ...]]:
        """Copy files from URLs to this host; return the host's address and any errors."""
        try:
            copy_to_host(self.plan, data=self.host == 0)
        except Fault as fault:
            return ray.util.get_node_ip_address(), fault.diagnostics
        return ray.util.get_node_ip_address(), ()

    def start(self) -> dict[str, Loaded]:
        """Load the functions and the data files; return how many rows each data file has."""
        plan = self.plan = copy_to_host(self.plan, data=self.host == 0)
        self.data = load_data(plan, self.digests) if self.host == 0 else {}
        self.watch = NumericsWatch(plan)
        self.means = ColumnMeans(plan)
        source = plan.graph.node("source")
        source_data = self.data.get("source")
        self.refilling = next((reader.refilling for reader in self.readers.values()), None)
        with self._journal_call(source, "its import"):
            self.weigh = (
                DrawWeights(plan, source_data)
                if SourceAttributes.of(source).weights is not None
                and source_data is not None
                and not isinstance(source_data, Mixture)
                else None
            )
        functions = {}
        function_nodes = [
            candidate
            for candidate in plan.graph.nodes
            if plan.placement(candidate.name).pool == FUNCTIONS and candidate.verb != "source"
        ]
        workers = self._start_workers([candidate for candidate in function_nodes if uses_workers(candidate)])
        for node in function_nodes:
            with self._journal_call(node, "its import"):
                functions[node.name] = FunctionNode(node, plan, self.readers[node.name], self.note, workers)
        self.functions = functions
        left_out = {
            name: f"{dataset.excluded} of {dataset.excluded + len(dataset)} rows are left out: {dataset.reason}"
            for name, dataset in self.data.items()
            if dataset.excluded
        }
        return {name: Loaded(len(dataset), left_out.get(name, "")) for name, dataset in self.data.items()}

    def _start_workers(self, nodes: Sequence[Node]) -> Workers | None:
        """Start worker processes for the functions of these nodes.

        Returns None if this process calls the functions itself.
        """
        count = self.plan.deploy.run.function_workers
        if count == 1 or not nodes:
            return None
        node_readers = {node.name: self.readers[node.name] for node in nodes}
        return Workers(
            count,
            WorkerSpec(shipped_files.shipped_folder(), self.plan.to_json(), node_readers, f"{self.note.path}.worker"),
        )

    def run(self, task: Task, tables: Tables) -> Report:
        """Execute the function nodes' instructions for a task, or for a part of the task.

        A process that replaces a dead process executes the whole task again. The second execution does not change the
        results: the process gets the same shares, functions are pure, and a row that is written twice gets the same
        values again.
        """
        if self.functions is None:
            self.start()
        assert self.functions is not None
        report = Report(self.called)
        stream = next(
            candidate for candidate in self.plan.schedule if candidate.pool == FUNCTIONS and candidate.task == task.name
        )
        calls = _Calls(self, self.functions, task, tables, report)
        early = count_opening(self.plan, stream)
        begin = 0
        steps = stream.instructions
        if task.part == "opening":
            steps = steps[:early]
        elif task.part == "rest":
            begin = early
            calls.drawn = self._count_rounds(steps[:early], task)
            self._put_states(task, range(calls.drawn), tables)
        self.client.walk(FUNCTIONS, steps, task, calls, begin=begin)
        if self.host == 0 and task.trains and task.part != "opening":
            report.prompt_rows = np.concatenate(
                [self._choose_rows(task, round, tables.draws) for round in range(calls.drawn)]
            )
            if self.refilling is not None:
                report.count("refills", calls.drawn - 1, 0)
                report.count("prompts_drawn", calls.drawn * task.prompts, 0)
        self.client.flush(task, report)
        return report

    def record(self, task: Task, folder: str) -> str:
        """Write the rows of a finished task into a run's folder.

        Returns the error message, or "" if the rows were written.
        """
        if self.functions is None:
            self.start()
        try:
            rows.write(Path(folder), self.plan, self.client.read_all_rows(task), task)
        except OSError as error:
            task_name = f"iteration {task.number}" if task.trains else f"the evaluation {task.key}"
            return f"the rows of {task_name} could not be recorded: {error}"
        return ""

    def figures(self, task: Task) -> dict[str, float]:
        """Return the metrics that are computed from the rows of a finished evaluation.

        The means of the evaluation's columns are not included.
        """
        if self.functions is None:
            self.start()
        evaluation = self.plan.deploy.evaluation(task.name)
        assert evaluation is not None
        pieces = self.client.read_all_rows(task, evaluation.columns)
        return evaluation_figures(self.plan, evaluation, task, pieces)

    def _count_rounds(self, steps: Sequence[Instruction], task: Task) -> int:
        """Return how many rounds of prompts the opening of a task has drawn.

        The *opening* is the first part of a task's instructions (`task.part`). `steps` are the instructions of the
        opening. This host has finished the opening.
        """
        filter = next((step.node for step in steps if step.op == "AGAIN"), "")
        return next(
            round_count for round_count in count(1) if not filter or not self.client.again(filter, task, round_count)
        )

    def _run_source(self, task: Task, round: int, tables: Tables, report: Report) -> None:
        """Write a round's prompts, and the state values of these prompts, to the dock.

        In the first part of a task (the opening), only the states that are temperatures are written. `_put_states`
        writes the other states later.
        """
        chosen = self._choose_rows(task, round, tables.draws, report)
        columns = self._dataset(task).take(chosen)
        columns |= self._state_columns(task, chosen, tables.draws, self.drawing)
        if task.part != "opening":
            columns |= self._state_columns(task, chosen, tables.states, self.read)
        self._put(task, round, columns)

    def _put_states(self, task: Task, rounds: Iterable[int], tables: Tables) -> None:
        """Write the prompt states that the opening of a task did not write to the dock.

        `rounds` are the numbers of the rounds in which the prompts were drawn.
        """
        for round in rounds if self.host == 0 and self.read else ():
            chosen = self._choose_rows(task, round, tables.draws)
            self._put(task, round, self._state_columns(task, chosen, tables.states, self.read))

    def _put(self, task: Task, round: int, columns: Mapping[str, ColumnData]) -> None:
        numbers = np.arange(round * task.prompts, (round + 1) * task.prompts)
        self.client.put_rows(
            "source", task, {name: ColumnRows(numbers, column) for name, column in columns.items()}, asks=True
        )

    def _state_columns(
        self, task: Task, chosen: Array, tables: Mapping[str, Array], named: Mapping[str, State]
    ) -> dict[str, ColumnData]:
        """Return dock columns that have the state values of some rows of the data.

        `chosen` are the numbers of the rows. `tables` has, for each state, the values for all rows of the data. `named`
        has the states, by the names of the dock's columns. In an evaluation, each state has its initial value.
        """
        return {
            name: ColumnData(
                tables[state.name][chosen].astype(np.float64)
                if task.trains
                else np.full(len(chosen), float(state.initial.literal()))
            )
            for name, state in named.items()
        }

    def _choose_rows(self, task: Task, round: int, draws: Mapping[str, Array], report: Report | None = None) -> Array:
        """Return the numbers of the data rows that a round draws.

        `draws` has the state values for the option `weights`. The result depends only on the arguments. It is stored,
        because the second part of the task needs the same rows again.
        """
        if (task.key, round) in self.drawn:
            return self.drawn[task.key, round]
        self.drawn = {key: rows for key, rows in self.drawn.items() if key[0] == task.key}
        self.drawn[task.key, round] = chosen = self._draw_rows(task, round * task.prompts, draws, report)
        return chosen

    def _draw_rows(self, task: Task, first: int, draws: Mapping[str, Array], report: Report | None) -> Array:
        dataset = self._dataset(task)
        source = self.plan.graph.node("source")
        if not task.trains:
            return np.arange(len(dataset))
        if self.weigh is not None:
            with self._journal_call(source, f"the call of `weights` in {task.key}"):
                weights = self.weigh(draws, task)
            if report is not None:
                report.remarks += remark_scarce_weights(source, task, weights, first)
            assert not isinstance(dataset, Mixture)  # a mixture has no `weights`
            return dataset.draw(weights, task.number, first, task.prompts)
        resumed_rows = [dataset.indices(cut_response.position, 1) for cut_response in task.cut]
        return np.concatenate([*resumed_rows, dataset.indices(task.position + first, task.prompts - len(resumed_rows))])

    def _dataset(self, task: Task) -> Dataset | Mixture:
        evaluation = self.plan.deploy.evaluation(task.name)
        return self.data[evaluation.data if evaluation else "source"]

    @contextmanager
    def _journal_call(self, node: Node, where: str) -> Iterator[None]:
        """Record an import of a user's file, or a call of the option `weights`.

        `where` says in words what is imported or called. Raises RunError if the import or call must not be repeated.
        """
        try:
            with self.note.record_call(f"{node.name}: {where}"):
                yield
        except ProcessDied as died:
            raise RunError(describe_failure(node, died, where)) from died

    def _run_function(self, function: FunctionNode, task: Task, report: Report) -> None:
        node = function.node
        last = False
        while not last:
            wait_start = time.perf_counter()
            batch = self.client.take_share(node.name, task, self.host, at_once=True)
            report.add("wait", wait_start)
            last = batch.share.last
            if not len(batch.rows):
                continue
            log.set_node(f"{node.name} in {task.key}")
            # With a `capacity`, a share has one reservation, also for a replacement that writes it again.
            part_seconds = math.inf if self.client.dock_address.capacity else PARTIAL_WRITE_INTERVAL
            parts = list[Results]()
            with report.phase(node.name):
                for part in function.parts(batch, task, part_seconds):
                    parts.append(part)
                    if not part.last:
                        self.client.put_rows(node.name, task, part.columns)
                        if not part.columns:
                            self.client.report_rows_done(node.name, task, part.rows)
            results = Results.joined(parts)
            for figure, amount in take_amounts().items():
                report.count(figure, amount, 0)
            for where, (failure, size) in results.failed.items():
                report.count(f"{node.name}/failed", size, 0)
                report.count(f"{node.name}/failed/{failure.reason}", size, 0)
                messages = report.failed.setdefault(node.name, {})
                messages.setdefault(failure.reason, f"{where}: {failure.summary.reason}")
            spoilt_rows = function.find_spoilt_rows(batch)
            for name, piece in results.columns.items():
                rows = piece.rows
                column = piece.column
                if isinstance(piece, Verdicts):
                    self._count_verdicts(function, task, piece, report)
                    continue
                spoilt = spoilt_rows if len(rows) == len(spoilt_rows) else None
                self.watch.check_results(node, task, report, name, rows, column, spoilt)
                if column.offsets is None and column.values.dtype.kind == "f":
                    self.means.count(report, node, task, name, rows, column.values)
            for name, next_values in results.states.items():
                reader = self.readers[node.name]
                all_values = report.states.setdefault(name, NextValues())
                units = next_values.units
                if not reader.whole_batch:  # a prompt that a filter repeats is the same row of the data
                    units = reader.numbers(task).above(np.asarray(units, np.int64), reader.unit, 0).tolist()
                all_values.units += units
                all_values.values += next_values.values
            self.client.put_rows(node.name, task, parts[-1].columns, asks=True)
            if not results.columns:
                self.client.report_rows_done(node.name, task, parts[-1].rows)

    def _count_verdicts(self, function: FunctionNode, task: Task, verdicts: Verdicts, report: Report) -> None:
        """Count in `report` how many rows a filter passes."""
        times = verdicts.column.values
        report.count(f"kept/{function.node.name}", float(times.sum()), len(times))
        if CallAttributes.of(function.node).select is not None:
            report.count(f"distinct/{function.node.name}", float((times > 0).sum()), len(times))
        if self.refilling is not None and function.sieve == self.refilling:
            reader = self.readers[function.node.name]
            prompts = reader.numbers(task).above(verdicts.rows[times > 0], reader.rows, 0)
            report.count("prompts_kept", len(np.unique(prompts)), 0)
