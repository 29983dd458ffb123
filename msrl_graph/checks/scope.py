"""Checks of functions and loss terms: their columns, their scope and their types.

The scope of a function is the rows that one call needs: a row, a group or the batch.

Invariant: signatures come from `library`, which has the functions of msrl_graph itself and of the user's files. User
code is neither imported nor run.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..diagnostics import NOWHERE, Diagnostic, Span, nearest
from ..ir.attributes import CALLED, CallAttributes, ReshardingEdgeAttributes, UpdateAttributes
from ..ir.graph import ELEMENTS, KINDS, Expr, Graph, Node
from ..ir.kinds import LOSS, OPTIMIZER
from ..ir.signatures import FILLED, Signature
from . import states
from .columns import Library


def term_column(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report calls that need a column which the calling node does not read.

    A call of a function or loss term needs one column for each parameter that is not optional.
    """
    diagnostics = []
    for node in graph.nodes:
        for call, signature in known_calls(node, library):
            if missing_inputs(graph, node, signature):
                continue  # the call would be wrong with its columns, too
            renamed = {
                key: str(argument.value)
                for key, argument in zip(call.keys, call.args, strict=True)
                if argument.kind == "column"
            }
            for parameter in signature.columns:
                column = renamed.get(parameter, parameter)
                if (
                    column not in (*node.reads, *node.states, *node.weight_columns)
                    and parameter not in signature.optional
                ):
                    message = f"`{signature.name}` needs `{column}`, which `{node.name}` does not read"
                    help = _suggest_column(graph, node, column, call, signature)
                    if node.verb == "source":
                        message = (
                            f"`{signature.name}` needs `{column}`, and the source has no column or state of this name"
                        )
                        help = f"name one for it: `{signature.name}({parameter} = NAME)`"
                    diagnostics.append(Diagnostic("term-column", message, span(call, node), help))
            diagnostics += _check_together(node, call, signature)
    return diagnostics


def _check_together(node: Node, call: Expr, signature: Signature) -> list[Diagnostic]:
    """Report a call that passes only some of the parameters that belong together.

    A call must pass all of the parameters in `signature.together`, or none of them.
    """
    read = (*node.reads, *node.states)
    binds = call.columns()
    passed = [
        parameter
        for parameter in signature.together
        if parameter in call.options() or (parameter in signature.columns and binds.get(parameter, parameter) in read)
    ]
    missing = [parameter for parameter in signature.together if parameter not in passed]
    if not passed or not missing:
        return []
    names = [f"`{parameter}`" for parameter in signature.together]
    message = (
        f"`{signature.name}` takes {', '.join(names[:-1])} and {names[-1]} together, but `{node.name}` gives it "
        f"no `{missing[0]}`"
    )
    help = (
        f"read `{missing[0]}`, or a column for it"
        if missing[0] in signature.columns
        else f"write `{signature.name}({missing[0]} = …)`"
    )
    return [Diagnostic("term-column", message, span(call, node), f"{help}; or give none of them")]


