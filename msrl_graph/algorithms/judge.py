"""The program that asks the library math-verify whether two answers are equal: a question a line, a verdict a line.

Invariant: a question takes at most its limit of processor time, ten times `timeout` by the clock and MEMORY bytes of
address space, whatever the answers are: sympy may compute for days without coming back to Python, so the system's
timers end the process. It is a child of one that has loaded the library and used it, and forks the next in
milliseconds. What would make numbers of more than BITS bits is refused before it is computed, the same on every
machine. A judge ends with its caller, even a killed one: it reads the end of its pipe, at the latest when its time is
over. This file is run as its program, so it imports nothing of the package.
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
CLOCK = 10  # seconds by the clock for one of processor time: a busy machine changes no score
BITS = 2**15  # of a whole number; 2024^{2024} has 22,000
LONG = 1000  # characters of an answer
DEEP = 16  # brackets in brackets
TIMERS = {signal.SIGPROF, signal.SIGALRM}
SPENT = 3  # exit status of a judge that has answered and wants a fresh one in its place
# What a verdict may be beside 0 and 1, and what is told of it.
REFUSED = {
    b"time": "math-verify took more than {limit:.3g} s",
    b"memory": "math-verify took too much memory",
    b"size": (
        f"it makes a number of more than {BITS:,} bits, is longer than {LONG:,} characters, or brackets stand "
        f"more than {DEEP} deep"
    ),
    b"died": "math-verify died of it",
}

_BRACKET = re.compile(r"([({\[])|([)}\]])")
# Questions whose like others begin faster after: what the library loads late, and what its parser learns.
_USUAL = (
    (r"x = 5", r"5"),
    (r"2x+2", r"2(x+1)"),
    (r"\left(1, \frac{1}{2}\right)", r"(1,0.5)"),
    (r"\{1,\sqrt{2}\}", r"\{\sqrt 2, 1\}"),
    (r"[1,2)\cup(3,\infty)", r"1 \le x < 2"),
    (r"\begin{pmatrix}1\\x^{2}\end{pmatrix}", r"\begin{pmatrix}1\\x\end{pmatrix}"),
    (r"((\sin(\frac{\pi}{6}))^{2}-1)!", r"3\%"),
)


class TooLarge(BaseException):
    """Nothing is computed of this; no `except Exception` of a library's takes it for an error."""


def beyond(text: str) -> bool:
    """Whether an answer is larger than any that is asked about: reading it would take seconds."""
    if len(text) > LONG:
        return True
    depth = 0
    for opens, _ in _BRACKET.findall(text):
        depth += 1 if opens else -1
        if depth > DEEP:
            return True
    return False


def serve(memory: int) -> None:
    """Questions as `[response, marked, answer, limit, timeout]`, until the end of the file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, meant for the caller
    for timer in TIMERS:
        signal.signal(timer, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TIMERS)
    with suppress(ValueError, OSError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    verdicts = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no verdict

    import ctypes
    import gc
    import logging

    logging.disable()
    _bound()
    for response, answer in _USUAL:
        _equal(response, True, answer)
    gc.freeze()
    library = ctypes.CDLL(None)
    own = os.getpid()
    with suppress(BrokenPipeError):  # a caller that is gone
        verdicts.write(b"ready\n")
        while True:
            child = os.fork()
            if not child:
                library.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with its parent
                if os.getppid() == own:
                    _answer(verdicts, memory)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if -status in TIMERS:
                verdicts.write(b"time\n")
            elif -status in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
                verdicts.write(b"died\n")
            elif status != SPENT:
                os._exit(
                    status if status >= 0 else 1
                )  # the end of the file, or somebody has killed it: the caller asks another one


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
        except Exception:  # what cannot be read
            verdict = b"0"
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        spent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > memory // 2
        verdicts.write(
            (b"memory" if spent and verdict == b"0" else verdict) + b"\n"
        )  # the library takes a MemoryError for no answer
        if spent or verdict == b"memory":
            os._exit(SPENT)


_golds: dict[str, list[Any]] = {}


def _equal(response: str, marked: bool, answer: str) -> bool:
    import math_verify

    if answer not in _golds:
        if len(_golds) > 256:
            _golds.clear()
        _golds[answer] = math_verify.parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
    gold = _golds[answer]
    given = math_verify.parse(rf"\boxed{{{response}}}" if marked else response, parsing_timeout=None)
    verdict = _same_number(gold, given)
    if verdict is None:
        return bool(math_verify.verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None))
    return verdict


def _same_number(gold: list[Any], given: list[Any]) -> bool | None:
    """Whether two constants are the same; None where they are none, or may be.

    That constants differ is seen here in a tenth of the time. With decimals it is all decided here: to six places as by
    math-verify, which finds all numbers below 1e-6 the same, so of small ones to five digits.
    """
    from sympy import Float, UnevaluatedExpr  # percent is the unevaluated hundredth

    try:
        if any(x[0].has(UnevaluatedExpr) for x in (gold, given)):
            return None
        one, two = (complex(x[0].doit()) for x in (gold, given))
    except (AttributeError, IndexError, TypeError, ValueError, OverflowError):  # no numbers, or large ones
        return None
    size = max(abs(one), abs(two))
    apart = abs(one - two)
    if any(x[0].has(Float) for x in (gold, given)):
        return apart <= min(5e-7, 1e-5 * size)
    return False if size < 1e100 and apart > 1e-5 * size else None


def _bound() -> None:
    """Has sympy refuse numbers that are too large before it computes them, and math-verify what is too large to be
    read."""
    from math_verify import parser
    from mpmath import libmp
    from sympy import Integer, Rational, binomial, factorial, factorial2, gamma, subfactorial
    from sympy.core import evalf
    from sympy.functions.combinatorial.factorials import FallingFactorial, RisingFactorial

    def refuse(owner: Any, name: str, large: Callable[..., bool]) -> None:
        plain = getattr(owner, name)

        def bounded(*arguments: Any, **options: Any) -> Any:
            if large(*arguments):
                raise TooLarge
            return plain(*arguments, **options)

        setattr(owner, name, staticmethod(bounded) if name == "eval" else bounded)

    def power(base: Any, exponent: Any) -> bool:
        whole = isinstance(exponent, Rational) and exponent.is_finite and base.is_finite
        return whole and abs(exponent.p) * (max(abs(base.p), base.q).bit_length() - 1) > BITS * exponent.q

    def product(largest: Any, count: Any) -> bool:
        """Of so many factors up to the largest."""
        return (
            isinstance(count, Integer)
            and isinstance(largest, Integer)
            and abs(count.p) * abs(largest.p).bit_length() > BITS
        )

    for number in (Integer, Rational):
        refuse(number, "_eval_power", power)
    refuse(evalf, "evalf", lambda _, precision, *__: precision > BITS)  # in bits: it grows with an exponent
    for module in (libmp, libmp.libelefun, evalf):
        refuse(module, "mpf_pow_int", lambda _, exponent, *__: abs(exponent) > 2**64)
    for factors in (factorial, factorial2, gamma, subfactorial):
        refuse(factors, "eval", lambda n: product(n, n))
    for factors in (FallingFactorial, RisingFactorial):
        refuse(factors, "eval", product)
    refuse(binomial, "eval", lambda n, k: product(n, k) and product(n, n - k))
    for read in ("latex2sympy", "parse_expr"):
        refuse(parser, read, beyond)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
