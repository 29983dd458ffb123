"""The content of a picture of a graph or plan: boxes in groups, and arrows.

Invariant: a picture has no positions or colors. Boxes are in dependency order, so every sample arrow leads from an
earlier box to a later one. A group is a worker (in a picture of a graph) or a pool (in a picture of a plan). Each group
occurs once, and groups are in the order of their first boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..diagnostics.quantities import duration, plural, size
from ..ir.graph import Edge, Graph, Node
from ..ir.plan import Plan
from ..ir.resharding_plan import Reshard
from .placed_graph import build_placed_graph

COLOURS = 8


@dataclass(frozen=True)
class Box:
    """A box of a picture.

    `kind` is `source`, `function`, `generate`, `infer` or `update` for a node of the graph, otherwise `dock`,
    `allgather_swap` or `send`. `group` is "" for a box outside all groups.
    """

    name: str
    kind: str
    group: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arrow:
    """An arrow of a picture.

    `kind` is `sample`, `reshard` (drawn dashed) or `kept` (drawn dotted). A `kept` arrow shows a state of the
    algorithm: it leads from the node that sets the state to a node that reads the new value in the next iteration.
    """

    src: str
    dst: str
    kind: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Picture:
    """A picture; `groups` has pairs of a group's name and a remark on the group."""

    title: str
    groups: tuple[tuple[str, str], ...]
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def graph_picture(graph: Graph) -> Picture:
    """Return a picture of a graph: nodes grouped by worker, and edges with columns."""
    boxes = []
    for node in graph.nodes:
        scope = (*((f"per {node.per}",) if node.per != "row" else ()), *_set_lines(node))
        # The source belongs to no worker.
        boxes.append(Box(node.name, _box_kind(graph, node), "" if node.verb == "source" else node.named_worker, scope))
    groups = []
    for worker in graph.workers:
        words = [
            worker.kind,
            *([worker.following_description or "frozen"] if worker.frozen else []),
            *([f"model {worker.model}"] if worker.model and worker.model != worker.kind else []),
        ]
        groups.append((worker.name, ", ".join(words)))
    arrows = [
        Arrow(edge.src, edge.dst, edge.kind, (*_column_lines(graph, edge), *_attribute_lines(edge)))
        for edge in graph.edges
    ]
    arrows += _state_arrows(graph)
    return Picture(graph.name, _order_groups(groups, boxes), tuple(boxes), tuple(arrows))


def colours(plan: Plan) -> dict[str, int]:
    """Return the color number of each pool in the plan's picture."""
    return {name: number % COLOURS for number, (name, _) in enumerate(plan_picture(plan).groups)}


def plan_picture(plan: Plan) -> Picture:
    """Return a picture of a plan: nodes grouped by pool, and edges.

    A node is drawn with its layout and seconds, and an edge with the bytes that are moved over it.
    """
    graph = plan.graph
    seconds = {phase.name: phase.seconds.value for phase in plan.estimate.phases} if plan.estimate else {}
    boxes = []
    for node in graph.nodes:
        placement = plan.placement(node.name)
        where = (
            (f"{placement.layout}, {placement.engine.name}",)
            if any(pool.name == placement.pool for pool in plan.pools)
            else ()
        )
        takes = (duration(seconds[node.name]),) if node.name in seconds else ()
        boxes.append(Box(node.name, _box_kind(graph, node), placement.pool, (*where, *takes, *_set_lines(node))))
    moved = {(traffic.src, traffic.dst): traffic for traffic in plan.traffic}
    arrows = []
    for edge in graph.samples():
        traffic = moved.get((edge.src, edge.dst))
        much = (
            (f"{size(traffic.bytes)}, {duration(traffic.seconds.value)}",)
            if traffic is not None and traffic.bytes
            else ()
        )
        arrows.append(
            Arrow(
                edge.src,
                edge.dst,
                edge.kind,
                (*_column_lines(graph, edge), *much, *_attribute_lines(edge)),
            )
        )
    arrows += [Arrow(reshard.src, reshard.dst, "reshard", _describe_moves(reshard)) for reshard in plan.reshards]
    arrows += _state_arrows(graph)
    return Picture(f"{graph.name} on {plan.cluster.name}", _pool_groups(plan, boxes), tuple(boxes), tuple(arrows))


