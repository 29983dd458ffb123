"""Parser: text to syntax tree.

Invariant: any text gives a tree or a Fault with one diagnostic. Every element of the tree has the span of the text
that it was read from.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import lark
from lark import Lark, Token, Tree, UnexpectedInput

from ..diagnostics import Diagnostic, Fault, Span
from ..files import private
from . import ast
from .syntax_errors import explain

# Deep enough for any handwritten program; shallow enough that no pass over the tree overflows the stack.
MAX_DEPTH = 64
FLAG = "--set "
ESCAPES = {'"': '"', "\\": "\\", "n": "\n", "t": "\t"}


def parse(text: str, file: str) -> ast.File:
    """Parse a program. `file` is the file name for diagnostics."""
    text = text.removeprefix("\ufeff")  # some editors write a byte order mark
    tree = _tree(text, file, "start")
    build = _Builder(file)
    items = tuple(build.item(child) for child in tree.children)
    if not items:
        help = "a program has an `algorithm`, an `import`, a `cluster` or a `deploy`"
        raise Fault(Diagnostic("empty-file", "the file has no program", Span(file, 1, 1, 1, 1), help))
    return ast.File(file, items, items[0].span.extend_to(items[-1].span))


def parse_expr(text: str, file: str) -> ast.Expr:
    """Parse one expression."""
    return _Builder(file).expr(_tree(text, file, "expr"))


def parse_type(text: str, file: str) -> ast.Type:
    """Parse a column's type."""
    return _Builder(file).type(_tree(text, file, "type"))


def parse_edge(text: str, file: str) -> ast.EdgeDecl:
    """Parse one sample edge or resharding edge."""
    edge: ast.EdgeDecl = _Builder(file).statement(_tree(text, file, "edge"))
    return edge


def parse_undo(text: str, file: str) -> ast.UndoDecl:
    """Parse the target of a deploy's `drop` statement, such as `layout actor.update`."""
    stated = _tree(text, file, "stated")
    builder = _Builder(file)
    return builder.undo(stated, builder.span(stated))


def parse_set(name: str, value: str) -> tuple[ast.Name, ast.Expr]:
    """Parse the option `--set NAME=VALUE` of the command line.

    Diagnostics show the text of the option as the file name (see `flag_text`).
    """
    lead = f"{FLAG}{name}="
    file = lead + value
    # Padded with blanks, so that columns in the value are counted from the start of the option.
    return ast.Name(name, Span(file, 1, len(FLAG) + 1, 1, len(lead))), parse_expr(" " * len(lead) + value, file)


def flag_text(file: str) -> str | None:
    """Return the text of a `--set` option from a file name that `parse_set` created.

    Returns None for any other file name.
    """
    return file if file.startswith(FLAG) else None


def parse_tokens(text: str, file: str) -> Tree[Token]:
    """Parse a program to a tree of grammar rules that has every token.

    This tree is for code that works on the layout of the text. Some programs that `parse` rejects are accepted.
    """
    tree: Tree[Token] = _tree(text, file, "start", True)
    return tree


@cache
def _parser(start: str, tokens: bool = False) -> Lark:
    """Return the parser of a grammar rule, from the user's cache folder if possible.

    With `tokens`, trees have every token, and only tokens have positions. The cache saves 40 ms at each start. A cache
    file is rebuilt if it is missing, damaged, of another version or not owned by this user. If the cache cannot be
    written, the parser is returned without a cache.

    Each rule has its own parser and cache file. A parser for all rules would take twice as long to load, and few
    programs need a second rule.
    """
    grammar = (Path(__file__).parent / "grammar.lark").read_text(encoding="utf-8")
    # The versions of Python and lark are in the key because they determine what lark writes.
    key = zlib.crc32(f"{start} {tokens} {grammar}{lark.__version__}{sys.version}".encode())
    name = f"grammar-{key:08x}"
    try:
        path = private.cache() / name
        private.check_file(path)  # lark's cache is a pickle
        with path.open("rb") as file:
            return Lark.load(file)
    except Exception:
        parser = Lark(grammar, parser="lalr", propagate_positions=not tokens, start=start, keep_all_tokens=tokens)
    with contextlib.suppress(OSError):
        # Two processes may write at the same time, so each writes its own complete file and then renames it.
        path = private.cache() / name
        part = path.with_suffix(f".{os.getpid()}")
        parser.save(content := io.BytesIO())
        private.write(part, content.getvalue())
        part.replace(path)
    return parser


