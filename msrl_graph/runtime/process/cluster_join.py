"""How a run joins a Ray cluster, and how its processes on hosts reach each other.

Invariant: a cluster that does not answer is reported at once, with its address.
"""

from __future__ import annotations

import os
import socket
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
    """Start Ray's servers of this machine without three processes that no run uses.

    These are the autoscaler's monitor, the API server and, unless `logs` go to the driver, the log monitor. Each takes
    a second of CPU time to start, and Ray starts nothing else until the API server answers. The agent that Ray needs
    leaves out what serves a dashboard, as it does where the packages of one are missing.
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
    if hasattr(services, "start_api_server"):  # these are its results when the server cannot be started
        changes.append((services, "start_api_server", lambda *_, **__: (None, None)))
    if hasattr(utils, "get_dashboard_dependency_error"):  # which imports these packages to find out
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
    """The machines do not have what the plan needs; exit status 3."""


def set_collective_interface(cluster: ClusterSpec) -> str:
    """Set the network interface of collectives, and return this host's address there.

    It is the interface that the cluster states, otherwise that of Ray's own address of this host, or within one host
    the loopback. Without this, collectives use the address of the host's name, which is 127.0.0.1 on many hosts.
    Settings of the user stay.
    """
    import ray

    address: str = ray.util.get_node_ip_address() if cluster.nodes > 1 else LOOPBACK
    name, own = find_interface(address, cluster.interface)
    for variable in cluster.device.kind.interfaces if name else ():
        key, _, value = variable.partition("=")
        os.environ.setdefault(key, value.format(name))
    return own or address


def check_cluster(address: str, span: Span = NOWHERE) -> None:
    """Raise NoResources if RAY_ADDRESS has no Ray cluster that this process may join.

    Ray itself would try for minutes without a message.
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
    """Try to connect to Ray's servers; the answer has the error."""
    try:
        # The only way that reports why they refuse; it is not part of Ray's public API.
        if client := getattr(import_module("ray._raylet"), "GcsClient", None):
            client(address=address)
        answer.set_result(None)
    except Exception as error:
        answer.set_exception(error)


def job_config() -> Any:
    """Return Ray's settings for a program that does not import from its folder.

    By default every process that Ray starts looks for each module first in the folder where the program was started, on
    every host; the folder may be anybody's, as /tmp is. The setting that prevents it is the mark of a job that came
    through Ray's client.
    """
    import ray

    return ray.job_config.JobConfig(_client_job=True)


def unreachable_cluster(message: str, span: Span, help: str = START) -> NoResources:
    """Return the error for a cluster that cannot be joined."""
    return NoResources(Diagnostic("no-resources", message, span, help))


def files_loaded(plan: Plan) -> Iterator[tuple[str, str, Node]]:
    """Yield the Python files that a run loads: file, name in it, and calling node."""

    def look(expr: Expr) -> Iterator[tuple[str, str]]:
        path, colon, name = str(expr.value).rpartition(":")
        if expr.kind == "call" and colon:
            yield path, name
        for argument in expr.args:
            yield from look(argument)

    for node in plan.graph.nodes:
        for expr in node.attributes.values():
            yield from ((path, name, node) for path, name in look(expr))


def live_nodes() -> list[dict[str, Any]]:
    """Return Ray's nodes that are alive."""
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
