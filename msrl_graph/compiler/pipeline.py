"""The pipeline: text to plan, one list that reads top to bottom.

Invariant: a plan comes out whole or a Fault tells why; between two passes the plan is verified. The stages `ast`, `graph`, `placed` and
`plan` can each be the last, so that showing a stage and running it are the same computation.
"""

from __future__ import annotations

import gc
import linecache
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import algorithms, checks
from ..backends import DEFAULT, ENGINES
from ..checks import datafiles, folders, layout, lints, liveness, memory, sharing, staleness, tokenizers
from ..diagnostics import Diagnostic, Fault, ProgramWarning, Span, kind_of, nearest, public, render
from ..dsl import ast
from ..dsl.lower import Context, Refused, lower
from ..dsl.parse import flag_text, parse
from ..files import reading
from ..files.paths import is_file
from ..ir.graph import Graph
from ..ir.plan import Deploy, EngineChoice, Memory, Plan
from ..ir.searched import Searched
from ..model import models
from ..passes.dock import Dock
from ..passes.estimate import EstimateTime
from ..passes.memory import CountMemory
from ..passes.reshard import Resharding
from ..passes.schedule import Schedule
from ..passes.traffic import CountTraffic
from ..planner.search import Search
from ..sharding.layout import AXES
from . import unready
from .asked import asked

if TYPE_CHECKING:
    from ..builder import Program

STAGES = ("ast", "graph", "placed", "plan")


class Pass(NamedTuple):
    """A pass, what must hold after it, and what the user's program may have wrong that only it brings to light."""

    name: str
    apply: Callable[[Plan], Plan]
    holds: Callable[[Plan], bool]
    check: Callable[[Plan], list[Diagnostic]] | None = None
    stage: str = "plan"


PASSES = (
    Pass(
        "place",
        Search(ENGINES, DEFAULT, lambda p: any(d.severity == "error" for d in _misplaced(p))),
        lambda p: _covers(p, [x.node for x in p.placements]),
        lambda p: _misplaced(p),
        "placed",
    ),
    Pass("dock", Dock(ENGINES), lambda p: {c.node for c in p.docks.controllers} == {n.name for n in p.graph.nodes[1:]}, stage="placed"),
    Pass("reshard", Resharding(ENGINES), lambda p: [(r.src, r.dst) for r in p.reshards] == _reshards(p), stage="placed"),
    Pass(
        "schedule",
        Schedule(),
        lambda p: _covers(p, [i.node for s in p.schedule if s.task == "train" for i in s.instructions if i.op == "RUN"]),
    ),
    Pass("traffic", CountTraffic(), lambda p: len(p.traffic) == len(p.graph.samples())),
    Pass("memory", CountMemory(ENGINES), lambda p: bool(p.memory), lambda p: liveness.check(p) or memory.check(p, partial(_nearest, p))),
    Pass("estimate", EstimateTime(ENGINES), lambda p: p.estimate is not None),
)


def _covers(plan: Plan, names: Sequence[str]) -> bool:
    """Every node once."""
    return sorted(names) == sorted(n.name for n in plan.graph.nodes)


def _misplaced(plan: Plan) -> list[Diagnostic]:
    """What is wrong with where and how states are placed; a statement that is wrong by itself is not told to differ from another."""
    found = layout.check(plan, ENGINES)
    found += [d for d in (*sharing.check(plan), *staleness.check(plan)) if d.span not in {f.span for f in found}]
    return found or lints.check(plan, ENGINES)


def _reshards(plan: Plan) -> list[tuple[str, str]]:
    return [(e.src, e.dst) for e in plan.graph.reshards()]


