"""Advice: what would fit, where what the file states does not.

Invariant: what is advised the passes themselves have tried, on the plan that it would be; where nothing fits, that is
said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..backends.spec import EngineSpec
from ..ir.plan import Deploy, EngineChoice, Memory, Plan
from ..passes.spec import Passes
from ..sharding.layout import AXES, Layout


@dataclass(frozen=True)
class Advice:
    """`passes` are all of the compiler's, `engines` the specs by name; `misplaced` says whether layouts of a placed
    plan are wrong."""

    passes: Passes
    engines: Mapping[str, EngineSpec]
    misplaced: Callable[[Plan], bool]

    def nearest(self, plan: Plan, worst: Memory) -> str:
        """The nearest layout that fits, for the nodes whose phase needs most."""
        verb = "generate" if worst.phase == "generate" else "update"
        nodes = [n.name for n in plan.graph.verb(verb) if plan.placement(n.name).pool == worst.pool]
        if not nodes:
            return ""
        named = ", ".join(nodes)
        nothing = f"no other layout of {named} fits either: it takes more devices, or a smaller model"
        if plan.search is not None and not plan.search.seconds and not plan.deploy.layouts.keys() & {*nodes}:
            return nothing  # the search has tried; what is stated of these states it left alone
        if found := self._offloaded(plan, worst.pool):
            return found
        engine = plan.placement(nodes[0]).engine
        for choice in self._near(plan, nodes[0], worst):
            layouts = {**plan.deploy.layouts, **dict.fromkeys(nodes, choice)}
            if self._fitting(replace(plan.deploy, layouts=layouts), plan, worst.pool):
                zero = f", zero = {choice.zero}" if choice.zero != 1 else ""
                return f"the nearest layout that fits: `layout {named} {{ tp = {choice.tp}, dp = {choice.dp}{zero} }}`"
        if worst.phase == "update" and engine.options.get("recompute") != "full":
            # The passes choose the micro-batch again, for what recomputation leaves.
            stated = plan.deploy.engines.get(nodes[0], EngineChoice(engine.name))
            full = replace(stated, options={**stated.options, "recompute": "full"})
            engines = {**plan.deploy.engines, nodes[0]: full}
            if self._fitting(replace(plan.deploy, engines=engines), plan, worst.pool):
                return f"this fits: `engine {nodes[0]} = {engine.name} {{ recompute = full }}`"
        return self._searched(plan, nodes) or nothing

    def _near(self, plan: Plan, node: str, worst: Memory) -> list[Layout]:
        """Layouts of all devices of a node's pool with another tp or ZeRO stage, the nearest first."""
        now, devices = plan.placement(node).layout, plan.pool(worst.pool).devices
        stages = self.engines[plan.placement(node).engine.name].zero
        stages = (now.zero,) if worst.phase == "generate" else tuple(z for z in stages if z >= now.zero)
        widths = [t for t in range(1, min(devices, plan.model(node).heads) + 1) if devices % t == 0]
        tried = [replace(now, tp=t, dp=devices // t, zero=z, inner=1) for t in widths for z in stages]
        return sorted(tried, key=lambda c: (abs(math.log2(c.tp / now.tp)) + c.zero - now.zero, c.tp, c.zero))

    def _searched(self, plan: Plan, nodes: Sequence[str]) -> str:
        """What the search finds where nothing is stated of the layout of some nodes, and all else stays."""
        open_ = replace(plan.deploy, layouts={n: x for n, x in plan.deploy.layouts.items() if n not in nodes})
        other = self.passes["place"].apply(Plan(plan.graph, plan.cluster, open_))
        parted = [p.nodes for p in other.pools] != [p.nodes for p in plan.pools]
        if other.search is None or not other.search.seconds or parted:
            return ""
        found, named = other.placement(nodes[0]), ", ".join(nodes)
        sizes = ", ".join(f"{a} = {getattr(found.layout, a)}" for a in (*AXES, "zero") if getattr(found.layout, a) > 1)
        same = found.engine.name == plan.placement(nodes[0]).engine.name
        engine = "" if same else f" and `engine {named} = {found.engine.name}`"
        return f"this fits: `layout {named} {{ {sizes or 'dp = 1'} }}`{engine}"

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
        graph, found = other.graph, []
        for p in other.placements:
            if "offload" in p.engine.options and graph.sharing(graph.node(p.node).worker)[0].name == p.node:
                found.append(f"`engine {p.node} = {p.engine.name} {{ offload = {p.engine.options['offload']} }}`")
        return f"this fits: {' and '.join(found)}"

    def _fitting(self, deploy: Deploy, plan: Plan, pool: str) -> Plan | None:
        """The plan with another deploy, if a pool and the hosts have the memory then."""
        other = self.passes["place"].apply(Plan(plan.graph, plan.cluster, deploy))
        if self.misplaced(other):
            return None
        other = self.passes.after("place").until("memory").apply(other)
        concerned = [m for m in other.memory if m.pool == pool or m.place == "host"]
        return other if all(m.total <= m.capacity.value for m in concerned) else None
