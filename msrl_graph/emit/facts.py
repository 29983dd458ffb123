"""A plan or an algorithm as a set of facts that can be compared.

Invariant: everything that determines a run or a figure of the plan is a fact, under a name that users know. Three kinds
of data are not facts, because they add no information: positions in source files, explanations (reasons, formulas, the
record of a search), and tensors (the sizes of a model determine its tensors).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from ..hardware.cluster import Figure
from ..ir.graph import Column, Expr, Graph, Node
from ..ir.plan import Plan
from ..ir.resharding_plan import Reshard
from .humanize import describe_instructions, describe_layer


@dataclass(frozen=True)
class Fact:
    """A value of a plan, for comparison with another plan.

    - `unit`: the unit of a number (bytes, s, …). Numbers with a unit can be subtracted from each other.
    - `detail`: whether the fact only follows from other facts of the same item.
    """

    value: str | float | bool | None
    unit: str = ""
    detail: bool = False


# The facts of a section, by item (a node, an edge, a phase) and by the item's property.
Section = dict[str, dict[str, Fact]]


def facts(plan: Plan) -> dict[str, Section]:
    """Return all facts of a plan, by section, in the order of the plan's text."""
    graph = plan.graph
    deploy = plan.deploy
    cluster = plan.cluster
    program = {"": {"algorithm": Fact(graph.name), "deploy": Fact(deploy.name), "cluster": Fact(cluster.name)}}
    return {
        "Program": program,
        **graph_facts(graph),
        "Models, data and run": _deploy_facts(plan),
        "Cluster": _cluster_facts(plan),
        "Placements": _placement_facts(plan),
        "Transfer dock": _dock_facts(plan),
        "Resharding": {reshard.name: _reshard_facts(reshard) for reshard in plan.reshards},
        "Sample edges": _traffic_facts(plan),
        "Schedule": _schedule_facts(plan),
        "Memory": _memory_facts(plan),
        "Seconds": _time_facts(plan),
        "Environment": _environment_facts(plan),
        "Notes": {f"{note.about}: {note.text}": {"": Fact(note.text)} for note in plan.notes},
    }


def graph_facts(graph: Graph) -> dict[str, Section]:
    """Return the facts of an algorithm, by section."""
    return {
        "Params": {name: {"": Fact(value)} for name, value in graph.params.items()},
        "Columns and workers": _declaration_facts(graph),
        "States": {node.name: _node_facts(node) for node in graph.nodes},
        "Edges": _edge_facts(graph),
    }


def _declaration_facts(graph: Graph) -> Section:
    section: Section = {"rows": {"an iteration": Fact(" x ".join(map(str, graph.rows)))}}
    if graph.under != tuple(range(-1, len(graph.rows) - 1)):
        section["rows"]["each under level"] = Fact(", ".join(map(str, graph.under[1:])))
    for column in graph.columns:
        section[f"column {column.name}"] = {"type": Fact(_format_type(column)), "level": Fact(column.level)}
    for worker in graph.workers:
        section[f"worker {worker.name}"] = {
            "kind": Fact(worker.kind),
            "frozen": Fact(worker.frozen),
            "model": Fact(worker.model or None),
            "follows": Fact(worker.follows or None),
            "every": Fact(worker.every if worker.every != 1 else None),
            "decay": Fact(worker.decay or None),
            "freeze": Fact(", ".join(worker.freeze) or None),
        }
    for state in graph.states:
        section[f"state {state.name}"] = {
            "type": Fact(state.element),
            "per": Fact(state.per or None),
            "initial": Fact(str(state.initial)),
        }
    return section


def _format_type(column: Column) -> str:
    dims = ", ".join(dim.like or f"{'<= ' if dim.ragged else ''}{dim.size}" for dim in column.dims)
    return (f"{column.element}[{dims}]" if dims else column.element) + (f" per {column.per}" if column.per else "")


def _node_facts(node: Node) -> dict[str, Fact]:
    names = {"reads": node.reads, "writes": node.writes, "reads states": node.states, "gives": node.gives}
    lists = {name: Fact(", ".join(values)) for name, values in names.items() if values}
    return {
        "worker": Fact(node.worker),
        "verb": Fact(node.verb),
        **lists,
        "per": Fact(node.per),
        "whole mini-batch": Fact(node.whole or None),
        **_attribute_facts(node.attributes),
    }


def _attribute_facts(stated: Mapping[str, Expr]) -> dict[str, Fact]:
    return {name: Fact(value.value if _is_number(value) else str(value)) for name, value in stated.items()}


def _is_number(value: Expr) -> bool:
    return value.kind == "number" and not value.unit


