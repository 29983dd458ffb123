"""What a run leaves behind: metrics, curve, trace, and predicted against measured.

Invariant: every line of metrics.jsonl is flushed when its iteration ends; all other files can be made again from what
is in memory. What is kept there grows with the metrics alone: the trace is bounded (trace.py).
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
from .reward_variance import spreads
from .tensorboard import TensorBoard
from .trace import Trace

METRICS = "metrics.jsonl"  # within a run's folder
_GZIP = 31  # zlib's `wbits` of a gzip file
# Under which name a rank reports a phase of the estimate, where it is not the same.
MEASURED = {"swap in (H2D)": "swap in copy", "dispatch, all sample edges": "dock move"}
# What a line of the metrics says of time and place. The rest of it is the same wherever and however often the run was
# begun.
COUNTED = ("wrong/", "verify/", "failed/", "without/")  # what evaluations tell beside their columns
TIMES = ("seconds", "tokens_per_second", "throughput_eq5", "phases", "dock_bytes", "dock_messages", "imbalance")


def _sums(reports: list[Report]) -> dict[str, tuple[float, float]]:
    """(sum, weight) of each metric over all processes."""
    found: dict[str, tuple[float, float]] = {}
    for report in reports:
        for name, (total, weight) in report.sums.items():
            old = found.get(name, (0.0, 0.0))
            found[name] = (old[0] + total, old[1] + weight)
    return found


class Recorder:
    """Writes into `folder`."""

    def __init__(self, folder: Path, plan: Plan, keep: int, changed: Sequence[str] = ()) -> None:
        """Goes on after the first `keep` lines of the metrics that are there. `changed`: what decides the result and
        has changed since these lines, for the next iteration's line."""
        self.folder = folder
        self.plan = plan
        self.changed = list(changed)
        self.lines: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.trace = Trace(self._placed)
        self.held: dict[str, dict[str, int]] = {}  # by rank, by instant
        path = folder / METRICS
        kept, _ = whole_lines(path)
        kept = kept[:keep]
        lines = [read(text) for text in kept]
        for line in lines:
            (self.evaluations if "evaluation" in line else self.lines).append(line)
        row_files.prune(folder, {(line["evaluation"], line["after_iterations"]) for line in self.evaluations})
        self.written = len(kept)
        # In place and cut, not written anew: what is kept is never in danger.
        self._metrics = path.open("r+b" if kept else "wb")
        self._metrics.truncate(sum(map(len, kept)))
        self._metrics.seek(0, 2)
        # A copy of all lines for checkpoints, compressed as they come, not anew at each checkpoint.
        self._gzip = zlib.compressobj(wbits=_GZIP)
        self._copied = bytearray(self._gzip.compress(b"".join(kept)))
        self._tensorboard = TensorBoard(folder / "tensorboard", lines)

    def training(
        self, iteration: int, seconds: float, reports: list[Report], moved: dict[str, int], messages: int
    ) -> dict[str, Any]:
        """Adds the metrics of one iteration and returns them."""
        line: dict[str, Any] = {"iteration": iteration, "seconds": seconds}
        line |= means(_sums(reports))
        line |= spreads(reports)
        for name, value in (peak for r in reports for peak in r.peaks.items()):
            line[name] = max(value, line.get(name, value))
        graph = self.plan.graph
        devices = self.plan.cluster.devices
        prompts = graph.rows[0]
        responses = graph.rows[-1]
        tokens = line.get("prompt_tokens", 0) + line.get("response_tokens", 0)
        bound = sum(
            graph.bound(c)
            for n in graph.verb("generate")[:1]
            for c in (*n.reads, *n.writes)
            if graph.column(c).element == "i32"
        )
        line["tokens_per_second"] = tokens / seconds
        # Eq. 5 of arXiv:2507.19017: bounds of prompt and response, a device.
        line["throughput_eq5"] = responses * bound / devices / seconds
        line["prompts"] = prompts
        line["phases"] = phases(reports)
        line["dock_bytes"] = moved
        line["dock_messages"] = messages
        line["imbalance"] = imbalances(reports)
        edges = self.plan.reshards
        line["reshard_bytes"] = max((sum(r.bytes.get(e.name, 0) for e in edges) for r in reports), default=0)
        if len(edges) > 1:
            line |= {f"{e.dst}/reshard_bytes": max((r.bytes.get(e.name, 0) for r in reports), default=0) for e in edges}
        if self.changed:
            line["changed"] = self.changed
            self.changed = []
        self._write(line)
        self.lines.append(line)
        self.trace.add(iteration, reports)
        return line

    def memory(self, reports: list[Report]) -> None:
        """Keeps what live tensors took on each rank, before and after every instruction."""
        self.held = {r.process: r.bytes for r in reports if r.process.startswith("rank")}
        (self.folder / "memory.json").write_text(json.dumps(self.held, indent=2))

    def evaluation(
        self,
        evaluation: Evaluation,
        iteration: int,
        seconds: float,
        reports: list[Report],
        figures: Mapping[str, float],
    ) -> dict[str, float]:
        """Adds the means of the reported columns over all of the data, and the `figures` that come with them."""
        found = {}
        sums = _sums(reports)
        for column in evaluation.report:
            total, weight = sums.get(column, (math.nan, 1.0))
            found[column] = total / weight
        counted = {key: total for key, (total, _) in sorted(sums.items()) if key.startswith(COUNTED) or _failed(key)}
        found |= figures
        line = {"evaluation": evaluation.task, "after_iterations": iteration, "seconds": seconds, **found, **counted}
        self._write(line)
        self.evaluations.append(line)
        self.trace.add(iteration, reports)
        return found

    def _write(self, line: dict[str, Any]) -> None:
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()
        }  # JSON has no nan
        text = (json.dumps(finite) + "\n").encode()
        self._metrics.write(text)
        self._metrics.flush()
        self.written += 1
        self._copied += self._gzip.compress(text)
        self._tensorboard.add(line)

    @property
    def bests(self) -> list[BestFigure]:
        """The best figures so far, of evaluations that state `best`."""
        return best_figures(self.plan.deploy.evaluations, self.evaluations)

    def copy(self) -> bytes:
        """All lines so far, as a gzip file's bytes."""
        return bytes(self._copied) + self._gzip.copy().flush()

    def close(self) -> None:
        """Writes trace and curve."""
        self._metrics.close()
        self._tensorboard.close()
        self.trace.write(self.folder / "trace.json")
        if self.lines:
            self._curve()

    def _placed(self, process: str) -> str:
        """A process's name, with its host where that does not say it."""
        rank = process.removeprefix("rank ")
        return f"{process} on host {self.plan.cluster.host(int(rank))}" if rank.isdecimal() else process

    def _curve(self) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        names = [c.name for c in self.plan.graph.columns if any(c.name in line for line in self.lines)]
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        x = [line["iteration"] + 1 for line in self.lines]
        for name in names:
            axes.plot(
                x,
                [line.get(name, math.nan) for line in self.lines],
                linewidth=1,
                alpha=0.6,
                label=f"{name}, mean of the batch",
            )
        for evaluation in self.plan.deploy.evaluations:
            some = [e for e in self.evaluations if e["evaluation"] == evaluation.task]
            for column in evaluation.report:
                # A run that is resumed may report others than it did.
                at = [(e["after_iterations"], e[column]) for e in some if column in e]
                if not at:
                    continue
                axes.plot(*zip(*at, strict=True), marker="o", linewidth=2, label=evaluation.title(column))
                for point in (at[0], at[-1]):
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
        """Predicted against measured, line by line: (what, unit, predicted, measured, source).

        Measured are medians over the iterations, without the first where there are several; of staleness the mean and
        the most, and of weights that are not sent each time the mean. Seconds are predicted for rows as long as they
        were, bytes for rows at their bounds.
        """
        plan = self.plan
        lines = self.lines[1:] or self.lines
        rows: list[tuple[str, str, float, float, str]] = []
        if plan.estimate is None or not lines:
            return rows
        found = estimate(plan, lines) or plan.estimate
        sends = Sends(plan)
        for phase in found.phases:
            measured = [line["phases"].get(MEASURED.get(phase.name, phase.name)) for line in lines]
            known = [m for m in measured if m is not None]
            if known:
                took = statistics.median(known)
                if sends.sparse and phase.name == "reshard":
                    took = sum(known) / len(lines)
                rows.append((phase.name, "s", phase.seconds.value, took, phase.seconds.source))
        whole = found.iteration_seconds
        rows.append(("iteration", "s", whole.value, statistics.median(x["seconds"] for x in lines), whole.source))
        if bound := row_age_bound(plan):
            ages = {
                name: [v for line in lines for key, v in line.items() if key.rpartition("/")[2] == name]
                for name in ("staleness", "staleness_max")
            }
            if found.staleness is not None and not any(node.cuts for node in plan.graph.nodes):
                # `partial` makes rows older than the weights that generate, by as much as only a simulation knows.
                mean = statistics.fmean(ages["staleness"])
                rows.append(("staleness", "versions", found.staleness.mean.value, mean, whole.source))
            if ages["staleness_max"]:  # a replayed run with `partial` does not know its rows' ages
                rows.append(("staleness, at most", "versions", bound, max(ages["staleness_max"]), "derived"))
        for edge in plan.reshards:
            key = f"{edge.dst}/reshard_bytes" if len(plan.reshards) > 1 else "reshard_bytes"
            received = [x[key] for x in lines]
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
        for t in plan.traffic:
            predicted[t.dst] = predicted.get(t.dst, 0) + t.bytes
        for node, size in predicted.items():
            got = [
                sum(
                    v
                    for k, v in line["dock_bytes"].items()
                    if k in (f"{node} get", f"{node} get away", f"{node} get here")
                )
                for line in lines
            ]
            rows.append((f"dock -> {node}", "B", size, statistics.median(got), "derived, at the columns' bounds"))
        return [*rows, *self._memory()]

    def _memory(self) -> list[tuple[str, str, float, float, str]]:
        """Tensors of each pool's busiest rank at the peak of each phase, if they were measured, and what a resharding
        left on the host."""
        found = []
        for pool in self.plan.pools:
            per_host = self.plan.cluster.devices_per_node
            ranks = [self.held.get(f"rank {pool.device(r, per_host)}", {}) for r in range(pool.devices)]
            peaks: dict[str, int] = {}
            for name, size in (item for held in ranks for item in held.items()):
                what, _, place = name.partition(", ")
                if what.startswith("peak of ") and place == "device":
                    phase = self._phase(*what.removeprefix("peak of ").split(" "))
                    peaks[phase] = max(size, peaks.get(phase, 0))
            where = f", {pool.name}" if len(self.plan.pools) > 1 else ""
            for m in self.plan.memory:
                if m.place == "device" and m.pool == pool.name and m.phase in peaks:
                    source = "derived, at the columns' bounds"
                    found.append(
                        (f"peak of {m.phase}, a device{where}", "B", float(m.total), float(peaks[m.phase]), source)
                    )
        for edge in self.plan.reshards:
            key = f"before RELEASE {edge.dst}, host"
            if measured := [held[key] for held in self.held.values() if key in held]:
                name = f"{edge.name}: host buffers, after"
                found.append((name, "B", float(edge.released_bytes_per_device), float(max(measured)), "derived"))
        return found

    def _phase(self, op: str, node: str) -> str:
        """The plan's name for what an instruction does."""
        return {"RESHARD": "reshard", "WAIT": "swap", "RUN": self.plan.graph.node(node).verb}.get(op, "")


