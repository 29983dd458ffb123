"""The Python API: what an `.rlg` file says, said in Python.

Invariant: a program built here is a syntax tree that `parse` could have given, with spans that point into the Python
file. Names, params and checks are the language's own, in the same code: nothing is known of them here. A method is a
statement; its keyword arguments are the statement's attributes.

A value is a Python number, bool, list, or function (a top-level one, called by its file), or a str. A str is what would
stand in the file: an expression, a type, names with commas between them. Only where the language takes nothing but a
string, as in `device`, a model or data, is a str that string, without quotes.
"""

from __future__ import annotations

import os
import re
from types import FunctionType
from typing import Generic, Self

from ..diagnostics import Fault, Span, public
from ..dsl import ast
from ..dsl.format import format
from ..dsl.parse import parse_undo
from ..dsl.unparse import write
from ..emit.humanize import many
from .arguments import Arguments, Names, Value, at
from .statements import S, Statements

NODE = ("function", "generate", "infer", "update")


class Program:
    """An algorithm, a cluster or a deploy, with all that it needs."""

    def __init_subclass__(cls) -> None:
        """Each statement of ours is `public`; a subclass of the user's keeps its own frames in a traceback."""
        super().__init_subclass__()
        for name, method in list(vars(cls).items()) if cls.__module__ == __name__ else ():
            if isinstance(method, FunctionType) and (name == "__init__" or not name.startswith("_")):
                setattr(cls, name, public(method))

    name: str

    def __init__(self, span: Span) -> None:
        self._span = span

    def tree(self) -> ast.File:
        """The syntax tree of the program, which `compile` takes as it takes this object."""
        return tree(self)

    def to_rlg(self) -> str:
        """The program as the text of an `.rlg` file."""
        return to_rlg(self)

    def __str__(self) -> str:
        return self.to_rlg()

    def __repr__(self) -> str:
        """In a line, as a notebook shows what a statement returned: the text is long."""
        return f"<{type(self).__name__} {self.name}>"

    def _needs(self) -> tuple[Program, ...]:
        """What must stand before it in a file."""
        return ()

    def _item(self) -> ast.Item:
        raise NotImplementedError


class Imported(Program):
    """An algorithm of the package, or an algorithm or cluster of an `.rlg` file, whose path is relative to this Python
    file."""

    def __init__(self, name: str, file: str | os.PathLike[str] | None = None) -> None:
        call = Arguments("name", "file")
        super().__init__(call.span)
        self.name = call.name("name", name).text
        self._file = None if file is None else str(call.path("file", file).value)

    def _item(self) -> ast.Item:
        return ast.ImportDecl(self.name if self._file is None else self._file, self._file is not None, self._span)


class _OfPackage(Imported):
    """An algorithm of the package that stands as a bare name in the call of another."""

    def __init__(self, name: str, span: Span) -> None:
        Program.__init__(self, span)
        self.name = name
        self._file = None


