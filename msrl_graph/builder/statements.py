"""The statements of a program that is built in Python, where stating again replaces.

Invariant: a name is stated once. What is stated again has the place of the first and the content of the last, so that a
cell of a notebook that runs twice makes the same program. A statement that cannot be made changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from ..diagnostics import Diagnostic, Fault, Span
from ..dsl import ast
from ..dsl.derive import node_name, split_edge
from ..dsl.variants import check_dropped, dropped_keys, split_statement, statement_key

Statement = ast.AlgorithmStatement | ast.DeployStatement
S = TypeVar("S", ast.AlgorithmStatement, ast.DeployStatement)
Key = tuple[str, str]  # what is stated, and its name
KINDS = {ast.ParamDecl: "param", ast.ColumnsDecl: "column", ast.StateDecl: "state", ast.WorkerDecl: "worker"}


@dataclass(frozen=True)
class StatementSlot:
    """A place in a program: the keys that it was made for, and the statements that are there, none once they were
    replaced elsewhere or dropped."""

    keys: frozenset[Key]
    statements: tuple[Statement, ...]

    @property
    def present(self) -> frozenset[Key]:
        """Return the keys of all statements."""
        return frozenset(key for s in self.statements for key in keys_of(s))

    @property
    def drop(self) -> ast.DropDecl | ast.UndoDecl | None:
        """The `drop` that is there."""
        return next((s for s in self.statements if isinstance(s, ast.DropDecl | ast.UndoDecl)), None)

    def less(self, keys: frozenset[Key]) -> StatementSlot:
        """The entry without what these keys name."""
        return replace(self, statements=tuple(left for s in self.statements for left in _without(s, keys)))

    def after(self, drop: ast.DropDecl | ast.UndoDecl) -> StatementSlot:
        """The entry without what a drop takes away."""
        return replace(self, statements=tuple(left for s in self.statements for left in _left(drop, s)))


class Statements(Generic[S]):
    """The statements of an algorithm or a deploy, in order."""

    def __init__(self) -> None:
        self._entries: list[StatementSlot] = []

    def __iter__(self) -> Iterator[S]:
        """All statements; columns that follow each other are one."""
        found: list[Statement] = []
        columns: list[ast.ColumnsDecl] = []
        for statement in (s for entry in self._entries for s in entry.statements):
            if isinstance(statement, ast.ColumnsDecl):
                columns.append(statement)
                continue
            found += _joined(columns)
            columns = []
            found.append(statement)
        return cast(Iterator[S], iter([*found, *_joined(columns)]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, statements: Iterable[S]) -> None:
        """State all of these, or raise a Fault and state none."""
        entries = list(self._entries)
        for statement in statements:
            if isinstance(statement, ast.DropDecl | ast.UndoDecl):
                _add_drop(entries, statement)
            elif isinstance(statement, ast.NodeDecl) and statement.reads is None:
                _add_change(entries, statement)
            else:
                _add(entries, statement)
        self._entries = entries

    def take_back(self, drops: Iterable[ast.UndoDecl], name: str) -> None:
        """Remove the statements that these drops name, of a deploy that extends none."""
        entries = list(self._entries)
        for drop in drops:
            there = {key: s for entry in entries for s in entry.statements for key in keys_of(s)}
            check_dropped(cast(dict[Key, ast.DeployStatement], there), drop, name)
            entries = [entry.after(drop) for entry in entries]
        self._entries = entries


def _joined(columns: Sequence[ast.ColumnsDecl]) -> list[ast.ColumnsDecl]:
    """One statement of all columns, where there are any."""
    return [replace(columns[0], columns=tuple(c for one in columns for c in one.columns))] if columns else []


def keys_of(statement: Statement) -> frozenset[Key]:
    """Return what a statement states: a key for each name, node, pair of an edge."""
    match statement:
        case ast.ParamDecl() | ast.WorkerDecl():
            return frozenset({("name", statement.name.text)})
        case ast.StateDecl():
            return frozenset({("name", statement.column.name.text)})
        case ast.ColumnsDecl():
            return frozenset(("name", column.name.text) for column in statement.columns)
        case ast.SourceDecl():
            return frozenset({("node", "source")})
        case ast.NodeDecl():
            return frozenset({("node" if statement.reads is not None else "change", node_name(statement))})
        case ast.DropDecl(target=ast.EdgeDecl() as edge):
            return frozenset(("drop", pair) for _, pair in keys_of(edge))
        case ast.DropDecl(target=ast.Ref() as ref):
            return frozenset({("drop", ref.text)})
        case ast.UndoDecl():
            return frozenset(("drop", f"{what} {name}") for what, name in dropped_keys(statement))
        case ast.PlaceDecl() | ast.ApartDecl():
            # Which states are together and which ones are placed may be said of the same states.
            names = ", ".join(sorted(ref.text for ref in statement.targets))
            return frozenset({(ast.word(statement).lower(), names)})
    return frozenset(statement_key(one, 0) for one in split_statement(cast(ast.DeployStatement, statement)))


def _add(entries: list[StatementSlot], statement: Statement) -> None:
    keys = keys_of(statement)
    there = [i for i, entry in enumerate(entries) if (entry.present or entry.keys) & keys]
    for i in there:
        for old in entries[i].statements:
            if not any(_left(drop, old) == () for _, drop in _drops(entries, i)):
                _check_kind(old, statement)
    made = [i for i, entry in enumerate(entries) if entry.keys & keys]
    if made:
        # What is stated again after it was dropped is there again.
        _cancel_drops(entries, made[0], statement)
    if isinstance(statement, ast.NodeDecl) and there:
        changed = frozenset({("change", node_name(statement))})
        entries[there[0] :] = [entry.less(changed) for entry in entries[there[0] :]]
    begin = max((i + 1 for i, drop in _drops(entries) if _left(drop, statement) != (statement,)), default=0)
    _put(entries, StatementSlot(keys, (statement,)), begin)


def _add_change(entries: list[StatementSlot], change: ast.NodeDecl) -> None:
    """Add a change of a node's attributes to the changes of it so far, since the node was last stated whole."""
    keys = keys_of(change)
    whole = frozenset({("node", node_name(change))})
    begin = max((i + 1 for i, entry in enumerate(entries) if entry.present & whole), default=0)
    places = [i for i in range(begin, len(entries)) if entries[i].keys == keys]
    if places:
        _cancel_drops(entries, places[0], change)
    for place in reversed(places):
        old = entries[place].statements
        dropped = [i + 1 for i, drop in _drops(entries, place) if any(_left(drop, one) != (one,) for one in old)]
        if dropped:  # it stays before the drop of what it states, and this change comes after it
            begin = max(begin, *dropped)
            break
        for one in old:
            assert isinstance(one, ast.NodeDecl)
            stated = {attr.key.text: attr for attr in change.attrs}
            kept = [stated.pop(attr.key.text, attr) for attr in one.attrs]
            change = replace(change, attrs=(*kept, *stated.values()))
        entries[place] = replace(entries[place], statements=())
    drops = [i + 1 for i, drop in _drops(entries) if _left(drop, change) != (change,)]
    _put(entries, StatementSlot(keys, (change,)), max([begin, *drops]))


