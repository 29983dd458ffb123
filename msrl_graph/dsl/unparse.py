"""Conversion of a syntax tree to text.

Invariant: for every tree that `parse` can return, `parse(write(tree))` is the same tree, ignoring spans. There is one
exception: if a name is a keyword at its position, the name cannot be written. An example is a worker with the name
`run` at the start of an edge in a deploy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from . import ast
from .parse import ESCAPES

WIDTH = 100
# Precedence of operators. An operand with a lower precedence is written in parentheses.
COMPARISON, SUM, TERM, FACTOR = range(4)
LEVELS = {**dict.fromkeys(("+", "-"), SUM), **dict.fromkeys(("*", "/", "//", "%"), TERM)}
UNESCAPE = {char: "\\" + letter for letter, char in ESCAPES.items()}


def write(file: ast.File) -> str:
    """Return the text of a program, without comments, because the tree has none.

    The text is not in the canonical layout; use format.py to format it.
    """
    return "\n".join("\n".join(_item(item)) + "\n" for item in file.items)


def _item(item: ast.Item) -> Iterator[str]:
    match item:
        case ast.ImportDecl():
            yield f"import {_string(item.target) if item.is_file else item.target}"
        case ast.ClusterDecl():
            yield from _attrs(f"cluster {item.name.text}", item.attrs, lines=True)
        case ast.AlgorithmDecl():
            yield f"algorithm {item.name.text}{f' extends {item.extends.text}' if item.extends else ''} {{"
            for index, statement in enumerate(item.body):
                # A blank line between statements of different kinds.
                yield from [""] if index and type(statement) is not type(item.body[index - 1]) else []
                yield from _indented(_statement(statement))
            yield "}"
        case ast.DeployDecl():
            cluster = f" on {item.cluster.text}" if item.cluster else ""
            if item.extends:
                yield f"deploy {item.name.text} extends {item.extends.text}{cluster} {{"
            else:
                assert item.algorithm is not None
                yield f"deploy {item.algorithm.text}{cluster}{f' as {item.alias.text}' if item.alias else ''} {{"
            for deployed in item.body:
                yield from _indented(_deploy_statement(deployed))
            yield "}"


def _statement(statement: ast.AlgorithmStatement) -> Iterator[str]:
    match statement:
        case ast.ParamDecl():
            yield f"param {statement.name.text} = {_expr(statement.value)}"
        case ast.ColumnsDecl():
            yield "columns {"
            # With a comma: without one, a column `per` would belong to the type before it.
            yield from (f"  {_column(column)}," for column in statement.columns)
            yield "}"
        case ast.StateDecl():
            yield f"state {_column(statement.column)} = {_expr(statement.value)}"
        case ast.WorkerDecl():
            yield from _attrs(
                f"worker {statement.name.text} : {statement.kind.text}{' frozen' if statement.frozen else ''}",
                statement.attrs,
            )
        case ast.SourceDecl():
            yield from _attrs(f"source({_expr(statement.count)}) -> {_names(statement.writes)}", statement.attrs)
        case ast.NodeDecl():
            label = f"{statement.label.text}: " if statement.label else ""
            title = f"node {label}{statement.worker.text}.{statement.verb.text}"
            title += "" if statement.reads is None else f"({_names(statement.reads)})"
            yield from _attrs(title + (f" -> {_names(statement.writes)}" if statement.writes else ""), statement.attrs)
        case ast.DropDecl(target=ast.Ref() as ref):
            yield f"drop {ref.text}"
        case ast.DropDecl(target=ast.EdgeDecl() as edge):
            yield from _attrs(f"drop {_chain(edge)}", edge.attrs)
        case ast.EdgeDecl():
            yield from _attrs(_chain(statement), statement.attrs)


def _deploy_statement(statement: ast.DeployStatement) -> Iterator[str]:
    match statement:
        case ast.SetDecl():
            yield f"set {statement.name.text} = {_expr(statement.value)}"
        case ast.ModelDecl() | ast.DataDecl():
            yield from _attrs(
                f"{ast.word(statement).lower()} {statement.name.text} = {_expr(statement.target)}", statement.attrs
            )
        case ast.LayoutDecl():
            yield from _attrs(f"layout {_names(statement.nodes)}", statement.attrs, braces=True)
        case ast.EngineDecl():
            yield from _attrs(f"engine {_names(statement.nodes)} = {statement.name.text}", statement.attrs)
        case ast.PlaceDecl():
            where = f" on nodes {_range(statement.nodes)}" if statement.nodes else ""
            where += f" devices {_range(statement.devices)}" if statement.devices else ""
            yield f"place {_names(statement.targets)}{' together' if statement.together else ''}{where}"
        case ast.ApartDecl():
            yield f"apart {_names(statement.targets)}"
        case ast.OptionsDecl():
            yield from _attrs(statement.kind, statement.attrs, braces=True)
        case ast.UndoDecl(edge=ast.EdgeDecl() as edge):
            yield from _attrs(f"drop {_chain(edge)}", edge.attrs)
        case ast.UndoDecl():
            yield f"drop {statement.kind}{f' {_names(statement.names)}' if statement.names else ''}"
        case ast.EvaluateDecl():
            yield from _attrs(f"evaluate {statement.name.text}", statement.attrs, braces=True)
        case ast.EdgeDecl():
            yield from _attrs(_chain(statement), statement.attrs)


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _attrs(title: str, attrs: tuple[ast.Attr, ...], *, braces: bool = False, lines: bool = False) -> Iterator[str]:
    """Yield the lines of a statement with its attributes, on one line if possible.

    - `lines`: whether to write one attribute per line even if all attributes fit on one line.
    - `braces`: whether to write braces even if there are no attributes.
    """
    items = [f"{attr.key.text} = {_expr(attr.value)}" for attr in attrs]
    line = f"{title} {{ {', '.join(items)} }}"
    if not items:
        yield f"{title} {{ }}" if braces or lines else title
    elif len(line) <= WIDTH and not lines:
        yield line
    else:
        yield f"{title} {{"
        yield from (f"  {item}" for item in items)
        yield "}"


def _chain(edge: ast.EdgeDecl) -> str:
    return (" => " if edge.kind == "reshard" else " -> ").join(_names(group) for group in edge.groups)


def _names(names: Sequence[ast.Name | ast.Ref]) -> str:
    return ", ".join(name.text for name in names)


def _range(bounds: ast.Range) -> str:
    return str(bounds.first) if bounds.first == bounds.last else f"{bounds.first}..{bounds.last}"


def _column(column: ast.ColumnDecl) -> str:
    kind = column.type
    dims = ", ".join(f"{'<= ' if dim.at_most else ''}{_expr(dim.value, SUM)}" for dim in kind.dims)
    return (
        f"{column.name.text} : "
        f"{kind.element.text}{f'[{dims}]' if dims else ''}{f' per {kind.per.text}' if kind.per else ''}"
    )


def _expr(expr: ast.Expr, least: int = COMPARISON) -> str:
    """Return the text of an expression.

    The text is in parentheses if the precedence of the expression is below `least`.
    """
    match expr:
        case ast.Literal_():
            return _literal(expr)
        case ast.NameExpr():
            return expr.text
        case ast.List():
            return f"[{', '.join(map(_expr, expr.items))}]"
        case ast.Call():
            args = (f"{f'{arg.key.text} = ' if arg.key else ''}{_expr(arg.value)}" for arg in expr.args)
            return f"{_string(expr.name.text) if expr.quoted else expr.name.text}({', '.join(args)})"
        case ast.Neg():
            text = f"-{_expr(expr.operand, FACTOR)}"
            level = FACTOR
        case ast.Binary():
            level = LEVELS.get(expr.op, COMPARISON)
            # Comparisons do not chain; the other operators are left-associative.
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
