"""Writer of a run's metrics for TensorBoard.

Invariant: TensorBoard shows the content of metrics.jsonl. A resumed run first writes all existing metrics lines again.
If the disk is full, points of the curves are lost, but the run continues. For this reason, the caller's thread writes
the events: if the thread of tensorboardX's SummaryWriter got the error of a full disk, it would block forever.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


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


class TensorBoard:
    def __init__(self, folder: Path, lines: list[dict[str, Any]]) -> None:
        with _hide_module("torch"):
            from tensorboardX.event_file_writer import EventsWriter

        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        for line in lines:
            self.add(line)

    def add(self, line: dict[str, Any]) -> None:
        """Add the numbers of a line of metrics.jsonl, as points at the line's iteration."""
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event

        name = line.get("evaluation")
        step = line.get("iteration", line.get("after_iterations"))
        for key, value in line.items():
            if not isinstance(value, (int, float)) or math.isnan(value) or key in ("iteration", "after_iterations"):
                continue
            with suppress(OSError):
                scalar = summary.scalar(f"{name}/{key}" if name else key, value)
                self._writer.write_event(Event(step=step, wall_time=time.time(), summary=scalar))
        with suppress(OSError):
            self._writer.flush()

    def close(self) -> None:
        with suppress(OSError):
            self._writer.close()
