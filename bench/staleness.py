"""Ages of rows in simulated iterations of random programs.

The programs have staleness, refills, evaluations and checkpoints, rows of lognormal lengths, slow devices and slow
functions. A number of iterations is simulated for each. The status is 1 if a row is older than its program allows or of
a version that is not sent, if the versions of a run's iterations decrease, or if the rows by age do not add up to all
rows. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

from msrl_graph import compile, simulate

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
import smoke
from stale_programs import ages, stale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--iterations", type=int, default=250, help="iterations of each program")
    parser.add_argument("--seed", type=int, default=0)
    options = smoke.parse(parser, programs=2, iterations=20)
    warnings.simplefilter("ignore")
    draw = random.Random(options.seed)
    began = time.monotonic()
    counted: Counter[int] = Counter()
    rows = oldest = allowed = 0
    for _ in range(options.programs):
        program = stale(draw)
        plan = compile("a.rlg", text=program.text)
        ages_found = ages(simulate(plan, iterations=options.iterations, **program.options), program)
        counted += ages_found
        rows += options.iterations * plan.graph.rows[-1]
        oldest = max(oldest, *ages_found)
        allowed = max(allowed, program.staleness)
    assert sum(counted.values()) == rows
    iterations = options.programs * options.iterations
    print(f"{iterations:,} iterations of {options.programs} programs in {time.monotonic() - began:.0f} s")
    for age, number in sorted(counted.items()):
        print(f"{age} versions old: {number:,} rows, {100 * number / rows:.1f} %")
    summary = {
        "iterations": iterations,
        "programs": options.programs,
        "rows": rows,
        "oldest": oldest,
        "allowed": allowed,
    }
    print(
        json.dumps(
            {
                "bench": "staleness",
                **summary,
                "by_age": {str(versions): count for versions, count in sorted(counted.items())},
            }
        )
    )


if __name__ == "__main__":
    main()
