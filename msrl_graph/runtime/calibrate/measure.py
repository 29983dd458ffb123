"""Measures this machine: as many ranks at once as it has cores, fewer and more, in processes of Ray as a run's are.

Invariant: what is measured is what a run calls, in its surroundings: ranks are actors, and rows go through a dock of
real controllers and warehouses. When it ends, or is killed, no process and no temporary folder of it is left
(processes.py).
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
from ..data.columns import ColumnData, ColumnRows, ragged
from ..data.numerics import drawn
from ..dock.client import Client
from ..dock.host import DockHost
from ..dock.messages import Batch, Share
from ..dock.readers import members, readers
from ..dock.segments import room_name
from ..functions.function_node import FunctionNode
from ..metrics.recorder import Recorder
from ..process import compute_setup
from ..process.cluster_join import job_config, own_ray
from ..process.environment import waits
from ..process.processes import MARK, RAY, Temporary, nicer
from ..process.task import Task
from ..process.task_report import Event, Report
from . import probes

PACKAGES = ("torch", "ray", "transformers")
LIMIT = 600.0  # seconds after which measuring is given up
ROUNDS = 3
WARM, TASKS = 3, 25  # iterations of the dock


def measure(plan: Plan, path: Path, rounds: int = ROUNDS, most: int = 0) -> None:
    """Measures and writes `path`. `plan` is a small one, whose dock is tried; `most` bounds the ranks at once (0: twice
    the cores). Raises CalibrationError."""
    with closing(Temporary()) as kept:
        folder = kept.folder
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
        environment = {**os.environ, **own_ray(), MARK: str(folder), "TMPDIR": str(folder)}
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
            )
        kept.ends(child.pid)
        try:
            status = child.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise CalibrationError(f"it did not end within {LIMIT:.0f} s") from None
        if status:
            lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            raise CalibrationError(lines[-1] if lines else f"it ended with status {status}")


class CalibrationError(Exception):
    """Measuring failed; the message is for the user."""


@ray.remote
class RateProber:
    """A rank that does nothing but probes."""

    def __init__(self, threads: int) -> None:
        compute_setup.prepare(threads)
        self.store: Any = None

    def address(self) -> int:
        self.store = compute_setup.meeting("127.0.0.1")
        return int(self.store.port)

    def join(self, port: int, rank: int, world: int) -> None:
        store = self.store or TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(HOST.backends(), store=store, rank=rank, world_size=world)

    def probe(self, world: int) -> BusyRates:
        """One round of all probes, each begun by all ranks together."""

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


def middle(found: list[BusyRates]) -> BusyRates:
    """Figure by figure, the median over ranks and rounds."""
    first = found[0]
    return BusyRates(
        threads=first.threads,
        launch=statistics.median(b.launch for b in found),
        row=statistics.median(b.row for b in found),
        copy=statistics.median(b.copy for b in found),
        curves={
            k: tuple((size, statistics.median(b.curves[k][i][1] for b in found)) for i, (size, _) in enumerate(curve))
            for k, curve in first.curves.items()
        },
        collectives={
            k: (
                statistics.median(b.collectives[k][0] for b in found),
                statistics.median(b.collectives[k][1] for b in found),
            )
            for k in first.collectives
        },
    )


def spread(found: list[BusyRates]) -> list[float]:
    """The relative spread of each rate over ranks and rounds: the median distance from the median."""
    series = [[b.launch for b in found]]
    series += [[b.curves[k][i][1] for b in found] for k, c in found[0].curves.items() for i in range(len(c))]
    return [statistics.median(abs(x / statistics.median(s) - 1) for x in s) for s in series]


def worlds(most: int = 0) -> list[int]:
    """Numbers of ranks that are tried together: powers of two, up to two ranks a core."""
    cores = os.cpu_count() or 1
    return (
        sorted({min(2**k, cores) for k in range(cores.bit_length() + 1)} | {2 * cores})
        if not most
        else list(range(1, most + 1))
    )


def busy(world: int) -> Callable[[], list[BusyRates]]:
    """Starts `world` probers; each call is one round of them."""
    threads = max(1, (os.cpu_count() or 1) // world)
    ranks = [RateProber.options(num_cpus=0).remote(threads) for _ in range(world)]  # type: ignore[attr-defined]
    port = ray.get(ranks[0].address.remote())
    ray.get([r.join.remote(port, i, world) for i, r in enumerate(ranks)])
    return lambda: list(ray.get([r.probe.remote(world) for r in ranks]))


@dataclass(frozen=True)
class DockTimings:
    """Seconds from one node's rows to the next node's having them; of a processor for a share, in the dock's processes
    alone, since whoever writes and reads waits for it; and of an iteration's start and end, the driver's book-keeping
    in it."""

    handover: float
    share: float
    turn: float


def dock(plan: Plan, folder: Path) -> DockTimings:
    found = readers(plan)
    kind = cast(Any, DockHost)
    (member,), way = members(plan, found)
    size = 8 * sum(plan.graph.column_bytes.values())
    host = kind.options(name=member.name).remote([member], 0, found, 60.0, way, room_name(folder.name, 0), size)
    writer, reader = (Client(name, found, way, 0) for name in ("writer", "reader"))
    prompts = plan.graph.rows[0]
    fan = plan.graph.rows[-1] // plan.graph.rows[0]
    prompt = ragged([np.ones(4, np.int32)] * prompts, np.int32)
    response = ragged([np.ones(4, np.int32)] * (prompts * fan), np.int32)
    logp = ColumnData(np.ones(len(response.values), np.float32), response.offsets)
    names_drawn = drawn(plan.graph, plan.graph.node("actor.generate"))
    hands = []
    turns = []
    start_of = 0.0
    for number in range(WARM + TASKS):
        if number == WARM:
            start_of = _spent()
        task = Task("train", number, prompts)
        start = time.perf_counter()
        ray.get(host.open.remote(task))
        turn = time.perf_counter() - start
        rows = np.arange(prompts * fan)
        start = time.perf_counter()
        writer.put("source", task, {"prompt": ColumnRows(np.arange(prompts), prompt)})
        reader.take("actor.generate", task, 0)
        reader.at("RUN actor.generate")  # as a rank does
        writer.put(
            "actor.generate",
            task,
            dict(zip(names_drawn, (ColumnRows(rows, response), ColumnRows(rows, logp)), strict=True)),
        )
        reader.take("actor.infer", task, 0)
        reader.at("RUN actor.infer")
        hands.append((time.perf_counter() - start) / 2)
        start = time.perf_counter()
        for client in (writer, reader):
            client.flush(task, Report(client.process))
        ray.get(host.drop.remote(task.key))
        turns.append(turn + time.perf_counter() - start)
    spent = _spent() - start_of
    ray.kill(host)
    turn = statistics.median(turns[WARM:]) + _books(plan, folder)
    return DockTimings(statistics.median(hands[WARM:]), spent / TASKS / 2, turn)


def _spent() -> float:
    """Processor seconds so far of all processes that this one has started, but for the probers."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "RateProber" not in " ".join(process.cmdline()):
                total += sum(process.cpu_times()[:2])
    return total


