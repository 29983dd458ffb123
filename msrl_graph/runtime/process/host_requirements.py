"""The requirements of a plan on its hosts: files, memory for rows, and CPU cores.

Invariant: the driver's check of the hosts before a run and the report of `msrl-doctor` use the same requirements.
"""

from __future__ import annotations

from pathlib import Path

from ...data.data_files import titled_paths
from ...files.urls import is_url
from ...files.weights import candidate_weight_files
from ...ir.plan import Plan
from ...model import peft_folder

ROOM = 64 << 20  # minimal bytes for a host's rows
# Ranks that may share a core of this machine: a small run may be tried with more ranks than cores.
RANKS_A_CORE = 8


def row_memory(plan: Plan) -> int:
    """Return the bytes of memory that a host needs for the rows that its dock stores."""
    return max(ROOM, 4 * sum(plan.graph.column_bytes.values()))


def files_read(plan: Plan, host: int) -> dict[str, list[str]]:
    """Return the paths of the model and data files that a host reads.

    The keys are `model NAME`, `adapter NAME` or `data NAME`. A host reads the models whose weights its ranks load. Only
    the first host reads data. A file at a URL is not included.
    """
    files: dict[str, list[str]] = {}
    pools = {pool.name for pool in plan.pools if plan.on_hosts(pool.name)[host]}
    for placement in plan.placements:
        if placement.pool in pools:
            name = plan.graph.worker(plan.graph.node(placement.node).worker).model
            model = plan.deploy.models[name]
            if not is_url(model.path):
                folder = Path(model.path)
                files[f"model {name}"] = [str(folder / "config.json"), *map(str, candidate_weight_files(folder))]
            if model.initial and not is_url(place := model.initial.folder):
                files[f"adapter {name}"] = [str(Path(place) / peft_folder.CONFIG)]
                files[f"adapter {name}"] += map(str, peft_folder.find_files(place))
    for name, data in plan.deploy.data.items() if host == 0 else ():
        if paths := titled_paths(data):
            files[f"data {name}"] = [*map(str, paths.values())]
    return files
