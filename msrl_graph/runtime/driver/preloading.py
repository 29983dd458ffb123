"""Choice of the runs that fork their processes from a preloaded process.

Invariant: a forked process computes the same as one that Ray started. Packages that read the environment at import find
the same variables as in a rank. This module imports little, since `msrl-run` starts the server before it reads a
program.
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
    """Start the server for a program or plan that is not read yet; end it afterwards.

    There is none if no run of the file could use it.
    """
    server = _start() if _mentions_host(Path(file)) else None
    try:
        yield server
    finally:
        if server is not None:
            server.close()


@contextmanager
def serving(plan: Plan, early: PreloadServer | None = None) -> Iterator[PreloadServer | None]:
    """Let a server import the modules of a plan; end it afterwards.

    It may have been started `early`. There is none for other devices than the host: no one has tried yet whether their
    packages can be imported before a fork.
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
    """Start a server, unless a cluster starts the workers itself."""
    if os.environ.get("RAY_ADDRESS"):
        return None
    with suppress(OSError):  # no run depends on it
        return PreloadServer(COMMON, OFFLINE | waits() | own_ray(), PREFIX, MARK)
    return None


def _mentions_host(file: Path) -> bool:
    """Return whether a file contains the name of the device that is the host."""
    with suppress(OSError, ValueError):  # the compiler reports it
        return b'"cpu"' in file.read_bytes()
    return False


def modules(plan: Plan) -> list[str]:
    """Return the modules that ranks of a plan import after the common ones."""
    from ...backends import ENGINES

    engines = {ENGINES[p.engine.name].build.partition(":")[0] for p in plan.placements if p.engine.name in ENGINES}
    families = {model.family for model in plan.deploy.models.values()}
    models = [f"transformers.models.{family}.modeling_{family}" for family in sorted(families)]
    return [*sorted(engines - {""}), *models]
