"""The program of a judge: a process that compares answers with math-verify.

A judge reads one question per line from its input and writes one verdict per line. This file runs as a program, so it
imports nothing from msrl_graph.

Invariant: every question is answered within three limits, whatever the answers are. The limits are `limit` seconds of
CPU time, 10 * `timeout` seconds of wall-clock time, and MEMORY bytes of address space. `limit` and `timeout` are part
of a question (see `serve`).

- sympy may compute for days without returning to Python. So comparisons are computed in a child process, which timers
  of the operating system kill. The parent process has already loaded and used math-verify, so it can replace a killed
  child in milliseconds, with a fork.
- Expressions that would create integers of more than BITS bits are refused before they are computed. The refused
  expressions are the same on every machine.
- A judge ends when its caller ends, even if the caller is killed: the judge then reads the end of its input. A judge
  that is computing ends at the latest when the time limit of its current question is over.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MEMORY = 2**30  # bytes of address space; a judge starts with 200 MB of it
CLOCK = 10  # wall-clock seconds per second of CPU time, so that a busy machine changes no score
BITS = 2**15  # most bits of an integer; 2024^{2024} has 22,000
LONG = 1000  # most characters of an answer
DEEP = 16  # most levels of nested brackets
TIMERS = {signal.SIGPROF, signal.SIGALRM}
SPENT = 3  # exit status of a judge that has answered and asks to be replaced
# Verdicts other than 0 and 1, with their messages.
REFUSED = {
    b"time": "math-verify took more than {limit:.3g} s",
    b"memory": "math-verify took too much memory",
    b"size": (
        f"it makes a number of more than {BITS:,} bits, is longer than {LONG:,} characters, or nests brackets "
        f"more than {DEEP} deep"
    ),
    b"died": "math-verify crashed on it",
}

_BRACKET = re.compile(r"([({\[])|([)}\]])")
# Warm-up questions: after them the library has loaded its lazy parts and its parser has filled its caches.
_WARM_UP = (
    (r"x = 5", r"5"),
    (r"2x+2", r"2(x+1)"),
    (r"\left(1, \frac{1}{2}\right)", r"(1,0.5)"),
    (r"\{1,\sqrt{2}\}", r"\{\sqrt 2, 1\}"),
    (r"[1,2)\cup(3,\infty)", r"1 \le x < 2"),
    (r"\begin{pmatrix}1\\x^{2}\end{pmatrix}", r"\begin{pmatrix}1\\x\end{pmatrix}"),
    (r"((\sin(\frac{\pi}{6}))^{2}-1)!", r"3\%"),
)


class TooLarge(BaseException):
    """The error for an expression that is too large to compute.

    The class extends BaseException, so that no `except Exception` in a library catches the error.
    """


def is_too_large(text: str) -> bool:
    """Return whether an answer is too large to parse.

    An answer is too large if it has more than LONG characters or nests brackets more than DEEP levels deep. Parsing
    such an answer would take seconds.
    """
    if len(text) > LONG:
        return True
    depth = 0
    for opens, _ in _BRACKET.findall(text):
        depth += 1 if opens else -1
        if depth > DEEP:
            return True
    return False


def serve(memory: int) -> None:
    """Read questions from standard input and write verdicts, until the input ends.

    A question is one line with the JSON list `[response, marked, answer, limit, timeout]`. JudgeRequest in judges.py
    describes the first three elements. The comparison is limited to `limit` seconds of CPU time, and to 10 * `timeout`
    seconds of wall-clock time.

    A verdict is one line: `1` (equal), `0` (different), or the reason why the comparison was not finished, such as
    `time`. `memory` is the limit of this process's address space, in bytes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is meant for the caller
    for timer in TIMERS:
        signal.signal(timer, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TIMERS)
    with suppress(ValueError, OSError):  # a lower limit is already set
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    verdicts = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output that a library prints is not a verdict

    import ctypes
    import gc
    import logging

    logging.disable()
    _limit_library()
    for response, answer in _WARM_UP:
        _equal(response, True, answer)
    gc.freeze()
    library = ctypes.CDLL(None)
    own = os.getpid()
    with suppress(BrokenPipeError):  # the caller has ended
        verdicts.write(b"ready\n")
        while True:
            child = os.fork()
            if not child:
                library.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the child dies with its parent
                if os.getppid() == own:
                    _answer(verdicts, memory)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if -status in TIMERS:
                verdicts.write(b"time\n")
            elif -status in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
                verdicts.write(b"died\n")
            elif status != SPENT:
                # The end of the input, or another process killed the child: the caller asks another judge.
                os._exit(status if status >= 0 else 1)


