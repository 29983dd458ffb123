"""Memory, predicted and measured, in each phase of an iteration on 1 to 4 ranks.

Several models, layouts and options are measured. Every row is at its bound, so that the plan and the run are
comparable. Measured are the storages of tensors at a rank's peak, for the busiest rank. Prints a table and, last, one
line of JSON with the number of combinations and the largest deviation.
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
    parser.add_argument("cases", nargs="*", help="names of cases (default: all)")
    parser.add_argument(
        "--moments", action="store_true", help="show what a device held at its peak, and the plan's items"
    )
    parser.add_argument("--engines", default="fsdp hf", help="engines whose cases are measured")
    options = smoke.parse(parser, cases=[CASES[0].name])
    worst = ("", 1.0)
    count = 0
    print(f"{'':<40}{'phase':<10}{'place':<8}{'predicted':>14}{'measured':>14}{'ratio':>8}")
    for case in (*CASES, *walk_offloaded.CASES):
        if (options.cases and case.name not in options.cases) or not {*case.engines} <= {*options.engines.split()}:
            continue
        with tempfile.TemporaryDirectory() as folder:
            plan = case.write(Path(folder))
            peaks = measured(plan, options.moments)
            ranks.end()  # torch caches what it has sharded, so each case gets its own processes
        for (place, phase), (wanted, items) in predicted(plan).items():
            got, moment = peaks[place, phase]
            ratio = wanted / got
            count += 1
            worst = max(worst, (f"{case.name}, {phase} ({place})", ratio), key=lambda entry: abs(entry[1] - 1))
            print(f"{case.name:<40}{phase:<10}{place:<8}{wanted:>14,}{got:>14,}{ratio:>8.3f}", flush=True)
            if options.moments and place == "device":
                print(f"  {items}\n  {moment}")
    print(json.dumps({"combinations": count, "largest_deviation": round(abs(worst[1] - 1), 4), "of": worst[0]}))


if __name__ == "__main__":
    main()
