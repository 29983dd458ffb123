"""Declarations of attributes, as the fields of one frozen dataclass per statement.

    epochs: int = attr(COUNT, 1, "Passes over the rows of an iteration.")

Invariant: the field of an attribute is the only place that states the attribute's kind (with its unit), default and
meaning. The checks of a program, `--explain`, docs/reference/language/ and all code that uses the value read this
field. A field without `attr` is not an attribute.
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

    - `shown`: the text that documentation shows as the default, such as "all rows". It is used if the default is a
      value that a program cannot state.
    - `must`: the value that is suggested if a program does not state a required attribute; "" for an attribute that is
      not required.
    - `head`: whether the attribute is written before the braces of its statement, not between them.
    - `opt_in`: whether an engine supports the attribute only if its spec says so, because few engines know it.
    """

    kind: ValueKind
    default: Any
    doc: str
    shown: str | None = None
    must: str = ""
    head: bool = False
    opt_in: bool = False


def attr(
    kind: ValueKind,
    default: T,
    doc: str,
    shown: str | None = None,
    *,
    must: str = "",
    head: bool = False,
    opt_in: bool = False,
) -> T:
    """Declare an attribute, as a field of a dataclass.

    The arguments are the fields of `Attribute`.
    """
    metadata = {_KEY: Attribute(kind, default, doc, shown, must, head, opt_in)}
    return dataclasses.field(default=default, metadata=metadata)


class DeclaredAttributes:
    """Typed values of the attributes of a statement.

    Each subclass declares the attributes of one statement as its fields.
    """

    @classmethod
    @functools.cache
    def _fields(cls) -> Mapping[str, Attribute]:
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        return MappingProxyType({field.name: field.metadata[_KEY] for field in fields if _KEY in field.metadata})

    @classmethod
    @functools.cache
    def declared(cls) -> Mapping[str, Attribute]:
        """Return the declarations of the attributes in a statement's braces, by name.

        The order of the declarations is the order of the documentation.
        """
        return MappingProxyType({name: attribute for name, attribute in cls._fields().items() if not attribute.head})

    @classmethod
    @functools.cache
    def kinds(cls) -> Mapping[str, ValueKind]:
        return MappingProxyType({name: attribute.kind for name, attribute in cls.declared().items()})

    @classmethod
    def values(cls, stated: Mapping[str, Expr]) -> dict[str, Any]:
        """Return the Python values of the attributes that a program states, by name.

        `stated` has the expression of each attribute. Unknown attributes are left out. An expression is also left out
        if it does not have the kind of its attribute.
        """
        known = cls._fields()
        values = dict[str, Any]()
        for name, expr in stated.items():
            if name in known and (value := known[name].kind.value(expr)) is not None:
                values[name] = value
        return values

    @classmethod
    def of_stated(cls, stated: Mapping[str, Expr]) -> Self:
        """Return an instance with the values that a program states.

        Attributes that the program does not state have their defaults.
        """
        values = cls.values(stated) if stated else None
        return cls(**values) if values else cls._defaults()

    @classmethod
    @functools.cache
    def _defaults(cls) -> Self:
        """Return the instance in which all attributes have their defaults.

        The instance is cached, since many nodes of a large graph use it.
        """
        return cls()

    def list_changed(self, names: Iterable[str]) -> list[str]:
        """Return the attributes among `names` whose values differ from the defaults."""
        declared = self.declared()
        return [name for name in names if name in declared and getattr(self, name) != declared[name].default]


class NodeAttributes(DeclaredAttributes):
    """Attributes of a node."""

    @classmethod
    def of(cls, node: Node) -> Self:
        """Return the typed values of a node's attributes.

        The values are cached, since a planner asks for them millions of times.
        """
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
