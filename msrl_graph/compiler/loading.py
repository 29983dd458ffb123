"""Loading of plans from files and scripts.

Invariant: a loaded plan has the format of this version and passes the verifier. Any other plan raises a Fault with the
code `bad-plan`. If a plan is loaded to be run, loading also checks that the compiler could have written the plan:

- The plan's graph and deploy come from a program that passes all checks.
- The plan's other parts are what the passes compute from the graph, the deploy and the placements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from .. import algorithms
from ..backends import ENGINES
from ..checks.table import check_graph, check_plan
from ..diagnostics import NOWHERE, Diagnostic, Fault
from ..dsl.lower import LoweredProgram, LoweringContext, lower
from ..dsl.parse import parse
from ..dsl.unparse import write
from ..files.paths import is_folder
from ..files.plugins import blame_plug_ins
from ..files.urls import is_url
from ..ir.options import ClusterOptions
from ..ir.plan import FORMAT_VERSION, FUNCTIONS, EngineChoice, Plan, from_json
from ..model import models
from ..model.architecture import Model
from ..passes.order import ORDER
from .pipeline import CONTEXT, PASSES
from .plan_names import find_wrong_names
from .to_program import restore_program
from .used_plugins import find_missing

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Fields that the passes fill after the placement.
DERIVED = (*(field for step in ORDER[1:] for field in step.fills), "parts")
# Fields in which two parts may differ: spans in the program, and fields of a deploy that only a search reads.
UNLIKE = {"span", "stated", "pools", "together"}


def load(data: bytes, name: str, run: bool = False) -> Plan:
    """Load a plan from a JSON text.

    `name` is the name of the plan in messages. If `run`, loading also checks that the compiler could have written the
    plan. Raises a Fault if the plan fails a check.
    """
    try:
        # The version is checked first: a plan of another format may lack the fields of this one.
        version = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("format_version", msgspec.Raw(b"1"))
        if bytes(version) != b"%d" % FORMAT_VERSION:
            wrong = f"its format is {bytes(version).decode()}, this version reads {FORMAT_VERSION}"
            raise msgspec.ValidationError(wrong)
        plan = from_json(data)
        if missing := find_missing(plan):
            raise msgspec.ValidationError(missing)
        if fault := next(chain(_check_cluster(plan), find_wrong_names(plan), PASSES.verify(plan)), ""):
            raise msgspec.ValidationError(fault)
        if run and (fault := _find_difference(plan, data)):
            raise msgspec.ValidationError(fault)
        return plan
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)
    except Fault as fault:
        first = fault.diagnostics[0]
        why = f"{first.message}{f' ({first.help})' if first.help else ''}"
    except Exception as error:  # passes and checks rely on plans of the compiler and may raise anything for others
        why = f"its parts do not fit together ({type(error).__name__}: {error})"
    help = "write it again: msrl-compile FILE --format json -o plan.json"
    raise Fault(Diagnostic("bad-plan", f"{name} is not a plan of this version: {why}", help=help)) from None


@blame_plug_ins()
def _find_difference(plan: Plan, data: bytes) -> str:
    """Describe a difference between the plan and what the compiler would write.

    `data` is the JSON text of the plan. Returns "" if there is no difference. If the compiler could not have written
    the plan, the checks and passes may also raise a Fault or any other exception.
    """
    return next(
        chain(
            _compare_fields(json.loads(data), plain(plan, ()), "it"),
            _check_program(plan),
            _check_placements(plan),
            _check_derived(plan),
        ),
        "",
    )


def _compare_fields(stated: Any, known: Any, where: str) -> Iterator[str]:
    """Report fields that only one of two JSON values has.

    `stated` is the value in the file of a plan, `known` is the value that the plan has after decoding, and `where` is
    the name of the value for messages. Decoding alone would ignore unknown fields and fill missing fields with
    defaults.
    """
    if isinstance(stated, dict) and isinstance(known, dict):
        yield from (f"{where} has no field `{key}`" for key in stated.keys() - known.keys())
        yield from (f"{where} lacks the field `{key}`" for key in known.keys() - stated.keys())
        for key in stated.keys() & known.keys():
            yield from _compare_fields(stated[key], known[key], f"`{key}`" if where == "it" else f"{where[:-1]}.{key}`")
    elif isinstance(stated, list) and isinstance(known, list):
        for index, (one, other) in enumerate(zip(stated, known, strict=True)):
            yield from _compare_fields(one, other, f"{where[:-1]}[{index}]`" if where != "it" else where)


def _check_cluster(plan: Plan) -> Iterator[str]:
    """Report the plan's numbers of hosts and devices, if no program can state them.

    Also reports warehouses on wrong hosts, and negative figures of the cluster.
    """
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
    low = [key for key, value in _list_numbers(plain(cluster), "cluster") if value < 0]
    yield from (f"`{key}` is below 0" for key in low)


def _list_numbers(value: Any, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _list_numbers(part, f"{where}.{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield where, value


def _check_program(plan: Plan) -> Iterator[str]:
    """Report a graph or a deploy that no program can produce."""
    lowered = _lower_again(plan)
    evaluated = [column for evaluation in plan.deploy.evaluations for column in evaluation.columns]
    diagnostics = check_graph(lowered.graph, lowered.library, lowered.warnings, evaluated, lowered.dropped)
    diagnostics = [
        *diagnostics,
        *(diagnostic for step in PASSES for diagnostic in check_plan(step.name, plan, CONTEXT)),
    ]
    if errors := [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]:
        raise Fault(*errors)
    yield from _list_differences(plain(plan.graph), plain(lowered.graph), "graph")
    yield from _list_differences(plain(plan.deploy), plain(lowered.deploy), "deploy")
    for model in plan.deploy.models.values():
        yield from _check_model(model)


def _lower_again(plan: Plan) -> LoweredProgram:
    """Restore the program of a plan, and lower the program again.

    Raises a Fault if the program has a mistake.
    """
    if odd := next((name for name in _list_names(plan) if not NAME.fullmatch(name)), ""):
        raise Fault(Diagnostic("bad-plan", f"`{odd}` is not a name"))
    context = LoweringContext(
        load=lambda target, of_file, span: parse("", target),
        library=algorithms.library(),
        engines=ENGINES,
        load_model=lambda target, folder, dtype, span, base: plan.deploy.models[target],
    )
    return lower(parse(write(restore_program(plan)), ""), context)


def _list_names(plan: Plan) -> Iterator[str]:
    """Yield the names that the program of a plan defines.

    The caller checks each name before the program is parsed. The parser would not detect every wrong name: it would end
    a name at the first character that names cannot have.
    """
    graph = plan.graph
    deploy = plan.deploy
    yield from (graph.name, deploy.name, plan.cluster.name, *graph.params, *deploy.models, *deploy.data)
    yield from (part.name for parts in (graph.columns, graph.states, graph.workers) for part in parts)
    yield from (name for node in graph.nodes for name in node.name.split("."))


def _check_placements(plan: Plan) -> Iterator[str]:
    """Report engines and layouts in a plan's placements that no deploy can state."""
    placed = [placement for placement in plan.placements if placement.pool != FUNCTIONS]
    layouts = {placement.node: replace(placement.layout, inner=1) for placement in placed}
    engines = {placement.node: placement.engine for placement in placed}
    stated = _lower_again(replace(plan, deploy=replace(plan.deploy, layouts=layouts, engines=engines))).deploy
    assert stated is not None
    yield from _list_differences(plain(layouts), plain(stated.layouts), "placements")
    yield from _list_differences(
        plain(engines),
        plain({node: replace(engine, chosen=engines[node].chosen) for node, engine in stated.engines.items()}),
        "placements",
    )
    for placement in placed:
        own: EngineChoice | None = plan.deploy.engines.get(placement.node)
        if own is not None and (
            own.name != placement.engine.name or own.options.items() - placement.engine.options.items()
        ):
            yield f"the engine of `{placement.node}` is not the one of its deploy"


