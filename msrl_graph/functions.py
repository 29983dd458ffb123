"""What the compiler knows of a Python function that a program calls: its parameters, never its body.

Invariant: signatures are read from the source, which is never run: the package's functions and a user's file take the same path.
Positional parameters bind columns by name (one with a default may be missing), keyword-only parameters are options, given in the call
by order or by name; `rng` and a loss term's `logp` are filled by the runtime. `@loss_term` makes a function a term of a loss,
`@function(scope="group")` says that it needs all rows of a group at once.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal

Kind = Literal["function", "loss"]
Scope = Literal["row", "group"]
Plain = Literal["bool", "int", "float", "str"]
PLAIN: tuple[Plain, ...] = ("bool", "int", "float", "str")


@dataclass(frozen=True)
class Option:
    """A keyword-only parameter: `words` are its option words, if it takes words; `kind` is the plain type that it is annotated with."""

    name: str
    required: bool = False
    words: tuple[str, ...] = ()
    kind: Plain | None = None


@dataclass(frozen=True)
class Signature:
    """`columns` are the parameters that bind columns, `optional` those of them that may be missing, `text` those that receive decoded
    text; `scope` group: the function needs all rows of a group at once."""

    name: str
    kind: Kind
    columns: tuple[str, ...]
    optional: frozenset[str] = frozenset()
    text: frozenset[str] = frozenset()
    options: tuple[Option, ...] = ()
    scope: Scope = "row"
    rng: bool = False

    def option(self, name: str) -> Option | None:
        return next((o for o in self.options if o.name == name), None)


def signatures(source: str) -> dict[str, Signature]:
    """The signatures of the top-level functions of a Python source, by name; SyntaxError where it is not Python."""
    return {item.name: _signature(item) for item in ast.parse(source).body if isinstance(item, ast.FunctionDef)}


def classes(source: str) -> dict[str, tuple[str, ...]]:
    """The names of the methods of the top-level classes of a Python source, by class; SyntaxError where it is not Python."""
    found = [item for item in ast.parse(source).body if isinstance(item, ast.ClassDef)]
    return {c.name: tuple(m.name for m in c.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)) for c in found}


def _signature(item: ast.FunctionDef) -> Signature:
    a = item.args
    positional = [*a.posonlyargs, *a.args]
    with_default = {p.arg for p in positional[len(positional) - len(a.defaults) :]}
    kind: Kind = "loss" if any(isinstance(d, ast.Name) and d.id == "loss_term" for d in item.decorator_list) else "function"
    filled = ("logp",) if kind == "loss" else ("rng",)
    columns = tuple(p for p in positional if p.arg not in filled)
    return Signature(
        name=item.name,
        kind=kind,
        columns=tuple(p.arg for p in columns),
        optional=frozenset(p.arg for p in columns) & with_default,
        text=frozenset(p.arg for p in columns if isinstance(p.annotation, ast.Name) and p.annotation.id == "str"),
        options=tuple(
            Option(p.arg, default is None, _words(p.annotation), _plain(p.annotation))
            for p, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)
            if p.arg != "rng"
        ),
        scope=_scope(item),
        rng=any(p.arg == "rng" for p in (*positional, *a.kwonlyargs)),
    )


def _words(annotation: ast.expr | None) -> tuple[str, ...]:
    """The words of a `Literal["a", "b"]` annotation."""
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith("Literal")):
        return ()
    return tuple(c.value for c in ast.walk(annotation.slice) if isinstance(c, ast.Constant) and isinstance(c.value, str))


def _plain(annotation: ast.expr | None) -> Plain | None:
    """The plain type of an annotation such as `float`, `"float"`, `float | None` or `Optional[float]`; None where it has no one such."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith("Literal"):
        return None
    parts = [] if annotation is None else list(ast.walk(annotation))
    names = [p.id if isinstance(p, ast.Name) else p.value for p in parts if isinstance(p, ast.Name | ast.Constant)]
    found: set[Plain] = {p for p in PLAIN if p in names}
    if found == {"int", "float"}:
        found = {"float"}
    others = {*names} - {*found, "int", "float", "None", "Optional", None}
    return found.pop() if len(found) == 1 and not others else None


def _scope(item: ast.FunctionDef) -> Scope:
    for decorator in item.decorator_list:
        if isinstance(decorator, ast.Call):
            for keyword in decorator.keywords:
                if keyword.arg == "scope" and isinstance(keyword.value, ast.Constant) and keyword.value.value == "group":
                    return "group"
    return "row"
