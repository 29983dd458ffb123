"""The Ray actor of a rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from ...hardware.environment_variables import Setting, missing_settings
from ..dock.messages import DockAddress
from ..process import fault_points
from ..process.environment import set_up_process
from ..process.start_variables import waits
from ..process.task import Task
from ..process.task_report import Report
from ..weights import checkpoint_parts
from ..weights.checkpoint import Manifest


@dataclass(frozen=True)
class RankSetup:
    """How the process of rank number `rank` is set up.

    - `threads`: the number of torch's threads. `settings`: environment variables.
    - `folder`, `logs`: the folders of temporary files and of logs. `deadline`: of the run's dock, in seconds.
    """

    rank: int
    threads: int
    folder: str
    logs: str
    settings: tuple[Setting, ...]
    deadline: float = 0.0


@ray.remote
class RankHost:
    """The Ray actor that runs a `rank.Rank` in a process of its own.

    Only the constructor imports the module `rank`, which needs torch: the driver imports this module and runs without
    torch.
    """

    def __init__(self, plan: str, setup: RankSetup) -> None:
        os.environ |= waits() | missing_settings(setup.settings, os.environ)
        # Before the import of torch, parts of which make a cache folder among the temporary files.
        set_up_process(setup.folder, setup.logs, f"rank {setup.rank}", setup.deadline)
        from ...backends.devices import TorchDevice
        from ...hardware import visibility_masks
        from ...ir.plan import from_json
        from ..process import compute_setup
        from .context import RankContext
        from .rank import Rank

        compute_setup.prepare_process(setup.threads)
        placed = from_json(plan)
        kind = placed.cluster.device.kind
        devices = ray.get_runtime_context().get_accelerator_ids().get(kind.resource, ())  # that Ray gave to the process
        index = visibility_masks.torch_index(devices, os.environ.get(kind.visible))
        self.rank = Rank(RankContext(placed, setup.rank, TorchDevice(kind, index)))

    def address(self) -> tuple[str, int]:
        return self.rank.address()

    def start(self, address: tuple[str, int], dock: DockAddress) -> None:
        self.rank.start(address, dock)

    def run(self, task: Task, measure: bool) -> Report:
        return self.rank.run(task, measure)

    def checkpoint(self, folder: str, metadata: dict[str, str]) -> tuple[list[Any], dict[str, int], str]:
        process = f"rank {self.rank.context.rank}"
        number = Path(folder).stem.lstrip(".0")
        fault_points.reach(process, f"write checkpoint {number}")
        result = self.rank.checkpoints.write(folder, metadata)
        fault_points.reach(process, f"written checkpoint {number}")
        return result

    def part(self, act: str, *arguments: Any) -> Any:
        """Call the function named `act` in weights/checkpoint_parts.py."""
        return checkpoint_parts.ACTS[act](*arguments)

    def where(self) -> tuple[str, str]:
        """Return the IP address and the Ray node id of this rank's host."""
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def wants(self, manifest: Manifest) -> set[str]:
        return self.rank.checkpoints.wants(manifest)

    def resume(self, folder: str, manifest: Manifest) -> None:
        self.rank.checkpoints.resume(folder, manifest)

    def replay(self, folder: str) -> None:
        self.rank.generation.replay(folder)

    def save(self, worker: str, folder: str) -> None:
        self.rank.checkpoints.save(worker, folder)
