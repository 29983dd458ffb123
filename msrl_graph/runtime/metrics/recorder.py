"""Recorder of a run's results: metrics, curve and trace.

Invariant: a line is in metrics.jsonl before anything else gets it (metrics_file.py). All other files can be written
again from memory. Memory use grows only with the metrics, because the trace is bounded (trace.py).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...ir.evaluation import Evaluation
from ...ir.plan import Plan
from ..data import row_files
from ..process.task_report import Report
from .best import BestFigure, best_figures
from .comparison import Row, compare
from .curve import draw_curve
from .derived import means
from .metrics_file import METRICS, MetricsFile
from .reward_variance import prompt_spreads
from .trace import Trace

COUNTED = ("wrong/", "verify/", "failed/", "without/")  # what evaluations report next to their figures
EVALUATED = ("evaluation", "after_iterations", "seconds")
# Keys of a metrics line about time and place. All other values are the same wherever the run ran, and after any number
# of restarts.
TIMES = ("seconds", "tokens_per_second", "throughput_eq5", "phases", "dock_bytes", "dock_messages", "imbalance")


def _sum_reports(reports: list[Report]) -> dict[str, tuple[float, float]]:
    """Return (sum, weight) of each metric over all processes."""
    sums: dict[str, tuple[float, float]] = {}
    for report in reports:
        for name, (total, weight) in report.sums.items():
            old = sums.get(name, (0.0, 0.0))
            sums[name] = (old[0] + total, old[1] + weight)
    return sums


class Recorder:
    """Writer of a run's metrics into `folder`."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        keep: int,
        changed: Sequence[str] = (),
        on_line: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Keep the first `keep` lines of the metrics file, and continue after these lines.

        `changed` describes changes that were made after these lines were written, and that affect the result. The line
        of the next iteration contains `changed`. `on_line` is called with each new line.
        """
        self.folder = folder
        self.plan = plan
        self.changed = list(changed)
        self.on_line = on_line
        self.file = MetricsFile(folder / METRICS, keep)
        self.lines = [line for line in self.file.lines if "evaluation" not in line]
        self.evaluations = [line for line in self.file.lines if "evaluation" in line]
        self.trace = Trace(self._label)
        self.tensor_bytes: dict[str, dict[str, int]] = {}  # by rank and instant
        row_files.prune(folder, {(line["evaluation"], line["after_iterations"]) for line in self.evaluations})

    def training(
        self, iteration: int, seconds: float, reports: list[Report], moved: dict[str, int], messages: int
    ) -> dict[str, Any]:
        """Add the metrics line of one iteration and return the line."""
        line: dict[str, Any] = {"iteration": iteration, "seconds": seconds}
        line |= means(_sum_reports(reports))
        line |= prompt_spreads(reports)
        for name, value in (peak for report in reports for peak in report.peaks.items()):
            line[name] = max(value, line.get(name, value))
        graph = self.plan.graph
        devices = self.plan.cluster.devices
        prompts = graph.rows[0]
        responses = graph.rows[-1]
        tokens = line.get("prompt_tokens", 0) + line.get("response_tokens", 0)
        bound = sum(
            graph.bound(column)
            for node in graph.verb("generate")[:1]
            for column in (*node.reads, *node.writes)
            if graph.column(column).element == "i32"
        )
        line["tokens_per_second"] = tokens / seconds
        # Eq. 5 of arXiv:2507.19017: bounds of prompt and response, per device.
        line["throughput_eq5"] = responses * bound / devices / seconds
        line["prompts"] = prompts
        line["phases"] = phases(reports)
        line["dock_bytes"] = moved
        line["dock_messages"] = messages
        line["imbalance"] = imbalances(reports)
        edges = self.plan.reshards
        line["reshard_bytes"] = max(
            (sum(report.bytes.get(edge.name, 0) for edge in edges) for report in reports), default=0
        )
        if len(edges) > 1:
            line |= {
                f"{edge.dst}/reshard_bytes": max((report.bytes.get(edge.name, 0) for report in reports), default=0)
                for edge in edges
            }
        if self.changed:
            line["changed"] = self.changed
            self.changed = []
        self._write(line)
        self.lines.append(line)
        self.trace.add(iteration, reports)
        return line

    def memory(self, reports: list[Report]) -> None:
        """Store each rank's tensor bytes before each instruction, and the peak during it."""
        self.tensor_bytes = {report.process: report.bytes for report in reports if report.process.startswith("rank")}
        (self.folder / "memory.json").write_text(json.dumps(self.tensor_bytes, indent=2))

    def evaluation(
        self,
        evaluation: Evaluation,
        iteration: int,
        seconds: float,
        reports: list[Report],
        figures: Mapping[str, float],
    ) -> None:
        """Add the metrics line of an evaluation: its column means, `figures` and counts.

        The means are computed over all rows of the evaluation, for each column that the evaluation reports.
        """
        values = {}
        sums = _sum_reports(reports)
        for column in evaluation.report:
            total, weight = sums.get(column, (math.nan, 1.0))
            values[column] = total / weight
        counted = {key: total for key, (total, _) in sorted(sums.items()) if _counts_rows(key)}
        values |= figures
        line = {"evaluation": evaluation.task, "after_iterations": iteration, "seconds": seconds, **values, **counted}
        self._write(line)
        self.evaluations.append(line)
        self.trace.add(iteration, reports)

    def _write(self, line: dict[str, Any]) -> None:
        self.file.add(line)
        if self.on_line is not None:
            self.on_line(line)

    @property
    def bests(self) -> list[BestFigure]:
        """For each evaluation with the attribute `best`, its figure's best value so far."""
        return best_figures(self.plan.deploy.evaluations, self.evaluations)

    def table(self) -> list[Row]:
        """Return the comparison of predicted with measured values."""
        return compare(self.plan, self.lines, self.tensor_bytes)

    def close(self) -> None:
        """Write the trace and the curve, and close the files."""
        self.file.close()
        self.trace.write(self.folder / "trace.json")
        if self.lines:
            draw_curve(self.plan, self.lines, self.evaluations, self.folder / "curve.png")

    def _label(self, process: str) -> str:
        """Return the name of a process; the name of a rank is followed by its host."""
        rank = process.removeprefix("rank ")
        return f"{process} on host {self.plan.cluster.host(int(rank))}" if rank.isdecimal() else process


