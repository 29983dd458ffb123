"""Memory, predicted against measured: each phase of an iteration on 1 to 4 ranks, for several models, layouts and
options.

Every row is at its bound, so that the plan and the run speak of the same thing. What is measured is the storages of
tensors at a rank's peak, the busiest rank's. Prints a table and, last, one line of JSON with the number of combinations
and the largest deviation.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import ranks
import smoke
import walk_offloaded
from walk import CASES, measured, predicted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="names of cases; all where none is named")
    parser.add_argument("--moments", action="store_true", help="what a device held at its peak, and the plan's items")
    parser.add_argument("--engines", default="fsdp hf", help="of which cases are measured")
    options = smoke.parse(parser, cases=[CASES[0].name])
    worst = ("", 1.0)
    count = 0
    print(f"{'':<40}{'phase':<10}{'place':<8}{'predicted':>14}{'measured':>14}{'ratio':>8}")
    for case in (*CASES, *walk_offloaded.CASES):
        if (options.cases and case.name not in options.cases) or not {*case.engines} <= {*options.engines.split()}:
            continue
        with tempfile.TemporaryDirectory() as folder:
            plan = case.write(Path(folder))
            found = measured(plan, options.moments)
            ranks.end()  # torch keeps something of what it has divided: each case gets processes of its own
        for (place, phase), (wanted, items) in predicted(plan).items():
            got, moment = found[place, phase]
            ratio = wanted / got
            count += 1
            worst = max(worst, (f"{case.name}, {phase} ({place})", ratio), key=lambda w: abs(w[1] - 1))
            print(f"{case.name:<40}{phase:<10}{place:<8}{wanted:>14,}{got:>14,}{ratio:>8.3f}", flush=True)
            if options.moments and place == "device":
                print(f"  {items}\n  {moment}")
    print(json.dumps({"combinations": count, "largest_deviation": round(abs(worst[1] - 1), 4), "of": worst[0]}))


if __name__ == "__main__":
    main()
