"""Syntax trees of any shape, for properties that hold of all programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from msrl_graph.diagnostics import NOWHERE
from msrl_graph.dsl import ast
from msrl_graph.dsl.syntax_errors import UNITS

# Words of the grammar are names where none of its keywords may stand: of what an algorithm declares, and of attributes.
# Units are too.
NAMES = ("a", "b_2", "Actor", "reward", "host", "group", "x" * 12, "x" * 45, "min")
ALGORITHM_NAMES = (*NAMES, "frozen", "per", "run", "model", "extends", "together")
KEYS = (
    *NAMES,
    "on",
    "as",
    "per",
    "frozen",
    "set",
    "model",
    "nodes",
    "devices",
    "run",
    "dock",
    "reshard",
    "place",
    "evaluate",
)


def name(pool: tuple[str, ...] = NAMES) -> st.SearchStrategy[ast.Name]:
    return st.sampled_from(pool).map(lambda text: ast.Name(text, NOWHERE))


def several(part: st.SearchStrategy[Any], least: int = 0, most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(part, min_size=least, max_size=most).map(tuple)


def made(kind: type, *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A part of the tree from its fields but for the span, which is the last of them."""
    return st.tuples(*parts).map(lambda values: kind(*values, NOWHERE))


NO_UNIT = st.just("")


def literal(
    kind: Any, value: st.SearchStrategy[Any], unit: st.SearchStrategy[str] = NO_UNIT
) -> st.SearchStrategy[ast.Literal_]:
    return st.tuples(value, unit).map(lambda v: ast.Literal_(kind, v[0], NOWHERE, v[1]))


POSITIVE = st.floats(0, allow_infinity=False, allow_nan=False).map(abs)
LITERALS = st.one_of(
    literal("int", st.integers(0, 10**18 - 1)),
    literal("float", POSITIVE),
    literal("bool", st.booleans()),
    literal("string", st.text()),
    literal("quantity", st.integers(0, 2**53 - 1) | POSITIVE, st.sampled_from(UNITS)),
)
NO_NAME = st.none()


def expressions(pool: tuple[str, ...]) -> st.SearchStrategy[Any]:
    words = st.lists(st.sampled_from(pool), min_size=1, max_size=2).map(lambda w: ast.NameExpr(".".join(w), NOWHERE))

    def in_file(call: ast.Call, path: str) -> ast.Call:
        return replace(call, name=ast.Name(path, NOWHERE), quoted=True)

    def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        ops = st.sampled_from(("+", "-", "*", "/", "//", "%", "==", "!=", "<=", ">=", "<", ">"))
        call = made(ast.Call, name(pool), several(made(ast.Arg, NO_NAME | name(pool), inner)))
        return st.one_of(
            made(ast.Binary, ops, inner, inner),
            made(ast.Neg, inner),
            made(ast.List, several(inner)),
            call,
            st.builds(in_file, call, st.text()),
        )

    return st.recursive(LITERALS | words, larger, max_leaves=8)


EXPR = expressions(NAMES)
ATTRS = several(made(ast.Attr, name(KEYS), EXPR))


def ref(pool: tuple[str, ...]) -> st.SearchStrategy[ast.Ref]:
    words = st.lists(st.sampled_from(pool), min_size=1, max_size=2).map(".".join)
    return (words | st.just("source")).map(lambda text: ast.Ref(text, NOWHERE))


def edges(pool: tuple[str, ...]) -> st.SearchStrategy[ast.EdgeDecl]:
    groups = several(ref(pool), 1)
    sample = made(ast.EdgeDecl, st.just("sample"), several(groups, 2), ATTRS)
    return sample | made(ast.EdgeDecl, st.just("reshard"), st.tuples(groups, groups), ATTRS)


A_NAME = name(ALGORITHM_NAMES)
TYPE = made(ast.Type, A_NAME, several(made(ast.Dim, st.booleans(), EXPR)), NO_NAME | A_NAME)
COLUMN = made(ast.ColumnDecl, A_NAME, TYPE)
A_NAMES = several(A_NAME, 1)


@st.composite
def nodes(draw: st.DrawFn) -> ast.NodeDecl:
    reads = draw(st.none() | A_NAMES)
    writes = () if reads is None else draw(several(A_NAME))
    return ast.NodeDecl(
        draw(NO_NAME | A_NAME), draw(A_NAME), draw(A_NAME), reads, writes, draw(ATTRS), NOWHERE, NOWHERE
    )


A_EDGE = edges(NAMES)
STATEMENTS = st.one_of(
    made(ast.ParamDecl, A_NAME, EXPR),
    made(ast.ColumnsDecl, several(COLUMN)),
    made(ast.StateDecl, COLUMN, EXPR),
    made(ast.WorkerDecl, A_NAME, A_NAME, st.booleans(), ATTRS),
    made(ast.SourceDecl, EXPR, A_NAMES, ATTRS),
    nodes(),
    made(ast.DropDecl, ref(NAMES) | A_EDGE),
    A_EDGE,
)
RANGE = made(ast.Range, st.integers(0, 9), st.integers(0, 9))
NAMED_STRING = (name(), literal("string", st.text()), ATTRS)
REFS = several(ref(NAMES), 1)
A_REF = st.sampled_from(NAMES).map(lambda text: (ast.Ref(text, NOWHERE),))
DEPLOYED = st.one_of(
    made(ast.SetDecl, name(), EXPR),
    made(ast.ModelDecl, *NAMED_STRING),
    made(ast.DataDecl, *NAMED_STRING),
    made(ast.DataDecl, st.just(ast.Name("source", NOWHERE)), *NAMED_STRING[1:]),
    made(ast.LayoutDecl, REFS, ATTRS),
    made(ast.EngineDecl, REFS, name(), ATTRS),
    made(ast.PlaceDecl, REFS, st.booleans(), RANGE, st.none() | RANGE),
    made(ast.PlaceDecl, REFS, st.booleans(), st.none(), st.none()),
    made(ast.ApartDecl, REFS),
    made(ast.OptionsDecl, st.sampled_from(("dock", "reshard", "run")), ATTRS),
    made(ast.EvaluateDecl, name(), ATTRS),
    made(ast.UndoDecl, st.sampled_from(("set", "model", "data", "evaluate")), A_REF, st.none()),
    made(ast.UndoDecl, st.just("data"), st.just((ast.Ref("source", NOWHERE),)), st.none()),
    made(ast.UndoDecl, st.sampled_from(("layout", "engine")), REFS, st.none()),
    made(ast.UndoDecl, st.sampled_from(("place", "apart", "dock", "reshard", "run")), st.just(()), st.none()),
    made(ast.UndoDecl, st.just("edge"), st.just(()), edges(NAMES)),
    edges(NAMES),
)
ITEMS = st.one_of(
    st.sampled_from(NAMES).map(lambda target: ast.ImportDecl(target, False, NOWHERE)),
    st.text().map(lambda target: ast.ImportDecl(target, True, NOWHERE)),
    made(ast.AlgorithmDecl, A_NAME, NO_NAME | A_NAME, several(STATEMENTS, most=6)),
    made(ast.ClusterDecl, name(), ATTRS),
    made(ast.DeployDecl, name(), name(), NO_NAME | name(), several(DEPLOYED, most=6)),
    st.builds(ast.DeployDecl, st.none(), NO_NAME | name(), name(), several(DEPLOYED, most=6), st.just(NOWHERE), name()),
)
FILES = several(ITEMS, 1).map(lambda items: ast.File("p.rlg", items, NOWHERE))
