"""What a caller in Python asks `compile` and `check` for, besides the program.

Invariant: what comes out is of the kinds that the pipeline takes; anything else is a Fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from ..diagnostics import Diagnostic, Fault, kind_of


def asked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, those that are None left out, with `sets` as texts of the language. Raises Fault."""
    found = {name: value for name, value in options.items() if value is not None}
    for name in found.keys() & {"text", "deploy", "model"}:
        if not isinstance(found[name], str):
            _refuse(f"`{name}` is a str, not {kind_of(found[name])}")
    budget = found.get("budget", 0)
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget >= 0:
        _refuse(f"`budget` is a number of seconds, not {budget if isinstance(budget, float) else kind_of(budget)}")
    if "sets" in found:
        if not isinstance(found["sets"], Mapping):
            _refuse(f'`sets` is a dict, as in {{"group": "8"}}, not {kind_of(found["sets"])}')
        found["sets"] = {_name(name): _text(name, value) for name, value in found["sets"].items()}
    return found


def _name(name: object) -> str:
    return name if isinstance(name, str) else _refuse(f"a name in `sets` is a str, not {kind_of(name)}")


def _text(name: object, value: object) -> str:
    """A value as it stands in a file."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) < 10**18:
        return str(int(value))
    if isinstance(value, float) and math.isfinite(value):
        return str(float(value))
    unfit = value if isinstance(value, float) else "that large an int" if isinstance(value, int) else kind_of(value)
    _refuse(f"`{name}` in `sets` is a str, a number or a bool, not {unfit}")


def _refuse(message: str) -> NoReturn:
    raise Fault(Diagnostic("bad-value", message))
