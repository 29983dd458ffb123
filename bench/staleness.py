"""Ages of rows in simulated iterations: random programs with staleness, refills, evaluations and checkpoints, with rows
of lognormal lengths, slow devices and slow functions.

Of each program so many iterations are simulated. Status 1 where a row is older than its program allows or of a version
that is not sent, where the versions of a run's iterations fall, or where the rows by age are not all rows. The last
line is JSON.
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
    parser.add_argument("--iterations", type=int, default=250, help="of each program")
    parser.add_argument("--seed", type=int, default=0)
    options = smoke.parse(parser, programs=2, iterations=20)
    warnings.simplefilter("ignore")
    draw = random.Random(options.seed)
    began = time.monotonic()
    counted: Counter[int] = Counter()
    rows = oldest = allowed = 0
    for _ in range(options.programs):
        some = stale(draw)
        plan = compile("a.rlg", text=some.text)
        found = ages(simulate(plan, iterations=options.iterations, **some.options), some)
        counted += found
        rows += options.iterations * plan.graph.rows[-1]
        oldest, allowed = max(oldest, *found), max(allowed, some.staleness)
    assert sum(counted.values()) == rows
    iterations = options.programs * options.iterations
    print(f"{iterations:,} iterations of {options.programs} programs in {time.monotonic() - began:.0f} s")
    for age, number in sorted(counted.items()):
        print(f"{age} versions old: {number:,} rows, {100 * number / rows:.1f} %")
    told = {"iterations": iterations, "programs": options.programs, "rows": rows, "oldest": oldest, "allowed": allowed}
    print(json.dumps({"bench": "staleness", **told, "by_age": {str(k): n for k, n in sorted(counted.items())}}))


if __name__ == "__main__":
    main()
