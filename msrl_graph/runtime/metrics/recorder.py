"""Recorder of a run's results: metrics, curve, trace, and the comparison table.

The comparison table compares predicted with measured values. Invariant: every line of metrics.jsonl is flushed when its
iteration ends. All other files can be written again from memory. Memory use grows only with the metrics, because the
trace is bounded (trace.py).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...ir.async_schedule import Sends, row_age_bound
from ...ir.evaluation import Evaluation
from ...ir.plan import Plan
from ..data import row_files
from ..process.task_report import Report
from .best import BestFigure, best_figures
from .derived import means
from .predicted import estimate
from .reward_variance import prompt_spreads
from .tensorboard import TensorBoard
from .trace import Trace

METRICS = "metrics.jsonl"  # within a run's folder
_GZIP = 31  # zlib's `wbits` of a gzip file
# By phase of the estimate, the name under which a rank reports it, if that differs.
MEASURED = {"swap in (H2D)": "swap in copy", "dispatch, all sample edges": "dock move"}
COUNTED = ("wrong/", "verify/", "failed/", "without/")  # what evaluations report next to their columns
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

    def __init__(self, folder: Path, plan: Plan, keep: int, changed: Sequence[str] = ()) -> None:
        """Keep the first `keep` lines of the metrics file, and continue after these lines.

        `changed` describes changes that were made after these lines were written, and that affect the result. The line
        of the next iteration contains `changed`.
        """
        self.folder = folder
        self.plan = plan
        self.changed = list(changed)
        self.lines: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.trace = Trace(self._label)
        self.tensor_bytes: dict[str, dict[str, int]] = {}  # by rank and instant
        path = folder / METRICS
        texts, _ = read_valid_lines(path)
        texts = texts[:keep]
        lines = [parse_line(text) for text in texts]
        for line in lines:
            (self.evaluations if "evaluation" in line else self.lines).append(line)
        row_files.prune(folder, {(line["evaluation"], line["after_iterations"]) for line in self.evaluations})
        self.written = len(texts)
        # Truncated in place, not rewritten: kept lines are never in danger.
        self._metrics = path.open("r+b" if texts else "wb")
        self._metrics.truncate(sum(map(len, texts)))
        self._metrics.seek(0, 2)
        # A copy of all lines for checkpoints, compressed as they come, not again at each checkpoint.
        self._gzip = zlib.compressobj(wbits=_GZIP)
        self._compressed = bytearray(self._gzip.compress(b"".join(texts)))
        self._tensorboard = TensorBoard(folder / "tensorboard", lines)

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
    ) -> dict[str, float]:
        """Add the metrics line of an evaluation; return its column means and `figures`.

        The means are computed over all rows of the evaluation, for each column that the evaluation reports.
        """
        values = {}
        sums = _sum_reports(reports)
        for column in evaluation.report:
            total, weight = sums.get(column, (math.nan, 1.0))
            values[column] = total / weight
        counted = {
            key: total for key, (total, _) in sorted(sums.items()) if key.startswith(COUNTED) or _counts_failures(key)
        }
        values |= figures
        line = {"evaluation": evaluation.task, "after_iterations": iteration, "seconds": seconds, **values, **counted}
        self._write(line)
        self.evaluations.append(line)
        self.trace.add(iteration, reports)
        return values

    def _write(self, line: dict[str, Any]) -> None:
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
        }  # JSON has no nan
        text = (json.dumps(finite) + "\n").encode()
        self._metrics.write(text)
        self._metrics.flush()
        self.written += 1
        self._compressed += self._gzip.compress(text)
        self._tensorboard.add(line)

    @property
    def bests(self) -> list[BestFigure]:
        """For each evaluation with the attribute `best`, its figure's best value so far."""
        return best_figures(self.plan.deploy.evaluations, self.evaluations)

    def copy(self) -> bytes:
        """Return all metrics lines written so far, as the bytes of a gzip file."""
        return bytes(self._compressed) + self._gzip.copy().flush()

    def close(self) -> None:
        """Write the trace and the curve, and close the files."""
        self._metrics.close()
        self._tensorboard.close()
        self.trace.write(self.folder / "trace.json")
        if self.lines:
            self._draw_curve()

    def _label(self, process: str) -> str:
        """Return the name of a process; the name of a rank is followed by its host."""
        rank = process.removeprefix("rank ")
        return f"{process} on host {self.plan.cluster.host(int(rank))}" if rank.isdecimal() else process

    def _draw_curve(self) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        names = [
            graph_column.name
            for graph_column in self.plan.graph.columns
            if any(graph_column.name in line for line in self.lines)
        ]
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        iterations = [line["iteration"] + 1 for line in self.lines]
        for name in names:
            axes.plot(
                iterations,
                [line.get(name, math.nan) for line in self.lines],
                linewidth=1,
                alpha=0.6,
                label=f"{name}, mean of the batch",
            )
        for evaluation in self.plan.deploy.evaluations:
            results = [result for result in self.evaluations if result["evaluation"] == evaluation.task]
            for column in evaluation.report:
                # A resumed run may report other columns than before.
                points = [(result["after_iterations"], result[column]) for result in results if column in result]
                if not points:
                    continue
                axes.plot(*zip(*points, strict=True), marker="o", linewidth=2, label=evaluation.title(column))
                for point in (points[0], points[-1]):
                    axes.annotate(f"{point[1]:.3f}", point, textcoords="offset points", xytext=(0, 8), ha="center")
        axes.set_xlabel("iterations")
        axes.set_title(self.plan.deploy.name)
        axes.margins(y=0.15)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="lower right")
        figure.savefig(self.folder / "curve.png", dpi=120)
        pyplot.close(figure)

    def table(self) -> list[tuple[str, str, float, float, str]]:
        """Return the comparison table as (what, unit, predicted, measured, source).

        - Measured values are medians over the iterations. If there are several iterations, the first is left out.
        - Two values measure staleness: the mean and the maximum.
        - If weights are sent only in some iterations, the measured time and bytes of sending are means over all
          iterations.
        - Seconds are predicted for rows of the measured lengths. Bytes are predicted for rows of the maximum length.
        """
        plan = self.plan
        lines = self.lines[1:] or self.lines
        rows: list[tuple[str, str, float, float, str]] = []
        if plan.estimate is None or not lines:
            return rows
        prediction = estimate(plan, lines) or plan.estimate
        sends = Sends(plan)
        for phase in prediction.phases:
            measured = [line["phases"].get(MEASURED.get(phase.name, phase.name)) for line in lines]
            known = [value for value in measured if value is not None]
            if known:
                took = statistics.median(known)
                if sends.sparse and phase.name == "reshard":
                    took = sum(known) / len(lines)
                rows.append((phase.name, "s", phase.seconds.value, took, phase.seconds.source))
        total = prediction.iteration_seconds
        rows.append(("iteration", "s", total.value, statistics.median(line["seconds"] for line in lines), total.source))
        if bound := row_age_bound(plan):
            ages = {
                name: [age for line in lines for key, age in line.items() if key.rpartition("/")[2] == name]
                for name in ("staleness", "staleness_max")
            }
            if prediction.staleness is not None and not any(node.cuts for node in plan.graph.nodes):
                # `partial` makes rows older than the weights that generate; only a simulation knows by how much.
                mean = statistics.fmean(ages["staleness"])
                rows.append(("staleness", "versions", prediction.staleness.mean.value, mean, total.source))
            if ages["staleness_max"]:  # a replayed run with `partial` does not know its rows' ages
                rows.append(("staleness, at most", "versions", bound, max(ages["staleness_max"]), "derived"))
        for edge in plan.reshards:
            key = f"{edge.dst}/reshard_bytes" if len(plan.reshards) > 1 else "reshard_bytes"
            received = [line[key] for line in lines]
            ends = (edge.src, edge.dst)
            share = 1.0
            typical = statistics.median(received)
            if ends in sends.sparse:
                share = sends.share(ends)
                typical = statistics.fmean(received)
            rows.append(
                (f"{edge.name}, received a device", "B", edge.received_bytes_per_device * share, typical, "derived")
            )
        predicted: dict[str, float] = {}
        for entry in plan.traffic:
            predicted[entry.dst] = predicted.get(entry.dst, 0) + entry.bytes
        for node, size in predicted.items():
            got = [
                sum(
                    moved
                    for name, moved in line["dock_bytes"].items()
                    if name in (f"{node} get", f"{node} get away", f"{node} get here")
                )
                for line in lines
            ]
            rows.append((f"dock -> {node}", "B", size, statistics.median(got), "derived, at the columns' bounds"))
        return [*rows, *self._memory_table()]

    def _memory_table(self) -> list[tuple[str, str, float, float, str]]:
        """Return table rows: each phase's predicted and measured peak of tensor bytes.

        The measured value is the highest peak among the pool's ranks. More table rows compare the bytes of the host
        buffers (weights in host memory) that exist after a resharding. The result is empty if memory was not measured.
        """
        rows = []
        for pool in self.plan.pools:
            per_host = self.plan.cluster.devices_per_node
            ranks = [self.tensor_bytes.get(f"rank {pool.device(index, per_host)}", {}) for index in range(pool.devices)]
            peaks: dict[str, int] = {}
            for name, size in (item for rank_bytes in ranks for item in rank_bytes.items()):
                label, _, place = name.partition(", ")
                if label.startswith("peak of ") and place == "device":
                    phase = self._phase(*label.removeprefix("peak of ").split(" "))
                    peaks[phase] = max(size, peaks.get(phase, 0))
            where = f", {pool.name}" if len(self.plan.pools) > 1 else ""
            for entry in self.plan.memory:
                if entry.place == "device" and entry.pool == pool.name and entry.phase in peaks:
                    source = "derived, at the columns' bounds"
                    rows.append(
                        (
                            f"peak of {entry.phase}, a device{where}",
                            "B",
                            float(entry.total),
                            float(peaks[entry.phase]),
                            source,
                        )
                    )
        for edge in self.plan.reshards:
            key = f"before RELEASE {edge.dst}, host"
            if measured := [rank_bytes[key] for rank_bytes in self.tensor_bytes.values() if key in rank_bytes]:
                name = f"{edge.name}: host buffers, after"
                rows.append((name, "B", float(edge.released_bytes_per_device), float(max(measured)), "derived"))
        return rows

    def _phase(self, op: str, node: str) -> str:
        """Return the name under which the plan's memory table lists `op` on `node`."""
        return {"RESHARD": "reshard", "WAIT": "swap", "RUN": self.plan.graph.node(node).verb}.get(op, "")


