"""The params of an algorithm and what overrides them.

Invariant: a param has one value, whatever the order of declarations: the command line's, else the deploy's, else its
own. One whose expression is wrong has None, so that nothing that uses it is blamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..diagnostics import Diagnostic, nearest
from ..ir.graph import Expr
from . import ast
from .expressions import Names, Problems, evaluate, mistake


@dataclass(frozen=True)
class Override:
    """`set NAME = VALUE` of a deploy, or of the command line. The last of several for one param holds."""

    name: ast.Name
    value: ast.Expr


def evaluate_params(
    algorithm: str,
    defaults: Mapping[str, ast.Expr],
    overrides: Sequence[Override],
    others: Mapping[str, str],
    problems: Problems,
) -> dict[str, Expr | None]:
    """The values of the params, in the order of their declaration."""
    given: dict[str, ast.Expr] = {}
    for override in overrides:
        if override.name.text in defaults:
            given[override.name.text] = override.value
        else:
            message = f"`{algorithm}` has no param `{override.name.text}`"
            problems.tell(
                "unknown-name",
                message,
                override.name.span,
                nearest(override.name.text, defaults) or ("" if defaults else "it has none"),
            )
    values: dict[str, Expr | None] = {}
    active: list[str] = []

    def resolve(name: str) -> None:
        if name in values:
            return
        if name in active:
            values[name] = None
            cycle = " -> ".join([*active[active.index(name) :], name])
            raise mistake("bad-value", f"the param `{name}` is defined by itself: {cycle}", defaults[name].span)
        active.append(name)
        value = None
        with problems.catching():
            exprs = [defaults[name], *([given[name]] if name in given else [])]
            for other in (word for expr in exprs for word in ast.words(expr)):
                if other in defaults:
                    resolve(other)
            default, *rest = (_plain(evaluate(expr, Names(values, others)), name) for expr in exprs)
            last = rest[0] if rest else default
            if last.kind != default.kind:
                raise mistake(
                    "bad-value", f"the param `{name}` is a {default.kind}, and this is a {last.kind}", last.span
                )
            value = last
        active.pop()
        values.setdefault(name, value)

    for name in defaults:
        resolve(name)
    return {name: values[name] for name in defaults}


def unused(algorithm: ast.AlgorithmDecl, overrides: Sequence[Override]) -> list[Diagnostic]:
    """Params that are set and that no statement names, by way of other params either: nothing changes."""
    params = {s.name.text: s.value for s in algorithm.body if isinstance(s, ast.ParamDecl)}
    wanted = {o.name.text for o in overrides} & params.keys()
    used: set[str] = set()

    def use(word: str) -> None:
        if word in params and word not in used:
            used.add(word)
            for other in ast.words(params[word]):
                use(other)

    for word in (word for s in algorithm.body if not isinstance(s, ast.ParamDecl) for word in ast.words(s)):
        if wanted <= used:  # mostly long before the end
            return []
        use(word)
    return [
        Diagnostic(
            "unused-param",
            f"`{o.name.text}` is set, and nothing in `{algorithm.name.text}` uses it: that changes nothing",
            o.name.span,
            "leave it out, or name the param where it belongs",
            "warning",
        )
        for o in overrides
        if o.name.text in wanted - used
    ]


def _plain(value: Expr, name: str) -> Expr:
    if value.kind == "quantity":
        raise mistake("bad-unit", f"the param `{name}` is a plain number, and this has a unit", value.span)
    if value.kind == "list":
        raise mistake(
            "bad-value", f"the param `{name}` is a number, a string, true or false, and this is a list", value.span
        )
    return value
