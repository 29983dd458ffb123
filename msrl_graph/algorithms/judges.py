"""Judges, processes that compare answers (judge.py), and how much of them the answers of a batch may take.

Invariant: an answer's verdict does not depend on the answers beside it, unless these take so much that the budget is
spent: answers that cost more than their limit are cut off, and take what is left of the budget in even shares, so that
the quick ones are judged first, whatever their order is. Any thread may ask.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from . import judge

LEAST = 0.05  # seconds of a processor that any answer may take; nine of ten take less than 0.02
MOST = 16  # judges at once
EACH = 8  # questions that are worth another judge


class JudgeRequest(NamedTuple):
    """Two answers in LaTeX. Unless it is `marked`, math-verify looks for the answer in `response`."""

    response: str
    answer: str
    marked: bool


class Verdict(NamedTuple):
    """Whether two answers are equal; `cut_off` tells why that was not found out, `late` that it was for its time."""

    equal: bool
    cut_off: str = ""
    late: bool = False


class JudgeKilled(RuntimeError):
    """Somebody has killed a judge before it was ready."""


class Judge:
    """A process of its own with so many bytes of address space. RuntimeError where it does not start."""

    def __init__(self, memory: int = judge.MEMORY) -> None:
        # Sets are ordered by hashes, and sympy goes by their order.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-P", str(Path(judge.__file__)), str(memory)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin = self.process.stdin
        self._stdout = self.process.stdout
        _living.append(self)
        if self._stdout.readline() != b"ready\n":
            status = self.process.wait()
            self.end()
            raise (JudgeKilled if status < 0 else RuntimeError)(
                f"the process that runs math-verify did not start: it ended with status {status}"
            )

    def ask(self, question: JudgeRequest, limit: float, timeout: float) -> Verdict | None:
        """The verdict, None where the judge was killed."""
        line = json.dumps([question.response, question.marked, question.answer, limit, timeout]).encode() + b"\n"
        with suppress(BrokenPipeError):
            left = memoryview(line)
            while left:  # a signal may cut a write
                left = left[self._stdin.write(left) :]
            if said := self._stdout.readline().strip():
                return Verdict(said == b"1", judge.REFUSED.get(said, "").format(limit=limit), said == b"time")
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


# All of this process, and those that nobody asks right now: as many as there were questions at once.
_living: list[Judge] = []
_idle: list[Judge] = []


def equal(questions: Sequence[JudgeRequest], *, timeout: float, budget: float) -> list[Verdict]:
    """What math-verify finds of each question, in at most `timeout` seconds of a processor.

    `budget` are the seconds that those may take together which come to no verdict, but any of them LEAST. RuntimeError
    where no judge starts.
    """
    found = {
        q: Verdict(False, judge.REFUSED[b"size"])
        for q in questions
        if judge.beyond(q.answer) or (q.marked and judge.beyond(q.response))
    }
    left = [q for q in dict.fromkeys(questions) if q not in found]
    limit = 0.0
    # Limits are counted, not what was measured: who is asked again is the same on every machine, but for what comes
    # close to a limit.
    while left and (share := min(timeout, max(LEAST, budget / len(left)))) > limit:
        limit = share
        found |= zip(left, _asked(left, limit, timeout), strict=True)
        left = [q for q in left if found[q].late]
        budget -= limit * len(left)
    return [found[q] for q in questions]


def _asked(questions: Sequence[JudgeRequest], limit: float, timeout: float) -> list[Verdict]:
    """The verdicts of judges beside each other, in the order of the questions."""

    def ask(question: JudgeRequest) -> Verdict:
        return _ask(question, limit, timeout)

    judges = min(len(os.sched_getaffinity(0)), MOST, -(-len(questions) // EACH))
    if judges < 2:
        return [*map(ask, questions)]
    with ThreadPoolExecutor(judges, "judge") as threads:
        return [*threads.map(ask, questions)]


def _ask(question: JudgeRequest, limit: float, timeout: float) -> Verdict:
    status = 0
    for left in range(
        1 + len(_idle), -1, -1
    ):  # a judge that someone else killed has not judged, and those that wait may all be dead
        try:
            one = _taken()
        except JudgeKilled:
            if not left:
                raise
            continue
        try:
            verdict = one.ask(question, limit, timeout)
        except BaseException:  # an interrupt leaves a question unanswered
            one.end()
            raise
        if verdict is not None:
            _idle.append(one)
            return verdict
        status = one.process.wait()
        one.end()
    return Verdict(False, f"the process that runs math-verify dies again and again, last with status {status}")


def _taken() -> Judge:
    with suppress(IndexError):  # another thread may take the last one meanwhile
        while one := _idle.pop():
            if one.process.poll() is None:
                return one
            one.end()
    return Judge()


def _end_all() -> None:
    for one in list(_living):
        one.end()


def _forget_all() -> None:
    _idle.clear()
    for one in list(_living):
        one.forget()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
