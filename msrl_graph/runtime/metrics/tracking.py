"""The display and the trackers, which get each line of metrics.jsonl.

Invariant: a line is in metrics.jsonl before anything gets it, and whatever a tracker does, the run goes on. The display
shows a line on the terminal, on the page and for Prometheus.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...emit.facts import facts
from ...ir.plan import Plan
from ...trackers import TrackedRun, find_tracker, is_file
from .display import Display
from .metrics_file import METRICS
from .tracker_main import Assignment
from .tracker_process import TrackerProcess

FOLDER = "trackers"  # within a run's folder
ID = "id"  # within this folder
CATCH_UP = 30.0  # seconds that trackers have to catch up when a run ends
INTERRUPTED = 5.0  # seconds that they have when a signal ends the run
# The sections of a plan's facts that are settings of a run.
_SETTINGS = ("Program", "Params", "States", "Models, data and run")


class Trackers:
    """The display and the trackers of one attempt of a run."""

    def __init__(self, plan: Plan, out: Path, folder: Path, display: Display) -> None:
        """`out` is the run's folder, and `folder` the temporary folder of the attempt."""
        self.plan = plan
        self.out = out
        self.folder = folder
        self.display = display
        self.members: dict[str, Any] = {}  # by name; each is a Tracker in this process
        self.processes: list[TrackerProcess] = []

    def begin(self, lines: Sequence[dict[str, Any]]) -> None:
        """Begin with the lines that the run has kept."""
        self.display.facts.set_lines(lines)
        names = self.plan.deploy.run.track
        if not names:
            return
        try:
            run = describe_run(self.plan, self.out, find_id(self.out) if any(map(_is_apart, names)) else ("", False))
            artefacts = self._write_artefacts(run) if run.id else []
        except OSError as error:  # a full disk
            self.display.say(f"warning: no tracker can begin: {error}; the run goes on without them")
            return
        for name in names:
            if _is_apart(name):
                self._start(name, run, len(lines), artefacts)
            else:
                self.members[name] = member = find_tracker(name)()
                here = TrackedRun(**vars(run) | {"folder": str(self.out / name), "lines": lines})
                self._call(name, member.begin, here)

    def add(self, line: dict[str, Any]) -> None:
        """Hand on a line that was just written."""
        self.display.add(line)
        for name, member in [*self.members.items()]:
            self._call(name, member.add, line)
        for process in self.processes:
            process.add()

    def close(self, outcome: str) -> None:
        """End all trackers, and report what they lack."""
        for name, member in [*self.members.items()]:
            self._call(name, member.close, outcome)
        for process in self.processes:
            process.finish(outcome)
        until = time.monotonic() + (INTERRUPTED if outcome == "interrupted" else CATCH_UP)
        for process in self.processes:
            process.wait(until)
        if self.processes:
            with suppress(OSError):
                make_links_relative(self.out.absolute() / FOLDER)

    def _start(self, name: str, run: TrackedRun, kept: int, artefacts: list[str]) -> None:
        label = make_label(name)
        folder = (self.out / FOLDER / label).absolute()
        logs = self.out / "logs"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            logs.mkdir(exist_ok=True)
            metrics = str((self.out / METRICS).absolute())
            here = TrackedRun(**vars(run) | {"folder": str(folder)})
            assignment = Assignment(name, here, metrics, kept, artefacts, str(self.folder))
            log = logs / f"tracker-{label}.log"
            self.processes.append(TrackerProcess(label, assignment, self.folder, log, self.display.say))
        except OSError as error:
            self.display.say(f"warning: the tracker `{label}` cannot start: {error}; the run goes on without it")

    def _write_artefacts(self, run: TrackedRun) -> list[str]:
        """Write the files that trackers get, and return their paths."""
        folder = (self.out / FOLDER).absolute()
        suffix = Path(self.plan.deploy.span.file).suffix or ".rlg"  # .py: the program was built in Python
        texts = {
            f"program{suffix}": run.program,
            "plan.txt": f"{run.plan}\n",
            "plan.sha256": f"{run.digest}  plan.json\n",
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        return [*(str(folder / name) for name in texts), str((self.out / "plan.json").absolute())]

    def _call(self, name: str, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method of a tracker in this process.

        A tracker that fails is reported, and is not called again.
        """
        try:
            method(*arguments)
        except Exception as error:
            failed = self.members.pop(name)
            with suppress(Exception):  # its files
                failed.close("failed")
            problem = f"failed: {type(error).__name__}: {error}"
            self.display.say(f"warning: the tracker `{name}` {problem}; the run goes on without it")


def make_links_relative(folder: Path) -> None:
    """Make the links of trackers relative, so that the run's folder can be moved.

    Some trackers link to files in the run's folder by their absolute paths.
    """
    for path in folder.rglob("*"):
        if path.is_symlink() and (target := path.readlink()).is_relative_to(folder.parent):
            path.unlink()
            path.symlink_to(os.path.relpath(target, path.parent))


def find_id(out: Path) -> tuple[str, bool]:
    """Return the identifier of the run in a folder, and whether it was there."""
    stored = out / FOLDER / ID
    known = stored.is_file()
    if not known:
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(uuid.uuid4().hex[:16], encoding="utf-8")
    return stored.read_text(encoding="utf-8").strip(), known


def describe_run(plan: Plan, out: Path, identity: tuple[str, bool]) -> TrackedRun:
    """Return what trackers know about a run; `out` is the run's folder.

    `identity` is the run's identifier, and whether the run has begun before.
    """
    digest = hashlib.sha256((out / "plan.json").read_bytes()).hexdigest()
    return TrackedRun(
        project=plan.deploy.name,
        name=out.absolute().name,
        id=identity[0],
        folder="",
        config={**settings(plan), "plan_sha256": digest},
        program=program_text(plan),
        plan=str(plan),
        digest=digest,
        resumed=identity[1],
    )


def settings(plan: Plan) -> dict[str, str | float | bool]:
    """Return the settings of a run by name, such as `run/seed`."""
    sections = facts(plan)
    return {
        "/".join(filter(None, (item, name))): fact.value
        for section in _SETTINGS
        for item, properties in sections[section].items()
        for name, fact in properties.items()
        if fact.value not in (None, "")
    }


def program_text(plan: Plan) -> str:
    """Return the text of the file with the deploy; "" if there is no file."""
    try:
        return Path(plan.deploy.span.file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def make_label(tracker: str) -> str:
    """Return the name of a tracker in messages and in names of files.

    For example, the name is `wandb`, or `mine-MyTracker` for `/folder/mine.py:MyTracker`.
    """
    path, _, name = tracker.rpartition(":")
    return re.sub(r"[^\w-]", "_", f"{Path(path).stem}-{name}") if is_file(tracker) else tracker


def _is_apart(tracker: str) -> bool:
    return is_file(tracker) or find_tracker(tracker).apart
