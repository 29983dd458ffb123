"""A plan or an algorithm as a set of facts that can be compared.

Invariant: everything that determines a run or a figure of the plan is a fact, under a name that users know. Three kinds
of data are not facts, because they add no information: positions in source files, explanations (reasons, formulas, the
record of a search), and tensors (the sizes of a model determine its tensors).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import msgspec

from ..hardware.cluster import Figure
from ..ir.graph import Column, Expr, Graph, Node
from ..ir.plan import Plan
from ..model.layers import BEFORE, Layer
from ..passes.facts import Fact, Section, field_facts
from ..passes.order import ORDER


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
        **{step.title: step.facts(plan) for step in ORDER},
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
            "adapter": Fact(str(worker.adapter) if worker.adapter else None),
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
        "without its adapter, for": Fact(node.base_of or None),
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
        shape = field_facts(model, skip=("tensors", "stack"))
        shape["layers"] = Fact(describe_layers(model.stack))
        section[f"model {name}"] = {**shape, "parameters": Fact(float(model.parameters), "parameters")}
    for name, data in plan.deploy.data.items():
        section[f"data {name}"] = field_facts(data, skip=("name", "stated"))
    for evaluation in plan.deploy.evaluations:
        section[f"evaluate {evaluation.task}"] = field_facts(
            evaluation, skip=("name",) if evaluation.name else ("name", "data")
        )
    section["run"] = field_facts(plan.deploy.run)
    return section


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


def describe_layers(stack: tuple[Layer, ...]) -> str:
    """Describe the layers of a model, in order.

    A pattern that repeats is described once.
    """
    period = next(size for size in range(1, len(stack) + 1) if stack == stack[:size] * (len(stack) // size))
    pattern = "; ".join(map(_describe_layer, stack[:period]))
    return f"{len(stack) // period} x ({pattern})" if period < len(stack) else pattern


def _describe_layer(layer: Layer) -> str:
    """Describe layers of one kind: their number, sizes and options."""
    parts = []
    for part in (layer.mixer, layer.mlp):
        sizes = {name: value for name, value in msgspec.structs.asdict(part).items() if value}
        words = ", ".join(name if value is True else f"{name} {value}" for name, value in sizes.items())
        parts.append(f"{type(part).__struct_config__.tag} ({words})")
    if layer.norms != BEFORE:
        before, after = (", ".join(names) or "none" for names in (layer.norms.before, layer.norms.after))
        parts.append(f"norms of inputs ({before}), of outputs ({after})")
    return f"{layer.count} x {', '.join(parts)}"
