"""The devices of a run on Ray: reserved together, or refused in words that say who has them.

Invariant: nothing is started before the devices are the run's; what runs that end or die held comes free without them.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from importlib import import_module
from typing import Any, NamedTuple

from ...diagnostics import Diagnostic
from ...emit.humanize import many
from ...ir.plan import Plan
from ..process.cluster_join import NoResources, living
from .dock_monitor import missing

WAIT = 60.0  # seconds until devices that do not come are refused
HELD = 10.0  # the same, of devices that other runs have: one that has just ended gives them back within
NAMED = "msrl-run"  # how the names of what runs reserve begin


class DeviceReservation(NamedTuple):
    """A placement group with a bundle of devices on each host, and of each of the plan's hosts the bundle, its node's
    id in Ray, and its address there. The first is the machine that the run is driven from, where that is one: it reads
    the data and writes the weights."""

    group: Any
    bundles: list[int]
    nodes: list[str]
    addresses: list[str]

    def on(self, host: int) -> Any:
        """How an actor is put on a host."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[host])


class NotEnoughHosts(NoResources):
    """`hosts` have the devices that are asked of each, fewer than are asked for."""

    def __init__(self, diagnostic: Diagnostic, hosts: int) -> None:
        super().__init__(diagnostic)
        self.hosts = hosts


def reserved(plan: Plan, name: str, patience: float = 0.0) -> DeviceReservation:
    """Reserves a plan's devices, and waits for so many seconds for hosts that are not there. Raises NoResources with
    what was asked, what there is, and which runs have it."""
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    cluster = plan.cluster
    nodes = cluster.nodes
    each = float(cluster.devices_per_node)
    kind = cluster.device.resource
    begin = time.monotonic()
    own = ray.util.get_node_ip_address()
    group = None
    while group is None or not group.wait(2):
        # A host that has just been lost Ray takes for alive: what is reserved there never comes.
        known = living()
        lost = missing(n["NodeID"] for n in known) if len(known) > 1 else set()
        there = [(n["NodeManagerAddress"], n["Resources"].get(kind, 0)) for n in known]
        there = [(address, count) for address, count in there if address not in lost]
        # First where the run is driven, if it is one of them.
        hosts = sorted((address for address, count in there if count >= each), key=lambda address: address != own)
        if group is None and len(hosts) >= nodes:
            pinned = [f"node:{address}" for address in hosts[:nodes]] if lost else []
            asked = [{kind: each} | ({pinned[i]: 0.001} if pinned else {}) for i in range(nodes)]
            group = placement_group(asked, strategy="STRICT_SPREAD" if nodes > 1 else "PACK", name=name)
            continue
        others = _others(name)
        short = len(hosts) < nodes
        passed = time.monotonic() - begin
        if passed > patience and (short or passed > WAIT or (others and passed > HELD)):
            if group is not None:
                ray.util.remove_placement_group(group)
            held = sum(count for _, count in there)
            free = min(held, ray.available_resources().get(kind, 0))
            diagnostic = Diagnostic(
                "no-resources",
                f"the plan asks for {many(nodes, 'host')} of {each:g} {kind}; Ray has "
                f"{many(len(there), 'host')}, "
                f"{held:g} {kind} in all, {free:g} of them free"
                + "".join(f"\n  {host}" for host in _free(kind, lost))
                + "".join(f"\n  {other} has {count:g} {kind}" for other, count in others.items()),
                cluster.span,
                "wait for the end of the run that has them, or end it"
                if others and not short
                else "lower `nodes` or `devices_per_node`, or free the devices",
            )
            raise NotEnoughHosts(diagnostic, len(hosts)) if short else NoResources(diagnostic)
        if group is None:
            time.sleep(1)
    here = ray.get_runtime_context().get_node_id()
    at = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    where = placement_group_table(group)["bundles_to_node_id"]
    bundles = sorted(range(nodes), key=lambda i: (where[i] != here, at[where[i]]))
    found = [where[i] for i in bundles]
    return DeviceReservation(group, bundles, found, [at[node] for node in found])


def _others(name: str) -> dict[str, float]:
    """By name what other runs have reserved."""
    from ray.util.placement_group import placement_group_table

    found: dict[str, float] = {}
    for group in placement_group_table().values():
        if group["state"] == "CREATED" and group["name"].startswith(NAMED) and group["name"] != name:
            held = sum(sum(bundle.values()) for bundle in group["bundles"].values())
            found[group["name"]] = found.get(group["name"], 0) + held
    return found


def _free(kind: str, lost: Collection[str]) -> list[str]:
    """What each host that is not lost has, and has free; nothing where this Ray does not tell, as it may."""
    try:
        free = import_module("ray._private.state").available_resources_per_node()
    except (ImportError, AttributeError):
        return []
    return [
        f"{node['NodeManagerAddress']} has {free.get(node['NodeID'], {}).get(kind, 0):g} of "
        f"{node['Resources'].get(kind, 0):g} {kind} free"
        for node in living()
        if node["NodeManagerAddress"] not in lost
    ]


__all__ = ["NAMED", "DeviceReservation", "NotEnoughHosts", "reserved"]
