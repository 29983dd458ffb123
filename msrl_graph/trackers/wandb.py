"""Weights & Biases.

Invariant: nothing is sent unless the user has asked for it: with WANDB_MODE, WANDB_API_KEY, or an API key that `wandb
login` has stored. Otherwise the files are in the run's folder, and `wandb sync` sends them later. wandb's own recording
of the console, the code, the machine and its packages is off.

A run that is resumed offline writes a new folder with all lines, under the same id, and removes the older ones that
were not sent. A server forgets no point: after an online run is resumed, the server keeps the points that it has.
"""

from __future__ import annotations

import os
import shutil
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any

from . import Line, TrackedRun, Tracker, points

_HOST = "api.wandb.ai"


class Wandb(Tracker):
    packages = ("wandb",)

    def begin(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        # wandb links a log there into the folder of the run, and a run's folder may have no links out of it.
        os.environ["WANDB_CACHE_DIR"] = f"{run.folder}/cache"
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        folder = Path(os.environ.get("WANDB_DIR") or run.folder)
        if mode == "offline":
            for old in folder.glob(f"wandb/offline-run-*-{run.id}"):
                if not list(old.glob("*.synced")):
                    shutil.rmtree(old)
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.project,
            name=os.environ.get("WANDB_NAME") or run.name,
            id=run.id,
            resume="allow",
            mode=mode,
            dir=folder,
            config=run.config,
            settings=settings,
        )
        for line in run.lines:
            self.add(line)

    def add(self, line: Line) -> None:
        step, numbers = points(line)
        if step >= self._run.step:  # else the server has it already
            self._run.log(numbers, step=step)

    def add_artefact(self, path: Path) -> None:
        self._run.save(path, base_path=path.parent, policy="now")

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=0 if outcome == "done" else 1)


def _has_key() -> bool:
    """Return whether an API key of wandb is configured."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc().authenticators(_HOST) is not None
    except (OSError, NetrcParseError):
        return False
