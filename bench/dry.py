"""Random programs, compiled and run dry in random orders (tests/simulation/test_dry.py).

Prints how many programs were tried, their outcomes, and the first that waits for ever, hands a row out twice, or
generates with weights that are older than allowed. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
import smoke
from dry_outcomes import KINDNESS, Outcome, holds
from random_programs import FILE, FUNCTIONS, programs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = smoke.parse(parser, programs=3)
    ends: Counter[str] = Counter()
    outcomes: list[Outcome] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / FILE).write_text(FUNCTIONS)

        # Without shrinking: a waiting program is found in a second, its smallest form in minutes.
        @seed(options.seed)
        @settings(
            max_examples=options.programs,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(programs(), st.integers(0, 10**6), KINDNESS)
        def tried(text: str, order: int, kindness: float) -> None:
            outcomes.append(holds(text, Path(folder), order, kindness))
            ends[outcomes[-1].how] += 1

        tried()
    print(
        f"{sum(ends.values())} programs in {time.monotonic() - begin:.0f} s:",
        ", ".join(f"{count} {end}" for end, count in ends.most_common()),
    )
    stale = sum(outcome.stale for outcome in outcomes)
    oldest = max((outcome.oldest for outcome in outcomes), default=0)
    figures = {"programs": len(outcomes), "resumed": sum(outcome.resumed for outcome in outcomes)}
    print(json.dumps({"bench": "dry", **figures, "stale_iterations": stale, "oldest": oldest}))


if __name__ == "__main__":
    main()