def stale_logp(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report loss terms that need `old_logp` but do not get this column.

    A loss term with an optional `old_logp` needs this column in each of these cases:

    - The update takes more than one optimizer step per batch.
    - The resharding edge of the update allows `staleness`.
    - Another update changes the same weights.
    """
    diagnostics = []
    for node in graph.verb("update"):
        rows = graph.rows[graph.level(node)]
        options = UpdateAttributes.of(node)
        steps = options.steps(rows)
        staleness = max(
            (ReshardingEdgeAttributes.of(edge).staleness for edge in graph.reshards() if edge.src == node.name),
            default=0,
        )
        other_updates = [
            update.name for update in graph.sharing(node.worker) if update.verb == "update" and update.name != node.name
        ]
        if steps == 1 and not staleness and not other_updates:
            continue
        for call, signature in known_calls(node, library):
            has_old_logp = "old_logp" in call.keys or "old_logp" in node.reads
            if has_old_logp or "old_logp" not in signature.optional or missing_inputs(graph, node, signature):
                continue
            takes = f"one optimizer step per batch; `{node.name}` takes {steps:,}"
            if steps == 1 and other_updates:
                takes = f"the only update of a batch; `{other_updates[0]}` changes the weights of `{node.name}` too"
            elif steps == 1:
                takes = (
                    f"rows of the newest weights; those of `{node.name}` may be {staleness} "
                    f"version{'s' * (staleness > 1)} old"
                )
            message = f"`{signature.name}` without `old_logp` is only correct for {takes}"
            causes = [
                f"`{key}`"
                for key, count in (
                    ("mini_batch", steps // options.epochs),
                    ("epochs", options.epochs),
                    ("staleness", staleness + 1),
                )
                if count > 1
            ]
            help = f"read `old_logp` from `{node.worker}.infer`" + (
                f", or leave out {' and '.join(causes)}" if causes else ""
            )
            diagnostics.append(Diagnostic("stale-logp", message, span(call, node), help))
    return diagnostics


def bad_scope(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report functions whose scope does not match the rows that one call gets.

    The scope of a function is a row, a group or the batch. The attribute `per` of the node decides which rows one call
    gets.
    """
    diagnostics = []
    for node in graph.nodes:
        if node.verb in ("source", "generate", "infer", "update"):
            continue
        for call, signature in known_calls(node, library):
            level = graph.level(node)
            whole_groups = node.per == "batch" or (node.per != "row" and graph.unit_level(node) < level)
            if signature.scope == "batch" and node.per != "batch":
                gets = "may get only some of them" if node.per == "row" else f"gets those of one `{node.per}`"
                message = f"`{signature.name}` needs all rows of the batch at once, but `{node.name}` {gets}"
                diagnostics.append(Diagnostic("bad-scope", message, span(call, node), "write `per = batch`"))
            elif signature.scope == "group" and not whole_groups:
                above = _find_column_above(graph, level)
                if {state.per or "batch" for state in states.scope_mistakes(graph, node)} & {above, "batch"}:
                    continue  # reported there, and the `per` to add is at least as wide
                message = (
                    f"`{signature.name}` needs all rows of a group at once, but `{node.name}` may get only some of them"
                )
                help = f"add `per = {above}`" if above else "no node before it makes several rows of one"
                diagnostics.append(Diagnostic("bad-scope", message, span(call, node), help))
            elif signature.scope == "group" and node.per != "batch" and _has_groups_of_one(graph, node):
                message = f"`{signature.name}` works on the rows of each `{node.per}`, but that is one row"
                diagnostics.append(
                    Diagnostic("bad-scope", message, span(call, node), "generate 2 or more `samples`", "warning")
                )
            elif signature.scope == "row" and node.per != "row" and ":" not in str(call.value):
                # The scope of a function in a user's file is unknown unless the function is marked.
                if node.per != "batch" and _has_groups_of_one(graph, node):
                    continue  # each group is one row
                message = f"`{signature.name}` works on one row, but `{node.name}` has `per = {node.per}`"
                single = [column for column in node.writes if graph.column(column).per == node.per]
                help = f"leave `per = {node.per}` out"
                if single and node.per != "batch":
                    rows = (
                        f"each `{graph.row_column(level)}`, of which a `{node.per}` has "
                        f"{graph.fan(level, graph.unit_level(node)):,}"
                    )
                    help = (
                        f"let it write a value for {rows}, without `per`; a function with `per = {node.per}` can "
                        f"compute `{single[0]}` from these"
                    )
                diagnostics.append(Diagnostic("bad-scope", message, span(call, node), help))
    return diagnostics


def _find_column_above(graph: Graph, level: int) -> str:
    """Return a column of the level above `level`; "" if `level` is the source's level."""
    return next((column.name for column in graph.columns if level and column.level == graph.under[level]), "")


def _has_groups_of_one(graph: Graph, node: Node) -> bool:
    """Return whether each group that a node gets has exactly one row."""
    rows, units = (graph.rows[level] for level in (graph.level(node), graph.unit_level(node)))
    return rows == units


def result_types(graph: Graph, library: Library) -> list[Diagnostic]:
    """Report columns whose type does not match the function that writes them.

    The type does not match if the function returns an array per row and the column holds a number per row, or the
    reverse. Only functions of msrl_graph itself are checked.
    """
    diagnostics = []
    columns = {column.name: column for column in graph.columns}
    for node in graph.nodes:
        call = CallAttributes.of(node).call
        entry = library.get(("function", str(call.value))) if call is not None else None
        if (
            call is None or entry is None or ":" in str(call.value)
        ):  # the annotations of a function in a user's file may mean anything
            continue
        response = call.columns().get("response", "response")
        for name, gives in zip(node.gives or node.writes, entry[0].gives, strict=False):
            column = columns.get(name)
            if column is None or not gives or column.element not in ELEMENTS or bool(column.dims) == (gives == "array"):
                continue
            content = "an array" if gives == "array" else "a number"
            message = (
                f"`{entry[0].name}` gives {content} for each row, but `{name}` holds "
                f"{'arrays' if column.dims else 'one value'}"
            )
            right = f"{column.element}[{response}]" if gives == "array" else column.element
            note = ((column.span, f"`{name}` is declared here"),)
            diagnostics.append(
                Diagnostic("bad-value", message, span(call, node), f"declare `{name} : {right}`", related=note)
            )
    return diagnostics


def loss_columns(node: Node, library: Library) -> set[str]:
    """Return the columns that the loss of an update uses.

    The loss uses a column if the column is a factor in the loss expression, or an argument of a loss term.
    """
    columns = _list_columns(UpdateAttributes.of(node).loss)
    for call, signature in known_calls(node, library):
        columns |= {call.columns().get(parameter, parameter) for parameter in signature.columns} | (
            {*node.reads} if signature.rest else set()
        )
    return columns


def _list_columns(loss: Expr) -> set[str]:
    return (
        {str(loss.value)}
        if loss.kind == "column"
        else {column for argument in loss.args for column in _list_columns(argument)}
    )


def known_calls(node: Node, library: Library) -> Iterator[tuple[Expr, Signature]]:
    """Yield the calls in a node's attributes, each with the signature of its function.

    These attributes are, for example, `call` and `loss`. Calls of optimizers are left out. A call is also left out if
    the signature of its function is unknown.
    """
    stated = node.attributes
    for key, form in CALLED.items():
        if key not in stated or form is OPTIMIZER:
            continue
        stack = [stated[key]]
        while stack:
            expr = stack.pop(0)
            entry = library.get(("loss" if form is LOSS else "function", str(expr.value)))
            if expr.kind == "call" and entry:
                yield expr, entry[0]
            elif expr.kind != "call":
                stack[:0] = expr.args


def _suggest_column(graph: Graph, node: Node, column: str, call: Expr, signature: Signature) -> str:
    if column not in {declared.name for declared in graph.columns}:
        if ":" in str(call.value):  # a function of a user's file: a program does not name its arguments
            near = nearest(column, (*node.reads, *node.states, *signature.fills, *FILLED))
            rule = f"a parameter needs the name of a column that `{node.name}` reads, or a default"
            return f"{near} {rule}" if near.startswith("did you mean") else rule
        return f"read a column for it and name it: `{signature.name}({column} = COLUMN)`"
    help = f"add `{column}` to what `{node.name}` reads"
    writer = next((other.name for other in graph.nodes if column in other.writes), "")
    if writer and writer != node.name and not graph.flow.leads(writer, node.name):
        help += f", and the edge `{writer} -> {node.name}`"
    return help


def missing_inputs(graph: Graph, node: Node, signature: Signature) -> list[str]:
    """Return the loss term's inputs that the worker of a node does not provide.

    `signature` is the signature of the loss term. The inputs are the keys of the table GIVEN_BY (ir/signatures.py),
    which maps each input to the kinds of workers that provide it. If `signature` is not a loss term, the result is
    empty.
    """
    kind = kind_of(graph, node.worker)
    return signature.unfit(kind) if signature.kind == "loss" and kind in KINDS else []


def span(call: Expr, node: Node) -> Span:
    """Return the span of a call; if the call has no span, return the span of its node."""
    return call.span if call.span != NOWHERE else node.span


def kind_of(graph: Graph, worker: str) -> str:
    """Return the kind of a worker; "" if there is no worker of this name."""
    return next((candidate.kind for candidate in graph.workers if candidate.name == worker), "")
