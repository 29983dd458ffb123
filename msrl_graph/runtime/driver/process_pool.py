"""The processes of a run on Ray: asked for, started together, ended by their ids.

Invariant: nothing is started before the resources are known to be there. Docks that die are started again by Ray,
function hosts by function_hosts.py, `run { restarts }` times each; whoever else dies ends the attempt. What is left of
a pool on this machine, the supervisor ends.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from ...diagnostics import Diagnostic
from ...emit.humanize import many
from ...hardware import visibility_masks
from ...hardware.device_kinds import HOST
from ...ir.async_schedule import lanes
from ...ir.plan import Plan
from ...ir.plan_paths import remote
from ..dock.channel import new_key
from ..dock.readers import members, readers
from ..process import cluster_join, heartbeat, shipped_files
from ..process.cluster_join import NoResources
from ..process.host_requirements import RANKS_A_CORE, room
from ..process.processes import RAY, alive
from ..process.task_report import RunError
from . import device_reservation, function_hosts
from .cluster_probe import probe
from .distributed_checkpoint import DistributedCheckpoint
from .dock_monitor import begun, missing, results
from .function_hosts import ActorCall, FunctionHosts

if TYPE_CHECKING:
    from .supervisor import Attempt

SERVERS = ("raylet", "gcs_server")
SOON = 5.0  # seconds after which a process is killed that is stopped on a host which was silent for long


class HostFolder(NamedTuple):
    """A host's temporary folder of the run, and its cores."""

    folder: str
    cores: int


