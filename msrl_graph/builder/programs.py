"""The Python API: `.rlg` programs built in Python.

Invariant: a program built here is a syntax tree that `parse` could have returned, with spans in the Python file. The
language's own code handles names, params and checks; this module has no rules for them. Each method adds a statement.
The method's keyword arguments are the statement's attributes.

A value is a Python number, bool, list, function or str. A str is what an `.rlg` file would contain: an expression, a
type, or names with commas between them. Where the language accepts only a string, as for `device`, a model or data, the
str is that string without quotes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import FunctionType
from typing import Generic, Self

from ..diagnostics import Fault, Span, public
from ..diagnostics.quantities import plural
from ..dsl import ast
from ..dsl.format import format
from ..dsl.parse import parse_undo
from ..dsl.unparse import write
from .arguments import Arguments, Names, Value, text_span
from .statements import S, Statements

NODE = ("function", "generate", "infer", "update")


class Program:
    """An algorithm, a cluster or a deploy, with all programs that it depends on."""

    def __init_subclass__(cls) -> None:
        """Decorate the public methods of each subclass in this module with `public`."""
        super().__init_subclass__()
        for name, method in list(vars(cls).items()) if cls.__module__ == __name__ else ():
            if isinstance(method, FunctionType) and (name == "__init__" or not name.startswith("_")):
                setattr(cls, name, public(method))

    name: str

    def __init__(self, span: Span) -> None:
        self._span = span

    def tree(self) -> ast.File:
        """Return the program as a syntax tree, a form that `compile` accepts."""
        return tree(self)

    def to_rlg(self) -> str:
        """Return the program as the text of an `.rlg` file."""
        return to_rlg(self)

    def __str__(self) -> str:
        return self.to_rlg()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def _needs(self) -> tuple[Program, ...]:
        """Return the programs that must precede this program in a file."""
        return ()

    def _item(self) -> ast.Item:
        raise NotImplementedError


class Imported(Program):
    """An algorithm of msrl_graph, or of `file` (relative to the user's Python file)."""

    def __init__(self, name: str, file: str | os.PathLike[str] | None = None) -> None:
        call = Arguments("name", "file")
        super().__init__(call.span)
        self.name = call.name("name", name).text
        self._file = None if file is None else str(call.path("file", file).value)

    def _item(self) -> ast.Item:
        return ast.ImportDecl(self.name if self._file is None else self._file, self._file is not None, self._span)


class _OfPackage(Imported):
    def __init__(self, name: str, span: Span) -> None:
        Program.__init__(self, span)
        self.name = name
        self._file = None


class StatementBuilder(Program, Generic[S]):
    """A program made of statements; each method adds or replaces a statement."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        self._body: Statements[S] = Statements()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {plural(len(self._body), 'statement')}>"

    def _state(self, call: Arguments, *statements: S) -> Self:
        """Add all statements, or none of them if one is rejected."""
        try:
            self._body.add(statements)
        except Fault as fault:
            call.reraise(fault)
        return self


class Algorithm(StatementBuilder[ast.AlgorithmStatement]):
    """`algorithm NAME { … }`; `extends` is an algorithm, or the name of an algorithm."""

    def __init__(self, name: str, extends: Algorithm | Imported | str | None = None) -> None:
        call = Arguments("name", "extends")
        super().__init__(call.span)
        self._name = call.name("name", name)
        self.name = self._name.text
        self._base = None if extends is None else _algorithm(call, "extends", extends)
        self._extends = None if self._base is None else ast.Name(self._base.name, call.argument("extends").span)

    def param(self, /, **values: Value) -> Self:
        """Add the statement `param NAME = VALUE` for each keyword argument."""
        call = Arguments()
        return self._state(call, *(ast.ParamDecl(*call.assignment(name, value)) for name, value in values.items()))

    def columns(self, /, **types: str) -> Self:
        """Declare columns, as in `columns(prompt="i32[<= prompt_len]", reward="f32")`."""
        call = Arguments()
        columns = [call.column(name, name, kind) for name, kind in types.items()]
        return self._state(call, *(ast.ColumnsDecl((column,), call.span) for column in columns))

    def state(self, name: str, type: str, value: Value) -> Self:
        """Add the statement `state NAME : TYPE = VALUE`."""
        call = Arguments("name", "type", "value")
        part = call.argument("type")
        column = call.name("name", name)
        declared = ast.ColumnDecl(column, call.type(type, part), column.span.extend_to(part.span))
        return self._state(call, ast.StateDecl(declared, call.expr(value, call.argument("value")), call.span))

    def worker(self, name: str, kind: str, /, *, frozen: bool = False, **attributes: Value) -> str:
        """Add the statement `worker NAME : KIND [frozen]`; return the worker's name."""
        call = Arguments("name", "kind")
        named = call.name("name", name), call.name("kind", kind)
        self._state(
            call, ast.WorkerDecl(*named, call.flag("frozen", frozen), call.attrs(("worker",), attributes), call.span)
        )
        return name

    def source(self, count: Value, writes: Names, **attributes: Value) -> str:
        """Add the statement `source(COUNT) -> writes`; return the node's name, "source"."""
        call = Arguments("count", "writes")
        attrs = call.attrs(("source",), attributes)
        value = call.expr(count, call.argument("count"))
        self._state(call, ast.SourceDecl(value, call.names("writes", writes), attrs, call.span))
        return "source"

    def node(self, name: str, reads: Names | None = None, writes: Names | None = None, **attributes: Value) -> str:
        """Add `node [LABEL:] WORKER.VERB(reads) -> writes { … }`; return the node's name.

        Without `reads`, change the attributes of a node that the algorithm inherits by `extends`.
        """
        call = Arguments("name", "reads", "writes")
        part = call.argument("name")
        call.string(name, 'a node is a str, as in "actor.generate"', part.span)
        match = re.fullmatch(r"\s*(?:(\w+)\s*:\s*)?(\w+)\.(\w+)\s*", name)
        if match is None:
            call.fail(f"`{name}` is not a node", part.span, "a node is `worker.verb`, or `label: worker.verb`")
        if reads is None and writes is not None:
            call.fail(f"`{name}` has no `reads`", part.span, "add `reads = …`")
        label, worker, verb = (
            None if match[i] is None else call.word(match[i], text_span(part, name, *match.span(i))) for i in (1, 2, 3)
        )
        assert worker is not None and verb is not None
        read = None if reads is None else call.names("reads", reads)
        written = () if writes is None else call.names("writes", writes)
        last = max(
            [part.span, *(part_name.span for part_name in (*(read or ()), *written))],
            key=lambda span: (span.end_line, span.end_column),
        )
        head_span = call.span.extend_to(last)
        self._state(
            call, ast.NodeDecl(label, worker, verb, read, written, call.attrs(NODE, attributes), call.span, head_span)
        )
        return label.text if label else f"{worker.text}.{verb.text}"

    def edge(self, *groups: Names, **attributes: Value) -> Self:
        """Add sample edges: `edge("A -> B, C -> D")` or `edge("A", ["B", "C"], "D")`."""
        call = Arguments("groups")
        return self._state(call, call.sample_edge(groups, attributes))

    def reshard(self, src: Names, dst: Names | None = None, **attributes: Value) -> Self:
        """Add a resharding edge: `reshard("A => B")` or `reshard("A", "B")`."""
        call = Arguments("src", "dst")
        return self._state(call, call.resharding_edge(src, dst, attributes))

    def drop(self, name: str) -> Self:
        """Drop an inherited name, attribute (`"actor.update.mini_batch"`) or edge."""
        call = Arguments("name")
        part = call.argument("name")
        call.string(name, "`name` is a str", part.span)
        target = call.edge("name", name) or call.ref(name, text_span(part, name, 0, len(name)), parts=3)
        return self._state(call, ast.DropDecl(target, call.span))

    def drop_edge(self, *groups: Names) -> Self:
        """Drop an inherited sample edge: add the statement `drop A -> B`."""
        call = Arguments("groups")
        return self._state(call, ast.DropDecl(call.sample_edge(groups, {}), call.span))

    def drop_reshard(self, src: Names, dst: Names | None = None) -> Self:
        """Drop an inherited resharding edge: add the statement `drop A => B`."""
        call = Arguments("src", "dst")
        return self._state(call, ast.DropDecl(call.resharding_edge(src, dst, {}), call.span))

    def _needs(self) -> tuple[Program, ...]:
        return () if self._base is None else (self._base,)

    def _item(self) -> ast.Item:
        return ast.AlgorithmDecl(self._name, self._extends, tuple(self._body), self._span)


class Cluster(Program):
    """`cluster NAME { device = …, … }`."""

    def __init__(self, name: str, /, **attributes: Value) -> None:
        call = Arguments("name")
        super().__init__(call.span)
        self._name = call.name("name", name)
        self._attrs = call.attrs(("cluster",), attributes)
        self.name = self._name.text

    def _item(self) -> ast.Item:
        return ast.ClusterDecl(self._name, self._attrs, self._span)


class Deploy(StatementBuilder[ast.DeployStatement]):
    """`deploy ALGORITHM on CLUSTER [as NAME] { … }`.

    `algorithm` can be the name of an algorithm that msrl_graph provides. With `extends`, the statements change another
    deploy: `deploy NAME extends OTHER [on CLUSTER] { … }`.
    """

    def __init__(
        self,
        algorithm: Algorithm | Imported | str | None = None,
        on: Cluster | Imported | None = None,
        name: str | None = None,
        *,
        extends: Deploy | Imported | None = None,
    ) -> None:
        call = Arguments("algorithm", "on", "name")
        super().__init__(call.span)
        if (algorithm is None) == (extends is None):
            call.fail(
                "a deploy needs an algorithm or a base deploy", call.span, "give one of `algorithm` and `extends`"
            )
        if extends is not None and not isinstance(extends, Deploy | Imported):
            call.refuse(extends, "`extends` takes a Deploy, or an Imported one", call.argument("extends").span)
        if extends is not None and name is None:
            call.fail("a deploy that extends another needs its own name", call.span, 'add `name="…"`', "bad-value")
        if not isinstance(on, Cluster | Imported) and (on is not None or extends is None):
            span = call.span if on is None else call.argument("on").span
            call.refuse(on, '`on` takes a Cluster, as in `Cluster("laptop", device="cpu")`, or an Imported one', span)
        self._algorithm = None if algorithm is None else _algorithm(call, "algorithm", algorithm)
        self._base = extends
        self._on = on
        self._named = (
            None if self._algorithm is None else ast.Name(self._algorithm.name, call.argument("algorithm").span)
        )
        self._cluster = None if on is None else ast.Name(on.name, call.argument("on").span)
        self._extends = None if extends is None else ast.Name(extends.name, call.argument("extends").span)
        self._alias = None if name is None else call.name("name", name)
        self.name: str = (self._alias or self._named or ast.Name("", call.span)).text

    def set(self, /, **values: Value) -> Self:
        """Add the statement `set NAME = VALUE` for each param."""
        call = Arguments()
        return self._state(call, *(ast.SetDecl(*call.assignment(name, value)) for name, value in values.items()))

    def model(self, name: str, target: str | os.PathLike[str], /, **attributes: Value) -> Self:
        """Add the statement `model NAME = "preset or folder"`."""
        call = Arguments("name", "target")
        attrs = call.attrs(("model",), attributes)
        return self._state(call, ast.ModelDecl(call.name("name", name), call.path("target", target), attrs, call.span))

    def data(self, name: str, target: str | os.PathLike[str] | Mapping[str, int], /, **attributes: Value) -> Self:
        """Add `data NAME = "file" { … }`, or a mixture: `data("source", {"easy": 3})`."""
        call = Arguments("name", "target")
        source = isinstance(name, str) and name == "source"
        named = (
            ast.Name(name, text_span(call.argument("name"), name, 0, len(name))) if source else call.name("name", name)
        )
        attrs = call.data_attrs(attributes)
        return self._state(call, ast.DataDecl(named, call.data_target("target", target), attrs, call.span))

    def layout(self, nodes: Names, /, **sizes: Value) -> Self:
        """Add the statement `layout NODE, … { tp = 8, dp = 2 }`."""
        call = Arguments("nodes")
        return self._state(call, ast.LayoutDecl(call.refs("nodes", nodes), call.attrs(("layout",), sizes), call.span))

    def engine(self, nodes: Names, name: str, /, **options: Value) -> Self:
        """Add the statement `engine NODE, … = NAME { options }`."""
        call = Arguments("nodes", "name")
        named = call.name("name", name)
        return self._state(call, ast.EngineDecl(call.refs("nodes", nodes), named, call.attrs((), options), call.span))

    def place(
        self,
        targets: Names,
        *,
        together: bool = False,
        nodes: int | tuple[int, int] | None = None,
        devices: int | tuple[int, int] | None = None,
    ) -> Self:
        """Add `place A, B [together] [on nodes 0..1 [devices 0..7]]`; `(0, 1)` is `0..1`."""
        call = Arguments("targets")
        call.flag("together", together)
        if devices is not None and nodes is None:
            call.fail("`devices` needs `nodes`", call.site.key("devices"), "add `nodes = 0`")
        stretch = call.range("nodes", nodes), call.range("devices", devices)
        return self._state(call, ast.PlaceDecl(call.refs("targets", targets), together, *stretch, call.span))

    def apart(self, *targets: Names) -> Self:
        """Add the statement `apart A, B`, which gives the nodes a pool of their own."""
        call = Arguments("targets")
        if not targets:
            call.fail("`apart` needs a name", call.span, "name at least one")
        refs = tuple(ref for index, group in enumerate(targets) for ref in call.refs("targets", group, index))
        return self._state(call, ast.ApartDecl(refs, call.span))

    def dock(self, /, **attributes: Value) -> Self:
        """Add the statement `dock { mode = …, deadline = … }`."""
        call = Arguments()
        return self._state(call, ast.OptionsDecl("dock", call.attrs(("dock",), attributes), call.span))

    def reshard(self, /, **attributes: Value) -> Self:
        """Add the statement `reshard { mode = …, order = …, bucket = … }`."""
        call = Arguments()
        return self._state(call, ast.OptionsDecl("reshard", call.attrs(("reshard",), attributes), call.span))

    def run(self, /, **attributes: Value) -> Self:
        """Add the statement `run { iterations = …, seed = … }`."""
        call = Arguments()
        return self._state(call, ast.OptionsDecl("run", call.attrs(("run",), attributes), call.span))

    def evaluate(self, name: str, /, **attributes: Value) -> Self:
        """Add the statement `evaluate NAME { every = …, report = … }`."""
        call = Arguments("name")
        return self._state(
            call, ast.EvaluateDecl(call.name("name", name), call.attrs(("evaluate",), attributes), call.span)
        )

    def edge(self, *groups: Names, **attributes: Value) -> Self:
        """Add `A -> B { stream = … }`, which sets how rows move along an algorithm's edge."""
        call = Arguments("groups")
        return self._state(call, call.sample_edge(groups, attributes))

    def drop(self, *statements: str) -> Self:
        """Drop statements of the base deploy, such as `layout NODE`, `run` or `A -> B`."""
        call = Arguments("statements")
        if not statements:
            call.fail("`drop` needs a name", call.span, "name at least one")
        drops = []
        for index, statement in enumerate(statements):
            part = call.argument("statements", index)
            drops.append(call.text(call.string(statement, "`drop` takes a str", part.span), part, parse_undo))
        if self._base is not None:
            return self._state(call, *drops)
        try:
            self._body.take_back(drops, self.name)
        except Fault as fault:
            call.reraise(fault)
        return self

    def _needs(self) -> tuple[Program, ...]:
        return tuple(program for program in (self._base, self._algorithm, self._on) if program is not None)

    def _item(self) -> ast.Item:
        return ast.DeployDecl(self._named, self._cluster, self._alias, tuple(self._body), self._span, self._extends)


def tree(*programs: Program) -> ast.File:
    """Return one syntax tree of the given programs and of all programs that they need."""
    order: dict[int, Program] = {}

    def add(program: Program) -> None:
        for other in program._needs():
            add(other)
        order.setdefault(id(program), program)

    for program in programs:
        if not isinstance(program, Program):
            call = Arguments()
            call.refuse(program, "a program is an Algorithm, a Cluster or a Deploy", call.span)
        add(program)
    items: list[ast.Item] = []
    for item in (ordered._item() for ordered in order.values()):
        again = isinstance(item, ast.ImportDecl) and any(
            isinstance(other_item, ast.ImportDecl) and other_item.target == item.target for other_item in items
        )
        items += [] if again else [item]
    items.sort(key=lambda item: not isinstance(item, ast.ImportDecl))
    span = programs[-1]._span
    return ast.File(span.file, tuple(items), span)


@public
def to_rlg(program: Program | ast.File, *more: Program) -> str:
    """Return programs, or a parsed file, as text in the layout of `msrl-fmt`."""
    file = program if isinstance(program, ast.File) else tree(program, *more)
    return format(write(file), file.path)


def _algorithm(call: Arguments, parameter: str, value: Algorithm | Imported | str) -> Algorithm | Imported:
    part = call.argument(parameter)
    if isinstance(value, str):
        return _OfPackage(call.word(value, part.span).text, part.span)
    if not isinstance(value, Algorithm | Imported):
        call.refuse(
            value, f"`{parameter}` takes an Algorithm, an Imported one, or a package algorithm's name", part.span
        )
    return value
