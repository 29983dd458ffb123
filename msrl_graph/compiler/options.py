"""Validation of the options of `compile` and `check` for callers in Python.

Invariant: the result has only types that the pipeline accepts. Any other type raises a Fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from ..diagnostics import Diagnostic, Fault, kind_of


def validate_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as the pipeline accepts them.

    Options that are None are left out of the result. The names and values in `sets` are converted to text. Raises a
    Fault for an option of the wrong type.
    """
    validated = {name: value for name, value in options.items() if value is not None}
    for name in validated.keys() & {"text", "deploy", "model"}:
        if not isinstance(validated[name], str):
            _refuse(f"`{name}` is a str, not {kind_of(validated[name])}")
    budget = validated.get("budget", 0)
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget >= 0:
        _refuse(f"`budget` is a number of seconds, not {budget if isinstance(budget, float) else kind_of(budget)}")
    if "sets" in validated:
        if not isinstance(validated["sets"], Mapping):
            _refuse(f'`sets` is a dict, as in {{"group": "8"}}, not {kind_of(validated["sets"])}')
        validated["sets"] = {_name(name): _text(name, value) for name, value in validated["sets"].items()}
    return validated


def _name(name: object) -> str:
    return name if isinstance(name, str) else _refuse(f"a name in `sets` is a str, not {kind_of(name)}")


def _text(name: object, value: object) -> str:
    """Format a value as it would be written in a program file."""
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
