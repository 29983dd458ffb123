"""Set-up of processes that user code forks from a process of a run.

Invariant: SIGTERM ends a forked child at once, as in a plain Python program. Ray handles the signal in Python, and
CPython loses a signal that reaches a child before its first line has run: a `multiprocessing` pool that ends soon after
it began would wait for such a child for ever.
"""

from __future__ import annotations

import os
import signal
import threading

_HELD = (signal.SIGTERM,)


def release_children() -> None:
    """From now on, give forked children SIGTERM's default action.

    They would inherit the handler that this process has now. A handler that the user's code sets stays.
    """
    ours = signal.getsignal(signal.SIGTERM)
    if not callable(ours):  # no Python handler, with which children could lose signals
        return
    before = threading.local()  # by thread: the signal mask before the fork

    def hold() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def begin() -> None:
        if signal.getsignal(signal.SIGTERM) is ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=begin)
