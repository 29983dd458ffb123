"""What a picture of a stage shows, apart from drawing: grouped boxes, and arrows.

Invariant: boxes are in dependency order, so that every sample arrow leads forward; a group is a worker (of a graph) or
a pool (of a plan), occurs once, and is in the order of its first box.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..ir.graph import Edge, Graph, Node
from ..ir.plan import Plan, Reshard
from .humanize import duration, many, size
from .placed_graph import placed


@dataclass(frozen=True)
class Box:
    """A box of a picture.

    `kind` is source, function, generate, infer, update (nodes), dock, allgather_swap or send; `group` is "" for boxes
    outside groups.
    """

    name: str
    kind: str
    group: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arrow:
    """An arrow of a picture.

    `kind` is sample, reshard (dashed), or kept (dotted): a state, from the node that sets it to a node that reads it an
    iteration later.
    """

    src: str
    dst: str
    kind: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A picture; `groups` are names with remarks."""

    title: str
    groups: tuple[tuple[str, str], ...]
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def graph_picture(graph: Graph) -> Picture:
    """Return nodes by worker, and sample edges with their columns."""
    boxes = []
    for node in graph.nodes:
        scope = (*((f"per {node.per}",) if node.per != "row" else ()), *_sets(node))
        # The source belongs to no worker.
        boxes.append(Box(node.name, _kind(graph, node), "" if node.verb == "source" else node.worker, scope))
    groups = []
    for w in graph.workers:
        words = [
            w.kind,
            *([w.following or "frozen"] if w.frozen else []),
            *([f"model {w.model}"] if w.model and w.model != w.kind else []),
        ]
        groups.append((w.name, ", ".join(words)))
    arrows = [Arrow(e.src, e.dst, e.kind, (*_columns(graph, e), *_stated(e))) for e in graph.edges]
    arrows += _kept(graph)
    return Picture(graph.name, _named(groups, boxes), tuple(boxes), tuple(arrows))


def plan_picture(plan: Plan) -> Picture:
    """Return nodes by pool, with layouts and seconds, and what each edge moves."""
    graph = plan.graph
    seconds = {p.name: p.seconds.value for p in plan.estimate.phases} if plan.estimate else {}
    boxes = []
    for node in graph.nodes:
        p = plan.placement(node.name)
        where = (f"{p.layout}, {p.engine.name}",) if any(o.name == p.pool for o in plan.pools) else ()
        takes = (duration(seconds[node.name]),) if node.name in seconds else ()
        boxes.append(Box(node.name, _kind(graph, node), p.pool, (*where, *takes, *_sets(node))))
    moved = {(t.src, t.dst): t for t in plan.traffic}
    arrows = []
    for e in graph.samples():
        t = moved.get((e.src, e.dst))
        much = (f"{size(t.bytes)}, {duration(t.seconds.value)}",) if t is not None and t.bytes else ()
        arrows.append(Arrow(e.src, e.dst, e.kind, (*_columns(graph, e), *much, *_stated(e))))
    arrows += [Arrow(r.src, r.dst, "reshard", _moves(r)) for r in plan.reshards]
    arrows += _kept(graph)
    return Picture(f"{graph.name} on {plan.cluster.name}", _pools(plan, boxes), tuple(boxes), tuple(arrows))


def placed_picture(plan: Plan) -> Picture:
    """Return nodes by pool, with the docks, allgather-swaps and sends between them."""
    graph = plan.graph
    vertices, arcs = placed(plan)
    found = {v.name: v for v in vertices}
    feeds = {a.src: a.dst for a in arcs if found[a.src].kind != "state"}
    boxes = []
    for node in graph.nodes:
        into = [n for n, dst in feeds.items() if dst == node.name]
        # A dock is before its node. A box that brings weights is between the node and the update, which comes later.
        order = [
            *(n for n in into if found[n].kind == "dock"),
            node.name,
            *(n for n in into if found[n].kind != "dock"),
        ]
        for v in (found[n] for n in order):
            facts = tuple(f"{k} {w}" for k, w in v.facts.items())
            if v.kind == "state":
                boxes.append(Box(v.name, _kind(graph, node), v.where, (*facts, *_sets(node))))
            else:
                boxes.append(Box(v.name, v.kind, "", (v.where, *facts)))
    arrows = []
    for a in arcs:
        columns = graph.flow.carried.get((a.src, feeds.get(a.dst, "")), ()) if a.kind == "sample" else ()
        arrows.append(Arrow(a.src, a.dst, a.kind, (", ".join(columns),) if columns else ()))
    arrows += _kept(graph)
    return Picture(f"{graph.name} on {plan.cluster.name}, placed", _pools(plan, boxes), tuple(boxes), tuple(arrows))


def _kind(graph: Graph, node: Node) -> str:
    if node.verb == "source" or graph.worker(node.worker).kind != "function":
        return node.verb
    return "function"


def _sets(node: Node) -> tuple[str, ...]:
    return (f"sets {', '.join(node.sets)}",) if node.sets else ()


def _kept(graph: Graph) -> list[Arrow]:
    """Return arrows of states to their readers; boxes show their setters."""
    found: dict[tuple[str, str], list[str]] = {}
    for node in graph.nodes:
        for name in node.sets:
            for reader in (n for n in graph.nodes if name in n.states and n != node):
                found.setdefault((node.name, reader.name), []).append(name)
    return [Arrow(src, dst, "kept", (", ".join(names),)) for (src, dst), names in found.items()]


def _columns(graph: Graph, edge: Edge) -> tuple[str, ...]:
    columns = graph.flow.carried.get((edge.src, edge.dst), ()) if edge.kind == "sample" else ()
    return (", ".join(columns),) if columns else ()


def _stated(edge: Edge) -> tuple[str, ...]:
    """Format the attributes of an edge."""
    return (", ".join(f"{k} = {v}" for k, v in edge.attributes.items()),) if edge.attributes else ()


def _moves(reshard: Reshard) -> tuple[str, ...]:
    """Describe the routes of weights, and the bytes of the busiest device."""
    most = sum(w.bytes for w in reshard.ways)
    seconds = sum(s.seconds.value for s in reshard.steps)
    how = dict.fromkeys(w.how for w in reshard.ways)
    return (", ".join(dict.fromkeys((reshard.mode, *how))), f"{size(most)} a device, {duration(seconds)}")


def _pools(plan: Plan, boxes: Sequence[Box]) -> tuple[tuple[str, str], ...]:
    words = [(p.name, many(p.devices, "device")) for p in plan.pools]
    return _named([*words, *((b.group, "the hosts' CPUs") for b in boxes if b.group not in dict(words))], boxes)


def _named(words: Iterable[tuple[str, str]], boxes: Sequence[Box]) -> tuple[tuple[str, str], ...]:
    """Return the groups that have boxes, in the order of their first box."""
    known = dict(words)
    return tuple((g, known[g]) for g in dict.fromkeys(b.group for b in boxes if b.group))
