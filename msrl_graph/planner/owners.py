"""Owners (sets of nodes that share a layout and an engine) and their engines.

Invariant: only the function `engines` decides which engines a set of nodes may use. The placement, the search and the
code that writes messages call this function. An engine that the file states is used. If the file states no engine, the
candidates are the engines that may be chosen automatically and support the verbs of all nodes. Four conditions then
narrow the candidates:
- The engine supports the model's family.
- The engine supports the stated layout.
- The engine is meant for the cluster's devices.
- This version can run the engine, not only plan it.

A condition that no candidate meets is skipped. If several candidates remain, the search compares their costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ..analysis.sequences import routing_columns
from ..backends import can_build
from ..backends.divisibility import find_misfits
from ..backends.spec import EngineSpec
from ..cost import holdings
from ..ir.graph import Node
from ..ir.plan import Plan
from ..sharding.layout import AXES
from .pools import Division, nodes_of


@dataclass(frozen=True)
class Owner:
    """A set of nodes that have the same layout.

    `node` is the node that represents the set. If the file states a layout for `node`, all nodes of the set have this
    layout.
    """

    node: str
    nodes: tuple[str, ...]


def owners(plan: Plan, division: Division) -> tuple[Owner, ...]:
    """Return the sets of nodes that share a layout, in the order of the graph."""
    nodes_by_owner: dict[str, list[str]] = {}
    for node in nodes_of(plan):
        nodes_by_owner.setdefault(owner_of(plan, division, node), []).append(node.name)
    return tuple(Owner(name, tuple(nodes)) for name, nodes in nodes_by_owner.items())


def owner_of(plan: Plan, division: Division, node: Node) -> str:
    """Return the name of the node whose layout a given node uses: the owner's node.

    A generation uses its own layout. Any other node uses the layout of a node with the same weights. The exception is a
    frozen node for which the file states neither a layout nor an engine. Such a frozen node uses the layout of an
    update of the same model, if there is such an update in the frozen node's pool. Micro-batches of both nodes then go
    to the same ranks.
    """
    if node.verb == "generate":
        return node.name
    if update := holdings.update_of(plan, node.worker):
        return update.name
    if stated := first_stated(plan, node, plan.deploy.layouts):
        return node.name if node.name in plan.deploy.layouts else stated
    worker = plan.graph.worker(node.worker)
    engine = first_stated(plan, node, plan.deploy.engines)
    for other in plan.graph.verb("update"):
        alike = (
            plan.graph.worker(other.worker).model == worker.model and other.name in division.pool_of(node.name).nodes
        )
        theirs = plan.deploy.engines.get(other.name)
        named = engine is not None and (theirs is None or theirs.name != plan.deploy.engines[engine].name)
        # Its own engine may be unable to use a layout that the plan chooses for another one.
        if alike and (not named or other.name in plan.deploy.layouts):
            return other.name
    return plan.graph.sharing(node.worker)[0].name


def first_stated(plan: Plan, node: Node, stated: Collection[str]) -> str | None:
    """Return the first node in `stated` that has the weights of the infer node `node`.

    `stated` is the set of nodes for which the file states a layout or an engine. The result is None if no node of
    `stated` has these weights, or if `node` is not an infer node.
    """
    if node.verb != "infer":
        return None
    return next((sharing.name for sharing in plan.graph.sharing(node.worker) if sharing.name in stated), None)


def has_open_layout(plan: Plan, owner: Owner) -> bool:
    return owner.node not in plan.deploy.layouts


def engines(plan: Plan, owner: Owner, known: Mapping[str, EngineSpec]) -> list[EngineSpec]:
    """Return the engines from which the planner chooses, the preferred engine first."""
    # A layout of the plan must suit the engines of all nodes; a stated layout must suit the owner's engine.
    asked = (owner.node, *(owner.nodes if has_open_layout(plan, owner) else ()))
    if stated := [name for name in asked if name in plan.deploy.engines]:
        return [known[plan.deploy.engines[stated[0]].name]]
    device = plan.cluster.device
    model = plan.model(owner.node)
    candidates = [spec for spec in known.values() if spec.capabilities.chosen and _supports_verbs(plan, owner, spec)]
    conditions: tuple[Callable[[EngineSpec], bool], ...] = (
        lambda spec: not spec.capabilities.list_unplanned(model),
        lambda spec: not model.list_lacking(spec.capabilities.features),
        lambda spec: not _missing_support(plan, owner, spec),
        lambda spec: device.kind.where in spec.capabilities.chosen,
        lambda spec: can_build(spec.name),
    )
    for met in conditions:
        candidates = [spec for spec in candidates if met(spec)] or candidates
    # Engines for these devices alone come before engines for any.
    return sorted(candidates, key=lambda spec: len(spec.capabilities.chosen))


def explain_engine(plan: Plan, owner: Owner, known: Mapping[str, EngineSpec], chosen: str) -> str:
    """Return the reason for an engine that the file does not state, as text.

    The text says whether the planner chose the engine or the engine is the default. For each other engine that is meant
    for these devices, the text says what that engine does not support.
    """
    meant = [
        spec
        for spec in known.values()
        if plan.cluster.device.kind.where in spec.capabilities.chosen and _supports_verbs(plan, owner, spec)
    ]
    lacking = [
        f"`{spec.name}` {words}"
        for spec in meant
        if spec.name != chosen and (words := _missing_support(plan, owner, spec))
    ]
    if len(engines(plan, owner, known)) > 1:
        by = f"the plan, {'with' if has_open_layout(plan, owner) else 'for'} its layout"
    else:
        by = "the plan" if lacking else "default"
    return f"{by}{': ' if lacking else ''}{', '.join(lacking)}"


def _supports_verbs(plan: Plan, owner: Owner, spec: EngineSpec) -> bool:
    return {plan.graph.node(node).verb for node in owner.nodes} <= {*spec.verbs}


def _missing_support(plan: Plan, owner: Owner, spec: EngineSpec) -> str:
    """Return why an engine does not fit the model or the stated layout; "" if it fits."""
    model = plan.model(owner.node)
    stated = plan.deploy.layouts.get(owner.node)
    layout = None if stated is None else spec.sharding.spread.settle_etp(stated, model)
    if features := model.list_lacking(spec.capabilities.features):
        return f"lacks {', '.join(features)}"
    lacking = []
    nodes = map(plan.graph.node, owner.nodes)
    if not spec.capabilities.routes and any(routing_columns(plan.graph, (*node.reads, *node.writes)) for node in nodes):
        lacking.append("no routes")
    if layout is not None:
        lacking += [f"no {axis}" for axis in AXES if getattr(layout, axis) > 1 and axis not in spec.capabilities.axes]
        trains = any(plan.graph.node(node).verb == "update" for node in owner.nodes)
        lacking += [f"no ZeRO {layout.zero}"] * (trains and layout.zero not in spec.capabilities.zero)
    if lacking:
        return f"has {', '.join(lacking)}"
    return next(find_misfits(model, spec, layout), "") and "cannot divide the model so" if layout is not None else ""