def _edge_facts(graph: Graph) -> Section:
    section: Section = {}
    for edge in graph.edges:
        columns = graph.flow.carried[edge.src, edge.dst] if edge.kind == "sample" else ()
        carries = {"columns": Fact(", ".join(columns))} if columns else {}
        section[f"{edge.src} {'->' if edge.kind == 'sample' else '=>'} {edge.dst}"] = {
            **carries,
            **_attribute_facts(edge.attributes),
        }
    return section


def _deploy_facts(plan: Plan) -> Section:
    section: Section = {}
    for name, model in plan.deploy.models.items():
        shape = _field_facts(model, skip=("tensors", "stack"))
        shape["layers"] = Fact("; ".join(map(describe_layer, model.stack)))
        section[f"model {name}"] = {**shape, "parameters": Fact(float(model.parameters), "parameters")}
    for name, data in plan.deploy.data.items():
        section[f"data {name}"] = _field_facts(data, skip=("name", "stated"))
    for evaluation in plan.deploy.evaluations:
        section[f"evaluate {evaluation.task}"] = _field_facts(
            evaluation, skip=("name",) if evaluation.name else ("name", "data")
        )
    section["run"] = _field_facts(plan.deploy.run)
    return section


def _field_facts(part: Any, skip: Sequence[str] = ()) -> dict[str, Fact]:
    """Return the fields of a dataclass or dict as facts, by name.

    A field of a nested object has a dotted name, `field.subfield`.
    """
    if isinstance(part, dict):
        items = part.items()
    elif is_dataclass(part):
        items = {
            field.name: getattr(part, field.name) for field in fields(part) if field.name not in ("span", *skip)
        }.items()
    elif isinstance(part, tuple):
        return {"": Fact(", ".join(map(str, part)))}
    else:
        return {"": Fact(part)}
    return {
        f"{name}.{inner}" if inner else str(name): fact
        for name, value in items
        for inner, fact in _field_facts(value).items()
    }


def _cluster_facts(plan: Plan) -> Section:
    device = plan.cluster.device
    facts_found = {
        "hosts": Fact(float(plan.cluster.nodes), "hosts"),
        "devices a host": Fact(float(plan.cluster.devices_per_node), "devices"),
        "interface": Fact(plan.cluster.interface),
    }
    facts_found |= {"device": Fact(device.name), "backend": Fact(device.backend), "resource": Fact(device.resource)}
    facts_found |= _figure_facts("network", plan.cluster.network, "bytes/s")
    facts_found["peaks"] = Fact(", ".join(device.peaks))
    units = {"memory": "bytes", "host_memory": "bytes", "launch": "s", "latency": "s"}
    for device_field in fields(device):
        value = getattr(device, device_field.name)
        if isinstance(value, Figure):
            facts_found |= _figure_facts(
                device_field.name.replace("_", " "), value, units.get(device_field.name, "bytes/s")
            )
    for name, figure in device.flops.items():
        facts_found |= _figure_facts(f"FLOP/s, {name}", figure, "FLOP/s")
    for device_field in fields(device.overheads):
        facts_found |= _figure_facts(
            f"overhead: {device_field.name}", getattr(device.overheads, device_field.name), "s"
        )
    for name, collective in device.collectives.items():
        facts_found |= {
            **_figure_facts(f"{name}, at least", collective.least, "s"),
            **_figure_facts(name, collective.rate, "bytes/s"),
        }
    for name, curve in device.curves.items():
        facts_found[f"curve of {name}"] = Fact(", ".join(f"{size:g}: {rate:g}" for size, rate in curve))
    return {"": facts_found}


def _figure_facts(name: str, figure: Figure, unit: str) -> dict[str, Fact]:
    return {name: Fact(figure.value, unit), f"source of {name}": Fact(figure.source)}


def _placement_facts(plan: Plan) -> Section:
    section: Section = {}
    for pool in plan.pools:
        where = {"devices": Fact(float(pool.devices), "devices"), "first device": Fact(pool.first)}
        section[f"pool {pool.name}"] = where | {"of each host": Fact(pool.each, detail=True)}
    for placement in plan.placements:
        more = {
            f"layout: {name}": replace(fact, detail=True)
            for name, fact in _field_facts(placement.layout).items()
            if name in ("zero", "inner", "cp_kind", "stages")
        }
        layout = (
            f"{placement.layout} zero{placement.layout.zero}" if placement.layout.zero > 1 else str(placement.layout)
        )
        options = {f"engine option {option}": Fact(value) for option, value in placement.engine.options.items()}
        where = {
            "pool": Fact(placement.pool),
            "first device": Fact(placement.first, detail=True),
            "of each host": Fact(placement.each, detail=True),
            "devices": Fact(float(placement.layout.devices), "devices"),
        }
        engine = {
            "engine": Fact(placement.engine.name),
            **options,
            "engine chosen by": Fact(placement.engine.chosen, detail=True),
        }
        weights = {"weights": Fact(float(placement.weight_bytes), "bytes")}
        section[placement.node] = {"layout": Fact(layout), **more, **engine, **where, **weights}
    return section


