"""Pools: which nodes share which devices, and the divisions that a deploy allows.

A division is a list of pools that together contain all nodes with weights. Invariant: every node with weights is in one
pool. A pool is a range of devices. Pools are in the order of their first device. If there are too few devices, a pool
is placed beyond the cluster's last device, and checks/layout.py reports the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations, product

from ..ir.attributes import ReshardingEdgeAttributes
from ..ir.graph import Edge, Node
from ..ir.plan import DEVICES, Plan, Pool, shared_staleness
from ..sharding.device_range import format_device_range, iterate_runs, ranges_overlap

# Up to this many hosts (or devices of one host), a pool takes 1 to 4 of them, or all but those; of more, some eighths.
FINE = 8


@dataclass(frozen=True)
class Division:
    """A division of the devices into pools.

    `named` are the nodes that the deploy lists in its pools. If the other nodes were added to one of these pools,
    `joined_node` is a node of that pool; otherwise it is "".
    """

    pools: tuple[Pool, ...]
    joined_node: str = ""
    named: frozenset[str] = frozenset()

    def pool_of(self, node: str) -> Pool:
        return next(pool for pool in self.pools if node in pool.nodes)


def nodes_of(plan: Plan) -> list[Node]:
    """Return the nodes with weights, in the order of the graph."""
    workers = {worker.name for worker in plan.graph.workers if worker.kind != "function"}
    return [node for node in plan.graph.nodes if node.worker in workers]


def divide(plan: Plan, shares: tuple[int, ...] = ()) -> Division:
    """Return the division into pools that a deploy states.

    `shares` are the numbers of devices of the pools whose size the deploy leaves open. Without `shares`, these pools
    get equal numbers of devices.
    """
    if not plan.deploy.pools:
        return Division((Pool(tuple(node.name for node in nodes_of(plan)), 0, plan.cluster.devices, DEVICES),))
    named = frozenset(node for pool in plan.deploy.pools for node in pool.nodes)
    stated, beside = _assign_unnamed(plan, named)
    laid = _lay_out(
        _share_devices(_set_sizes(plan, stated), plan.cluster.devices, shares),
        plan.cluster.devices,
        plan.cluster.devices_per_node,
    )
    return Division(tuple(sorted(laid, key=lambda pool: pool.first)), beside, named)


def divisions(plan: Plan) -> list[Division]:
    """Return all divisions into pools that the deploy allows.

    Some resharding edges send only every n-th version of the weights. If possible, every returned division puts the
    update and the generation of each of these edges into different pools. The result is never empty.
    """
    every_division = list(_list_divisions(plan))
    seldom = [edge for edge in plan.graph.reshards() if ReshardingEdgeAttributes.of(edge).every > 1]
    apart = [
        division
        for division in every_division
        if all(division.pool_of(edge.src) != division.pool_of(edge.dst) for edge in seldom)
    ]
    return apart or every_division


def open_to_staleness(plan: Plan) -> bool:
    """Return whether the deploy allows generations on other devices than the updates."""
    return any(
        not shared_staleness(plan.graph, lambda node, division=division: division.pool_of(node).name)  # type: ignore[misc]
        for division in _list_divisions(plan)
    )


def without_staleness(plan: Plan) -> Plan:
    """Return the plan after removing `staleness` and `every` from its edges."""

    def drop_staleness(edge: Edge) -> Edge:
        return replace(
            edge,
            attributes={name: value for name, value in edge.attributes.items() if name not in ("staleness", "every")},
        )

    return replace(plan, graph=replace(plan.graph, edges=tuple(map(drop_staleness, plan.graph.edges))))


def _list_divisions(plan: Plan) -> Iterator[Division]:
    """Yield all divisions that the deploy allows, each once.

    If the deploy states pools, the first division is the stated one. If the deploy states no pools, the first division
    has one pool with all nodes, and the divisions of `_possible_groups` follow. Pools consist of whole hosts if there
    are enough hosts.
    """
    yield (first := divide(plan))
    seen = {_division_key(first)}
    for groups in [()] if plan.deploy.pools else _possible_groups(plan):
        apart = replace(plan, deploy=replace(plan.deploy, pools=tuple(map(Pool, groups)))) if groups else plan
        sized = _set_sizes(
            apart, _assign_unnamed(apart, frozenset(node for pool in apart.deploy.pools for node in pool.nodes))[0]
        )
        unsized = plan.cluster.devices - sum(pool.devices for pool in sized)
        for shares in _possible_shares(sum(not pool.devices for pool in sized), unsized, plan.cluster.devices_per_node):
            division = divide(apart, shares)
            if _division_key(division) not in seen and all(
                pool.first + pool.devices <= plan.cluster.devices for pool in division.pools
            ):
                seen.add(_division_key(division))
                yield division


def _division_key(division: Division) -> tuple[tuple[tuple[str, ...], int], ...]:
    return tuple((pool.nodes, pool.devices) for pool in division.pools)


def _possible_groups(plan: Plan) -> list[tuple[tuple[str, ...], ...]]:
    """Return the ways to put nodes into separate pools, if the deploy states no pools.

    Nodes are first joined into blocks that are never split. One block has all generations. One block has all nodes
    whose weights are never updated. For each updated worker, one block has its infer and update nodes. Each result
    splits the blocks into two groups. One more result has three groups: generations, frozen nodes and all other nodes.
    Results that separate nodes which the deploy puts together are left out. If the deploy states layouts, there are no
    results.
    """
    nodes = nodes_of(plan)
    if plan.deploy.layouts:
        return []
    updated = dict.fromkeys(node.worker for node in nodes if node.verb == "update")
    generate = [node.name for node in nodes if node.verb == "generate"]
    frozen = [node.name for node in nodes if node.worker not in updated and node.verb != "generate"]
    trained = [[node.name for node in nodes if node.worker == worker and node.verb != "generate"] for worker in updated]
    blocks = [block for block in (generate, frozen, *trained) if block]
    apart = [[[*chain(*chosen)]] for size in range(1, len(blocks)) for chosen in combinations(blocks, size)]
    found_groups: list[tuple[tuple[str, ...], ...]] = []
    for split_off in [*apart, *([[generate, frozen]] if generate and frozen else [])]:
        parted = [tuple(node.name for node in nodes if node.name in group) for group in split_off]
        rest = tuple(node.name for node in nodes if not any(node.name in group for group in parted))
        split = any(0 < len({*group} & {*tied}) < len(tied) for group in parted for tied in plan.deploy.together)
        if rest and not split and not any({rest, *parted} == {*known} for known in found_groups):
            found_groups.append((rest, *parted))
    return found_groups


def _possible_shares(pools: int, devices: int, per_host: int) -> list[tuple[int, ...]]:
    """Return the ways to divide `devices` devices among `pools` pools.

    Each way is a tuple with the number of devices of each pool. The first pool gets the devices that no other pool
    gets.
    """
    if pools < 2 or devices < pools:
        return []
    unit = per_host if devices % per_host == 0 and devices // per_host >= pools else 1
    units = devices // unit
    if units <= FINE:
        splits = {
            (units - sum(others), *others) for others in product(range(1, 5), repeat=pools - 1) if units > sum(others)
        }
        splits |= {parted[::-1] for parted in splits} if pools == 2 else set()
    else:
        eighths = (1, 2, 4, 6) if pools == 2 else (1, 2)
        some_of = product((units * eighth // 8 for eighth in eighths), repeat=pools - 1)
        splits = {(units - sum(others), *others) for others in some_of if units > sum(others)}
    # Devices that do not fill a host go to the first pool.
    return sorted((devices - unit * sum(parted[1:]), *(unit * count for count in parted[1:])) for parted in splits)


def _assign_unnamed(plan: Plan, named: frozenset[str]) -> tuple[list[Pool], str]:
    """Assign each node that no stated pool lists to a stated pool or to a new pool.

    `named` are the nodes that stated pools list. Returns the pools, and the name of a node of the stated pool to which
    nodes were added ("" if there is no such pool).
    """
    stated = list(plan.deploy.pools)
    nodes = [node.name for node in nodes_of(plan)]
    rest = tuple(node for node in nodes if node not in named)
    if not rest:
        return stated, ""
    updates = next(
        (pool for pool in stated if any(plan.graph.node(node).verb == "update" for node in pool.nodes)), None
    )
    free = sum(pool.devices for pool in stated) < plan.cluster.devices
    if free and (updates is None or all(pool.devices for pool in stated)):
        return [*stated, Pool(rest, span=plan.deploy.span)], ""
    home = updates or stated[0]
    stated[stated.index(home)] = replace(home, nodes=tuple(node for node in nodes if node in {*home.nodes, *rest}))
    return stated, next((node for node in home.nodes if plan.graph.node(node).verb == "update"), home.nodes[0])


def _set_sizes(plan: Plan, pools: list[Pool]) -> list[Pool]:
    """Set the size of each pool that has a stated size or a node with a stated layout.

    The layout of an update has precedence over other layouts. The size of every other pool remains 0. If the size comes
    from a layout, the pool's `first` is set to -1, because the pool's position is open.
    """
    layouts = plan.deploy.layouts
    sized = []
    for pool in pools:
        laid_out = [node for node in pool.nodes if node in layouts and layouts[node].dp]
        if pool.devices:
            pool = replace(pool, reason="as placed")
        elif laid_out:
            first = min(laid_out, key=lambda node: plan.graph.node(node).verb != "update")
            pool = replace(pool, first=-1, devices=layouts[first].devices, reason=f"the size of the layout of {first}")
        sized.append(pool)
    return sized


def _share_devices(pools: list[Pool], devices: int, shares: tuple[int, ...]) -> list[Pool]:
    """Give the unused devices of the cluster to the pools that have no size.

    `devices` is the number of devices of the cluster. `shares` has the number of devices for each pool without a size.
    If `shares` is empty, these pools get equal numbers of devices.
    """
    open_ = sum(not pool.devices for pool in pools)
    unshared = devices - sum(pool.devices for pool in pools)
    done = 0
    shared = []
    reason = "what is left" if open_ == 1 else "planned" if shares else "an even share"
    for pool in pools:
        if not pool.devices:
            share = shares[done] if shares else max(1, -(-unshared // (open_ - done)))
            pool = replace(pool, first=-1, devices=share, reason=reason)
            unshared = unshared - share
            done = done + 1
        shared.append(pool)
    return shared


def _lay_out(pools: list[Pool], devices: int, per_host: int) -> list[Pool]:
    """Put each pool without a position into the first range of free devices that fits.

    If there is no such range, the pool gets the same number of devices on each of several consecutive hosts. If that is
    also impossible, the pool is placed beyond the last device.
    """
    laid = [open_pool for open_pool in pools if open_pool.first >= 0]
    for pool in (open_pool for open_pool in pools if open_pool.first < 0):
        used = [(placed.first, placed.devices, placed.each) for placed in laid]
        ends = {0, *(stop for taken_range in used for _, stop in iterate_runs(*taken_range, per_host))}
        tried = (
            (first, per_host_devices)
            for per_host_devices in _devices_per_host(pool.devices, devices, per_host)
            for first in sorted(ends)
        )
        fits = (
            position for position in tried if _is_free(position[0], pool.devices, position[1], devices, per_host, used)
        )
        first, per_host_devices = next(fits, (devices, 0))
        laid.append(replace(pool, first=first, each=per_host_devices))
    return [replace(laid_pool, name=_pool_name(laid_pool, devices, per_host)) for laid_pool in laid]


def _devices_per_host(devices: int, total: int, per_host: int) -> Iterator[int]:
    """Yield how many devices of each host a pool may use, fewest hosts first.

    `devices` is the number of the pool's devices, and `total` is the number of the cluster's devices. The number 0
    means that the pool is one contiguous range of devices.
    """
    yield 0
    yield from (
        count
        for count in range(per_host - 1, 0, -1)
        if devices % count == 0 and count < devices and devices // count * per_host <= total
    )


def _is_free(
    first: int, devices: int, on_host: int, total: int, per_host: int, used: list[tuple[int, int, int]]
) -> bool:
    last = first + devices if not on_host else first + (devices // on_host - 1) * per_host + on_host
    within = not on_host or first % per_host + on_host <= per_host
    return (
        within
        and last <= total
        and not any(ranges_overlap((first, devices, on_host), range_used, per_host) for range_used in used)
    )


def _pool_name(pool: Pool, total: int, per_host: int) -> str:
    return (
        DEVICES
        if (pool.first, pool.devices) == (0, total)
        else format_device_range(pool.first, pool.devices, pool.each, per_host)
    )
