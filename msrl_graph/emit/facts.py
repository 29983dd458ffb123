"""A plan as facts that can be compared with another plan's.

Invariant: everything that determines a run or its figures is a fact, under a name that users know. Left out is what
adds nothing: source positions, explanations (reasons, formulas, the record of a search), and tensors (the sizes of a
model determine them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from ..hardware.cluster import Figure
from ..ir.graph import Column, Expr, Graph, Node
from ..ir.plan import Plan, Reshard
from .humanize import doing


@dataclass(frozen=True)
class Fact:
    """A value; numbers with a `unit` (bytes, s, …) can be subtracted.

    A `detail` follows from other facts.
    """

    value: str | float | bool | None
    unit: str = ""
    detail: bool = False


# By item (a node, an edge, a phase) and by property.
Section = dict[str, dict[str, Fact]]


def facts(plan: Plan) -> dict[str, Section]:
    """Return all facts of a plan, by section, in reading order."""
    graph = plan.graph
    deploy = plan.deploy
    cluster = plan.cluster
    program = {"": {"algorithm": Fact(graph.name), "deploy": Fact(deploy.name), "cluster": Fact(cluster.name)}}
    return {
        "Program": program,
        "Params": {name: {"": Fact(value)} for name, value in graph.params.items()},
        "Columns and workers": _declared(graph),
        "States": {n.name: _node(n) for n in graph.nodes},
        "Edges": _edges(graph),
        "Models, data and run": _deployed(plan),
        "Cluster": _cluster(plan),
        "Placements": _placements(plan),
        "Transfer dock": _docks(plan),
        "Resharding": {r.name: _reshard(r) for r in plan.reshards},
        "Sample edges": _traffic(plan),
        "Schedule": _schedule(plan),
        "Memory": _memory(plan),
        "Seconds": _seconds(plan),
        "Environment": _surroundings(plan),
        "Notes": {f"{n.about}: {n.text}": {"": Fact(n.text)} for n in plan.notes},
    }


def _declared(graph: Graph) -> Section:
    found: Section = {"rows": {"an iteration": Fact(" x ".join(map(str, graph.rows)))}}
    if graph.under != tuple(range(-1, len(graph.rows) - 1)):
        found["rows"]["each under level"] = Fact(", ".join(map(str, graph.under[1:])))
    for c in graph.columns:
        found[f"column {c.name}"] = {"type": Fact(_type(c)), "level": Fact(c.level)}
    for w in graph.workers:
        found[f"worker {w.name}"] = {
            "kind": Fact(w.kind),
            "frozen": Fact(w.frozen),
            "model": Fact(w.model or None),
            "follows": Fact(w.follows or None),
            "every": Fact(w.every if w.every != 1 else None),
            "decay": Fact(w.decay or None),
        }
    for s in graph.states:
        found[f"state {s.name}"] = {
            "type": Fact(s.element),
            "per": Fact(s.per or None),
            "initial": Fact(str(s.initial)),
        }
    return found


def _type(column: Column) -> str:
    dims = ", ".join(d.like or f"{'<= ' if d.ragged else ''}{d.size}" for d in column.dims)
    return (f"{column.element}[{dims}]" if dims else column.element) + (f" per {column.per}" if column.per else "")


def _node(node: Node) -> dict[str, Fact]:
    names = {"reads": node.reads, "writes": node.writes, "reads states": node.states, "gives": node.gives}
    found = {k: Fact(", ".join(v)) for k, v in names.items() if v}
    return {
        "worker": Fact(node.worker),
        "verb": Fact(node.verb),
        **found,
        "per": Fact(node.per),
        "whole mini-batch": Fact(node.whole or None),
        **_attributes(node.attributes),
    }


def _attributes(stated: Mapping[str, Expr]) -> dict[str, Fact]:
    return {name: Fact(value.value if _number(value) else str(value)) for name, value in stated.items()}


def _number(value: Expr) -> bool:
    return value.kind == "number" and not value.unit


def _edges(graph: Graph) -> Section:
    found: Section = {}
    for e in graph.edges:
        columns = graph.flow.carried[e.src, e.dst] if e.kind == "sample" else ()
        carries = {"columns": Fact(", ".join(columns))} if columns else {}
        found[f"{e.src} {'->' if e.kind == 'sample' else '=>'} {e.dst}"] = {**carries, **_attributes(e.attributes)}
    return found


def _deployed(plan: Plan) -> Section:
    found: Section = {}
    for name, model in plan.deploy.models.items():
        shape = _leaves(model, skip=("tensors",))
        found[f"model {name}"] = {**shape, "parameters": Fact(float(model.parameters), "parameters")}
    for name, data in plan.deploy.data.items():
        found[f"data {name}"] = _leaves(data, skip=("name", "stated"))
    for e in plan.deploy.evaluations:
        found[f"evaluate {e.task}"] = _leaves(e, skip=("name",) if e.name else ("name", "data"))
    found["run"] = _leaves(plan.deploy.run)
    return found


def _leaves(part: Any, skip: Sequence[str] = ()) -> dict[str, Fact]:
    """Return the fields of a part; those of its parts are named `name.name`."""
    if isinstance(part, dict):
        items = part.items()
    elif is_dataclass(part):
        items = {f.name: getattr(part, f.name) for f in fields(part) if f.name not in ("span", *skip)}.items()
    elif isinstance(part, tuple):
        return {"": Fact(", ".join(map(str, part)))}
    else:
        return {"": Fact(part)}
    return {f"{k}.{inner}" if inner else str(k): fact for k, v in items for inner, fact in _leaves(v).items()}


def _cluster(plan: Plan) -> Section:
    device = plan.cluster.device
    found = {
        "hosts": Fact(float(plan.cluster.nodes), "hosts"),
        "devices a host": Fact(float(plan.cluster.devices_per_node), "devices"),
        "interface": Fact(plan.cluster.interface),
    }
    found |= {"device": Fact(device.name), "backend": Fact(device.backend), "resource": Fact(device.resource)}
    found |= _figure("network", plan.cluster.network, "bytes/s")
    found["peaks"] = Fact(", ".join(device.peaks))
    units = {"memory": "bytes", "host_memory": "bytes", "launch": "s", "latency": "s"}
    for f in fields(device):
        value = getattr(device, f.name)
        if isinstance(value, Figure):
            found |= _figure(f.name.replace("_", " "), value, units.get(f.name, "bytes/s"))
    for name, figure in device.flops.items():
        found |= _figure(f"FLOP/s, {name}", figure, "FLOP/s")
    for f in fields(device.overheads):
        found |= _figure(f"overhead: {f.name}", getattr(device.overheads, f.name), "s")
    for name, collective in device.collectives.items():
        found |= {**_figure(f"{name}, at least", collective.least, "s"), **_figure(name, collective.rate, "bytes/s")}
    for name, curve in device.curves.items():
        found[f"curve of {name}"] = Fact(", ".join(f"{size:g}: {rate:g}" for size, rate in curve))
    return {"": found}


def _figure(name: str, figure: Figure, unit: str) -> dict[str, Fact]:
    return {name: Fact(figure.value, unit), f"source of {name}": Fact(figure.source)}


def _placements(plan: Plan) -> Section:
    found: Section = {}
    for pool in plan.pools:
        where = {"devices": Fact(float(pool.devices), "devices"), "first device": Fact(pool.first)}
        found[f"pool {pool.name}"] = where | {"of each host": Fact(pool.each, detail=True)}
    for p in plan.placements:
        more = {
            f"layout: {k}": replace(v, detail=True)
            for k, v in _leaves(p.layout).items()
            if k in ("zero", "inner", "cp_kind", "stages")
        }
        layout = f"{p.layout} zero{p.layout.zero}" if p.layout.zero > 1 else str(p.layout)
        options = {f"engine option {k}": Fact(v) for k, v in p.engine.options.items()}
        where = {
            "pool": Fact(p.pool),
            "first device": Fact(p.first, detail=True),
            "of each host": Fact(p.each, detail=True),
            "devices": Fact(float(p.layout.devices), "devices"),
        }
        engine = {"engine": Fact(p.engine.name), **options, "engine chosen by": Fact(p.engine.chosen, detail=True)}
        weights = {"weights": Fact(float(p.weight_bytes), "bytes")}
        found[p.node] = {"layout": Fact(layout), **more, **engine, **where, **weights}
    return found


def _docks(plan: Plan) -> Section:
    docks = plan.docks
    found: Section = {"": {"mode": Fact(docks.mode), "deadline of a wait": Fact(docks.deadline, "s")}}
    found[""]["warehouses"] = Fact(float(len(docks.warehouses)), "warehouses")
    found[""]["rows a host"] = Fact(float(docks.capacity), "bytes") if docks.capacity else Fact("limited by memory")
    found[""]["largest share"] = Fact(docks.imbalance, "x the even share")
    for c in docks.controllers:
        found[f"controller of {c.node}"] = _leaves(c, skip=("node",))
    return found


def _reshard(r: Reshard) -> dict[str, Fact]:
    found = {"mode": Fact(r.mode), "order": Fact(r.order)}
    found["moves a device"] = Fact(float(sum(w.bytes for w in r.ways)), "bytes")
    for w in r.ways:
        among = (
            f" in groups of {w.ranks}, blocks of {w.block}{' of each stage' if w.across else ''}" if w.ranks > 1 else ""
        )
        found[w.of] = Fact(f"{w.how}{among}")
        found[f"{w.of}, a device"] = Fact(float(w.bytes), "bytes", True)
    found["buckets"] = Fact(float(len(r.buckets)), "buckets", True)
    names = {
        "bucket": r.bucket_bytes,
        "update weights a device": r.update_bytes_per_device,
        "generation weights a device": r.generate_bytes_per_device,
        "released a device": r.released_bytes_per_device,
        "peak a device": r.peak_bytes_per_device,
        "naive would leave": r.redundant_bytes,
    }
    found |= {k: Fact(float(v), "bytes") for k, v in names.items()}
    for s in (*r.steps, r.swap_in, *([r.copied] if r.copied else [])):
        found[f"{s.name}: bytes"] = Fact(float(s.bytes), "bytes", True)
        found[f"{s.name}: seconds"] = Fact(s.seconds.value, "s", True)
    return found


def _traffic(plan: Plan) -> Section:
    found: Section = {"all": {"bytes": Fact(float(sum(t.bytes for t in plan.traffic)), "bytes")}}
    for t in plan.traffic:
        found[f"{t.src} -> {t.dst}"] = {
            "bytes": Fact(float(t.bytes), "bytes"),
            "rows": Fact(float(t.rows), "rows", True),
            "dock": Fact(t.seconds.value, "s", True),
            "central": Fact(t.central_seconds.value, "s", True),
        }
    return found


def _schedule(plan: Plan) -> Section:
    found: Section = {}
    for s in plan.schedule:
        found[f"{s.task}, {s.pool}"] = {"": Fact(doing(plan, s))}
    return found


def _memory(plan: Plan) -> Section:
    found: Section = {}
    for m in plan.memory:
        items = {k: Fact(float(v), "bytes", True) for k, v in m.items.items()}
        where = f"{m.place}, pool {m.pool}" if m.place == "device" else m.place
        total = {"peak": Fact(float(m.total), "bytes"), "of": Fact(m.capacity.value, "bytes", True)}
        found[f"{where}, {m.phase}"] = {**total, **items}
    return found


def _surroundings(plan: Plan) -> Section:
    found = {f"{s.pool}, interpreter": {"": Fact(s.python)} for s in plan.surroundings if s.python}
    return found | {f"{s.pool}, {x.name}": {"": Fact(x.value)} for s in plan.surroundings for x in s.settings}


def _seconds(plan: Plan) -> Section:
    if plan.estimate is None:
        return {}
    whole = plan.estimate.iteration_seconds
    rate = plan.estimate.tokens_per_second_per_device
    found = {"an iteration": {"": Fact(whole.value, "s")}, "throughput": {"": Fact(rate.value, "tokens/s/device")}}
    if (stale := plan.estimate.staleness) is not None:
        found["staleness"] = {"": Fact(stale.mean.value, "versions")}
        found["the same pools in step"] = {"": Fact(stale.in_step_seconds.value, "s")}
    return found | {p.name: {"": Fact(p.seconds.value, "s")} for p in plan.estimate.phases}
