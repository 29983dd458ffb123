"""A plan that was written into a file, or stands in a script.

Invariant: what is loaded is a plan of this version of which the verifier says nothing; all else is a Fault, bad-plan.
What is loaded to be run says nothing that the compiler would not say: its graph and its deploy are what comes of a
program, by all checks of programs, and its other parts are what the passes make of these and of its placements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from .. import algorithms, checks
from ..backends import ENGINES
from ..diagnostics import NOWHERE, Diagnostic, Fault
from ..dsl.lower import LoweredProgram, LoweringContext, lower
from ..dsl.parse import parse
from ..dsl.unparse import write
from ..files.paths import is_folder
from ..files.urls import is_url
from ..ir import verify
from ..ir.options import ClusterOptions
from ..ir.plan import FORMAT_VERSION, FUNCTIONS, EngineChoice, Plan, from_json
from ..model import models
from ..model.architecture import Model
from .pipeline import CHECKS, PASSES
from .to_program import restated

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What the passes fill after the placement.
DERIVED = ("docks", "reshards", "schedule", "traffic", "memory", "estimate", "surroundings")
# What two parts may differ in: where a program states them, and what only a search reads of a deploy.
UNLIKE = {"span", "stated", "pools", "together"}


def load(data: bytes, name: str, run: bool = False) -> Plan:
    """The plan of a JSON text; `name` is what to call it, `run` says that it is to be run. Raises Fault."""
    import msgspec

    try:
        # First of all: a plan of another format may not have the fields of this one.
        version = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("format_version", msgspec.Raw(b"1"))
        if bytes(version) != b"%d" % FORMAT_VERSION:
            wrong = f"its format is {bytes(version).decode()}, this version reads {FORMAT_VERSION}"
            raise msgspec.ValidationError(wrong)
        plan = from_json(data)
        if fault := next(chain(_cluster(plan), verify.names(plan), PASSES.verify(plan)), ""):
            raise msgspec.ValidationError(fault)
        if run and (fault := _unlike_a_compilers(plan, data)):
            raise msgspec.ValidationError(fault)
        return plan
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)
    except Fault as fault:
        first = fault.diagnostics[0]
        why = f"{first.message}{f' ({first.help})' if first.help else ''}"
    except Exception as error:  # passes and checks rely on what a compiler makes, and raise anything for the rest
        why = f"its parts do not go together ({type(error).__name__}: {error})"
    help = "write it anew: msrl-compile FILE --format json -o plan.json"
    raise Fault(Diagnostic("bad-plan", f"{name} is not a plan of this version: {why}", help=help)) from None


def _unlike_a_compilers(plan: Plan, data: bytes) -> str:
    """What is in a plan that the compiler would not have written; "" for nothing. Raises Fault, and what the checks and
    passes raise for what they are never given."""
    return next(
        chain(
            _fields(json.loads(data), plain(plan, ()), "it"),
            _program(plan),
            _placements(plan),
            _derived(plan),
        ),
        "",
    )


def _fields(given: Any, known: Any, where: str) -> Iterator[str]:
    """Fields that a plan has not, or that are missing: read as they stand, these would mean nothing or a default."""
    if isinstance(given, dict) and isinstance(known, dict):
        yield from (f"{where} has no field `{key}`" for key in given.keys() - known.keys())
        yield from (f"{where} lacks the field `{key}`" for key in known.keys() - given.keys())
        for key in given.keys() & known.keys():
            yield from _fields(given[key], known[key], f"`{key}`" if where == "it" else f"{where[:-1]}.{key}`")
    elif isinstance(given, list) and isinstance(known, list):
        for i, (one, other) in enumerate(zip(given, known, strict=True)):
            yield from _fields(one, other, f"{where[:-1]}[{i}]`" if where != "it" else where)


def _cluster(plan: Plan) -> Iterator[str]:
    """Numbers of a cluster that no program can state."""
    cluster = plan.cluster
    kinds = ClusterOptions.kinds()
    for key, value in (("nodes", cluster.nodes), ("devices_per_node", cluster.devices_per_node)):
        if not 1 <= value <= 10**8:
            yield f"`{key}` of its cluster takes {kinds[key]}, not `{value}`"
    hosts = (0,) if plan.deploy.dock.mode == "central" else range(min(cluster.nodes, len(plan.docks.warehouses) + 1))
    if tuple(hosts) != plan.docks.warehouses:
        yield "its warehouses are not on the hosts of its cluster"
    if cluster.devices > 10**8:
        yield "its cluster has more devices than can be counted"
    low = [key for key, value in _numbers(plain(cluster), "cluster") if value < 0]
    yield from (f"`{key}` is below 0" for key in low)


def _numbers(value: Any, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, f"{where}.{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield where, value


def _program(plan: Plan) -> Iterator[str]:
    """A graph or a deploy that no program leads to."""
    lowered = _lowered(plan)
    evaluated = [c for e in plan.deploy.evaluations for c in e.columns]
    told = checks.check(lowered.graph, lowered.library, lowered.warnings, evaluated, lowered.dropped)
    told = [*told, *(d for check in CHECKS.values() for d in check(plan))]
    if errors := [d for d in told if d.severity == "error"]:
        raise Fault(*errors)
    yield from _differences(plain(plan.graph), plain(lowered.graph), "graph")
    yield from _differences(plain(plan.deploy), plain(lowered.deploy), "deploy")
    for model in plan.deploy.models.values():
        yield from _model(model)


def _lowered(plan: Plan) -> LoweredProgram:
    """What comes of the program that says what a plan says. Raises Fault."""
    if odd := next((n for n in _names(plan) if not NAME.fullmatch(n)), ""):
        raise Fault(Diagnostic("bad-plan", f"`{odd}` is not a name"))
    context = LoweringContext(
        load=lambda target, of_file, span: parse("", target),
        library=algorithms.library(),
        engines=ENGINES,
        load_model=lambda target, folder, dtype, span: plan.deploy.models[target],
    )
    return lower(parse(write(restated(plan)), ""), context)


def _names(plan: Plan) -> Iterator[str]:
    """What a program names by itself; the grammar would stop at the first character that is in no name."""
    graph = plan.graph
    deploy = plan.deploy
    yield from (graph.name, deploy.name, plan.cluster.name, *graph.params, *deploy.models, *deploy.data)
    yield from (part.name for parts in (graph.columns, graph.states, graph.workers) for part in parts)
    yield from (name for node in graph.nodes for name in node.name.split("."))


def _placements(plan: Plan) -> Iterator[str]:
    """Engines and layouts of placements that no deploy can state."""
    placed = [p for p in plan.placements if p.pool != FUNCTIONS]
    layouts = {p.node: replace(p.layout, inner=1) for p in placed}
    engines = {p.node: p.engine for p in placed}
    stated = _lowered(replace(plan, deploy=replace(plan.deploy, layouts=layouts, engines=engines))).deploy
    assert stated is not None
    yield from _differences(plain(layouts), plain(stated.layouts), "placements")
    yield from _differences(
        plain(engines),
        plain({n: replace(e, chosen=engines[n].chosen) for n, e in stated.engines.items()}),
        "placements",
    )
    for p in placed:
        own: EngineChoice | None = plan.deploy.engines.get(p.node)
        if own is not None and (own.name != p.engine.name or own.options.items() - p.engine.options.items()):
            yield f"the engine of `{p.node}` is not the one of its deploy"


def _model(model: Model) -> Iterator[str]:
    """A model that its folder's config.json is not of; one of other tensors is told by the run."""
    if is_url(model.path) or (model.path and not is_folder(Path(model.path))):
        return
    found = models.load("./" if model.path else model.name, Path(model.path), model.dtype, NOWHERE)
    if found.tensors == model.tensors:
        yield from _differences(
            plain(replace(model, name="", path="")), plain(replace(found, name="", path="")), "model"
        )
    elif not model.path:
        yield f"the tensors of its model `{model.name}` are not those of the preset"


