"""Lowering of an `evaluate` statement of a deploy to an Evaluation.

Invariant: the name of an evaluation is unique. An evaluation reports only columns whose mean a run computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from ..analysis.likely_writers import find_idle_writer
from ..analysis.rowsets import nodes_upstream
from ..diagnostics import Span, nearest
from ..ir.evaluate_options import EvaluateOptions
from ..ir.evaluation import Evaluation
from ..ir.graph import ELEMENTS, Expr, Graph
from ..ir.kinds import ValueKind
from ..ir.plan import is_reported
from . import ast
from .expressions import Problems, mistake

ReadAttributes = Callable[[tuple[ast.Attr, ...], str, Mapping[str, ValueKind]], dict[str, Expr]]


def lower_evaluation(statement: ast.EvaluateDecl, graph: Graph, read: ReadAttributes, problems: Problems) -> Evaluation:
    """Lower an `evaluate` statement, and check it against the graph.

    One check is left to the caller, after all statements are lowered: whether the deploy declares the evaluation's
    data.
    """
    name = statement.name.text
    if name == "train":
        # The plan's streams and a run's records use the purpose as name: `train` or an evaluation.
        raise mistake(
            "duplicate-name",
            "`train` is the name of the training itself",
            statement.name.span,
            "give the evaluation another name and state its data: `data = NAME`",
        )
    attributes = read(statement.attrs, "evaluate", EvaluateOptions.kinds())
    options = EvaluateOptions.of_stated(attributes)
    if "report" in attributes:
        _check_reported(attributes["report"], graph, problems)
    elif all(attr.key.text != "report" for attr in statement.attrs):
        help = f"add `report = {EvaluateOptions.declared()['report'].must}`"
        raise mistake("bad-value", f"`evaluate {name}` has no `report`", statement.name.span, help)
    if "vote" in attributes:
        _check_vote(attributes["vote"], attributes.get("report"), "at" in attributes, graph, problems)
    if "by" in attributes:
        _check_by(attributes["by"], graph, problems)
    data = options.data or name
    stated = vars(replace(options, data=data))
    evaluation = Evaluation(**stated, span=statement.name.span, name="" if data == name else name)
    _check_draws(evaluation, graph, problems)
    if "at" in attributes and "report" in attributes:
        _check_attempts(attributes["at"], attributes["report"], evaluation, graph, problems)
    if "best" in attributes or all(attr.key.text != "best" for attr in statement.attrs):
        _check_best(evaluation, attributes, problems)
    return evaluation


def rename_help(statement: ast.EvaluateDecl) -> str:
    """Return help for an evaluation whose name another evaluation already has."""
    name = statement.name.text
    data = statement.name.text
    for attribute in statement.attrs:
        if attribute.key.text == "data" and isinstance(attribute.value, ast.NameExpr):
            data = attribute.value.text
    return f"give it another name and state its data: `evaluate {name}_2 {{ data = {data}, … }}`"


def data_help(evaluation: Evaluation, known: Collection[str]) -> str:
    """Return help for an evaluation whose data the deploy does not declare."""
    others = [name for name in known if name != "source"]
    help = nearest(evaluation.data, others) or f'add `data {evaluation.data} = "file.jsonl"`'
    if others and not evaluation.name and not help.startswith("did you mean"):
        help += f"; for a separate name write `evaluate {evaluation.data} {{ data = {others[0]}, … }}`"
    return help


def _named_columns(value: Expr) -> dict[str, Expr]:
    """Return each column in an attribute's value, with the expression that names it."""
    return {str(word.value): word for word in (value.args if value.kind == "list" else (value,))}


def _check_draws(evaluation: Evaluation, graph: Graph, problems: Problems) -> None:
    """Check that each name in `draws` is a generation, and that no name occurs twice.

    Also checks that the evaluation runs each of these generations.
    """
    generations = [node.name for node in graph.verb("generate")]
    needed = nodes_upstream(graph, evaluation.columns)
    seen = set[str]()
    for draw in evaluation.draws:
        name = draw.generation
        if name not in generations:
            problems.report("unknown-name", f"no generation is called `{name}`", draw.span, nearest(name, generations))
        elif name not in needed:
            columns = " and ".join(f"`{column}`" for column in evaluation.columns)
            message = f"`{name}` does not run in `evaluate {evaluation.task}`: {columns} can be computed without it"
            problems.report("bad-value", message, draw.span, "leave it out, or report a column that needs it")
        elif name in seen:
            problems.report(
                "duplicate-name", f"`draws` has `{name}` twice", draw.span, "state its settings in one `draw`"
            )
        seen.add(name)


def _check_attempts(counts: Expr, reported: Expr, evaluation: Evaluation, graph: Graph, problems: Problems) -> None:
    """Check that each prompt has enough values of each reported column.

    `counts` is the value of the attribute `at`. There must be at least as many values as the largest number in
    `counts`.
    """
    most = max(int(count.value) for count in counts.args if isinstance(count.value, int | float))
    for column in (
        name for name in _named_columns(reported) if name in graph.writers and not _explain_unreportable(graph, name)
    ):
        if (values := _values_of_prompt(graph, column, evaluation)) < most:
            message = f"`at` has {most}, and a prompt has {values} of `{column}`"
            help = f"`samples = {most}`, or smaller numbers in `at`"
            if not graph.column(column).level:
                help = "report a column that each response has a value of, or leave out `at`"
            problems.report("bad-value", message, counts.span, help)


