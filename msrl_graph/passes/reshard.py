"""reshard: each `=>` becomes an allgather-swap (arXiv:2507.19017, figure 5), or between two pools a send, in steps with bytes and seconds.

Invariant: bytes are those of a device at its busiest (rank 0). What leaves the device is exactly the update's weights, whatever the
two layouts are; in mode naive nothing does, nor in mode send, where generation takes no room of theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..cluster import Cluster, Figure, weakest
from ..engine import BYTES, EngineSpec
from ..graph import Edge
from ..layout import block_boxes, elements, gather_group, left_behind, replicas, shard
from ..plan import Placement, Plan, Reshard, Step
from . import holdings

GIB = 1 << 30
# Small models are cut into a few buckets all the same, so that gathering and selecting can overlap.
FEW = 4


@dataclass(frozen=True)
class Resharding:
    """`engines` are the specs by name."""

    engines: Mapping[str, EngineSpec]

    def __call__(self, plan: Plan) -> Plan:
        def pools(edge: Edge) -> set[str]:
            return {plan.placement(edge.src).pool, plan.placement(edge.dst).pool}

        return replace(plan, reshards=tuple((self._reshard if len(pools(e)) == 1 else self._send)(plan, e) for e in plan.graph.reshards()))

    def _send(self, plan: Plan, edge: Edge) -> Reshard:
        """Between two pools: bucket by bucket, on each host one generation rank of those that hold the same weights receives its box in
        exact overlaps from ranks that have them, and hands it on to the others."""
        cluster, tensors = plan.cluster, plan.model(edge.src).tensors
        source, target = plan.placement(edge.src), plan.placement(edge.dst)
        divided = holdings.is_divided(plan, self.engines, edge.dst)
        item = BYTES[holdings.dtype(plan, edge.src)]
        update, generate = (holdings.weights(plan, self.engines, n) for n in (edge.src, edge.dst))
        sizes = {t.name: item * elements(shard(t, target.layout, 0, divided)) for t in tensors}
        received = sum(sizes.values())
        buckets = _buckets(sizes, plan.deploy.reshard.bucket or min(GIB, -(-received // FEW)))
        bucket = max(sum(sizes[n] for n in names) for names in buckets)
        none = Figure(0.0, "derived", "the update weights stay where they are")
        reason = f"generation is on {target.pool}, so nothing needs to leave {source.pool}"
        if plan.deploy.reshard.mode != "swap" or plan.deploy.reshard.order:
            reason += "; the stated mode and order are for states that share devices"
        steps = (
            Step("temporary buffer", bucket, Figure(0.0, "derived", "allocated by message, at both ends")),
            Step("send by bucket", received, _send_seconds(cluster, received, source, target, divided)),
            Step("place slices", generate, _copy_seconds(cluster, generate)),
            Step("release", bucket, Figure(0.0, "derived", "the temporary buffer is freed")),
        )
        return Reshard(
            src=edge.src,
            dst=edge.dst,
            mode="send",
            order="direct",
            reason=reason,
            group=1,
            bucket_bytes=bucket,
            buckets=buckets,
            steps=steps,
            swap_in=Step("swap in (H2D)", 0, none),
            update_bytes_per_device=update,
            generate_bytes_per_device=generate,
            released_bytes_per_device=0,
            peak_bytes_per_device=max(update, generate) + bucket,
            redundant_bytes=0,
        )

    def _reshard(self, plan: Plan, edge: Edge) -> Reshard:
        options, cluster, tensors = plan.deploy.reshard, plan.cluster, plan.model(edge.src).tensors
        source, target = plan.placement(edge.src).layout, plan.placement(edge.dst).layout
        divided = holdings.is_divided(plan, self.engines, edge.src), holdings.is_divided(plan, self.engines, edge.dst)
        group = gather_group(tensors, source, divided[0], target, divided[1])
        item = BYTES[holdings.dtype(plan, edge.src)]
        update, generate = (holdings.weights(plan, self.engines, n) for n in (edge.src, edge.dst))

        # The temporary buffer holds a bucket as gathered by the block's ranks: their shards, each once.
        kind_bytes: dict[tuple[tuple[int, ...], int], int] = {}
        sizes = {}
        for t in tensors:
            key = t.shape, t.tp_dim
            if key not in kind_bytes:
                kind_bytes[key] = item * sum(map(elements, block_boxes(t, source, range(group), divided[0])))
            sizes[t.name] = kind_bytes[key]
        total = sum(sizes.values())
        buckets = _buckets(sizes, options.bucket or min(GIB, -(-total // FEW)))
        bucket = max(sum(sizes[n] for n in names) for names in buckets)

        swap = options.mode == "swap"
        pool = plan.placement(edge.src)
        others = sum(holdings.resident(plan, self.engines, pool.pool).values()) - update
        order, reason = _order(plan, others, update, generate, bucket)
        direct_peak = update + generate + bucket
        received = total - update if group > 1 else 0
        steps = [
            Step("temporary buffer", bucket, Figure(0.0, "derived", "allocated once, reused by every bucket")),
            Step("all-gather by bucket", received, _gather_seconds(cluster, pool.first, received, total, group)),
            Step("select slices", generate, _copy_seconds(cluster, generate)),
            Step("swap out (D2H)", update if swap else 0, _ratio(update if swap else 0, cluster.device.host_link, "bytes / host link")),
            Step("release", bucket, Figure(0.0, "derived", "the temporary buffer is freed")),
        ]
        if swap and order == "staged":
            link = _ratio(update, cluster.device.host_link, "bytes / host link, read back from the host by bucket")
            gather = _gather_seconds(cluster, pool.first, received, total, group)
            both = Figure(link.value + gather.value, weakest(link, gather), f"{link.basis}; {gather.basis}")
            steps = [steps[0], steps[3], replace(steps[1], seconds=both), steps[2], steps[4]]
        return Reshard(
            src=edge.src,
            dst=edge.dst,
            mode=options.mode,
            order=order,
            reason=reason,
            group=group,
            bucket_bytes=bucket,
            buckets=buckets,
            steps=tuple(steps),
            swap_in=Step(
                "swap in (H2D)", update if swap else 0, _ratio(update if swap else 0, cluster.device.host_link, "bytes / host link")
            ),
            update_bytes_per_device=update,
            generate_bytes_per_device=generate,
            released_bytes_per_device=update if swap else 0,
            peak_bytes_per_device=max(update, generate) + bucket if order == "staged" else direct_peak,
            redundant_bytes=left_behind(tensors, source, divided[0], target, divided[1]) * item,
        )


def _buckets(sizes: Mapping[str, int], limit: int) -> tuple[tuple[str, ...], ...]:
    """Tensors in the model's order, as many a bucket as fit `limit` bytes; a larger one is a bucket of its own."""
    buckets: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not buckets or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return tuple(map(tuple, buckets))


