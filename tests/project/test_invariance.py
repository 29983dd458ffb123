"""`make invariance` in short: rows that arrive in any order, on two ranks, compute what one rank does."""

import json
import subprocess
import sys

import pytest
from place import ROOT


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_shuffled_arrival_computes_what_one_rank_does():
    names = ["shuffled arrival"]
    only = [word for name in names for word in ("--only", name)]
    command = [sys.executable, str(ROOT / "bench" / "invariance.py"), "--iterations", "3", *only]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert list(figures) == names
    for name, row in figures.items():
        assert row["tokens"] and max(row[k] for k in ("loss", "reward", "grad_norm", "weights")) < 1e-4, (name, row)
