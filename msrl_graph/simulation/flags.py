"""The flags of `msrl-compile --simulate`.

Invariant: each combination of flags can also be expressed as arguments of `simulate`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..diagnostics import Diagnostic, Fault
from ..ir.plan import Plan
from . import simulate, simulation_text


def simulate_by_flags(plan: Plan, options: argparse.Namespace, width: int, colour: bool) -> str:
    """Simulate a plan with the assumptions in the flags; return text or JSON.

    If `--trace` is given, write the trace to the file that the flag names. Raises Fault.
    """
    functions = {
        name.strip(): seconds.strip() for name, _, seconds in (flag.partition("=") for flag in options.function or ())
    }
    simulation = simulate(
        plan,
        iterations=options.simulate,
        lengths=options.lengths or (),
        stragglers=options.stragglers or "",
        function_seconds=functions,
    )
    if options.trace is not None:
        try:
            Path(options.trace).write_text(simulation.trace(), encoding="utf-8")
        except OSError as error:
            raise Fault(
                Diagnostic("missing-file", f"cannot write `{options.trace}`: {str(error.strerror).lower()}")
            ) from None
    return simulation.to_json() if options.format == "json" else simulation_text(simulation, width, colour)
