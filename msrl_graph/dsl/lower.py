"""A syntax tree to what the compiler works on: the graph of one algorithm, and where and how it runs.

Invariant: the result is whole, or a Fault holds every mistake of the file, none of which only follows from another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..backends.spec import EngineSpec
from ..diagnostics import NOWHERE, Diagnostic, Fault, Span, nearest
from ..hardware.cluster import ClusterSpec
from ..ir.graph import Graph
from ..ir.plan import Deployment
from . import ast
from .algorithm import Lowering, lower_algorithm
from .calls import Library
from .cluster import lower_cluster
from .deploy import LoadModel, bare_deploy, lower_deploy
from .derive import derive
from .dropped import Dropped, missed
from .expressions import Problems, mistake
from .params import Override, unused
from .parse import parse_set
from .variants import written_out

T = TypeVar("T")


@dataclass(frozen=True)
class LoweringContext:
    """What lowering needs from outside: how files and models are found, what names the package knows, and the command
    line."""

    load: Callable[[str, bool, Span], ast.File]  # an import's target, whether it is a file, and where it stands
    library: Library
    engines: Mapping[str, EngineSpec]
    load_model: LoadModel
    folder: Path = Path()
    deploy: str | None = None
    model: str | None = None
    sets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoweredProgram:
    """`library` has the package's functions and those of the user's files that the graph calls."""

    graph: Graph
    cluster: ClusterSpec | None
    deploy: Deployment | None
    library: Library
    warnings: tuple[Diagnostic, ...] = ()
    dropped: Mapping[str, Dropped] = field(default_factory=dict)


class LoweringFault(Fault):
    """A Fault with the graph as far as it could be read, for the checks that can still say something of it."""

    def __init__(
        self,
        *diagnostics: Diagnostic,
        graph: Graph | None = None,
        library: Library | None = None,
        dropped: Mapping[str, Dropped] | None = None,
    ) -> None:
        super().__init__(*diagnostics)
        self.graph = graph
        self.library = library or {}
        self.dropped = dropped or {}


class ParsedProgram(NamedTuple):
    """Algorithms, clusters and deploys by name, and whether an import failed."""

    algorithms: dict[str, ast.AlgorithmDecl]
    clusters: dict[str, ast.ClusterDecl]
    deploys: dict[str, ast.DeployDecl]
    broken: bool


def lower(file: ast.File, context: LoweringContext) -> LoweredProgram:
    """The chosen deploy and its algorithm, or the last algorithm of the file; raises Refused with all that is wrong."""
    try:
        return _lower(file, context)
    except RecursionError:
        raise mistake("syntax", "the program is nested too deeply", file.items[0].span) from None


def _lower(file: ast.File, context: LoweringContext) -> LoweredProgram:
    problems = Problems()
    algorithms, clusters, deploys, broken = _gather(file, context, problems)
    deploy = None
    with problems.catching():
        deploy = _choose(file, context)
    for other in [i for i in file.items if isinstance(i, ast.DeployDecl) and i is not deploy]:
        written_out(other, deploys, algorithms, problems, broken)
    deploy = written_out(deploy, deploys, algorithms, problems, broken) if deploy else None
    overrides = [Override(s.name, s.value) for s in deploy.body if isinstance(s, ast.SetDecl)] if deploy else []
    for name, text in context.sets.items():
        with problems.catching():
            overrides.append(Override(*parse_set(name, text)))
    chosen: ast.AlgorithmDecl | None = None
    if deploy:
        # Of two that have the name, which is told, the file's own is meant.
        assert deploy.algorithm is not None and deploy.cluster is not None
        own = [i for i in file.items if isinstance(i, ast.AlgorithmDecl) and i.name.text == deploy.algorithm.text]
        chosen = own[0] if own else _named(deploy.algorithm, algorithms, "algorithm", broken, problems)
    elif algorithms:
        own = [i for i in file.items if isinstance(i, ast.AlgorithmDecl)]
        chosen = own[-1] if own else list(algorithms.values())[-1]
    elif not broken:
        problems.tell(
            "empty-file", "the file holds no algorithm", file.items[0].span, "add an `algorithm`, or an `import` of one"
        )
    lowering: Lowering | None = None

    def folder(span: Span) -> Path:
        return context.folder if span.file == file.path else Path(span.file).parent

    for item in [i for i in file.items if isinstance(i, ast.AlgorithmDecl) and i is not chosen]:
        gone: dict[str, Dropped] = {}
        if (whole := derive(item, algorithms, problems, broken, gone)) is not None:
            before = len(problems.found)
            lower_algorithm(whole, (), context.library, folder, problems)
            problems.found[before:] = [missed(d, gone) for d in problems.found[before:]]
    dropped: dict[str, Dropped] = {}
    if chosen is not None and (whole := derive(chosen, algorithms, problems, broken, dropped)) is not None:
        before = len(problems.found)
        lowering = lower_algorithm(whole, overrides, context.library, folder, problems)
        problems.found[before:] = [_turned(missed(d, dropped), overrides) for d in problems.found[before:]]
        problems.found += unused(whole, overrides)
    lowered_clusters = {name: lower_cluster(c, problems) for name, c in clusters.items() if c.span.file == file.path}
    cluster: ClusterSpec | None = None
    deployed: Deployment | None = None
    graph = lowering.graph if lowering else None
    if deploy:
        assert deploy.cluster is not None
        found = _named(deploy.cluster, clusters, "cluster", broken, problems)
        if found and found.name.text not in lowered_clusters:
            lowered_clusters[found.name.text] = lower_cluster(found, problems)
        cluster = lowered_clusters.get(deploy.cluster.text)
        if lowering and graph and any(n.verb == "source" for n in graph.nodes):
            outside = (context.engines, context.load_model, folder, context.model)
            deployed, graph = lower_deploy(deploy, graph, lowering.nodes, *outside, cluster, problems)
    elif graph and context.model is not None:
        with problems.catching():
            cluster, deployed = bare_deploy(graph, context.model, context.load_model, context.folder)
    library = {**context.library, **(lowering.used if lowering else {})}
    errors = [d for d in problems.found if d.severity == "error"]
    if errors or graph is None:
        raise LoweringFault(*_sorted(errors, file.path), graph=graph, library=library, dropped=dropped)
    warnings = tuple(d for d in problems.found if d.severity != "error")
    return LoweredProgram(graph, cluster, deployed, library, warnings, dropped)


def _turned(told: Diagnostic, overrides: Sequence[Override]) -> Diagnostic:
    """What is wrong with the value of a param, told where a `set` gives that value; where it is used is a note."""
    given = {o.value.span for o in overrides}
    for place, (span, _) in enumerate(told.related):
        if span in given and told.code in ("bad-value", "bad-unit"):
            others = (*told.related[:place], *told.related[place + 1 :])
            return replace(told, span=span, related=((told.span, "it is used here"), *others))
    return told


def _gather(file: ast.File, context: LoweringContext, problems: Problems) -> ParsedProgram:
    """What the file and its imports have; each file is read once, however often it is imported."""
    algorithms: dict[str, ast.AlgorithmDecl] = {}
    clusters: dict[str, ast.ClusterDecl] = {}
    deploys: dict[str, ast.DeployDecl] = {}
    seen: dict[str, bool] = {file.path: False}  # whether the file is read to its end
    broken: list[Diagnostic] = []

    def add(part: ast.File) -> None:
        for item in part.items:
            match item:
                case ast.ImportDecl():
                    whole = len(problems.found)
                    with problems.catching():
                        other = context.load(item.target, item.is_file, item.span)
                        if other.path not in seen:
                            seen[other.path] = False
                            add(other)
                        elif not seen[other.path]:
                            raise mistake(
                                "cycle",
                                f"`{item.target}` imports itself",
                                item.span,
                                "move what both need to a third file",
                            )
                    broken.extend(problems.found[whole:])
                case ast.DeployDecl():
                    # Two of one name are told where one is chosen; of an import's and the file's own, its own is meant.
                    deploys.setdefault(item.name.text, item)
                    if part is file:
                        deploys[item.name.text] = item
                case ast.AlgorithmDecl() | ast.ClusterDecl():
                    known: dict[str, ast.AlgorithmDecl] | dict[str, ast.ClusterDecl] = (
                        algorithms if isinstance(item, ast.AlgorithmDecl) else clusters
                    )
                    what = ast.word(item).lower()
                    if item.name.text in known:
                        note = ((known[item.name.text].name.span, "the first one"),)
                        problems.found += mistake(
                            "duplicate-name",
                            f"a second {what} `{item.name.text}`",
                            item.name.span,
                            "give it another name",
                            note,
                        ).diagnostics
                    else:
                        known[item.name.text] = item  # type: ignore[assignment]
        seen[part.path] = True

    add(file)
    return ParsedProgram(algorithms, clusters, deploys, bool(broken))


def _choose(file: ast.File, context: LoweringContext) -> ast.DeployDecl | None:
    """The deploy to lower: the one that was asked for, or the only one."""
    deploys: dict[str, ast.DeployDecl] = {}
    for item in file.items:
        if isinstance(item, ast.DeployDecl):
            name = item.name
            if name.text in deploys:
                note = ((deploys[name.text].head, "the first one"),)
                raise mistake(
                    "duplicate-name",
                    f"a second deploy `{name.text}`",
                    name.span,
                    "name them: `deploy … on … as NAME`",
                    note,
                )
            deploys[name.text] = item
    listed = ", ".join(f"`{n}`" for n in deploys)
    if context.deploy is not None:
        if context.deploy not in deploys:
            help = f"the file has {listed}" if deploys else "the file has none"
            raise mistake("no-deploy", f"no deploy is called `{context.deploy}`", NOWHERE, help)
        return deploys[context.deploy]
    if len(deploys) > 1:
        raise mistake(
            "no-deploy",
            f"the file has {len(deploys)} deploys, and none was chosen",
            NOWHERE,
            f"choose one with --deploy: {listed}",
        )
    return next(iter(deploys.values()), None)


def _named(name: ast.Name, known: Mapping[str, T], what: str, broken: bool, problems: Problems) -> T | None:
    if name.text not in known and not broken:
        problems.tell("unknown-name", f"no {what} is called `{name.text}`", name.span, nearest(name.text, known))
    return known.get(name.text)


def _sorted(errors: list[Diagnostic], path: str) -> list[Diagnostic]:
    """In the order of the text, the program's own file first; equal ones once."""
    unique = list(dict.fromkeys(errors))
    return sorted(unique, key=lambda d: (d.span.file != path, d.span))
