"""A discrete-event simulation of a plan's iterations with rows of varying length.

Lengths are sampled from a distribution or read from a file. The simulation includes slow devices, streaming, balancing,
partial rollout and staleness. Invariant: nothing is measured and nothing is random: equal arguments give equal bytes,
in any process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..backends import ENGINES
from ..ir.plan import Plan
from .assumptions import read_specs
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
    """Simulate a number of iterations of a complete plan.

    - `lengths`: `DISTRIBUTION(…)` in tokens for what is generated, `COLUMN=DISTRIBUTION(…)` for another column, of
      fixed(n), uniform(least, most), normal(mean, std), lognormal(median, sigma), geometric(mean); or a file
      (docs/guides/simulation.md). Lengths are clipped to a column's bound, which is also their default.
    - `stragglers`: the share of slow devices and how many times slower they compute, as `1% x3`.
    - `function_seconds`: seconds per row, or a distribution of them, by function node.
    - `seed`: by default the run's.

    Raises Fault for arguments that it cannot read.
    """
    texts = (lengths,) if isinstance(lengths, str) else tuple(lengths)
    specs = read_specs(plan, texts, stragglers, function_seconds or {}, plan.deploy.run.seed if seed is None else seed)
    return Simulator(plan, ENGINES, specs).run(max(1, iterations))


__all__ = ["Simulation", "simulate", "simulation_text"]
