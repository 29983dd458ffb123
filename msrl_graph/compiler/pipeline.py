"""The pipeline: text to plan, one list that reads top to bottom.

Invariant: a plan comes out whole or a Fault tells why; between two passes the plan is verified. The stages `ast`,
`graph`, `placed` and `plan` can each be the last, so that showing a stage and running it are the same computation.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import algorithms, checks
from ..backends import ENGINES
from ..checks import (
    datafiles,
    environments,
    folders,
    followers,
    layout,
    lints,
    liveness,
    memory,
    sharing,
    staleness,
    tokenizers,
)
from ..diagnostics import Diagnostic, Fault, ProgramWarning, public, render
from ..dsl import ast
from ..dsl.lower import LoweringContext, LoweringFault, lower
from ..dsl.parse import parse
from ..ir.graph import Graph
from ..ir.plan import Plan
from ..ir.plan_paths import at_hand
from ..ir.search_record import SearchRecord
from ..model import models
from ..passes.order import passes
from ..passes.spec import Passes
from ..planner.advice import Advice
from ..planner.owners import has_open_layout, owners
from ..planner.pools import Division
from ..planner.search import Search
from . import python_hints, unsupported
from .options import asked
from .sources import ProgramSource, importer, read, texts

if TYPE_CHECKING:
    from ..builder import Program

STAGES = ("ast", "graph", "placed", "plan")


def _misplaced(plan: Plan) -> list[Diagnostic]:
    """What is wrong with where and how nodes are placed; a statement that is wrong by itself is not told to differ from
    another."""
    found = layout.check(plan, ENGINES)
    found += [
        d
        for d in (*sharing.check(plan), *staleness.check(plan), *followers.placed(plan, ENGINES))
        if d.span not in {f.span for f in found}
    ]
    return found or lints.check(plan, ENGINES)


def _refused(plan: Plan) -> bool:
    return any(d.severity == "error" for d in _misplaced(plan))


def _too_much(plan: Plan) -> list[Diagnostic]:
    """What the rows wait for in vain, or what does not fit."""
    return liveness.check(plan) or memory.check(plan, partial(ADVICE.nearest, plan))


def pipeline(budget: float | None = None) -> Passes:
    """All passes; `budget` are the seconds after which the search takes the best so far."""
    return passes(Search(ENGINES, _refused, budget), ENGINES)


PASSES = pipeline()
ADVICE = Advice(PASSES, ENGINES, lambda plan: bool(layout.check(plan, ENGINES)))
# What the user's program may have wrong that only a pass brings to light.
CHECKS: Mapping[str, Callable[[Plan], list[Diagnostic]]] = {
    "place": _misplaced,
    "memory": _too_much,
    "environment": partial(environments.check, engines=ENGINES),
}
# The last pass of a stage.
LAST = {"placed": "reshard", "plan": "environment"}


class BrokenPass(RuntimeError):
    """A pass made something else than it promises: a mistake of the compiler's."""


@dataclass(frozen=True)
class Compilation:
    """What each stage gave, up to the one asked for; `placed` and `plan` are None too where the program has no
    deploy."""

    source: ProgramSource
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
    """The plan of a program: a path, the NAME of an algorithm of the package, or what was built in Python; `text`
    stands in for the file's content.

    `deploy` chooses among the deploys of a file, `model` names a model where there is none, `sets` are values of params
    (a str is what would stand in the file), `budget` the seconds after which the search for layouts takes the best so
    far. Raises Fault; what else there is to tell is a ProgramWarning.
    """
    result = _told(source, text, deploy=deploy, model=model, sets=sets, budget=budget)
    if result.plan is None:
        fault = no_deploy()
        fault.text = "\n".join(rendered(None, fault.diagnostics))
        raise fault
    return result.plan


@public
def check(
    source: str | Path | Program | ast.File, *, text: str | None = None, sets: Mapping[str, str | float] | None = None
) -> Graph:
    """The graph of a program (as for `compile`), after all checks that need no plan. Raises Fault, and warns as
    `compile` does."""
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
        if source is not None and source.tree is not None and source.tree is not program:
            fault.diagnostics = tuple(python_hints.correctable(d, source.tree) for d in fault.diagnostics)
        fault.text = "\n".join(rendered(source, fault.diagnostics))
        raise
    for note in rendered(source, result.warnings):
        warnings.warn(note, ProgramWarning, stacklevel=4)
    return result


