"""Set-up of child processes that user code forks from a process of a run.

Invariant: SIGTERM ends a forked child immediately, as in a Python program without Ray. Ray handles SIGTERM with a
Python function. A signal that has a Python function as its handler can reach a child before the child has run its first
line. CPython then loses the signal. If a `multiprocessing` pool were closed soon after its start, the pool would wait
for this child forever.
"""

from __future__ import annotations

import os
import signal
import threading

_HELD = (signal.SIGTERM,)


def release_children() -> None:
    """Give SIGTERM its default action in the children that this process forks later.

    A forked child normally inherits the SIGTERM handler of its parent process. If the user's code replaces the handler
    after this call, later children inherit the user's handler.
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
