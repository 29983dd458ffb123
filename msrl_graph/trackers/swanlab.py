"""SwanLab.

Invariant: nothing is sent unless the user has asked for it with SWANLAB_MODE or SWANLAB_API_KEY. Otherwise the files
are in the run's folder, and `swanlab sync` sends them later. SwanLab's own recording of the console, the code, the
machine and its packages is off.

A run that is resumed offline writes a new folder with all lines, under the same id, and removes the older ones. A
server forgets no point: after an online run is resumed, the server keeps the points that it has.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from . import Line, TrackedRun, Tracker, points

_STATES = {"done": "success", "interrupted": "aborted"}
_PROBES = ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor")


class SwanLab(Tracker):
    packages = ("swanlab",)

    def begin(self, run: TrackedRun) -> None:
        import swanlab

        mode: Any = os.environ.get("SWANLAB_MODE") or ("online" if os.environ.get("SWANLAB_API_KEY") else "offline")
        folder = Path(os.environ.get("SWANLAB_LOG_DIR") or run.folder)
        if mode in ("offline", "local"):
            for old in folder.glob(f"run-*-{run.id}"):
                shutil.rmtree(old)
        settings = swanlab.Settings(
            interactive=False,
            probe=swanlab.Settings.Probe(**dict.fromkeys(_PROBES, False)),
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
        )
        self._swanlab: Any = swanlab
        self._run: Any = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME") or run.project,
            name=os.environ.get("SWANLAB_EXP_NAME") or run.name,
            id=run.id,
            resume="allow",
            mode=mode,
            log_dir=str(folder),
            config=run.config,
            settings=settings,
        )
        for line in run.lines:
            self.add(line)

    def add(self, line: Line) -> None:
        step, numbers = points(line)
        self._run.log(numbers, step=step)

    def add_artefact(self, path: Path) -> None:
        self._swanlab.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, outcome: str) -> None:
        state = _STATES.get(outcome, "crashed")
        self._run.finish(state=state, error=f"the run {outcome}" if state == "crashed" else None)
