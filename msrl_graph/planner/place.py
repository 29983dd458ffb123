"""Placement: the devices, the layout and the engine of every node, with reasons.

Invariant: nodes that share weights share their layout. The nodes of a pool share the pool's devices, which run the
nodes in turn. Functions run on the hosts' CPUs. A layout that the file states is used even if it is wrong:
checks/layout.py reports the error. What the file leaves open is taken from the decision of the search
(planner/search.py). Without a decision, a node is data-parallel over its pool. Micro-batches and recomputation are
chosen after the layouts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..cost import holdings
from ..ir.graph import Node, OptionValue
from ..ir.plan import FUNCTIONS, MICRO_BATCH, EngineChoice, Placement, Plan, PlanNote, Pool
from ..ir.search_record import MARGIN
from ..passes.estimate import EstimateTime
from ..passes.place import PlacementPass
from ..sharding.layout import Layout
from ..sharding.redistribute import gather_block
from .kv_cache import give_cache
from .micro_batch_sizes import SizeChoices, list_recomputed
from .offload import complete_with_offloading
from .owners import Owner, engines, explain_engine, first_stated, owners
from .pools import Division, divide

PYTHON = EngineChoice("python", chosen="default")


@dataclass(frozen=True)
class PlacementDecision:
    """The values for everything that the program file leaves open in the placement.

    `division` is the division into pools. `layouts` and `engines` have one entry for each owner (a set of nodes that
    share a layout and an engine). The key of an entry is the name of the node that represents the owner. `why` is the
    reason for these values.
    """

    division: Division | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    engines: Mapping[str, str] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class PlaceNodes(PlacementPass):
    """The pass that places nodes as decided.

    If `is_fastest` is True, an update recomputes activations whenever that is faster.
    """

    is_fastest: bool = False

    def apply(self, plan: Plan, decision: PlacementDecision | None = None, *, numbered: bool = True) -> Plan:
        """Return the plan with all nodes placed.

        If `numbered` is False, two steps of the placement are left out: offloading, and numbering the ranks for
        resharding. Numbering the ranks is the most expensive step.
        """
        decision = decision or PlacementDecision()
        division = decision.division or divide(plan)
        plan = replace(plan, pools=division.pools)
        placed_nodes: dict[str, Placement] = {}
        owner = {node_name: node_owner for node_owner in owners(plan, division) for node_name in node_owner.nodes}
        # Updates first, since other nodes take their layouts.
        for verb in ("update", "generate", "infer"):
            # The first update of a worker has the layout of all its updates.
            for node in sorted(
                plan.graph.verb(verb),
                key=lambda update: verb == "update" and update.name != plan.graph.sharing(update.worker)[0].name,
            ):
                if plan.graph.worker(node.worker).kind != "function":
                    placed = self._place_on_devices(
                        plan, node, owner[node.name], division, decision, placed_nodes, numbered
                    )
                    if division.joined_node and node.name not in division.named:
                        placed = replace(
                            placed, reason=f"{placed.reason}; in no stated pool, so with {division.joined_node}"
                        )
                    placed_nodes[node.name] = placed
        everywhere = Layout(dp=plan.cluster.nodes)
        placements = tuple(
            placed_nodes.get(graph_node.name) or self._place_on_hosts(graph_node, everywhere)
            for graph_node in plan.graph.nodes
        )
        placed_plan = replace(plan, placements=placements)
        idle = plan.cluster.devices - sum(pool.devices for pool in division.pools)
        notes = (
            (PlanNote("place", f"{idle} of {plan.cluster.devices} devices are in no pool and stay idle"),)
            if idle > 0
            else ()
        )
        placed_plan = replace(placed_plan, notes=(*plan.notes, *notes))
        return (
            complete_with_offloading(placed_plan, self.engines, self._complete_all)
            if numbered
            else self._complete_all(placed_plan)
        )

    def _complete_all(self, plan: Plan) -> Plan:
        # Generations first: what they keep for the next iteration is not free for other nodes of their devices.
        generates = {node.name for node in plan.graph.verb("generate")}
        done: dict[str, Placement] = {}
        for placement in sorted(plan.placements, key=lambda other: other.node not in generates):
            done[placement.node] = self.complete(plan, placement)
            if placement.node in generates:
                placed = (done.get(other.node, other) for other in plan.placements)
                plan = replace(plan, placements=tuple(placed))
        return replace(plan, placements=tuple(done[placement.node] for placement in plan.placements))

    def _place_on_hosts(self, node: Node, everywhere: Layout) -> Placement:
        if node.verb == "source":
            reason = "the source runs once a run, with the first host's functions"
            return Placement(node.name, FUNCTIONS, Layout(dp=1), 0, PYTHON, reason)
        return Placement(node.name, FUNCTIONS, everywhere, 0, PYTHON, "functions run on the hosts' CPUs")

    def _place_on_devices(
        self,
        plan: Plan,
        node: Node,
        owned: Owner,
        division: Division,
        decision: PlacementDecision,
        placed_nodes: Mapping[str, Placement],
        numbered: bool,
    ) -> Placement:
        pool = division.pool_of(node.name)
        owner = owned.node
        engine = self._choose_engine(plan, node, owned, decision, placed_nodes)
        stated = plan.deploy.layouts.get(node.name)
        if owner != node.name and owner in placed_nodes and node.verb != "generate":
            shares = plan.graph.node(owner).worker == node.worker
            layout = placed_nodes[owner].layout
            reason = f"has the weights of {owner}" if shares else f"as {owner}, which has the same model"
            if not shares and owner in plan.deploy.layouts and engine.name != placed_nodes[owner].engine.name:
                open_ = plan.deploy.layouts[owner]  # its open sizes depend on the engine, which is another one here
                layout = self.resolve(plan, node.name, open_, engine.name, pool.devices)[0]
        elif owner != node.name and owner in plan.deploy.layouts and stated is None:
            layout = self.resolve(plan, node.name, plan.deploy.layouts[owner], engine.name, pool.devices)[0]
            reason = f"has the weights of {owner}"
        elif stated is not None:
            layout, reason = self.resolve(plan, node.name, stated, engine.name, pool.devices)
        else:
            layout = decision.layouts.get(owner, Layout(dp=pool.devices))
            reason = decision.why or "data-parallel over its pool"
        if node.verb == "generate" and numbered:
            layout, reason = self._number_ranks(plan, node, pool, placed_nodes, engine, layout, reason)
        return Placement(node.name, pool.name, layout, pool.first, engine, reason, each=pool.each)

    def resolve(self, plan: Plan, node: str, stated: Layout, engine: str, devices: int) -> tuple[Layout, str]:
        """Return a stated layout with its open sizes filled in, and the reason.

        A `dp` of 0 in `stated` is open: it is computed from the number of devices. An open `etp` is chosen by the
        engine.
        """
        layout = stated
        reason = "stated"
        if not stated.dp:
            layout = replace(stated, dp=max(1, devices // (stated.tp * stated.cp * stated.pp)))
            reason = f"stated; dp {layout.dp} from {devices} devices"
        return self.engines[engine].sharding.spread.settle_etp(layout, plan.model(node)), reason

    def _choose_engine(
        self, plan: Plan, node: Node, owned: Owner, decision: PlacementDecision, placed_nodes: Mapping[str, Placement]
    ) -> EngineChoice:
        stated = plan.deploy.engines.get(node.name)
        owner = owned.node
        update = holdings.update_of(plan, node.worker) if node.verb != "generate" else None
        sharing = update.name if update is not None else first_stated(plan, node, plan.deploy.engines)
        if sharing is None or sharing == node.name:
            if stated is not None:
                return stated
            if owner != node.name and owner in placed_nodes:
                own = {}
                if plan.graph.worker(node.worker).follows:  # the same weight type, so that each rank copies its part
                    own = {
                        option: value
                        for option, value in placed_nodes[owner].engine.options.items()
                        if option == "dtype"
                    }
                return EngineChoice(placed_nodes[owner].engine.name, own, chosen=f"{owner}, as the layout is")
            name = decision.engines.get(owner) or engines(plan, owned, self.engines)[0].name
            return EngineChoice(name, chosen=explain_engine(plan, owned, self.engines, name))
        # Only the micro-batch is its own; checks/sharing.py compares its other options with the owner's.
        theirs = placed_nodes[sharing].engine if update is not None else plan.deploy.engines[sharing]
        if stated is None:
            return replace(theirs, options=theirs.shared(), chosen=f"{sharing}, whose weights it has")
        own = {option: value for option, value in stated.options.items() if option in MICRO_BATCH}
        return replace(stated, name=theirs.name, options={**theirs.shared(), **own})

    def _number_ranks(
        self,
        plan: Plan,
        node: Node,
        pool: Pool,
        placed_nodes: Mapping[str, Placement],
        engine: EngineChoice,
        layout: Layout,
        reason: str,
    ) -> tuple[Layout, str]:
        """Number a generation's ranks so that resharding gathers in small groups of ranks.

        Returns the layout with the numbering (`inner`), and `reason` with an explanation of the numbering added.
        """
        source = next(
            (
                placed_nodes[edge.src]
                for edge in plan.graph.reshards()
                if edge.dst == node.name and edge.src in pool.nodes
            ),
            None,
        )
        if source is None or source.layout.devices != layout.devices or layout.devices != pool.devices:
            return layout, reason
        kinds = tuple(
            kind for kind in plan.model(node.name).kinds if not kind.tensor.experts and not kind.tensor.padded
        )
        at_rest = self.engines[source.engine.name].side(source.layout)

        def group(inner: int) -> int:
            return gather_block(kinds, at_rest, self.engines[engine.name].side(replace(layout, inner=inner)))

        # Beyond the update's tp, neighbours hold nothing new.
        choices = [size for size in range(1, min(layout.dp, max(1, source.layout.tp)) + 1) if layout.dp % size == 0]
        sizes = {size: group(size) for size in choices}
        best = min(choices, key=lambda size: (sizes[size], size))
        if best > 1:
            reason += (
                f"; dp in {best}s of neighbours, so that resharding gathers among {sizes[best]} ranks, not {sizes[1]}"
            )
        return replace(layout, inner=best), reason

    def complete(self, plan: Plan, placement: Placement) -> Placement:
        """Complete a placement: weight bytes, KV cache, micro-batch and recomputation.

        A micro-batch size or a recomputation that the file states is not changed. After this step, each option of the
        node has a value if a run needs the option.
        """
        if placement.pool == FUNCTIONS:
            return placement
        placement = replace(placement, weight_bytes=holdings.weights(plan, self.engines, placement.node))
        node = placement.node
        spec = self.engines[placement.engine.name]
        if plan.graph.node(node).verb == "generate":
            return give_cache(plan, self.engines, placement, partial(self._working_bytes, plan))
        if "micro_batch" not in spec.capabilities.options:
            return placement
        return self._choose_micro_batch(plan, placement)

    def _choose_micro_batch(self, plan: Plan, placement: Placement) -> Placement:
        """Choose the micro-batch size and the recomputation of an infer or update node.

        The size is a number of tokens, or of rows if the engine has no such option. The micro-batch has enough tokens
        to keep the device busy. It has fewer if memory requires it. In a pipeline, or on a device with measured rates,
        the micro-batch also has fewer tokens if the node is estimated to be faster with fewer.

        If the file does not state recomputation, an update recomputes activations in two cases: the update does not fit
        without recomputation, or recomputation makes it faster by more than `MARGIN`. It then recomputes whole layers
        or some parts of all layers, whatever is fastest.
        """
        node = placement.node
        options = placement.engine.options
        spec = self.engines[placement.engine.name]
        room = self._free_bytes(plan, placement)
        choices = SizeChoices.of(plan, self.engines, placement)
        without = self._choose_size(plan, placement, choices, room)
        if (
            plan.graph.node(node).verb != "update"
            or "recompute" in options
            or "recompute" not in spec.capabilities.options
            or self._working_bytes(plan, choices.with_largest(placement)) <= room
        ):
            return without  # recomputing could not make it quicker
        need = self._working_bytes(plan, choices.with_least(placement))
        with_recompute = self._choose_size(plan, _with_options(placement, recompute="full"), choices, room)
        if need > room:
            why = (
                f"recomputes activations, which would otherwise take {holdings.gigabytes(need)} of "
                f"{holdings.gigabytes(max(0, room))}"
            )
        elif self._estimate_seconds(plan, with_recompute) * (
            1 if self.is_fastest else 1 + MARGIN
        ) < self._estimate_seconds(plan, without):
            why = "recomputes activations: that is faster, with larger micro-batches"
        else:
            return without
        fitting = [with_recompute]
        for parts in list_recomputed(plan.model(node), spec):
            tried = _with_options(placement, recompute=parts)
            if self._working_bytes(plan, choices.with_least(tried)) <= room:
                fitting.append(self._choose_size(plan, tried, choices, room))
        best = (
            min(fitting, key=lambda candidate: self._estimate_seconds(plan, candidate)) if fitting[1:] else fitting[0]
        )
        return replace(best, reason=f"{placement.reason}; {why}")

    def _choose_size(self, plan: Plan, tried: Placement, choices: SizeChoices, room: int) -> Placement:
        """Choose the size of a micro-batch, unless it is stated."""
        if choices.stated:
            return tried
        largest = self._largest_size(plan, tried, choices, room)
        best = choices.with_size(tried, largest)
        # Where a larger micro-batch is not always faster, try doubling numbers of full rows: then less memory never
        # allows a number that more memory does not.
        if tried.layout.pp == 1 and not plan.cluster.device.curves:
            return best
        by_rows = {choices.count_rows(size): size for size in choices.sizes if size <= largest}
        doubling = choices.select_doubling()
        batches = [choices.with_size(tried, by_rows[rows]) for rows in reversed(doubling) if rows in by_rows]
        if len(batches) == 1:
            return batches[0]
        return min(batches, key=lambda candidate: self._estimate_seconds(plan, candidate))

    def _free_bytes(self, plan: Plan, placement: Placement) -> int:
        """Return the bytes of a device that are free for an infer or update node's work.

        Resident items (weights, optimizer states, and what generations keep) are subtracted.
        """
        usable = int(holdings.capacity(plan.cluster).value * (1 - holdings.RESERVE))
        return usable - sum(holdings.resident(plan, self.engines, placement.pool, placement.node).values())

    def _largest_size(self, plan: Plan, placement: Placement, choices: SizeChoices, room: int) -> int:
        """Return the largest micro-batch size that fits into `room` bytes.

        The result is one of the choices. It is the smallest one even if that does not fit.
        """
        sizes = choices.sizes

        def need(size: int) -> int:
            return self._working_bytes(plan, choices.with_size(placement, size))

        if need(sizes[-1]) <= room:
            return sizes[-1]
        return sizes[max(0, bisect_right(sizes, room, key=need) - 1)]

    def _working_bytes(self, plan: Plan, placement: Placement) -> int:
        """Return the bytes that a node needs at its peak to compute a micro-batch.

        Resident items, such as weights, are not included. The result depends neither on the placements of other nodes
        nor on which devices the node has. It is cached, because many plans of a search need the same value.
        """
        engine = placement.engine
        inputs = (plan.cluster, plan.deploy, self.engines)
        # The keys are ids, which stay unique while the objects are kept.
        known: tuple[Any, dict[tuple[Any, ...], int]] = (inputs, {})
        known = plan.graph.worked_out.setdefault(("working", *map(id, inputs)), known)
        sizes = known[1]
        cache = (placement.sequences, placement.cache_bytes)
        key = (placement.node, engine.name, placement.layout, cache, *sorted(engine.options.items()))
        if key not in sizes:
            plan = replace(plan, placements=(placement,))
            sizes[key] = sum(holdings.fullest(plan, self.engines, placement.node)[1].values())
        return sizes[key]

    def _estimate_seconds(self, plan: Plan, placement: Placement) -> float:
        compute, exchange = EstimateTime(self.engines).of_node(replace(plan, placements=(placement,)), placement.node)
        return compute.value + exchange.value


def _with_options(placement: Placement, **options: OptionValue) -> Placement:
    return holdings.with_options(placement, options)
