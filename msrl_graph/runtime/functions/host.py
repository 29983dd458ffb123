"""The pool of function nodes: the source and the Python functions, on the hosts' CPUs.

Invariant: what a process of it keeps between tasks is what a new one in its place loads or finds again: data,
functions, the rows that a task draws, nothing else that a task left. The values that outlive an iteration come with the
task, and go back in the report.
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

from ...algorithms.registry import told
from ...diagnostics import Diagnostic, Fault
from ...ir.async_schedule import opening
from ...ir.attributes import CallAttributes, SourceAttributes
from ...ir.graph import Node, State
from ...ir.instruction import Instruction, Walker
from ...ir.plan import FUNCTIONS, from_json
from ...ir.plan_paths import here
from ...ir.sequences import as_drawn, heating, latest
from ..data import row_files as rows
from ..data.columns import Array, ColumnData, ColumnRows, Verdicts
from ..data.dataset import Dataset
from ..data.numerics import NumericsWatch
from ..dock.client import Client
from ..dock.messages import DockAddress
from ..dock.readers import readers
from ..metrics.evaluation_figures import evaluation_figures
from ..metrics.reward_variance import ColumnMeans
from ..process import log, shipped_files
from ..process.environment import settle
from ..process.host_facts import sampled
from ..process.task import Tables, Task
from ..process.task_report import Loaded, NextValues, Report, RunError
from .crash_journal import CrashJournal, ProcessDied
from .draw_weights import DrawWeights, scarce
from .function_node import FunctionNode, Results
from .user_traceback import blame
from .workers import Workers, WorkerSpec, uses_workers

OFTEN = 1.0  # seconds after which rows that are done are written, though others of their share are not


@dataclass
class _Calls(Walker):
    """What a function host does at the instructions of a task: it calls, and has no weights. `drawn`: rounds of prompts
    so far."""

    host: FunctionHost
    functions: Mapping[str, FunctionNode]
    task: Task
    tables: Tables
    report: Report
    drawn: int = 0

    def run(self, pool: str, node: str) -> None:
        if node != "source":
            self.host._function(self.functions[node], self.task, self.report)
        elif self.host.host == 0:
            self.host.client.at(f"source in {self.task.key}")
            with self.report.phase("source"):
                self.host._source(self.task, self.drawn, self.tables, self.report)
            self.drawn += 1

    def again(self, pool: str, node: str, rounds: int) -> bool:
        return self.host.client.again(node, self.task, rounds)

    def _nothing(self, *names: object) -> None:
        raise AssertionError("a function has no weights")

    reshard = release = swap_in = wait = _nothing


@ray.remote(num_cpus=0)
class FunctionHost:
    """The function nodes of one host, in a process that is `called` so; host 0 also runs the source. `again`: in the
    place of a process that died. `digests`: those of the data as the run began, of sampled blocks."""

    def __init__(
        self,
        plan: bytes,
        host: int,
        called: str,
        folder: str,
        logs: str,
        way: DockAddress,
        again: bool,
        digests: Mapping[str, str],
        deadline: float = 0.0,
    ) -> None:
        settle(folder, logs, called, deadline)
        self.note = CrashJournal(Path(folder) / f"{called.replace(' ', '-')}.note", again)
        self.plan = from_json(zlib.decompress(plan))
        self.host = host
        self.called = called
        self.digests = digests
        self.readers = {r.node: r for r in readers(self.plan)}
        found = list(self.readers.values())
        self.client = Client(called, found, way, host)
        self.functions: dict[str, FunctionNode] | None = None
        graph = self.plan.graph
        nodes = [n for n in self.plan.graph.nodes if n.verb != "source"]
        # The states of each prompt that some node reads, by their names in the dock.
        each = {s.name: s for s in graph.states if s.per}
        self.read = {s: each[s] for n in nodes for s in latest(graph, n) if s in each}
        self.drawing = {as_drawn(s): each[s] for n in nodes for s in heating(graph, n) if s in each}
        self.drawn: dict[tuple[str, int], Array] = {}  # by task and round, rows of the data

    def fetch(self) -> tuple[str, tuple[Diagnostic, ...]]:
        """This host's address, and what keeps it from having copies of what lies at URLs."""
        try:
            here(self.plan, data=self.host == 0)
        except Fault as fault:
            return ray.util.get_node_ip_address(), fault.diagnostics
        return ray.util.get_node_ip_address(), ()

    def start(self) -> dict[str, Loaded]:
        """Loads functions and data."""
        plan = self.plan = here(self.plan, data=self.host == 0)
        files = plan.deploy.data if self.host == 0 else {}
        for name, file in files.items():  # one that takes a dead one's place must not read other rows
            digest = self.digests.get(name)
            if digest and digest != sampled(file.path):
                raise RunError(f"the data {file.path} ({file.span.place}) were changed after the run began")
        self.data = {n: Dataset(d, plan) for n, d in files.items()}
        self.watch = NumericsWatch(plan)
        self.means = ColumnMeans(plan)
        source = plan.graph.node("source")
        self.refilling = next((r.refilling for r in self.readers.values()), None)
        with self._noted(source, "its import"):
            self.weigh = (
                DrawWeights(plan, self.data["source"])
                if SourceAttributes.of(source).weights is not None and "source" in self.data
                else None
            )
        functions = {}
        called = [n for n in plan.graph.nodes if plan.placement(n.name).pool == FUNCTIONS and n.verb != "source"]
        workers = self._workers([n for n in called if uses_workers(n)])
        for node in called:
            with self._noted(node, "its import"):
                functions[node.name] = FunctionNode(node, plan, self.readers[node.name], self.note, workers)
        self.functions = functions
        left_out = {
            name: f"{d.too_long} of {d.too_long + len(d)} rows are left out: {d.why}"
            for name, d in self.data.items()
            if d.too_long
        }
        return {name: Loaded(len(d), left_out.get(name, "")) for name, d in self.data.items()}

    def _workers(self, nodes: Sequence[Node]) -> Workers | None:
        """What calls the functions of these nodes, if not this process."""
        count = self.plan.deploy.run.function_workers
        if count == 1 or not nodes:
            return None
        readers_ = {n.name: self.readers[n.name] for n in nodes}
        return Workers(
            count, WorkerSpec(shipped_files.folder(), self.plan.to_json(), readers_, f"{self.note.path}.worker")
        )

    def run(self, task: Task, tables: Tables) -> Report:
        """Does this pool's stream for one task, or a part of it.

        A process that takes a dead one's place does all of the task again, and nothing changes by it: its shares are
        the same, functions are pure, and rows that are written twice replace themselves.
        """
        if self.functions is None:
            self.start()
        assert self.functions is not None
        report = Report(self.called)
        stream = next(s for s in self.plan.schedule if s.pool == FUNCTIONS and s.task == task.name)
        calls = _Calls(self, self.functions, task, tables, report)
        early = opening(self.plan, stream)
        begin = 0
        steps = stream.instructions
        if task.part == "opening":
            steps = steps[:early]
        elif task.part == "rest":
            begin = early
            calls.drawn = self._rounds(steps[:early], task)
            self._states(task, range(calls.drawn), tables)
        self.client.walk(FUNCTIONS, steps, task, calls, begin=begin)
        if self.host == 0 and task.trains and task.part != "opening":
            report.drawn = np.concatenate([self._chosen(task, round, tables.draws) for round in range(calls.drawn)])
            if self.refilling is not None:
                report.count("refills", calls.drawn - 1, 0)
                report.count("prompts_drawn", calls.drawn * task.prompts, 0)
        self.client.flush(task, report)
        return report

    def record(self, task: Task, folder: str) -> str:
        """Writes the rows of a task that has ended into a run's folder; what went wrong."""
        if self.functions is None:
            self.start()
        try:
            rows.write(Path(folder), self.plan, self.client.whole(task), task)
        except OSError as error:
            task_name = f"iteration {task.number}" if task.trains else f"the evaluation {task.key}"
            return f"the rows of {task_name} could not be recorded: {error}"
        return ""

    def figures(self, task: Task) -> dict[str, float]:
        """What an evaluation that has ended reports beside the means of its columns."""
        if self.functions is None:
            self.start()
        evaluation = self.plan.deploy.evaluation(task.name)
        assert evaluation is not None
        pieces = self.client.whole(task, evaluation.columns)
        return evaluation_figures(self.plan, evaluation, task, pieces)

    def _rounds(self, steps: Sequence[Instruction], task: Task) -> int:
        """How many rounds of prompts an opening that has ended has drawn."""
        filter = next((x.node for x in steps if x.op == "AGAIN"), "")
        return next(n for n in count(1) if not filter or not self.client.again(filter, task, n))

    def _source(self, task: Task, round: int, tables: Tables, report: Report) -> None:
        """Puts the prompts of a round, and their states as far as they are known."""
        chosen = self._chosen(task, round, tables.draws, report)
        columns = self._dataset(task).take(chosen)
        columns |= self._values(task, chosen, tables.draws, self.drawing)
        if task.part != "opening":
            columns |= self._values(task, chosen, tables.states, self.read)
        self._put(task, round, columns)

    def _states(self, task: Task, rounds: Iterable[int], tables: Tables) -> None:
        """Puts the states of prompts that were put before they were known."""
        for round in rounds if self.host == 0 and self.read else ():
            chosen = self._chosen(task, round, tables.draws)
            self._put(task, round, self._values(task, chosen, tables.states, self.read))

    def _put(self, task: Task, round: int, columns: Mapping[str, ColumnData]) -> None:
        numbers = np.arange(round * task.prompts, (round + 1) * task.prompts)
        self.client.put(
            "source", task, {name: ColumnRows(numbers, column) for name, column in columns.items()}, asks=True
        )

    def _values(
        self, task: Task, chosen: Array, tables: Mapping[str, Array], named: Mapping[str, State]
    ) -> dict[str, ColumnData]:
        """The states of some rows of the data, by the names that they have in the dock."""
        return {
            name: ColumnData(
                tables[state.name][chosen].astype(np.float64)
                if task.trains
                else np.full(len(chosen), float(state.initial.literal()))
            )
            for name, state in named.items()
        }

    def _chosen(self, task: Task, round: int, draws: Mapping[str, Array], report: Report | None = None) -> Array:
        """The rows of the data that a round draws: a function of the task. They are kept for the part of it that comes
        after its opening."""
        if (task.key, round) in self.drawn:
            return self.drawn[task.key, round]
        self.drawn = {key: rows for key, rows in self.drawn.items() if key[0] == task.key}
        self.drawn[task.key, round] = chosen = self._draw(task, round * task.prompts, draws, report)
        return chosen

    def _draw(self, task: Task, first: int, draws: Mapping[str, Array], report: Report | None) -> Array:
        dataset = self._dataset(task)
        source = self.plan.graph.node("source")
        if not task.trains:
            return np.arange(len(dataset))
        if self.weigh is not None:
            with self._noted(source, f"what `weights` reads in {task.key}"):
                weights = self.weigh(draws, task)
            if report is not None:
                report.remarks += scarce(source, task, weights, first)
            return dataset.drawn(weights, task.number, first, task.prompts)
        went_on = [dataset.indices(c.position, 1) for c in task.cut]
        return np.concatenate([*went_on, dataset.indices(task.position + first, task.prompts - len(went_on))])

    def _dataset(self, task: Task) -> Dataset:
        evaluation = self.plan.deploy.evaluation(task.name)
        return self.data[evaluation.data if evaluation else "source"]

    @contextmanager
    def _noted(self, node: Node, where: str) -> Iterator[None]:
        """While a user's code runs that is not called for rows."""
        try:
            with self.note.at(f"{node.name}: {where}"):
                yield
        except ProcessDied as died:
            raise RunError(blame(node, died, where)) from died

    def _function(self, function: FunctionNode, task: Task, report: Report) -> None:
        node = function.node
        last = False
        while not last:
            waiting = time.perf_counter()
            batch = self.client.take(node.name, task, self.host, at_once=True)
            report.add("wait", waiting)
            last = batch.share.last
            if not len(batch.rows):
                continue
            log.at(f"{node.name} in {task.key}")
            # With a `capacity` all of a share has one place, whoever writes it again after a death.
            often = math.inf if self.client.way.capacity else OFTEN
            parts = list[Results]()
            with report.phase(node.name):
                for part in function.parts(batch, task, often):
                    parts.append(part)
                    if not part.last:
                        self.client.put(node.name, task, part.columns)
                        if not part.columns:
                            self.client.did(node.name, task, part.rows)
            made = Results.joined(parts)
            for figure, amount in told().items():
                report.count(figure, amount, 0)
            for where, (failure, size) in made.failed.items():
                report.count(f"{node.name}/failed", size, 0)
                report.count(f"{node.name}/failed/{failure.reason}", size, 0)
                first = report.failed.setdefault(node.name, {})
                first.setdefault(failure.reason, f"{where}: {failure.told.reason}")
            known = function.spoilt(batch)
            for name, piece in made.columns.items():
                rows = piece.rows
                column = piece.column
                if isinstance(piece, Verdicts):
                    self._kept(function, task, piece, report)
                    continue
                spoilt = known if len(rows) == len(known) else None
                self.watch.results(node, task, report, name, rows, column, spoilt)
                if column.offsets is None and column.values.dtype.kind == "f":
                    self.means.count(report, node, task, name, rows, column.values)
            for name, found in made.states.items():
                reader = self.readers[node.name]
                all_ = report.states.setdefault(name, NextValues())
                units = found.units
                if not reader.whole:  # a prompt that a filter repeats is the same row of the data
                    units = reader.numbers(task).above(np.asarray(units, np.int64), reader.unit, 0).tolist()
                all_.units += units
                all_.values += found.values
            self.client.put(node.name, task, parts[-1].columns, asks=True)
            if not made.columns:
                self.client.did(node.name, task, parts[-1].rows)

    def _kept(self, function: FunctionNode, task: Task, verdicts: Verdicts, report: Report) -> None:
        """Counts what a filter lets pass."""
        times = verdicts.column.values
        report.count(f"kept/{function.node.name}", float(times.sum()), len(times))
        if CallAttributes.of(function.node).select is not None:
            report.count(f"distinct/{function.node.name}", float((times > 0).sum()), len(times))
        if self.refilling is not None and function.sieve == self.refilling:
            reader = self.readers[function.node.name]
            prompts = reader.numbers(task).above(verdicts.rows[times > 0], reader.rows, 0)
            report.count("prompts_kept", len(np.unique(prompts)), 0)
