"""The sample of the tests: every function, with one of its cases."""

import re
import subprocess
import sys
from collections import Counter

from folders import ROOT

FILE = "tests/algorithms/test_params.py"


def collected(*options: str) -> Counter[str]:
    """Return the number of cases of each test function of a file."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options, FILE]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200).stdout
    return Counter(re.findall(r"::(\w+)", out))


def test_a_sample_has_every_function_with_one_of_its_cases() -> None:
    whole = collected()
    assert max(whole.values()) > 1
    assert collected("--sample") == dict.fromkeys(whole, 1)
