"""How a run joins a Ray cluster, and how its processes on the hosts reach each other.

Invariant: a cluster that does not answer is named at once.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from importlib import import_module
from threading import Thread
from typing import Any

from ...diagnostics import NOWHERE, Diagnostic, Fault, Span
from ...hardware.cluster import ClusterSpec
from ...ir.graph import Expr, Node
from ...ir.plan import Plan
from .host_facts import interface

# Seconds until a host that does not answer is taken for dead, and until what answers there is taken for no Ray.
CONNECT = 10.0
GREET = 20.0
START = (
    "start one, `ray start --head` and `ray start --address=HEAD:6379` on the others; or unset RAY_ADDRESS "
    "to run on this machine"
)
LOOPBACK = "127.0.0.1"
# Ray reads it as it is imported: with "0" its servers and workers listen at the loopback alone, on any system.
_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def own_ray() -> dict[str, str]:
    """Return the environment of a process that starts Ray for this machine alone.

    Ray then listens at the loopback only, and asks for a token that nobody else has. Both must be there before Ray is
    imported. What the caller has set for other clusters does not apply to this one.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), _ALONE: "0"}


class NoResources(Fault):
    """The machines lack what the plan asks for; exit status 3."""


def speak(cluster: ClusterSpec) -> str:
    """Makes collectives speak by the interface that the cluster states, else by that of Ray's own address of this host,
    or within one host by its loopback; else they take the address that the host's name has, which is 127.0.0.1 on many.
    What the user has set, stays. This host's address there."""
    import ray

    address: str = ray.util.get_node_ip_address() if cluster.nodes > 1 else LOOPBACK
    name, own = interface(address, cluster.interface)
    for variable in cluster.device.kind.interfaces if name else ():
        key, _, value = variable.partition("=")
        os.environ.setdefault(key, value.format(name))
    return own or address


def greet(address: str, span: Span = NOWHERE) -> None:
    """Raises NoResources where no Ray cluster answers at the address that RAY_ADDRESS holds, or none that this process
    may join: Ray itself would try for minutes, without a word."""
    host, colon, port = address.rpartition(":")
    if "://" in address:
        help = "set it to the address of the cluster's head, as 10.0.0.1:6379, on a machine of the cluster"
        raise unreached(f"RAY_ADDRESS is {address}, and a run is driven from within the cluster", span, help)
    if not colon or not port.isdecimal():
        return  # `auto`, which Ray looks up on this machine
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except (OSError, OverflowError) as error:
        what = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        raise unreached(f"no Ray cluster is at {address}, which RAY_ADDRESS names: {what.lower()}", span) from None
    from ray import exceptions

    refused = getattr(exceptions, "AuthenticationError", ())  # older Rays have no tokens
    answer: Future[None] = Future()
    # Not of a pool, whose threads a process waits for at its end: this one may last.
    Thread(target=_ask, args=(address, answer), daemon=True).start()
    try:
        answer.result(GREET)
    except refused as error:
        said = str(error).partition(" Note:")[0]
        token = "set RAY_AUTH_MODE=token, with the cluster's token in RAY_AUTH_TOKEN or in ~/.ray/auth_token"
        raise unreached(
            f"the Ray cluster at {address} asks for a token that this process does not give ({said})", span, token
        ) from None
    except TimeoutError:
        raise unreached(f"what answers at {address}, which RAY_ADDRESS names, is no Ray cluster", span) from None


def _ask(address: str, answer: Future[None]) -> None:
    """Asks Ray's servers who they are."""
    try:
        # The one way that says why they refuse; it is not among what Ray promises to keep.
        if client := getattr(import_module("ray._raylet"), "GcsClient", None):
            client(address=address)
        answer.set_result(None)
    except Exception as error:
        answer.set_exception(error)


def job_config() -> Any:
    """Return Ray's settings for a program whose processes import nothing from the folder in which it is started.

    By default every process that Ray starts looks there first for each module, on every host; the folder may be
    anybody's, as /tmp is. What says so is the mark of a job that came through Ray's client.
    """
    import ray

    return ray.job_config.JobConfig(_client_job=True)


def unreached(message: str, span: Span, help: str = START) -> NoResources:
    """What is told of a cluster that cannot be joined."""
    return NoResources(Diagnostic("no-resources", message, span, help))


def called(plan: Plan) -> Iterator[tuple[str, str, Node]]:
    """What the processes of a run load of Python files: the file, a name of it, and the node that calls it."""

    def look(expr: Expr) -> Iterator[tuple[str, str]]:
        path, colon, name = str(expr.value).rpartition(":")
        if expr.kind == "call" and colon:
            yield path, name
        for argument in expr.args:
            yield from look(argument)

    for node in plan.graph.nodes:
        for expr in node.attributes.values():
            yield from ((path, name, node) for path, name in look(expr))


def living() -> list[dict[str, Any]]:
    """Ray's hosts, without those that are dead."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


__all__ = ["NoResources", "called", "greet", "job_config", "living", "own_ray", "speak", "unreached"]
