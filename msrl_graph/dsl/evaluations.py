"""`evaluate` of a deploy to Evaluation.

Invariant: an evaluation has a name that no other has, and reports only columns whose mean a run computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from ..diagnostics import Span, nearest
from ..ir.evaluation import Evaluation
from ..ir.graph import ELEMENTS, Expr, Graph
from ..ir.kinds import ValueKind
from ..ir.likely_writers import without_arrow
from ..ir.options import EvaluateOptions
from ..ir.plan import reported
from ..ir.rowsets import upstream
from . import ast
from .expressions import Problems, mistake

ReadAttributes = Callable[[tuple[ast.Attr, ...], str, Mapping[str, ValueKind]], dict[str, Expr]]


def lower_evaluation(statement: ast.EvaluateDecl, graph: Graph, read: ReadAttributes, problems: Problems) -> Evaluation:
    """Check a statement against the graph; its data are looked up when all statements are known."""
    name = statement.name.text
    if name == "train":
        # The plan's streams and a run's records are named by what they are for: `train`, or an evaluation.
        raise mistake(
            "duplicate-name",
            "`train` is the name of the training itself",
            statement.name.span,
            "give the evaluation another name, and say which data it is on: `data = NAME`",
        )
    attributes = read(statement.attrs, "evaluate", EvaluateOptions.kinds())
    options = EvaluateOptions.of_stated(attributes)
    if "report" in attributes:
        _check_reported(attributes["report"], graph, problems)
    elif all(a.key.text != "report" for a in statement.attrs):
        help = f"add `report = {EvaluateOptions.declared()['report'].must}`"
        raise mistake("bad-value", f"`evaluate {name}` says nowhere what to report", statement.name.span, help)
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
    if "best" in attributes or all(a.key.text != "best" for a in statement.attrs):
        _check_best(evaluation, attributes, problems)
    return evaluation


def another_name(statement: ast.EvaluateDecl) -> str:
    """The help for an evaluation whose name another one has."""
    name = statement.name.text
    data = statement.name.text
    for attribute in statement.attrs:
        if attribute.key.text == "data" and isinstance(attribute.value, ast.NameExpr):
            data = attribute.value.text
    return f"give it another name, and say which data it is on: `evaluate {name}_2 {{ data = {data}, … }}`"


def other_data(evaluation: Evaluation, known: Collection[str]) -> str:
    """Return the help for an evaluation of data that the deploy does not name."""
    others = [name for name in known if name != "source"]
    help = nearest(evaluation.data, others) or f'add `data {evaluation.data} = "file.jsonl"`'
    if others and not evaluation.name and not help.startswith("did you mean"):
        help += f"; a name of its own needs `evaluate {evaluation.data} {{ data = {others[0]}, … }}`"
    return help


def _words(value: Expr) -> dict[str, Expr]:
    """The columns that an attribute names, each with where it does."""
    return {str(word.value): word for word in (value.args if value.kind == "list" else (value,))}


def _check_draws(evaluation: Evaluation, graph: Graph, problems: Problems) -> None:
    """Settings are of generations that run in the evaluation, of each once."""
    generations = [node.name for node in graph.verb("generate")]
    needed = upstream(graph, evaluation.columns)
    seen = set[str]()
    for draw in evaluation.draws:
        name = draw.generation
        if name not in generations:
            problems.tell("unknown-name", f"no generation is called `{name}`", draw.span, nearest(name, generations))
        elif name not in needed:
            columns = " and ".join(f"`{column}`" for column in evaluation.columns)
            message = f"`{name}` does not run in `evaluate {evaluation.task}`: {columns} needs no text of it"
            problems.tell("bad-value", message, draw.span, "leave it out, or report a column that needs it")
        elif name in seen:
            problems.tell(
                "duplicate-name", f"`draws` has `{name}` twice", draw.span, "state its settings in one `draw`"
            )
        seen.add(name)


def _check_attempts(counts: Expr, reported: Expr, evaluation: Evaluation, graph: Graph, problems: Problems) -> None:
    """A prompt must have as many values of each reported column as `at` says."""
    most = max(int(count.value) for count in counts.args if isinstance(count.value, int | float))
    for column in (c for c in _words(reported) if c in graph.writers and not _unreported(graph, c)):
        if (values := _values_of_prompt(graph, column, evaluation)) < most:
            message = f"`at` has {most}, and a prompt has {values} of `{column}`"
            help = f"`samples = {most}`, or smaller numbers in `at`"
            if not graph.column(column).level:
                help = "report a column that each response has a value of, or leave out `at`"
            problems.tell("bad-value", message, counts.span, help)


def _values_of_prompt(graph: Graph, column: str, evaluation: Evaluation) -> int:
    """How many values of a column an evaluation has of each prompt."""
    by_level = {graph.row_level(node): evaluation.draw(graph, node).samples for node in graph.verb("generate")}
    values = 1
    level = graph.column(column).level
    while level:
        above = graph.under[level]
        values *= by_level.get(level, 0) or graph.fan(level, above)
        level = above
    return values


def _check_vote(value: Expr, reported: Expr | None, counted: bool, graph: Graph, problems: Problems) -> None:
    """The column of answers has one for each value of the reported columns."""
    column = str(value.value)
    written = graph.writers
    if column not in written:
        message = f"no node writes a column `{column}`"
        problems.tell("unknown-column", message, value.span, nearest(column, written))
        return
    kind = graph.column(column)
    others = [c for c in _words(reported) if c in written and graph.column(c).level != kind.level] if reported else []
    if kind.element == "json" or kind.dims:
        message = f"`{column}` is neither text nor a number, so that answers cannot be compared by it"
        problems.tell("bad-value", message, value.span, "name a column of `text` that a function writes")
    elif others:
        message = f"`{column}` is not of the same rows as `{others[0]}`"
        problems.tell("bad-value", message, value.span, "name a column that each response has a value of")
    elif not counted:
        problems.tell("bad-value", "`vote` says nothing without `at`", value.span, "add `at = [8]`: `maj@8`")


def _check_by(value: Expr, graph: Graph, problems: Problems) -> None:
    column = str(value.value)
    source = graph.node("source").writes
    if column not in source:
        message = f"the source writes no column `{column}`"
        problems.tell("unknown-column", message, value.span, nearest(column, source))
    elif graph.column(column).element == "json" or graph.column(column).dims:
        message = f"`{column}` is neither text nor a number, so that rows cannot be parted by it"
        problems.tell("bad-value", message, value.span, "name a column of `text` that the source writes")


def _check_best(evaluation: Evaluation, attributes: Mapping[str, Expr], problems: Problems) -> None:
    """The best checkpoint is chosen by a figure that the evaluation gives while the training goes on."""
    for name in ("goal", "patience"):
        if name in attributes and not evaluation.best:
            message = f"`{name}` says nothing without `best`"
            problems.tell(
                "bad-value", message, attributes[name].span, f'add `best = "{(*evaluation.report, "reward")[0]}"`'
            )
    if not evaluation.best:
        return
    span = attributes["best"].span
    known = evaluation.figures
    parted = evaluation.by and evaluation.best.rpartition(f"/{evaluation.by}=")[0]
    if evaluation.best not in known and parted not in known:
        message = f"`evaluate {evaluation.task}` has no figure `{evaluation.best}`"
        help = nearest(evaluation.best, known) or f"it has {', '.join(f'`{k}`' for k in known)}"
        problems.tell("bad-value", message, span, help)
    elif not evaluation.every:
        message = f"`best` chooses among checkpoints, and `evaluate {evaluation.task}` is only before and after"
        problems.tell("bad-value", message, span, "add `every = 20`, or as often as it should be looked at")


def _check_reported(value: Expr, graph: Graph, problems: Problems) -> None:
    for column, word in _words(value).items():
        if column not in graph.writers:
            _tell_unwritten(column, word.span, graph, problems)
        elif what := _unreported(graph, column):
            kind = "an f32 scalar that a function or a reward model writes"
            others = _reportable(graph)
            help = f"report a column such as {others}, {kind}" if others else f"report {kind}: `NAME : f32`"
            problems.tell("bad-value", f"`{column}` cannot be reported: it is {what}", word.span, help)


def _tell_unwritten(column: str, span: Span, graph: Graph, problems: Problems) -> None:
    """Report that no node writes a reported column, with the node that is likely meant to."""
    help = nearest(column, graph.writers)
    related: tuple[tuple[Span, str], ...] = ()
    idle = without_arrow(graph, column)
    # Of a node with a mistake it is not known what it writes.
    wrong = {(d.span.file, d.span.line) for d in problems.found}
    if idle is not None and (idle.span.file, idle.span.line) not in wrong:
        help = f"add `-> {column}` to `{idle.name}`, which has a `call` and writes nothing"
        related = ((idle.span, f"`{idle.name}` writes nothing"),)
    problems.found += mistake("unknown-column", f"no node writes a column `{column}`", span, help, related).diagnostics


def _unreported(graph: Graph, column: str) -> str:
    """Say why no evaluation can report a column; "" if one can, or if its type is reported as wrong already."""
    kind = graph.column(column)
    if kind.element not in ELEMENTS or reported(graph, column):
        return ""
    dims = ", ".join(d.like or f"{'<= ' if d.ragged else ''}{d.size}" for d in kind.dims)
    return f"`{kind.element}{f'[{dims}]' if dims else ''}`, written by `{graph.writer(column).name}`"


def _reportable(graph: Graph) -> str:
    known = sorted(c for c in graph.writers if graph.column(c).element == "f32" and not _unreported(graph, c))
    return " or ".join(f"`{c}`" for c in known[:3])
