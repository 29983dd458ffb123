"""The processes of a run on Ray: asked for, started together, ended by their ids.

Invariant: nothing is started before the resources are known to be there. Controllers that die are started again by Ray,
function hosts by function_hosts.py, `run { restarts }` times each; whoever else dies ends the attempt. What is left of
a pool on this machine, the supervisor ends.
"""

from __future__ import annotations

import os
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ...diagnostics import Diagnostic
from ...emit.page import many
from ...hardware.device_kinds import HOST
from ...ir.plan import Plan
from ..dock.readers import home, readers
from ..process import joining
from ..process.joining import NoResources
from ..process.processes import alive
from .function_hosts import Call, FunctionHosts

# Ranks that may share a core of this machine: a small run may be tried with more ranks than cores.
RANKS_A_CORE = 8
WAIT = 60.0  # seconds until resources that do not come are refused
SERVERS = ("raylet", "gcs_server")


class Pool:
    """Ranks, function hosts, controllers and warehouses of one plan."""

    def __init__(self, plan: Plan, folder: str, logs: str) -> None:
        self.plan, self.folder, self.logs = plan, folder, logs
        self.ranks: list[Any] = []
        self.functions: FunctionHosts | None = None
        self.warehouses: list[Any] = []
        self.controllers: list[Any] = []
        self.names: dict[str, str] = {}  # an actor's id -> what a person calls it
        self.started: list[Call] = []  # the function hosts' answers to `start`
        self.group: Any = None
        self.attached = bool(os.environ.get("RAY_ADDRESS"))
        self.servers: dict[int, str] = {}  # Ray's own processes on this machine, by id

    def connect(self) -> None:
        """Starts Ray on this machine, or joins the cluster that RAY_ADDRESS names."""
        import ray

        plan, cluster = self.plan, self.plan.cluster
        ray_options: dict[str, Any] = {"log_to_driver": bool(os.environ.get("MSRL_DEBUG")), "logging_level": "error"}
        if self.attached:
            address = os.environ["RAY_ADDRESS"]
            joining.greet(address, plan)
            try:
                ray.init(address=address, **ray_options)
            except ConnectionError as error:
                raise joining.unreached(
                    f"no Ray cluster could be joined by RAY_ADDRESS={address}: {error}", plan
                ) from None
        else:
            ray.init(
                address="local",  # never one that somebody else has started
                num_cpus=cluster.devices,
                num_gpus=0 if cluster.device.kind.is_host else None,  # None: as many as it finds
                include_dashboard=False,
                object_store_memory=max(256 << 20, min(4 << 30, 4 * sum(t.bytes for t in plan.traffic))),
                _temp_dir=self.folder,
                **ray_options,
            )

    def start(self) -> None:
        """Starts the actors, and returns when all are ready."""
        import ray

        plan, cluster = self.plan, self.plan.cluster
        asked = {cluster.device.resource: float(cluster.devices_per_node)}
        self._place(asked)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as OnHost

        from ..dock import actors
        from ..functions import host as functions
        from ..rank import host as rank_host

        # What may be started again is told its partners by name.
        found = readers(plan)
        at = {c.node: c.host for c in plan.docks.controllers}
        stores = [f"warehouse {i}" for i in range(len(plan.docks.warehouses))]
        hosts = {h: f"controllers of host {h}" for h in sorted(set(at.values()))}
        controllers = {node: hosts[h] for node, h in at.items()}
        restarts = plan.deploy.run.restarts

        def start(kind: Any, called: str, host: int, *arguments: Any, **options: Any) -> Any:
            placed = OnHost(self.group, placement_group_bundle_index=host)
            actor = kind.options(**{"name": called, "scheduling_strategy": placed, **options})
            handle = actor.remote(*arguments)
            self.names[handle._actor_id.hex()] = called
            return handle

        # Ranks first: they take longest to start, and Ray starts processes one after another where cores are few.
        text = plan.to_json()
        folder = "" if self.attached else self.folder  # other hosts do not have it
        threads = max(1, HOST.here() // cluster.devices_per_node)
        asks = cluster.device.kind.ray()
        for r in range(cluster.devices):
            of, at_host = (text, r, threads, folder, self.logs), cluster.host(r)
            self.ranks.append(start(rank_host.RankHost, f"rank {r}", at_host, *of, **asks))
        self.warehouses = [
            start(actors.WarehouseHost, name, h, i, h)
            for i, (name, h) in enumerate(zip(stores, plan.docks.warehouses, strict=True))
        ]
        self.controllers = [
            start(
                actors.ControllerHost,
                name,
                h,
                [r for r in found if at[r.node] == h],
                plan.docks.deadline,
                stores[home(plan, h, 0)],
                stores,
                max_restarts=restarts,
                max_task_retries=restarts,
            )
            for h, name in hosts.items()
        ]
        heard = [sorted({c for r in found if at[r.node] == h for c in r.hears}) for h in hosts]
        connected = [w.connect.remote(self.controllers, heard) for w in self.warehouses]
        packed = zlib.compress(text.encode())

        def function_host(host: int, again: bool) -> Any:
            if again and self.functions:
                ray.kill(
                    self.functions.actors[host]
                )  # one that only could not be reached for a while would go on beside
            arguments = (packed, host, folder, self.logs, controllers, stores, again)
            # Nobody asks for it by its name, which Ray might not have taken from a dead one yet.
            return start(functions.FunctionHost, f"functions of host {host}", host, *arguments, name=None)

        self.functions = FunctionHosts(cluster.nodes, restarts, function_host)
        if self.attached:
            self._compare(self.functions.actors)
        self.started = [self.functions.ask(h, "start") for h in range(cluster.nodes)]
        ray.get(connected)
        address = ray.get(self.ranks[0].address.remote())
        ray.get([r.start.remote(address, controllers, stores) for r in self.ranks])

    def _compare(self, functions: list[Any]) -> None:
        """Refuses a cluster of which a host lacks what the run needs there."""
        import ray

        with joining.marked(Path(self.logs)) as marker:
            wanted = joining.wanted(self.plan, marker)
            lacking = ray.get([f.lacks.remote(list(wanted)) for f in functions])
        if told := joining.differing(wanted, lacking):
            raise NoResources(*told)

    def _place(self, asked: dict[str, float]) -> None:
        """A bundle of devices on each host, or a refusal that says what was asked and what there is."""
        import ray
        from ray.util.placement_group import placement_group

        nodes = self.plan.cluster.nodes
        self.group = placement_group([asked] * nodes, strategy="STRICT_SPREAD" if nodes > 1 else "PACK")
        until = time.monotonic() + WAIT
        while not self.group.wait(2):
            there = ray.cluster_resources()
            total, living = {k: v * nodes for k, v in asked.items()}, len(joining.living())
            short = any(there.get(k, 0) < v for k, v in total.items()) or living < nodes
            if short or time.monotonic() > until:
                words = ", ".join(
                    f"{there.get(k, 0):g} {k} in all, {ray.available_resources().get(k, 0):g} of them free"
                    for k in asked
                )
                raise NoResources(
                    Diagnostic(
                        "no-resources",
                        (
                            f"the plan asks for {many(nodes, 'host')} of {_words(asked)}; Ray has "
                            f"{many(living, 'host')}, {words}"
                        ),
                        self.plan.cluster.span,
                        "lower `nodes` or `devices_per_node`, or free the devices",
                    )
                )

    def look(self) -> list[str]:
        """Ray's servers that are gone; they are looked for until all are there."""
        if not self.attached and len(self.servers) < len(SERVERS):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if process.name() in SERVERS:
                        self.servers[process.pid] = process.name()
        return [f"Ray's {name}" for pid, name in self.servers.items() if not alive(pid)]

    def dead(self, patience: float = 2.0) -> list[str]:
        """Who has died for good, in the user's words, as far as Ray notices within so many seconds."""
        import ray

        if gone := self.look():
            return gone
        actors = self._actors()
        # A busy rank does not answer, a dead one fails at once, or as soon as Ray has noticed.
        asked = {a.__ray_ready__.remote(): self.names[a._actor_id.hex()] for a in actors}
        left, until = list(asked), time.monotonic() + patience
        found: list[str] = []
        while left and time.monotonic() < until:
            ended, left = ray.wait(left, num_returns=1, timeout=0.2)
            for reference in ended:
                try:
                    ray.get(reference)
                except ray.exceptions.RayActorError:
                    found.append(asked[reference])
                except ray.exceptions.RayError:
                    pass
            if found and not ended:
                break
        return found

    def _actors(self) -> list[Any]:
        hosts = self.functions.actors if self.functions else []
        return [*self.ranks, *hosts, *self.warehouses, *self.controllers]

    def close(self) -> None:
        import ray

        if ray.is_initialized():
            for actor in self._actors():
                ray.kill(actor)
            if self.group is not None:
                ray.util.remove_placement_group(self.group)
            ray.shutdown()


def _words(asked: dict[str, float]) -> str:
    return ", ".join(f"{v:g} {k}" for k, v in asked.items())


def check_machine(plan: Plan) -> None:
    """Refuses, before anything is started, what this machine alone cannot give."""
    cluster = plan.cluster
    kind, cores = cluster.device.kind, HOST.here()
    asked = f"the plan asks for {many(cluster.nodes, 'host')} of {cluster.devices_per_node} {kind.resource}"
    there = f"this machine is 1 host of {cores} cores{'' if kind.is_host else f' and {kind.here()} {kind.resource}'}"
    help = ""
    if not kind.is_host and cluster.devices_per_node > kind.here():
        help = 'set RAY_ADDRESS to a Ray cluster that has them, or deploy on `device = "cpu"`'
    elif cluster.nodes > 1:
        help = "set RAY_ADDRESS to a Ray cluster of that many hosts, or use one host"
    elif kind.is_host and cluster.devices_per_node > cores * RANKS_A_CORE:
        help = f"at most {RANKS_A_CORE} ranks share a core: use {cores * RANKS_A_CORE} devices or fewer"
    if help:
        raise NoResources(Diagnostic("no-resources", f"{asked}; {there}", cluster.span, help))


__all__ = ["NoResources", "Pool", "check_machine"]
