"""Trackio, which `trackio show` displays.

Invariant: nothing is sent unless the user has asked for it with TRACKIO_SPACE_ID or TRACKIO_SERVER_URL. Without these
variables and TRACKIO_DIR, all files are in the run's folder. Trackio's own recording of the machine is off.

A run that is resumed replaces its local rows by the lines of metrics.jsonl. A server forgets no point: after a run is
resumed, the server keeps the points that it has, and only gets the new lines.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from . import Line, TrackedRun, Tracker, points

_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class Trackio(Tracker):
    packages = ("trackio",)

    def begin(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", run.folder)  # read when trackio is imported
        import trackio

        project = os.environ.get("TRACKIO_PROJECT") or re.sub(r"[^\w-]", "_", run.project)
        name = f"{run.name}-{run.id[:6]}"  # the name is the identity of a run
        remote = any(os.environ.get(variable) for variable in _REMOTE)
        if not remote:
            for old in _find_runs(trackio, project, name):
                old.delete()
        self._trackio: Any = trackio
        self._run: Any = trackio.init(
            project=project,
            name=name,
            resume="allow",
            config=run.config,
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        for line in () if remote else run.lines:
            self.add(line)

    def add(self, line: Line) -> None:
        step, numbers = points(line)
        self._run.log(numbers, step=step)

    def add_artefact(self, path: Path) -> None:
        self._trackio.log_artifact(str(path), name=path.name, type="program")

    def close(self, outcome: str) -> None:
        self._run.finish()


def _find_runs(trackio: Any, project: str, name: str) -> list[Any]:
    """Return the local runs of a name."""
    try:
        return [run for run in trackio.Api().runs(project) if run.name == name]
    except ValueError:
        return []  # the project is new
