"""The calculator environment with failing rows, for bench/environments.py.

Some rows fail, each in one of the possible ways, and some run what a hostile policy might write. The outcome of a row
is a function of its generator, `fate`.
"""

import os
import re
import time

from msrl_graph.tools import run_python

# For each action the number of rows per thousand, and how it is counted; "": it does not fail.
FATES = {
    "raises": (4, "raised"),
    "returns no tuple": (4, "rubbish"),
    "returns no number": (4, "rubbish"),
    "sleeps": (2, "timeout"),
    "hangs in C": (2, "timeout"),
    "exits": (4, "exited"),
    "aborts": (4, "exited"),
    "floods memory": (4, "memory"),
    "runs a fork bomb": (10, ""),
    "runs an endless loop": (10, ""),
    "runs a memory flood": (10, ""),
    "runs endless output": (10, ""),
    "runs a thief": (10, ""),
    "runs a socket": (10, ""),
}
HOSTILE = {  # code, and the expected reason
    "runs a fork bomb": ("import os\nwhile True: os.fork()", "raised"),
    "runs an endless loop": ("while True: pass", "time"),
    "runs a memory flood": ("found = []\nwhile True: found.append(bytearray(10**6))", "memory"),
    "runs endless output": ("while True: print('x' * 1000)", "output"),
    "runs a thief": ("print(open('/etc/passwd').read())", "raised"),
    "runs a socket": ("import socket; socket.create_connection(('127.0.0.1', 22))", "raised"),
}


def fate(rng) -> str:
    """Return what a row does in its first step; "" for the calculator's normal step."""
    number = int(rng.integers(1000))
    for name, (share, _) in FATES.items():
        if number < share:
            return name
        number -= share
    return ""


class Faulty:
    """An environment for sums of two numbers, like the calculator."""

    def reset(self, answer: str, rng):
        self.answer = answer
        self.fate = fate(rng)

    def step(self, text: str):
        if self.fate in HOSTILE:
            code, reason = HOSTILE[self.fate]
            ran = run_python(code, seconds=3 if reason == "time" else 15)
            assert ran.reason == reason, ran
        match self.fate:
            case "raises":
                raise ConnectionError("the server is gone")
            case "returns no tuple":
                return text
            case "returns no number":
                return None, "much", True
            case "sleeps":
                time.sleep(10**6)
            case "hangs in C":
                re.match("(a*)*b", "a" * 60)
            case "exits":
                os._exit(3)
            case "aborts":
                os.abort()
            case "floods memory":
                chunks = []
                while True:
                    chunks.append(bytearray(10**7))
        self.fate = ""
        if not text.endswith("="):
            return None, float(text == self.answer), True
        sum_of_two = re.fullmatch(r"(\d{1,3})\+(\d{1,3})=", text)
        return str(int(sum_of_two[1]) + int(sum_of_two[2])) if sum_of_two else "-", 0.0, False
