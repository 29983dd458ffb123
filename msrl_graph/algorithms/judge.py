"""Processes that ask the library math-verify whether two answers are equal.

Invariant: a question takes at most `timeout` seconds of a judge's processor time and ten times that by the clock, and a gibibyte of address
space, whatever the answers are: sympy may compute for days without coming back to Python, so the system's timers end the process, no
signal handler is needed, and any thread may ask. A judge ends with its caller, even a killed one: it reads the end of its pipe, at the
latest when its time is over. This file is run as its program, so it imports nothing of the package.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

MEMORY = 2**30  # bytes of address space; a judge starts with 60 MB
CLOCK = 10  # seconds by the clock for one of processor time: a busy machine changes no score
TIMERS = {signal.SIGPROF, signal.SIGALRM}


class Killed(RuntimeError):
    """Somebody has killed a judge before it was ready."""


class Judge:
    """A process of its own. RuntimeError where it does not start."""

    def __init__(self) -> None:
        # Sets are ordered by hashes, and sympy goes by their order.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        _living.append(self)
        if self._stdout.readline() != b"ready\n":
            status = self.process.wait()
            self.end()
            raise (Killed if status < 0 else RuntimeError)(
                f"the process that runs math-verify did not start: it ended with status {status}"
            )

    def ask(self, question: bytes) -> bool | None:
        """The verdict; None where the judge died of the question."""
        with suppress(BrokenPipeError):
            left = memoryview(question)
            while left:  # a signal may cut a write
                left = left[self._stdin.write(left) :]
            if line := self._stdout.readline():
                return line == b"1\n"
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._close()

    def forget(self) -> None:
        """Lets go of the judge of a process that this one was forked from."""
        self._close()
        self.process.returncode = 0

    def _close(self) -> None:
        _living.remove(self)
        self._stdin.close()
        self._stdout.close()


# All of this process, and those that nobody asks right now: as many as there were callers at once.
_living: list[Judge] = []
_idle: list[Judge] = []


def equal(response: str, answer: str, *, marked: bool, timeout: float) -> tuple[bool, str]:
    """Whether math-verify finds the answer of a response equal to `answer`, which is LaTeX; with False, why it came to no verdict, or "".

    Unless it is `marked`, math-verify looks for the answer in `response`. RuntimeError where no judge starts.
    """
    question = json.dumps([response, marked, answer, timeout]).encode() + b"\n"
    status = 0
    for left in range(1 + len(_idle), -1, -1):  # a judge that someone else killed has not judged, and those that wait may all be dead
        try:
            judge = _taken()
        except Killed:
            if not left:
                raise
            continue
        try:
            verdict = judge.ask(question)
        except BaseException:  # an interrupt leaves a question unanswered
            judge.end()
            raise
        if verdict is not None:
            _idle.append(judge)
            return verdict, ""
        status = judge.process.wait()
        judge.end()
        if -status in TIMERS:
            return False, f"math-verify took more than {timeout:g} s"
    return False, f"the process that runs math-verify dies again and again, last with status {status}"


def _taken() -> Judge:
    with suppress(IndexError):  # another thread may take the last one meanwhile
        while judge := _idle.pop():
            if judge.process.poll() is None:
                return judge
            judge.end()
    return Judge()


def _end_all() -> None:
    for judge in list(_living):
        judge.end()


def _forget_all() -> None:
    _idle.clear()
    for judge in list(_living):
        judge.forget()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)


def _serve() -> None:
    """The judge: a question a line, `[response, marked, answer, timeout]`, a verdict a line, until the end of the file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, meant for the caller
    for timer in TIMERS:
        signal.signal(timer, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TIMERS)
    with suppress(ValueError, OSError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no verdict

    import logging
    from functools import lru_cache

    import math_verify
    from sympy.core import random

    logging.disable()
    gold = lru_cache(256)(lambda text: math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=None))
    answers.write(b"ready\n")
    for line in sys.stdin.buffer:
        response, marked, answer, timeout = json.loads(line)
        random.seed(0)
        signal.setitimer(signal.ITIMER_PROF, timeout)
        signal.setitimer(signal.ITIMER_REAL, CLOCK * timeout)
        try:
            given = math_verify.parse(rf"\boxed{{{response}}}" if marked else response, parsing_timeout=None)
            verdict = _same_number(gold(answer), given)
            if verdict is None:
                verdict = math_verify.verify(gold(answer), given, allow_set_relation_comp=True, timeout_seconds=None)
        except Exception:  # what cannot be read, or needs too much memory or depth
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(b"1\n" if verdict else b"0\n")
    os._exit(0)


def _same_number(gold: list[Any], given: list[Any]) -> bool | None:
    """Whether two constants are the same; None where they are none, or may be.

    That constants differ is seen here in a tenth of the time. With decimals it is all decided here: to six places as by math-verify, which
    finds all numbers below 1e-6 the same, so of small ones to five digits.
    """
    from sympy import Float, UnevaluatedExpr  # percent is the unevaluated hundredth

    try:
        if any(x[0].has(UnevaluatedExpr) for x in (gold, given)):
            return None
        one, two = (complex(x[0].doit()) for x in (gold, given))
    except (AttributeError, IndexError, TypeError, ValueError, OverflowError):  # no numbers, or large ones
        return None
    size, apart = max(abs(one), abs(two)), abs(one - two)
    if any(x[0].has(Float) for x in (gold, given)):
        return apart <= min(5e-7, 1e-5 * size)
    return False if size < 1e100 and apart > 1e-5 * size else None


if __name__ == "__main__":
    _serve()
