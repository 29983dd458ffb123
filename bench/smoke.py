"""`--smoke` of the benches, and the last line of their output.

`--smoke` uses tiny sizes on the same code path, to see in seconds that a bench runs.

Invariant: a bench prints its figures as the last line of stdout, one JSON object. Figures of a smoke run are
meaningless, so no bar on them sets its exit status; what must hold at any size still does.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any


def parse(parser: argparse.ArgumentParser, **small: Any) -> argparse.Namespace:
    """Parse the command line; `small` are the defaults of options under `--smoke`."""
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see in seconds that it runs")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**small)
    return parser.parse_args()


def figures(output: str) -> dict[str, Any]:
    """Return the object on the last line of a bench's output.

    Raises ValueError if there is none, or if it has no figure or one that is not finite.
    """
    lines = output.rstrip("\n").split("\n")
    try:
        result = json.loads(lines[-1])
    except ValueError:
        raise ValueError(f"the last line is not JSON: {lines[-1]!r}") from None
    if not isinstance(result, dict):
        raise ValueError(f"the last line is not a JSON object: {lines[-1]!r}")
    numbers = [*_numbers(result)]
    if not numbers or not all(map(math.isfinite, numbers)):
        raise ValueError(f"the last line has no figures, or some that are not finite: {lines[-1]!r}")
    return result


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _numbers(part)
    elif isinstance(value, int | float):
        yield value