class ProcessPool:
    """Ranks, function hosts and docks of one plan."""

    def __init__(self, attempt: Attempt, say: Callable[[str], None]) -> None:
        self.attempt = attempt
        self.say = say
        self.plan = attempt.plan
        self.folder = attempt.folder
        self.out = Path(attempt.out).absolute()
        self.ranks: list[Any] = []
        self.parted = DistributedCheckpoint(self.plan, self.ranks, self.results)
        self.functions: FunctionHosts | None = None
        self.docks: list[Any] = []
        self.of_docks: list[int] = []  # their hosts
        self.names: dict[str, str] = {}  # an actor's id -> what a person calls it
        self.started: list[ActorCall] = []  # the function hosts' answers to `start`
        self.reserved: device_reservation.DeviceReservation | None = None
        self.probes: list[Any] = []  # a process on each host of a cluster, until the others have begun
        self.attached = bool(os.environ.get("RAY_ADDRESS"))
        self.hosts: list[HostFolder] = []
        self.examined: dict[int, tuple[Any, float]] = {}  # by dock what looks at its host, and until when
        self.servers: dict[int, str] = {}  # Ray's own processes on this machine, by id

    def connect(self) -> None:
        """Starts Ray on this machine, or joins the cluster that RAY_ADDRESS names."""
        import ray

        plan = self.plan
        cluster = self.plan.cluster
        ray_options: dict[str, Any] = {"log_to_driver": bool(os.environ.get("MSRL_DEBUG")), "logging_level": "error"}
        ray_options["job_config"] = cluster_join.job_config()
        if self.attached:
            address = os.environ["RAY_ADDRESS"]
            cluster_join.greet(address, cluster.span)
            try:
                # A namespace of its own: of two runs on a cluster none finds a process of the other by its name.
                ray.init(address=address, namespace=Path(self.folder).name, **ray_options)
            except (ConnectionError, RuntimeError) as error:
                raise cluster_join.unreached(
                    f"no Ray cluster could be joined by RAY_ADDRESS={address}: {error}", cluster.span
                ) from None
        else:
            ray.init(
                address="local",  # never one that somebody else has started
                num_cpus=cluster.devices,
                num_gpus=0 if cluster.device.kind.is_host else None,  # None: as many as it finds
                include_dashboard=False,
                object_store_memory=max(256 << 20, min(4 << 30, 4 * sum(t.bytes for t in plan.traffic))),
                _temp_dir=str(Path(self.folder) / RAY),
                **ray_options,
            )
            if (at := ray.util.get_node_ip_address()) != cluster_join.LOOPBACK:
                raise RunError(f"Ray listens at {at}, and a run on one machine keeps to {cluster_join.LOOPBACK}")

    def start(self) -> None:
        """Starts the actors, and returns when all are ready."""
        import ray

        plan = self.plan
        cluster = self.plan.cluster
        self.reserved = place = device_reservation.reserved(
            plan, f"{device_reservation.NAMED} {plan.deploy.name}, into {self.out}", self.attempt.patience
        )
        hosts = self._settled(place) if self.attached else [HostFolder(self.folder, HOST.here())] * cluster.nodes
        self.hosts = hosts
        from ..dock import host as dock
        from ..dock.segments import room_name
        from ..functions import host as functions
        from ..rank import host as rank_host

        # What may be started again is told its partners by name.
        found = readers(plan)
        docks, way = members(plan, found, new_key() if cluster.nodes > 1 else b"")
        restarts = plan.deploy.run.restarts

        def start(kind: Any, called: str, host: int, *arguments: Any, **options: Any) -> Any:
            actor = kind.options(**{"name": called, "scheduling_strategy": place.on(host), **options})
            handle = actor.remote(*arguments)
            self.names[handle._actor_id.hex()] = called
            return handle

        # Ranks first: they take longest to start, and Ray starts processes one after another where cores are few.
        text = plan.to_json()
        logs = str(self.out / "logs")
        for r in range(cluster.devices):
            at = cluster.host(r)
            around = plan.around(r)
            asks = cluster.device.kind.ray()
            threads = max(1, hosts[at].cores // cluster.devices_per_node)
            of = (text, r, threads, hosts[at].folder, logs, around.settings, plan.docks.deadline)
            if around.python:
                asks["runtime_env"] = {"py_executable": around.python}
            self.ranks.append(start(rank_host.RankHost, f"rank {r}", at, *of, **asks))
        self.of_docks = [member.host for member in docks]
        self.docks = [
            start(
                dock.DockHost,
                member.name,
                member.host,
                docks,
                i,
                [r for r in found if way.controllers[r.node] == member.name],
                plan.docks.deadline,
                way,
                room_name(Path(self.folder).name, member.host),
                room(plan),
                hosts[member.host].folder,
                max_restarts=restarts,
                max_task_retries=restarts,
            )
            for i, member in enumerate(docks)
        ]
        packed = zlib.compress(text.encode())

        def function_host(host: int, lane: int, again: bool) -> Any:
            if again and self.functions:
                # One that only could not be reached for a while would go on beside.
                ray.kill(self.functions.actors[self.functions.places.index((host, lane))])
            called = function_hosts.name(host, lane)
            arguments = (
                packed,
                host,
                called,
                hosts[host].folder,
                logs,
                way,
                again,
                self.attempt.data,
                plan.docks.deadline,
            )
            # Nobody asks for it by its name, which Ray might not have taken from a dead one yet.
            return start(functions.FunctionHost, called, host, *arguments, name=None)

        self.functions = FunctionHosts(cluster.nodes, restarts, function_host, lanes=lanes(plan))
        first = {self.names[actor._actor_id.hex()]: actor.__ray_ready__.remote() for actor in self._actors()}
        if self.attached:
            self._fetch(self.functions.actors[: cluster.nodes])
            if self.attempt.resume:
                self.parted.check(Path(self.attempt.resume))
        self.started = self.functions.every("start")
        begun(ray, first, self._nodes())
        (address,) = self.results([self.ranks[0].address.remote()])
        self.results([r.start.remote(address, way) for r in self.ranks])
        self._release()  # who uses the folders that the probes made holds them

    def _settled(self, place: device_reservation.DeviceReservation) -> list[HostFolder]:
        """Looks at the hosts of a cluster, and lays down there what is shipped to them."""
        import ray

        resume = self.attempt.resume
        replay = self.attempt.options.replay
        rows = sorted(Path(replay).absolute().glob("rows/**/*.parquet")) if replay else []
        also = {"the rows to replay": str(rows[0])} if rows else {}
        files = ray.put(shipped_files.laid(Path(self.folder)))
        found = probe(self.plan, place, [self.out, *([Path(resume)] if resume else [])], also, self.probes)
        self.parted.apart = found.blind[0]
        self.parted.unseen = found.blind[-1] if resume else []
        for words in found.judge(self.attempt.options.verbose):
            self.say(words)
        folders = self.results([actor.keep.remote(files) for actor in found.actors])
        return [HostFolder(folder, f["cores"]) for folder, f in zip(folders, found.seen, strict=True)]

    def _fetch(self, functions: list[Any]) -> None:
        """Has each host fetch its own copies of what lies at URLs, before a rank builds anything."""
        asked = [f.fetch.remote() for f in functions] if remote(self.plan) else []
        told = [
            replace(d, code="host-differs", message=f"on the host {host} {d.message}")
            for host, found in self.results(asked)
            for d in found
        ]
        if told:
            raise NoResources(*told)

    def _release(self) -> None:
        """Ends the processes that looked at the hosts."""
        import ray

        while self.probes:
            ray.kill(self.probes.pop())

    def results(self, asked: Sequence[Any]) -> list[Any]:
        """What Ray was asked for, as long as no host of a cluster is lost (HostLost)."""
        import ray

        return results(ray, asked, self._nodes())

    def _nodes(self) -> list[str]:
        """The ids that a cluster's hosts have in Ray."""
        return self.reserved.nodes if self.attached and self.reserved is not None else []

    def look(self) -> list[str]:
        """Ray's servers that are gone; they are looked for until all are there."""
        if not self.attached and len(self.servers) < len(SERVERS):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if process.name() in SERVERS:
                        self.servers[process.pid] = process.name()
        return [f"Ray's {name}" for pid, name in self.servers.items() if not alive(pid)]

    def of_ray(self) -> dict[str, int]:
        """Ray's own processes on this machine, by name."""
        return {f"Ray's {name}": pid for pid, name in [*self.servers.items()]}

    def dead(self, patience: float = 2.0) -> list[str]:
        """Who has died for good, in the user's words, as far as Ray notices within so many seconds."""
        import ray

        if gone := self.look():
            return gone
        actors = self._actors()
        # A busy rank does not answer, a dead one fails at once, or as soon as Ray has noticed.
        asked = {a.__ray_ready__.remote(): self.names[a._actor_id.hex()] for a in actors}
        left = list(asked)
        until = time.monotonic() + patience
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

    def asked(self, references: Sequence[Any]) -> list[str]:
        """The processes that still owe these results."""
        return list(dict.fromkeys(self.names.get(r.task_id().actor_id().hex(), "a process") for r in references))

    def examine(self, dock: int, limits: heartbeat.Limits) -> None:
        """Has a fresh process look for processes that do not move, on the host of a dock that does not answer: all of
        its processes may be stopped, so that none of them can."""
        import ray

        seconds = limits.silent + 10
        if self.reserved is None or time.monotonic() < self.examined.get(dock, (None, 0.0))[1]:
            return
        host = self.of_docks[dock]
        look = ray.remote(num_cpus=0, max_retries=0)(heartbeat.examine)
        asked = look.options(scheduling_strategy=self.reserved.on(host)).remote(
            self.hosts[host].folder, (min(SOON, limits.stopped), limits.silent), seconds
        )
        self.examined[dock] = asked, time.monotonic() + seconds

    @property
    def nodes(self) -> list[str]:
        """Of the docks' hosts, the ids in Ray."""
        return [self.reserved.nodes[host] for host in self.of_docks] if self.reserved is not None else []

    def gone(self) -> list[str]:
        """The hosts of a cluster that are out of reach."""
        return sorted(missing(self.reserved.nodes)) if self.attached and self.reserved is not None else []

    def _actors(self) -> list[Any]:
        hosts = self.functions.actors if self.functions else []
        return [*self.ranks, *hosts, *self.docks]

    def close(self) -> None:
        import ray

        if ray.is_initialized():
            self._release()
            for actor in self._actors():
                ray.kill(actor)
            if self.reserved is not None:
                ray.util.remove_placement_group(self.reserved.group)
            ray.shutdown()


def check_machine(plan: Plan) -> None:
    """Refuses, before anything is started, what this machine alone cannot give."""
    cluster = plan.cluster
    kind = cluster.device.kind
    cores = HOST.here()
    asked = f"the plan asks for {many(cluster.nodes, 'host')} of {cluster.devices_per_node} {kind.resource}"
    there = f"this machine is 1 host of {cores} cores{'' if kind.is_host else f' and {kind.here()} {kind.resource}'}"
    help = ""
    if hidden := visibility_masks.wrong(kind, os.environ.get(kind.visible), kind.there()):
        there = hidden
        help = f"unset {kind.visible}, or list the machine's own numbers, rising from 0"
    elif not kind.is_host and cluster.devices_per_node > kind.here():
        help = 'set RAY_ADDRESS to a Ray cluster that has them, or deploy on `device = "cpu"`'
    elif cluster.nodes > 1:
        help = "set RAY_ADDRESS to a Ray cluster of that many hosts, or use one host"
    elif kind.is_host and cluster.devices_per_node > cores * RANKS_A_CORE:
        help = f"at most {RANKS_A_CORE} ranks share a core: use {cores * RANKS_A_CORE} devices or fewer"
    if help:
        raise NoResources(Diagnostic("no-resources", f"{asked}; {there}", cluster.span, help))


__all__ = ["NoResources", "ProcessPool", "check_machine"]
