"""The processes of a run on Ray: asked for, started together, ended by their ids.

Invariant: nothing is started before the resources are known to be there; leaving `Pool` ends every process that it started and
removes its temporary folder, whatever happened in between.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from ..diagnostics import Diagnostic, Fault
from ..emit.text import many
from ..plan import Plan
from .dock import readers

# Ranks that may share a core of this machine: a small run may be tried with more ranks than cores.
RANKS_A_CORE = 8
WAIT = 60.0  # seconds until resources that do not come are refused


class NoResources(Fault):
    """The machines lack what the plan asks for; exit status 3."""


class Pool:
    """Ranks, function hosts, controllers and warehouses of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.folder = ""
        self.ranks: list[Any] = []
        self.functions: list[Any] = []
        self.warehouses: list[Any] = []
        self.boards: list[Any] = []
        self.started: list[Any] = []
        self.group: Any = None
        self.attached = "RAY_ADDRESS" in os.environ
        self.ours = False  # whether this process's connection to Ray is this pool's
        if not self.attached:
            _check_machine(plan)

    def __enter__(self) -> Pool:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        import ray

        plan, cluster = self.plan, self.plan.cluster
        if ray.is_initialized():
            raise NoResources(
                Diagnostic("no-resources", "this process is connected to Ray already", help="call ray.shutdown() before the run")
            )
        self.ours = True
        ray_options: dict[str, Any] = {"log_to_driver": bool(os.environ.get("MSRL_DEBUG")), "logging_level": "error"}
        if self.attached:
            ray.init(address=os.environ["RAY_ADDRESS"], **ray_options)
        else:
            # A short path: Ray's sockets lie in it, and their names are limited to 107 bytes.
            _sweep()
            self.folder = tempfile.mkdtemp(prefix=f"msrl-{os.getpid()}-")
            ray.init(
                address="local",  # never one that somebody else has started
                num_cpus=cluster.devices,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=max(256 << 20, min(4 << 30, 4 * sum(t.bytes for t in plan.traffic))),
                _temp_dir=self.folder,
                **ray_options,
            )
        # Ray answers SIGTERM with a page of addresses; a polite end is an end like any other: what was started is ended.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        asked = {cluster.device.resource: float(cluster.devices_per_node)}
        self._place(asked)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as OnHost

        from . import actors, functions, worker

        def on(host: int) -> Any:
            return OnHost(self.group, placement_group_bundle_index=host)

        found = readers(plan)
        hosts = {c.node: c.host for c in plan.docks.controllers}
        chosen = sorted(set(hosts.values()))
        boards = {
            h: _actor(actors.ControllerHost)
            .options(scheduling_strategy=on(h))
            .remote([r for r in found if hosts[r.node] == h], plan.docks.deadline)
            for h in chosen
        }
        heard = [sorted({c for r in found if hosts[r.node] == h for c, _, _ in r.reads}) for h in chosen]
        self.controllers = {node: boards[h] for node, h in hosts.items()}
        self.boards = list(boards.values())
        self.warehouses = [
            _actor(actors.WarehouseHost).options(scheduling_strategy=on(h)).remote(i, h, self.boards, heard)
            for i, h in enumerate(plan.docks.warehouses)
        ]
        text = plan.to_json()
        threads = max(1, (os.cpu_count() or 1) // cluster.devices_per_node)
        resource = {"num_cpus": 1} if cluster.device.resource == "CPU" else {"resources": {cluster.device.resource: 1}}
        self.ranks = [
            _actor(worker.Rank).options(scheduling_strategy=on(cluster.host(r)), **resource).remote(text, r, threads, self.folder)
            for r in range(cluster.devices)
        ]
        self.functions = [
            _actor(functions.FunctionHost).options(scheduling_strategy=on(h)).remote(text, h, self.folder) for h in range(cluster.nodes)
        ]
        self.started = [f.start.remote(self.controllers, self.warehouses) for f in self.functions]
        address = ray.get(self.ranks[0].address.remote())
        ray.get([r.start.remote(address, self.controllers, self.warehouses) for r in self.ranks])

    def _place(self, asked: dict[str, float]) -> None:
        """A bundle of devices on each host, or a refusal that says what was asked and what there is."""
        import ray
        from ray.util.placement_group import placement_group

        nodes = self.plan.cluster.nodes
        self.group = placement_group([asked] * nodes, strategy="STRICT_SPREAD" if nodes > 1 else "PACK")
        until = time.monotonic() + WAIT
        while not self.group.wait(2):
            there = ray.cluster_resources()
            total = {k: v * nodes for k, v in asked.items()}
            short = any(there.get(k, 0) < v for k, v in total.items()) or len(ray.nodes()) < nodes
            if short or time.monotonic() > until:
                words = ", ".join(f"{there.get(k, 0):g} {k} in all, {ray.available_resources().get(k, 0):g} of them free" for k in asked)
                raise NoResources(
                    Diagnostic(
                        "no-resources",
                        f"the plan asks for {many(nodes, 'host')} of {_words(asked)}; Ray has {many(len(ray.nodes()), 'host')}, {words}",
                        self.plan.cluster.span,
                        "lower `nodes` or `devices_per_node`, or free the devices",
                    )
                )

    def sizes(self) -> dict[str, tuple[int, int]]:
        """(usable rows, rows left out) of each data file."""
        import ray

        found: list[dict[str, tuple[int, int]]] = ray.get(self.started)
        return found[0]

    def name_of(self, error: Any) -> str:
        """Which process an error of Ray's is about, in the user's words."""
        pools = {"rank": self.ranks, "function host": self.functions, "warehouse": self.warehouses, "controllers of host": self.boards}
        for what, actors in pools.items():
            for i, actor in enumerate(actors):
                if actor._actor_id.hex() == error.actor_id:
                    return f"{what} {i}"
        return "a process of Ray's"

    def close(self) -> None:
        import ray

        if self.ours and ray.is_initialized():
            for actor in (*self.ranks, *self.functions, *self.warehouses, *self.boards):
                ray.kill(actor)
            if self.group is not None:
                ray.util.remove_placement_group(self.group)
            ray.shutdown()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def _sweep() -> None:
    """Removes the temporary folders of runs whose driver was killed before it could: their names hold its process's id."""
    for folder in Path(tempfile.gettempdir()).glob("msrl-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)) and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


def _actor(kind: Any) -> Any:
    """A class under @ray.remote, as Ray makes it: mypy sees the bare class."""
    return kind


def _words(asked: dict[str, float]) -> str:
    return ", ".join(f"{v:g} {k}" for k, v in asked.items())


def _check_machine(plan: Plan) -> None:
    """Refuses, before anything is started, what this machine alone cannot give."""
    cluster = plan.cluster
    cores = os.cpu_count() or 1
    asked = f"the plan asks for {many(cluster.nodes, 'host')} of {cluster.devices_per_node} {cluster.device.resource}"
    there = f"this machine is 1 host of {cores} cores"
    help = ""
    if cluster.device.backend != "cpu":
        help = 'set RAY_ADDRESS to a Ray cluster that has them, or deploy on `device = "cpu"`'
    elif cluster.nodes > 1:
        help = "set RAY_ADDRESS to a Ray cluster of that many hosts, or use one host"
    elif cluster.devices_per_node > cores * RANKS_A_CORE:
        help = f"at most {RANKS_A_CORE} ranks share a core: use {cores * RANKS_A_CORE} devices or fewer"
    if help:
        raise NoResources(Diagnostic("no-resources", f"{asked}; {there}", cluster.span, help))


__all__ = ["NoResources", "Pool"]
