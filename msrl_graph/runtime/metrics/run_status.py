"""Status of a run in progress: the same facts for terminal, page and Prometheus.

A watcher is the panel on the terminal, an open web page, or Prometheus. A task is one iteration of training, or one
evaluation.

Invariant: the driver queries the docks for these facts only when a watcher requests facts (`wanted`). So a run without
watchers sends no such queries. Any thread may request facts. Only the driver's thread reports facts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...analysis.rowsets import rowsets
from ...emit.picture import colours
from ...ir.plan import Plan
from ..dock.messages import Status
from ..process.task import Task, row_numbers
from ..process.task_report import Report

EVERY = 0.5  # seconds between two looks at the docks, at least
SAID = 30  # messages that are kept
POINTS = 1000  # most points of a curve
WAYS = (" get away", " get here", " get", " put")  # endings of metrics: what was done with rows


@dataclass(frozen=True)
class NodeStatus:
    """Progress of a worker state in the current task, in rows.

    The counted rows are the rows that the worker state writes. If the worker state writes no rows, the rows that it
    reads are counted.

    - `colour`: the number of a color, or None. The plan's picture uses this color for the worker state's pool.
    - `handed`: the number of rows whose input was handed to the worker state.
    - `of`: the number of the task's rows that the docks know of. If the worker state reads the rows in several epochs,
      a row counts once per epoch.
    - `done`: the number of rows that the worker state has finished.
    """

    node: str
    colour: int | None
    handed: int
    of: int
    done: int
    runs: bool


@dataclass(frozen=True)
class Process:
    name: str
    memory: int  # resident bytes, 0: not known
    does: str
    seconds: float  # for how long


@dataclass(frozen=True)
class HostStatus:
    """Memory and processes of a host.

    `held` is the number of bytes that the rows in the host's warehouse use; None if the host has no warehouse. `used`
    and `total` are the used bytes and all bytes of the host's memory.
    """

    number: int
    held: int | None
    used: int
    total: int
    processes: tuple[Process, ...]


@dataclass(frozen=True)
class Waiting:
    """A process that waits.

    `missing` describes what the process waits for. `seconds` says for how long the process has waited.
    """

    who: str
    task: str
    missing: str
    seconds: float


@dataclass(frozen=True)
class RunSnapshot:
    """Everything that is known about a run at one moment.

    - `task`: the current task, which has been in progress for `seconds`.
    - `phase`: what the run does at this moment.
    - `figures`: the main figures of the last iteration.
    - `curves`: the names of the metrics that have curves.
    - `ended`: how the attempt ended; "" while the attempt runs.
    """

    name: str
    total: int
    done: int
    restarts: int
    elapsed: float
    task: str
    seconds: float
    phase: str
    figures: tuple[tuple[str, str], ...]
    states: tuple[NodeStatus, ...]
    hosts: tuple[HostStatus, ...]
    waits: tuple[Waiting, ...]
    said: tuple[tuple[float, str], ...]  # seconds since the epoch, and text
    curves: tuple[str, ...]
    ended: str
    reason: str


def figures(line: Mapping[str, Any], scalars: Sequence[str]) -> list[tuple[str, str]]:
    """Return the main figures of an iteration, as pairs of name and text.

    `scalars` are the columns whose means are shown.
    """
    shown = [(name, f"{line[name]:.3f}") for name in scalars if name in line]
    # How far the policy is from the reference, or else from the policy that drew the tokens.
    kl = next((candidate for candidate in ("loss/kl", "clip/kl") if candidate in line), "")
    for name, key in (("loss", "loss"), ("kl", kl), ("grad_norm", "grad_norm"), ("length", "response_length")):
        # With several updates the line has a figure of each, `NODE/loss`, and one of all updates, which says little.
        keys = [metric for metric in line if metric.endswith(f".update/{key}")]
        name = key if name in scalars else name  # the program has a column of that name
        for label, source in [(f"{name} {metric.partition('.')[0]}", metric) for metric in keys] or [(name, key)]:
            shown += [(label, f"{line[source]:.3g}")] if source in line else []
    return [*shown, ("tokens/s", f"{line['tokens_per_second']:,.0f}"), ("s", f"{line['seconds']:.2f}")]


class RunFacts:
    """Facts of a run, which the driver reports and watchers read.

    `restarts` counts restarts of the run and of its processes. The field `elapsed` of a snapshot is the time since the
    start of the attempt.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.total = plan.deploy.run.iterations
        self.scalars = [column.name for column in plan.graph.columns if column.element == "f32" and not column.dims]
        pool_colours = colours(plan)
        self._colours = {node.name: pool_colours.get(plan.placement(node.name).pool) for node in plan.graph.nodes}
        self._changed = threading.Condition()
        self.attempt_ended = threading.Event()
        self.started = time.monotonic()
        self.restarts: Counter[str] = Counter()  # by what was restarted
        self.done = 0
        self.phase = "starting"
        self.ended = ""
        self.reason = ""
        self.task = ""
        self._since = time.monotonic()
        self.said: deque[tuple[float, str]] = deque(maxlen=SAID)
        self.lines: list[dict[str, Any]] = []  # of metrics.jsonl
        self.evaluations: list[dict[str, Any]] = []
        self.figures: list[tuple[str, str]] = []
        self.totals: Counter[tuple[str, ...]] = Counter()  # since this attempt began, by kind and labels
        self._rows = rowsets(plan.graph)
        self._fans: dict[str, float] = {}  # by node, rows that it makes from one row that it is handed
        self._states: tuple[NodeStatus, ...] = ()
        self._hosts: tuple[HostStatus, ...] = ()
        self._waits: tuple[Waiting, ...] = ()
        self._docks: dict[int, int] = {}  # by host, the process id of its dock
        self._asked = False
        self._looked = 0.0
        self._looks = 0

    # Reports of the driver.

    @property
    def wanted(self) -> bool:
        """Whether a watcher waits for new data from the docks."""
        return self._asked and time.monotonic() - self._looked >= EVERY

    def begin(self, task: Task) -> None:
        """Record that the ranks have begun a task."""
        self.task = task.key
        self._since = time.monotonic()
        rows = self._rows
        size = row_numbers(self._rows.sets, self._rows.refilling, task).size
        written_sets = {
            row_node.name: [rows.columns[column] for column in row_node.writes if column in rows.columns]
            for row_node in self.plan.graph.nodes
        }
        self._fans = {
            node: size[max(sets, key=lambda row_set: size[row_set])] / size[rows.nodes[node]]
            for node, sets in written_sets.items()
            if sets
        }
        self._states = tuple(
            NodeStatus(node_name, colour, 0, 0, 0, False) for node_name, colour in self._colours.items()
        )

    def set_lines(self, lines: Iterable[dict[str, Any]]) -> None:
        """Set the lines of metrics.jsonl that were written before."""
        self.lines = []
        self.evaluations = []
        for line in lines:
            (self.evaluations if "evaluation" in line else self.lines).append(line)

    def add(self, line: dict[str, Any]) -> None:
        """Add a new line of metrics.jsonl."""
        if "evaluation" in line:
            self.evaluations.append(line)
            return
        self.lines.append(line)
        self.done = line["iteration"] + 1
        self.figures = figures(line, self.scalars)
        self.totals["iterations",] += 1
        for kind in ("prompt", "response"):
            self.totals["tokens", kind] += line.get(f"{kind}_tokens", 0)
        self.totals["rows",] += line.get("rows", 0)
        self.totals["messages",] += line.get("dock_messages", 0)
        for move, size in line.get("dock_bytes", {}).items():
            way = next(candidate for candidate in WAYS if move.endswith(candidate))
            self.totals["moved", move.removesuffix(way), way.strip()] += size

    def count_waits(self, reports: Sequence[Report]) -> None:
        """Add the times that processes waited for rows."""
        for report in reports:
            waited = report.seconds.get("dock wait", 0.0) + report.seconds.get("wait", 0.0)
            self.totals["waited", report.process] += waited  # type: ignore[assignment]

    def look(self, statuses: Sequence[Status]) -> None:
        """Store the statuses of all docks, which answered the same query.

        If the query asked a dock for details, the dock's status also has rows, memory and processes.
        """
        doing = {name: activity for status in statuses for name, activity in status.doing.items()}
        seen = [status.snapshot for status in statuses if status.snapshot is not None]
        self._waits = tuple(
            Waiting(wait.who, wait.key, wait.missing, wait.seconds)
            for wait in sorted((wait for status in statuses for wait in status.waits), key=lambda wait: -wait.seconds)
        )
        if not seen:
            return
        steps = {name: activity.activity.removesuffix(f" in {self.task}") for name, activity in doing.items()}
        ours = [steps[name] for name, activity in doing.items() if activity.activity != steps[name]]
        rows = {name: counts for summary in seen for name, counts in summary.rows.get(self.task, {}).items()}
        done: Counter[str] = Counter()
        for summary in seen:
            done.update(summary.done.get(self.task, {}))
        states = []
        for node, colour in self._colours.items():
            fan = self._fans.get(node, 1)
            handed, known = (round(fan * count) for count in rows.get(node, (0, 0)))
            if node not in rows:  # the source is handed nothing
                handed = known = done[node]
            runs = (node in ours or f"RUN {node}" in ours) and not done[node] >= known > 0
            states.append(NodeStatus(node, colour, handed, known, done[node], runs))
        hosts = []
        for summary in seen:
            names = dict.fromkeys(
                [
                    *summary.memory,
                    *(
                        process_name
                        for status in statuses
                        if status.snapshot is summary
                        for process_name in status.doing
                    ),
                ]
            )
            processes = tuple(
                Process(
                    process_name,
                    summary.memory.get(process_name, 0),
                    str(doing[process_name]),
                    doing[process_name].seconds,
                )
                if process_name in doing
                else Process(process_name, summary.memory.get(process_name, 0), "", 0.0)
                for process_name in sorted(names, key=_sort_key)
            )
            hosts.append(HostStatus(summary.host, summary.row_bytes, summary.used, summary.total, processes))
            if self._docks.setdefault(summary.host, summary.pid) != summary.pid:
                self._docks[summary.host] = summary.pid
                self.restarts[f"dock of host {summary.host}"] += 1
        with self._changed:
            self._states = tuple(states)
            self._hosts = tuple(hosts)
            working = dict.fromkeys(step.removeprefix("RUN ") for step in ours if step.startswith(("RUN ", "RESHARD ")))
            self.phase = ", ".join(step.replace("RESHARD ", "resharding to ") for step in working) or self.phase
            self._asked = False
            self._looked = time.monotonic()
            self._looks = self._looks + 1
            self._changed.notify_all()

    def end(self, kind: str, reason: str) -> None:
        """Record how (`kind`) and why (`reason`) the attempt ended."""
        if kind == "done":
            self._waits = ()
        self._states = tuple(replace(state, runs=False) for state in self._states)
        self.ended = kind
        self.reason = reason
        self.attempt_ended.set()

    # Requests of watchers.

    def now(self) -> RunSnapshot:
        """Return a snapshot of the known facts, and request new data from the docks."""
        self._asked = True
        return RunSnapshot(
            name=self.plan.deploy.name,
            total=self.total,
            done=self.done,
            restarts=self.restarts["run"],
            elapsed=time.monotonic() - self.started,
            task=self.task,
            seconds=time.monotonic() - self._since,
            phase=self.phase,
            figures=tuple(self.figures),
            states=self._states,
            hosts=self._hosts,
            waits=self._waits,
            said=tuple(self.said),
            curves=self.curves(),
            ended=self.ended,
            reason=self.reason,
        )

    def fresh(self, patience: float) -> RunSnapshot:
        """Request new data from the docks; return a snapshot when the docks have answered.

        Waits at most `patience` seconds for the answers.
        """
        with self._changed:
            self._asked = True
            before = self._looks
            self._changed.wait_for(lambda: self._looks != before or self.attempt_ended.is_set(), patience)
        return self.now()

    def curves(self) -> tuple[str, ...]:
        """Return the names of the metrics that have curves."""
        last = self.lines[-1] if self.lines else {}
        return tuple(
            key for key, value in last.items() if isinstance(value, int | float) and key not in ("iteration", "prompts")
        )

    def curve(self, key: str) -> dict[str, Any]:
        """Return the curve of a metric, in two lists.

        - `points` has pairs: the number of finished iterations, and the metric's value. If there are more than POINTS
          values, each point is the mean of several neighboring values.
        - `evaluations` has triples: the evaluation, the number of finished iterations, and the metric's value.
        """
        points = [
            (line["iteration"] + 1, line[key]) for line in list(self.lines) if isinstance(line.get(key), int | float)
        ]
        step = -(-len(points) // POINTS) or 1
        chunks = [points[i : i + step] for i in range(0, len(points), step)]
        means = [(chunk[-1][0], sum(value for _, value in chunk) / len(chunk)) for chunk in chunks]
        evaluations = [
            (evaluation["evaluation"], evaluation["after_iterations"], evaluation[key])
            for evaluation in list(self.evaluations)
            if key in evaluation
        ]
        return {"points": means, "evaluations": evaluations}


def _sort_key(name: str) -> tuple[str, int]:
    """Return a sort key for a process's name; the keys order ranks by their numbers."""
    kind, _, number = name.rpartition(" ")
    return kind, int(number) if number.isdecimal() else 0
