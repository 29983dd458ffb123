"""pools: which states share which devices.

Invariant: every state with weights is in one pool; pools are stretches of devices in the order of their first one. Where the devices do
not suffice, a pool lies beyond the cluster's last device: checks/layout.py tells of it.
"""

from __future__ import annotations

from dataclasses import replace

from ..plan import Plan, Pool, device_range

DEVICES, FUNCTIONS = "devices", "functions"


def divide(plan: Plan) -> tuple[tuple[Pool, ...], str]:
    """The pools, and for states that the deploy names nowhere what they were put beside ("" if it names all, or none)."""
    graph, stated, every = plan.graph, list(plan.deploy.pools), plan.cluster.devices
    states = [n.name for n in graph.nodes if n.verb != "source" and graph.worker(n.worker).kind != "function"]
    named = {n for p in stated for n in p.nodes}
    rest, beside = tuple(n for n in states if n not in named), ""
    if not stated:
        return (Pool(tuple(states), 0, every, DEVICES),), ""
    if rest:
        updates = next((p for p in stated if any(graph.node(n).verb == "update" for n in p.nodes)), None)
        free = sum(p.devices for p in stated) < every
        fixed = all(p.devices for p in stated)
        if free and (updates is None or fixed):
            stated.append(Pool(rest, span=plan.deploy.span))
        else:
            home = updates or stated[0]
            beside = next((n for n in home.nodes if graph.node(n).verb == "update"), home.nodes[0])
            stated[stated.index(home)] = replace(home, nodes=tuple(n for n in states if n in {*home.nodes, *rest}))
    return tuple(sorted(_lay(_size(plan, stated), every), key=lambda p: p.first)), beside


def _size(plan: Plan, pools: list[Pool]) -> list[Pool]:
    """Pools with their numbers of devices: stated, by a layout (an update's before others'), or an even share of what is left; `first`
    is -1 where it is open."""
    layouts, every, sized = plan.deploy.layouts, plan.cluster.devices, []
    for pool in pools:
        laid_out = [n for n in pool.nodes if n in layouts and layouts[n].dp]
        if pool.devices:
            pool = replace(pool, reason="as placed")
        elif laid_out:
            first = min(laid_out, key=lambda n: plan.graph.node(n).verb != "update")
            pool = replace(pool, first=-1, devices=layouts[first].devices, reason=f"as the layout of {first} takes")
        sized.append(pool)
    unsized = [i for i, p in enumerate(sized) if not p.devices]
    left = every - sum(p.devices for p in sized)
    reason = "what is left" if len(unsized) == 1 else "an even share"
    for done, i in enumerate(unsized):
        share = max(1, -(-left // (len(unsized) - done)))
        sized[i] = replace(sized[i], first=-1, devices=share, reason=reason)
        left -= share
    return sized


def _lay(pools: list[Pool], every: int) -> list[Pool]:
    """Each open pool on the first gap that is long enough, else beyond the last device."""
    laid = [p for p in pools if p.first >= 0]
    for pool in (p for p in pools if p.first < 0):
        starts = sorted([0, *(p.first + p.devices for p in laid)])
        fits = (s for s in starts if s + pool.devices <= every and not any(_meet(s, pool.devices, p) for p in laid))
        laid.append(replace(pool, first=next(fits, every)))
    return [replace(p, name=_name(p, every)) for p in laid]


def _meet(first: int, number: int, pool: Pool) -> bool:
    return first < pool.first + pool.devices and pool.first < first + number


def _name(pool: Pool, every: int) -> str:
    return DEVICES if (pool.first, pool.devices) == (0, every) else device_range(pool.first, pool.devices)