def _answer(verdicts: Any, memory: int) -> None:
    from sympy.core import random

    for line in sys.stdin.buffer:
        random.seed(0)
        try:
            response, marked, answer, limit, timeout = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, limit)
            signal.setitimer(signal.ITIMER_REAL, CLOCK * timeout)
            verdict = b"1" if _equal(response, marked, answer) else b"0"
        except TooLarge:
            verdict = b"size"
        except MemoryError:
            verdict = b"memory"
        except Exception:  # an answer that cannot be parsed
            verdict = b"0"
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        needs_replacement = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > memory // 2
        # The library treats a MemoryError as a missing answer.
        verdicts.write((b"memory" if needs_replacement and verdict == b"0" else verdict) + b"\n")
        if needs_replacement or verdict == b"memory":
            os._exit(SPENT)


_golds: dict[str, list[Any]] = {}


def _equal(response: str, marked: bool, answer: str) -> bool:
    import math_verify

    if answer not in _golds:
        if len(_golds) > 256:
            _golds.clear()
        _golds[answer] = math_verify.parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
    gold = _golds[answer]
    candidate = math_verify.parse(rf"\boxed{{{response}}}" if marked else response, parsing_timeout=None)
    verdict = _same_number(gold, candidate)
    if verdict is None:
        return bool(math_verify.verify(gold, candidate, allow_set_relation_comp=True, timeout_seconds=None))
    return verdict


def _same_number(gold: list[Any], candidate: list[Any]) -> bool | None:
    """Return whether two constants are equal, or None if math-verify must decide.

    `gold` and `candidate` are what math-verify parsed from two answers. If one of them is not a constant, the result is
    None. For exact constants that differ, the result is False, in a tenth of the time that math-verify would need. For
    exact constants that are too close to tell apart, the result is None.

    If one of the constants contains a decimal, the result is always True or False. The constants are then compared to
    six decimal places, as in math-verify. Six places would make all numbers below 1e-6 equal, so numbers below 0.05 are
    compared to five significant digits.
    """
    from sympy import Float, UnevaluatedExpr  # percent is the unevaluated hundredth

    try:
        if any(expressions[0].has(UnevaluatedExpr) for expressions in (gold, candidate)):
            return None
        first, second = (complex(expressions[0].doit()) for expressions in (gold, candidate))
    except (AttributeError, IndexError, TypeError, ValueError, OverflowError):  # not numbers, or large ones
        return None
    size = max(abs(first), abs(second))
    difference = abs(first - second)
    if any(expressions[0].has(Float) for expressions in (gold, candidate)):
        return difference <= min(5e-7, 1e-5 * size)
    return False if size < 1e100 and difference > 1e-5 * size else None


def _limit_library() -> None:
    """Patch sympy and math-verify to refuse expressions that are too large.

    The patched functions raise TooLarge: sympy before it computes such an expression, math-verify before it parses
    such an expression.
    """
    from math_verify import parser
    from mpmath import libmp
    from sympy import Integer, Rational, binomial, factorial, factorial2, gamma, subfactorial
    from sympy.core import evalf
    from sympy.functions.combinatorial.factorials import FallingFactorial, RisingFactorial

    def refuse(owner: Any, name: str, large: Callable[..., bool]) -> None:
        original = getattr(owner, name)

        def bounded(*arguments: Any, **options: Any) -> Any:
            if large(*arguments):
                raise TooLarge
            return original(*arguments, **options)

        setattr(owner, name, staticmethod(bounded) if name == "eval" else bounded)

    def power(base: Any, exponent: Any) -> bool:
        is_rational = isinstance(exponent, Rational) and exponent.is_finite and base.is_finite
        return is_rational and abs(exponent.p) * (max(abs(base.p), base.q).bit_length() - 1) > BITS * exponent.q

    def product(largest: Any, count: Any) -> bool:
        """Return whether a product of `count` factors is too large.

        Each factor is at most `largest`.
        """
        return (
            isinstance(count, Integer)
            and isinstance(largest, Integer)
            and abs(count.p) * abs(largest.p).bit_length() > BITS
        )

    for number in (Integer, Rational):
        refuse(number, "_eval_power", power)
    refuse(evalf, "evalf", lambda _, precision, *__: precision > BITS)  # in bits: the precision grows with an exponent
    for module in (libmp, libmp.libelefun, evalf):
        refuse(module, "mpf_pow_int", lambda _, exponent, *__: abs(exponent) > 2**64)
    for factors in (factorial, factorial2, gamma, subfactorial):
        refuse(factors, "eval", lambda n: product(n, n))
    for factors in (FallingFactorial, RisingFactorial):
        refuse(factors, "eval", product)
    refuse(binomial, "eval", lambda n, k: product(n, k) and product(n, n - k))
    for parser_name in ("latex2sympy", "parse_expr"):
        refuse(parser, parser_name, is_too_large)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
