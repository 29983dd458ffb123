"""Resharding between real engines on 1 to 8 ranks, with random layouts.

The cases are those of tests/with_engines/test_resharded.py with more layouts. Prints how many were tried, between which
engines, and the peak compared with the plan's. Stops at the first wrong case and prints its program's statements. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import ranks
import resharded
import smoke

from msrl_graph.diagnostics import NOWHERE

CORE = 4  # draws into one vLLM, which takes seconds to create


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--generators", nargs="+", default=["hf", "vllm"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainers", nargs="+", default=["fsdp", "megatron"])
    few = {"draws": 1, "ranks": [2], "generators": ["hf"], "trainers": ["fsdp"]}
    options = smoke.parse(parser, **few)
    ranks.Team.PATIENCE = 900.0  # eight ranks may share two cores
    draw = Random(options.seed)
    begin = time.monotonic()
    done = 0
    peaks: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        folder = resharded.written(Path(directory))
        names = [name for name in resharded.MODELS if name != resharded.LARGE]
        while done < options.draws:
            world, model, generator = (draw.choice(choices) for choices in (options.ranks, names, options.generators))

            def draw_case(
                wanted: object = None, chosen: tuple[object, ...] = (world, generator, model)
            ) -> tuple[object, ...]:
                world, generator, model = chosen
                return resharded.drawn(draw, folder, world, draw.choice(options.trainers), generator, model, wanted)

            cases = [draw_case()]
            plan = cases[0][1]
            if generator == "vllm" and plan.reshards[0].mode != "send":
                wanted = replace(plan.placement("actor.generate").layout, span=NOWHERE)
                cases += [draw_case(wanted) for _ in range(CORE - 1)]
            for (pair, _), peak in zip(cases, resharded.tried(cases, done), strict=True):
                peaks[pair.trainer, pair.generator, pair.ranks].append(peak)
                done += 1
                print(f"{time.monotonic() - begin:6.0f} s {peak:.3f} {pair}", flush=True)
    for (trainer, generator, world), ratios in sorted(peaks.items()):
        print(f"{trainer} -> {generator} on {world}: {len(ratios)}, peak / plan {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"{done} pairs of layouts, all bit for bit, in {time.monotonic() - begin:.0f} s")
    all_ratios = [peak for ratios in peaks.values() for peak in ratios]
    print(json.dumps({"pairs": done, "peak_over_plan_most": round(max(all_ratios), 3)}))


if __name__ == "__main__":
    main()
