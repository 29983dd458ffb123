"""Derivation of deploys: `extends` and `drop` are resolved.

A deploy extends a base, which is another deploy.

Invariant: the result names an algorithm and a cluster, and has no `drop`. The result is the deploy that the user could
have written in full. Statements keep their spans, so that mistakes are reported at the original text. If a deploy
itself has a statement twice, the result has the statement twice, and lowering reports the duplicate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ..diagnostics import Span, nearest
from . import ast
from .derive import collect_lineage, split_edge
from .expressions import Problems, mistake

Key = tuple[str, str]  # kind of statement, and what it applies to
PARTING = "place and apart"


def write_out(
    deploy: ast.DeployDecl,
    known: Mapping[str, ast.DeployDecl],
    algorithms: Collection[str],
    problems: Problems,
    broken: bool,
) -> ast.DeployDecl | None:
    """Return the deploy written in full, or None if a base is not available.

    - `known`: the deploys that can be extended, by name.
    - `algorithms`: the names of the algorithms, for the help text of a wrong base.
    - `broken`: whether an import failed.
    """
    base = deploy.extends.text if deploy.extends else ""
    help = (
        f"it is an algorithm: write `deploy {base} on CLUSTER as {deploy.name.text}`"
        if base in algorithms and base not in known
        else ""
    )
    line = collect_lineage(deploy, known, "deploy", problems, broken, help)
    if line is None:
        return None
    if len(line) == 1 and not any(isinstance(statement, ast.UndoDecl) for statement in deploy.body):
        return deploy
    body: Iterable[ast.DeployStatement] = ()
    for part in reversed(line):
        # Mistakes of a base are reported when it is read itself.
        body = _apply_statements(body, part, problems if part is deploy else Problems())
    algorithm = line[-1].algorithm
    cluster = next(member.cluster for member in line if member.cluster is not None)
    return replace(deploy, algorithm=algorithm, cluster=cluster, body=tuple(body))


def _apply_statements(
    base: Iterable[ast.DeployStatement], deploy: ast.DeployDecl, problems: Problems
) -> list[ast.DeployStatement]:
    """Return the statements of the base, changed by the statements of the deploy."""
    statements = {statement_key(base_statement, i): base_statement for i, base_statement in enumerate(base)}
    own = set[Key]()
    doubles = list[ast.DeployStatement]()
    if any(
        isinstance(statement, ast.PlaceDecl | ast.ApartDecl) for statement in deploy.body
    ):  # together these state how devices are partitioned
        statements = {key: base_statement for key, base_statement in statements.items() if key[0] != PARTING}
    for statement in (one for stated in deploy.body for one in split_statement(stated)):
        if isinstance(statement, ast.UndoDecl):
            with problems.catching():
                _drop(statements, statement, deploy)
            continue
        key = statement_key(statement, len(statements))
        if key in own:
            doubles.append(statement)
            continue
        own.add(key)
        statements[key] = _merge_statement(statements.get(key), statement)
    return [*statements.values(), *doubles]


def split_statement(statement: ast.DeployStatement) -> Iterator[ast.DeployStatement]:
    """Split a statement into one statement for each node or edge that it names."""
    match statement:
        case ast.LayoutDecl() | ast.EngineDecl():
            yield from (replace(statement, nodes=(ref,)) for ref in statement.nodes)
        case ast.EdgeDecl():
            yield from split_edge(statement)
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


def _merge_statement(old: ast.DeployStatement | None, new: ast.DeployStatement) -> ast.DeployStatement:
    """Return the statement that replaces `old` when a deploy states `new`.

    The result is `new`. For `evaluate`, `dock`, `reshard` and `run`, the result also has the attributes of `old` that
    `new` does not state.
    """
    if (
        type(old) is not type(new)
        or not isinstance(new, ast.OptionsDecl | ast.EvaluateDecl)
        or not isinstance(old, ast.OptionsDecl | ast.EvaluateDecl)
    ):
        return new
    stated = {attr.key.text for attr in new.attrs}
    return replace(new, attrs=(*(attr for attr in old.attrs if attr.key.text not in stated), *new.attrs))


def _drop(statements: dict[Key, ast.DeployStatement], undo: ast.UndoDecl, deploy: ast.DeployDecl) -> None:
    """Remove the statements that a deploy drops.

    Raises a Fault if the deploy extends no deploy, or if a dropped statement does not exist.
    """
    if deploy.extends is None:
        raise mistake("unknown-name", f"`{deploy.name.text}` extends no deploy, so there is nothing to drop", undo.span)
    for key in check_dropped(statements, undo, deploy.extends.text):
        del statements[key]


def check_dropped(statements: Mapping[Key, ast.DeployStatement], undo: ast.UndoDecl, owner: str) -> list[Key]:
    """Return the keys of the statements that a `drop` removes.

    `statements` are the statements of the extended deploy, whose name is `owner`. Raises a Fault if one of the dropped
    statements is not in `statements`.
    """
    keys = []
    for title, key, span in _resolve_dropped(statements, undo):
        if key not in statements or key in keys:
            others = [name for kind, name in statements if kind == key[0] and name]
            help = nearest(key[1], others) if key[1] and others else ""
            raise mistake("unknown-name", f"`{owner}` states no `{title}`, so there is nothing to drop", span, help)
        keys.append(key)
    return keys


def _resolve_dropped(statements: Mapping[Key, ast.DeployStatement], undo: ast.UndoDecl) -> list[tuple[str, Key, Span]]:
    """Return a title, the key and the span of each statement that a `drop` names.

    The title is for messages. `statements` are the statements of the extended deploy.
    """
    if undo.edge:
        return [(_ends(edge), ("edge", _ends(edge)), edge.span) for edge in split_edge(undo.edge)]
    if undo.kind in ("place", "apart"):
        keys = [key for key, statement in statements.items() if ast.word(statement).lower() == undo.kind]
        return [(undo.kind, key, undo.span) for key in keys or [(undo.kind, "")]]
    return [(f"{undo.kind} {ref.text}", (undo.kind, ref.text), ref.span) for ref in undo.names] or [
        (undo.kind, (undo.kind, ""), undo.span)
    ]


def dropped_keys(undo: ast.UndoDecl) -> list[Key]:
    """Return the keys of the statements that a `drop` removes.

    A key is the kind of a statement and the subject of the statement, such as a node. The function does not need the
    deploy that is extended. Which `place` or `apart` statements a `drop` removes depends on that deploy. Therefore the
    result has a single key for all `place` statements, and a single key for all `apart` statements.
    """
    return [key for _, key, _ in _resolve_dropped({}, undo)]
