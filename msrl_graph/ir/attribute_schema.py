"""Declarations of attributes, as the fields of a frozen dataclass per statement.

    epochs: int = attr(COUNT, 1, "Passes over the rows of an iteration.")

Invariant: the kind of an attribute (with its unit), its default and its meaning are in its field and nowhere else. The
checks of a program, `--explain`, docs/reference/language/ and all code that uses the value read them there. A field
without `attr` is not an attribute.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Self, TypeVar

from .graph import Edge, Expr, Node
from .kinds import ValueKind

T = TypeVar("T")
_KEY = "attribute"


@dataclasses.dataclass(frozen=True)
class Attribute:
    """The kind, the default and the meaning of an attribute.

    - `shown`: the words for a default that no program can state ("all rows").
    - `must`: there is no default; this value is suggested if the attribute is missing.
    - `head`: it is written before the braces, not between them.
    """

    kind: ValueKind
    default: Any
    doc: str
    shown: str | None = None
    must: str = ""
    head: bool = False


def attr(
    kind: ValueKind,
    default: T,
    doc: str,
    shown: str | None = None,
    *,
    must: str = "",
    head: bool = False,
) -> T:
    """Declare a field that is an attribute.

    The arguments are the fields of `Attribute`.
    """
    metadata = {_KEY: Attribute(kind, default, doc, shown, must, head)}
    return dataclasses.field(default=default, metadata=metadata)


class DeclaredAttributes:
    """Typed values of the attributes of a statement.

    `declared` returns the attributes that it may have.
    """

    @classmethod
    @functools.cache
    def _fields(cls) -> Mapping[str, Attribute]:
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        return MappingProxyType({field.name: field.metadata[_KEY] for field in fields if _KEY in field.metadata})

    @classmethod
    @functools.cache
    def declared(cls) -> Mapping[str, Attribute]:
        """Return the attributes between the braces by name, in documentation order."""
        return MappingProxyType({name: attribute for name, attribute in cls._fields().items() if not attribute.head})

    @classmethod
    @functools.cache
    def kinds(cls) -> Mapping[str, ValueKind]:
        return MappingProxyType({name: attribute.kind for name, attribute in cls.declared().items()})

    @classmethod
    def values(cls, stated: Mapping[str, Expr]) -> dict[str, Any]:
        """Return the Python values of stated attributes by name."""
        known = cls._fields()
        values = dict[str, Any]()
        for name, expr in stated.items():
            if name in known and (value := known[name].kind.value(expr)) is not None:
                values[name] = value
        return values

    @classmethod
    def of_stated(cls, stated: Mapping[str, Expr]) -> Self:
        """Return the values of a statement that states these attributes."""
        values = cls.values(stated) if stated else None
        return cls(**values) if values else cls._defaults()

    @classmethod
    @functools.cache
    def _defaults(cls) -> Self:
        """Return the defaults, one object for all nodes of a large graph."""
        return cls()

    def list_changed(self, names: Iterable[str]) -> list[str]:
        """Return the attributes among `names` that differ from their defaults."""
        declared = self.declared()
        return [name for name in names if name in declared and getattr(self, name) != declared[name].default]


class NodeAttributes(DeclaredAttributes):
    """Attributes of a node."""

    @classmethod
    def of(cls, node: Node) -> Self:
        """Return the values of a node, cached: a planner asks for them millions of times."""
        views = node.views
        view: Self = views[cls] if cls in views else views.setdefault(cls, cls._of(node))
        return view

    @classmethod
    def _of(cls, node: Node) -> Self:
        return cls.of_stated(node.attributes)


class EdgeAttributes(DeclaredAttributes):
    """Attributes of an edge."""

    @classmethod
    def of(cls, edge: Edge) -> Self:
        views = edge.views
        view: Self = views[cls] if cls in views else views.setdefault(cls, cls.of_stated(edge.attributes))
        return view
