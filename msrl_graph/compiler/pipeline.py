"""The compiler's pipeline from text to plan, in order.

Invariant: the result is a complete plan, or a Fault with the reason. The plan is verified after each pass. Each of the
stages `ast`, `graph`, `placed` and `plan` can be the last stage. Therefore the command that shows a stage and the
command that runs the program use the same computation.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import algorithms
from ..analysis.shared_bases import share_bases
from ..backends import ENGINES
from ..checks import layout
from ..checks.stage import PlanContext
from ..checks.table import check_graph, check_plan
from ..data.plan_paths import copy_model_heads
from ..diagnostics import Diagnostic, Fault, ProgramWarning, public, render
from ..diagnostics.surface import by_surface
from ..dsl import ast
from ..dsl.lower import LoweringContext, LoweringFault, lower
from ..dsl.parse import parse
from ..files.plugins import blame_plug_ins
from ..ir.graph import Graph
from ..ir.plan import Plan
from ..ir.search_record import SearchRecord
from ..model import models
from ..passes.order import passes
from ..passes.spec import Passes
from ..planner.advice import Advice
from ..planner.owners import has_open_layout, owners
from ..planner.pools import Division
from ..planner.search import Search
from . import python_hints, unsupported
from .options import validate_options
from .sources import ProgramSource, collect_texts, importer, read_source
from .used_plugins import find_plugins

if TYPE_CHECKING:
    from ..builder import Program

STAGES = ("ast", "graph", "placed", "plan")


def _is_rejected(plan: Plan) -> bool:
    found = check_plan("place", plan, PlanContext(ENGINES))
    return any(diagnostic.severity == "error" for diagnostic in found)


def pipeline(budget: float | None = None) -> Passes:
    """Return all passes.

    After `budget` seconds, the search for layouts uses the best plan that it has found.
    """
    return passes(Search(ENGINES, _is_rejected, budget), ENGINES)


PASSES = pipeline()
ADVICE = Advice(PASSES, ENGINES, lambda plan: bool(layout.check(plan, PlanContext(ENGINES))))
CONTEXT = PlanContext(ENGINES, ADVICE.find_nearest)
# The last pass of a stage that does not run all passes.
LAST = {"placed": "reshard"}


class BrokenPass(RuntimeError):
    """The error for a pass that returns a wrong plan, which is a bug of the compiler."""


@dataclass(frozen=True)
class Compilation:
    """The results of the stages up to the requested stage.

    The results of later stages are None. `placed` and `plan` are also None if the program has no deploy. `base` returns
    the graph of the algorithm that the compiled algorithm extends; None if it extends no other algorithm.
    """

    source: ProgramSource
    tree: ast.File
    graph: Graph | None = None
    placed: Plan | None = None
    plan: Plan | None = None
    warnings: tuple[Diagnostic, ...] = ()
    base: Callable[[], Graph | None] = lambda: None


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
    """Compile a program to a plan.

    - `source` is a path, the name of an algorithm that msrl_graph provides, or a program built in Python.
    - `text` replaces the content of the file.
    - `deploy` is the name of a deploy, if the file has several.
    - `model` names a model for a program without a deploy.
    - `sets` are values of params by name. A str is a value as it is written in a program file.
    - `budget` is a limit in seconds. After this time, the search for layouts uses the best plan that it has found.

    Raises Fault. Warnings are ProgramWarnings.
    """
    result = _compile(source, text, deploy=deploy, model=model, sets=sets, budget=budget)
    if result.plan is None:
        fault = no_deploy()
        fault.text = "\n".join(render_all(None, fault.diagnostics))
        raise fault
    return result.plan


@public
def check(
    source: str | Path | Program | ast.File, *, text: str | None = None, sets: Mapping[str, str | float] | None = None
) -> Graph:
    """Run all checks that need no plan, and return the graph of the program.

    The arguments, the Fault and the warnings are the same as those of `compile`.
    """
    graph = _compile(source, text, sets=sets, until="graph").graph
    assert graph is not None
    return graph


def _compile(program: str | Path | Program | ast.File, text: str | None, **options: Any) -> Compilation:
    """Compile a program; warnings go to `warnings.warn`.

    If the caller does not catch a Fault, Python prints the fault's text, which shows the source at the mistakes.
    """
    source = None
    try:
        options = validate_options({"text": text, **options})
        source = read_source(program, options.pop("text", None))
        result = translate(source, **options)
    except Fault as fault:
        if source is not None and source.tree is not None and source.tree is not program:
            fault.diagnostics = tuple(
                python_hints.add_undo_help(diagnostic, source.tree) for diagnostic in fault.diagnostics
            )
        fault.text = "\n".join(render_all(source, fault.diagnostics))
        raise
    for note in render_all(source, result.warnings):
        warnings.warn(note, ProgramWarning, stacklevel=4)
    return result


def render_all(source: ProgramSource | None, diagnostics: Sequence[Diagnostic]) -> list[str]:
    known = collect_texts(source, diagnostics)
    return [render(diagnostic, known) for diagnostic in diagnostics]


def no_deploy() -> Fault:
    plan = by_surface(command_line="msrl-compile --model PRESET", python="compile(program, model=PRESET)")
    help = f"add a `deploy`, or plan for this machine: `{plan}`"
    return Fault(Diagnostic("no-deploy", "the program has no deploy, so there is nothing to plan for", help=help))


@contextmanager
def _without_gc() -> Iterator[None]:
    """Disable the garbage collector of reference cycles while the block runs.

    A compilation creates no reference cycles, and the collector would traverse the growing objects again and again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_gc()
