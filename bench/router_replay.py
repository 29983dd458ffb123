"""Drift between trainer and generator on a mixture of experts, with and without router replay.

The model's routers score experts in pairs that are equal up to rounding (tests/support/mixture.py), and are frozen. So
the trainer often chooses other experts than the generator. The last line is JSON: for each variant the mean and the
largest `logp_drift`, and the largest `logp_drift_max`, over all iterations and seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import smoke

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from mixture import tied
from routed import BY_GENERATOR, TIED, declared, run

VARIANTS = {
    "without replay": (TIED,),
    "routes of responses": (
        TIED,
        declared(2, 3),
        *((old, new.replace(", of_prompt", "")) for old, new in BY_GENERATOR),
        ("    of_prompt : i16[prompt, 2, 3]\n", ""),
    ),
    "routes of prompts and responses": (TIED, declared(2, 3), *BY_GENERATOR),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=5)
    options = smoke.parse(parser, seeds=[0], iterations=1)
    figures: dict[str, dict[str, float]] = {}
    for name, changes in VARIANTS.items():
        lines = []
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                lines += run(Path(folder) / "run", tied, *changes, iterations=options.iterations, seed=seed)[0]
        drifts = [line["logp_drift"] for line in lines]
        largest = max(line["logp_drift_max"] for line in lines)
        figures[name] = {"mean": sum(drifts) / len(drifts), "largest mean": max(drifts), "largest": largest}
        print(f"{name:<34}" + "  ".join(f"{key} {value:.1e}" for key, value in figures[name].items()), flush=True)
    print(json.dumps({"bench": "router_replay", "drift": figures}))


if __name__ == "__main__":
    main()
