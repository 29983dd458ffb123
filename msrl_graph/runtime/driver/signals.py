"""Signals that ask a run to end, after its iteration or immediately.

Invariant: the first signal that asks for an end is stored, with its time. No other module handles these signals in the
driver while the run is in progress.
"""

from __future__ import annotations

import signal
import time
from typing import Any

TOGETHER = 0.3  # seconds in which a repeated signal counts once: `ray job stop` sends it to the supervisor too
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Signal handlers of a driver.

    - The first SIGINT or SIGTERM asks the run to end after the iteration, with a checkpoint. If the iteration stalls
      after this signal, the run ends immediately.
    - The run ends immediately after a second signal, after SIGHUP, and after any of these signals while no training
      iteration is in progress.
    """

    def __init__(self, say: Any) -> None:
        self.say = say
        self.asked = 0  # the first signal that was handled
        self.since = 0.0  # when it came (time.monotonic)
        self.last = 0
        self.training = False
        self.saving = False  # a checkpoint is being written
        self.install()

    def install(self) -> None:
        """Install the signal handlers.

        The driver calls this method again after it has started Ray, because Ray installs its own handlers.
        """
        for number in HANDLED:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: Any) -> None:
        self.last = number
        if number == self.asked and time.monotonic() - self.since < TOGETHER:
            return
        if self.asked or not self.training or number == signal.SIGHUP:
            raise KeyboardInterrupt
        self.asked = number
        self.since = time.monotonic()
        when = "when the checkpoint is written" if self.saving else "after this iteration, with a checkpoint"
        self.say(f"ending {when}; repeat the signal to end at once")
