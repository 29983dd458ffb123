"""A discrete-event simulation of a plan's iterations; the rows vary in length.

Lengths of rows are sampled from a distribution or read from a file. The simulation includes slow devices, streaming,
balancing, partial rollout and staleness.

Invariant: the simulation measures nothing and depends on nothing but its arguments. Equal arguments give the same
result, byte for byte, in any process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..backends import ENGINES
from ..diagnostics import public
from ..ir.plan import Plan
from .assumptions import read_specs
from .result import Simulation
from .run import Simulator
from .text import simulation_text


@public
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

    - `lengths`: the number of tokens of each row. `DISTRIBUTION(…)` is for all columns that generations write,
      `COLUMN=DISTRIBUTION(…)` for one column. Distributions are fixed(n), uniform(least, most), normal(mean, std),
      lognormal(median, sigma) and geometric(mean). A file name is also allowed instead of a distribution
      (docs/guides/simulation.md). A length never exceeds the bound that the program states for the column. Without
      `lengths`, every row has the length of this bound.
    - `stragglers`: the share of devices that are slow, and how many times slower they compute, for example `1% x3`.
    - `function_seconds`: the seconds that each function node takes per row, as a number or a distribution.
    - `seed`: the seed of the simulation. The default is the seed of the run.

    Raises Fault for arguments that cannot be parsed.
    """
    texts = (lengths,) if isinstance(lengths, str) else tuple(lengths)
    specs = read_specs(plan, texts, stragglers, function_seconds or {}, plan.deploy.run.seed if seed is None else seed)
    return Simulator(plan, ENGINES, specs).run(max(1, iterations))


__all__ = ["Simulation", "simulate", "simulation_text"]
