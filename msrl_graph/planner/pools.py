"""pools: which nodes share which devices, and the divisions that a deploy allows.

Invariant: every node with weights is in one pool; pools are ranges of devices, in the order of their first device. If
there are too few devices, a pool lies beyond the cluster's last one: checks/layout.py reports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations, product

from ..ir.attributes import ReshardingEdgeAttributes
from ..ir.graph import Edge, Node
from ..ir.plan import DEVICES, Plan, Pool, shared_staleness
from ..sharding.device_range import device_range, meet, runs

# Up to this many hosts (or devices of one host), a pool takes 1 to 4 of them, or all but those; of more, some eighths.
FINE = 8


@dataclass(frozen=True)
class Division:
    """A division of the devices into pools.

    `named` are the nodes that the deploy names. `beside` is the node whose pool the other nodes joined, "" if there are
    none.
    """

    pools: tuple[Pool, ...]
    beside: str = ""
    named: frozenset[str] = frozenset()

    def pool_of(self, node: str) -> Pool:
        return next(p for p in self.pools if node in p.nodes)


def nodes_of(plan: Plan) -> list[Node]:
    """Return the nodes with weights, in the order of the graph."""
    kept = {w.name for w in plan.graph.workers if w.kind != "function"}
    return [n for n in plan.graph.nodes if n.worker in kept]


def divide(plan: Plan, shares: tuple[int, ...] = ()) -> Division:
    """Return the division that a deploy states.

    `shares` are the devices of the pools whose size nothing states; without it the shares are even.
    """
    if not plan.deploy.pools:
        return Division((Pool(tuple(n.name for n in nodes_of(plan)), 0, plan.cluster.devices, DEVICES),))
    named = frozenset(n for p in plan.deploy.pools for n in p.nodes)
    stated, beside = _home(plan, named)
    laid = _lay(
        _share(_size(plan, stated), plan.cluster.devices, shares), plan.cluster.devices, plan.cluster.devices_per_node
    )
    return Division(tuple(sorted(laid, key=lambda p: p.first)), beside, named)


def divisions(plan: Plan) -> list[Division]:
    """Return the stated division (or all nodes together) and the others that are open.

    If the program does not send every version of some weights, only divisions that separate the ends of such edges are
    returned, if there are any. The result is never empty.
    """
    found = list(_every(plan))
    seldom = [e for e in plan.graph.reshards() if ReshardingEdgeAttributes.of(e).every > 1]
    apart = [d for d in found if all(d.pool_of(e.src) != d.pool_of(e.dst) for e in seldom)]
    return apart or found


def open_to_staleness(plan: Plan) -> bool:
    """Return whether the deploy allows generations on other devices than the updates."""
    return any(not shared_staleness(plan.graph, lambda n, d=d: d.pool_of(n).name) for d in _every(plan))  # type: ignore[misc]


def in_step(plan: Plan) -> Plan:
    """Return the plan without staleness."""

    def newest(edge: Edge) -> Edge:
        return replace(edge, attributes={k: v for k, v in edge.attributes.items() if k not in ("staleness", "every")})

    return replace(plan, graph=replace(plan.graph, edges=tuple(map(newest, plan.graph.edges))))


def _every(plan: Plan) -> Iterator[Division]:
    """Yield all divisions that the deploy allows, each once.

    If it states no pools, these are: all nodes together, generations apart, never-updated nodes apart, or both. Pools
    take whole hosts where there are enough.
    """
    yield (first := divide(plan))
    seen = {_sizes(first)}
    for groups in [()] if plan.deploy.pools else _groups(plan):
        apart = replace(plan, deploy=replace(plan.deploy, pools=tuple(map(Pool, groups)))) if groups else plan
        sized = _size(apart, _home(apart, frozenset(n for p in apart.deploy.pools for n in p.nodes))[0])
        left = plan.cluster.devices - sum(p.devices for p in sized)
        for shares in _shares(sum(not p.devices for p in sized), left, plan.cluster.devices_per_node):
            found = divide(apart, shares)
            if _sizes(found) not in seen and all(p.first + p.devices <= plan.cluster.devices for p in found.pools):
                seen.add(_sizes(found))
                yield found


def _sizes(division: Division) -> tuple[tuple[tuple[str, ...], int], ...]:
    return tuple((p.nodes, p.devices) for p in division.pools)


def _groups(plan: Plan) -> list[tuple[tuple[str, ...], ...]]:
    """Return which nodes might have devices of their own.

    The deploy states no pools and no layouts. There are up to three kinds of blocks: all generations; all nodes whose
    weights nothing updates; and, for each updated worker, its infers and updates. The blocks are split in two in every
    way. In addition, generations and frozen nodes are each split off from what is updated.
    """
    nodes = nodes_of(plan)
    if plan.deploy.layouts:
        return []
    updated = dict.fromkeys(n.worker for n in nodes if n.verb == "update")
    generate = [n.name for n in nodes if n.verb == "generate"]
    frozen = [n.name for n in nodes if n.worker not in updated and n.verb != "generate"]
    trained = [[n.name for n in nodes if n.worker == w and n.verb != "generate"] for w in updated]
    blocks = [b for b in (generate, frozen, *trained) if b]
    apart = [[[*chain(*some)]] for size in range(1, len(blocks)) for some in combinations(blocks, size)]
    found: list[tuple[tuple[str, ...], ...]] = []
    for some in [*apart, *([[generate, frozen]] if generate and frozen else [])]:
        parted = [tuple(n.name for n in nodes if n.name in group) for group in some]
        rest = tuple(n.name for n in nodes if not any(n.name in g for g in parted))
        split = any(0 < len({*g} & {*t}) < len(t) for g in parted for t in plan.deploy.together)
        if rest and not split and not any({rest, *parted} == {*f} for f in found):
            found.append((rest, *parted))
    return found


def _shares(pools: int, left: int, per_host: int) -> list[tuple[int, ...]]:
    """Return ways to share `left` devices among some pools.

    The first pool gets what the others leave.
    """
    if pools < 2 or left < pools:
        return []
    unit = per_host if left % per_host == 0 and left // per_host >= pools else 1
    units = left // unit
    if units <= FINE:
        found = {(units - sum(some), *some) for some in product(range(1, 5), repeat=pools - 1) if units > sum(some)}
        found |= {parted[::-1] for parted in found} if pools == 2 else set()
    else:
        eighths = (1, 2, 4, 6) if pools == 2 else (1, 2)
        some_of = product((units * n // 8 for n in eighths), repeat=pools - 1)
        found = {(units - sum(some), *some) for some in some_of if units > sum(some)}
    # Devices that do not fill a host go to the first pool.
    return sorted((left - unit * sum(parted[1:]), *(unit * n for n in parted[1:])) for parted in found)


def _home(plan: Plan, named: frozenset[str]) -> tuple[list[Pool], str]:
    """Put the nodes that no stated pool names into one of them, or into a new pool.

    Returns the pools and, in the first case, the node that they share a pool with.
    """
    stated = list(plan.deploy.pools)
    nodes = [n.name for n in nodes_of(plan)]
    rest = tuple(n for n in nodes if n not in named)
    if not rest:
        return stated, ""
    updates = next((p for p in stated if any(plan.graph.node(n).verb == "update" for n in p.nodes)), None)
    free = sum(p.devices for p in stated) < plan.cluster.devices
    if free and (updates is None or all(p.devices for p in stated)):
        return [*stated, Pool(rest, span=plan.deploy.span)], ""
    home = updates or stated[0]
    stated[stated.index(home)] = replace(home, nodes=tuple(n for n in nodes if n in {*home.nodes, *rest}))
    return stated, next((n for n in home.nodes if plan.graph.node(n).verb == "update"), home.nodes[0])


def _size(plan: Plan, pools: list[Pool]) -> list[Pool]:
    """Set the sizes of pools that are stated or follow from a layout.

    An update's layout comes before others. The size stays 0 if nothing sets it; `first` is -1 where it is open.
    """
    layouts = plan.deploy.layouts
    sized = []
    for pool in pools:
        laid_out = [n for n in pool.nodes if n in layouts and layouts[n].dp]
        if pool.devices:
            pool = replace(pool, reason="as placed")
        elif laid_out:
            first = min(laid_out, key=lambda n: plan.graph.node(n).verb != "update")
            pool = replace(pool, first=-1, devices=layouts[first].devices, reason=f"the size of the layout of {first}")
        sized.append(pool)
    return sized


def _share(pools: list[Pool], every: int, shares: tuple[int, ...]) -> list[Pool]:
    """Share the remaining devices among pools without a size, by `shares` or evenly."""
    open_ = sum(not p.devices for p in pools)
    left = every - sum(p.devices for p in pools)
    done = 0
    shared = []
    reason = "what is left" if open_ == 1 else "planned" if shares else "an even share"
    for pool in pools:
        if not pool.devices:
            share = shares[done] if shares else max(1, -(-left // (open_ - done)))
            pool = replace(pool, first=-1, devices=share, reason=reason)
            left = left - share
            done = done + 1
        shared.append(pool)
    return shared


def _lay(pools: list[Pool], every: int, per_host: int) -> list[Pool]:
    """Put each open pool into the first gap that is long enough.

    Otherwise it goes into equal gaps of consecutive hosts, or beyond the last device.
    """
    laid = [p for p in pools if p.first >= 0]
    for pool in (p for p in pools if p.first < 0):
        taken = [(p.first, p.devices, p.each) for p in laid]
        ends = {0, *(stop for some in taken for _, stop in runs(*some, per_host))}
        tried = ((first, each) for each in _each(pool.devices, every, per_host) for first in sorted(ends))
        fits = (at for at in tried if _free(at[0], pool.devices, at[1], every, per_host, taken))
        first, each = next(fits, (every, 0))
        laid.append(replace(pool, first=first, each=each))
    return [replace(p, name=_name(p, every, per_host)) for p in laid]


def _each(devices: int, every: int, per_host: int) -> Iterator[int]:
    """Yield devices per host for a pool, the fewest hosts first; 0 is a full range."""
    yield 0
    yield from (
        n for n in range(per_host - 1, 0, -1) if devices % n == 0 and n < devices and devices // n * per_host <= every
    )


def _free(first: int, devices: int, each: int, every: int, per_host: int, taken: list[tuple[int, int, int]]) -> bool:
    last = first + devices if not each else first + (devices // each - 1) * per_host + each
    within = not each or first % per_host + each <= per_host
    return within and last <= every and not any(meet((first, devices, each), some, per_host) for some in taken)


def _name(pool: Pool, every: int, per_host: int) -> str:
    return (
        DEVICES
        if (pool.first, pool.devices) == (0, every)
        else device_range(pool.first, pool.devices, pool.each, per_host)
    )
