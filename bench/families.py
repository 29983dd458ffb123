"""Each model family from end to end: a small model at random is trained, delivered, saved, and read by transformers.

The program is that of the example: ZeRO 3 on two ranks, and generation by two ranks that share each layer. Prints a
table (tests/support/short_runs.py says of what) and, last, one line of JSON.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import smoke

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
import conformance
import short_runs
from rich.console import Console
from rich.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", choices=conformance.FAMILIES, default=conformance.FAMILIES)
    parser.add_argument("--iterations", type=int, default=10)
    options = smoke.parse(parser, families=["qwen2"], iterations=2)
    table = Table(title=f"{options.iterations} iterations of each family", title_justify="left", box=None)
    for heading in ("family", "seconds", "an iteration", "loss", "drift", "after export"):
        table.add_column(heading)
    most = {"drift": 0.0, "exported": 0.0}
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            found = short_runs.train_family(Path(folder) / "run", family, options.iterations)
        most = {name: max(value, getattr(found, name)) for name, value in most.items()}
        loss = f"{found.losses[0]:.3f} to {found.losses[-1]:.3f}"
        seconds = f"{found.seconds:.0f}", f"{found.iteration:.2f}"
        table.add_row(family, *seconds, loss, f"{found.drift:.1e}", f"{found.exported:.1e}")
        print(f"{family}: {found}", file=sys.stderr, flush=True)
    Console(width=120).print(table)
    print(json.dumps({"bench": "families", "families": len(options.families), **most}))


if __name__ == "__main__":
    main()
