"""Advice: what would fit, where what the file states does not; and what would be quicker, where it leaves much unused.

Invariant: what is advised the passes themselves have tried, on the plan that it would be; where nothing fits, that is
said.
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

# Layouts near the stated one that are tried before the search is asked.
TRIED = 40
# The share of an iteration that staleness has to save to be worth a note.
WORTH = 0.1


@dataclass(frozen=True)
class Advice:
    """`passes` are all of the compiler's, `engines` the specs by name; `misplaced` says whether layouts of a placed
    plan are wrong."""

    passes: Passes
    engines: Mapping[str, EngineSpec]
    misplaced: Callable[[Plan], bool]

    def nearest(self, plan: Plan, worst: PhaseMemory) -> str:
        """The nearest layout that fits, for the nodes whose phase needs most; "" where none was found, and none was
        ruled out."""
        verb = "generate" if worst.phase == "generate" else "update"
        first = [n for n in plan.graph.verb(verb) if plan.placement(n.name).pool == worst.pool]
        if not first:
            return ""
        stated = plan.deploy.layouts
        # Nodes that are stated to have the layout of an update go with it.
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
        """What staleness of one version would save, where the file states none and generations have devices apart from
        the update's: with the same layouts."""
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
        """Another layout of the same devices, or recomputation."""
        engine = plan.placement(nodes[0]).engine
        model = plan.model(nodes[0])
        updates = [plan.graph.node(n) for n in nodes]
        # What is open of the others stays as the search left it: a search for each would take minutes.
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
            # The passes choose the micro-batch again, for what recomputation leaves.
            stated = plan.deploy.engines.get(nodes[0], EngineChoice(engine.name))
            full = replace(stated, options={**stated.options, "recompute": "full"})
            engines = {**plan.deploy.engines, nodes[0]: full}
            if self._fitting(replace(plan.deploy, engines=engines), plan, worst.pool):
                return f"this fits: `engine {nodes[0]} = {engine.name} {{ recompute = full }}`"
        return ""

    def _near(self, plan: Plan, node: str, worst: PhaseMemory) -> list[Layout]:
        """Layouts of all devices of a node's pool with another tp, division of experts or ZeRO stage, the nearest
        first."""
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
        """What the search finds where nothing is stated of the layout of some nodes, and all else stays; and whether it
        has ruled out that anything fits."""
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
        # As it would be stated: the division into pools may be the search's.
        stated = replace(open_, layouts=layouts, engines=engines)
        if self._fitting(stated, plan) is None:
            return "", False
        parts = [f"`layout {', '.join(names)} {{ {sizes} }}`" for sizes, names in found.items()]
        return f"this fits: {' and '.join([*parts, *changed])}", False

    def _offloaded(self, plan: Plan, pool: str) -> str:
        """What the passes offload where the file does not say `none`, or less than it takes."""
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
        """The plan with another deploy, if a pool, or all, and the hosts have the memory then."""
        other = self.passes["place"].apply(Plan(plan.graph, plan.cluster, deploy))
        if self.misplaced(other):
            return None
        other = self.passes.after("place").until("memory").apply(other)
        concerned = [m for m in other.memory if pool in ("", m.pool) or m.place == "host"]
        return other if all(m.total <= m.capacity.value for m in concerned) else None


def _follows(plan: Plan, node: Node, updates: Sequence[Node]) -> bool:
    """Whether a node has the weights of an update."""
    return node.verb != "generate" and any(node.worker == n.worker for n in updates if n.verb == "update")