def _nearest(plan: Plan, worst: Memory) -> str:
    """The nearest layout that fits, for the states whose phase needs most: the passes themselves try them."""
    verb = "generate" if worst.phase == "generate" else "update"
    nodes = [n.name for n in plan.graph.verb(verb) if plan.placement(n.name).pool == worst.pool]
    if not nodes:
        return ""
    nothing = f"no other layout of {', '.join(nodes)} fits either: it takes more devices, or a smaller model"
    if plan.search is not None and not plan.search.seconds and not plan.deploy.layouts.keys() & {*nodes}:
        return nothing  # the search has tried; what is stated of these states it left alone
    if found := _offloaded(plan, worst.pool):
        return found
    now, devices = plan.placement(nodes[0]).layout, plan.pool(worst.pool).devices
    stages = [now.zero] if worst.phase == "generate" else [z for z in ENGINES[plan.placement(nodes[0]).engine.name].zero if z >= now.zero]
    most = min(devices, plan.model(nodes[0]).heads)
    engine = plan.placement(nodes[0]).engine
    tried = [replace(now, tp=t, dp=devices // t, zero=z, inner=1) for t in range(1, most + 1) if devices % t == 0 for z in stages]
    for choice in sorted(tried, key=lambda c: (abs(math.log2(c.tp / now.tp)) + c.zero - now.zero, c.tp, c.zero)):
        if _fitting(replace(plan.deploy, layouts={**plan.deploy.layouts, **dict.fromkeys(nodes, choice)}), plan, worst.pool):
            zero = f", zero = {choice.zero}" if choice.zero != 1 else ""
            return f"the nearest layout that fits: `layout {', '.join(nodes)} {{ tp = {choice.tp}, dp = {choice.dp}{zero} }}`"
    if worst.phase == "update" and engine.options.get("recompute") != "full":
        # The passes choose the micro-batch again, for what recomputation leaves.
        stated = plan.deploy.engines.get(nodes[0], EngineChoice(engine.name))
        engines = {**plan.deploy.engines, nodes[0]: replace(stated, options={**stated.options, "recompute": "full"})}
        if _fitting(replace(plan.deploy, engines=engines), plan, worst.pool):
            return f"this fits: `engine {nodes[0]} = {engine.name} {{ recompute = full }}`"
    return _searched(plan, nodes) or nothing


def _searched(plan: Plan, nodes: Sequence[str]) -> str:
    """What the search finds where nothing is stated of the layout of some states, and all else stays."""
    open_ = replace(plan.deploy, layouts={n: x for n, x in plan.deploy.layouts.items() if n not in nodes})
    other = PASSES[0].apply(Plan(plan.graph, plan.cluster, open_))
    if other.search is None or not other.search.seconds or [p.nodes for p in other.pools] != [p.nodes for p in plan.pools]:
        return ""
    found = other.placement(nodes[0])
    sizes = ", ".join(f"{a} = {getattr(found.layout, a)}" for a in (*AXES, "zero") if getattr(found.layout, a) > 1)
    engine = f" and `engine {', '.join(nodes)} = {found.engine.name}`" if found.engine.name != plan.placement(nodes[0]).engine.name else ""
    return f"this fits: `layout {', '.join(nodes)} {{ {sizes or 'dp = 1'} }}`{engine}"


def _offloaded(plan: Plan, pool: str) -> str:
    """What the passes offload where the file does not say `none`, or less than it takes."""
    here = {n: c for n, c in plan.deploy.engines.items() if plan.placement(n).pool == pool and "offload" in c.options}
    open_ = {n: replace(c, options={k: v for k, v in c.options.items() if k != "offload"}) for n, c in here.items()}
    other = _fitting(replace(plan.deploy, engines={**plan.deploy.engines, **open_}), plan, pool) if here else None
    if other is None:
        return ""
    first = [
        p
        for p in other.placements
        if "offload" in p.engine.options and other.graph.sharing(other.graph.node(p.node).worker)[0].name == p.node
    ]
    return "this fits: " + " and ".join(f"`engine {p.node} = {p.engine.name} {{ offload = {p.engine.options['offload']} }}`" for p in first)


def _fitting(deploy: Deploy, plan: Plan, pool: str) -> Plan | None:
    """The plan with another deploy, if a pool and the hosts have the memory then: the passes themselves try it."""
    other = PASSES[0].apply(Plan(plan.graph, plan.cluster, deploy))
    if layout.check(other, ENGINES):
        return None
    for step in PASSES[1:-1]:
        other = step.apply(other)
    return other if all(m.total <= m.capacity.value for m in other.memory if m.pool == pool or m.place == "host") else None


@dataclass(frozen=True)
class Source:
    """A program's text; `folder` is what the paths in it are relative to. With `tree`, the program that a Python file of this text made;
    `deploy` is the one of it that is meant, where nobody chooses another."""

    name: str
    text: str
    folder: Path
    tree: ast.File | None = None
    deploy: str | None = None


@dataclass(frozen=True)
class Compilation:
    """What each stage gave, up to the one asked for; `placed` and `plan` are None too where the program has no deploy."""

    source: Source
    tree: ast.File
    graph: Graph | None = None
    placed: Plan | None = None
    plan: Plan | None = None
    warnings: tuple[Diagnostic, ...] = ()


Hook = Callable[[str, float, Plan], None]


@public
def compile(
    source: str | Path | Program | ast.File,
    *,
    text: str | None = None,
    deploy: str | None = None,
    model: str | None = None,
    sets: Mapping[str, str | float] | None = None,
    budget: float | None = None,
) -> Plan:
    """The plan of a program: a path, the NAME of an algorithm of the package, or what was built in Python; `text` stands in for the file's
    content.

    `deploy` chooses among the deploys of a file, `model` names a model where there is none, `sets` are values of params (a str is what
    would stand in the file), `budget` the seconds after which the search for layouts takes the best so far. Raises Fault; what
    else there is to tell is a ProgramWarning.
    """
    result = _told(source, text, deploy=deploy, model=model, sets=sets, budget=budget)
    if result.plan is None:
        fault = no_deploy()
        fault.text = "\n".join(rendered(None, fault.diagnostics))
        raise fault
    return result.plan


@public
def check(source: str | Path | Program | ast.File, *, text: str | None = None, sets: Mapping[str, str | float] | None = None) -> Graph:
    """The graph of a program (as for `compile`), after all checks that need no plan. Raises Fault, and warns as `compile` does."""
    graph = _told(source, text, sets=sets, until="graph").graph
    assert graph is not None
    return graph


def _told(program: str | Path | Program | ast.File, text: str | None, **options: Any) -> Compilation:
    """The compilation; a Fault that nobody catches shows where its mistakes are, and warnings go Python's way."""
    source = None
    try:
        options = asked({"text": text, **options})
        source = read(program, options.pop("text", None))
        result = translate(source, **options)
    except Fault as fault:
        fault.text = "\n".join(rendered(source, fault.diagnostics))
        raise
    for note in rendered(source, result.warnings):
        warnings.warn(note, ProgramWarning, stacklevel=4)
    return result


def rendered(source: Source | None, diagnostics: Sequence[Diagnostic]) -> list[str]:
    known = texts(source, diagnostics)
    return [render(d, known) for d in diagnostics]


def no_deploy() -> Fault:
    help = "add a `deploy`; or plan for the machine at hand: `msrl-compile --model PRESET`"
    return Fault(Diagnostic("no-deploy", "the program has no deploy, so there is nothing to plan for", help=help))


def read(source: str | Path | Program | ast.File, text: str | None = None) -> Source:
    """The source that a path or the name of a package's algorithm stands for, or that a program was built in."""
    if not isinstance(source, str | Path):
        tree, meant = (source, None) if isinstance(source, ast.File) else _built(source)
        path = Path(tree.path)
        return Source(tree.path, "".join(linecache.getlines(tree.path)), path.parent if is_file(path) else Path(), tree, meant)
    path = Path(source)
    if text is not None:
        return Source(str(source), reading.plain(text, str(source)), path.parent if path.suffix else Path())
    if not is_file(path) and path.suffix == "" and len(path.parts) == 1:
        path = algorithms.FOLDER / f"{source}.rlg"
        if not is_file(path):
            known = [p.stem for p in algorithms.FOLDER.glob("*.rlg")]
            message = f"`{source}` is neither a file nor an algorithm of the package"
            raise Fault(Diagnostic("missing-file", message, help=nearest(str(source), known)))
        return Source(path.name, reading.read(path, path.name), path.parent)
    return Source(str(source), reading.read(path, str(source)), path.parent)


def _built(source: object) -> tuple[ast.File, str | None]:
    """The tree, and the deploy that is meant by itself: one that extends another has that beside it in the file."""
    from ..builder import Deploy, Program

    if not isinstance(source, Program):
        raise Fault(Diagnostic("bad-value", f"a program is a path, or what was built in Python, not {kind_of(source)}"))
    return source.tree(), source.name if isinstance(source, Deploy) else None


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles: what a compilation makes has none, and is walked again and again the larger it gets."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_uncollected()
def translate(
    source: Source,
    *,
    deploy: str | None = None,
    model: str | None = None,
    sets: Mapping[str, str] | None = None,
    until: str = "plan",
    after: Hook = lambda name, seconds, plan: None,
    budget: float | None = None,
) -> Compilation:
    """Runs the pipeline up to stage `until`; `after(pass, seconds, plan)` is called after each pass; `budget` are the seconds after which
    the search takes the best so far. Raises Fault."""
    tree = source.tree or parse(source.text, source.name)
    if until == "ast":
        return Compilation(source, tree)
    try:
        lowered = lower(tree, context(source, deploy or source.deploy, model, sets))
    except Refused as fault:
        # What could be read of the graph may have more to tell, in the same run.
        told = checks.check(fault.graph, fault.library, fault.diagnostics, dropped=fault.dropped) if fault.graph is not None else []
        raise Fault(*fault.diagnostics, *(d for d in told if d.severity == "error")) from None
    graph = lowered.graph
    reported = [c for e in (lowered.deploy.evaluations if lowered.deploy else ()) for c in e.report]
    warnings = (*lowered.warnings, *checks.check(graph, lowered.library, lowered.warnings, reported, lowered.dropped))
    if errors := [d for d in warnings if d.severity == "error"]:
        raise Fault(*errors)
    if until == "graph" or lowered.cluster is None or lowered.deploy is None:
        return Compilation(source, tree, graph, warnings=warnings)
    plan = Plan(graph, lowered.cluster, lowered.deploy)
    told = [*tokenizers.check(plan), *folders.check(plan), *datafiles.check(plan)]
    if any(d.severity == "error" for d in told):
        raise Fault(*told)
    warnings = (*warnings, *told)
    placed = None
    for step in PASSES:
        if step.stage == "plan" and until == "placed":
            return Compilation(source, tree, graph, plan, None, warnings)
        began = time.perf_counter()
        plan = (replace(step.apply, budget=budget) if isinstance(step.apply, Search) else step.apply)(plan)
        after(step.name, time.perf_counter() - began, plan)
        # A mistake in the program comes before what the pass promises: it promises nothing for a program that is wrong.
        told = step.check(plan) if step.check is not None else []
        if any(d.severity == "error" for d in told):
            raise Fault(*told)
        warnings = (*warnings, *told)
        assert step.holds(plan), f"the pass `{step.name}` broke its promise"
        placed = plan if step.stage == "placed" else placed
    plan = replace(plan, notes=(*plan.notes, *unready.notes(plan)))
    return Compilation(source, tree, graph, placed, plan, warnings)


def unstated(plan: Plan, budget: float | None = None) -> Searched | None:
    """What the search would have found for a plan whose layouts the file states, had it not."""
    search = PASSES[0].apply
    assert isinstance(search, Search)
    open_ = Plan(plan.graph, plan.cluster, replace(plan.deploy, layouts={}))
    return replace(search, budget=budget)(open_).search


def context(source: Source, deploy: str | None = None, model: str | None = None, sets: Mapping[str, str] | None = None) -> Context:
    """What lowering may ask of the rest of the package."""
    return Context(
        load=partial(_import, source.folder, {}),
        library=algorithms.library(),
        engines=ENGINES,
        load_model=models.load,
        folder=source.folder,
        deploy=deploy,
        model=model,
        sets=sets or {},
    )


def _import(folder: Path, read: dict[Path, ast.File], target: str, of_file: bool, span: Span) -> ast.File:
    """The tree of an imported file, relative to the file that imports it, or of an algorithm of the package; `read` keeps those that were
    read already."""
    importer = Path(span.file)
    path = (importer.parent if is_file(importer) else folder) / target if of_file else algorithms.FOLDER / f"{target}.rlg"
    # One file has one name, so that an import of itself is seen.
    path = Path(os.path.normpath(path))
    if not of_file and not is_file(path):
        known = [p.stem for p in algorithms.FOLDER.glob("*.rlg")]
        beside = is_file((importer.parent if is_file(importer) else folder) / f"{target}.rlg")
        help = f'for the file beside this one write `import "{target}.rlg"`' if beside else nearest(target, known)
        raise Fault(Diagnostic("unknown-name", f"no algorithm of the package is called `{target}`", span, help))
    if path not in read:
        read[path] = parse(reading.read(path, target, span), str(path))
    return read[path]


def texts(source: Source | None, diagnostics: Sequence[Diagnostic]) -> Mapping[str, str]:
    """The texts that diagnostics point into, by the names that their spans have: the source's, files that it imports,
    and flags of the command line."""
    found = {} if source is None else {source.name: source.text}
    for name in {s.file for d in diagnostics for s in (d.span, *(r for r, _ in d.related))} - found.keys():
        if (flag := flag_text(name)) is not None:
            found[name] = flag
            continue
        path = Path(name)
        if is_file(path):
            found[name] = path.read_text(encoding="utf-8-sig", errors="replace")
        elif lines := linecache.getlines(name):
            found[name] = "".join(lines)  # a cell of a notebook
    return found
