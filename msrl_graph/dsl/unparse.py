"""Syntax tree to text.

Invariant: `parse(write(tree))` is the tree again, apart from spans, for every tree that `parse` can give. (A name that
is a word of the grammar where it stands, such as a worker `run` at the start of a deploy's edge, cannot be written in
any way.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from . import ast
from .parse import ESCAPES

WIDTH = 100
# How tightly an operator binds; what stands in a place that binds tighter takes parentheses.
COMPARISON, SUM, TERM, FACTOR = range(4)
LEVELS = {**dict.fromkeys(("+", "-"), SUM), **dict.fromkeys(("*", "/", "//", "%"), TERM)}
UNESCAPE = {char: "\\" + letter for letter, char in ESCAPES.items()}


def write(file: ast.File) -> str:
    """The program's text, without comments, which are no part of a tree; plain: format.py knows the layout."""
    return "\n".join("\n".join(_item(item)) + "\n" for item in file.items)


def _item(item: ast.Item) -> Iterator[str]:
    match item:
        case ast.ImportDecl():
            yield f"import {_string(item.target) if item.is_file else item.target}"
        case ast.ClusterDecl():
            yield from _attrs(f"cluster {item.name.text}", item.attrs, lines=True)
        case ast.AlgorithmDecl():
            yield f"algorithm {item.name.text}{f' extends {item.extends.text}' if item.extends else ''} {{"
            for i, s in enumerate(item.body):
                # A blank line between statements of different kinds.
                yield from [""] if i and type(s) is not type(item.body[i - 1]) else []
                yield from _indented(_statement(s))
            yield "}"
        case ast.DeployDecl():
            cluster = f" on {item.cluster.text}" if item.cluster else ""
            if item.extends:
                yield f"deploy {item.name.text} extends {item.extends.text}{cluster} {{"
            else:
                assert item.algorithm is not None
                yield f"deploy {item.algorithm.text}{cluster}{f' as {item.alias.text}' if item.alias else ''} {{"
            for d in item.body:
                yield from _indented(_deployed(d))
            yield "}"


def _statement(s: ast.AlgorithmStatement) -> Iterator[str]:
    match s:
        case ast.ParamDecl():
            yield f"param {s.name.text} = {_expr(s.value)}"
        case ast.ColumnsDecl():
            yield "columns {"
            # With a comma: without one, a column `per` would belong to the type before it.
            yield from (f"  {_column(c)}," for c in s.columns)
            yield "}"
        case ast.StateDecl():
            yield f"state {_column(s.column)} = {_expr(s.value)}"
        case ast.WorkerDecl():
            yield from _attrs(f"worker {s.name.text} : {s.kind.text}{' frozen' if s.frozen else ''}", s.attrs)
        case ast.SourceDecl():
            yield from _attrs(f"source({_expr(s.count)}) -> {_names(s.writes)}", s.attrs)
        case ast.NodeDecl():
            head = f"node {f'{s.label.text}: ' if s.label else ''}{s.worker.text}.{s.verb.text}"
            head += "" if s.reads is None else f"({_names(s.reads)})"
            yield from _attrs(head + (f" -> {_names(s.writes)}" if s.writes else ""), s.attrs)
        case ast.DropDecl(target=ast.Ref() as ref):
            yield f"drop {ref.text}"
        case ast.DropDecl(target=ast.EdgeDecl() as edge):
            yield from _attrs(f"drop {_chain(edge)}", edge.attrs)
        case ast.EdgeDecl():
            yield from _attrs(_chain(s), s.attrs)