def _failed(key: str) -> bool:
    """Whether a figure counts rows that failed; of a node that is not the first generation its name stands before."""
    return key == "failed" or key.endswith("/failed") or "/failed/" in key


def read(text: str | bytes) -> dict[str, Any]:
    """A line of metrics.jsonl; JSON has no nan, so null stands for it."""
    line: dict[str, Any] = json.loads(text)
    return {k: math.nan if v is None else v for k, v in line.items()}


def whole_lines(path: Path) -> tuple[list[bytes], str]:
    """The lines of a run's metrics up to the first one that is cut or damaged, and which one that is, in words."""
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


def restore(path: Path, copy: bytes) -> str:
    """Puts back the lines of a run's metrics that a checkpoint has a copy of, where they are not there as they were
    written; what was wrong, in words, "" where nothing was. OSError where they cannot be written."""
    there = path.read_bytes() if path.is_file() else b""
    if there.startswith(copy):
        return ""
    old = there.splitlines(keepends=True)
    new = copy.splitlines(keepends=True)
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    wrong = f"ends after line {same} of {len(new)}" if there else "is missing"
    if not copy.startswith(there):
        wrong = f"was cut or changed in line {same + 1}"
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(copy)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    return wrong


def imbalances(reports: list[Report]) -> dict[str, float]:
    """By node that several processes compute: the tokens of the longest share of each round, over those of the mean
    one, over all rounds."""
    found: dict[str, float] = {}
    for node in sorted({node for report in reports for node in report.loads}):
        rounds = [*zip(*(report.loads[node] for report in reports if node in report.loads), strict=False)]
        if rounds and len(rounds[0]) > 1 and any(map(any, rounds)):
            found[node] = sum(map(max, rounds)) / sum(map(statistics.fmean, rounds))
    return found


def phases(reports: list[Report]) -> dict[str, float]:
    """Seconds of each phase: the slowest process's."""
    found: dict[str, float] = {}
    for report in reports:
        for name, seconds in report.seconds.items():
            found[name] = max(found.get(name, 0.0), seconds)
    return found
