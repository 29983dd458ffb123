"""Start of the preload server, from which a run forks its processes.

The preload server is a process that has already imported the modules of ranks and functions.

Invariant: a forked process computes the same results as a process that Ray starts. A package that reads environment
variables at import finds the same variables in the preload server as in a rank. This module imports little, because
`msrl-run` starts the server before it reads a program.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..process.preload import PreloadServer
from ..process.start_variables import MARK, OFFLINE, PREFIX, own_ray, waits

if TYPE_CHECKING:
    from ...ir.plan import Plan

RANK = "msrl_graph.runtime.rank.rank"
# What the processes of any run import, in their order: ranks, function hosts, and Ray's Python dependencies.
COMMON = (
    RANK,
    "msrl_graph.runtime.functions.function_node",
    "msrl_graph.runtime.data.dataset",
    "pydantic.main",
    "pydantic.types",
    "pydantic.deprecated.class_validators",
    "pydantic.deprecated.config",
    "pydantic.v1.fields",
    "jsonschema",
    "requests",
    "google.protobuf.json_format",
    "google.protobuf.internal.builder",
    "msgpack",
    "pdb",
)


@contextmanager
def starting_early(file: str) -> Iterator[PreloadServer | None]:
    """Start a preload server before a program file or plan file is read.

    The server ends with the context. Yields None if the program or plan cannot use a server.
    """
    server = _start() if _mentions_host(Path(file)) else None
    try:
        yield server
    finally:
        if server is not None:
            server.close()


@contextmanager
def serving(plan: Plan, early: PreloadServer | None = None) -> Iterator[PreloadServer | None]:
    """Let a preload server import the modules of a plan.

    `early` is a server that was already started, or None. The server ends with the context. Yields None if the plan's
    devices are not CPUs of the host: for other devices, no test shows that packages can be imported before a fork.
    """
    server = (early or _start()) if plan.cluster.device.kind.is_host else None
    if server is None and early is not None:
        early.close()
    if server is not None:
        server.load(modules(plan))
    try:
        yield server
    finally:
        if server is not None:
            server.close()


def _start() -> PreloadServer | None:
    """Start a preload server; return None if a cluster starts the run's processes.

    Also returns None if the server cannot be started.
    """
    if os.environ.get("RAY_ADDRESS"):
        return None
    with suppress(OSError):  # no run depends on it
        return PreloadServer(COMMON, OFFLINE | waits() | own_ray(), PREFIX, MARK)
    return None


def _mentions_host(file: Path) -> bool:
    """Return whether a file contains `"cpu"`, the name of CPU devices in a program."""
    with suppress(OSError, ValueError):  # the compiler reports it
        return b'"cpu"' in file.read_bytes()
    return False


def modules(plan: Plan) -> list[str]:
    """Return the modules that a plan's ranks import and that COMMON does not contain.

    COMMON has the modules that every run imports.
    """
    from ...backends import ENGINES

    engines = {ENGINES[p.engine.name].build.partition(":")[0] for p in plan.placements if p.engine.name in ENGINES}
    families = {model.family for model in plan.deploy.models.values()}
    models = [f"transformers.models.{family}.modeling_{family}" for family in sorted(families)]
    return [*sorted(engines - {""}), *models]
