"""The processes of a run on Ray: their resources, start and end.

Invariant: the driver reserves the run's devices before it starts a process. Ray restarts docks that die, and
function_hosts.py replaces function hosts that die. Each of these processes is restarted at most `run { restarts }`
times. The death of any other process ends the attempt. After an attempt, the supervisor ends the remaining processes on
this machine.
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

from ...analysis.async_schedule import count_lanes
from ...data.plan_paths import has_urls
from ...diagnostics import Diagnostic
from ...diagnostics.quantities import plural
from ...hardware import visibility_masks
from ...hardware.device_kinds import HOST
from ...ir.plan import Plan
from ..dock.readers import list_members, list_node_reads
from ..process import cluster_join, heartbeat, shipped_files
from ..process.cluster_join import NoResources
from ..process.host_requirements import RANKS_A_CORE, row_memory
from ..process.processes import RAY, is_alive
from ..process.run_key import new_key
from ..process.task_report import RunError
from . import device_reservation, function_hosts
from .cluster_probe import probe
from .distributed_checkpoint import DistributedCheckpoint
from .dock_monitor import unreachable_hosts, wait_for_results, wait_until_begun
from .function_hosts import ActorCall, FunctionHosts

if TYPE_CHECKING:
    from .attempt_messages import Attempt

SERVERS = ("raylet", "gcs_server")
SOON = 5.0  # seconds until a stopped process is killed, on a host that was silent for long


class HostFolder(NamedTuple):
    """Temporary folder of the run on a host, and the number of the host's cores."""

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
        self.checkpoints = DistributedCheckpoint(self.plan, self.ranks, self.results)
        self.functions: FunctionHosts | None = None
        self.docks: list[Any] = []
        self.dock_hosts: list[int] = []  # hosts of the docks
        self.names: dict[str, str] = {}  # actor id -> display name
        self.started: list[ActorCall] = []  # the function hosts' answers to `start`
        self.reserved: device_reservation.DeviceReservation | None = None
        self.probes: list[Any] = []  # a process on each cluster host, until the other processes have begun
        self.attached = bool(os.environ.get("RAY_ADDRESS"))
        self.hosts: list[HostFolder] = []
        self.examined: dict[int, tuple[Any, float]] = {}  # by dock, the call that examines its host, and its time limit
        self.servers: dict[int, str] = {}  # Ray's own processes on this machine, by id

    def connect(self) -> None:
        """Start Ray on this machine, or join the cluster that RAY_ADDRESS names."""
        import ray

        plan = self.plan
        cluster = self.plan.cluster
        ray_options: dict[str, Any] = {"log_to_driver": bool(os.environ.get("MSRL_DEBUG")), "logging_level": "error"}
        ray_options["job_config"] = cluster_join.job_config()
        if self.attached:
            address = os.environ["RAY_ADDRESS"]
            cluster_join.check_cluster(address, cluster.span)
            try:
                # A namespace of its own, so that no run on a cluster finds processes of another run by name.
                ray.init(address=address, namespace=Path(self.folder).name, **ray_options)
            except (ConnectionError, RuntimeError) as error:
                raise cluster_join.unreachable_cluster(
                    f"no Ray cluster could be joined by RAY_ADDRESS={address}: {error}", cluster.span
                ) from None
        else:
            self.attempt.preload.use()
            with cluster_join.without_idle_servers(ray_options["log_to_driver"]):
                ray.init(
                    address="local",  # never an instance that somebody else has started
                    num_cpus=cluster.devices,
                    num_gpus=0 if cluster.device.kind.is_host else None,  # None: all that Ray finds
                    include_dashboard=False,
                    object_store_memory=max(256 << 20, min(4 << 30, 4 * sum(edge.bytes for edge in plan.traffic))),
                    _temp_dir=str(Path(self.folder) / RAY),
                    **ray_options,
                )
            if (own_address := ray.util.get_node_ip_address()) != cluster_join.LOOPBACK:
                raise RunError(
                    f"Ray listens at {own_address}, but a run on one machine must use {cluster_join.LOOPBACK}"
                )

    def start(self) -> None:
        """Start all ranks, docks and function hosts, and return when all have begun."""
        import ray

        plan = self.plan
        cluster = self.plan.cluster
        self.reserved = reservation = device_reservation.reserve_devices(
            plan, f"{device_reservation.NAME_PREFIX} {plan.deploy.name}, into {self.out}", self.attempt.patience
        )
        hosts = (
            self._prepare_hosts(reservation)
            if self.attached
            else [HostFolder(self.folder, HOST.visible_count())] * cluster.nodes
        )
        self.hosts = hosts
        from ..dock import host as dock
        from ..dock.segments import room_name
        from ..functions import host as functions
        from ..rank import host as rank_host

        # Processes that may be restarted get their partners by name.
        dock_readers = list_node_reads(plan)
        docks, routes = list_members(plan, dock_readers, new_key() if cluster.nodes > 1 else b"")
        restarts = plan.deploy.run.restarts

        def start(kind: Any, label: str, host: int, *arguments: Any, **options: Any) -> Any:
            actor = kind.options(**{"name": label, "scheduling_strategy": reservation.strategy_for(host), **options})
            handle = actor.remote(*arguments)
            self.names[handle._actor_id.hex()] = label
            return handle

        # Ranks first: they take longest to start, and Ray starts processes one after another if cores are few.
        text = plan.to_json()
        logs = str(self.out / "logs")
        for rank in range(cluster.devices):
            host_index = cluster.host(rank)
            environment = plan.environment_of(rank)
            resources = cluster.device.kind.ray()
            threads = max(1, hosts[host_index].cores // cluster.devices_per_node)
            setup = rank_host.RankSetup(
                rank, threads, hosts[host_index].folder, logs, environment.settings, plan.docks.deadline
            )
            if environment.python:
                resources["runtime_env"] = {"py_executable": environment.python}
            self.ranks.append(start(rank_host.RankHost, f"rank {rank}", host_index, text, setup, **resources))
        self.dock_hosts = [member.host for member in docks]
        self.docks = [
            start(
                dock.DockHost,
                member.name,
                member.host,
                docks,
                index,
                [reader for reader in dock_readers if routes.controllers[reader.node] == member.name],
                plan.docks.deadline,
                routes,
                room_name(Path(self.folder).name, member.host),
                row_memory(plan),
                hosts[member.host].folder,
                max_restarts=restarts,
                max_task_retries=restarts,
            )
            for index, member in enumerate(docks)
        ]
        packed = zlib.compress(text.encode())

        def function_host(host: int, lane: int, again: bool) -> Any:
            if again and self.functions:
                # The old process may only have been out of reach for a while, and would continue next to the new one.
                ray.kill(self.functions.actors[self.functions.places.index((host, lane))])
            label = function_hosts.name(host, lane)
            arguments = (
                packed,
                host,
                label,
                hosts[host].folder,
                logs,
                routes,
                again,
                self.attempt.data,
                plan.docks.deadline,
            )
            # No name: nothing looks it up, and Ray may not have freed the name of a dead process yet.
            return start(functions.FunctionHost, label, host, *arguments, name=None)

        self.functions = FunctionHosts(cluster.nodes, restarts, function_host, lanes=count_lanes(plan))
        first_answers = {self.names[actor._actor_id.hex()]: actor.__ray_ready__.remote() for actor in self._actors()}
        if self.attached:
            self._fetch(self.functions.actors[: cluster.nodes])
            if self.attempt.resume:
                self.checkpoints.check_files(Path(self.attempt.resume))
        self.started = self.functions.ask_all("start")
        wait_until_begun(ray, first_answers, self._nodes())
        (address,) = self.results([self.ranks[0].address.remote()])
        self.results([handle.start.remote(address, routes) for handle in self.ranks])
        self._release()  # processes that use the probes' folders hold them now

    def _prepare_hosts(self, reservation: device_reservation.DeviceReservation) -> list[HostFolder]:
        """Check the hosts of a cluster, and copy the run's files to the hosts.

        Returns the temporary folder of the run on each host. Raises NoResources if a host does not fit the plan.
        """
        import ray

        resume = self.attempt.resume
        replay = self.attempt.options.replay
        rows = sorted(Path(replay).absolute().glob("rows/**/*.parquet")) if replay else []
        also = {"the rows to replay": str(rows[0])} if rows else {}
        files = ray.put(shipped_files.read_shipped(Path(self.folder)))
        hosts = probe(self.plan, reservation, [self.out, *([Path(resume)] if resume else [])], also, self.probes)
        self.checkpoints.separate_hosts = hosts.blind[0]
        self.checkpoints.hosts_with_parts = hosts.blind[-1] if resume else []
        for text in hosts.judge(self.attempt.options.verbose):
            self.say(text)
        folders = self.results([actor.keep.remote(files) for actor in hosts.actors])
        return [HostFolder(folder, facts["cores"]) for folder, facts in zip(folders, hosts.seen, strict=True)]

    def _fetch(self, functions: list[Any]) -> None:
        """Let each host fetch its own copies of files at URLs, before ranks load models.

        Raises NoResources with the errors of all hosts.
        """
        requests = [function_host.fetch.remote() for function_host in functions] if has_urls(self.plan) else []
        diagnostics = [
            replace(problem, code="host-differs", message=f"on the host {host} {problem.message}")
            for host, problems in self.results(requests)
            for problem in problems
        ]
        if diagnostics:
            raise NoResources(*diagnostics)

    def _release(self) -> None:
        """End the actors that checked the hosts (cluster_probe.py)."""
        import ray

        while self.probes:
            ray.kill(self.probes.pop())

    def results(self, references: Sequence[Any]) -> list[Any]:
        """Wait for the calls to which `references` refer, and return the calls' results.

        Raises HostLost if a host of the cluster is lost.
        """
        import ray

        return wait_for_results(ray, references, self._nodes())

    def _nodes(self) -> list[str]:
        """Return the Ray node ids of a cluster's hosts; [] if the run is not on a cluster."""
        return self.reserved.nodes if self.attached and self.reserved is not None else []

    def look(self) -> list[str]:
        """Return the names of this machine's Ray servers that have ended.

        Until all of Ray's servers are known, each call first searches for the servers among this process's children.
        """
        if not self.attached and len(self.servers) < len(SERVERS):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if process.name() in SERVERS:
                        self.servers[process.pid] = process.name()
        return [f"Ray's {name}" for pid, name in self.servers.items() if not is_alive(pid)]

    def ray_process_ids(self) -> dict[str, int]:
        """Return the process ids of Ray's own servers on this machine, by server name."""
        return {f"Ray's {name}": pid for pid, name in [*self.servers.items()]}

    def dead_processes(self, patience: float = 2.0) -> list[str]:
        """Return the names of processes that died and are not restarted.

        The method waits up to `patience` seconds for Ray to notice a death.
        """
        import ray

        if gone := self.look():
            return gone
        actors = self._actors()
        # A busy rank does not answer; a dead one fails at once, or as soon as Ray has noticed.
        names = {actor.__ray_ready__.remote(): self.names[actor._actor_id.hex()] for actor in actors}
        pending = list(names)
        until = time.monotonic() + patience
        dead: list[str] = []
        while pending and time.monotonic() < until:
            ended, pending = ray.wait(pending, num_returns=1, timeout=0.2)
            for reference in ended:
                try:
                    ray.get(reference)
                except ray.exceptions.RayActorError:
                    dead.append(names[reference])
                except ray.exceptions.RayError:
                    pass
            if dead and not ended:
                break
        return dead

    def owners_of(self, references: Sequence[Any]) -> list[str]:
        """Return the names of the processes that compute the results of `references`."""
        return list(
            dict.fromkeys(self.names.get(reference.task_id().actor_id().hex(), "a process") for reference in references)
        )

    def examine(self, dock: int, limits: heartbeat.Limits) -> None:
        """Start a search for stopped processes on the host of a dock that does not answer.

        `dock` is the index of the dock. A new process does the search, because all existing processes of the host may
        be stopped.
        """
        import ray

        seconds = limits.silent + 10
        if self.reserved is None or time.monotonic() < self.examined.get(dock, (None, 0.0))[1]:
            return
        host = self.dock_hosts[dock]
        look = ray.remote(num_cpus=0, max_retries=0)(heartbeat.watch_host)
        reference = look.options(scheduling_strategy=self.reserved.strategy_for(host)).remote(
            self.hosts[host].folder, (min(SOON, limits.stopped), limits.silent), seconds
        )
        self.examined[dock] = reference, time.monotonic() + seconds

    @property
    def nodes(self) -> list[str]:
        """Ray node ids of the hosts that have a dock."""
        return [self.reserved.nodes[host] for host in self.dock_hosts] if self.reserved is not None else []

    def unreachable_hosts(self) -> list[str]:
        """Return the addresses of a cluster's hosts that cannot be reached."""
        return sorted(unreachable_hosts(self.reserved.nodes)) if self.attached and self.reserved is not None else []

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
    """Raise NoResources if a plan needs more than this machine has."""
    cluster = plan.cluster
    kind = cluster.device.kind
    cores = HOST.visible_count()
    request = f"the plan asks for {plural(cluster.nodes, 'host')} of {cluster.devices_per_node} {kind.resource}"
    devices = "" if kind.is_host else f" and {kind.visible_count()} {kind.resource}"
    machine = f"this machine is 1 host of {cores} cores{devices}"
    help = ""
    if hidden := visibility_masks.describe_problem(kind, os.environ.get(kind.visible), kind.total_count()):
        machine = hidden
        help = f"unset {kind.visible}, or list the machine's own numbers, rising from 0"
    elif not kind.is_host and cluster.devices_per_node > kind.visible_count():
        help = 'set RAY_ADDRESS to a Ray cluster that has them, or deploy on `device = "cpu"`'
    elif cluster.nodes > 1:
        help = "set RAY_ADDRESS to a Ray cluster of that many hosts, or use one host"
    elif kind.is_host and cluster.devices_per_node > cores * RANKS_A_CORE:
        help = f"at most {RANKS_A_CORE} ranks share a core: use {cores * RANKS_A_CORE} devices or fewer"
    if help:
        raise NoResources(Diagnostic("no-resources", f"{request}; {machine}", cluster.span, help))


__all__ = ["NoResources", "ProcessPool", "check_machine"]
