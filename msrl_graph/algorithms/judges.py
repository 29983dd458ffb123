"""A pool of judge processes that compare answers (judge.py), with a time budget.

Invariant: the verdict on an answer does not depend on the other answers of the batch, unless the other answers use up
the time budget. Answers are compared in rounds. In a round, every answer has the same time limit: the rest of the
budget, divided by the number of the round's answers. An answer that reaches the limit is compared again in the next
round, with a higher limit. So cheap answers are judged first, whatever the order of the answers. Any thread may call
`equal`.
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

LEAST = 0.05  # seconds of CPU time that every answer may take; nine of ten take less than 0.02
MOST = 16  # most judges at once
EACH = 8  # questions per additional judge


class JudgeRequest(NamedTuple):
    """Two answers in LaTeX to compare.

    If `marked` is true, `response` is exactly the answer. Otherwise math-verify searches `response` for the answer.
    """

    response: str
    answer: str
    marked: bool


class Verdict(NamedTuple):
    """The result of comparing two answers with math-verify.

    - `equal`: whether the two answers are equal.
    - `cut_off`: the reason why the comparison was not finished, or "" if the comparison was finished.
    - `late`: whether the comparison was cut off by its time limit.
    """

    equal: bool
    cut_off: str = ""
    late: bool = False


class JudgeKilled(RuntimeError):
    """The error for a judge that another process killed before the judge was ready."""


class Judge:
    """A judge process with `memory` bytes of address space.

    Raises RuntimeError if the process does not start.
    """

    def __init__(self, memory: int = judge.MEMORY) -> None:
        # sympy depends on the order of sets, which depends on hashes.
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
        """Send a question and return the verdict, or None if the judge was killed.

        The comparison is limited to `limit` seconds of CPU time, and to 10 * `timeout` seconds of wall-clock time.
        """
        line = json.dumps([question.response, question.marked, question.answer, limit, timeout]).encode() + b"\n"
        with suppress(BrokenPipeError):
            unsent = memoryview(line)
            while unsent:  # a signal may cut a write
                unsent = unsent[self._stdin.write(unsent) :]
            if reply := self._stdout.readline().strip():
                return Verdict(reply == b"1", judge.REFUSED.get(reply, "").format(limit=limit), reply == b"time")
        return None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._close()

    def forget(self) -> None:
        """Close the pipes to a judge that the parent process of this process started.

        A forked child process calls this method. The judge process itself is left running, because it belongs to the
        parent.
        """
        self._close()
        self.process.returncode = 0

    def _close(self) -> None:
        _living.remove(self)
        self._stdin.close()
        self._stdout.close()


# All judges of this process, and the idle judges. Their number is the largest number of questions asked at once.
_living: list[Judge] = []
_idle: list[Judge] = []


def equal(questions: Sequence[JudgeRequest], *, timeout: float, budget: float) -> list[Verdict]:
    """Compare each pair of answers with math-verify; return one verdict per pair.

    A pair takes at most `timeout` seconds of CPU time. `budget` limits the total CPU time, in seconds, that is spent on
    pairs whose comparison does not finish. Even if the budget is spent, the limit of a pair is at least the smaller of
    LEAST and `timeout`. Raises RuntimeError if no judge process starts.
    """
    verdicts = {
        question: Verdict(False, judge.REFUSED[b"size"])
        for question in questions
        if judge.is_too_large(question.answer) or (question.marked and judge.is_too_large(question.response))
    }
    pending = [question for question in dict.fromkeys(questions) if question not in verdicts]
    limit = 0.0
    # The budget counts limits, not measured times, so the pairs that are asked again are the same on every machine,
    # except for pairs close to a limit.
    while pending and (share := min(timeout, max(LEAST, budget / len(pending)))) > limit:
        limit = share
        verdicts |= zip(pending, _asked(pending, limit, timeout), strict=True)
        pending = [question for question in pending if verdicts[question].late]
        budget -= limit * len(pending)
    return [verdicts[question] for question in questions]


def _asked(questions: Sequence[JudgeRequest], limit: float, timeout: float) -> list[Verdict]:
    """Send questions to several judges in parallel; return one verdict per question.

    Each comparison is limited to `limit` seconds of CPU time, and to 10 * `timeout` seconds of wall-clock time.
    """

    def ask(question: JudgeRequest) -> Verdict:
        return _ask(question, limit, timeout)

    judges = min(len(os.sched_getaffinity(0)), MOST, -(-len(questions) // EACH))
    if judges < 2:
        return [*map(ask, questions)]
    with ThreadPoolExecutor(judges, "judge") as threads:
        return [*threads.map(ask, questions)]


def _ask(question: JudgeRequest, limit: float, timeout: float) -> Verdict:
    status = 0
    # A judge that another process killed has given no verdict, and all idle judges may be dead.
    for attempts_left in range(1 + len(_idle), -1, -1):
        try:
            judge_process = _take_judge()
        except JudgeKilled:
            if not attempts_left:
                raise
            continue
        try:
            verdict = judge_process.ask(question, limit, timeout)
        except BaseException:  # an interrupt leaves a question unanswered
            judge_process.end()
            raise
        if verdict is not None:
            _idle.append(judge_process)
            return verdict
        status = judge_process.process.wait()
        judge_process.end()
    return Verdict(False, f"the process that runs math-verify keeps dying, last with status {status}")


def _take_judge() -> Judge:
    with suppress(IndexError):  # another thread may have taken the last one
        while judge_process := _idle.pop():
            if judge_process.process.poll() is None:
                return judge_process
            judge_process.end()
    return Judge()


def _end_all() -> None:
    for judge_process in list(_living):
        judge_process.end()


def _forget_all() -> None:
    _idle.clear()
    for judge_process in list(_living):
        judge_process.forget()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
