"""What a plan takes of its hosts: files that they read, memory for rows, cores.

Invariant: what the driver asks hosts for before a run, and what is said of them without one, is the same.
"""

from __future__ import annotations

from pathlib import Path

from ...files.urls import is_url
from ...files.weights import candidate_weight_files
from ...ir.plan import Plan

ROOM = 64 << 20  # bytes that a host's rows may take at least
# Ranks that may share a core of this machine: a small run may be tried with more ranks than cores.
RANKS_A_CORE = 8


def room(plan: Plan) -> int:
    """Bytes of a host's memory that rows are given."""
    return max(ROOM, 4 * sum(plan.graph.column_bytes.values()))


def reads(plan: Plan, host: int) -> dict[str, list[str]]:
    """By title the files that a host reads by their path: models whose weights its ranks load, data on the first."""
    found: dict[str, list[str]] = {}
    held = {p.name for p in plan.pools if plan.on_hosts(p.name)[host]}
    for placement in plan.placements:
        if placement.pool in held:
            name = plan.graph.worker(plan.graph.node(placement.node).worker).model
            if is_url(plan.deploy.models[name].path):
                continue
            folder = Path(plan.deploy.models[name].path)
            found[f"model {name}"] = [str(folder / "config.json"), *map(str, candidate_weight_files(folder))]
    for name, data in plan.deploy.data.items() if host == 0 else ():
        if is_url(data.path):
            continue
        found[f"data {name}"] = [data.path]
    return found
