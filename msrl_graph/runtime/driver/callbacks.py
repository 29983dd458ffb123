"""The user's function `on_iteration`, called after each iteration of a run.

Invariant: `on_iteration` is called once for each iteration, in order, in the thread that called `run`, even if the run
restarts. The run does not wait for the function. If the function raises an error, the function is not called again, and
the run ends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..metrics.metrics_file import parse_line, read_valid_lines

OnIteration = Callable[[dict[str, Any]], object]


class CallbackFailed(Exception):
    """The run has ended because the user's function `on_iteration` raised `error`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class MetricsFollower:
    """Reader of a run's metrics file; it calls `on_iteration` for each new iteration.

    The driver writes the file at the same time.
    """

    def __init__(self, metrics: Path, call: OnIteration, begin: int) -> None:
        """`begin`: the first iteration that the run computes."""
        self.metrics = metrics
        self.call = call
        self.next = begin
        self.error: BaseException | None = None
        self.calling = False
        self.start = 0  # bytes of the lines that an attempt continues after
        self.offset = 0  # bytes read so far
        self.stale = 0  # size of a file with lines that the attempt is about to remove

    def begin_attempt(self, lines: int) -> None:
        """Prepare for the next attempt of the run.

        The attempt's driver keeps the first `lines` lines of the metrics file, removes all other lines, and then
        appends lines.
        """
        texts, _ = read_valid_lines(self.metrics)
        self.start = self.offset = sum(map(len, texts[:lines]))
        size = self._size()
        self.stale = size if size > self.start else 0

    def look(self) -> None:
        """Call `on_iteration` for each iteration that ended since the last call of `look`."""
        size = self._size()
        if self.error is not None or (self.stale and size >= self.stale):
            return
        self.stale = 0
        if size < self.offset:
            self.offset = self.start
        if size <= self.offset:
            return
        with self.metrics.open("rb") as file:
            file.seek(self.offset)
            new = file.read()
        for text in new[: new.rfind(b"\n") + 1].splitlines(keepends=True):
            self.offset += len(text)
            line = parse_line(text)
            if line.get("iteration", -1) >= self.next:
                self.next = line["iteration"] + 1
                self._call(line)
            if self.error is not None:
                return

    def has_iteration(self, iteration: int) -> bool:
        """Return whether the metrics file has the line of an iteration."""
        lines, _ = read_valid_lines(self.metrics)
        return any(parse_line(line).get("iteration") == iteration for line in lines)

    def _call(self, line: dict[str, Any]) -> None:
        try:
            self.calling = True
            self.call(line)
        except BaseException as error:  # whatever the user's function raises ends the run
            error.add_note(f"raised by `on_iteration` after iteration {line['iteration']}")
            self.error = error
        finally:
            self.calling = False

    def _size(self) -> int:
        return self.metrics.stat().st_size if self.metrics.is_file() else 0


__all__ = ["CallbackFailed", "MetricsFollower", "OnIteration"]