def _values_of_prompt(graph: Graph, column: str, evaluation: Evaluation) -> int:
    """Return the number of values per prompt that a column has in an evaluation."""
    by_level = {graph.row_level(node): evaluation.draw(graph, node).samples for node in graph.verb("generate")}
    values = 1
    level = graph.column(column).level
    while level:
        above = graph.under[level]
        values *= by_level.get(level, 0) or graph.fan(level, above)
        level = above
    return values


def _check_vote(value: Expr, reported: Expr | None, counted: bool, graph: Graph, problems: Problems) -> None:
    """Check that the `vote` column has an answer for each value of a reported column.

    `value` is the attribute `vote`, and `reported` is the attribute `report`. `counted` is whether the evaluation has
    the attribute `at`, which `vote` needs.
    """
    column = str(value.value)
    written = graph.writers
    if column not in written:
        message = f"no node writes a column `{column}`"
        problems.report("unknown-column", message, value.span, nearest(column, written))
        return
    kind = graph.column(column)
    others = (
        [name for name in _named_columns(reported) if name in written and graph.column(name).level != kind.level]
        if reported
        else []
    )
    if kind.element == "json" or kind.dims:
        message = f"`{column}` is neither text nor a number, so it cannot be compared"
        problems.report("bad-value", message, value.span, "name a column of `text` that a function writes")
    elif others:
        message = f"`{column}` does not have the same rows as `{others[0]}`"
        problems.report("bad-value", message, value.span, "name a column that each response has a value of")
    elif not counted:
        problems.report("bad-value", "`vote` needs `at`", value.span, "add `at = [8]`: `maj@8`")


def _check_by(value: Expr, graph: Graph, problems: Problems) -> None:
    column = str(value.value)
    source = graph.node("source").writes
    if column not in source:
        message = f"the source writes no column `{column}`"
        problems.report("unknown-column", message, value.span, nearest(column, source))
    elif graph.column(column).element == "json" or graph.column(column).dims:
        message = f"`{column}` is neither text nor a number, so rows cannot be grouped by it"
        problems.report("bad-value", message, value.span, "name a column of `text` that the source writes")


def _check_best(evaluation: Evaluation, attributes: Mapping[str, Expr], problems: Problems) -> None:
    """Check that `best` names a figure that the evaluation computes during training.

    Also checks that `goal` and `patience` are stated only together with `best`.
    """
    for name in ("goal", "patience"):
        if name in attributes and not evaluation.best:
            message = f"`{name}` needs `best`"
            problems.report(
                "bad-value", message, attributes[name].span, f'add `best = "{(*evaluation.report, "reward")[0]}"`'
            )
    if not evaluation.best:
        return
    span = attributes["best"].span
    known = evaluation.figures
    ungrouped = evaluation.by and evaluation.best.rpartition(f"/{evaluation.by}=")[0]
    if evaluation.best not in known and ungrouped not in known:
        message = f"`evaluate {evaluation.task}` has no figure `{evaluation.best}`"
        help = nearest(evaluation.best, known) or f"it has {', '.join(f'`{figure}`' for figure in known)}"
        problems.report("bad-value", message, span, help)
    elif not evaluation.every:
        message = f"`best` needs `every`: `evaluate {evaluation.task}` runs only before and after the training"
        problems.report("bad-value", message, span, "add `every = 20` or another interval")


def _check_reported(value: Expr, graph: Graph, problems: Problems) -> None:
    for column, word in _named_columns(value).items():
        if column not in graph.writers:
            _tell_unwritten(column, word.span, graph, problems)
        elif description := _explain_unreportable(graph, column):
            kind = "an f32 scalar that a function or a reward model writes"
            others = _list_reportable(graph)
            help = f"report a column such as {others}, {kind}" if others else f"report {kind}: `NAME : f32`"
            problems.report("bad-value", f"`{column}` cannot be reported: it is {description}", word.span, help)


def _tell_unwritten(column: str, span: Span, graph: Graph, problems: Problems) -> None:
    """Report a column that no node writes.

    If a node has a `call` and writes nothing, the report names this node as the probable writer.
    """
    help = nearest(column, graph.writers)
    related: tuple[tuple[Span, str], ...] = ()
    idle = find_idle_writer(graph, column)
    # What a node with a mistake writes is unknown.
    wrong = {(diagnostic.span.file, diagnostic.span.line) for diagnostic in problems.diagnostics}
    if idle is not None and (idle.span.file, idle.span.line) not in wrong:
        help = f"add `-> {column}` to `{idle.name}`, which has a `call` and writes nothing"
        related = ((idle.span, f"`{idle.name}` writes nothing"),)
    problems.diagnostics += mistake(
        "unknown-column", f"no node writes a column `{column}`", span, help, related
    ).diagnostics


def _explain_unreportable(graph: Graph, column: str) -> str:
    """Return why no evaluation can report a column, or "" if an evaluation can.

    Returns "" also if the column's type is wrong, because the wrong type is already reported.
    """
    kind = graph.column(column)
    if kind.element not in ELEMENTS or is_reported(graph, column):
        return ""
    dims = ", ".join(dim.like or f"{'<= ' if dim.ragged else ''}{dim.size}" for dim in kind.dims)
    return f"`{kind.element}{f'[{dims}]' if dims else ''}`, written by `{graph.writer(column).name}`"


def _list_reportable(graph: Graph) -> str:
    known = sorted(
        column
        for column in graph.writers
        if graph.column(column).element == "f32" and not _explain_unreportable(graph, column)
    )
    return " or ".join(f"`{column}`" for column in known[:3])
