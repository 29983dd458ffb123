"""Functions for the compiler's passes: the bytes that a node holds on one device.

An item is a named part of the memory. Resident items, such as weights, remain on the device between computations. A
moment is an instant of a computation. Invariant: bytes are those of the busiest device, if rows are as long as the
columns allow. The constant `RESERVE` is for the memory allocator's overhead. All functions need a plan with placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from .. import algorithms
from ..analysis.async_schedule import fetched_edges, skipping_edges
from ..analysis.row_packing import MicroBatchLimit
from ..analysis.sequences import bound, conversations, routing_columns, scores_texts, sequences
from ..backends.spec import BYTES, EngineSpec, Moments, gradient_type, optimizer_residency
from ..backends.spec import offloads as stated_away
from ..hardware.cluster import ClusterSpec, Figure
from ..ir import optimizer_spec
from ..ir.attributes import GenerateAttributes, UpdateAttributes
from ..ir.graph import Node, OptionValue, Worker
from ..ir.options import EngineOptions
from ..ir.plan import Placement, Plan
from ..ir.workload import Recomputation, Workload, kv_bytes, micro_batches
from ..sharding.layout import Side, count_busiest_elements
from . import default_activations
from .offloading import step_moments
from .optimizer_states import count_state_bytes, fetches_states, optimizer_spec_of

Engines = Mapping[str, EngineSpec]
# The part of a device's memory left free: fragments, kernel workspaces, captured graphs, collectives (groups.py).
RESERVE = 1 - EngineOptions.memory
PROBES = 4  # prompts of a probe (runtime/rank/weight_proof.py)
TOKENS = 8  # of each prompt, or a block of the cache plus TOKENS
KEPT = ", kept"  # ending of items that a generation keeps for the next iteration


def capacity(cluster: ClusterSpec) -> Figure:
    """Return the bytes of one device; a CPU rank gets an equal share of its host."""
    memory = cluster.device.memory
    if not cluster.device.kind.shares_host_memory:
        return memory
    share = cluster.devices_per_node
    return Figure(memory.value / share, memory.source, f"{memory.basis}, divided by {share} ranks")


def gigabytes(number: float) -> str:
    """Format a number of bytes for a message, for example `8.19 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"


def with_options(placement: Placement, options: Mapping[str, OptionValue]) -> Placement:
    """Return the placement with `options` added to the options of its engine."""
    return replace(placement, engine=replace(placement.engine, options={**placement.engine.options, **options}))


def spec(plan: Plan, engines: Engines, node: str) -> EngineSpec:
    return engines[plan.placement(node).engine.name]


def dtype(plan: Plan, node: str) -> str:
    """Return the type of a node's weights: the stated `dtype`, or the model's `dtype`."""
    return str(plan.placement(node).engine.options.get("dtype") or plan.model(node).dtype)


def update_of(plan: Plan, worker: str) -> Node | None:
    """Return the first update node of a worker, or None if it has no update."""
    return next((node for node in plan.graph.sharing(worker)[:1] if node.verb == "update"), None)


def is_divided(plan: Plan, engines: Engines, node: str) -> bool:
    return spec(plan, engines, node).divides_weights(plan.placement(node).layout)


def side(plan: Plan, engines: Engines, node: str) -> Side:
    """Return how a node's weights are sharded over its devices."""
    placement = plan.placement(node)
    return spec(plan, engines, node).side(placement.layout, placement.first, placement.each)


def weights(plan: Plan, engines: Engines, node: str, part: str = "kinds") -> int:
    """Return the bytes at rest of a node's weights (or of the model's view `part`)."""
    kinds = getattr(plan.model(node), part)
    return count_busiest_elements(kinds, side(plan, engines, node)) * BYTES[dtype(plan, node)]


def gradients(plan: Plan, engines: Engines, node: str) -> int:
    return default_activations.gradients(work(plan, engines, node), spec(plan, engines, node))


def optimizer(plan: Plan, engines: Engines, node: str) -> int:
    """Return the bytes of an update's optimizer states on one device.

    Masters are included. From ZeRO 1 on (arXiv:1910.02054), optimizer states are sharded over dp, and at ZeRO 1 also
    over cp. Optimizer states of an expert are sharded over the ranks that have a copy of the expert.
    """
    return count_state_bytes(
        plan, spec(plan, engines, node), node, lambda rule: rule.state_bytes(dtype(plan, node) != "f32")
    )


def row_tokens(plan: Plan, node: str) -> int:
    """Return the most tokens of a row: all its sequences, each with its own context."""
    graph = plan.graph
    row = sequences(plan.graph, plan.graph.node(node))
    return row.count * sum(bound(graph, name) for name in row.context) + sum(bound(graph, name) for name in row.scored)


def written_tokens(plan: Plan, node: str) -> int:
    """Return the most tokens that a generation adds to a row."""
    graph = plan.graph
    graph_node = plan.graph.node(node)
    most = sum(bound(graph, name) for name in sequences(graph, graph_node).scored)
    return GenerateAttributes.of(graph_node).longest(most)


def row_count(plan: Plan, node: str) -> int:
    """Return how many rows a node reads (a generation: writes) in an iteration."""
    return plan.graph.rows[plan.graph.row_level(plan.graph.node(node))]


def group_rows(plan: Plan, node: str) -> int:
    """Return how many rows one data-parallel group of a node reads in an iteration."""
    rows = plan.graph.rows[plan.graph.level(plan.graph.node(node))]
    return -(-rows // plan.placement(node).layout.dp)


def samples(plan: Plan, node: str) -> int:
    """Return the number of responses that a generation samples for each row it reads."""
    return GenerateAttributes.of(plan.graph.node(node)).samples


def most_samples(plan: Plan, node: str) -> int:
    """Return the largest number of responses per prompt, in training and evaluations."""
    graph_node = plan.graph.node(node)
    return max(samples(plan, node), *(e.draw(plan.graph, graph_node).samples for e in plan.deploy.evaluations), 1)


def fan(plan: Plan, node: str) -> int:
    """Return how many sequences of an infer or update node have the same context."""
    graph = plan.graph
    graph_node = plan.graph.node(node)
    row = sequences(graph, graph_node)
    context = max((graph.column(name).level for name in row.context), key=graph.depth, default=graph.level(graph_node))
    return row.count * graph.fan(graph.level(graph_node), context)


def prompts_at_once(plan: Plan, node: str) -> int:
    """Return for how many prompts of an iteration a group generates at one time."""
    rows = group_rows(plan, node)
    return min(rows, plan.placement(node).engine.read_count("micro_batch") or rows)


def work(plan: Plan, engines: Engines, node: str) -> Workload:
    """Return the workload of a node's micro-batch; its rows have the greatest length.

    Rows of equal length keep their order in micro-batches, so the responses to a prompt are next to each other.
    """
    placement = plan.placement(node)
    graph_node = plan.graph.node(node)
    generates = graph_node.verb == "generate"
    attributes = UpdateAttributes.of(graph_node)
    row = sequences(plan.graph, graph_node)
    response = (
        written_tokens(plan, node) if generates else max((bound(plan.graph, name) for name in row.scored), default=1)
    )
    prompt = sum(bound(plan.graph, name) for name in row.context) - (not row.scored)
    limit = MicroBatchLimit.of(plan, node)
    size = limit.full_rows
    alike = most_samples(plan, node)
    batches = 1
    responses = 0
    if generates:
        responses = min(placement.sequences or 1, prompts_at_once(plan, node) * alike)
        size = prompts = -(-responses // alike)
    else:
        # Micro-batches of a group's share are of similar size, however large they may be.
        share = group_rows(plan, node)
        if graph_node.verb == "update":
            share = min(share, -(-attributes.step_rows(row_count(plan, node)) // placement.layout.dp))
        batches = micro_batches(share, size, placement.layout)
        size = share if limit.tokens else -(-share // batches)
        # The most sequences in attention, each as long as all of a row's conversations together.
        most = max((conversations(plan.graph, name) for name in row.scored), default=1)
        size = size * row.count * most
        alike = fan(plan, node) * most
        prompts = (
            size // alike if size % alike == 0 else 1 if alike % size == 0 else min(size, -(-(size - 1) // alike) + 1)
        )
    return Workload(
        model=plan.model(node),
        layout=placement.layout,
        dtype=dtype(plan, node),
        rows=size,
        prompts=prompts,
        prompt=prompt,
        response=response,
        samples=alike,
        most_tokens=limit.most_tokens,
        padded=limit.padded,
        sequences=responses,
        cache_bytes=placement.cache_bytes if generates else 0,
        after=scores_texts(plan.graph, graph_node),
        batches=batches,
        divided=is_divided(plan, engines, node),
        trained=update_of(plan, graph_node.worker) is not None,
        recompute=Recomputation.of_option(placement.engine.options.get("recompute")),
        activations_away=placement.engine.options.get("activations") == "offload",
        optimizer_away=optimizer(plan, engines, node)
        if graph_node.verb == "update" and optimizer_residency(placement) == "parts"
        else 0,
        entropy=any(_differentiates_entropy(str(call.value)) for call in attributes.loss.calls()),
        optimizer=optimizer_spec_of(plan, node) if graph_node.verb == "update" else None,
        gradients=gradient_type(placement),
        on_host=plan.cluster.device.kind.is_host,
        replays_routes=bool(routing_columns(plan.graph, graph_node.reads)),
        records_routes=bool(routing_columns(plan.graph, graph_node.writes)),
    )


def _differentiates_entropy(term: str) -> bool:
    """Return whether a loss term uses the entropy; True for terms that users define."""
    known = algorithms.library().get(("loss", term))
    return known is None or "entropy" in known[0].fills


def looks_ahead(plan: Plan, node: str) -> bool:
    """Return whether all micro-batches need a forward pass before the first gradient."""
    graph_node = plan.graph.node(node)
    step = UpdateAttributes.of(graph_node).step_rows(row_count(plan, node))
    limit = MicroBatchLimit.of(plan, node)
    return graph_node.whole and micro_batches(-(-step // limit.layout.dp), limit.full_rows, limit.layout) > 1


def fullest(plan: Plan, engines: Engines, node: str) -> tuple[str, dict[str, int]]:
    """Return the moment of a node's peak memory: the moment's name, and bytes by item.

    Resident items are not included. Engines without a memory formula of their own use default_activations.py.
    """
    own = spec(plan, engines, node)
    verb = plan.graph.node(node).verb
    if own.memory.peaks is None and verb == "generate":
        return "", {"KV cache": work(plan, engines, node).at_once * kv_sequence(plan, node)}
    own_work = work(plan, engines, node)
    if not own_work.optimizer_away:
        return largest_moment(_moments(verb, own_work, own))
    moments = _moments(verb, replace(own_work, optimizer=None), own)
    # The gradients of the stage that has most of them.
    rest = max((items["gradients"] for name, items in moments.items() if "gradient's norm" in name), default=0)
    return largest_moment(moments | step_moments(own_work, rest or default_activations.gradients(own_work, own)))


def _moments(verb: str, own_work: Workload, own: EngineSpec) -> Moments:
    peaks = own.memory.peaks
    return default_activations.moments(verb, own_work, own) if peaks is None else peaks(verb, own_work)


def largest_moment(moments: Moments) -> tuple[str, dict[str, int]]:
    """Return the moment with the most bytes: its name, and the bytes of nonzero items."""
    name = max(moments, key=lambda moment: sum(moments[moment].values()))
    return name, {item: size for item, size in moments[name].items() if size}


def probe_tokens(plan: Plan, engines: Engines, src: str, dst: str) -> int:
    """Return the length of the prompt that tests the weights `src` sends to `dst`."""
    bounds = [end.fed for end in (work(plan, engines, node) for node in (src, dst))]
    return max(1, min(spec(plan, engines, dst).time.block + TOKENS, *bounds))


def probe_bytes(plan: Plan, engines: Engines, src: str, dst: str) -> dict[str, int]:
    """Return the bytes, by item, that `src` needs to test weights it sent to `dst`."""
    probe = work(plan, engines, src)
    own = spec(plan, engines, src)
    size = probe_tokens(plan, engines, src, dst)
    probe = replace(probe, rows=PROBES, prompts=PROBES, prompt=size, response=1, samples=1, batches=1)
    return largest_moment(_moments("infer", replace(probe, entropy=False), own))[1]


def scored_tokens(plan: Plan, node: str) -> int:
    """Return the most scored tokens of a row (one per sequence if no token is scored)."""
    row = sequences(plan.graph, plan.graph.node(node))
    return sum(bound(plan.graph, name) for name in row.scored) or row.count


def kv_sequence(plan: Plan, node: str) -> int:
    """Return the KV-cache bytes of one sequence of full length on one device."""
    layout = plan.placement(node).layout
    return round(kv_bytes(plan.model(node), layout, row_tokens(plan, node), BYTES[dtype(plan, node)]))


def offloads(plan: Plan, node: str, kind: str) -> bool:
    """Return whether a node's weights or optimizer states (`kind`) are in host memory."""
    trained = update_of(plan, plan.graph.node(node).worker) is not None
    return trained == (kind == "optimizer") and stated_away(plan.placement(node), kind)


def resident(plan: Plan, engines: Engines, pool: str, busy: str = "") -> dict[str, int]:
    """Return the bytes of a device's resident items while the node `busy` computes.

    The items are weights, optimizer states, and what other generations keep for the next iteration. Offloaded items are
    not included, except the weights of `busy`, and the optimizer states that it copies to the device as a whole. If
    `busy` is "", no node computes. The function `fullest` counts optimizer states that are copied to the device part by
    part during an optimizer step.
    """
    items: dict[str, int] = {}
    for item, size, node, kind in _items_at_rest(plan, engines, pool):
        here = busy and plan.graph.node(busy).worker == plan.graph.node(node).worker
        here = here and (kind == "weights" or fetches_states(plan, busy))
        if here or not offloads(plan, node, kind):
            items[item] = size
    items |= moving_averages(plan, engines, pool)
    for src, _ in fetched_edges(plan):  # the copy that generations fetch
        if plan.placement(src).pool == pool:
            item = f"{plan.graph.node(src).worker} weights to fetch"
            items[item] = items.get(item, 0) + weights(plan, engines, src)
    for dst in (dst for _, dst in skipping_edges(plan) if dst != busy and plan.placement(dst).pool == pool):
        items[f"{dst} weights{KEPT}"] = weights(plan, engines, dst)
        if building := spec(plan, engines, dst).memory.building:  # memory that the engine frees only with the weights
            items[f"{dst} cache{KEPT}"] = sum(building(work(plan, engines, dst)).values())
    return items


def moving_averages(plan: Plan, engines: Engines, pool: str) -> dict[str, int]:
    """Return the bytes of float32 copies of moving averages that are not float32."""
    copies = {}
    for worker in plan.graph.workers:
        first = next(iter(plan.graph.sharing(worker.name)), None) if worker.follows and worker.decay else None
        if first is None or plan.placement(first.name).pool != pool or dtype(plan, first.name) == "f32":
            continue
        size = weights(plan, engines, first.name) // BYTES[dtype(plan, first.name)] * BYTES["f32"]
        copies[f"{worker.name} average"] = size
    return copies


def offloaded_items(plan: Plan, engines: Engines, pool: str) -> dict[str, int]:
    """Return the host-memory bytes of each item that is offloaded from one device."""
    at_rest = _items_at_rest(plan, engines, pool)
    return {f"offloaded {item}": size for item, size, node, kind in at_rest if offloads(plan, node, kind)}


def activations_away(plan: Plan, engines: Engines, node: str) -> int:
    """Return the most bytes of activations that an update offloads from one device."""
    own_work = work(plan, engines, node)
    own = spec(plan, engines, node)
    if plan.graph.node(node).verb != "update" or not own_work.activations_away:
        return 0
    return default_activations.stored(own_work, own) if own.memory.stored is None else own.memory.stored(own_work)


def _items_at_rest(plan: Plan, engines: Engines, pool: str) -> Iterator[tuple[str, int, str, str]]:
    """Yield the weights and optimizer states of a pool as (item, bytes, node, kind)."""
    for worker in plan.graph.workers:
        if worker.kind == "function":
            continue
        update = update_of(plan, worker.name)
        if update is not None:
            if plan.placement(update.name).pool != pool:
                continue
            yield f"{worker.name} weights", weights(plan, engines, update.name), update.name, "weights"
            yield f"{worker.name} optimizer", optimizer(plan, engines, update.name), update.name, "optimizer"
            continue
        for item in _frozen_weights(plan, worker, pool):
            node = item.removesuffix(" weights")
            yield item, weights(plan, engines, node), node, "weights"


def masters(plan: Plan, engines: Engines, pool: str, loading: bool = False) -> dict[str, int]:
    """Return the bytes, by item, of float32 masters, which are optimizer states.

    Masters in host memory are not included. With `loading`, they are if they are made on the device as a whole.
    """
    sizes = {}
    for worker in plan.graph.workers:
        update = update_of(plan, worker.name) if worker.kind != "function" else None
        if update is None or plan.placement(update.name).pool != pool:
            continue
        residency = optimizer_residency(plan.placement(update.name))
        if residency == "parts" or (residency == "phase" and not loading):
            continue
        if dtype(plan, update.name) != "f32":
            own = spec(plan, engines, update.name)
            sizes[f"{worker.name} masters"] = count_state_bytes(plan, own, update.name, lambda _: optimizer_spec.MASTER)
    return sizes


def _frozen_weights(plan: Plan, worker: Worker, pool: str) -> list[str]:
    """Return the item names of a frozen worker's weights: one per layout and type."""
    fed = {edge.dst for edge in plan.graph.reshards()}
    seen: dict[tuple[str, str], str] = {}
    for node in plan.graph.nodes_of(worker.name):
        if node.name not in fed and plan.placement(node.name).pool == pool:
            seen.setdefault((str(plan.placement(node.name).layout), dtype(plan, node.name)), f"{node.name} weights")
    return list(seen.values())


def generation_items(plan: Plan, engines: Engines, node: str) -> dict[str, int]:
    """Return a device's bytes by item, except the KV cache, while `node` generates."""
    items = resident(plan, engines, plan.placement(node).pool, node)
    edge = next((candidate for candidate in plan.graph.reshards() if candidate.dst == node), None)
    if edge is not None:
        if plan.deploy.reshard.mode == "swap":
            items.pop(f"{plan.graph.node(edge.src).worker} weights", None)
        items["generation weights"] = weights(plan, engines, node)
    return items
