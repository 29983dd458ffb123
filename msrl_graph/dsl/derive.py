"""`extends`, patches and `drop`: an algorithm that changes another one, to one that stands for itself.

Invariant: the result has neither base, patch nor drop, and lowers as if it had been written out. Statements keep their
spans, so that what is wrong is told where it was written. What an algorithm declares twice itself stays there twice,
for lowering to tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from ..diagnostics import nearest
from . import ast
from .dropped import Dropped
from .expressions import Problems, mistake

T = TypeVar("T", ast.AlgorithmDecl, ast.DeployDecl)
Key = tuple[str, str]  # what is declared, and its name
# Attributes of a node of which one says what it does.
EXCLUSIVE_ATTRIBUTES = (frozenset(("call", "keep", "select")), frozenset(("environment", "agent")))


def derive(
    algorithm: ast.AlgorithmDecl,
    known: Mapping[str, ast.AlgorithmDecl],
    problems: Problems,
    broken: bool = False,
    dropped: dict[str, Dropped] | None = None,
) -> ast.AlgorithmDecl | None:
    """The algorithm written out; `known` are those of the file and its imports, by name, `broken` says that an import
    failed. None where what it extends cannot be had. What is dropped on the way, and stays so, is added to
    `dropped`."""
    line = lineage(algorithm, known, "algorithm", problems, broken)
    if line is None:
        return None
    if len(line) == 1 and not any(isinstance(s, ast.DropDecl) or _patches(s) for s in algorithm.body):
        return algorithm
    written = _Written()
    for part in reversed(line):
        written.own = set()
        for statement in part.body:
            with problems.catching():
                written.add(statement)
    if dropped is not None:
        dropped |= written.dropped
    return replace(algorithm, extends=None, body=tuple(written.statements()))


def lineage(
    part: T, known: Mapping[str, T], what: str, problems: Problems, broken: bool, others: str = ""
) -> list[T] | None:
    """An algorithm or a deploy, and all that it extends, the next one first; None where that cannot be had. `others` is
    the help where a base is none of those that are `known`."""
    line: list[T] = [part]
    seen = {id(part)}
    while (base := line[-1].extends) is not None:
        found = known.get(base.text)
        if found is None:
            if broken:
                return None
            help = others or nearest(base.text, [name for name in known if name != line[-1].name.text])
            import_ = f"`import {base.text}` first, or" if what == "algorithm" else "import"
            help = help or f"{import_} the file that has it"
            problems.tell("unknown-name", f"no {what} is called `{base.text}`", base.span, help)
            return None
        if id(found) in seen:
            # Told once for the cycle, at what leads back to the first of its parts.
            if found is part and found.span == min(a.span for a in line):
                way = " -> ".join([a.name.text for a in line] + [found.name.text])
                problems.tell("cycle", f"`{found.name.text}` extends itself: {way}", base.span, "write one of them out")
            return None
        line.append(found)
        seen.add(id(found))
    return line


def _inherited_attributes(old: ast.NodeDecl, new: ast.NodeDecl) -> list[ast.Attr]:
    """Return the attributes that a restated node keeps: those that it does not state itself.

    A node that changes its worker, its verb or its kind of call keeps none.
    """
    stated, had = ({a.key.text for a in node.attrs} for node in (new, old))
    other = any(stated & names and had & names and not stated & had & names for names in EXCLUSIVE_ATTRIBUTES)
    if other or (old.worker.text, old.verb.text) != (new.worker.text, new.verb.text):
        return []
    return [a for a in old.attrs if a.key.text not in stated]


def _patches(statement: ast.AlgorithmStatement) -> bool:
    return isinstance(statement, ast.NodeDecl) and statement.reads is None


class _Written:
    """The statements so far, by what they declare; `own` are those of the algorithm whose body is read now."""

    def __init__(self) -> None:
        self.declared: dict[Key, ast.AlgorithmStatement] = {}
        self.edges: dict[tuple[str, str, str], ast.EdgeDecl] = {}
        self.doubles: list[ast.AlgorithmStatement] = []
        self.own: set[Key] = set()
        self.dropped: dict[str, Dropped] = {}

    def statements(self) -> Iterable[ast.AlgorithmStatement]:
        yield from self.declared.values()
        yield from self.doubles
        yield from self.edges.values()

    def add(self, statement: ast.AlgorithmStatement) -> None:
        match statement:
            case ast.ColumnsDecl():
                for column in statement.columns:
                    self._declare(("name", column.name.text), ast.ColumnsDecl((column,), column.span))
            case ast.ParamDecl() | ast.WorkerDecl():
                self._declare(("name", statement.name.text), statement)
            case ast.StateDecl():
                self._declare(("name", statement.column.name.text), statement)
            case ast.SourceDecl():
                self._declare(("node", "source"), statement)
            case ast.NodeDecl():
                self._node(statement)
            case ast.EdgeDecl():
                for one in single(statement):
                    # One that is stated again has its place, and the new attributes.
                    self.edges[_ends(one)] = one
            case ast.DropDecl(target=ast.EdgeDecl() as edge):
                for one in single(edge):
                    self._drop_edge(one)
            case ast.DropDecl(target=ast.Ref() as ref):
                self._drop(ref)

    def _declare(self, key: Key, statement: ast.AlgorithmStatement) -> None:
        if key in self.own and key in self.declared:
            self.doubles.append(statement)
        else:
            self.declared[key] = statement
            self.own.add(key)
            self.dropped.pop(key[1], None)
            if isinstance(statement, ast.NodeDecl | ast.SourceDecl):
                self._restate_attributes(key[1], statement.attrs)

    def _restate_attributes(self, node: str, attrs: Iterable[ast.Attr]) -> None:
        """Forget that these were dropped."""
        for attr in attrs:
            self.dropped.pop(f"{node}.{attr.key.text}", None)

    def _node(self, node: ast.NodeDecl) -> None:
        key = ("node", node_name(node))
        old = self.declared.get(key)
        if node.reads is not None:
            if isinstance(old, ast.NodeDecl) and key not in self.own:
                node = replace(node, attrs=(*_inherited_attributes(old, node), *node.attrs))
            self._declare(key, node)
            return
        if not isinstance(old, ast.NodeDecl):
            nodes = [name for kind, name in self.declared if kind == "node" and name != "source"]
            help = nearest(key[1], nodes) or "a node of its own states what it reads, in parentheses"
            raise mistake(
                "unknown-name", f"no node is called `{key[1]}`, so there is nothing to change", node.title, help
            )
        new = {a.key.text: a for a in node.attrs}
        kept = [new.pop(a.key.text, a) for a in old.attrs]
        # What is stated twice in one patch is told as in any statement.
        again = [a for a in node.attrs if a not in kept and a.key.text not in new]
        self._restate_attributes(key[1], node.attrs)
        patched = (*old.patched, *(a.key.text for a in node.attrs))
        self.declared[key] = replace(old, attrs=(*kept, *new.values(), *again), patched=patched)

    # drop

    def _drop(self, ref: ast.Ref) -> None:
        node = ("node", ref.text)
        name = ("name", ref.text)
        if ref.text == "source":
            raise mistake(
                "bad-value", "an algorithm has a source", ref.span, "state another one: it takes the old one's place"
            )
        of, _, attribute = ref.text.rpartition(".")
        if node in self.declared:
            self._drop_nodes({ref.text}, ref)
        elif ("node", of) in self.declared:
            self._drop_attribute(of, attribute, ref)
            return
        elif name in self.declared:
            gone = self.declared.pop(name)
            if isinstance(gone, ast.WorkerDecl):
                nodes = {
                    key[1]
                    for key, s in self.declared.items()
                    if isinstance(s, ast.NodeDecl) and s.worker.text == ref.text
                }
                self._drop_nodes(nodes, ref)
            elif isinstance(gone, (ast.ColumnsDecl, ast.StateDecl)):
                self._drop_from_lists(ref.text)
        else:
            what = "node" if "." in ref.text else "param, column, state, worker or node"
            help = nearest(ref.text, [key[1] for key in self.declared if key[1] != "source"])
            raise mistake(
                "unknown-name", f"no {what} is called `{ref.text}`, so there is nothing to drop", ref.span, help
            )
        self.dropped[ref.text] = Dropped(ref.span)

    def _drop_attribute(self, node: str, key: str, ref: ast.Ref) -> None:
        old = self.declared["node", node]
        assert isinstance(old, ast.NodeDecl | ast.SourceDecl)
        left = tuple(a for a in old.attrs if a.key.text != key)
        if len(left) == len(old.attrs):
            help = nearest(key, [a.key.text for a in old.attrs])
            raise mistake("unknown-name", f"`{node}` states no `{key}`, so there is nothing to drop", ref.span, help)
        self.declared["node", node] = replace(old, attrs=left)
        self.dropped[ref.text] = Dropped(ref.span, attribute=(node, key))

    def _drop_nodes(self, names: set[str], ref: ast.Ref) -> None:
        for name in names:
            gone = self.declared.pop(("node", name))
            assert isinstance(gone, ast.NodeDecl)
            # Of what is dropped itself that is the cause.
            self.dropped |= {
                column.text: Dropped(ref.span, name) for column in gone.writes if ("name", column.text) in self.declared
            }
        self.edges = {ends: e for ends, e in self.edges.items() if not names & {*ends[1:]}}

    def _drop_from_lists(self, name: str) -> None:
        def without(names: tuple[ast.Name, ...]) -> tuple[ast.Name, ...]:
            return tuple(n for n in names if n.text != name)

        for key, s in self.declared.items():
            if isinstance(s, ast.SourceDecl):
                self.declared[key] = replace(s, writes=without(s.writes))
            elif isinstance(s, ast.NodeDecl):
                self.declared[key] = replace(s, reads=without(s.reads or ()), writes=without(s.writes))

    def _drop_edge(self, edge: ast.EdgeDecl) -> None:
        if _ends(edge) not in self.edges:
            _, src, dst = _ends(edge)
            arrow = "->" if edge.kind == "sample" else "=>"
            there = [f"`{s} {arrow} {d}`" for kind, s, d in self.edges if kind == edge.kind and (s == src or d == dst)]
            help = f"there is {', '.join(there)}" if 0 < len(there) <= 6 else ""
            other, sign = ("reshard", "=>") if edge.kind == "sample" else ("sample", "->")
            help = f"did you mean `{src} {sign} {dst}`?" if (other, src, dst) in self.edges else help
            raise mistake("unknown-name", f"there is no edge `{src} {arrow} {dst}` to drop", edge.span, help)
        del self.edges[_ends(edge)]


def node_name(node: ast.NodeDecl) -> str:
    return node.label.text if node.label else f"{node.worker.text}.{node.verb.text}"


def single(edge: ast.EdgeDecl) -> list[ast.EdgeDecl]:
    """An edge for each pair of states."""
    return [
        ast.EdgeDecl(edge.kind, ((src,), (dst,)), edge.attrs, src.span.to(dst.span))
        for sources, targets in pairwise(edge.groups)
        for src in sources
        for dst in targets
    ]


def _ends(edge: ast.EdgeDecl) -> tuple[str, str, str]:
    ((src,), (dst,)) = edge.groups
    return edge.kind, src.text, dst.text
