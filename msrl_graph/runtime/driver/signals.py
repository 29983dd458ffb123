"""What signals ask of a run: to end after its iteration, or at once.

Invariant: the first that asks for an end is remembered, with when it came; nothing else in the package has a handler.
"""

from __future__ import annotations

import signal
import time
from typing import Any

TOGETHER = 0.3  # seconds in which the same signal again is the first: `ray job stop` sends it to the supervisor, too
HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """The first SIGINT or SIGTERM asks the run to end after the iteration, with a checkpoint; the second, or one that
    comes when no iteration is under way, or SIGHUP, ends it at once. So does the first where the iteration stands
    still."""

    def __init__(self, say: Any) -> None:
        self.say = say
        self.asked = 0  # the first signal that was heeded
        self.since = 0.0  # when it came (time.monotonic)
        self.last = 0
        self.training = False
        self.saving = False  # a checkpoint is being written
        self.heed()

    def heed(self) -> None:
        """Puts the handlers in place: again after Ray, which has its own, was started."""
        for number in HEEDED:
            signal.signal(number, self._heard)

    def _heard(self, number: int, _frame: Any) -> None:
        self.last = number
        if number == self.asked and time.monotonic() - self.since < TOGETHER:
            return
        if self.asked or not self.training or number == signal.SIGHUP:
            raise KeyboardInterrupt
        self.asked = number
        self.since = time.monotonic()
        when = "when the checkpoint is written" if self.saving else "after this iteration, with a checkpoint"
        self.say(f"ending {when}; ask once more to end at once")