class StatementBuilder(Program, Generic[S]):
    """A program of statements: a method adds one, or replaces the one that states the same, and returns the object."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        self._body: Statements[S] = Statements()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {many(len(self._body), 'statement')}>"

    def _state(self, call: Arguments, *statements: S) -> Self:
        """Add all of these statements, or none where one is refused."""
        try:
            self._body.add(statements)
        except Fault as fault:
            call.refuse_all(fault)
        return self


class Algorithm(StatementBuilder[ast.AlgorithmStatement]):
    """`algorithm NAME { … }`; with `extends`, what differs from another algorithm: one built here, imported, or the
    package's by name."""

    def __init__(self, name: str, extends: Algorithm | Imported | str | None = None) -> None:
        call = Arguments("name", "extends")
        super().__init__(call.span)
        self._name = call.name("name", name)
        self.name = self._name.text
        self._base = None if extends is None else _algorithm(call, "extends", extends)
        self._extends = None if self._base is None else ast.Name(self._base.name, call.argument("extends").span)

    def param(self, /, **values: Value) -> Self:
        """`param NAME = VALUE`, for each."""
        call = Arguments()
        return self._state(call, *(ast.ParamDecl(*call.assignment(name, value)) for name, value in values.items()))

    def columns(self, /, **types: str) -> Self:
        """`columns { NAME : TYPE … }`: `columns(prompt="i32[<= prompt_len]", reward="f32")`."""
        call = Arguments()
        columns = [call.column(name, name, kind) for name, kind in types.items()]
        return self._state(call, *(ast.ColumnsDecl((column,), call.span) for column in columns))

    def state(self, name: str, type: str, value: Value) -> Self:
        """`state NAME : TYPE = VALUE`."""
        call = Arguments("name", "type", "value")
        part = call.argument("type")
        column = call.name("name", name)
        declared = ast.ColumnDecl(column, call.type(type, part), column.span.to(part.span))
        return self._state(call, ast.StateDecl(declared, call.expr(value, call.argument("value")), call.span))

    def worker(self, name: str, kind: str, /, *, frozen: bool = False, **attributes: Value) -> str:
        """`worker NAME : KIND [frozen]`; gives the name."""
        call = Arguments("name", "kind")
        named = call.name("name", name), call.name("kind", kind)
        self._state(
            call, ast.WorkerDecl(*named, call.flag("frozen", frozen), call.attrs(("worker",), attributes), call.span)
        )
        return name

    def source(self, count: Value, writes: Names, **attributes: Value) -> str:
        """`source(COUNT) -> writes`; gives the node's name."""
        call = Arguments("count", "writes")
        attrs = call.attrs(("source",), attributes)
        value = call.expr(count, call.argument("count"))
        self._state(call, ast.SourceDecl(value, call.names("writes", writes), attrs, call.span))
        return "source"

    def node(self, name: str, reads: Names | None = None, writes: Names | None = None, **attributes: Value) -> str:
        """`node [LABEL:] WORKER.VERB(reads) -> writes { attributes }`; gives the node's name. Without `reads`, the
        attributes are changed of the node that `extends` took over."""
        call = Arguments("name", "reads", "writes")
        part = call.argument("name")
        call.string(name, 'a node is a str, as in "actor.generate"', part.span)
        match = re.fullmatch(r"\s*(?:(\w+)\s*:\s*)?(\w+)\.(\w+)\s*", name)
        if match is None:
            call.fail(f"`{name}` is no node", part.span, "a node is `worker.verb`, or `label: worker.verb`")
        if reads is None and writes is not None:
            call.fail(f"`{name}` says nowhere what it reads", part.span, "add `reads = …`")
        label, worker, verb = (
            None if match[i] is None else call.word(match[i], at(part, name, *match.span(i))) for i in (1, 2, 3)
        )
        assert worker is not None and verb is not None
        read = None if reads is None else call.names("reads", reads)
        written = () if writes is None else call.names("writes", writes)
        last = max([part.span, *(n.span for n in (*(read or ()), *written))], key=lambda s: (s.end_line, s.end_column))
        head = call.span.to(last)
        self._state(
            call, ast.NodeDecl(label, worker, verb, read, written, call.attrs(NODE, attributes), call.span, head)
        )
        return label.text if label else f"{worker.text}.{verb.text}"

    def edge(self, *groups: Names, **attributes: Value) -> Self:
        """`A -> B, C -> D`: sample edges, as `edge("A -> B, C -> D")` or `edge("A", ["B", "C"], "D")`."""
        call = Arguments("groups")
        return self._state(call, call.sample_edge(groups, attributes))

    def reshard(self, src: Names, dst: Names | None = None, **attributes: Value) -> Self:
        """`A => B`: the weights of A's worker go to B; as `reshard("A => B")` or `reshard("A", "B")`."""
        call = Arguments("src", "dst")
        return self._state(call, call.resharding_edge(src, dst, attributes))

    def drop(self, name: str) -> Self:
        """`drop NAME`, of a worker, node, column, param or state that `extends` took over; of an attribute, as
        `drop("actor.update.mini_batch")`; or of an edge, as `drop("A -> B")`."""
        call = Arguments("name")
        part = call.argument("name")
        call.string(name, "`name` is a str", part.span)
        target = call.edge("name", name) or call.ref(name, at(part, name, 0, len(name)), parts=3)
        return self._state(call, ast.DropDecl(target, call.span))

    def drop_edge(self, *groups: Names) -> Self:
        """`drop A -> B`."""
        call = Arguments("groups")
        return self._state(call, ast.DropDecl(call.sample_edge(groups, {}), call.span))

    def drop_reshard(self, src: Names, dst: Names | None = None) -> Self:
        """`drop A => B`."""
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
    """`deploy ALGORITHM on CLUSTER [as NAME] { … }`; an algorithm of the package may be given by its name. Of a deploy
    in place of the algorithm, one built here or imported as `extends`, what differs from it: `deploy NAME extends OTHER
    [on CLUSTER] { … }`."""

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
                "a deploy is of an algorithm, or extends another deploy",
                call.span,
                "give one of `algorithm` and `extends`",
            )
        if extends is not None and not isinstance(extends, Deploy | Imported):
            call.refuse(extends, "`extends` takes a Deploy, or an Imported one", call.argument("extends").span)
        if extends is not None and name is None:
            call.fail("a deploy that extends another has a name of its own", call.span, 'add `name="…"`', "bad-value")
        if not isinstance(on, Cluster | Imported) and (on is not None or extends is None):
            at = call.span if on is None else call.argument("on").span
            call.refuse(on, '`on` takes a Cluster, as in `Cluster("laptop", device="cpu")`, or an Imported one', at)
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
        """`set NAME = VALUE`, for each: values of params."""
        call = Arguments()
        return self._state(call, *(ast.SetDecl(*call.assignment(name, value)) for name, value in values.items()))

    def model(self, name: str, target: str | os.PathLike[str], /, **attributes: Value) -> Self:
        """`model NAME = "preset or folder"`."""
        call = Arguments("name", "target")
        attrs = call.attrs(("model",), attributes)
        return self._state(call, ast.ModelDecl(call.name("name", name), call.path("target", target), attrs, call.span))

    def data(self, name: str, target: str | os.PathLike[str], /, **fields: str) -> Self:
        """`data NAME = "file.jsonl" { column = "field" }`; the name is `source` for the data to train on."""
        call = Arguments("name", "target")
        # `source` is a reserved word that stands for a name here.
        source = isinstance(name, str) and name == "source"
        named = ast.Name(name, at(call.argument("name"), name, 0, len(name))) if source else call.name("name", name)
        return self._state(
            call, ast.DataDecl(named, call.path("target", target), call.attrs((), fields, quoted=True), call.span)
        )

    def layout(self, nodes: Names, /, **sizes: Value) -> Self:
        """`layout NODE, … { tp = 8, dp = 2 }`."""
        call = Arguments("nodes")
        return self._state(call, ast.LayoutDecl(call.refs("nodes", nodes), call.attrs(("layout",), sizes), call.span))

    def engine(self, nodes: Names, name: str, /, **options: Value) -> Self:
        """`engine NODE, … = NAME { options }`."""
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
        """`place WORKER|NODE, … [together] [on nodes 0..1 [devices 0..7]]`: a pair is the first and the last."""
        call = Arguments("targets")
        call.flag("together", together)
        if devices is not None and nodes is None:
            call.fail("`devices` without `nodes`", call.site.key("devices"), "add `nodes = 0`")
        stretch = call.range("nodes", nodes), call.range("devices", devices)
        return self._state(call, ast.PlaceDecl(call.refs("targets", targets), together, *stretch, call.span))

    def apart(self, *targets: Names) -> Self:
        """`apart A, B`."""
        call = Arguments("targets")
        if not targets:
            call.fail("`apart` names nothing", call.span, "name at least one")
        refs = tuple(r for i, group in enumerate(targets) for r in call.refs("targets", group, i))
        return self._state(call, ast.ApartDecl(refs, call.span))

    def dock(self, /, **attributes: Value) -> Self:
        """`dock { mode = …, deadline = … }`."""
        call = Arguments()
        return self._state(call, ast.OptionsDecl("dock", call.attrs(("dock",), attributes), call.span))

    def reshard(self, /, **attributes: Value) -> Self:
        """`reshard { mode = …, order = …, bucket = … }`."""
        call = Arguments()
        return self._state(call, ast.OptionsDecl("reshard", call.attrs(("reshard",), attributes), call.span))

    def run(self, /, **attributes: Value) -> Self:
        """`run { iterations = …, seed = … }`."""
        call = Arguments()
        return self._state(call, ast.OptionsDecl("run", call.attrs(("run",), attributes), call.span))

    def evaluate(self, name: str, /, **attributes: Value) -> Self:
        """`evaluate NAME { every = …, report = … }`."""
        call = Arguments("name")
        return self._state(
            call, ast.EvaluateDecl(call.name("name", name), call.attrs(("evaluate",), attributes), call.span)
        )

    def edge(self, *groups: Names, **attributes: Value) -> Self:
        """`A -> B { stream = … }`: how rows move on an edge that the algorithm has."""
        call = Arguments("groups")
        return self._state(call, call.sample_edge(groups, attributes))

    def drop(self, *statements: str) -> Self:
        """`drop layout NODE`, `drop data NAME`, `drop run`, `drop A -> B` …: what the deploy that it extends states."""
        call = Arguments("statements")
        if not statements:
            call.fail("`drop` names nothing", call.span, "name at least one")
        drops = []
        for i, statement in enumerate(statements):
            part = call.argument("statements", i)
            drops.append(call.text(call.string(statement, "`drop` takes a str", part.span), part, parse_undo))
        if self._base is not None:
            return self._state(call, *drops)
        try:
            self._body.take_back(drops, self.name)
        except Fault as fault:
            call.refuse_all(fault)
        return self

    def _needs(self) -> tuple[Program, ...]:
        return tuple(p for p in (self._base, self._algorithm, self._on) if p is not None)

    def _item(self) -> ast.Item:
        return ast.DeployDecl(self._named, self._cluster, self._alias, tuple(self._body), self._span, self._extends)


def tree(*programs: Program) -> ast.File:
    """The syntax tree of a file with all of these, and what they need; it is named by the Python file of the last
    one."""
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
    for item in (p._item() for p in order.values()):
        again = isinstance(item, ast.ImportDecl) and any(
            isinstance(i, ast.ImportDecl) and i.target == item.target for i in items
        )
        items += [] if again else [item]
    items.sort(key=lambda i: not isinstance(i, ast.ImportDecl))
    span = programs[-1]._span
    return ast.File(span.file, tuple(items), span)


@public
def to_rlg(program: Program | ast.File, *more: Program) -> str:
    """The text, in the layout of msrl-fmt, of a program that was built here, or parsed; several that were built here
    make one file."""
    file = program if isinstance(program, ast.File) else tree(program, *more)
    return format(write(file), file.path)


def _algorithm(call: Arguments, parameter: str, value: Algorithm | Imported | str) -> Algorithm | Imported:
    part = call.argument(parameter)
    if isinstance(value, str):
        return _OfPackage(call.word(value, part.span).text, part.span)
    if not isinstance(value, Algorithm | Imported):
        call.refuse(
            value, f"`{parameter}` takes an Algorithm, an Imported one, or the name of one of the package", part.span
        )
    return value
