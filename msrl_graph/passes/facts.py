"""Values of a plan that can be compared with those of another plan.

Invariant: a fact has a name that users know. Positions in source files and explanations are not facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ..diagnostics.quantities import duration, size

Value = str | float | bool | None


@dataclass(frozen=True)
class Fact:
    """A value of a plan, for comparison with another plan.

    - `unit`: the unit of a number (bytes, s, …). Numbers with a unit can be subtracted from each other. A unit
      that is shown with the number has a line in `format_value`.
    - `detail`: whether the fact only follows from other facts of the same item.
    """

    value: Value
    unit: str = ""
    detail: bool = False


# The facts of a section, by item (a node, an edge, a phase) and by the item's property.
Section = dict[str, dict[str, Fact]]


def field_facts(part: Any, skip: Sequence[str] = ()) -> dict[str, Fact]:
    """Return the fields of a dataclass or dict as facts, by name.

    A field of a nested object has a dotted name, `field.subfield`.
    """
    if isinstance(part, dict):
        items = part.items()
    elif is_dataclass(part):
        items = {
            field.name: getattr(part, field.name) for field in fields(part) if field.name not in ("span", *skip)
        }.items()
    elif isinstance(part, tuple):
        return {"": Fact(", ".join(map(str, part)))}
    else:
        return {"": Fact(part)}
    return {
        f"{name}.{inner}" if inner else str(name): fact
        for name, value in items
        for inner, fact in field_facts(value).items()
    }


def format_value(value: Value, unit: str) -> str:
    """Format the value of a fact with its unit."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if unit in ("bytes", "bytes/s"):
        return size(value) + unit[5:]
    if unit == "s":
        return duration(value)
    if unit == "FLOP/s":
        return f"{value / 1e12:.4g} T"
    return (
        f"{value:,.4g}" if unit == "tokens/s/device" else f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"
    )
