"""Derivation of algorithms: `extends`, patches and `drop` are resolved.

An algorithm extends a base algorithm. A patch is a node statement that changes attributes of a node of the base.

Invariant: the result has no base, patch or drop. The result is the algorithm that the user could have written in full.
Statements keep their spans, so that mistakes are reported at the original text. If an algorithm itself declares a name
twice, the result declares the name twice, and lowering reports the duplicate.
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
Key = tuple[str, str]  # kind of declaration, and its name
# Attributes that exclude each other: a node states one of each set.
EXCLUSIVE_ATTRIBUTES = (frozenset(("call", "keep", "select")), frozenset(("environment", "agent")))


def derive(
    algorithm: ast.AlgorithmDecl,
    known: Mapping[str, ast.AlgorithmDecl],
    problems: Problems,
    broken: bool = False,
    dropped: dict[str, Dropped] | None = None,
) -> ast.AlgorithmDecl | None:
    """Return the algorithm written in full, or None if a base is not available.

    - `known`: the algorithms of the file and its imports, by name.
    - `broken`: whether an import failed.
    - `dropped`: a dict that collects the dropped names. A name that is declared again after the drop is not collected.
    """
    line = collect_lineage(algorithm, known, "algorithm", problems, broken)
    if line is None:
        return None
    if len(line) == 1 and not any(
        isinstance(own_statement, ast.DropDecl) or _is_patch(own_statement) for own_statement in algorithm.body
    ):
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


def collect_lineage(
    part: T, known: Mapping[str, T], kind: str, problems: Problems, broken: bool, others: str = ""
) -> list[T] | None:
    """Return an algorithm or deploy, its base, the base of that base, and so on.

    Returns None if a base is missing or if the bases form a cycle. A missing base is reported, unless an import failed
    (`broken`). `kind` is "algorithm" or "deploy", for messages. `others` is the help text for a base that is not in
    `known`.
    """
    line: list[T] = [part]
    seen = {id(part)}
    while (base := line[-1].extends) is not None:
        base_part = known.get(base.text)
        if base_part is None:
            if broken:
                return None
            help = others or nearest(base.text, [name for name in known if name != line[-1].name.text])
            import_ = f"`import {base.text}` first, or" if kind == "algorithm" else "import"
            help = help or f"{import_} the file that has it"
            problems.report("unknown-name", f"no {kind} is called `{base.text}`", base.span, help)
            return None
        if id(base_part) in seen:
            # Reported once for the cycle, at the part whose base leads back to the first part.
            if base_part is part and base_part.span == min(member.span for member in line):
                way = " -> ".join([member.name.text for member in line] + [base_part.name.text])
                problems.report(
                    "cycle", f"`{base_part.name.text}` extends itself: {way}", base.span, "write one of them out"
                )
            return None
        line.append(base_part)
        seen.add(id(base_part))
    return line


def _inherited_attributes(old: ast.NodeDecl, new: ast.NodeDecl) -> list[ast.Attr]:
    """Return the attributes that a node inherits when it is stated again.

    `old` is the statement of the base, and `new` is the statement that replaces `old`. The node inherits no attributes
    if `new` has another worker or verb than `old`, or another of several exclusive attributes, such as `keep` instead
    of `call`.
    """
    stated, had = ({attr.key.text for attr in node.attrs} for node in (new, old))
    other = any(stated & names and had & names and not stated & had & names for names in EXCLUSIVE_ATTRIBUTES)
    if other or (old.worker.text, old.verb.text) != (new.worker.text, new.verb.text):
        return []
    return [attr for attr in old.attrs if attr.key.text not in stated]


def _is_patch(statement: ast.AlgorithmStatement) -> bool:
    return isinstance(statement, ast.NodeDecl) and statement.reads is None


class _Written:
    """The statements of an algorithm that is written in full.

    The statements of the base algorithms and of the derived algorithm are added in order, beginning with the first
    base. A key is the kind and the name of a declaration. `own` has the keys of the declarations of one algorithm: the
    algorithm whose statements are being added.
    """

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
                self._add_node(statement)
            case ast.EdgeDecl():
                for one in split_edge(statement):
                    # An edge stated again keeps its position and takes the new attributes.
                    self.edges[_ends(one)] = one
            case ast.DropDecl(target=ast.EdgeDecl() as edge):
                for one in split_edge(edge):
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
        """Delete a node's restated attributes from the record of dropped names."""
        for attr in attrs:
            self.dropped.pop(f"{node}.{attr.key.text}", None)

    def _add_node(self, node: ast.NodeDecl) -> None:
        key = ("node", node_name(node))
        old = self.declared.get(key)
        if node.reads is not None:
            if isinstance(old, ast.NodeDecl) and key not in self.own:
                node = replace(node, attrs=(*_inherited_attributes(old, node), *node.attrs))
            self._declare(key, node)
            return
        if not isinstance(old, ast.NodeDecl):
            nodes = [name for kind, name in self.declared if kind == "node" and name != "source"]
            help = nearest(key[1], nodes) or "a new node states what it reads in parentheses"
            raise mistake(
                "unknown-name", f"no node is called `{key[1]}`, so there is nothing to change", node.title, help
            )
        new = {attr.key.text: attr for attr in node.attrs}
        attrs = [new.pop(attr.key.text, attr) for attr in old.attrs]
        # An attribute that one patch states twice stays twice, so that lowering reports the duplicate.
        again = [attr for attr in node.attrs if attr not in attrs and attr.key.text not in new]
        self._restate_attributes(key[1], node.attrs)
        patched = (*old.patched, *(attr.key.text for attr in node.attrs))
        self.declared[key] = replace(old, attrs=(*attrs, *new.values(), *again), patched=patched)

    # drop

    def _drop(self, ref: ast.Ref) -> None:
        node = ("node", ref.text)
        name = ("name", ref.text)
        if ref.text == "source":
            raise mistake(
                "bad-value", "an algorithm needs a source", ref.span, "state another one: it replaces the old one"
            )
        owner, _, attribute = ref.text.rpartition(".")
        if node in self.declared:
            self._drop_nodes({ref.text}, ref)
        elif ("node", owner) in self.declared:
            self._drop_attribute(owner, attribute, ref)
            return
        elif name in self.declared:
            gone = self.declared.pop(name)
            if isinstance(gone, ast.WorkerDecl):
                nodes = {
                    key[1]
                    for key, statement in self.declared.items()
                    if isinstance(statement, ast.NodeDecl) and statement.worker.text == ref.text
                }
                self._drop_nodes(nodes, ref)
            elif isinstance(gone, (ast.ColumnsDecl, ast.StateDecl)):
                self._drop_from_lists(ref.text)
        else:
            kind = "node" if "." in ref.text else "param, column, state, worker or node"
            help = nearest(ref.text, [key[1] for key in self.declared if key[1] != "source"])
            raise mistake(
                "unknown-name", f"no {kind} is called `{ref.text}`, so there is nothing to drop", ref.span, help
            )
        self.dropped[ref.text] = Dropped(ref.span)

    def _drop_attribute(self, node: str, key: str, ref: ast.Ref) -> None:
        old = self.declared["node", node]
        assert isinstance(old, ast.NodeDecl | ast.SourceDecl)
        attrs = tuple(attr for attr in old.attrs if attr.key.text != key)
        if len(attrs) == len(old.attrs):
            help = nearest(key, [attr.key.text for attr in old.attrs])
            raise mistake("unknown-name", f"`{node}` states no `{key}`, so there is nothing to drop", ref.span, help)
        self.declared["node", node] = replace(old, attrs=attrs)
        self.dropped[ref.text] = Dropped(ref.span, attribute=(node, key))

    def _drop_nodes(self, names: set[str], ref: ast.Ref) -> None:
        for name in names:
            gone = self.declared.pop(("node", name))
            assert isinstance(gone, ast.NodeDecl)
            # A column that is dropped itself already has its own entry.
            self.dropped |= {
                column.text: Dropped(ref.span, name) for column in gone.writes if ("name", column.text) in self.declared
            }
        self.edges = {ends: edge for ends, edge in self.edges.items() if not names & {*ends[1:]}}

    def _drop_from_lists(self, name: str) -> None:
        def without(names: tuple[ast.Name, ...]) -> tuple[ast.Name, ...]:
            return tuple(listed for listed in names if listed.text != name)

        for key, statement in self.declared.items():
            if isinstance(statement, ast.SourceDecl):
                self.declared[key] = replace(statement, writes=without(statement.writes))
            elif isinstance(statement, ast.NodeDecl):
                self.declared[key] = replace(
                    statement, reads=without(statement.reads or ()), writes=without(statement.writes)
                )

    def _drop_edge(self, edge: ast.EdgeDecl) -> None:
        if _ends(edge) not in self.edges:
            _, src, dst = _ends(edge)
            arrow = "->" if edge.kind == "sample" else "=>"
            similar = [
                f"`{other_src} {arrow} {other_dst}`"
                for kind, other_src, other_dst in self.edges
                if kind == edge.kind and (other_src == src or other_dst == dst)
            ]
            help = f"there is {', '.join(similar)}" if 0 < len(similar) <= 6 else ""
            other, sign = ("reshard", "=>") if edge.kind == "sample" else ("sample", "->")
            help = f"did you mean `{src} {sign} {dst}`?" if (other, src, dst) in self.edges else help
            raise mistake("unknown-name", f"there is no edge `{src} {arrow} {dst}` to drop", edge.span, help)
        del self.edges[_ends(edge)]


def node_name(node: ast.NodeDecl) -> str:
    return node.label.text if node.label else f"{node.worker.text}.{node.verb.text}"


def split_edge(edge: ast.EdgeDecl) -> list[ast.EdgeDecl]:
    """Split a chain of edges into one edge statement for each pair of nodes."""
    return [
        ast.EdgeDecl(edge.kind, ((src,), (dst,)), edge.attrs, src.span.extend_to(dst.span))
        for sources, targets in pairwise(edge.groups)
        for src in sources
        for dst in targets
    ]


def _ends(edge: ast.EdgeDecl) -> tuple[str, str, str]:
    ((src,), (dst,)) = edge.groups
    return edge.kind, src.text, dst.text
