"""Lowering of `data` statements from the syntax tree to `DataSource`.

Invariant: an attribute that is a column of the source names a field or a template of that column, even if an option has
the same name. All other attributes are options (`DataOptions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ..data import data_files, templates
from ..diagnostics import Span, nearest
from ..files.paths import is_file
from ..files.urls import is_url
from ..ir.attributes import SourceAttributes
from ..ir.data_options import DataOptions
from ..ir.graph import Expr, Graph
from ..ir.kinds import COUNT, StringKind, ValueKind
from ..ir.plan import DataSource
from . import ast
from .expressions import Problems, mistake

ReadAttributes = Callable[[tuple[ast.Attr, ...], str, Mapping[str, ValueKind]], dict[str, Expr]]
MIX = "mix"


def lower_data(
    statement: ast.DataDecl,
    graph: Graph,
    read_attributes: ReadAttributes,
    folder: Callable[[Span], Path],
    problems: Problems,
) -> DataSource:
    """Lower a `data` statement; raise Fault or report a problem for each mistake.

    `folder` returns the folder of the file that contains a statement.
    """
    name = statement.name.text
    span = statement.target.span
    if isinstance(statement.target, ast.Call):
        return _lower_mixture(name, statement.target, statement.attrs, read_attributes)
    assert isinstance(statement.target, ast.Literal_)
    target = str(statement.target.value)
    columns: dict[str, ValueKind] = dict.fromkeys(graph.node("source").writes, StringKind())
    kinds = {**DataOptions.kinds(), **columns}
    for attr in statement.attrs:
        if attr.key.text not in kinds:
            message = f"`data` has no attribute `{attr.key.text}`, and the source writes no column of this name"
            problems.report("unknown-attribute", message, attr.key.span, nearest(attr.key.text, kinds))
    known = tuple(attr for attr in statement.attrs if attr.key.text in kinds)
    values = read_attributes(known, "data", kinds)
    stated = {column: value for column, value in values.items() if column in columns}
    options = DataOptions.of_stated({key: value for key, value in values.items() if key not in columns})
    fields = {column: column for column in columns} | {column: str(value.value) for column, value in stated.items()}
    for column, value in stated.items():
        if problem := templates.find_mistake(fields[column]):
            help = "write `{field}` for the value of a field, and `{{` or `}}` for a brace"
            raise mistake("bad-value", f"the template of `{column}` {problem}", value.span, help)
    path = target if is_url(target) else str(folder(span) / target)
    source = DataSource(name, path, fields, span, {column: value.span for column, value in stated.items()}, options)
    if hub := data_files.hub_dataset(target, path):
        return replace(source, path=f"{data_files.HUB}{hub}")
    for key in ("subset", *(("split",) if is_url(target) or is_file(Path(path)) else ())):
        if key in values and key not in columns:
            kind = f"{'a folder or ' if key == 'split' else ''}a name on the Hugging Face Hub"
            help = "leave it out; `skip` and `take` select rows of a file"
            problems.report("bad-value", f"`{key}` is only for {kind}", values[key].span, help)
    if unknown := data_files.find_mistake(target, path):
        raise mistake("bad-value", unknown.message, span, unknown.help)
    if not is_url(path) and not data_files.exists(path):
        help = "a run needs it; the path is relative to the program's folder"
        problems.report("missing-file", f"`{target}` is not on this machine", span, help, "warning")
    return source


def _lower_mixture(
    name: str, call: ast.Call, attrs: tuple[ast.Attr, ...], read_attributes: ReadAttributes
) -> DataSource:
    """Lower `data NAME = mix(gsm = 2, math = 1)`."""
    form = f"as in `data {name} = {MIX}(easy = 3, hard = 1)`, with `data easy` and `data hard`"
    if call.quoted or call.name.text != MIX or not call.args:
        raise mistake("bad-value", "data is a string, or a mixture of other data with their weights", call.span, form)
    if unnamed := next((arg for arg in call.args if arg.key is None), None):
        raise mistake("bad-value", f"`{MIX}` takes the weight of each data by name", unnamed.span, form)
    spans = {arg.key.text: arg.span for arg in call.args if arg.key is not None}
    weights = tuple(ast.Attr(arg.key, arg.value, arg.span) for arg in call.args if arg.key is not None)
    stated = read_attributes(weights, MIX, dict.fromkeys(spans, COUNT))
    parts = {part: int(weight.value) for part, weight in stated.items() if isinstance(weight.value, int)}
    if attrs:
        message = "a mixture has no attributes"
        raise mistake("unknown-attribute", message, attrs[0].key.span, "state them for the data that it mixes")
    return DataSource(name, "", {}, call.span, spans, parts=parts)


def check_data(data: dict[str, DataSource], graph: Graph, problems: Problems) -> None:
    """Report mistakes that concern several data of a deploy."""
    for mixture in (source for source in data.values() if source.parts):
        for part in mixture.parts:
            span = mixture.stated[part]
            if part not in data:
                problems.report("unknown-name", f"no data named `{part}`", span, nearest(part, data))
            elif data[part].parts:
                problems.report("bad-value", f"`{part}` is a mixture itself", span, "name the data that it mixes")
        weights = graph.node("source").attributes.get("weights")
        if mixture.name == "source" and weights is not None and SourceAttributes.of(graph.node("source")).weights:
            message = "the source draws rows by `weights`, so the weights of a mixture have no effect"
            problems.report("bad-value", message, mixture.span, "leave out `weights`, or name one file")
    variables = {source.options.chat: source for source in data.values() if source.options.chat}
    if len(variables) > 1:
        first, other = [*variables.values()][:2]
        message = f"`data {other.name}` sets other variables of the chat template than `data {first.name}`"
        help = "write the same in both: a run renders all messages of the policy in one way"
        problems.report("bad-value", message, other.span, help)
