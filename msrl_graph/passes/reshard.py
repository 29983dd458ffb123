"""The pass that plans how the weights on each resharding edge `=>` are moved.

On the same devices, weights are moved by an allgather-swap; between two pools, they are sent. The pass plans the steps
of each edge, with bytes and seconds (arXiv:2507.19017, figure 5). Invariant: bytes are those of the busiest device
(rank 0). Between two nodes on the same devices, the mode decides whether the update's weights remain on the devices. In
the mode `swap`, all of the update's weights are moved to host memory, whatever the two layouts are. In the mode
`naive`, the update's weights remain. They also remain if weights are sent to another pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..analysis.async_schedule import fetched_edges
from ..backends.spec import BYTES, EngineSpec
from ..cost import holdings
from ..diagnostics.sheet import Sheet
from ..hardware.cluster import ClusterSpec, Figure, weakest
from ..ir.graph import Edge
from ..ir.plan import Plan
from ..ir.resharding_plan import Reshard, ReshardRoute, Step
from ..sharding.layout import Side, TensorKind, elements, shard, stages, strip_name
from ..sharding.redistribute import (
    Movement,
    count_gathered,
    count_lacking,
    count_left_behind,
    count_movement,
    crosses,
    find_served_stages,
    gather_block,
    pairs,
)
from ..sharding.tensors import Tensor
from .buckets import order_by_stage, split_by_turn
from .facts import Section
from .reshard_section import reshard_facts, verify_reshards, write_reshards
from .spec import Pass


@dataclass(frozen=True)
class InsertResharding(Pass):
    """The pass that plans resharding.

    If `compare` is True, the pass also counts the elements that naive resharding would leave on the devices. The plan
    reports this number only for comparison.
    """

    name = "reshard"
    title = "Resharding"
    needs = ("place",)
    fills = ("reshards",)

    compare: bool = True

    def apply(self, plan: Plan) -> Plan:
        def pools(edge: Edge) -> set[str]:
            return {plan.placement(edge.src).pool, plan.placement(edge.dst).pool}

        return replace(
            plan,
            reshards=tuple(
                (self._reshard if len(pools(resharding_edge)) == 1 else self._send)(plan, resharding_edge)
                for resharding_edge in plan.graph.reshards()
            ),
        )

    def _send(self, plan: Plan, edge: Edge) -> Reshard:
        """Plan a send between two pools, bucket by bucket.

        Several generation ranks of a host may need the same box (an index range in each dimension of a tensor). One of
        these ranks receives the box from the update ranks that hold parts of it, and passes it on to the other
        generation ranks. Each update rank sends exactly the overlap of the needed box with the box that the update rank
        holds.
        """
        cluster = plan.cluster
        model = plan.model(edge.src)
        source, target = (holdings.side(plan, self.engines, node) for node in (edge.src, edge.dst))
        pools = [plan.placement(node).pool for node in (edge.src, edge.dst)]
        item = BYTES[holdings.dtype(plan, edge.src)]
        update, generate = (holdings.weights(plan, self.engines, node) for node in (edge.src, edge.dst))
        sizes = {tensor.name: item * _count_wanted(tensor, target) for tensor in model.weights}
        buckets, first_buckets = split_by_turn(model, sizes, plan.deploy.reshard.bucket)
        bucket = max(sum(sizes[name] for name in names) for names in (*buckets, *first_buckets))
        moved = count_movement(model.trained_kinds, source, target, cluster.devices_per_node)
        copied, placed = (holdings.weights(plan, self.engines, node, "trained_kinds") for node in (edge.src, edge.dst))
        none = Figure(0.0, "derived", "the update weights stay where they are")
        is_fetched = (edge.src, edge.dst) in fetched_edges(plan)
        reason = f"generation is on {pools[1]}, so nothing needs to leave {pools[0]}"
        if plan.deploy.reshard.mode != "swap" or plan.deploy.reshard.order:
            reason += "; the stated mode and order are for states that share devices"
        steps = (
            Step("temporary buffer", bucket, Figure(0.0, "derived", "allocated per message, at both ends")),
            Step("send by bucket", item * moved.received, _seconds(cluster, moved, item, (source, target))),
            *self._copy_frozen(plan, edge.dst),
            Step("place slices", placed, _copy_seconds(cluster, placed)),
            Step("release", bucket, Figure(0.0, "derived", "the temporary buffer is freed")),
        )
        return Reshard(
            src=edge.src,
            dst=edge.dst,
            mode="send",
            order="direct",
            reason=reason,
            ways=(ReshardRoute("weights", "send", 1, False, 1, item * moved.received),),
            bucket_bytes=bucket,
            buckets=buckets,
            first_buckets=first_buckets,
            steps=steps,
            swap_in=Step("swap in (H2D)", 0, none),
            update_bytes_per_device=update,
            generate_bytes_per_device=generate,
            released_bytes_per_device=0,
            peak_bytes_per_device=max(update, generate) + bucket,
            redundant_bytes=0,
            copied=Step("copy to send from", copied, _copy_seconds(cluster, copied)) if is_fetched else None,
        )

    def _copy_frozen(self, plan: Plan, node: str) -> list[Step]:
        """Return the step that copies frozen weights of a generation to the device."""
        size = holdings.weights(plan, self.engines, node, "frozen_kinds")
        seconds = _transfer_seconds(size, plan.cluster.device.copies, "bytes / host link")
        return [Step("copy frozen weights (H2D)", size, seconds)] if size else []

    def _reshard(self, plan: Plan, edge: Edge) -> Reshard:
        """Plan an allgather-swap between two layouts of the same devices."""
        options = plan.deploy.reshard
        cluster = plan.cluster
        model = plan.model(edge.src)
        source, target = (holdings.side(plan, self.engines, node) for node in (edge.src, edge.dst))
        item = BYTES[holdings.dtype(plan, edge.src)]
        update, generate = (holdings.weights(plan, self.engines, node) for node in (edge.src, edge.dst))
        families = _group_families(model.kinds, source, target)
        choices = list_routes(model.kinds, source, target, cluster.devices_per_node, item)
        ways = tuple(way for way, _ in choices)
        moved = _sum_movements([movement for _, movement in choices])

        def movement_key(tensor: Tensor) -> tuple[Tensor, int, int]:
            """Return a key that is equal for tensors that are moved between the same ranks.

            The tensors of two layers have different keys only if the pipeline stages of the layers differ.
            """
            source_stage, target_stage = (
                side.layout.stage_of(tensor.layer, tensor.layers) for side in (source, target)
            )
            return strip_name(tensor), source_stage, target_stage

        # The temporary buffer holds a bucket as it arrives: for an all-gather all that the block holds, else what this
        # rank wants; in both cases only what a neighbour uses.
        moved_by_tensor: dict[tuple[Tensor, int, int], tuple[int, int]] = {}  # the number of its route, and bytes
        for index, way in enumerate(ways):
            for tensor in {
                movement_key(pair.tensor): pair.tensor for pair in pairs(families[way.of], source, target)
            }.values():
                one = (TensorKind(tensor, ((tensor.layer, tensor.layer + 1),), 1),)
                per_host = cluster.devices_per_node
                if way.how == "all-to-all":  # in two buffers: outgoing and incoming
                    amount = 2 * count_movement(one, source, target, per_host).received
                else:
                    moves = way.how == "all-gather" and count_movement(one, source, target, per_host, way.block).total
                    amount = count_gathered(tensor, source, way.block) if moves else 0
                moved_by_tensor[movement_key(tensor)] = index, item * amount
        moved_of = {item_tensor.name: moved_by_tensor[movement_key(item_tensor)] for item_tensor in model.weights}
        sizes = {name: size for name, (_, size) in moved_of.items()}
        ordered = order_by_stage(model.weights, sizes, source, any(route.across for route in ways))
        buckets, first_buckets = split_by_turn(model, ordered, options.bucket)
        uses = {
            item_tensor.name: (moved_of[item_tensor.name][0], stages(item_tensor, target.layout))
            for item_tensor in model.weights
        }
        bucket = max(
            sum(sizes[name] for name in names if not seen[uses[name][0]].isdisjoint(uses[name][1]))
            for seen in find_served_stages(source, target, tuple((route.across, route.block) for route in ways))
            for names in (*buckets, *first_buckets)
        )

        swap = options.mode == "swap"
        others = sum(holdings.resident(plan, self.engines, plan.placement(edge.src).pool).values()) - update
        order, reason = _choose_order(plan, others, update, generate, bucket)
        received = item * moved.received
        link = cluster.device.copies
        # Host memory keeps frozen weights, so they are copied to it only once.
        copied_out = holdings.weights(plan, self.engines, edge.src, "trained_kinds") if swap else 0
        released = update if swap else 0
        out = Step("swap out (D2H)", copied_out, _transfer_seconds(copied_out, link, "bytes / host link"))
        placed = holdings.weights(plan, self.engines, edge.dst, "trained_kinds")
        methods = list(dict.fromkeys(route.how for route in ways if route.bytes)) or ["all-gather"]
        steps = [
            Step("temporary buffer", bucket, Figure(0.0, "derived", "allocated once, reused by every bucket")),
            Step(f"{' and '.join(methods)} by bucket", received, _seconds(cluster, moved, item, (source, target))),
            *self._copy_frozen(plan, edge.dst),
            Step("select slices", placed, _copy_seconds(cluster, placed)),
            out,
            Step("release", bucket, Figure(0.0, "derived", "the temporary buffer is freed")),
        ]
        if swap and order == "staged":
            read_back = _transfer_seconds(copied_out, link, "bytes / host link, read back from the host by bucket")
            gather = steps[1].seconds
            both = Figure(
                read_back.value + gather.value, weakest(read_back, gather), f"{read_back.basis}; {gather.basis}"
            )
            steps = [steps[0], out, replace(steps[1], seconds=both), *steps[2:-2], steps[-1]]
        return Reshard(
            src=edge.src,
            dst=edge.dst,
            mode=options.mode,
            order=order,
            reason=reason,
            ways=ways,
            bucket_bytes=bucket,
            buckets=buckets,
            first_buckets=first_buckets,
            steps=tuple(steps),
            swap_in=Step("swap in (H2D)", released, _transfer_seconds(released, link, "bytes / host link")),
            update_bytes_per_device=update,
            generate_bytes_per_device=generate,
            released_bytes_per_device=released,
            peak_bytes_per_device=max(update, generate) + bucket if order == "staged" else update + generate + bucket,
            redundant_bytes=count_left_behind(model.kinds, source, target) * item if self.compare else 0,
        )

    @staticmethod
    def verify(plan: Plan) -> Iterator[str]:
        return verify_reshards(plan)

    @classmethod
    def write(cls, page: Sheet, plan: Plan) -> None:
        write_reshards(page, plan)

    @staticmethod
    def facts(plan: Plan) -> Section:
        return {reshard.name: reshard_facts(reshard) for reshard in plan.reshards}


def list_routes(
    kinds: tuple[TensorKind, ...], source: Side, target: Side, per_host: int, item: int
) -> list[tuple[ReshardRoute, Movement]]:
    """Return the routes of weights between two layouts on the same devices.

    A route says how one family of weights, such as the experts, is moved. Each route is returned with the number of
    elements that it moves. `item` is the number of bytes of an element.
    """
    families = _group_families(kinds, source, target)
    return [_choose_route(name, family, source, target, per_host, item) for name, family in families.items()]


def _group_families(kinds: tuple[TensorKind, ...], source: Side, target: Side) -> dict[str, tuple[TensorKind, ...]]:
    """Group weights into families; each family is gathered in its own blocks of ranks.

    Experts are a separate family, because they are sharded over a mesh of their own. An embedding may be a separate
    family if two engines pad it to different sizes, because the padding changes the rows at which the embedding is cut.
    """
    families: dict[str, tuple[TensorKind, ...]] = {}
    for kind in kinds:
        name = "experts" if kind.tensor.experts else "embeddings" if kind.tensor.padded else "weights"
        families[name] = (*families.get(name, ()), kind)
    if "embeddings" in families and "weights" in families:
        joined = tuple(member for member in kinds if not member.tensor.experts)
        if gather_block(joined, source, target) == gather_block(families["weights"], source, target):
            del families["embeddings"]
            families["weights"] = joined
    return {name: families[name] for name in ("weights", "embeddings", "experts") if name in families}


def least_seconds(plan: Plan, engines: Mapping[str, EngineSpec], edge: Edge) -> dict[tuple[str, str], float]:
    """Return lower bounds for the seconds of a reshard, by instruction and node.

    The weights that the first or the last host lacks must arrive over the network. If weights are swapped, the seconds
    to copy them to host memory and back, and to copy the generation's weights on the device, are added.
    """
    cluster = plan.cluster
    model = plan.model(edge.src)
    source, target = (holdings.side(plan, engines, node) for node in (edge.src, edge.dst))
    inward = count_lacking(model.trained_kinds, source, target, cluster.devices_per_node)
    links = cluster.between(min(side.on_host(side.devices, cluster.devices_per_node) for side in (source, target)))
    comes = BYTES[holdings.dtype(plan, edge.src)] * inward / links.value
    if plan.placement(edge.src).pool != plan.placement(edge.dst).pool or plan.deploy.reshard.mode != "swap":
        return {("RESHARD", edge.dst): comes}
    moves = holdings.weights(plan, engines, edge.src) / cluster.device.copies.value
    out = holdings.weights(plan, engines, edge.src, "trained_kinds") / cluster.device.copies.value
    chosen = _copy_seconds(cluster, holdings.weights(plan, engines, edge.dst, "trained_kinds")).value
    return {("RESHARD", edge.dst): comes + chosen + out, ("SWAP_IN", edge.src): moves}


def _choose_route(
    name: str, kinds: tuple[TensorKind, ...], source: Side, target: Side, per_host: int, item: int
) -> tuple[ReshardRoute, Movement]:
    """Choose the route of a family of weights, and count the elements that it moves.

    The default is an all-gather within blocks of ranks that are as small as possible. An all-to-all sends each rank
    exactly what the rank needs. It is chosen if it moves at most half of what the all-gather moves.
    """
    block = gather_block(kinds, source, target)
    across = any(crosses(source, target, kind.tensor.layers) for kind in kinds)
    ranks = block * (source.layout.pp if across else 1)
    if ranks == 1:
        return ReshardRoute(name, "in place", 1, False, 1, 0), Movement()
    gather, exact = (count_movement(kinds, source, target, per_host, block_size) for block_size in (block, 0))
    how, moved = ("all-to-all", exact) if 2 * exact.received <= gather.received else ("all-gather", gather)
    if any(kind.tensor.frozen for kind in kinds):  # the first resharding moves them, but this counts the later ones
        trained = tuple(kind for kind in kinds if kind.tensor.is_trained)
        moved = count_movement(trained, source, target, per_host, block if how == "all-gather" else 0)
    return ReshardRoute(name, how, block, across, ranks, item * moved.received), moved


def _sum_movements(movements: list[Movement]) -> Movement:
    """Return the sum of the movements of one resharding edge.

    The movements are made one after the other. The busiest device is assumed to be the same device in all movements.
    """
    return Movement(
        *(
            sum(getattr(movement, name) for movement in movements)
            for name in ("received", "inward", "outward", "total", "between")
        )
    )


def _count_wanted(tensor: Tensor, target: Side) -> int:
    """Return how many elements of a tensor the busiest generation rank holds."""
    return elements(shard(tensor, target, stages(tensor, target.layout)[0] * target.layout.stage_devices))


def _choose_order(plan: Plan, others: int, update: int, generate: int, bucket: int) -> tuple[str, str]:
    """Return when the update's weights leave the device, and the reason.

    The order is `direct` if they leave after the generation's weights have arrived, and `staged` if they leave first.
    The bytes per device are: `update` and `generate` for the two copies of the weights, `bucket` for the buffer, and
    `others` for everything else.
    """
    options = plan.deploy.reshard
    capacity = holdings.capacity(plan.cluster).value
    need = others + update + generate + bucket
    size = holdings.gigabytes
    if options.mode == "naive":
        return "direct", "naive: the update weights stay next to the generation weights"
    if options.order:
        return options.order, "stated"
    if need <= capacity:
        return (
            "direct",
            f"all at once takes {size(need)} of {size(capacity)} a device, {size(others)} of it for other states",
        )
    return (
        "staged",
        f"all at once would take {size(need)} of {size(capacity)} a device, so the update weights leave first",
    )


def _transfer_seconds(amount: float, rate: Figure, basis: str) -> Figure:
    return Figure(amount / rate.value, rate.source, f"{basis}; {rate.basis}")


def _copy_seconds(cluster: ClusterSpec, amount: int) -> Figure:
    return _transfer_seconds(
        2 * amount, cluster.device.rate("memory_bandwidth", 0), "2 x bytes (read, write) / memory bandwidth"
    )


def _seconds(cluster: ClusterSpec, moved: Movement, item: int, ends: Sequence[Side]) -> Figure:
    """Return the seconds to move weights from the update's devices to the generation.

    If weights cross hosts, the bytes of the busiest host use the links between hosts, and the bytes that are passed on
    within a host use the links between devices. If both pools are on the same host, the update's devices share the
    sending evenly.
    """
    if not moved.received:
        return Figure(0.0, "derived", "every rank has its slices")
    if not moved.between:
        apart = ends[0].first != ends[1].first
        busiest = max(moved.received, -(-moved.total // ends[0].devices) if apart else 0)
        return _transfer_seconds(item * busiest, cluster.device.links, "bytes at the busier end / device link")
    links = cluster.between(min(end.on_host(end.devices, cluster.devices_per_node) for end in ends))
    far = _transfer_seconds(item * max(moved.inward, moved.outward), links, "bytes of the busiest host / its links")
    if moved.total == moved.between:
        return far
    handed = item * moved.received * (moved.total - moved.between) / moved.total
    near = _transfer_seconds(handed, cluster.device.links, "the rest within the host: bytes / device link")
    return Figure(far.value + near.value, weakest(far, near), f"{far.basis}; {near.basis}")
