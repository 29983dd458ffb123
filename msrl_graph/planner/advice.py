"""Advice: what would fit if the stated plan does not, and what would be faster.

Invariant: the passes have evaluated the advised plan as a whole. Where nothing fits, the advice says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..backends.divisibility import misfits
from ..backends.spec import EngineSpec
from ..emit.humanize import duration, staleness
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
    """Advice on a plan.

    `passes` are all passes of the compiler, `engines` the specs by name; `misplaced` says whether a placed plan has
    wrong layouts.
    """

    passes: Passes
    engines: Mapping[str, EngineSpec]
    misplaced: Callable[[Plan], bool]

    def nearest(self, plan: Plan, worst: PhaseMemory) -> str:
        """Return the nearest layout that fits, for the nodes of the fullest phase.

        Returns "" if none was found but none was ruled out either.
        """
        verb = "generate" if worst.phase == "generate" else "update"
        first = [n for n in plan.graph.verb(verb) if plan.placement(n.name).pool == worst.pool]
        if not first:
            return ""
        stated = plan.deploy.layouts
        # Nodes whose stated layout is an update's change with it.
        nodes = [n.name for n in plan.graph.nodes if n in first or (n.name in stated and _follows(plan, n, first))]
        nodes.sort(key=lambda n: n != first[0].name)
        ruled_out = plan.search is not None and plan.search.hopeless
        if plan.search is None or plan.search.seconds or stated.keys() & {*nodes}:
            if found := self._offloaded(plan, worst.pool) or self._other(plan, nodes, worst):
                return found
            found, ruled_out = self._searched(plan, nodes)
            if found:
                return found
        if stated.keys() - {*nodes}:
            found, ruled_out = self._searched(plan, [*nodes, *(n for n in stated if n not in nodes)])
            if found:
                return found
        named = ", ".join(nodes)
        return f"no other layout of {named} fits either: it takes more devices, or a smaller model" if ruled_out else ""

    def staler(self, plan: Plan) -> tuple[PlanNote, ...]:
        """Return a note on what a staleness of one version would save.

        The layouts stay. Applies where the file states no staleness and generations have other devices than the update.
        """
        graph = plan.graph
        edges = [e for e in graph.reshards() if plan.placement(e.src).pool != plan.placement(e.dst).pool]
        stated = any(ReshardingEdgeAttributes.of(e).staleness for e in graph.reshards())
        if not edges or stated or plan.docks.capacity or plan.estimate is None:
            return ()
        one = {"staleness": Expr("number", 1)}
        changed = tuple(replace(e, attributes={**e.attributes, **one}) if e in edges else e for e in graph.edges)
        placed = [p for p in plan.placements if p.pool != FUNCTIONS]
        pinned = replace(
            plan.deploy,
            pools=plan.pools,
            layouts={p.node: replace(p.layout, inner=1) for p in placed},
            engines={p.node: EngineChoice(p.engine.name) for p in placed} | plan.deploy.engines,
        )
        other = self._fitting(pinned, replace(plan, graph=replace(graph, edges=changed)))
        estimate = self.passes["estimate"].apply(other).estimate if other is not None else None
        if estimate is None or estimate.staleness is None:
            return ()
        now = plan.estimate.iteration_seconds.value
        then = estimate.iteration_seconds.value
        stale = estimate.staleness
        if then > (1 - WORTH) * now:
            return ()
        told = "; ".join(f"`{e.src} => {e.dst} {{ staleness = 1 }}`" for e in edges)
        gain = f"an iteration would take {duration(then)}, {100 * (1 - then / now):.3g} % less"
        how = (
            f"the weights that generate would be {staleness(stale.mean.value, stale.bound)}: correct the loss for that"
        )
        return (PlanNote("staleness", f"with {told} {gain}, and {how}"),)

    def _other(self, plan: Plan, nodes: Sequence[str], worst: PhaseMemory) -> str:
        """Return a layout of the same devices that fits, or recomputation."""
        engine = plan.placement(nodes[0]).engine
        model = plan.model(nodes[0])
        updates = [plan.graph.node(n) for n in nodes]
        # Open choices of other nodes stay as the search left them: a search for each would take minutes.
        placed = [p for p in plan.placements if p.pool in {x.name for x in plan.pools}] if plan.search else []
        layouts = {p.node: p.layout for p in placed if p.node not in plan.deploy.layouts} | plan.deploy.layouts
        chosen = {p.node: EngineChoice(p.engine.name) for p in placed} | plan.deploy.engines
        pinned = replace(plan.deploy, engines=chosen, pools=plan.pools if plan.search else plan.deploy.pools)
        for choice in self._near(plan, nodes[0], worst):
            follow = {n: choice for n in layouts if n in nodes or _follows(plan, plan.graph.node(n), updates)}
            if self._fitting(replace(pinned, layouts={**layouts, **follow}), plan, worst.pool):
                sizes = self.engines[engine.name].spread.written(choice, model)
                return f"the nearest layout that fits: `layout {', '.join(nodes)} {{ {sizes} }}`"
        if worst.phase == "update" and engine.options.get("recompute") != "full":
            # The passes choose the micro-batch again, for the memory that recomputation frees.
            stated = plan.deploy.engines.get(nodes[0], EngineChoice(engine.name))
            full = replace(stated, options={**stated.options, "recompute": "full"})
            engines = {**plan.deploy.engines, nodes[0]: full}
            if self._fitting(replace(plan.deploy, engines=engines), plan, worst.pool):
                return f"this fits: `engine {nodes[0]} = {engine.name} {{ recompute = full }}`"
        return ""

    def _near(self, plan: Plan, node: str, worst: PhaseMemory) -> list[Layout]:
        """Return other layouts of all devices of a node's pool, the nearest first.

        They differ in tp, in the mesh of experts or in the ZeRO stage.
        """
        placement = plan.placement(node)
        model = plan.model(node)
        now = placement.layout
        devices = plan.pool(worst.pool).devices
        spec = self.engines[placement.engine.name]
        stages = (now.zero,) if worst.phase == "generate" else tuple(z for z in spec.zero if z >= now.zero)
        rest = now.cp * now.pp
        tried = []
        for tp in [t for t in range(1, min(devices, model.heads) + 1) if devices % (t * rest) == 0]:
            sized = replace(now, tp=tp, dp=devices // (tp * rest), inner=1)
            meshes = dict.fromkeys(
                (spec.spread.settled(replace(sized, etp=0), model), *spec.spread.meshes(sized, model))
            )
            tried += [replace(x, zero=z) for x in meshes for z in stages if not any(misfits(model, spec, x))]

        def far(found: Layout) -> float:
            return (
                sum(abs(math.log2(getattr(found, a) / getattr(now, a))) for a in ("tp", "ep")) + found.zero - now.zero
            )

        return sorted(tried, key=lambda x: (far(x), x.tp, x.ep, x.etp, x.zero))[:TRIED]

    def _searched(self, plan: Plan, nodes: Sequence[str]) -> tuple[str, bool]:
        """Search layouts of some nodes, while everything else stays as stated.

        Returns the result, and whether the search has ruled out that anything fits.
        """
        open_ = replace(plan.deploy, layouts={n: x for n, x in plan.deploy.layouts.items() if n not in nodes})
        other = self.passes["place"].apply(Plan(plan.graph, plan.cluster, open_))
        if other.search is None or not other.search.seconds:
            return "", other.search is not None and other.search.hopeless
        found: dict[str, list[str]] = {}
        layouts = dict(open_.layouts)
        engines = dict(open_.engines)
        for node in nodes:
            there = other.placement(node)
            sizes = self.engines[there.engine.name].spread.written(there.layout, plan.model(node))
            found.setdefault(sizes, []).append(node)
            layouts[node] = replace(there.layout, inner=1)
        changed = []
        for node in nodes:
            name = other.placement(node).engine.name
            if (
                name != plan.placement(node).engine.name
                and plan.graph.sharing(plan.graph.node(node).worker)[0].name == node
            ):
                changed.append(f"`engine {node} = {name}`")
                engines[node] = EngineChoice(name)
        # As the file would state it: the division into pools may be the search's choice.
        stated = replace(open_, layouts=layouts, engines=engines)
        if self._fitting(stated, plan) is None:
            return "", False
        parts = [f"`layout {', '.join(names)} {{ {sizes} }}`" for sizes, names in found.items()]
        return f"this fits: {' and '.join([*parts, *changed])}", False

    def _offloaded(self, plan: Plan, pool: str) -> str:
        """Return an offloading that fits where the file states `none`, or too little."""
        here = [(n, c) for n, c in plan.deploy.engines.items() if plan.placement(n).pool == pool]
        stated = {n: c for n, c in here if "offload" in c.options}
        if not stated:
            return ""
        open_ = {
            n: replace(c, options={k: c.options[k] for k in c.options if k != "offload"}) for n, c in stated.items()
        }
        other = self._fitting(replace(plan.deploy, engines={**plan.deploy.engines, **open_}), plan, pool)
        if other is None:
            return ""
        graph = other.graph
        found = []
        for p in other.placements:
            if "offload" in p.engine.options and graph.sharing(graph.node(p.node).worker)[0].name == p.node:
                found.append(f"`engine {p.node} = {p.engine.name} {{ offload = {p.engine.options['offload']} }}`")
        return f"this fits: {' and '.join(found)}"

    def _fitting(self, deploy: Deployment, plan: Plan, pool: str = "") -> Plan | None:
        """Return the plan under another deploy if it fits, else None.

        The memory of the hosts and of one pool (by default of all pools) must suffice.
        """
        other = self.passes["place"].apply(Plan(plan.graph, plan.cluster, deploy))
        if self.misplaced(other):
            return None
        other = self.passes.after("place").until("memory").apply(other)
        concerned = [m for m in other.memory if pool in ("", m.pool) or m.place == "host"]
        return other if all(m.total <= m.capacity.value for m in concerned) else None


def _follows(plan: Plan, node: Node, updates: Sequence[Node]) -> bool:
    """Return whether a node has the weights of an update."""
    return node.verb != "generate" and any(node.worker == n.worker for n in updates if n.verb == "update")