def _books(plan: Plan, folder: Path) -> float:
    """Seconds that the driver takes to write an iteration down."""
    report = Report(
        "rank 0",
        seconds={n.name: 0.1 for n in plan.graph.nodes},
        events=[Event(n.name, 0.0, 0.1) for n in plan.graph.nodes],
    )
    for name in ("prompt_tokens", "response_tokens", "response_length", "loss", "grad_norm"):
        report.count(name, 1.0, 1.0)
    recorder = Recorder(folder, plan, 0)
    return probes.seconds(lambda: recorder.training(0, 1.0, [report, report], {}, 0), 0.2)


def function(plan: Plan) -> float:
    """Seconds a row of a Python function that is handed groups of rows."""
    node = next(n for n in plan.graph.nodes if n.per == "prompt")
    reader = next(r for r in readers(plan) if r.node == node.name)
    called, (prompts, rows) = FunctionNode(node, plan, reader), plan.graph.rows
    response = ragged([np.ones(4, np.int32)] * rows, np.int32)
    columns = {"response": response, "reward": ColumnData(np.random.default_rng(0).random(rows, np.float32))}
    share = Share(
        np.arange(prompts), np.full(prompts, rows // prompts), np.arange(rows), {}, (), rows, rows, {}, 0, True
    )
    return probes.seconds(lambda: called(Batch(share, share.rows, columns), Task("train", 0, prompts)), 0.3) / rows


def main(folder: str, path: str, rounds: int, most: int) -> None:
    """The child: one number of ranks after another, all of them again in each round."""
    began = time.monotonic()
    plan = from_json(Path(folder, "plan.json").read_bytes())
    cores = os.cpu_count() or 1
    os.environ |= nicer(0) | waits()
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
    # Processes that wait take nothing, so all are there from the start.
    tried = {world: busy(world) for world in worlds(most)}
    found: dict[int, list[BusyRates]] = {world: [] for world in tried}
    for _ in range(rounds):
        for world, probe in tried.items():
            found[world] += probe()
    docked = dock(plan, Path(folder))
    result = Calibration(
        version=VERSION,
        date=datetime.now(UTC).date().isoformat(),
        seconds=0.0,
        machine=this_machine(),
        versions={name: version(name) for name in PACKAGES},
        noise=statistics.median(x for some in found.values() for x in spread(some)),
        turn=docked.turn,
        handover=docked.handover,
        share=docked.share,
        function=function(plan),
        busy={world: middle(some) for world, some in found.items()},
    )
    calibration.write(replace(result, seconds=time.monotonic() - began), Path(path))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    # Without a farewell to Ray, which would take a second: the parent ends the group.
    sys.stdout.flush()
    os._exit(0)
