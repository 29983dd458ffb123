"""Lowering of a syntax tree to the graph of one algorithm and its deployment.

Invariant: the result is complete, or a Fault is raised. The Fault has every mistake of the file, but no mistake that
only follows from another mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..backends.spec import EngineSpec
from ..diagnostics import NOWHERE, Diagnostic, Fault, Span, nearest
from ..diagnostics.surface import name_option
from ..hardware.cluster import ClusterSpec
from ..ir.graph import Graph
from ..ir.plan import Deployment
from . import ast
from .algorithm import Lowering, lower_algorithm
from .calls import Folder, Library
from .cluster import lower_cluster
from .deploy import LoadModel, bare_deploy, lower_deploy
from .derive import derive
from .dropped import Dropped, add_drop_notes
from .expressions import Problems, mistake
from .params import Override, find_unused
from .parse import parse_set
from .variants import write_out

T = TypeVar("T")


@dataclass(frozen=True)
class LoweringContext:
    """What lowering needs in addition to the syntax tree of the program.

    The fields are loaders of imports and models, the functions and engines that msrl_graph provides, the program's
    folder, and options of the command line.
    """

    load: Callable[[str, bool, Span], ast.File]  # takes an import's target, whether it is a file, and its span
    library: Library
    engines: Mapping[str, EngineSpec]
    load_model: LoadModel
    folder: Path = Path()
    deploy: str | None = None
    model: str | None = None
    sets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoweredProgram:
    """A lowered program.

    - `library`: the functions that msrl_graph provides, and the user functions that the program calls.
    - `base`: returns the graph of the algorithm that the program's algorithm extends, with the same values of
      overridden params. Returns None if the algorithm extends no other algorithm.
    - `dropped`: the names that the algorithm drops.
    """

    graph: Graph
    cluster: ClusterSpec | None
    deploy: Deployment | None
    library: Library
    base: Callable[[], Graph | None]
    warnings: tuple[Diagnostic, ...] = ()
    dropped: Mapping[str, Dropped] = field(default_factory=dict)


class LoweringFault(Fault):
    """A Fault with the partial graph, on which some checks can still run."""

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
    """The algorithms, clusters and deploys of a file and its imports, by name.

    `broken` is whether an import failed.
    """

    algorithms: dict[str, ast.AlgorithmDecl]
    clusters: dict[str, ast.ClusterDecl]
    deploys: dict[str, ast.DeployDecl]
    broken: bool


def lower(file: ast.File, context: LoweringContext) -> LoweredProgram:
    """Lower a deploy and the algorithm that it deploys.

    The deploy is the one that the command line names, or the only deploy of the file. If the file has no deploy, lowers
    the last algorithm of the file. Raises a Fault with all mistakes.
    """
    try:
        return _lower(file, context)
    except RecursionError:
        raise mistake("syntax", "the program is nested too deeply", file.items[0].span) from None


def _lower(file: ast.File, context: LoweringContext) -> LoweredProgram:
    problems = Problems()
    algorithms, clusters, deploys, broken = _gather_items(file, context, problems)
    deploy = None
    with problems.catching():
        deploy = _choose_deploy(file, context)
    for other in [
        candidate for candidate in file.items if isinstance(candidate, ast.DeployDecl) and candidate is not deploy
    ]:
        write_out(other, deploys, algorithms, problems, broken)
    deploy = write_out(deploy, deploys, algorithms, problems, broken) if deploy else None
    overrides = (
        [Override(statement.name, statement.value) for statement in deploy.body if isinstance(statement, ast.SetDecl)]
        if deploy
        else []
    )
    for name, text in context.sets.items():
        with problems.catching():
            overrides.append(Override(*parse_set(name, text)))
    chosen: ast.AlgorithmDecl | None = None
    if deploy:
        # If two algorithms have the name, which is reported, the file's own is used.
        assert deploy.algorithm is not None and deploy.cluster is not None
        own = [
            candidate
            for candidate in file.items
            if isinstance(candidate, ast.AlgorithmDecl) and candidate.name.text == deploy.algorithm.text
        ]
        chosen = own[0] if own else _look_up(deploy.algorithm, algorithms, "algorithm", broken, problems)
    elif algorithms:
        own = [candidate for candidate in file.items if isinstance(candidate, ast.AlgorithmDecl)]
        chosen = own[-1] if own else list(algorithms.values())[-1]
    elif not broken:
        problems.report(
            "empty-file", "the file has no algorithm", file.items[0].span, "add an `algorithm`, or an `import` of one"
        )
    lowering: Lowering | None = None
    folder = partial(_folder_of, file, context)
    for item in [
        candidate for candidate in file.items if isinstance(candidate, ast.AlgorithmDecl) and candidate is not chosen
    ]:
        gone: dict[str, Dropped] = {}
        if (derived := derive(item, algorithms, problems, broken, gone)) is not None:
            before = len(problems.diagnostics)
            lower_algorithm(derived, (), context.library, folder, problems)
            problems.diagnostics[before:] = [
                add_drop_notes(diagnostic, gone) for diagnostic in problems.diagnostics[before:]
            ]
    dropped: dict[str, Dropped] = {}
    if chosen is not None and (derived := derive(chosen, algorithms, problems, broken, dropped)) is not None:
        before = len(problems.diagnostics)
        lowering = lower_algorithm(derived, overrides, context.library, folder, problems)
        problems.diagnostics[before:] = [
            _move_to_set(add_drop_notes(diagnostic, dropped), overrides) for diagnostic in problems.diagnostics[before:]
        ]
        problems.diagnostics += find_unused(derived, overrides)
    lowered_clusters = {
        name: lower_cluster(declaration, problems)
        for name, declaration in clusters.items()
        if declaration.span.file == file.path
    }
    cluster: ClusterSpec | None = None
    deployed: Deployment | None = None
    graph = lowering.graph if lowering else None
    if deploy:
        assert deploy.cluster is not None
        declared_cluster = _look_up(deploy.cluster, clusters, "cluster", broken, problems)
        if declared_cluster and declared_cluster.name.text not in lowered_clusters:
            lowered_clusters[declared_cluster.name.text] = lower_cluster(declared_cluster, problems)
        cluster = lowered_clusters.get(deploy.cluster.text)
        if lowering and graph and any(node.verb == "source" for node in graph.nodes):
            outside = (context.engines, context.load_model, folder, context.model)
            deployed, graph = lower_deploy(deploy, graph, lowering.nodes, *outside, cluster, problems)
    elif graph and context.model is not None:
        with problems.catching():
            cluster, deployed = bare_deploy(graph, context.model, context.load_model, context.folder)
    library = {**context.library, **(lowering.used if lowering else {})}
    errors = [diagnostic for diagnostic in problems.diagnostics if diagnostic.severity == "error"]
    if errors or graph is None:
        raise LoweringFault(*_sort_errors(errors, file.path), graph=graph, library=library, dropped=dropped)
    warnings = tuple(diagnostic for diagnostic in problems.diagnostics if diagnostic.severity != "error")
    assert chosen is not None
    base = partial(_lower_base, chosen, algorithms, overrides, context.library, folder)
    return LoweredProgram(graph, cluster, deployed, library, base, warnings, dropped)


def _lower_base(
    algorithm: ast.AlgorithmDecl,
    algorithms: Mapping[str, ast.AlgorithmDecl],
    overrides: Sequence[Override],
    library: Library,
    folder: Folder,
) -> Graph | None:
    """Return the graph of the algorithm that `algorithm` extends.

    Overridden params have the same values in both. Returns None if the algorithm extends no other algorithm.
    """
    problems = Problems()
    base = derive(algorithms[algorithm.extends.text], algorithms, problems) if algorithm.extends else None
    if base is None:
        return None
    params = {statement.name.text for statement in base.body if isinstance(statement, ast.ParamDecl)}
    shared = [override for override in overrides if override.name.text in params]
    return lower_algorithm(base, shared, library, folder, problems).graph


def _folder_of(file: ast.File, context: LoweringContext, span: Span) -> Path:
    """Return the folder of the file in which a span is."""
    return context.folder if span.file == file.path else Path(span.file).parent


def _move_to_set(diagnostic: Diagnostic, overrides: Sequence[Override]) -> Diagnostic:
    """Move a diagnostic about a param's value to the `set` that sets the value.

    A note in the moved diagnostic says where the value is used.
    """
    override_spans = {override.value.span for override in overrides}
    for place, (span, _) in enumerate(diagnostic.related):
        if span in override_spans and diagnostic.code in ("bad-value", "bad-unit"):
            others = (*diagnostic.related[:place], *diagnostic.related[place + 1 :])
            return replace(diagnostic, span=span, related=((diagnostic.span, "it is used here"), *others))
    return diagnostic


def _gather_items(file: ast.File, context: LoweringContext, problems: Problems) -> ParsedProgram:
    """Collect the algorithms, clusters and deploys of a file and its imports.

    Each file is read once.
    """
    algorithms: dict[str, ast.AlgorithmDecl] = {}
    clusters: dict[str, ast.ClusterDecl] = {}
    deploys: dict[str, ast.DeployDecl] = {}
    seen: dict[str, bool] = {file.path: False}  # whether the file is completely read
    broken: list[Diagnostic] = []

    def add(part: ast.File) -> None:
        for item in part.items:
            match item:
                case ast.ImportDecl():
                    count = len(problems.diagnostics)
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
                    broken.extend(problems.diagnostics[count:])
                case ast.DeployDecl():
                    # Duplicates are reported when one is chosen; the file's own deploy takes precedence over an
                    # import's.
                    deploys.setdefault(item.name.text, item)
                    if part is file:
                        deploys[item.name.text] = item
                case ast.AlgorithmDecl() | ast.ClusterDecl():
                    known: dict[str, ast.AlgorithmDecl] | dict[str, ast.ClusterDecl] = (
                        algorithms if isinstance(item, ast.AlgorithmDecl) else clusters
                    )
                    kind = ast.word(item).lower()
                    if item.name.text in known:
                        note = ((known[item.name.text].name.span, "the first one"),)
                        problems.diagnostics += mistake(
                            "duplicate-name",
                            f"a second {kind} `{item.name.text}`",
                            item.name.span,
                            "give it another name",
                            note,
                        ).diagnostics
                    else:
                        known[item.name.text] = item  # type: ignore[assignment]
        seen[part.path] = True

    add(file)
    return ParsedProgram(algorithms, clusters, deploys, bool(broken))


def _choose_deploy(file: ast.File, context: LoweringContext) -> ast.DeployDecl | None:
    """Return the deploy that the command line names, or the only deploy of the file.

    Returns None if the file has no deploy. Raises a Fault if the file has several deploys and the command line names
    none.
    """
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
    listed = ", ".join(f"`{deploy_name}`" for deploy_name in deploys)
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
            f"choose one with {name_option('deploy')}: {listed}",
        )
    return next(iter(deploys.values()), None)


def _look_up(name: ast.Name, known: Mapping[str, T], kind: str, broken: bool, problems: Problems) -> T | None:
    if name.text not in known and not broken:
        problems.report("unknown-name", f"no {kind} is called `{name.text}`", name.span, nearest(name.text, known))
    return known.get(name.text)


def _sort_errors(errors: list[Diagnostic], path: str) -> list[Diagnostic]:
    """Sort errors by position, with the program's own file first; drop duplicates."""
    unique = list(dict.fromkeys(errors))
    return sorted(unique, key=lambda diagnostic: (diagnostic.span.file != path, diagnostic.span))
