"""owners: the nodes that share a layout and an engine, and the engines for them.

Invariant: one rule, `engines`, chooses an engine, for the placement, the search and messages. A stated engine is taken.
Otherwise the candidates are the engines that may be chosen and support all verbs. Four conditions follow, and each
counts only if some candidate meets it: the engine supports the model's family, divides it as a stated layout says, is
meant for such devices, and can be run, not only planned. If several are left, the search compares their costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ..backends import runs
from ..backends.divisibility import misfits
from ..backends.spec import EngineSpec
from ..cost import holdings
from ..ir.graph import Node
from ..ir.plan import Plan
from ..sharding.layout import AXES
from .pools import Division, nodes_of


@dataclass(frozen=True)
class Owner:
    """Nodes that have one layout; the file states it for `node`."""

    node: str
    nodes: tuple[str, ...]


def owners(plan: Plan, division: Division) -> tuple[Owner, ...]:
    """Return the owners in the order of the graph."""
    found: dict[str, list[str]] = {}
    for node in nodes_of(plan):
        found.setdefault(owner_of(plan, division, node), []).append(node.name)
    return tuple(Owner(name, tuple(nodes)) for name, nodes in found.items())


def owner_of(plan: Plan, division: Division, node: Node) -> str:
    """Return the node whose layout a node has.

    It is a node with the same weights. For a frozen node of which nothing is stated, it is an update of the same model
    in its pool, so that micro-batches go to the same ranks.
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
    """Return the first infer with a statement among those sharing an infer's weights."""
    if node.verb != "infer":
        return None
    return next((n.name for n in plan.graph.sharing(node.worker) if n.name in stated), None)


def has_open_layout(plan: Plan, owner: Owner) -> bool:
    return owner.node not in plan.deploy.layouts


def engines(plan: Plan, owner: Owner, known: Mapping[str, EngineSpec]) -> list[EngineSpec]:
    """Return the engines that the plan chooses from, the preferred one first."""
    # A layout of the plan must suit the engines of all nodes; a stated layout must suit the owner's engine.
    asked = (owner.node, *(owner.nodes if has_open_layout(plan, owner) else ()))
    if stated := [n for n in asked if n in plan.deploy.engines]:
        return [known[plan.deploy.engines[stated[0]].name]]
    device = plan.cluster.device
    family = plan.model(owner.node).family
    found = [e for e in known.values() if e.chosen and _does(plan, owner, e)]
    conditions: tuple[Callable[[EngineSpec], bool], ...] = (
        lambda e: family in e.families,
        lambda e: not _lacks(plan, owner, e),
        lambda e: device.kind.where in e.chosen,
        lambda e: runs(e.name),
    )
    for met in conditions:
        found = [e for e in found if met(e)] or found
    # Engines for these devices alone come before engines for any.
    return sorted(found, key=lambda e: len(e.chosen))


def why(plan: Plan, owner: Owner, known: Mapping[str, EngineSpec], taken: str) -> str:
    """Return who chose an unstated engine.

    Engines that are meant for these devices but were not chosen are listed with the reason.
    """
    meant = [e for e in known.values() if plan.cluster.device.kind.where in e.chosen and _does(plan, owner, e)]
    lacking = [f"`{e.name}` {words}" for e in meant if e.name != taken and (words := _lacks(plan, owner, e))]
    if len(engines(plan, owner, known)) > 1:
        by = f"the plan, {'with' if has_open_layout(plan, owner) else 'for'} its layout"
    else:
        by = "the plan" if lacking else "default"
    return f"{by}{': ' if lacking else ''}{', '.join(lacking)}"


def _does(plan: Plan, owner: Owner, spec: EngineSpec) -> bool:
    return {plan.graph.node(n).verb for n in owner.nodes} <= {*spec.verbs}


def _lacks(plan: Plan, owner: Owner, spec: EngineSpec) -> str:
    """Return why an engine does not fit the model or the stated layout; "" if it does."""
    model = plan.model(owner.node)
    stated = plan.deploy.layouts.get(owner.node)
    layout = None if stated is None else spec.spread.settled(stated, model)
    lacking = [f"no {model.family} models"] * (model.family not in spec.families)
    if layout is not None:
        lacking += [f"no {a}" for a in AXES if getattr(layout, a) > 1 and a not in spec.axes]
        trains = any(plan.graph.node(n).verb == "update" for n in owner.nodes)
        lacking += [f"no ZeRO {layout.zero}"] * (trains and layout.zero not in spec.zero)
    if lacking:
        return f"has {', '.join(lacking)}"
    return next(misfits(model, spec, layout), "") and "cannot divide the model so" if layout is not None else ""
