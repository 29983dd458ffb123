"""Reservation of a run's devices on Ray.

If the devices are held by other runs, the error message names these runs.

Invariant: no process of a run starts before the run has reserved its devices. When a run ends or dies, its devices
become free without any action of the run.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from importlib import import_module
from typing import Any, NamedTuple

from ...diagnostics import Diagnostic
from ...diagnostics.quantities import plural
from ...ir.plan import Plan
from ..process.cluster_join import NoResources, live_nodes
from .dock_monitor import unreachable_hosts

WAIT = 60.0  # seconds to wait for devices before the run is refused
HELD = 10.0  # seconds to wait if other runs hold devices: a run that just ended frees its devices by then
NAME_PREFIX = "msrl-run"  # prefix of the names of reservations


class DeviceReservation(NamedTuple):
    """A placement group of Ray with a bundle of devices on each host.

    `bundles`, `nodes` and `addresses` have an entry for each host of the plan: the index of the host's bundle, the
    host's node id in Ray, and the host's address. The driver's machine is the plan's first host if devices on this
    machine are reserved, because the first host reads the data and writes the weights.
    """

    group: Any
    bundles: list[int]
    nodes: list[str]
    addresses: list[str]

    def strategy_for(self, host: int) -> Any:
        """Return the Ray scheduling strategy that places an actor on a host."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[host])


class NotEnoughHosts(NoResources):
    """Error: only `hosts` hosts have the requested devices, but the plan needs more."""

    def __init__(self, diagnostic: Diagnostic, hosts: int) -> None:
        super().__init__(diagnostic)
        self.hosts = hosts


def reserve_devices(plan: Plan, name: str, patience: float = 0.0) -> DeviceReservation:
    """Reserve a plan's devices on Ray, under the name `name`.

    If Ray has fewer hosts than the plan needs, the function waits up to `patience` seconds for more hosts. Raises
    NoResources. The message of this error lists the requested devices, the existing devices, and the other runs that
    hold devices.
    """
    import ray
    from ray.util.placement_group import placement_group, placement_group_table

    cluster = plan.cluster
    nodes = cluster.nodes
    devices_per_host = float(cluster.devices_per_node)
    kind = cluster.device.resource
    begin = time.monotonic()
    own = ray.util.get_node_ip_address()
    group = None
    while group is None or not group.wait(2):
        # Ray still reports a host that was just lost as alive; a reservation there never completes.
        known = live_nodes()
        lost = unreachable_hosts(node["NodeID"] for node in known) if len(known) > 1 else set()
        host_devices = [(node["NodeManagerAddress"], node["Resources"].get(kind, 0)) for node in known]
        host_devices = [(address, count) for address, count in host_devices if address not in lost]
        # The driver's host comes first, if it is one of them.
        hosts = sorted(
            (address for address, count in host_devices if count >= devices_per_host),
            key=lambda address: address != own,
        )
        if group is None and len(hosts) >= nodes:
            pinned = [f"node:{address}" for address in hosts[:nodes]] if lost else []
            requested = [{kind: devices_per_host} | ({pinned[i]: 0.001} if pinned else {}) for i in range(nodes)]
            group = placement_group(requested, strategy="STRICT_SPREAD" if nodes > 1 else "PACK", name=name)
            continue
        other_runs = _list_reservations(name)
        short = len(hosts) < nodes
        waited = time.monotonic() - begin
        if waited > patience and (short or waited > WAIT or (other_runs and waited > HELD)):
            if group is not None:
                ray.util.remove_placement_group(group)
            total_devices = sum(count for _, count in host_devices)
            free = min(total_devices, ray.available_resources().get(kind, 0))
            diagnostic = Diagnostic(
                "no-resources",
                f"the plan asks for {plural(nodes, 'host')} of {devices_per_host:g} {kind}; Ray has "
                f"{plural(len(host_devices), 'host')}, "
                f"{total_devices:g} {kind} in all, {free:g} of them free"
                + "".join(f"\n  {host}" for host in _describe_free_devices(kind, lost))
                + "".join(f"\n  {other} has {count:g} {kind}" for other, count in other_runs.items()),
                cluster.span,
                "wait for the end of the run that has them, or end it"
                if other_runs and not short
                else "lower `nodes` or `devices_per_node`, or free the devices",
            )
            raise NotEnoughHosts(diagnostic, len(hosts)) if short else NoResources(diagnostic)
        if group is None:
            time.sleep(1)
    here = ray.get_runtime_context().get_node_id()
    address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    node_of = placement_group_table(group)["bundles_to_node_id"]
    bundles = sorted(range(nodes), key=lambda i: (node_of[i] != here, address_of[node_of[i]]))
    node_ids = [node_of[i] for i in bundles]
    return DeviceReservation(group, bundles, node_ids, [address_of[node] for node in node_ids])


def _list_reservations(name: str) -> dict[str, float]:
    """Return how many devices each other run has reserved; the keys are run names.

    `name` is the name of this run's own reservation, which is left out.
    """
    from ray.util.placement_group import placement_group_table

    devices_of_run: dict[str, float] = {}
    for group in placement_group_table().values():
        if group["state"] == "CREATED" and group["name"].startswith(NAME_PREFIX) and group["name"] != name:
            devices = sum(sum(bundle.values()) for bundle in group["bundles"].values())
            devices_of_run[group["name"]] = devices_of_run.get(group["name"], 0) + devices
    return devices_of_run


def _describe_free_devices(kind: str, lost: Collection[str]) -> list[str]:
    """Describe how many devices each host has, and how many of these devices are free.

    `kind` is the devices' resource name in Ray. Hosts whose addresses are in `lost` are left out. The list is empty if
    this version of Ray does not report the free devices of each host.
    """
    try:
        free = import_module("ray._private.state").available_resources_per_node()
    except (ImportError, AttributeError):
        return []
    return [
        f"{node['NodeManagerAddress']} has {free.get(node['NodeID'], {}).get(kind, 0):g} of "
        f"{node['Resources'].get(kind, 0):g} {kind} free"
        for node in live_nodes()
        if node["NodeManagerAddress"] not in lost
    ]


__all__ = ["NAME_PREFIX", "DeviceReservation", "NotEnoughHosts", "reserve_devices"]