def _derived(plan: Plan) -> Iterator[str]:
    """Parts that are not what the passes make of the others."""
    empty: dict[str, Any] = {f.name: f.default for f in fields(Plan) if f.name in DERIVED}
    again = PASSES.after("place").apply(replace(plan, **empty))
    for part in DERIVED:
        yield from _differences(plain(getattr(plan, part)), plain(getattr(again, part)), part)


def plain(part: Any, without: Collection[str] = UNLIKE) -> Any:
    """A part of a plan as dicts, lists and values, without some fields: those in which two parts may differ."""
    if is_dataclass(part):
        return {f.name: plain(getattr(part, f.name), without) for f in fields(part) if f.name not in without}
    if isinstance(part, tuple | list):
        return [plain(item, without) for item in part]
    return {key: plain(value, without) for key, value in part.items()} if isinstance(part, dict) else part


def _differences(given: Any, made: Any, where: str) -> Iterator[str]:
    """Where a part of a plan is not as the compiler makes it."""
    if isinstance(given, dict) and isinstance(made, dict) and given.keys() == made.keys():
        for key in given:
            yield from _differences(given[key], made[key], f"{where}.{key}")
    elif isinstance(given, list) and isinstance(made, list) and len(given) == len(made):
        for i, (one, other) in enumerate(zip(given, made, strict=True)):
            yield from _differences(one, other, f"{where}[{i}]")
    elif given != made or isinstance(given, bool) != isinstance(made, bool):
        yield f"`{where}` is not what the compiler makes of its program"