def placed_picture(plan: Plan) -> Picture:
    """Return a picture of a placed graph: nodes, docks, and transfers of weights.

    Nodes are grouped by pool. A sample edge leads through a dock. A resharding edge leads through an allgather-swap, or
    through a send between two pools.
    """
    graph = plan.graph
    vertices, arcs = build_placed_graph(plan)
    vertex_of = {vertex.name: vertex for vertex in vertices}
    feeds = {arc.src: arc.dst for arc in arcs if vertex_of[arc.src].kind != "state"}
    boxes = []
    for node in graph.nodes:
        into = [name for name, dst in feeds.items() if dst == node.name]
        # A dock's box precedes the box of its node. A box of weights (a swap or a send) follows the box of its node.
        order = [
            *(name for name in into if vertex_of[name].kind == "dock"),
            node.name,
            *(name for name in into if vertex_of[name].kind != "dock"),
        ]
        for vertex in (vertex_of[name] for name in order):
            facts = tuple(f"{fact} {value}" for fact, value in vertex.facts.items())
            if vertex.kind == "state":
                boxes.append(Box(vertex.name, _box_kind(graph, node), vertex.where, (*facts, *_set_lines(node))))
            else:
                boxes.append(Box(vertex.name, vertex.kind, "", (vertex.where, *facts)))
    arrows = []
    for arc in arcs:
        columns = graph.flow.carried.get((arc.src, feeds.get(arc.dst, "")), ()) if arc.kind == "sample" else ()
        arrows.append(Arrow(arc.src, arc.dst, arc.kind, (", ".join(columns),) if columns else ()))
    arrows += _state_arrows(graph)
    return Picture(
        f"{graph.name} on {plan.cluster.name}, placed", _pool_groups(plan, boxes), tuple(boxes), tuple(arrows)
    )


def _box_kind(graph: Graph, node: Node) -> str:
    if node.verb == "source" or graph.worker(node.worker).kind != "function":
        return node.verb
    return "function"


def _set_lines(node: Node) -> tuple[str, ...]:
    return (f"sets {', '.join(node.sets)}",) if node.sets else ()


def _state_arrows(graph: Graph) -> list[Arrow]:
    """Return arrows for the states of the algorithm.

    An arrow leads from each node that sets a state to each other node that reads the state. If only the node itself
    reads the state, there is no arrow, but the node's box names the state.
    """
    states: dict[tuple[str, str], list[str]] = {}
    for node in graph.nodes:
        for name in node.sets:
            for reader in (other for other in graph.nodes if name in other.states and other != node):
                states.setdefault((node.name, reader.name), []).append(name)
    return [Arrow(src, dst, "kept", (", ".join(names),)) for (src, dst), names in states.items()]


def _column_lines(graph: Graph, edge: Edge) -> tuple[str, ...]:
    columns = graph.flow.carried.get((edge.src, edge.dst), ()) if edge.kind == "sample" else ()
    return (", ".join(columns),) if columns else ()


def _attribute_lines(edge: Edge) -> tuple[str, ...]:
    """Format the attributes of an edge as one line; no line if the edge has none."""
    return (", ".join(f"{name} = {value}" for name, value in edge.attributes.items()),) if edge.attributes else ()


def _describe_moves(reshard: Reshard) -> tuple[str, ...]:
    """Describe how a resharding moves weights: routes, bytes and seconds.

    The text shows how many bytes the busiest device receives.
    """
    most = sum(route.bytes for route in reshard.ways)
    seconds = sum(step.seconds.value for step in reshard.steps)
    how = dict.fromkeys(route.how for route in reshard.ways)
    return (", ".join(dict.fromkeys((reshard.mode, *how))), f"{size(most)} a device, {duration(seconds)}")


def _pool_groups(plan: Plan, boxes: Sequence[Box]) -> tuple[tuple[str, str], ...]:
    words = [(pool.name, plural(pool.devices, "device")) for pool in plan.pools]
    return _order_groups(
        [*words, *((box.group, "the hosts' CPUs") for box in boxes if box.group not in dict(words))], boxes
    )


def _order_groups(words: Iterable[tuple[str, str]], boxes: Sequence[Box]) -> tuple[tuple[str, str], ...]:
    """Return the groups that have boxes, in the order of their first boxes.

    `words` has the name and the remark of each group.
    """
    known = dict(words)
    return tuple((group, known[group]) for group in dict.fromkeys(box.group for box in boxes if box.group))