def _deployed(s: ast.DeployStatement) -> Iterator[str]:
    match s:
        case ast.SetDecl():
            yield f"set {s.name.text} = {_expr(s.value)}"
        case ast.ModelDecl() | ast.DataDecl():
            yield from _attrs(f"{ast.word(s).lower()} {s.name.text} = {_expr(s.target)}", s.attrs)
        case ast.LayoutDecl():
            yield from _attrs(f"layout {_names(s.nodes)}", s.attrs, braces=True)
        case ast.EngineDecl():
            yield from _attrs(f"engine {_names(s.nodes)} = {s.name.text}", s.attrs)
        case ast.PlaceDecl():
            where = f" on nodes {_range(s.nodes)}" if s.nodes else ""
            where += f" devices {_range(s.devices)}" if s.devices else ""
            yield f"place {_names(s.targets)}{' together' if s.together else ''}{where}"
        case ast.ApartDecl():
            yield f"apart {_names(s.targets)}"
        case ast.OptionsDecl():
            yield from _attrs(s.kind, s.attrs, braces=True)
        case ast.UndoDecl(edge=ast.EdgeDecl() as edge):
            yield from _attrs(f"drop {_chain(edge)}", edge.attrs)
        case ast.UndoDecl():
            yield f"drop {s.kind}{f' {_names(s.names)}' if s.names else ''}"
        case ast.EvaluateDecl():
            yield from _attrs(f"evaluate {s.name.text}", s.attrs, braces=True)
        case ast.EdgeDecl():
            yield from _attrs(_chain(s), s.attrs)


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _attrs(head: str, attrs: tuple[ast.Attr, ...], *, braces: bool = False, lines: bool = False) -> Iterator[str]:
    """A statement and its attributes, on one line where they fit and `lines` does not say otherwise; `braces`: even if
    it has none."""
    each = [f"{a.key.text} = {_expr(a.value)}" for a in attrs]
    whole = f"{head} {{ {', '.join(each)} }}"
    if not each:
        yield f"{head} {{ }}" if braces or lines else head
    elif len(whole) <= WIDTH and not lines:
        yield whole
    else:
        yield f"{head} {{"
        yield from (f"  {a}" for a in each)
        yield "}"


def _chain(edge: ast.EdgeDecl) -> str:
    return (" => " if edge.kind == "reshard" else " -> ").join(_names(group) for group in edge.groups)


def _names(names: Sequence[ast.Name | ast.Ref]) -> str:
    return ", ".join(n.text for n in names)


def _range(r: ast.Range) -> str:
    return str(r.first) if r.first == r.last else f"{r.first}..{r.last}"


def _column(column: ast.ColumnDecl) -> str:
    kind = column.type
    dims = ", ".join(f"{'<= ' if d.at_most else ''}{_expr(d.value, SUM)}" for d in kind.dims)
    return (
        f"{column.name.text} : "
        f"{kind.element.text}{f'[{dims}]' if dims else ''}{f' per {kind.per.text}' if kind.per else ''}"
    )


def _expr(expr: ast.Expr, least: int = COMPARISON) -> str:
    """The text of an expression, in parentheses if it binds less than its place asks for."""
    match expr:
        case ast.Literal_():
            return _literal(expr)
        case ast.NameExpr():
            return expr.text
        case ast.List():
            return f"[{', '.join(map(_expr, expr.items))}]"
        case ast.Call():
            args = (f"{f'{a.key.text} = ' if a.key else ''}{_expr(a.value)}" for a in expr.args)
            return f"{_string(expr.name.text) if expr.quoted else expr.name.text}({', '.join(args)})"
        case ast.Neg():
            text = f"-{_expr(expr.operand, FACTOR)}"
            level = FACTOR
        case ast.Binary():
            level = LEVELS.get(expr.op, COMPARISON)
            # Comparisons do not chain; the others bind to the left.
            left = SUM if level == COMPARISON else level
            text = f"{_expr(expr.left, left)} {expr.op} {_expr(expr.right, level + 1)}"
    return text if level >= least else f"({text})"


def _literal(literal: ast.Literal_) -> str:
    if literal.kind == "string":
        return _string(str(literal.value))
    if literal.kind == "bool":
        return "true" if literal.value else "false"
    number = re.sub(r"e([+-])0+", r"e\1", repr(literal.value))
    return f"{number}{literal.unit and ' ' + literal.unit}"


def _string(text: str) -> str:
    return '"' + "".join(UNESCAPE.get(char, char) for char in text) + '"'
