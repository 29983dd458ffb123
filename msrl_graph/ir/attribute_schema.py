"""How a statement declares what it may say: a frozen dataclass, whose fields are its attributes.

    epochs: int = attr(COUNT, 1, "How often each row is learnt from in an iteration.")

Invariant: the kind of an attribute (with its unit), its default and its meaning stand in its field and nowhere else.
The checks of a program, `--explain`, docs/language.md and whoever uses the value read them there. A field without
`attr` is no attribute.
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
    """What an attribute takes, what it is without being stated, and what it means.

    `shown` are the words for a default that no program can state ("all rows"). `must`: there is no default, and who
    leaves the attribute out is shown this value. `head`: it stands before the braces, not among what is between them.
    `named`: an engine keeps to it that names it among what it `heeds` (backends/spec.py), and no other.
    """

    kind: ValueKind
    default: Any
    doc: str
    shown: str | None = None
    must: str = ""
    head: bool = False
    named: bool = False


def attr(
    kind: ValueKind,
    default: T,
    doc: str,
    shown: str | None = None,
    *,
    must: str = "",
    head: bool = False,
    named: bool = False,
) -> T:
    """A field that is an attribute, declared as `Attribute` says."""
    metadata = {_KEY: Attribute(kind, default, doc, shown, must, head, named)}
    return dataclasses.field(default=default, metadata=metadata)


class DeclaredAttributes:
    """What a statement says, typed; `declared` is what it may say."""

    @classmethod
    @functools.cache
    def _fields(cls) -> Mapping[str, Attribute]:
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        return MappingProxyType({f.name: f.metadata[_KEY] for f in fields if _KEY in f.metadata})

    @classmethod
    @functools.cache
    def declared(cls) -> Mapping[str, Attribute]:
        """The attributes between the braces, by name, in the order in which they are told."""
        return MappingProxyType({name: a for name, a in cls._fields().items() if not a.head})

    @classmethod
    @functools.cache
    def kinds(cls) -> Mapping[str, ValueKind]:
        return MappingProxyType({name: a.kind for name, a in cls.declared().items()})

    @classmethod
    def values(cls, stated: Mapping[str, Expr]) -> dict[str, Any]:
        """The Python values of what is stated, by name."""
        known = cls._fields()
        found = dict[str, Any]()
        for name, expr in stated.items():
            if name in known and (value := known[name].kind.value(expr)) is not None:
                found[name] = value
        return found

    @classmethod
    def of_stated(cls, stated: Mapping[str, Expr]) -> Self:
        """What a statement says by these attributes."""
        values = cls.values(stated) if stated else None
        return cls(**values) if values else cls._silent()

    @classmethod
    @functools.cache
    def _silent(cls) -> Self:
        """What is said where nothing is stated: one for all of a large graph."""
        return cls()

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those of some attributes that are not what they are by default."""
        declared = self.declared()
        return [name for name in names if name in declared and getattr(self, name) != declared[name].default]


class NodeAttributes(DeclaredAttributes):
    """What a node says."""

    @classmethod
    def of(cls, node: Node) -> Self:
        """Worked out once for each node: a planner asks millions of times."""
        views = node.views
        found: Self = views[cls] if cls in views else views.setdefault(cls, cls._of(node))
        return found

    @classmethod
    def _of(cls, node: Node) -> Self:
        return cls.of_stated(node.attributes)


class EdgeAttributes(DeclaredAttributes):
    """What an edge says."""

    @classmethod
    def of(cls, edge: Edge) -> Self:
        views = edge.views
        found: Self = views[cls] if cls in views else views.setdefault(cls, cls.of_stated(edge.attributes))
        return found
