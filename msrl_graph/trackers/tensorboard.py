"""TensorBoard, which reads the files of a folder.

Invariant: TensorBoard shows the content of metrics.jsonl. A resumed run first writes all existing metrics lines again.
If the disk is full, points of the curves are lost, but the run continues. For this reason, the caller's thread writes
the events: if the thread of tensorboardX's SummaryWriter got the error of a full disk, it would block forever.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from . import Line, TrackedRun, Tracker, points


@contextmanager
def _hide_module(name: str) -> Iterator[None]:
    """Hide a module from imports inside the context, unless it is already loaded.

    tensorboardX imports torch if possible. The import takes a second, and tensorboardX needs torch only for kinds of
    values that this module never writes.
    """
    hidden = name not in sys.modules
    if hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[name]


class TensorBoard(Tracker):
    packages = ("tensorboardX",)
    apart = False

    def begin(self, run: TrackedRun) -> None:
        with _hide_module("torch"):
            from tensorboardX.event_file_writer import EventsWriter

        folder = Path(run.folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        for line in run.lines:
            self.add(line)

    def add(self, line: Line) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        step, numbers = points(line)
        # Not made by tensorboardX, which would change characters such as @ in names.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        event = Event(step=step, wall_time=time.time(), summary=Summary(value=values))
        with suppress(OSError):
            self._writer.write_event(event)
            self._writer.flush()

    def close(self, outcome: str) -> None:
        with suppress(OSError):
            self._writer.close()
