"""Fields of a row by name; a name with dots means a field of a nested object.

Invariant: only this module splits names at dots. The whole name has priority: `a.b` is the field `b` of the object `a`
only if the row itself has no field `a.b`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Absent(LookupError):
    """An error for a row that does not have a field of the requested name.

    - `inside`: the longest prefix of the requested name that is a field of the row; "" means the row itself.
    - `part`: the rest of the requested name.
    - `found`: the value of the field `inside`. This value is not an object, or is an object without the field `part`.
    """

    def __init__(self, inside: str, part: str, found: Any) -> None:
        super().__init__(part)
        self.inside = inside
        self.part = part
        self.found = found


def find(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of the field `name` of a row.

    Raises Absent if the row does not have the field.
    """
    inside = ""
    part = name
    item: Any = row
    while isinstance(item, Mapping):
        if part in item:
            return item[part]
        prefix = next((candidate for candidate in _dotted_prefixes(part) if candidate in item), "")
        if not prefix:
            break
        inside = f"{inside}.{prefix}" if inside else prefix
        part = part[len(prefix) + 1 :]
        item = item[prefix]
    raise Absent(inside, part, item)


def names(row: Mapping[str, Any]) -> dict[str, bool]:
    """List the fields of a row and of all nested objects, by dotted name.

    The value for each name is True if the field is an object that is not empty.
    """
    listed: dict[str, bool] = {}
    open_objects: list[tuple[str, Mapping[str, Any]]] = [("", row)]
    while open_objects:
        prefix, item = open_objects.pop(0)
        for key, value in item.items():
            is_object = isinstance(value, Mapping) and bool(value)
            listed.setdefault(prefix + key, is_object)
            if is_object:
                open_objects.append((f"{prefix}{key}.", value))
    return listed


def _dotted_prefixes(name: str) -> Iterator[str]:
    """Yield the prefixes of a name that end before a dot, the longest first."""
    return (name[:end] for end in range(len(name) - 1, 0, -1) if name[end] == ".")
