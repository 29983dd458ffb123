"""What iterations of a plan take when rows differ: a discrete-event simulation with response lengths drawn from a
distribution or read from a file, slow devices, and all that a graph says of streaming, balancing, partial rollout and
staleness.

Invariant: nothing is measured and nothing random: the same arguments give the same bytes, in any process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..backends import ENGINES
from ..ir.plan import Plan
from .assumptions import read
from .result import Simulation
from .run import Simulator
from .text import simulation_text


def simulate(
    plan: Plan,
    *,
    iterations: int = 10,
    lengths: str | Sequence[str] = (),
    stragglers: str = "",
    function_seconds: Mapping[str, str | float] | None = None,
    seed: int | None = None,
) -> Simulation:
    """Simulates so many iterations of a whole plan. Raises Fault for arguments that it cannot read.

    `lengths`: `DISTRIBUTION(…)` in tokens for what is generated, `COLUMN=DISTRIBUTION(…)` for another column, of
    fixed(n), uniform(least, most), normal(mean, std), lognormal(median, sigma), geometric(mean); or a file
    (docs/simulation.md). Lengths are clipped to a column's bound, which they have where nothing is stated.
    `stragglers`: as `1% x3`, the share of devices that compute so many times slower. `function_seconds`: seconds a row,
    or a distribution of them, by function node. `seed`: the run's where it is None.
    """
    texts = (lengths,) if isinstance(lengths, str) else tuple(lengths)
    specs = read(plan, texts, stragglers, function_seconds or {}, plan.deploy.run.seed if seed is None else seed)
    return Simulator(plan, ENGINES, specs).run(max(1, iterations))


__all__ = ["Simulation", "simulate", "simulation_text"]
