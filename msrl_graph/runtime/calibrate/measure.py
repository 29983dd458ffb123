"""Measurement of this machine, in Ray processes like the processes of a run.

A probe is a timed operation (probes.py). The measurement runs the probes with several numbers of ranks. All ranks run
the same probe at the same time. In each round, all probes run once with each number of ranks.

Invariant: the measured code is the code that a run calls, in the environment of a run: ranks are Ray actors, and rows
go through a dock with real controllers and warehouses. When the measurement ends or is killed, none of its processes
and temporary folders remains (processes.py).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import ray
import torch
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from ...hardware import calibration
from ...hardware.calibration import VERSION, BusyRates, Calibration, this_machine
from ...hardware.cluster import Curve
from ...hardware.device_kinds import HOST
from ...ir.plan import Plan, from_json
from ...trackers import TrackedRun, find_tracker
from ..data.columns import ColumnData, ColumnRows, ragged
from ..data.numerics import sampled_columns
from ..dock.client import Client
from ..dock.host import DockHost
from ..dock.messages import Batch, Share
from ..dock.readers import list_members, list_node_reads
from ..dock.segments import room_name
from ..functions.function_node import FunctionNode
from ..metrics.recorder import Recorder
from ..process import compute_setup
from ..process.cluster_join import job_config, without_idle_servers
from ..process.processes import RAY, Temporary, worker_niceness
from ..process.run_key import make_ray_key
from ..process.start_variables import MARK, own_ray, waits
from ..process.task import Task
from ..process.task_report import Event, Report
from . import probes

PACKAGES = ("torch", "ray", "transformers")
LIMIT = 600.0  # seconds after which the measurement is given up
ROUNDS = 3
WARM = 3  # iterations of the dock before measuring
TASKS = 25  # iterations of the dock that are measured


def measure(plan: Plan, path: Path, rounds: int = ROUNDS, most: int = 0) -> None:
    """Measure this machine and write the figures to `path`.

    `plan` is a small plan. The measurement runs the dock of this plan and one of the plan's Python functions. `rounds`
    is the number of times that all probes run. `most` is the largest number of ranks that run at the same time. If
    `most` is 0, this number is twice the number of cores. Raises CalibrationError.
    """
    with closing(Temporary()) as temporary:
        folder = temporary.folder
        (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
        log = folder / "log"
        command = [
            sys.executable,
            "-P",
            "-m",
            "msrl_graph.runtime.calibrate.measure",
            str(folder),
            str(path.absolute()),
            str(rounds),
            str(most),
        ]
        environment = {**os.environ, **own_ray(), **make_ray_key(folder), MARK: str(folder), "TMPDIR": str(folder)}
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
            )
        temporary.end_session_too(child.pid)
        try:
            status = child.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise CalibrationError(f"it did not end within {LIMIT:.0f} s") from None
        if status:
            lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            raise CalibrationError(lines[-1] if lines else f"it ended with status {status}")


class CalibrationError(Exception):
    """Failure of a measurement; the message is for the user."""


@ray.remote
class RateProber:
    """A rank process that only runs probes (timed operations)."""

    def __init__(self, threads: int) -> None:
        compute_setup.prepare_process(threads)
        self.store: Any = None

    def address(self) -> int:
        self.store = compute_setup.open_store("127.0.0.1")
        return int(self.store.port)

    def join(self, port: int, rank: int, world: int) -> None:
        store = self.store or TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(HOST.backends(), store=store, rank=rank, world_size=world)

    def probe(self, world: int) -> BusyRates:
        """Run all probes once; `world` ranks begin each probe together."""

        def together(action: Callable[[], Any]) -> Any:
            dist.barrier()
            return action()

        curves: dict[str, Curve] = {}
        for name, dtype in probes.DTYPES.items():
            curves[name] = tuple(together(lambda dtype=dtype: probes.matrix(dtype)))  # type: ignore[misc]
        curves["memory_bandwidth"] = tuple(together(probes.memory))
        curves["layer"] = tuple(together(probes.layer))
        curves["attention"] = tuple(together(probes.attention))
        launch = together(probes.launch)
        row = together(probes.row)
        copy = together(probes.copy)
        kinds = together(lambda: probes.collectives(world)) if world > 1 else {}
        return BusyRates(torch.get_num_threads(), launch, row, copy, curves, kinds)


def median_rates(rates: list[BusyRates]) -> BusyRates:
    """Return the median of each figure over ranks and rounds."""
    first = rates[0]
    return BusyRates(
        threads=first.threads,
        launch=statistics.median(rate.launch for rate in rates),
        row=statistics.median(rate.row for rate in rates),
        copy=statistics.median(rate.copy for rate in rates),
        curves={
            name: tuple(
                (size, statistics.median(rate.curves[name][index][1] for rate in rates))
                for index, (size, _) in enumerate(curve)
            )
            for name, curve in first.curves.items()
        },
        collectives={
            name: (
                statistics.median(rate.collectives[name][0] for rate in rates),
                statistics.median(rate.collectives[name][1] for rate in rates),
            )
            for name in first.collectives
        },
    )


def spread(rates: list[BusyRates]) -> list[float]:
    """Return the relative spread of each rate over ranks and rounds.

    Each rate has several measured values. The relative distance of each value from the median of the values is
    computed. The spread is the median of these distances.
    """
    series = [[rate.launch for rate in rates]]
    series += [
        [rate.curves[name][index][1] for rate in rates]
        for name, curve in rates[0].curves.items()
        for index in range(len(curve))
    ]
    return [statistics.median(abs(value / statistics.median(values) - 1) for value in values) for values in series]


def worlds(most: int = 0) -> list[int]:
    """Return the numbers of ranks with which the probes run.

    If `most` is 0, the numbers are the powers of two below the number of cores, the number of cores itself, and twice
    the number of cores. If `most` is positive, the result is all numbers from 1 to `most`.
    """
    cores = os.cpu_count() or 1
    return (
        sorted({min(2**k, cores) for k in range(cores.bit_length() + 1)} | {2 * cores})
        if not most
        else list(range(1, most + 1))
    )


def start_probers(world: int) -> Callable[[], list[BusyRates]]:
    """Start `world` rank processes; return a function that runs their probes.

    Each call of the returned function runs every probe once, on all ranks.
    """
    threads = max(1, (os.cpu_count() or 1) // world)
    ranks = [RateProber.options(num_cpus=0).remote(threads) for _ in range(world)]  # type: ignore[attr-defined]
    port = ray.get(ranks[0].address.remote())
    ray.get([rank.join.remote(port, index, world) for index, rank in enumerate(ranks)])
    return lambda: list(ray.get([rank.probe.remote(world) for rank in ranks]))


@dataclass(frozen=True)
class DockTimings:
    """Seconds that the operations of the dock take.

    - `handover`: the time from the moment at which a node writes rows to the moment at which the next node has the
      rows.
    - `share`: the processor time that the dock's own processes take for one share of rows. The processor time of the
      processes that write and read the rows is not counted.
    - `turn`: the time to start and end an iteration, including the driver's bookkeeping.
    """

    handover: float
    share: float
    turn: float


def measure_dock(plan: Plan, folder: Path) -> DockTimings:
    dock_readers = list_node_reads(plan)
    host_class = cast(Any, DockHost)
    (member,), routes = list_members(plan, dock_readers)
    size = 8 * sum(plan.graph.column_bytes.values())
    host = host_class.options(name=member.name).remote(
        [member], 0, dock_readers, 60.0, routes, room_name(folder.name, 0), size
    )
    writer, reader = (Client(name, dock_readers, routes, 0) for name in ("writer", "reader"))
    prompts = plan.graph.rows[0]
    fan = plan.graph.rows[-1] // plan.graph.rows[0]
    prompt = ragged([np.ones(4, np.int32)] * prompts, np.int32)
    response = ragged([np.ones(4, np.int32)] * (prompts * fan), np.int32)
    logp = ColumnData(np.ones(len(response.values), np.float32), response.offsets)
    names_drawn = sampled_columns(plan.graph, plan.graph.node("actor.generate"))
    handovers = []
    turns = []
    start_of = 0.0
    for number in range(WARM + TASKS):
        if number == WARM:
            start_of = _processor_seconds()
        task = Task("train", number, prompts)
        start = time.perf_counter()
        ray.get(host.open.remote(task))
        turn = time.perf_counter() - start
        rows = np.arange(prompts * fan)
        start = time.perf_counter()
        writer.put_rows("source", task, {"prompt": ColumnRows(np.arange(prompts), prompt)})
        reader.take_share("actor.generate", task, 0)
        reader.report_activity("RUN actor.generate")  # as a rank does
        writer.put_rows(
            "actor.generate",
            task,
            dict(zip(names_drawn, (ColumnRows(rows, response), ColumnRows(rows, logp)), strict=True)),
        )
        reader.take_share("actor.infer", task, 0)
        reader.report_activity("RUN actor.infer")
        handovers.append((time.perf_counter() - start) / 2)
        start = time.perf_counter()
        for client in (writer, reader):
            client.flush(task, Report(client.process))
        ray.get(host.drop.remote(task.key))
        turns.append(turn + time.perf_counter() - start)
    spent = _processor_seconds() - start_of
    ray.kill(host)
    turn = statistics.median(turns[WARM:]) + _bookkeeping_seconds(plan, folder)
    return DockTimings(statistics.median(handovers[WARM:]), spent / TASKS / 2, turn)


def _processor_seconds() -> float:
    """Return the processor seconds of all child processes except the probing ranks."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "RateProber" not in " ".join(process.cmdline()):
                total += sum(process.cpu_times()[:2])
    return total