def _add_drop(entries: list[StatementSlot], drop: ast.DropDecl | ast.UndoDecl) -> None:
    keys = keys_of(drop)
    place = next((i for i, entry in enumerate(entries) if entry.keys == keys), None)
    if place is None:
        entries.append(StatementSlot(keys, (drop,)))
        return
    entries[place] = StatementSlot(keys, (drop,))
    entries[place + 1 :] = [entry.after(drop) for entry in entries[place + 1 :]]


def _put(entries: list[StatementSlot], new: StatementSlot, begin: int) -> None:
    """Put an entry at the first place, from `begin` on, of those that it replaces, else at the end."""
    places = [
        i
        for i, entry in enumerate(entries)
        if i >= begin and (entry.keys <= new.keys or (entry.present and entry.present <= new.keys))
    ]
    entries[begin:] = [entry.less(new.keys) for entry in entries[begin:]]
    if places:
        entries[places[0]] = new
    else:
        entries.append(new)


def _drops(entries: Sequence[StatementSlot], after: int = -1) -> list[tuple[int, ast.DropDecl | ast.UndoDecl]]:
    """The drops that stand after a place."""
    return [(i, entry.drop) for i, entry in enumerate(entries) if i > after and entry.drop is not None]


def _cancel_drops(entries: list[StatementSlot], after: int, statement: Statement) -> None:
    """Take back the drops of what is stated again at a place before them."""
    for i, drop in _drops(entries, after):
        if _left(drop, statement) != (statement,):
            entries[i] = replace(entries[i], statements=())


