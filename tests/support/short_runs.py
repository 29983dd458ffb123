"""Runs of few iterations that train a small model of some family with the example's program."""

import math
import time
from dataclasses import dataclass

from mixture import mixture
from place import MINE, SMALL, TRAINED, Place, metrics


def run(folder, *changes, made=mixture, iterations=3):
    """The folder of a run, whose rewards have something to learn from."""
    folder.mkdir()
    place = Place(folder)
    (folder / "model").unlink()
    made(folder / "model")
    place.function("return float(sum(map(ord, response)) % 3)")
    place.write(MINE, *changes, *TRAINED, evaluated=False)
    code, _, err = place.run("p.rlg", *SMALL, "--iterations", str(iterations), "--out", "out")
    assert code == 0, err
    place.assert_clean()
    return folder / "out"


@dataclass(frozen=True)
class FamilyRun:
    """What a run of a family has shown.

    - `seconds`: of the whole run, and of one iteration after the first
    - `losses`: of each iteration
    - `drift`: between a token's log-probabilities in the generator, which has delivered weights, and in the trainer
    - `exported`: between those of transformers, which has loaded the saved folder, and those of the engine `hf`
    """

    seconds: float
    iteration: float
    losses: list[float]
    drift: float
    exported: float


def train_family(folder, family, iterations=3):
    """Train a family from end to end: ZeRO 3 on two ranks, delivered to two ranks that share each layer, and saved."""
    import conformance

    begun = time.perf_counter()
    out = run(folder, made=conformance.WRITTEN[family], iterations=iterations)
    seconds = time.perf_counter() - begun
    lines = metrics(out)
    assert len(lines) == iterations and all(line["reshard_bytes"] > 0 for line in lines)
    assert all(math.isfinite(line[name]) for line in lines for name in ("loss", "grad_norm"))
    conformance.assert_saved(folder / "model", out / "weights" / "actor")
    return FamilyRun(
        seconds,
        sorted(line["seconds"] for line in lines[1:])[(iterations - 1) // 2],
        [line["loss"] for line in lines],
        max(line["logp_drift_max"] for line in lines),
        conformance.measure_folder(out / "weights" / "actor"),
    )
