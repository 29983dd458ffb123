"""pools: which nodes share which devices, and which other ways to divide the devices a deploy leaves open.

Invariant: every node with weights is in one pool; pools are stretches of devices, in the order of their first one.
Where the devices do not suffice, a pool lies beyond the cluster's last device: checks/layout.py tells of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations, product

from ..ir.attributes import ReshardingEdgeAttributes
from ..ir.graph import Edge, Node
from ..ir.plan import DEVICES, Plan, Pool, shared_staleness
from ..sharding.device_range import device_range, meet, runs

# Of so many hosts (or devices of one) up to 4 may make a pool, or all but those; of more, some eighths.
FINE = 8


@dataclass(frozen=True)
class Division:
    """Pools; for nodes that the deploy names nowhere what they were put beside ("" if it names all, or none); the nodes
    it names."""

    pools: tuple[Pool, ...]
    beside: str = ""
    named: frozenset[str] = frozenset()

    def pool_of(self, node: str) -> Pool:
        return next(p for p in self.pools if node in p.nodes)


def nodes_of(plan: Plan) -> list[Node]:
    """The nodes with weights, in the order of the graph."""
    kept = {w.name for w in plan.graph.workers if w.kind != "function"}
    return [n for n in plan.graph.nodes if n.worker in kept]


def divide(plan: Plan, shares: tuple[int, ...] = ()) -> Division:
    """The division that a deploy states; `shares` are the devices of the pools that nothing in it sizes, else they are
    even."""
    if not plan.deploy.pools:
        return Division((Pool(tuple(n.name for n in nodes_of(plan)), 0, plan.cluster.devices, DEVICES),))
    named = frozenset(n for p in plan.deploy.pools for n in p.nodes)
    stated, beside = _home(plan, named)
    laid = _lay(
        _share(_size(plan, stated), plan.cluster.devices, shares), plan.cluster.devices, plan.cluster.devices_per_node
    )
    return Division(tuple(sorted(laid, key=lambda p: p.first)), beside, named)


def divisions(plan: Plan) -> list[Division]:
    """The division that the deploy states, or all nodes together, and what else it leaves open; where the program says
    that not every version of some weights is sent, only such as have their ends apart, if any do. Never empty."""
    found = list(_every(plan))
    seldom = [e for e in plan.graph.reshards() if ReshardingEdgeAttributes.of(e).every > 1]
    apart = [d for d in found if all(d.pool_of(e.src) != d.pool_of(e.dst) for e in seldom)]
    return apart or found


def open_to_staleness(plan: Plan) -> bool:
    """Whether the deploy lets generations be apart from the updates that they may be behind."""
    return any(not shared_staleness(plan.graph, lambda n, d=d: d.pool_of(n).name) for d in _every(plan))  # type: ignore[misc]


def in_step(plan: Plan) -> Plan:
    """It without staleness."""

    def newest(edge: Edge) -> Edge:
        return replace(edge, attributes={k: v for k, v in edge.attributes.items() if k not in ("staleness", "every")})

    return replace(plan, graph=replace(plan.graph, edges=tuple(map(newest, plan.graph.edges))))


def _every(plan: Plan) -> Iterator[Division]:
    """Where the deploy says nothing of pools: all nodes together, generations apart, nodes that nothing updates apart,
    or both. Pools take whole hosts where there are enough."""
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
    """Which nodes might have devices apart from the others, where the deploy says nothing of pools or layouts.

    There are up to three kinds of blocks: all generations; all nodes whose weights nothing updates; and, for each
    worker that is updated, its infers and updates. They are parted in two in every way; and generations and frozen
    nodes also each apart from what is updated.
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
    """Devices for each of some pools, all of `left` together: the first has what the others leave."""
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
    # Devices that are no whole number of hosts go to the first.
    return sorted((left - unit * sum(parted[1:]), *(unit * n for n in parted[1:])) for parted in found)


def _home(plan: Plan, named: frozenset[str]) -> tuple[list[Pool], str]:
    """The stated pools with the nodes that none of them names in one of them, or in a pool of their own; beside what,
    in the former case."""
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
    """Pools with their numbers of devices: stated, or by a layout (an update's before others'), 0 where nothing sizes
    them; `first` is
    -1 where it is open."""
    layouts = plan.deploy.layouts
    sized = []
    for pool in pools:
        laid_out = [n for n in pool.nodes if n in layouts and layouts[n].dp]
        if pool.devices:
            pool = replace(pool, reason="as placed")
        elif laid_out:
            first = min(laid_out, key=lambda n: plan.graph.node(n).verb != "update")
            pool = replace(pool, first=-1, devices=layouts[first].devices, reason=f"as the layout of {first} takes")
        sized.append(pool)
    return sized


def _share(pools: list[Pool], every: int, shares: tuple[int, ...]) -> list[Pool]:
    """What nothing sizes gets a share of what is left: those of `shares`, else even ones."""
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
    """Each open pool on the first gap that is long enough, else on equal gaps of some hosts in a row, else beyond the
    last device."""
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
    """In a row, or so many on each of some hosts, the fewest hosts first."""
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
