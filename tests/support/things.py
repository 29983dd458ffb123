"""What an expression may be: what it names, or of which type it is, and what its parts are then.

Invariant: an empty tuple says that it is not known; of several alternatives each may be.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

PLAIN = ("int", "str", "float", "bool")
MAPPINGS = ("dict", "Mapping")
LISTS = ("list", "set", "frozenset", "Iterator", "Iterable", "Sequence", "List", "tuple", "Tuple")


class Ref(NamedTuple):
    """A module, class, function or value, by its whole name."""

    name: str


class Of(NamedTuple):
    """An instance of a type, as an annotation says it with whole names."""

    type: str


class Keys(NamedTuple):
    """A mapping with no other keys than these."""

    names: frozenset[str]


class Method(NamedTuple):
    """Of an instance of a class of ours."""

    name: str


Thing = Ref | Of | Keys | Method
Things = tuple[Thing, ...]  # what something may be, each of it; none: unknown


@dataclass
class Scope:
    """Names of a function, class or module, with what is around it; `owner`: the class whose method it is."""

    name: str
    around: Scope | None = None
    owner: str = ""
    bound: dict[str, Things] = field(default_factory=dict)

    def find(self, name: str) -> Things:
        if name in self.bound:
            return self.bound[name]
        return self.around.find(name) if self.around else ()


def either(*some: Iterable[Thing]) -> Things:
    return tuple(dict.fromkeys(thing for things in some for thing in things))


@cache
def bare(text: str) -> list[str]:
    """The types of which something is, None left out."""
    parts: list[ast.expr] = [ast.parse(text, mode="eval").body]
    while any(isinstance(p, ast.BinOp) for p in parts):
        parts = [q for p in parts for q in ((p.left, p.right) if isinstance(p, ast.BinOp) else (p,))]
    found = [ast.unparse(p) for p in parts if ast.unparse(p) != "None"]
    return [f[len("Optional[") : -1] if f.startswith("Optional[") else f for f in found]


@cache
def arguments(text: str) -> list[str]:
    """Of `list[a]` what stands in the brackets."""
    found = ast.parse(text, mode="eval").body
    assert isinstance(found, ast.Subscript)
    return [ast.unparse(p) for p in (found.slice.elts if isinstance(found.slice, ast.Tuple) else [found.slice])]


def merged(things: Things) -> Things:
    keys = [t for t in things if isinstance(t, Keys)]
    rest = [t for t in things if not isinstance(t, Keys)]
    return (*rest, *([Keys(frozenset(n for k in keys for n in k.names))] if keys else []))


def listed(things: Things) -> Things:
    return tuple(Of(f"list[{t.type}]") for t in things if isinstance(t, Of))


def each(things: Things) -> Things:
    """What a loop over something gives."""
    found = []
    for thing in things:
        if isinstance(thing, Of) and thing.type.partition("[")[0] in (*LISTS, *MAPPINGS) and "[" in thing.type:
            found += [Of(t) for t in bare(arguments(thing.type)[0])]
    return tuple(t for t in found if t.type != "object")


def nth(things: Things, at: int, unpacked: bool = True) -> Things:
    """What stands at a place of something."""
    found: list[Of] = []
    for thing in things:
        if isinstance(thing, Of) and "[" in thing.type:
            outer = thing.type.partition("[")[0]
            inner = arguments(thing.type)
            if outer in ("tuple", "Tuple") and inner[-1] != "...":
                inner = inner[at : at + 1] if -len(inner) <= at < len(inner) else []
            elif outer in MAPPINGS:
                inner = [] if unpacked else inner[1:]
            elif outer not in LISTS:
                inner = []
            found += [Of(t) for one in inner[:1] for t in bare(one)]
    return tuple(t for t in found if t.type != "object")


BUILT = ("list", "tuple", "iter", "reversed", "sorted", "copy", "next", "enumerate", "zip")


def built(function: str, given: list[Things]) -> Things:
    """What these functions of Python make of what is given."""
    if function == "zip":
        kinds = [[t.type for t in each(things) if isinstance(t, Of)] for things in given]
        return (Of(f"list[tuple[{', '.join(k[0] if k else 'object' for k in kinds)}]]"),) if kinds else ()
    found = given[0] if given else ()
    if function == "enumerate":
        return tuple(Of(f"list[tuple[int, {t.type}]]") for t in each(found) if isinstance(t, Of))
    return each(found) if function == "next" else found


def spelt(node: ast.expr, whole: Callable[[ast.expr], str]) -> str:
    """An annotation with whole names, as `whole` knows them; "": not all are known."""
    match node:
        case ast.Constant(value=None):
            return "None"
        case ast.Constant(value=str(text)):
            return spelt(ast.parse(text, mode="eval").body, whole)
        case ast.Name(id=name) if name in (*PLAIN, *LISTS):
            return name
        case ast.Name() | ast.Attribute():
            return whole(node)
        case ast.BinOp(left=left, right=right):
            parts = [spelt(p, whole) for p in (left, right)]
            return " | ".join(parts) if all(parts) else ""
        case ast.Subscript(value=ast.Name(id=outer), slice=inner) if outer in (*LISTS, *MAPPINGS):
            every = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            parts = ["..." if ast.unparse(p) == "..." else spelt(p, whole) or "object" for p in every]
            known = parts[-1] != "object" if outer in MAPPINGS else {*parts} - {"object", "..."}
            return f"{outer}[{', '.join(parts)}]" if known else ""
    return ""