def figures_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of an evaluation's metrics line.

    The figures are all numbers except times and counts of rows.
    """
    return {key: value for key, value in line.items() if key not in EVALUATED and not _counts_rows(key)}


def _counts_rows(key: str) -> bool:
    """Return whether a metrics key counts rows.

    The counted rows failed, or their values are missing or wrong. The key of a node other than the first generation
    begins with the node's name.
    """
    return key.startswith(COUNTED) or key == "failed" or key.endswith("/failed") or "/failed/" in key


def imbalances(reports: list[Report]) -> dict[str, float]:
    """Return the load imbalance of each node that several processes compute.

    A process computes several shares of a node's rows, one after the other. The n-th shares of all processes form the
    n-th set. The imbalance is sum A divided by sum B. Sum A adds up, over the sets, the number of tokens of the longest
    share. Sum B adds up, over the sets, the mean number of tokens per share.
    """
    ratios: dict[str, float] = {}
    for node in sorted({node for report in reports for node in report.loads}):
        rounds = [*zip(*(report.loads[node] for report in reports if node in report.loads), strict=False)]
        if rounds and len(rounds[0]) > 1 and any(map(any, rounds)):
            ratios[node] = sum(map(max, rounds)) / sum(map(statistics.fmean, rounds))
    return ratios


def phases(reports: list[Report]) -> dict[str, float]:
    """Return, for each phase, the seconds of the slowest process."""
    slowest: dict[str, float] = {}
    for report in reports:
        for name, seconds in report.seconds.items():
            slowest[name] = max(slowest.get(name, 0.0), seconds)
    return slowest
