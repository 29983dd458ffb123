"""The params of an algorithm and their overrides.

Invariant: a param has one value, whatever the order of declarations. The value on the command line has precedence over
the value in the deploy, and the value in the deploy over the value in the algorithm. A param with a wrong expression
has the value None, so that uses of the param report no further mistake.
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
    """`set NAME = VALUE` of a deploy or the command line.

    Of several overrides of a param, the last one has precedence.
    """

    name: ast.Name
    value: ast.Expr


def evaluate_params(
    algorithm: str,
    defaults: Mapping[str, ast.Expr],
    overrides: Sequence[Override],
    others: Mapping[str, str],
    problems: Problems,
) -> dict[str, Expr | None]:
    """Evaluate the params; return their values in the order of declaration.

    `others` are the other declared names, each with its kind.
    """
    overriding: dict[str, ast.Expr] = {}
    for override in overrides:
        if override.name.text in defaults:
            overriding[override.name.text] = override.value
        else:
            message = f"`{algorithm}` has no param `{override.name.text}`"
            problems.report(
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
            exprs = [defaults[name], *([overriding[name]] if name in overriding else [])]
            for other in (word for expr in exprs for word in ast.words(expr)):
                if other in defaults:
                    resolve(other)
            default, *rest = (_check_plain(evaluate(expr, Names(values, others)), name) for expr in exprs)
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


def find_unused(algorithm: ast.AlgorithmDecl, overrides: Sequence[Override]) -> list[Diagnostic]:
    """Return a warning for each param that is set but never used.

    A param also counts as used if the expression of another used param contains it.
    """
    params = {
        statement.name.text: statement.value for statement in algorithm.body if isinstance(statement, ast.ParamDecl)
    }
    wanted = {override.name.text for override in overrides} & params.keys()
    used: set[str] = set()

    def use(word: str) -> None:
        if word in params and word not in used:
            used.add(word)
            for other in ast.words(params[word]):
                use(other)

    for word in (
        word
        for statement in algorithm.body
        if not isinstance(statement, ast.ParamDecl)
        for word in ast.words(statement)
    ):
        if wanted <= used:  # usually long before the end
            return []
        use(word)
    return [
        Diagnostic(
            "unused-param",
            f"`{override.name.text}` is set, but nothing in `{algorithm.name.text}` uses it",
            override.name.span,
            "leave it out, or name the param where it belongs",
            "warning",
        )
        for override in overrides
        if override.name.text in wanted - used
    ]


def _check_plain(value: Expr, name: str) -> Expr:
    if value.kind == "quantity":
        raise mistake("bad-unit", f"the param `{name}` is a plain number, and this has a unit", value.span)
    if value.kind == "list":
        raise mistake(
            "bad-value", f"the param `{name}` is a number, a string, true or false, and this is a list", value.span
        )
    return value
