"""Time of the proof that weights arrived, and of a digest.

The proof is measured in iterations of examples/arithmetic on two ranks; the digest per element, compared with reading
it once, on one core. The first iterations are left out: first passes take longer. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import smoke
import torch

from msrl_graph.runtime.rank.weight_proof import AT_ONCE
from msrl_graph.runtime.weights.digest import Digest
from msrl_graph.sharding.layout import full_box

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic" / "grpo.rlg"
MAIN = "import sys; from msrl_graph.cli import run_main; sys.exit(run_main())"
LEFT_OUT = 3
SHAPE = (4096, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the digests")
    options = smoke.parse(parser, iterations=LEFT_OUT + 2, rounds=1)
    lines = run(options.iterations)
    proofs = [line["phases"]["proof"] for line in lines]
    seconds = [line["seconds"] for line in lines]
    share = sum(proofs) / sum(seconds)
    proof = statistics.median(proofs) * 1e3
    iteration_ms = statistics.median(seconds) * 1e3
    print(f"an iteration {iteration_ms:.0f} ms, of it the proof {proof:.1f} ms (medians); {share:.2%} of all seconds")
    figures = {"proof_share": round(share, 5)}
    torch.set_num_threads(1)
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        values = torch.randn(SHAPE).to(dtype)
        digest = Digest([SHAPE], dtype, "cpu", AT_ONCE["host"])
        figures[f"digest_{name}_ns"] = nanoseconds(
            partial(digest.digests, [values], digest.position_weights(full_box(SHAPE))), options.rounds
        )
        figures[f"sum_{name}_ns"] = nanoseconds(values.sum, options.rounds)
    print(json.dumps(figures))


def nanoseconds(act: Callable[[], object], rounds: int) -> float:
    """Return nanoseconds per element, the minimum of some rounds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return round(min(times) / math.prod(SHAPE) * 1e9, 3)


def run(iterations: int) -> list[dict[str, Any]]:
    """Return the metrics of a run, without the first iterations."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--iterations", str(iterations), "--out", f"{folder}/run"]
        subprocess.run([sys.executable, "-c", MAIN, str(EXAMPLE), *options], check=True, capture_output=True)
        lines = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if line.get("iteration", -1) >= LEFT_OUT]


if __name__ == "__main__":
    main()
