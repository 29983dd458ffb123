"""Growth of the driver's memory with the length of a run.

A tiny program runs on two ranks; its resident bytes are sampled by iteration. The last line is JSON: bytes per
iteration, by least squares over the iterations after the first 400 (`--begin`), when all bounded buffers have reached
their size.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import smoke
from disturbed import Place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--begin", type=int, default=400, help="number of iterations to leave out")
    parser.add_argument("--poll", type=float, default=2.0, help="seconds between two samples")
    options = smoke.parse(parser, iterations=24, begin=4, poll=0.1)
    with tempfile.TemporaryDirectory() as folder:
        tiny = [("save = 2, restarts = 1000", "restarts = 3"), (f"every = {options.iterations // 2}", "every = 100000")]
        tiny += [("mini_batch = 16", "mini_batch = 4")]
        place = Place(Path(folder), "grpo", options.iterations, tiny)
        place.sets = ["--set", "prompts=2", "--set", "group=2"]
        process = place.start("run")
        samples = list[tuple[int, int]]()
        while process.poll() is None:
            time.sleep(options.poll)
            for pid in place.drivers():
                with suppress(psutil.Error):
                    samples.append((place.lines("run"), psutil.Process(pid).memory_info().rss))
                    if len(samples) % 60 == 0:
                        print(f"{samples[-1][0]} lines, {samples[-1][1] / 1e6:.1f} MB", flush=True)
        status = process.wait()
        late = np.array([sample for sample in samples if sample[0] >= options.begin], float)
        if len(late) < 3:
            log = (place.folder / "run.log").read_text()[-2000:]
            raise SystemExit(
                f"{log}\nthe run ended with status {status} after {place.lines('run')} "
                f"lines: {options.begin} are too few"
            )
        grown = float(np.polyfit(late[:, 0], late[:, 1], 1)[0])
        print(json.dumps({"iterations": options.iterations, "bytes_an_iteration": round(grown), "status": status}))


if __name__ == "__main__":
    main()
