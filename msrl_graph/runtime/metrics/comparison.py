"""Comparison of a plan's predictions with the measurements of a run.

Invariant: each row compares one prediction of the plan with measurements of the same phase, edge or place.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from ...analysis.async_schedule import Sends, row_age_bound
from ...ir.plan import Plan
from .predicted import estimate

Row = tuple[str, str, float, float, str]  # what, unit, predicted, measured, source of the prediction
TensorBytes = Mapping[str, Mapping[str, int]]  # by rank, and by instant and place
# By phase of the estimate, the name under which a rank reports it, if that differs.
MEASURED = {"swap in (H2D)": "swap in copy", "dispatch, all sample edges": "dock move"}


def compare(plan: Plan, lines: list[dict[str, Any]], tensor_bytes: TensorBytes) -> list[Row]:
    """Return the comparison of the predictions for an iteration with the measurements.

    `lines` are the metrics lines of the iterations.

    - Measured values are medians over the iterations. If there are several iterations, the first is left out.
    - Two values measure staleness: the mean and the maximum.
    - If weights are sent only in some iterations, the measured time and bytes of sending are means over all
      iterations.
    - Seconds are predicted for rows of the measured lengths. Bytes are predicted for rows of the maximum length.
    """
    lines = lines[1:] or lines
    rows: list[Row] = []
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
    return [*rows, *_compare_memory(plan, tensor_bytes)]


def _compare_memory(plan: Plan, tensor_bytes: TensorBytes) -> list[Row]:
    """Return table rows: each phase's predicted and measured peak of tensor bytes.

    The measured value is the highest peak among the pool's ranks. More table rows compare the bytes of the host
    buffers (weights in host memory) that exist after a resharding. The result is empty if memory was not measured.
    """
    rows: list[Row] = []
    for pool in plan.pools:
        per_host = plan.cluster.devices_per_node
        ranks = [tensor_bytes.get(f"rank {pool.device(index, per_host)}", {}) for index in range(pool.devices)]
        peaks: dict[str, int] = {}
        for name, size in (item for rank_bytes in ranks for item in rank_bytes.items()):
            label, _, place = name.partition(", ")
            if label.startswith("peak of ") and place == "device":
                phase = _phase(plan, *label.removeprefix("peak of ").split(" "))
                peaks[phase] = max(size, peaks.get(phase, 0))
        where = f", {pool.name}" if len(plan.pools) > 1 else ""
        for entry in plan.memory:
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
    for edge in plan.reshards:
        key = f"before RELEASE {edge.dst}, host"
        if measured := [rank_bytes[key] for rank_bytes in tensor_bytes.values() if key in rank_bytes]:
            name = f"{edge.name}: host buffers, after"
            rows.append((name, "B", float(edge.released_bytes_per_device), float(max(measured)), "derived"))
    return rows


def _phase(plan: Plan, op: str, node: str) -> str:
    """Return the name under which the plan's memory table lists `op` on `node`."""
    return {"RESHARD": "reshard", "WAIT": "swap", "RUN": plan.graph.node(node).verb}.get(op, "")
