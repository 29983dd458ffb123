"""Fields of a row by name: its own, and with dots those of the objects in it.

Invariant: a name is taken apart here only. The whole name comes first: `a.b` is a part of `a` where the row itself has
no field `a.b`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Absent(LookupError):
    """A row has no field of a name. `inside` names the innermost field on the way that the row has ("" is the row),
    `part` is the rest of the name, and `found` the value of `inside`, which lacks that part or is not an object."""

    def __init__(self, inside: str, part: str, found: Any) -> None:
        super().__init__(part)
        self.inside = inside
        self.part = part
        self.found = found


def find(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field. Raises Absent."""
    inside = ""
    part = name
    found: Any = row
    while isinstance(found, Mapping):
        if part in found:
            return found[part]
        head = next((h for h in _heads(part) if h in found), "")
        if not head:
            break
        inside = f"{inside}.{head}" if inside else head
        part = part[len(head) + 1 :]
        found = found[head]
    raise Absent(inside, part, found)


def names(row: Mapping[str, Any]) -> dict[str, bool]:
    """List the fields of a row and of all objects in it, by dotted name, each with whether it is an object."""
    listed: dict[str, bool] = {}
    open_objects: list[tuple[str, Mapping[str, Any]]] = [("", row)]
    while open_objects:
        prefix, item = open_objects.pop(0)
        for key, value in item.items():
            holds = isinstance(value, Mapping) and bool(value)
            listed.setdefault(prefix + key, holds)
            if holds:
                open_objects.append((f"{prefix}{key}.", value))
    return listed


def _heads(name: str) -> Iterator[str]:
    """The beginnings of a name that end before a dot, the longest first."""
    return (name[:i] for i in range(len(name) - 1, 0, -1) if name[i] == ".")
