"""Advice on changes that make a plan fit into memory or make it faster.

Invariant: a changed plan is only advised after the compiler's passes have evaluated it as a whole. If no change makes
the plan fit, the advice says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..backends.divisibility import find_misfits
from ..backends.spec import EngineSpec
from ..diagnostics.quantities import duration, staleness
from ..ir.attributes import ReshardingEdgeAttributes
from ..ir.graph import Expr, Node
from ..ir.plan import FUNCTIONS, Deployment, EngineChoice, PhaseMemory, Plan, PlanNote
from ..passes.spec import Passes
from ..sharding.layout import Layout

# The number of layouts near the stated one that are tried before the search runs.
TRIED = 40
# Staleness gets a note if it saves at least this share of an iteration.
WORTH = 0.1


@dataclass(frozen=True)
class Advice:
    """The methods that search for advice on a plan.

    `passes` are all passes of the compiler. `engines` are the engine specs by name. `misplaced` is a function that
    returns whether a placed plan has wrong layouts.
    """

    passes: Passes
    engines: Mapping[str, EngineSpec]
    misplaced: Callable[[Plan], bool]

    def find_nearest(self, plan: Plan, worst: PhaseMemory) -> str:
        """Return advice on a small change that makes a plan fit.

        `worst` is the phase that exceeds its memory most. The change is to the nodes that compute in this phase. If a
        search proves that no layout fits, the advice says so. The result is "" if the search finds no layout that fits,
        but does not prove that there is none.
        """
        verb = "generate" if worst.phase == "generate" else "update"
        first = [node for node in plan.graph.verb(verb) if plan.placement(node.name).pool == worst.pool]
        if not first:
            return ""
        stated = plan.deploy.layouts
        # Nodes whose stated layout is an update's change with it.
        nodes = [
            node.name
            for node in plan.graph.nodes
            if node in first or (node.name in stated and _follows(plan, node, first))
        ]
        nodes.sort(key=lambda name: name != first[0].name)
        ruled_out = plan.search is not None and plan.search.hopeless
        if plan.search is None or plan.search.seconds or stated.keys() & {*nodes}:
            if advice := self._find_offloading(plan, worst.pool) or self._find_other_layout(plan, nodes, worst):
                return advice
            advice, ruled_out = self._search_again(plan, nodes)
            if advice:
                return advice
        if stated.keys() - {*nodes}:
            advice, ruled_out = self._search_again(plan, [*nodes, *(name for name in stated if name not in nodes)])
            if advice:
                return advice
        named = ", ".join(nodes)
        return f"no other layout of {named} fits either: it takes more devices, or a smaller model" if ruled_out else ""

    def advise_staleness(self, plan: Plan) -> tuple[PlanNote, ...]:
        """Return a note on the time that a staleness of one version would save.

        The layouts are not changed. There is a note only if all of the following hold:
        - The file states no staleness.
        - Generations have other devices than the update.
        - An iteration would be shorter by at least the fraction `WORTH`.
        """
        graph = plan.graph
        edges = [edge for edge in graph.reshards() if plan.placement(edge.src).pool != plan.placement(edge.dst).pool]
        stated = any(ReshardingEdgeAttributes.of(edge).staleness for edge in graph.reshards())
        if not edges or stated or plan.docks.capacity or plan.estimate is None:
            return ()
        one = {"staleness": Expr("number", 1)}
        changed = tuple(
            replace(edge, attributes={**edge.attributes, **one}) if edge in edges else edge for edge in graph.edges
        )
        placed = [placement for placement in plan.placements if placement.pool != FUNCTIONS]
        pinned = replace(
            plan.deploy,
            pools=plan.pools,
            layouts={placement.node: replace(placement.layout, inner=1) for placement in placed},
            engines={placement.node: EngineChoice(placement.engine.name) for placement in placed} | plan.deploy.engines,
        )
        other = self._plan_if_fitting(pinned, replace(plan, graph=replace(graph, edges=changed)))
        estimate = self.passes["estimate"].apply(other).estimate if other is not None else None
        if estimate is None or estimate.staleness is None:
            return ()
        now = plan.estimate.iteration_seconds.value
        then = estimate.iteration_seconds.value
        stale = estimate.staleness
        if then > (1 - WORTH) * now:
            return ()
        statements = "; ".join(f"`{edge.src} => {edge.dst} {{ staleness = 1 }}`" for edge in edges)
        gain = f"an iteration would take {duration(then)}, {100 * (1 - then / now):.3g} % less"
        how = (
            f"the weights that generate would be {staleness(stale.mean.value, stale.bound)}: correct the loss for that"
        )
        return (PlanNote("staleness", f"with {statements} {gain}, and {how}"),)

    def _find_other_layout(self, plan: Plan, nodes: Sequence[str], worst: PhaseMemory) -> str:
        """Return advice to use another layout on the same devices, or to recompute.

        The advice is to recompute activations if no similar layout fits. The result is "" if the plan does not fit even
        with recomputed activations.
        """
        engine = plan.placement(nodes[0]).engine
        model = plan.model(nodes[0])
        updates = [plan.graph.node(node) for node in nodes]
        # Open choices of other nodes stay as the search left them: a search for each would take minutes.
        placed = (
            [placement for placement in plan.placements if placement.pool in {pool.name for pool in plan.pools}]
            if plan.search
            else []
        )
        layouts = {
            placement.node: placement.layout for placement in placed if placement.node not in plan.deploy.layouts
        } | plan.deploy.layouts
        chosen = {placement.node: EngineChoice(placement.engine.name) for placement in placed} | plan.deploy.engines
        pinned = replace(plan.deploy, engines=chosen, pools=plan.pools if plan.search else plan.deploy.pools)
        for choice in self._nearby_layouts(plan, nodes[0], worst):
            follow = {
                name: choice for name in layouts if name in nodes or _follows(plan, plan.graph.node(name), updates)
            }
            if self._plan_if_fitting(replace(pinned, layouts={**layouts, **follow}), plan, worst.pool):
                sizes = self.engines[engine.name].sharding.spread.format_layout(choice, model)
                return f"the nearest layout that fits: `layout {', '.join(nodes)} {{ {sizes} }}`"
        if worst.phase == "update" and engine.options.get("recompute") != "full":
            # The passes choose the micro-batch again, for the memory that recomputation frees.
            stated = plan.deploy.engines.get(nodes[0], EngineChoice(engine.name))
            full = replace(stated, options={**stated.options, "recompute": "full"})
            engines = {**plan.deploy.engines, nodes[0]: full}
            if self._plan_if_fitting(replace(plan.deploy, engines=engines), plan, worst.pool):
                return f"this fits: `engine {nodes[0]} = {engine.name} {{ recompute = full }}`"
        return ""

    def _nearby_layouts(self, plan: Plan, node: str, worst: PhaseMemory) -> list[Layout]:
        """Return layouts that are similar to a node's layout, the most similar first.

        The layouts use all devices of the node's pool. They differ from the node's current layout in tp, in the mesh of
        experts or in the ZeRO stage.
        """
        placement = plan.placement(node)
        model = plan.model(node)
        now = placement.layout
        devices = plan.pool(worst.pool).devices
        spec = self.engines[placement.engine.name]
        stages = (
            (now.zero,)
            if worst.phase == "generate"
            else tuple(stage for stage in spec.capabilities.zero if stage >= now.zero)
        )
        rest = now.cp * now.pp
        tried = []
        for tp in [size for size in range(1, min(devices, model.fewest_heads) + 1) if devices % (size * rest) == 0]:
            sized = replace(now, tp=tp, dp=devices // (tp * rest), inner=1)
            meshes = dict.fromkeys(
                (
                    spec.sharding.spread.settle_etp(replace(sized, etp=0), model),
                    *spec.sharding.spread.meshes(sized, model),
                )
            )
            tried += [
                replace(mesh, zero=stage)
                for mesh in meshes
                for stage in stages
                if not any(find_misfits(model, spec, mesh))
            ]

        def distance(candidate: Layout) -> float:
            return (
                sum(abs(math.log2(getattr(candidate, axis) / getattr(now, axis))) for axis in ("tp", "ep"))
                + candidate.zero
                - now.zero
            )

        return sorted(
            tried,
            key=lambda layout: (
                distance(layout),
                layout.tp,
                layout.ep,
                layout.etp,
                layout.zero,
            ),
        )[:TRIED]

    def _search_again(self, plan: Plan, nodes: Sequence[str]) -> tuple[str, bool]:
        """Search for layouts of `nodes` that fit, while everything else remains as stated.

        Returns the advice ("" if no layouts were found), and whether the search has proved that no layouts fit.
        """
        open_ = replace(
            plan.deploy, layouts={name: layout for name, layout in plan.deploy.layouts.items() if name not in nodes}
        )
        other = self.passes["place"].apply(Plan(plan.graph, plan.cluster, open_))
        if other.search is None or not other.search.seconds:
            return "", other.search is not None and other.search.hopeless
        nodes_by_sizes: dict[str, list[str]] = {}
        layouts = dict(open_.layouts)
        engines = dict(open_.engines)
        for node in nodes:
            placement = other.placement(node)
            sizes = self.engines[placement.engine.name].sharding.spread.format_layout(
                placement.layout, plan.model(node)
            )
            nodes_by_sizes.setdefault(sizes, []).append(node)
            layouts[node] = replace(placement.layout, inner=1)
        changed = []
        for node in nodes:
            name = other.placement(node).engine.name
            if (
                name != plan.placement(node).engine.name
                and plan.graph.sharing(plan.graph.node(node).worker)[0].name == node
            ):
                changed.append(f"`engine {node} = {name}`")
                engines[node] = EngineChoice(name)
        # Check the plan that the file would give with these statements. The search may have chosen other pools.
        stated = replace(open_, layouts=layouts, engines=engines)
        if self._plan_if_fitting(stated, plan) is None:
            return "", False
        parts = [f"`layout {', '.join(names)} {{ {sizes} }}`" for sizes, names in nodes_by_sizes.items()]
        return f"this fits: {' and '.join([*parts, *changed])}", False

    def _find_offloading(self, plan: Plan, pool: str) -> str:
        """Return advice to change stated `offload` options so that the plan fits."""
        here = [(name, choice) for name, choice in plan.deploy.engines.items() if plan.placement(name).pool == pool]
        stated = {name: choice for name, choice in here if "offload" in choice.options}
        if not stated:
            return ""
        open_ = {
            name: replace(
                choice, options={option: choice.options[option] for option in choice.options if option != "offload"}
            )
            for name, choice in stated.items()
        }
        other = self._plan_if_fitting(replace(plan.deploy, engines={**plan.deploy.engines, **open_}), plan, pool)
        if other is None:
            return ""
        graph = other.graph
        statements = []
        for placement in other.placements:
            if (
                "offload" in placement.engine.options
                and graph.sharing(graph.node(placement.node).worker)[0].name == placement.node
            ):
                statements.append(
                    f"`engine {placement.node} = {placement.engine.name} "
                    f"{{ offload = {placement.engine.options['offload']} }}`"
                )
        return f"this fits: {' and '.join(statements)}"

    def _plan_if_fitting(self, deploy: Deployment, plan: Plan, pool: str = "") -> Plan | None:
        """Return the plan with the deploy `deploy`, or None if that plan does not fit.

        The memory of the hosts and of the pool `pool` must suffice. If `pool` is "", the memory of all pools must
        suffice.
        """
        other = self.passes["place"].apply(Plan(plan.graph, plan.cluster, deploy))
        if self.misplaced(other):
            return None
        other = self.passes.after("place").until("memory").apply(other)
        concerned = [phase for phase in other.memory if pool in ("", phase.pool) or phase.place == "host"]
        return other if all(phase.total <= phase.capacity.value for phase in concerned) else None


def _follows(plan: Plan, node: Node, updates: Sequence[Node]) -> bool:
    """Return whether an infer or update node has the same weights as one of `updates`."""
    return node.verb != "generate" and any(
        node.worker == update.worker for update in updates if update.verb == "update"
    )