def _tree(text: str, file: str, start: str, tokens: bool = False) -> Any:
    try:
        return _parser(start, tokens).parse(text)
    except UnexpectedInput as error:
        raise Fault(explain(text, file, error, start)) from None


class _Builder:
    """A converter of lark's tree to the classes of ast.py, with one method per rule."""

    def __init__(self, file: str) -> None:
        self.file = file

    def span(self, part: Tree[Token] | Token) -> Span:
        position: Any = part if isinstance(part, Token) else part.meta
        return Span(self.file, position.line, position.column, position.end_line, position.end_column)

    def name(self, token: Token) -> ast.Name:
        return ast.Name(str(token), self.span(token))

    def maybe(self, token: Token | None) -> ast.Name | None:
        return None if token is None else self.name(token)

    def names(self, tree: Tree[Token] | None) -> tuple[ast.Name, ...]:
        return () if tree is None else tuple(self.name(token) for token in _tokens(tree))

    def ref(self, tree: Tree[Token]) -> ast.Ref:
        return ast.Ref(".".join(_tokens(tree)), self.span(tree))

    def refs(self, tree: Tree[Token]) -> tuple[ast.Ref, ...]:
        return tuple(self.ref(child) for child in _trees(tree))

    def attrs(self, tree: Tree[Token] | None) -> tuple[ast.Attr, ...]:
        if tree is None:
            return ()
        attrs: list[ast.Attr] = []
        ended = True
        for attr, comma in zip(tree.children[::2], tree.children[1::2], strict=True):
            key, value = _trees(attr)
            span = self.span(attr)
            if not ended and span.line == attrs[-1].span.end_line:
                help = "attributes end with a comma or a new line"
                self.fail(f"a comma is missing before `{key.children[0]}`", key, help)
            attrs.append(ast.Attr(self.name(key.children[0]), self.expr(value), span))
            ended = comma is not None
        return tuple(attrs)

    # Items and statements

    def item(self, tree: Tree[Token]) -> ast.Item:
        items: dict[str, Callable[[Any], ast.Item]] = {
            "import_": self.import_,
            "algorithm": self.algorithm,
            "cluster": self.cluster,
            "deploy": self.deploy,
            "variant": self.variant,
        }
        return items[tree.data](tree)

    def import_(self, tree: Any) -> ast.ImportDecl:
        token = tree.children[0]
        is_file = token.type == "STRING"
        return ast.ImportDecl(self.string(token) if is_file else str(token), is_file, self.span(tree))

    def algorithm(self, tree: Any) -> ast.AlgorithmDecl:
        name, extends, *body = tree.children
        return ast.AlgorithmDecl(
            self.name(name),
            self.maybe(extends),
            tuple(self.statement(statement) for statement in body),
            self.span(tree),
        )

    def cluster(self, tree: Any) -> ast.ClusterDecl:
        name, attrs = tree.children
        return ast.ClusterDecl(self.name(name), self.attrs(attrs), self.span(tree))

    def deploy(self, tree: Any) -> ast.DeployDecl:
        algorithm, cluster, alias, *body = tree.children
        statements = tuple(self.statement(statement) for statement in body)
        return ast.DeployDecl(self.name(algorithm), self.name(cluster), self.maybe(alias), statements, self.span(tree))

    def variant(self, tree: Any) -> ast.DeployDecl:
        name, base, cluster, *body = tree.children
        statements = tuple(self.statement(statement) for statement in body)
        return ast.DeployDecl(None, self.maybe(cluster), self.name(name), statements, self.span(tree), self.name(base))

    def statement(self, tree: Any) -> Any:
        return getattr(self, f"_{tree.data}")(*tree.children, span=self.span(tree))

    def _param(self, name: Token, value: Any, span: Span) -> ast.ParamDecl:
        return ast.ParamDecl(self.name(name), self.expr(value), span)

    def _columns(self, *columns: Any, span: Span) -> ast.ColumnsDecl:
        return ast.ColumnsDecl(tuple(self.column(column) for column in columns), span)

    def _state(self, column: Any, value: Any, span: Span) -> ast.StateDecl:
        return ast.StateDecl(self.column(column), self.expr(value), span)

    def _worker(self, name: Token, kind: Token, frozen: Token | None, attrs: Any, span: Span) -> ast.WorkerDecl:
        return ast.WorkerDecl(self.name(name), self.name(kind), frozen is not None, self.attrs(attrs), span)

    def _source(self, _word: Token, count: Any, _arrow: Token, writes: Any, attrs: Any, span: Span) -> ast.SourceDecl:
        return ast.SourceDecl(self.expr(count), self.names(writes), self.attrs(attrs), span)

    def _node(
        self, label: Token | None, worker: Token, verb: Token, signature: Any, attrs: Any, span: Span
    ) -> ast.NodeDecl:
        reads, writes = (
            (None, ()) if signature is None else (self.names(signature.children[0]), self.names(signature.children[-1]))
        )
        head = span.extend_to(self.span(verb if signature is None else signature))
        return ast.NodeDecl(
            self.maybe(label), self.name(worker), self.name(verb), reads, writes, self.attrs(attrs), span, head
        )

    def _drop(self, target: Any, span: Span) -> ast.DropDecl:
        return ast.DropDecl(self.statement(target) if target.data == "edge" else self.ref(target), span)

    def _edge(self, *parts: Any, span: Span) -> ast.EdgeDecl:
        *chain, attrs = parts
        reshard = any(isinstance(part, Token) and part.type == "RESHARD" for part in chain)
        groups = tuple(self.refs(part) for part in chain if isinstance(part, Tree))
        return ast.EdgeDecl("reshard" if reshard else "sample", groups, self.attrs(attrs), span)

    def _set(self, name: Token, value: Any, span: Span) -> ast.SetDecl:
        return ast.SetDecl(self.name(name), self.expr(value), span)

    def _model(self, name: Token, target: Token, attrs: Any, span: Span) -> ast.ModelDecl:
        return ast.ModelDecl(self.name(name), self.literal(target), self.attrs(attrs), span)

    def _data(self, name: Token, target: Any, attrs: Any, span: Span) -> ast.DataDecl:
        return ast.DataDecl(self.name(name), self.expr(target), self.attrs(attrs), span)

    def _layout(self, refs: Any, attrs: Any, span: Span) -> ast.LayoutDecl:
        return ast.LayoutDecl(self.refs(refs), self.attrs(attrs), span)

    def _engine(self, refs: Any, name: Token, attrs: Any, span: Span) -> ast.EngineDecl:
        return ast.EngineDecl(self.refs(refs), self.name(name), self.attrs(attrs), span)

    def _place(self, refs: Any, together: Token | None, nodes: Any, devices: Any, span: Span) -> ast.PlaceDecl:
        return ast.PlaceDecl(self.refs(refs), together is not None, self.range(nodes), self.range(devices), span)

    def _apart(self, refs: Any, span: Span) -> ast.ApartDecl:
        return ast.ApartDecl(self.refs(refs), span)

    def _options(self, kind: Any, attrs: Any, span: Span) -> ast.OptionsDecl:
        word: Any = str(kind)
        return ast.OptionsDecl(word, self.attrs(attrs), span)

    def _evaluate(self, name: Token, attrs: Any, span: Span) -> ast.EvaluateDecl:
        return ast.EvaluateDecl(self.name(name), self.attrs(attrs), span)

    def _undo(self, stated: Any, span: Span) -> ast.UndoDecl:
        return self.undo(stated, span)

    def undo(self, stated: Any, span: Span) -> ast.UndoDecl:
        kind, targets = [*stated.children, None][:2]
        if isinstance(kind, Tree):
            return ast.UndoDecl("edge", (), self.statement(kind), span)
        names = (
            ()
            if targets is None
            else self.refs(targets)
            if isinstance(targets, Tree)
            else (ast.Ref(str(targets), self.span(targets)),)
        )
        return ast.UndoDecl(str(kind), names, None, span)

    def range(self, tree: Any) -> ast.Range | None:
        if tree is None:
            return None
        first, last = tree.children
        start = self.integer(first)
        return ast.Range(start, start if last is None else self.integer(last), self.span(tree))

    def column(self, tree: Any) -> ast.ColumnDecl:
        name, kind = tree.children
        return ast.ColumnDecl(self.name(name), self.type(kind), self.span(tree))

    def type(self, tree: Any) -> ast.Type:
        element, dims, per = tree.children
        parts = () if dims is None else tuple(self.dim(dim) for dim in dims.children)
        return ast.Type(self.name(element), parts, self.maybe(per), self.span(tree))

    def dim(self, tree: Any) -> ast.Dim:
        at_most, value = tree.children
        return ast.Dim(at_most is not None, self.expr(value), self.span(tree))

    # Expressions

    def expr(self, part: Any, depth: int = 0) -> ast.Expr:
        if depth > MAX_DEPTH:
            self.fail("the expression is nested too deeply", part, "give its parts names with `param`")
        if isinstance(part, Token):
            return self.literal(part)
        span = self.span(part)
        children = part.children
        if part.data in ("expr", "sum", "term"):
            # The grammar parses `a - b - c` flat; the depth of its tree is the number of operators.
            depth += len(children) // 2
            left = self.expr(children[0], depth + 1)
            for op, right in zip(children[1::2], children[2::2], strict=True):
                value = self.expr(right, depth + 1)
                left = ast.Binary(str(op), left, value, left.span.extend_to(value.span))
            return left
        if part.data == "neg":
            return ast.Neg(self.expr(children[1], depth + 1), span)
        if part.data == "group":
            return self.expr(children[0], depth + 1)
        if part.data == "list":
            return ast.List(tuple(self.expr(child, depth + 1) for child in children if child is not None), span)
        if part.data == "name_expr":
            return ast.NameExpr(".".join(_tokens(part)), span)
        name, *args = children
        quoted = name.type == "STRING"
        called = ast.Name(self.string(name), self.span(name)) if quoted else self.name(name)
        return ast.Call(called, tuple(self.arg(arg, depth + 1) for arg in args if arg is not None), span, quoted)

    def arg(self, tree: Any, depth: int) -> ast.Arg:
        key, value = tree.children
        return ast.Arg(self.maybe(key), self.expr(value, depth), self.span(tree))

    def literal(self, token: Token) -> ast.Literal_:
        span = self.span(token)
        if token.type == "STRING":
            return ast.Literal_("string", self.string(token), span)
        if token.type in ("TRUE", "FALSE"):
            return ast.Literal_("bool", token.type == "TRUE", span)
        if token.type == "INT":
            return ast.Literal_("int", self.integer(token), span)
        if token.type == "FLOAT":
            return ast.Literal_("float", self.number(token, token), span)
        unit = token.lstrip("0123456789.eE+-").lstrip(" \t")
        digits = token[: len(token) - len(unit)].rstrip(" \t")
        value = self.number(token, digits)
        return ast.Literal_("quantity", int(value) if digits.isdigit() and value < 2**53 else value, span, unit)

    def integer(self, token: Token) -> int:
        if len(token.lstrip("0")) > 18:
            self.fail("the number is too large", token)
        return int(token[-19:])

    def number(self, token: Token, digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            self.fail("the number is too large", token)
        return value

    def string(self, token: Token) -> str:
        text = token[1:-1]
        out = []
        i = 0
        while i < len(text):
            if text[i] == "\\":
                i += 1
                if text[i] not in ESCAPES:
                    self.fail(
                        f"unknown escape `\\{text[i]}` in a string",
                        token,
                        'the escapes are `\\\\` for a backslash, `\\"`, `\\n` and `\\t`',
                    )
                out.append(ESCAPES[text[i]])
            else:
                out.append(text[i])
            i += 1
        return "".join(out)

    def fail(self, message: str, part: Any, help: str = "") -> NoReturn:
        raise Fault(Diagnostic("syntax", message, self.span(part), help))


def _tokens(tree: Any) -> list[Token]:
    return [token for token in tree.children if token is not None]


def _trees(tree: Any) -> list[Any]:
    return list(tree.children)
