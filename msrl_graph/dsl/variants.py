"""Deploys that extend others, to deploys that stand for themselves.

Invariant: the result names an algorithm and a cluster, has no `drop`, and lowers as if it had been written out.
Statements keep their spans, so that what is wrong is told where it was written. What a deploy states twice itself stays
there twice, for lowering to tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ..diagnostics import Span, nearest
from . import ast
from .derive import lineage, single
from .expressions import Problems, mistake

Key = tuple[str, str]  # the word of a statement, and what it is of
PARTING = "place and apart"


def written_out(
    deploy: ast.DeployDecl,
    known: Mapping[str, ast.DeployDecl],
    algorithms: Collection[str],
    problems: Problems,
    broken: bool,
) -> ast.DeployDecl | None:
    """The deploy with all that it extends; `known` are those that can be extended, by name, `broken` says that an
    import failed. None where what it extends cannot be had."""
    base = deploy.extends.text if deploy.extends else ""
    help = (
        f"it is an algorithm: write `deploy {base} on CLUSTER as {deploy.name.text}`"
        if base in algorithms and base not in known
        else ""
    )
    line = lineage(deploy, known, "deploy", problems, broken, help)
    if line is None:
        return None
    if len(line) == 1 and not any(isinstance(s, ast.UndoDecl) for s in deploy.body):
        return deploy
    body: Iterable[ast.DeployStatement] = ()
    for part in reversed(line):
        # What is wrong with a base is told where it is read by itself.
        body = _changed(body, part, problems if part is deploy else Problems())
    algorithm = line[-1].algorithm
    cluster = next(d.cluster for d in line if d.cluster is not None)
    return replace(deploy, algorithm=algorithm, cluster=cluster, body=tuple(body))


def _changed(
    base: Iterable[ast.DeployStatement], deploy: ast.DeployDecl, problems: Problems
) -> list[ast.DeployStatement]:
    """The statements of a base, changed by those of a deploy."""
    there = {statement_key(s, i): s for i, s in enumerate(base)}
    own = set[Key]()
    doubles = list[ast.DeployStatement]()
    if any(
        isinstance(s, ast.PlaceDecl | ast.ApartDecl) for s in deploy.body
    ):  # which say together how devices are parted
        there = {key: s for key, s in there.items() if key[0] != PARTING}
    for statement in (one for s in deploy.body for one in split_statement(s)):
        if isinstance(statement, ast.UndoDecl):
            with problems.catching():
                _drop(there, statement, deploy)
            continue
        key = statement_key(statement, len(there))
        if key in own:
            doubles.append(statement)
            continue
        own.add(key)
        there[key] = _merged(there.get(key), statement)
    return [*there.values(), *doubles]


def split_statement(statement: ast.DeployStatement) -> Iterator[ast.DeployStatement]:
    """A statement of several nodes or edges as one of each."""
    match statement:
        case ast.LayoutDecl() | ast.EngineDecl():
            yield from (replace(statement, nodes=(ref,)) for ref in statement.nodes)
        case ast.EdgeDecl():
            yield from single(statement)
        case _:
            yield statement


def statement_key(statement: ast.DeployStatement, place: int) -> Key:
    match statement:
        case ast.SetDecl() | ast.ModelDecl() | ast.DataDecl():
            return ast.word(statement).lower(), statement.name.text
        case ast.EvaluateDecl():
            return "evaluate", statement.name.text
        case ast.LayoutDecl() | ast.EngineDecl():
            return ast.word(statement).lower(), statement.nodes[0].text
        case ast.OptionsDecl():
            return statement.kind, ""
        case ast.EdgeDecl():
            return "edge", _ends(statement)
    return PARTING, f"{place} {statement.span.line}"


def _ends(edge: ast.EdgeDecl) -> str:
    ((src,), (dst,)) = edge.groups
    return f"{src.text} {'->' if edge.kind == 'sample' else '=>'} {dst.text}"


def _merged(old: ast.DeployStatement | None, new: ast.DeployStatement) -> ast.DeployStatement:
    """A statement in the place of another: `evaluate`, `dock`, `reshard` and `run` change only the attributes that they
    state."""
    if (
        type(old) is not type(new)
        or not isinstance(new, ast.OptionsDecl | ast.EvaluateDecl)
        or not isinstance(old, ast.OptionsDecl | ast.EvaluateDecl)
    ):
        return new
    stated = {a.key.text for a in new.attrs}
    return replace(new, attrs=(*(a for a in old.attrs if a.key.text not in stated), *new.attrs))


def _drop(there: dict[Key, ast.DeployStatement], undo: ast.UndoDecl, deploy: ast.DeployDecl) -> None:
    """Takes statements away; what is dropped must be there."""
    if deploy.extends is None:
        raise mistake("unknown-name", f"`{deploy.name.text}` extends no deploy, so there is nothing to drop", undo.span)
    for key in check_dropped(there, undo, deploy.extends.text):
        del there[key]


def check_dropped(there: Mapping[Key, ast.DeployStatement], undo: ast.UndoDecl, owner: str) -> list[Key]:
    """Return the keys that a `drop` takes away; a Fault where the `owner` does not state one."""
    keys = []
    for what, key, span in _dropped(there, undo):
        if key not in there or key in keys:
            others = [name for kind, name in there if kind == key[0] and name]
            help = nearest(key[1], others) if key[1] and others else ""
            raise mistake("unknown-name", f"`{owner}` states no `{what}`, so there is nothing to drop", span, help)
        keys.append(key)
    return keys


def _dropped(there: Mapping[Key, ast.DeployStatement], undo: ast.UndoDecl) -> list[tuple[str, Key, Span]]:
    """What is dropped: in words, its key, and where it is said."""
    if undo.edge:
        return [(_ends(edge), ("edge", _ends(edge)), edge.span) for edge in single(undo.edge)]
    if undo.kind in ("place", "apart"):
        found = [key for key, s in there.items() if ast.word(s).lower() == undo.kind]
        return [(undo.kind, key, undo.span) for key in found or [(undo.kind, "")]]
    return [(f"{undo.kind} {ref.text}", (undo.kind, ref.text), ref.span) for ref in undo.names] or [
        (undo.kind, (undo.kind, ""), undo.span)
    ]


def dropped_keys(undo: ast.UndoDecl) -> list[Key]:
    """Return the keys of the statements that a `drop` names; of `place` and `apart` there is one for all."""
    return [key for _, key, _ in _dropped({}, undo)]