@blame_plug_ins()
def translate(
    source: ProgramSource,
    *,
    deploy: str | None = None,
    model: str | None = None,
    sets: Mapping[str, str] | None = None,
    until: str = "plan",
    after: Hook = lambda name, seconds, plan: None,
    budget: float | None = None,
) -> Compilation:
    """Run the pipeline up to the stage `until`.

    Raises Fault, also if code of a plug-in fails.

    `after(pass, seconds, plan)` is called after each pass. After `budget` seconds, the search for layouts uses the best
    plan that it has found.
    """
    tree = source.tree or parse(source.text, source.name)
    if until == "ast":
        return Compilation(source, tree)
    try:
        lowered = lower(tree, context(source, deploy or source.deploy, model, sets))
    except LoweringFault as fault:
        # The part of the graph that could be read may have more mistakes, which are reported in the same run.
        diagnostics = (
            check_graph(fault.graph, fault.library, fault.diagnostics, dropped=fault.dropped)
            if fault.graph is not None
            else []
        )
        raise Fault(
            *fault.diagnostics, *(diagnostic for diagnostic in diagnostics if diagnostic.severity == "error")
        ) from None
    graph = lowered.graph
    evaluated = [
        column for evaluation in (lowered.deploy.evaluations if lowered.deploy else ()) for column in evaluation.columns
    ]
    warnings = (*lowered.warnings, *check_graph(graph, lowered.library, lowered.warnings, evaluated, lowered.dropped))
    if errors := [diagnostic for diagnostic in warnings if diagnostic.severity == "error"]:
        raise Fault(*errors)
    if until == "graph" or lowered.cluster is None or lowered.deploy is None:
        return Compilation(source, tree, graph, warnings=warnings, base=lowered.base)
    plan = Plan(share_bases(graph, lowered.deploy), lowered.cluster, lowered.deploy)
    diagnostics = check_plan("files", copy_model_heads(plan), CONTEXT)
    if any(diagnostic.severity == "error" for diagnostic in diagnostics):
        raise Fault(*diagnostics)
    stages, more = _run_passes(plan, until, after, budget)
    warnings = (*warnings, *diagnostics, *more)
    placed = stages["placed"]
    if until == "placed":
        return Compilation(source, tree, graph, placed, None, warnings)
    plan = stages["plan"]
    notes = (*plan.notes, *ADVICE.advise_staleness(plan), *unsupported.notes(plan))
    plan = replace(plan, notes=notes, plugins=find_plugins(plan))
    return Compilation(source, tree, graph, placed, plan, warnings)


def _run_passes(
    plan: Plan, until: str = "plan", after: Hook = lambda name, seconds, plan: None, budget: float | None = None
) -> tuple[dict[str, Plan], list[Diagnostic]]:
    """Return the plan at each stage up to `until`, and the warnings.

    Raises Fault if the program is wrong, and BrokenPass if a pass returns a wrong plan.
    """
    stages: dict[str, Plan] = {}
    warnings: list[Diagnostic] = []
    steps = pipeline(budget)
    ends = {LAST[stage]: stage for stage in LAST}
    for step in steps.until(LAST[until]) if until in LAST else steps:
        began = time.perf_counter()
        plan = step.apply(plan)
        after(step.name, time.perf_counter() - began, plan)
        # Check the program before the promise of the pass, which does not hold for a wrong program.
        diagnostics = check_plan(step.name, plan, CONTEXT)
        if any(diagnostic.severity == "error" for diagnostic in diagnostics):
            raise Fault(*diagnostics)
        warnings += diagnostics
        if wrong := next(step.verify(plan), ""):
            raise BrokenPass(f"the pass `{step.name}` broke its promise: {wrong}")
        stages[ends.get(step.name, "plan")] = plan
    return stages, warnings


def with_hosts(plan: Plan, nodes: int) -> Plan | None:
    """Return a plan of the same program for a cluster of `nodes` hosts.

    Returns None if no plan fits, if the deploy states more hosts than `nodes`, or if a run would reject the new plan.
    """
    try:
        planned = _run_passes(Plan(plan.graph, replace(plan.cluster, nodes=nodes), plan.deploy))[0]["plan"]
    except Fault:
        return None
    return (
        None
        if unsupported.find_unsupported(planned)
        else replace(planned, notes=(*planned.notes, *unsupported.notes(planned)))
    )


def search_unstated(plan: Plan, budget: float | None = None) -> SearchRecord | None:
    """Search for layouts although the program states the layouts of all nodes.

    Returns the record of the search. Returns None without a search if the program does not state all layouts.
    """
    if any(has_open_layout(plan, owner) for owner in owners(plan, Division(plan.pools))):
        return None
    open_ = Plan(plan.graph, plan.cluster, replace(plan.deploy, layouts={}))
    return pipeline(budget)["place"].apply(open_).search


def context(
    source: ProgramSource, deploy: str | None = None, model: str | None = None, sets: Mapping[str, str] | None = None
) -> LoweringContext:
    """Return the functions, engines, models and options that lowering needs."""
    return LoweringContext(
        load=importer(source.folder),
        library=algorithms.library(),
        engines=ENGINES,
        load_model=models.load,
        folder=source.folder,
        deploy=deploy,
        model=model,
        sets=sets or {},
    )
