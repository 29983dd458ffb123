"""Trackers: programs and services to which a run reports its metrics.

A file NAME.py of this folder has one subclass of `Tracker`, and a program names it in `run { track = [NAME] }`. To add
a tracker, add its file. Nothing else lists trackers. Other packages can add trackers too (files/plugins.py).

Invariant: no package of a tracker is imported before `begin` is called, so the compiler can read this package.
metrics.jsonl is complete without any tracker: a tracker may fail, hang or be killed.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ..files.plugins import PlugIn, find_entry_points, find_plug_in, load_class

PLUG_INS = "msrl_graph.trackers"
Line = Mapping[str, Any]  # a line of metrics.jsonl; NaN stands for `null`
_STEPS = ("iteration", "after_iterations")


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows about a run when the run begins or continues.

    - `project`: the name of the program's deploy.
    - `name`: the name of the run's folder.
    - `id`: an identifier that is kept in the run's folder. It stays the same if the run is restarted or resumed.
    - `folder`: a folder for the tracker's own files. It is in the run's folder.
    - `config`: the settings of the run: params, attributes of nodes, models, data and options.
    - `program`, `plan`: the text of the program, and of its plan as `msrl-compile` shows it.
    - `digest`: the SHA-256 of the plan's JSON.
    - `resumed`: whether a run with this id has begun before.
    - `lines`: the lines of metrics.jsonl so far; empty if the run is new. A run that resumes from a checkpoint removes
      the lines after the checkpoint, and writes lines of the same iterations again. So a tracker may already have lines
      that are not in `lines`, and it may lack some that are.
    """

    project: str
    name: str
    id: str
    folder: str
    config: dict[str, str | float | bool]
    program: str
    plan: str
    digest: str
    resumed: bool = False
    lines: Sequence[Line] = field(default_factory=list)


class Tracker:
    """A tracker of runs.

    A run calls `begin` once, then `add` for each new line of metrics.jsonl, in order, and then `close`. Whenever there
    is no further line, it calls `flush`. If the run is resumed, this happens again in a new process.

    - `packages`: the packages that must be installed, by their names on PyPI.
    - `apart`: whether the tracker runs in a process of its own, so that it can be slow. Other trackers run in the
      driver, which waits for them.
    """

    packages: ClassVar[tuple[str, ...]] = ()
    apart: ClassVar[bool] = True

    def begin(self, run: TrackedRun) -> None:
        """Begin, or continue, the tracked run."""

    def add(self, line: Line) -> None:
        """Add a line of metrics.jsonl."""
        raise NotImplementedError

    def flush(self) -> None:
        """Send the lines that `add` has kept back, because there is no further line yet."""

    def add_artefact(self, path: Path) -> None:
        """Add a file: the program, its plan, or the digest of the plan."""

    def close(self, outcome: str) -> None:
        """End the tracked run.

        `outcome` is "done", "interrupted" (a signal ended the run) or "failed". A run that failed may continue later.
        """


def tracker_names() -> list[str]:
    """Return the names of all trackers, of this package and of others."""
    return sorted({*_list_files(), *find_entry_points(PLUG_INS)})


def _list_files() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__)]


def find_package(name: str) -> PlugIn | None:
    """Return the package that provides a tracker; None if this package does."""
    return find_plug_in(PLUG_INS, name, _list_files())


def find_tracker(name: str) -> type[Tracker]:
    """Return the class of a tracker, by the name that a program uses.

    Raises KeyError if there is no such tracker, and Fault if the package that provides it is broken.
    """
    if name not in _list_files():
        return load_class(PLUG_INS, name, Tracker)
    module = importlib.import_module(f"{__name__}.{name}")
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Tracker) and value is not Tracker
    )


def is_file(tracker: str) -> bool:
    """Return whether a tracker is a class of the user: `mine.py:MyTracker`."""
    return ":" in tracker


def points(line: Line) -> tuple[int, dict[str, float]]:
    """Return the step of a line of metrics.jsonl, and its finite numbers by name.

    The step of an iteration is its number. The step of an evaluation is the number of iterations that had ended, and
    the names begin with the name of the evaluation. A key with several values, such as `phases`, has a number for each,
    as in `phases/actor.update`.
    """
    step = next(int(line[key]) for key in _STEPS if key in line)
    prefix = f"{line['evaluation']}/" if "evaluation" in line else ""
    return step, {prefix + name: value for name, value in _numbers(line) if name not in _STEPS}


def _numbers(values: Line) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", number) for inner, number in _numbers(value))
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, value