def _counts_failures(key: str) -> bool:
    """Return whether a metrics key counts rows that failed.

    The key of a node other than the first generation begins with the node's name.
    """
    return key == "failed" or key.endswith("/failed") or "/failed/" in key


def parse_line(text: str | bytes) -> dict[str, Any]:
    """Parse a line of metrics.jsonl; a null in the line becomes NaN."""
    line: dict[str, Any] = json.loads(text)
    return {key: math.nan if value is None else value for key, value in line.items()}


def read_valid_lines(path: Path) -> tuple[list[bytes], str]:
    """Return a metrics file's lines before the first damaged line, and the damage.

    The damage is described in words; "" means that no line is damaged.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for i, line in enumerate(lines):
        if not _is_line(line):
            how = "damaged" if line.endswith(b"\n") else "cut"
            return lines[:i], f"line {i + 1} is {how}"
    return lines, ""


def _is_line(text: bytes) -> bool:
    try:
        return text.endswith(b"\n") and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def restore_lines(path: Path, copy: bytes) -> str:
    """Restore the metrics file from a checkpoint's copy if lines are lost or changed.

    Returns a description of the damage; "" if the file is intact. Raises OSError if the file cannot be written.
    """
    content = path.read_bytes() if path.is_file() else b""
    if content.startswith(copy):
        return ""
    old = content.splitlines(keepends=True)
    new = copy.splitlines(keepends=True)
    same = next(
        (index for index, (old_line, new_line) in enumerate(zip(old, new, strict=False)) if old_line != new_line),
        min(len(old), len(new)),
    )
    damage = f"ends after line {same} of {len(new)}" if content else "is missing"
    if not copy.startswith(content):
        damage = f"was cut or changed in line {same + 1}"
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(copy)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    return damage


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