def _order(plan: Plan, others: int, update: int, generate: int, bucket: int) -> tuple[str, str]:
    options, capacity = plan.deploy.reshard, holdings.capacity(plan.cluster).value
    need, size = others + update + generate + bucket, holdings.gigabytes
    if options.mode == "naive":
        return "direct", "naive: the update weights stay beside the generation weights"
    if options.order:
        return options.order, "stated"
    if need <= capacity:
        return "direct", f"all at once takes {size(need)} of {size(capacity)} a device, {size(others)} of it other states'"
    return "staged", f"all at once would take {size(need)} of {size(capacity)} a device, so the update weights leave first"


def _ratio(amount: float, rate: Figure, basis: str) -> Figure:
    return Figure(amount / rate.value, rate.source, f"{basis}; {rate.basis}")


def _copy_seconds(cluster: Cluster, amount: int) -> Figure:
    return _ratio(2 * amount, cluster.device.memory_bandwidth, "2 x bytes (read, write) / memory bandwidth")


def _send_seconds(cluster: Cluster, received: int, source: Placement, target: Placement, divided: bool) -> Figure:
    """The busier end's time. Where pools lie on several hosts, all that a host's devices send or receive goes through its link."""
    each = cluster.devices_per_node
    alike = replicas(target.layout, divided, target.first, each)
    sent = -(-received * len(alike) // source.layout.devices)
    hosts = {cluster.host(d) for p in (source, target) for d in (p.first, p.first + p.layout.devices - 1)}
    if len(hosts) == 1:
        taken = _ratio(max(received, sent), cluster.device.device_link, "bytes at the busier end / device link")
    else:
        heads = Counter(cluster.host(target.first + ranks[0]) for ranks in alike)
        most = max(received * max(heads.values()), sent * min(each, source.layout.devices))
        taken = _ratio(most, cluster.network, "bytes of the busier host / network link")
    if all(len(ranks) == 1 for ranks in alike):
        return taken
    handed = _ratio(received, cluster.device.device_link, "handed on within a host: bytes / device link")
    return Figure(taken.value + handed.value, weakest(taken, handed), f"{taken.basis}; {handed.basis}")


def _gather_seconds(cluster: Cluster, first: int, received: int, total: int, group: int) -> Figure:
    """A ring all-gather. Where a group spans hosts, each host's link carries (group - 1) / group of the whole once a group on it."""
    if not received:
        return Figure(0.0, "derived", "every rank has its slices")
    per_host = cluster.devices_per_node
    if group <= per_host and per_host % group == first % group == 0:
        return _ratio(received, cluster.device.device_link, "bytes received / device link")
    rings = max(1, per_host // group)
    return _ratio(total * (group - 1) / group * rings, cluster.network, f"{rings} ring(s) through each host's network link")