def rendered(source: ProgramSource | None, diagnostics: Sequence[Diagnostic]) -> list[str]:
    known = texts(source, diagnostics)
    return [render(d, known) for d in diagnostics]


def no_deploy() -> Fault:
    help = "add a `deploy`; or plan for the machine at hand: `msrl-compile --model PRESET`"
    return Fault(Diagnostic("no-deploy", "the program has no deploy, so there is nothing to plan for", help=help))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles: what a compilation makes has none, and is walked again and again the larger it
    gets."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_uncollected()
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
    """Runs the pipeline up to stage `until`; `after(pass, seconds, plan)` is called after each pass; `budget` are the
    seconds after which the search takes the best so far. Raises Fault."""
    tree = source.tree or parse(source.text, source.name)
    if until == "ast":
        return Compilation(source, tree)
    try:
        lowered = lower(tree, context(source, deploy or source.deploy, model, sets))
    except LoweringFault as fault:
        # What could be read of the graph may have more to tell, in the same run.
        told = (
            checks.check(fault.graph, fault.library, fault.diagnostics, dropped=fault.dropped)
            if fault.graph is not None
            else []
        )
        raise Fault(*fault.diagnostics, *(d for d in told if d.severity == "error")) from None
    graph = lowered.graph
    reported = [c for e in (lowered.deploy.evaluations if lowered.deploy else ()) for c in e.columns]
    warnings = (*lowered.warnings, *checks.check(graph, lowered.library, lowered.warnings, reported, lowered.dropped))
    if errors := [d for d in warnings if d.severity == "error"]:
        raise Fault(*errors)
    if until == "graph" or lowered.cluster is None or lowered.deploy is None:
        return Compilation(source, tree, graph, warnings=warnings)
    plan = Plan(graph, lowered.cluster, lowered.deploy)
    known = at_hand(plan)
    told = [*tokenizers.check(known), *folders.check(known), *datafiles.check(plan)]
    if any(d.severity == "error" for d in told):
        raise Fault(*told)
    stages, more = _staged(plan, LAST[until], after, budget)
    warnings, placed = (*warnings, *told, *more), stages[LAST["placed"]]
    if until == "placed":
        return Compilation(source, tree, graph, placed, None, warnings)
    plan = stages[LAST["plan"]]
    plan = replace(plan, notes=(*plan.notes, *ADVICE.staler(plan), *unsupported.notes(plan)))
    return Compilation(source, tree, graph, placed, plan, warnings)


def _staged(
    plan: Plan, last: str, after: Hook = lambda name, seconds, plan: None, budget: float | None = None
) -> tuple[dict[str, Plan], list[Diagnostic]]:
    """What each pass makes of a plan, up to the `last` one, and the warnings. Raises Fault."""
    stages: dict[str, Plan] = {}
    warnings: list[Diagnostic] = []
    for step in pipeline(budget).until(last):
        began = time.perf_counter()
        plan = step.apply(plan)
        after(step.name, time.perf_counter() - began, plan)
        # A mistake in the program comes before what the pass promises: it promises nothing for a program that is wrong.
        told = CHECKS[step.name](plan) if step.name in CHECKS else []
        if any(d.severity == "error" for d in told):
            raise Fault(*told)
        warnings += told
        if wrong := next(step.verify(plan), ""):
            raise BrokenPass(f"the pass `{step.name}` broke its promise: {wrong}")
        stages[step.name] = plan
    return stages, warnings


def with_hosts(plan: Plan, nodes: int) -> Plan | None:
    """The same program planned for so many hosts; None where it does not fit, or what its deploy states is for more."""
    try:
        found = _staged(Plan(plan.graph, replace(plan.cluster, nodes=nodes), plan.deploy), LAST["plan"])[0][
            LAST["plan"]
        ]
    except Fault:
        return None
    return None if unsupported.unready(found) else replace(found, notes=(*found.notes, *unsupported.notes(found)))


def unstated(plan: Plan, budget: float | None = None) -> SearchRecord | None:
    """What the search would have found for a plan whose layouts the file states, had it not; None where one is open."""
    if any(has_open_layout(plan, o) for o in owners(plan, Division(plan.pools))):
        return None
    open_ = Plan(plan.graph, plan.cluster, replace(plan.deploy, layouts={}))
    return pipeline(budget)["place"].apply(open_).search


def context(
    source: ProgramSource, deploy: str | None = None, model: str | None = None, sets: Mapping[str, str] | None = None
) -> LoweringContext:
    """What lowering may ask of the rest of the package."""
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
