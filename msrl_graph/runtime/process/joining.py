"""What the hosts of a Ray cluster must have in common, and how their processes reach each other.

Invariant: a cluster that does not answer, and a host that lacks what the others have, are named before a rank builds
anything.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from ...diagnostics import Diagnostic, Fault, Span
from ...ir.graph import Expr, Node
from ...ir.plan import Plan

# Seconds until a host that does not answer is taken for dead, and until what answers there is taken for no Ray.
CONNECT, GREET = 10.0, 20.0
START = (
    "start one, `ray start --head` and `ray start --address=HEAD:6379` on the others; or unset RAY_ADDRESS "
    "to run on this machine"
)
COPY = "the same files belong at the same path on every host: in a folder that they share, or a copy on each"


class NoResources(Fault):
    """The machines lack what the plan asks for; exit status 3."""


def speak(hosts: int, variables: Iterable[str]) -> None:
    """Makes collectives, which read these `variables`, speak by the interface of Ray's own address of this host, or
    within one host by its loopback; else they take the address that the host's name has, which is 127.0.0.1 on many.
    What the user has set, stays."""
    import ray

    address = ray.util.get_node_ip_address() if hosts > 1 else "127.0.0.1"
    name = next((name for name, held in psutil.net_if_addrs().items() if address in {a.address for a in held}), "")
    for variable in variables if name else ():
        os.environ.setdefault(variable, name)


def greet(address: str, plan: Plan) -> None:
    """Raises NoResources where no Ray cluster answers at the address that RAY_ADDRESS holds, or none that this process
    may join: Ray itself would try for minutes, without a word."""
    host, colon, port = address.rpartition(":")
    if "://" in address:
        help = "set it to the address of the cluster's head, as 10.0.0.1:6379, on a machine of the cluster"
        raise unreached(f"RAY_ADDRESS is {address}, and a run is driven from within the cluster", plan, help)
    if not colon or not port.isdecimal():
        return  # `auto`, which Ray looks up on this machine
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except (OSError, OverflowError) as error:
        what = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        raise unreached(f"no Ray cluster is at {address}, which RAY_ADDRESS names: {what.lower()}", plan) from None
    from ray.exceptions import AuthenticationError

    answer: Future[None] = Future()
    # Not of a pool, whose threads a process waits for at its end: this one may last.
    Thread(target=_ask, args=(address, answer), daemon=True).start()
    try:
        answer.result(GREET)
    except AuthenticationError as error:
        said = str(error).partition(" Note:")[0]
        token = "set RAY_AUTH_MODE=token, with the cluster's token in RAY_AUTH_TOKEN or in ~/.ray/auth_token"
        raise unreached(
            f"the Ray cluster at {address} asks for a token that this process does not give ({said})", plan, token
        ) from None
    except TimeoutError:
        raise unreached(f"what answers at {address}, which RAY_ADDRESS names, is no Ray cluster", plan) from None


def _ask(address: str, answer: Future[None]) -> None:
    """Asks Ray's servers who they are."""
    try:
        # The one way that says why they refuse; it is not among what Ray promises to keep.
        if client := getattr(import_module("ray._raylet"), "GcsClient", None):
            client(address=address)
        answer.set_result(None)
    except Exception as error:
        answer.set_exception(error)


def unreached(message: str, plan: Plan, help: str = START) -> NoResources:
    """What is told of a cluster that cannot be joined."""
    return NoResources(Diagnostic("no-resources", message, plan.cluster.span, help))


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


@contextmanager
def marked(folder: Path) -> Iterator[Path]:
    """A file in a folder, by which a host can tell that it sees this very folder and not one of the same name."""
    marker = folder / f".{uuid.uuid4().hex}"
    marker.touch()
    try:
        yield marker
    finally:
        marker.unlink(missing_ok=True)


def wanted(plan: Plan, marker: Path) -> dict[str, Diagnostic]:
    """What every host must have, by path, and what to tell of one that has not, of which the message begins with the
    host."""
    deploy = plan.deploy
    found: dict[str, Diagnostic] = {}
    for model in deploy.models.values():
        found[str(Path(model.path) / "config.json")] = _lack(f"has no model folder {model.path}", model.span)
    for path, _, node in called(plan):
        found.setdefault(path, _lack(f"has no file {path}, which `{node.name}` calls", node.span))
    if deploy.run.save:
        folder = marker.parent.parent
        found[str(marker)] = Diagnostic(
            "host-differs",
            f"does not see the folder of the run, {folder}, which its part of a checkpoint goes to",
            deploy.run.span,
            "name a folder that all hosts share with --out, or leave out `save`",
        )
    return found


def differing(known: Mapping[str, Diagnostic], lacking: Iterable[tuple[str, list[str]]]) -> list[Diagnostic]:
    """What to tell of the hosts, by address, that lack some of what is wanted."""
    told: list[Diagnostic] = []
    for host, paths in lacking:
        for path in paths:
            d = known[path]
            told.append(Diagnostic(d.code, f"the host {host} {d.message}", d.span, d.help))
    return told


def absent(paths: Iterable[str]) -> list[str]:
    """Those that this host has not."""
    return [path for path in paths if not os.path.exists(path)]  # noqa: PTH110


def living() -> list[dict[str, Any]]:
    """Ray's hosts, without those that are dead."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _lack(message: str, span: Span) -> Diagnostic:
    return Diagnostic("host-differs", message, span, COPY)


__all__ = ["NoResources", "absent", "called", "differing", "greet", "living", "marked", "speak", "unreached", "wanted"]
