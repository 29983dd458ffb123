"""The statements of a program that is built in Python.

A statement has a key for each thing that it states: a name, a node, or a pair of nodes with an edge between them.

Invariant: the program has one statement for each name. If a statement is stated again, it stays at its first position
and gets the new content, so running a notebook cell twice gives the same program. A statement that raises a Fault
changes nothing.
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
Key = tuple[str, str]  # kind of statement, and its name
KINDS = {ast.ParamDecl: "param", ast.ColumnsDecl: "column", ast.StateDecl: "state", ast.WorkerDecl: "worker"}


@dataclass(frozen=True)
class StatementSlot:
    """A position in a program.

    - `keys`: the keys of the statement that the slot was created for.
    - `statements`: the current statements at the position. The tuple is empty if the statement was dropped, or if its
      replacement is at another position.
    """

    keys: frozenset[Key]
    statements: tuple[Statement, ...]

    @property
    def present(self) -> frozenset[Key]:
        """The keys of all statements that are in the slot."""
        return frozenset(key for statement in self.statements for key in keys_of(statement))

    @property
    def drop(self) -> ast.DropDecl | ast.UndoDecl | None:
        """The `drop` statement in the slot; None if there is none."""
        return next(
            (statement for statement in self.statements if isinstance(statement, ast.DropDecl | ast.UndoDecl)), None
        )

    def without_keys(self, keys: frozenset[Key]) -> StatementSlot:
        """Return the slot without the statements that are named by `keys`.

        If `keys` contains only some of the nodes or edges of a statement, the rest of the statement remains.
        """
        return replace(
            self, statements=tuple(rest for statement in self.statements for rest in _without(statement, keys))
        )

    def after_drop(self, drop: ast.DropDecl | ast.UndoDecl) -> StatementSlot:
        """Return the slot without the statements that a `drop` statement removes.

        If `drop` removes only some nodes, edges or attributes of a statement, the rest of the statement remains.
        """
        return replace(
            self, statements=tuple(rest for statement in self.statements for rest in _apply_drop(drop, statement))
        )


class Statements(Generic[S]):
    """The statements of an algorithm or a deploy, in order."""

    def __init__(self) -> None:
        self._entries: list[StatementSlot] = []

    def __iter__(self) -> Iterator[S]:
        """Yield all statements; consecutive column declarations are joined into one."""
        statements: list[Statement] = []
        columns: list[ast.ColumnsDecl] = []
        for statement in (stated for entry in self._entries for stated in entry.statements):
            if isinstance(statement, ast.ColumnsDecl):
                columns.append(statement)
                continue
            statements += _join_columns(columns)
            columns = []
            statements.append(statement)
        return cast(Iterator[S], iter([*statements, *_join_columns(columns)]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, statements: Iterable[S]) -> None:
        """Add all statements; if one is rejected, raise a Fault and add none of them."""
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
        """Remove the statements that are named by `drops`.

        This is for a deploy that extends no other deploy. `name` is the name of the deploy. Raises Fault if the deploy
        does not have one of the statements.
        """
        entries = list(self._entries)
        for drop in drops:
            stated = {
                key: statement for entry in entries for statement in entry.statements for key in keys_of(statement)
            }
            check_dropped(cast(dict[Key, ast.DeployStatement], stated), drop, name)
            entries = [entry.after_drop(drop) for entry in entries]
        self._entries = entries


def _join_columns(columns: Sequence[ast.ColumnsDecl]) -> list[ast.ColumnsDecl]:
    """Join column declarations into one statement; return [] if there are none."""
    return [replace(columns[0], columns=tuple(column for one in columns for column in one.columns))] if columns else []


def keys_of(statement: Statement) -> frozenset[Key]:
    """Return the keys of a statement.

    There is one key for each name, each node, or each pair of nodes with an edge between the nodes.
    """
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
            return frozenset(("drop", f"{kind} {name}") for kind, name in dropped_keys(statement))
        case ast.PlaceDecl() | ast.ApartDecl():
            # `place` and `apart` can both be stated for the same nodes.
            names = ", ".join(sorted(ref.text for ref in statement.targets))
            return frozenset({(ast.word(statement).lower(), names)})
    return frozenset(statement_key(one, 0) for one in split_statement(cast(ast.DeployStatement, statement)))


def _add(entries: list[StatementSlot], statement: Statement) -> None:
    keys = keys_of(statement)
    present = [i for i, entry in enumerate(entries) if (entry.present or entry.keys) & keys]
    for i in present:
        for old in entries[i].statements:
            if not any(_apply_drop(drop, old) == () for _, drop in _find_drops(entries, i)):
                _check_kind(old, statement)
    places = [i for i, entry in enumerate(entries) if entry.keys & keys]
    if places:
        # A statement that was dropped and is stated again is no longer dropped.
        _cancel_drops(entries, places[0], statement)
    if isinstance(statement, ast.NodeDecl) and present:
        changed = frozenset({("change", node_name(statement))})
        entries[present[0] :] = [entry.without_keys(changed) for entry in entries[present[0] :]]
    begin = max((i + 1 for i, drop in _find_drops(entries) if _apply_drop(drop, statement) != (statement,)), default=0)
    _place_slot(entries, StatementSlot(keys, (statement,)), begin)


def _add_change(entries: list[StatementSlot], change: ast.NodeDecl) -> None:
    """Add a change of a node's attributes to `entries`.

    Earlier changes of the same node are merged into the new change, unless a `drop` statement is between them.
    """
    keys = keys_of(change)
    node_key = frozenset({("node", node_name(change))})
    begin = max((i + 1 for i, entry in enumerate(entries) if entry.present & node_key), default=0)
    places = [i for i in range(begin, len(entries)) if entries[i].keys == keys]
    if places:
        _cancel_drops(entries, places[0], change)
    for place in reversed(places):
        old = entries[place].statements
        dropped = [
            i + 1 for i, drop in _find_drops(entries, place) if any(_apply_drop(drop, one) != (one,) for one in old)
        ]
        if dropped:  # the old change stays before the drop of its content, the new one comes after it
            begin = max(begin, *dropped)
            break
        for one in old:
            assert isinstance(one, ast.NodeDecl)
            stated = {attr.key.text: attr for attr in change.attrs}
            attrs = [stated.pop(attr.key.text, attr) for attr in one.attrs]
            change = replace(change, attrs=(*attrs, *stated.values()))
        entries[place] = replace(entries[place], statements=())
    drops = [i + 1 for i, drop in _find_drops(entries) if _apply_drop(drop, change) != (change,)]
    _place_slot(entries, StatementSlot(keys, (change,)), max([begin, *drops]))


def _add_drop(entries: list[StatementSlot], drop: ast.DropDecl | ast.UndoDecl) -> None:
    keys = keys_of(drop)
    place = next((i for i, entry in enumerate(entries) if entry.keys == keys), None)
    if place is None:
        entries.append(StatementSlot(keys, (drop,)))
        return
    entries[place] = StatementSlot(keys, (drop,))
    entries[place + 1 :] = [entry.after_drop(drop) for entry in entries[place + 1 :]]


def _place_slot(entries: list[StatementSlot], new: StatementSlot, begin: int) -> None:
    """Insert the slot `new` in `entries`; remove the statements that it replaces.

    Only the slots from the position `begin` on can be replaced. A slot is replaced if all its keys are keys of the new
    slot. The new slot gets the position of the first slot that it replaces. If the new slot replaces no slot, the new
    slot is appended.
    """
    places = [
        i
        for i, entry in enumerate(entries)
        if i >= begin and (entry.keys <= new.keys or (entry.present and entry.present <= new.keys))
    ]
    entries[begin:] = [entry.without_keys(new.keys) for entry in entries[begin:]]
    if places:
        entries[places[0]] = new
    else:
        entries.append(new)


def _find_drops(entries: Sequence[StatementSlot], after: int = -1) -> list[tuple[int, ast.DropDecl | ast.UndoDecl]]:
    """Return the `drop` statements after a position, each with its position."""
    return [(i, entry.drop) for i, entry in enumerate(entries) if i > after and entry.drop is not None]


def _cancel_drops(entries: list[StatementSlot], after: int, statement: Statement) -> None:
    """Remove the `drop` statements that would remove a restated statement.

    `after` is the position of `statement`. Only `drop` statements after this position are removed.
    """
    for i, drop in _find_drops(entries, after):
        if _apply_drop(drop, statement) != (statement,):
            entries[i] = replace(entries[i], statements=())


def _check_kind(old: Statement, new: Statement) -> None:
    """Raise a Fault if a name is stated again as another kind of statement.

    For example, a program states a column `x` and later a param `x`. This is usually a mistake.
    """
    before = KINDS.get(type(old))
    now = KINDS.get(type(new))
    if before == now or before is None or now is None:
        return
    (_, name), *_ = keys_of(new)
    raise Fault(
        Diagnostic(
            "duplicate-name",
            f"`{name}` is already a {before}",
            _name_span(new),
            f'give the {now} another name, or drop the {before} first: `drop("{name}")`',
            related=((_name_span(old), f"the {before} `{name}` is declared here"),),
        )
    )


def _name_span(statement: Statement) -> Span:
    match statement:
        case ast.ColumnsDecl():
            return statement.columns[0].name.span
        case ast.StateDecl():
            return statement.column.name.span
        case ast.ParamDecl() | ast.WorkerDecl():
            return statement.name.span
    return statement.span


def _without(statement: Statement, keys: frozenset[Key]) -> tuple[Statement, ...]:
    """Return a statement without the nodes or edges that are named by `keys`.

    The result has no statement if nothing remains.
    """
    own = keys_of(statement)
    if not own & keys:
        return (statement,)
    match statement:
        case ast.LayoutDecl() | ast.EngineDecl():
            rest = tuple(one for one in split_statement(statement) if not keys_of(one) & keys)
            nodes = tuple(ref for one in rest if isinstance(one, ast.LayoutDecl | ast.EngineDecl) for ref in one.nodes)
            return (replace(statement, nodes=nodes),) if nodes else ()
        case ast.EdgeDecl():
            return tuple(one for one in split_edge(statement) if not keys_of(one) & keys)
    return ()


def _apply_drop(drop: ast.DropDecl | ast.UndoDecl, statement: Statement) -> tuple[Statement, ...]:
    """Return what remains of a statement after a `drop` statement.

    The result has no statement if nothing remains.
    """
    if isinstance(statement, ast.DropDecl | ast.UndoDecl):
        return (statement,)
    own = keys_of(statement)
    if isinstance(drop, ast.UndoDecl):
        gone = frozenset(dropped_keys(drop))
        whole_kinds = {kind for kind, name in gone if not name}
        return _without(statement, gone | {key for key in own if key[0] in whole_kinds})
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
        gone = frozenset(
            key for one, pair in ends for key in keys_of(one) if any(_is_end_of(end, name) for end in pair)
        )
        return _without(statement, gone)
    return () if ("name", name) in own else (statement,)


def _ends(edge: ast.EdgeDecl) -> tuple[str, str]:
    ((source,), (target,)) = edge.groups
    return source.text, target.text


def _is_end_of(end: str, name: str) -> bool:
    """Return whether an edge's end is the node `name`, or a node of a worker `name`."""
    return end == name or end.startswith(f"{name}.")