def _bookkeeping_seconds(plan: Plan, folder: Path) -> float:
    """Return the seconds that the driver takes to record the metrics of an iteration."""
    report = Report(
        "rank 0",
        seconds={node.name: 0.1 for node in plan.graph.nodes},
        events=[Event(node.name, 0.0, 0.1) for node in plan.graph.nodes],
    )
    for name in ("prompt_tokens", "response_tokens", "response_length", "loss", "grad_norm"):
        report.count(name, 1.0, 1.0)
    tensorboard = find_tracker("tensorboard")()
    tensorboard.begin(TrackedRun("", "", "", str(folder / "tensorboard"), {}, "", "", ""))
    recorder = Recorder(folder, plan, 0, on_line=tensorboard.add)
    return probes.seconds(lambda: recorder.training(0, 1.0, [report, report], {}, 0), 0.2)


def measure_function(plan: Plan) -> float:
    """Return the seconds per row of a Python function that reads responses.

    One call of the function gets all responses to one prompt.
    """
    node = next(candidate for candidate in plan.graph.nodes if candidate.per == "prompt")
    reader = next(candidate_reader for candidate_reader in list_node_reads(plan) if candidate_reader.node == node.name)
    called = FunctionNode(node, plan, reader)
    prompts, rows = plan.graph.rows
    response = ragged([np.ones(4, np.int32)] * rows, np.int32)
    columns = {"response": response, "reward": ColumnData(np.random.default_rng(0).random(rows, np.float32))}
    share = Share(
        np.arange(prompts), np.full(prompts, rows // prompts), np.arange(rows), {}, (), rows, rows, {}, 0, True
    )
    return probes.seconds(lambda: called(Batch(share, share.rows, columns), Task("train", 0, prompts)), 0.3) / rows


def main(folder: str, path: str, rounds: int, most: int) -> None:
    """Run the whole measurement and write the figures to `path`.

    `measure` starts a child process that calls this function. In each round, all probes run once with each number of
    ranks.
    """
    began = time.monotonic()
    plan = from_json(Path(folder, "plan.json").read_bytes())
    cores = os.cpu_count() or 1
    os.environ |= worker_niceness(0) | waits()
    with without_idle_servers(logs=False):
        ray.init(
            address="local",
            num_cpus=cores,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            job_config=job_config(),
            _temp_dir=str(Path(folder) / RAY),
        )
    # Waiting processes take no processor time, so all are started first.
    tried = {world: start_probers(world) for world in worlds(most)}
    rates: dict[int, list[BusyRates]] = {world: [] for world in tried}
    for _ in range(rounds):
        for world, probe in tried.items():
            rates[world] += probe()
    docked = measure_dock(plan, Path(folder))
    result = Calibration(
        version=VERSION,
        date=datetime.now(UTC).date().isoformat(),
        seconds=0.0,
        machine=this_machine(),
        versions={name: version(name) for name in PACKAGES},
        noise=statistics.median(value for world_rates in rates.values() for value in spread(world_rates)),
        turn=docked.turn,
        handover=docked.handover,
        share=docked.share,
        function=measure_function(plan),
        busy={world: median_rates(world_rates) for world, world_rates in rates.items()},
    )
    calibration.write(replace(result, seconds=time.monotonic() - began), Path(path))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    # Exit without disconnecting from Ray, which would take a second: the parent ends the group.
    sys.stdout.flush()
    os._exit(0)