def _dock_facts(plan: Plan) -> Section:
    docks = plan.docks
    section: Section = {"": {"mode": Fact(docks.mode), "deadline of a wait": Fact(docks.deadline, "s")}}
    section[""]["warehouses"] = Fact(float(len(docks.warehouses)), "warehouses")
    section[""]["rows a host"] = Fact(float(docks.capacity), "bytes") if docks.capacity else Fact("limited by memory")
    section[""]["largest share"] = Fact(docks.imbalance, "x the even share")
    for controller in docks.controllers:
        section[f"controller of {controller.node}"] = _field_facts(controller, skip=("node",))
    return section


def _reshard_facts(reshard: Reshard) -> dict[str, Fact]:
    facts_found = {"mode": Fact(reshard.mode), "order": Fact(reshard.order)}
    facts_found["moves a device"] = Fact(float(sum(route.bytes for route in reshard.ways)), "bytes")
    for route in reshard.ways:
        among = (
            f" in groups of {route.ranks}, blocks of {route.block}{' of each stage' if route.across else ''}"
            if route.ranks > 1
            else ""
        )
        facts_found[route.of] = Fact(f"{route.how}{among}")
        facts_found[f"{route.of}, a device"] = Fact(float(route.bytes), "bytes", True)
    facts_found["buckets"] = Fact(float(len(reshard.buckets)), "buckets", True)
    names = {
        "bucket": reshard.bucket_bytes,
        "update weights a device": reshard.update_bytes_per_device,
        "generation weights a device": reshard.generate_bytes_per_device,
        "released a device": reshard.released_bytes_per_device,
        "peak a device": reshard.peak_bytes_per_device,
        "naive would leave": reshard.redundant_bytes,
    }
    facts_found |= {name: Fact(float(size), "bytes") for name, size in names.items()}
    for step in (*reshard.steps, reshard.swap_in, *([reshard.copied] if reshard.copied else [])):
        facts_found[f"{step.name}: bytes"] = Fact(float(step.bytes), "bytes", True)
        facts_found[f"{step.name}: seconds"] = Fact(step.seconds.value, "s", True)
    return facts_found


def _traffic_facts(plan: Plan) -> Section:
    section: Section = {"all": {"bytes": Fact(float(sum(traffic.bytes for traffic in plan.traffic)), "bytes")}}
    for traffic in plan.traffic:
        section[f"{traffic.src} -> {traffic.dst}"] = {
            "bytes": Fact(float(traffic.bytes), "bytes"),
            "rows": Fact(float(traffic.rows), "rows", True),
            "dock": Fact(traffic.seconds.value, "s", True),
            "central": Fact(traffic.central_seconds.value, "s", True),
        }
    return section


def _schedule_facts(plan: Plan) -> Section:
    section: Section = {}
    for stream in plan.schedule:
        section[f"{stream.task}, {stream.pool}"] = {"": Fact(describe_instructions(plan, stream))}
    return section


def _memory_facts(plan: Plan) -> Section:
    section: Section = {}
    for entry in plan.memory:
        items = {item: Fact(float(size), "bytes", True) for item, size in entry.items.items()}
        where = f"{entry.place}, pool {entry.pool}" if entry.place == "device" else entry.place
        total = {"peak": Fact(float(entry.total), "bytes"), "of": Fact(entry.capacity.value, "bytes", True)}
        section[f"{where}, {entry.phase}"] = {**total, **items}
    return section


def _environment_facts(plan: Plan) -> Section:
    section = {
        f"{environment.pool}, interpreter": {"": Fact(environment.python)}
        for environment in plan.surroundings
        if environment.python
    }
    return section | {
        f"{environment.pool}, {setting.name}": {"": Fact(setting.value)}
        for environment in plan.surroundings
        for setting in environment.settings
    }


def _time_facts(plan: Plan) -> Section:
    if plan.estimate is None:
        return {}
    iteration = plan.estimate.iteration_seconds
    rate = plan.estimate.tokens_per_second_per_device
    section = {
        "an iteration": {"": Fact(iteration.value, "s")},
        "throughput": {"": Fact(rate.value, "tokens/s/device")},
    }
    if (stale := plan.estimate.staleness) is not None:
        section["staleness"] = {"": Fact(stale.mean.value, "versions")}
        section["the same pools in step"] = {"": Fact(stale.in_step_seconds.value, "s")}
    return section | {phase.name: {"": Fact(phase.seconds.value, "s")} for phase in plan.estimate.phases}
