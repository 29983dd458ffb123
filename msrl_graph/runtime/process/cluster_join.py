"""Functions with which a run joins a Ray cluster and chooses a network interface.

Invariant: a Ray cluster that does not answer is reported within about 30 seconds, with its address.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from threading import Thread
from typing import Any

from ...diagnostics import NOWHERE, Diagnostic, Fault, Span
from ...hardware.cluster import ClusterSpec
from ...ir.graph import Expr, Node
from ...ir.plan import Plan
from .host_facts import find_interface

# Seconds until a host that does not answer counts as dead, and until a server that answers counts as not being Ray.
CONNECT = 10.0
GREET = 20.0
START = (
    "start one with `ray start --head`, and `ray start --address=HEAD:6379` on the other machines; or unset "
    "RAY_ADDRESS to run on this machine"
)
LOOPBACK = "127.0.0.1"


@contextmanager
def without_idle_servers(logs: bool) -> Iterator[None]:
    """Context in which Ray does not start its unused server processes on this machine.

    In this context, Ray starts neither the monitor of its autoscaler nor its API server. Ray starts its log monitor
    only if `logs` is true. The log monitor sends log lines to the driver. Each of these three processes takes a second
    of CPU time to start. Ray still starts its agent, but the agent loads no dashboard modules, as if the dashboard's
    packages were not installed. Outside this context, Ray waits for the API server before it starts anything else.
    """
    parameters: Any = import_module("ray._private.parameter")
    services: Any = import_module("ray._private.services")
    utils: Any = import_module("ray._private.utils")
    usual = parameters.RayParams

    class ParamsWithoutMonitors(usual):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.no_monitor = True
            self.include_log_monitor = logs

    changes: list[tuple[Any, str, Any]] = [(parameters, "RayParams", ParamsWithoutMonitors)]
    if hasattr(services, "start_api_server"):  # (None, None) is its result when the server cannot be started
        changes.append((services, "start_api_server", lambda *_, **__: (None, None)))
    if hasattr(utils, "get_dashboard_dependency_error"):  # it imports the dashboard's packages to find out
        changes.append((utils, "get_dashboard_dependency_error", lambda: ImportError("a run has no dashboard")))
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


class NoResources(Fault):
    """The error for a run whose machines lack something that the plan needs.

    After this error, the program ends with exit status 3.
    """


def set_collective_interface(cluster: ClusterSpec) -> str:
    """Choose the network interface for collectives; return this host's address on it.

    The interface is chosen as follows:
    - If `cluster` states an interface, this interface is used.
    - If not, and if the cluster has a single host, the loopback interface is used.
    - In all other cases, the function uses the interface whose address Ray lists for this host.

    The function sets the environment variables by which the collective libraries (such as NCCL or gloo) find the
    interface. A variable that the user has already set keeps its value. Without these variables, the libraries use the
    address to which this host's name resolves. On many hosts, this address is 127.0.0.1.
    """
    import ray

    address: str = ray.util.get_node_ip_address() if cluster.nodes > 1 else LOOPBACK
    name, own = find_interface(address, cluster.interface)
    for variable in cluster.device.kind.interfaces if name else ():
        key, _, value = variable.partition("=")
        os.environ.setdefault(key, value.format(name))
    return own or address


def check_cluster(address: str, span: Span = NOWHERE) -> None:
    """Raise NoResources if this process cannot join the Ray cluster at an address.

    `address` is the value of RAY_ADDRESS. Without this check, Ray would try to connect for minutes without a message.
    """
    host, colon, port = address.rpartition(":")
    if "://" in address:
        help = "set it to the address of the cluster's head, such as 10.0.0.1:6379, on a machine of the cluster"
        raise unreachable_cluster(
            f"RAY_ADDRESS is {address}, but a run must be started on a machine of the cluster", span, help
        )
    if not colon or not port.isdecimal():
        return  # `auto`: Ray looks the address up on this machine
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except (OSError, OverflowError) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        raise unreachable_cluster(f"no Ray cluster at {address} (RAY_ADDRESS): {reason.lower()}", span) from None
    from ray import exceptions

    refused = getattr(exceptions, "AuthenticationError", ())  # older versions of Ray have no tokens
    answer: Future[None] = Future()
    # Not in a thread pool: a process waits for its threads at exit, and this one may not return.
    Thread(target=_try_connection, args=(address, answer), daemon=True).start()
    try:
        answer.result(GREET)
    except refused as error:
        detail = str(error).partition(" Note:")[0]
        token = "set RAY_AUTH_MODE=token, with the cluster's token in RAY_AUTH_TOKEN or in ~/.ray/auth_token"
        raise unreachable_cluster(
            f"the Ray cluster at {address} requires a token that this process does not have ({detail})", span, token
        ) from None
    except TimeoutError:
        raise unreachable_cluster(f"the server at {address} (RAY_ADDRESS) is not a Ray cluster", span) from None


def _try_connection(address: str, answer: Future[None]) -> None:
    """Connect to Ray's servers, and put the outcome into `answer`.

    The outcome is None if the connection succeeds, and the error if the connection fails.
    """
    try:
        # Only this client reports why the servers refuse. It is not part of Ray's public API.
        if client := getattr(import_module("ray._raylet"), "GcsClient", None):
            client(address=address)
        answer.set_result(None)
    except Exception as error:
        answer.set_exception(error)


def job_config() -> Any:
    """Return job settings that keep the start folder out of Ray's import path.

    The *start folder* is the folder in which the program was started. By default, the processes that Ray starts on any
    host search for a module first in this folder. Other users might be able to write to the folder, for example if it
    is /tmp. Ray omits the folder for jobs that were submitted through Ray's client, so the returned settings mark the
    job as a client job.
    """
    import ray

    return ray.job_config.JobConfig(_client_job=True)


def unreachable_cluster(message: str, span: Span, help: str = START) -> NoResources:
    """Return the error for a cluster that cannot be joined.

    `message` says what went wrong, `span` is the place in the program to which the error refers, and `help` is the
    advice to the user.
    """
    return NoResources(Diagnostic("no-resources", message, span, help))


def files_loaded(plan: Plan) -> Iterator[tuple[str, str, Node]]:
    """Yield each function or class that a run loads from the user's Python files.

    Each item is (path of the file, name of the function or class, node that calls the function or class).
    """

    def look(expr: Expr) -> Iterator[tuple[str, str]]:
        path, colon, name = str(expr.value).rpartition(":")
        if expr.kind == "call" and colon:
            yield path, name
        for argument in expr.args:
            yield from look(argument)

    for node in plan.graph.nodes:
        for expr in node.attributes.values():
            yield from ((path, name, node) for path, name in look(expr))


def measure_clock_offset(actor: Any, timeout: float) -> float:
    """Return the seconds by which the clock of an actor's host is ahead of this clock.

    The actor has a method `clock`. Because its call takes time, only an interval that contains the offset is known. The
    result is the number in this interval that is nearest to 0. Raises Ray's GetTimeoutError after `timeout` seconds.
    """
    import ray

    before = time.time()
    remote: float = ray.get(actor.clock.remote(), timeout=timeout)
    after = time.time()
    return remote - after if remote > after else remote - before if remote < before else 0.0


def live_nodes() -> list[dict[str, Any]]:
    """Return the nodes of the Ray cluster that are alive, as `ray.nodes` returns them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


__all__ = [
    "NoResources",
    "check_cluster",
    "files_loaded",
    "job_config",
    "live_nodes",
    "set_collective_interface",
    "unreachable_cluster",
]