def _check_model(model: Model) -> Iterator[str]:
    """Report a model that differs from the config.json of its folder.

    If only the tensors in the folder differ from the model, nothing is reported, because the run reports this
    difference.
    """
    if any(is_url(folder) or not is_folder(Path(folder)) for folder in model.folders):
        return
    loaded = models.reload(replace(model, span=NOWHERE))
    if loaded.tensors == model.tensors:
        yield from _list_differences(
            plain(replace(model, name="", path="")), plain(replace(loaded, name="", path="")), "model"
        )
    elif not model.path:
        yield f"the tensors of its model `{model.name}` are not those of the preset"


def _check_derived(plan: Plan) -> Iterator[str]:
    """Report parts of a plan that differ from what the passes compute.

    The passes run again on the plan's graph, deploy and placements.
    """
    bare = Plan(plan.graph, plan.cluster, plan.deploy)
    empty: dict[str, Any] = {part: getattr(bare, part) for part in DERIVED}
    again = PASSES.after("place").apply(replace(plan, **empty))
    for part in DERIVED:
        yield from _list_differences(plain(getattr(plan, part)), plain(getattr(again, part)), part)


def plain(part: Any, without: Collection[str] = UNLIKE) -> Any:
    """Convert a part of a plan to dicts, lists, strings, numbers and truth values.

    The fields in `without` are left out. The default is the fields that can differ between two equal plans.
    """
    if isinstance(part, msgspec.Struct):
        return plain(msgspec.to_builtins(part), without)  # its tuples stay tuples
    if is_dataclass(part):
        return {
            field.name: plain(getattr(part, field.name), without) for field in fields(part) if field.name not in without
        }
    if isinstance(part, tuple | list):
        return [plain(item, without) for item in part]
    return {key: plain(value, without) for key, value in part.items()} if isinstance(part, dict) else part


def _list_differences(stated: Any, computed: Any, where: str) -> Iterator[str]:
    """Report where a part of a plan differs from the part that the compiler computes."""
    if isinstance(stated, dict) and isinstance(computed, dict) and stated.keys() == computed.keys():
        for key in stated:
            yield from _list_differences(stated[key], computed[key], f"{where}.{key}")
    elif isinstance(stated, list) and isinstance(computed, list) and len(stated) == len(computed):
        for index, (one, other) in enumerate(zip(stated, computed, strict=True)):
            yield from _list_differences(one, other, f"{where}[{index}]")
    elif stated != computed or isinstance(stated, bool) != isinstance(computed, bool):
        yield f"`{where}` is not what the compiler makes of its program"