def _check_kind(old: Statement, new: Statement) -> None:
    """Refuse a name that is of something else: that is a mistake more often than a change of mind."""
    before = KINDS.get(type(old))
    now = KINDS.get(type(new))
    if before == now or before is None or now is None:
        return
    (_, name), *_ = keys_of(new)
    raise Fault(
        Diagnostic(
            "duplicate-name",
            f"`{name}` is a {before} already",
            _name_of(new),
            f'give the {now} another name, or drop the {before} first: `drop("{name}")`',
            related=((_name_of(old), f"the {before} `{name}` is declared here"),),
        )
    )


def _name_of(statement: Statement) -> Span:
    match statement:
        case ast.ColumnsDecl():
            return statement.columns[0].name.span
        case ast.StateDecl():
            return statement.column.name.span
        case ast.ParamDecl() | ast.WorkerDecl():
            return statement.name.span
    return statement.span


def _without(statement: Statement, keys: frozenset[Key]) -> tuple[Statement, ...]:
    """What is left of a statement without what some keys name."""
    own = keys_of(statement)
    if not own & keys:
        return (statement,)
    match statement:
        case ast.LayoutDecl() | ast.EngineDecl():
            left = tuple(one for one in split_statement(statement) if not keys_of(one) & keys)
            nodes = tuple(ref for one in left if isinstance(one, ast.LayoutDecl | ast.EngineDecl) for ref in one.nodes)
            return (replace(statement, nodes=nodes),) if nodes else ()
        case ast.EdgeDecl():
            return tuple(one for one in split_edge(statement) if not keys_of(one) & keys)
    return ()


def _left(drop: ast.DropDecl | ast.UndoDecl, statement: Statement) -> tuple[Statement, ...]:
    """What is left of a statement after a drop."""
    if isinstance(statement, ast.DropDecl | ast.UndoDecl):
        return (statement,)
    own = keys_of(statement)
    if isinstance(drop, ast.UndoDecl):
        gone = frozenset(dropped_keys(drop))
        whole = {kind for kind, name in gone if not name}
        return _without(statement, gone | {key for key in own if key[0] in whole})
    if isinstance(drop.target, ast.EdgeDecl):
        return _without(statement, keys_of(drop.target))
    name = drop.target.text
    if isinstance(statement, ast.NodeDecl):
        node, _, attribute = name.rpartition(".")
        if name in (node_name(statement), statement.worker.text):
            return ()
        attrs = tuple(attr for attr in statement.attrs if attr.key.text != attribute)
        if node != node_name(statement) or len(attrs) == len(statement.attrs):
            return (statement,)
        return (replace(statement, attrs=attrs),) if attrs or statement.reads is not None else ()
    if isinstance(statement, ast.EdgeDecl):
        ends = ((single_edge, _ends(single_edge)) for single_edge in split_edge(statement))
        gone = frozenset(key for one, pair in ends for key in keys_of(one) if any(_is_of(end, name) for end in pair))
        return _without(statement, gone)
    return () if ("name", name) in own else (statement,)


def _ends(edge: ast.EdgeDecl) -> tuple[str, str]:
    ((source,), (target,)) = edge.groups
    return source.text, target.text


def _is_of(end: str, name: str) -> bool:
    """Return whether an end of an edge is this node or a node of this worker."""
    return end == name or end.startswith(f"{name}.")
