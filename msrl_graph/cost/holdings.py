"""What a node holds on one device, in bytes: the arithmetic that place, reshard, memory and estimate share.

Invariant: figures are those of the busiest device, at the columns' bounds, and say nothing of what an allocator adds
(RESERVE stands for it). Functions need a plan with placements, and the engines' specs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from .. import algorithms
from ..backends.spec import BYTES, EngineSpec, Moments
from ..backends.spec import offloads as stated_away
from ..hardware.cluster import ClusterSpec, Figure
from ..ir import optimizer_spec
from ..ir.async_schedule import fetched, sparse
from ..ir.attributes import GenerateAttributes, UpdateAttributes
from ..ir.graph import Node, Value, Worker
from ..ir.options import EngineOptions
from ..ir.plan import Placement, Plan
from ..ir.sequences import bound, conversations, scores_texts, sequences
from ..ir.workload import Workload, kv_elements, micro_batches
from ..sharding.layout import Side, held, stage_parts
from . import default_activations
from .offloading import by_parts

Engines = Mapping[str, EngineSpec]
# The part of a device's memory that the KV cache and planned layouts leave free: fragments, kernels' workspaces,
# captured graphs, what collectives keep (groups.py, where that is known).
RESERVE = 1 - EngineOptions.memory
# A probe, by which trainer and generator are compared as weights arrive (runtime/rank/weight_proof.py): so many prompts
# of so many tokens, or of a whole block of the generator's cache and these.
PROBES = 4
TOKENS = 8
KEPT = ", kept"  # ends the name of what a generation keeps for the next iteration


def capacity(cluster: ClusterSpec) -> Figure:
    """Bytes of one device. The ranks of a CPU cluster share their machine's memory."""
    memory = cluster.device.memory
    if not cluster.device.kind.shares_host_memory:
        return memory
    share = cluster.devices_per_node
    return Figure(memory.value / share, memory.source, f"{memory.basis}, divided by {share} ranks")


def gigabytes(number: float) -> str:
    """Bytes for a sentence: 8.19 GB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"


def with_options(placement: Placement, options: Mapping[str, Value]) -> Placement:
    """The placement, its engine with more options."""
    return replace(placement, engine=replace(placement.engine, options={**placement.engine.options, **options}))


def spec(plan: Plan, engines: Engines, node: str) -> EngineSpec:
    return engines[plan.placement(node).engine.name]


def dtype(plan: Plan, node: str) -> str:
    """The type of a node's weights: the engine's option, else the model's."""
    return str(plan.placement(node).engine.options.get("dtype") or plan.model(node).dtype)


def update_of(plan: Plan, worker: str) -> Node | None:
    """The node that has the optimizer of a worker: its first update, whose weights and optimizer others of its have
    too."""
    return next((n for n in plan.graph.sharing(worker)[:1] if n.verb == "update"), None)


def is_divided(plan: Plan, engines: Engines, node: str) -> bool:
    return spec(plan, engines, node).divided(plan.placement(node).layout)


def side(plan: Plan, engines: Engines, node: str) -> Side:
    """How a node's weights lie on the devices."""
    placement = plan.placement(node)
    return spec(plan, engines, node).side(placement.layout, placement.first, placement.each)


def weights(plan: Plan, engines: Engines, node: str) -> int:
    """Weights at rest."""
    return held(plan.model(node).kinds, side(plan, engines, node)) * BYTES[dtype(plan, node)]


def gradients(plan: Plan, engines: Engines, node: str) -> int:
    return default_activations.gradients(work(plan, engines, node), spec(plan, engines, node))


def optimizer(plan: Plan, engines: Engines, node: str) -> int:
    """An optimizer's states and float32 masters beside weights of another type, divided over dp and cp from ZeRO 1
    (arXiv:1910.02054), of experts over their own copies."""
    return _kept(plan, engines, node, lambda rule: rule.beside(dtype(plan, node) != "f32"))


def _kept(plan: Plan, engines: Engines, node: str, each: Callable[[optimizer_spec.Rule], float]) -> int:
    """Bytes on the busiest rank of what an update keeps of an element that steps by a rule."""
    layout = plan.placement(node).layout
    made = algorithms.optimizer(UpdateAttributes.of(plan.graph.node(node)).optimizer)
    at = Side(layout, layout.zero >= 1, spec(plan, engines, node).multiple(layout))
    copies = layout.cp if layout.zero == 1 else 1  # where weights are divided over dp, so is what is kept of them
    by_stage = [0.0] * layout.pp
    for rule, kinds in optimizer_spec.parted(made, plan.model(node).kinds):
        for stage, (dense, experts) in enumerate(stage_parts(kinds, at)):
            by_stage[stage] += each(rule) * (-(-dense // copies) + experts)
    return math.ceil(max(by_stage))


def row_tokens(plan: Plan, node: str) -> int:
    """Tokens of a row, at most: of each of its sequences the context and what is scored, or generated, of it."""
    graph = plan.graph
    found = sequences(plan.graph, plan.graph.node(node))
    return found.count * sum(bound(graph, c) for c in found.context) + sum(bound(graph, c) for c in found.scored)


def written_tokens(plan: Plan, node: str) -> int:
    """Tokens that a generation adds to a row, at most."""
    graph = plan.graph
    graph_node = plan.graph.node(node)
    most = sum(bound(graph, c) for c in sequences(graph, graph_node).scored)
    return GenerateAttributes.of(graph_node).longest(most)


def row_count(plan: Plan, node: str) -> int:
    """Rows that a node works on in an iteration; for a generation, the responses that it writes."""
    return plan.graph.rows[plan.graph.row_level(plan.graph.node(node))]


def group_rows(plan: Plan, node: str) -> int:
    """Rows of one data-parallel group; for a generation prompts, each with all its samples."""
    rows = plan.graph.rows[plan.graph.level(plan.graph.node(node))]
    return -(-rows // plan.placement(node).layout.dp)


def samples(plan: Plan, node: str) -> int:
    """Sequences that a generation makes of a row that it reads."""
    return GenerateAttributes.of(plan.graph.node(node)).samples


def most_samples(plan: Plan, node: str) -> int:
    """The most sequences of a row at once, in training or an evaluation, which may draw more of them."""
    graph_node = plan.graph.node(node)
    return max(samples(plan, node), *(e.draw(plan.graph, graph_node).samples for e in plan.deploy.evaluations), 1)


def fan(plan: Plan, node: str) -> int:
    """Sequences of an infer or update that begin with the same context."""
    graph = plan.graph
    graph_node = plan.graph.node(node)
    found = sequences(graph, graph_node)
    context = max((graph.column(c).level for c in found.context), key=graph.depth, default=graph.level(graph_node))
    return found.count * graph.fan(graph.level(graph_node), context)


def micro_batch(plan: Plan, node: str) -> int:
    """Rows that a group computes at once; for a generation prompts, each with all its samples."""
    stated = plan.placement(node).engine.options.get("micro_batch")
    return stated if isinstance(stated, int) and stated > 0 else 1


def work(plan: Plan, engines: Engines, node: str) -> Workload:
    """What a node computes at once, at the columns' bounds. Rows of like length keep their order, so that responses to
    one prompt lie together."""
    placement = plan.placement(node)
    graph_node = plan.graph.node(node)
    generates = graph_node.verb == "generate"
    said = UpdateAttributes.of(graph_node)
    found = sequences(plan.graph, graph_node)
    response = written_tokens(plan, node) if generates else max((bound(plan.graph, c) for c in found.scored), default=1)
    prompt = sum(bound(plan.graph, c) for c in found.context) - (not found.scored)
    size = micro_batch(plan, node)
    alike = most_samples(plan, node)
    batches = 1
    prompts = size
    if generates:
        size = min(size, group_rows(plan, node))
    else:
        # Micro-batches of a group's share are of like size, however large they may be.
        share = group_rows(plan, node)
        if graph_node.verb == "update":
            share = min(share, -(-said.step_rows(row_count(plan, node)) // placement.layout.dp))
        batches = micro_batches(share, size, placement.layout)
        size = -(-share // batches)
        # So many sequences attention may be computed of, each as long as all of a row's conversations together.
        most = max((conversations(plan.graph, c) for c in found.scored), default=1)
        size = size * found.count * most
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
        after=scores_texts(plan.graph, graph_node),
        batches=batches,
        divided=is_divided(plan, engines, node),
        trained=update_of(plan, graph_node.worker) is not None,
        recompute=placement.engine.options.get("recompute") == "full",
        activations_away=placement.engine.options.get("activations") == "offload",
        optimizer_away=optimizer(plan, engines, node)
        if graph_node.verb == "update" and offloads(plan, node, "optimizer")
        else 0,
        entropy=any(_differentiates_entropy(str(call.value)) for call in said.loss.calls()),
        optimizer=algorithms.optimizer(said.optimizer) if graph_node.verb == "update" else None,
        on_host=plan.cluster.device.kind.is_host,
        given=graph_node.verb == "update"
        and any(c.element == "i32" and c.dims and c.dims[0].like for c in map(plan.graph.column, graph_node.reads)),
    )


def _differentiates_entropy(term: str) -> bool:
    """Whether a loss term has the entropy filled in; one of a file may have, its signature is not at hand."""
    known = algorithms.library().get(("loss", term))
    return known is None or "entropy" in known[0].fills


def looks_ahead(plan: Plan, node: str) -> bool:
    """Whether an update passes over its mini-batch twice: its loss is of all of it at once, and that is several
    micro-batches."""
    graph_node = plan.graph.node(node)
    step = UpdateAttributes.of(graph_node).step_rows(row_count(plan, node))
    layout = plan.placement(node).layout
    return graph_node.whole and micro_batches(-(-step // layout.dp), micro_batch(plan, node), layout) > 1


def fullest(plan: Plan, engines: Engines, node: str) -> tuple[str, dict[str, int]]:
    """The moment at which a node holds most beside what is resident, by the engine's own account, else by general
    formulas."""
    own = spec(plan, engines, node)
    verb = plan.graph.node(node).verb
    if own.peaks is None and verb == "generate":
        at_once, _ = waves(plan, node)
        return "", {"KV cache": at_once * most_samples(plan, node) * kv_sequence(plan, node)}
    made = work(plan, engines, node)
    if not made.optimizer_away:
        return largest(_moments(verb, made, own))
    found = _moments(verb, replace(made, optimizer=None), own)
    # Of the stage that has most of them.
    rest = max((m["gradients"] for name, m in found.items() if "gradient's norm" in name), default=0)
    return largest(found | by_parts(made, rest or default_activations.gradients(made, own)))


def _moments(verb: str, made: Workload, own: EngineSpec) -> Moments:
    return default_activations.moments(verb, made, own) if own.peaks is None else own.peaks(verb, made)


def largest(moments: Moments) -> tuple[str, dict[str, int]]:
    """The fullest of some moments: its name and its items."""
    name = max(moments, key=lambda m: sum(moments[m].values()))
    return name, {k: v for k, v in moments[name].items() if v}


def probe_tokens(plan: Plan, engines: Engines, src: str, dst: str) -> int:
    """Tokens of each prompt of a probe: as many as an engine keeps of a prompt, as far as the columns' bounds let both
    ends have them."""
    bounds = [made.fed for made in (work(plan, engines, n) for n in (src, dst))]
    return max(1, min(spec(plan, engines, dst).block + TOKENS, *bounds))


def probing(plan: Plan, engines: Engines, src: str, dst: str) -> dict[str, int]:
    """What the trainer holds beside what is resident while it computes a probe."""
    made = work(plan, engines, src)
    own = spec(plan, engines, src)
    size = probe_tokens(plan, engines, src, dst)
    made = replace(made, rows=PROBES, prompts=PROBES, prompt=size, response=1, samples=1, batches=1)
    return largest(_moments("infer", replace(made, entropy=False, given=False), own))[1]


def scored_tokens(plan: Plan, node: str) -> int:
    """Tokens of a row that the head is asked for: those of the scored columns, or one of each sequence where none
    is."""
    found = sequences(plan.graph, plan.graph.node(node))
    return sum(bound(plan.graph, c) for c in found.scored) or found.count


def kv_sequence(plan: Plan, node: str) -> int:
    """Keys and values of one sequence at its bound, on one device."""
    each = kv_elements(plan.model(node), plan.placement(node).layout)
    return row_tokens(plan, node) * each * BYTES[dtype(plan, node)]


def offloads(plan: Plan, node: str, what: str) -> bool:
    """Whether the `weights` of a node without update, or the `optimizer` of an update, lie in host memory while others
    compute."""
    trained = update_of(plan, plan.graph.node(node).worker) is not None
    return trained == (what == "optimizer") and stated_away(plan.placement(node), what)


def resident(plan: Plan, engines: Engines, pool: str, busy: str = "") -> dict[str, int]:
    """By item, what lies on a device of a pool while the node `busy` computes ("": none does), beside what computing
    takes: weights and optimizer states, and what other generations keep for the next iteration.

    What is offloaded lies in host memory meanwhile; of it the busy node has its own weights here. What an update brings
    of its optimizer's states is there in its step alone: `fullest` has it.
    """
    items: dict[str, int] = {}
    for item, size, node, what in _at_rest(plan, engines, pool):
        here = what == "weights" and busy and plan.graph.node(busy).worker == plan.graph.node(node).worker
        if here or not offloads(plan, node, what):
            items[item] = size
    items |= averages(plan, engines, pool)
    for src, _ in fetched(plan):  # a copy of the version that generations fetch
        if plan.placement(src).pool == pool:
            item = f"{plan.graph.node(src).worker} weights to fetch"
            items[item] = items.get(item, 0) + weights(plan, engines, src)
    for dst in (dst for _, dst in sparse(plan) if dst != busy and plan.placement(dst).pool == pool):
        items[f"{dst} weights{KEPT}"] = weights(plan, engines, dst)
        if building := spec(plan, engines, dst).building:  # what it gives back with the weights alone
            items[f"{dst} cache{KEPT}"] = sum(building(work(plan, engines, dst)).values())
    return items


def averages(plan: Plan, engines: Engines, pool: str) -> dict[str, int]:
    """The float32 copies that moving averages of weights of another type are kept in, by item."""
    found = {}
    for worker in plan.graph.workers:
        first = next(iter(plan.graph.sharing(worker.name)), None) if worker.follows and worker.decay else None
        if first is None or plan.placement(first.name).pool != pool or dtype(plan, first.name) == "f32":
            continue
        size = weights(plan, engines, first.name) // BYTES[dtype(plan, first.name)] * BYTES["f32"]
        found[f"{worker.name} average"] = size
    return found


def offloaded(plan: Plan, engines: Engines, pool: str) -> dict[str, int]:
    """What lies in host memory of each device of a pool, by item; it keeps its room there while the device has it."""
    found = _at_rest(plan, engines, pool)
    return {f"offloaded {item}": size for item, size, node, what in found if offloads(plan, node, what)}


def activations_away(plan: Plan, engines: Engines, node: str) -> int:
    """Bytes that a device of an update has in host memory between forward and backward passes, at most."""
    made = work(plan, engines, node)
    own = spec(plan, engines, node)
    if plan.graph.node(node).verb != "update" or not made.activations_away:
        return 0
    return default_activations.stored(made, own) if own.stored is None else own.stored(made)


def _at_rest(plan: Plan, engines: Engines, pool: str) -> Iterator[tuple[str, int, str, str]]:
    """The weights and optimizer states of a pool: item, bytes, the node whose engine says where they lie, and which of
    both they are."""
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
        for item in _own(plan, worker, pool):
            node = item.removesuffix(" weights")
            yield item, weights(plan, engines, node), node, "weights"


def masters(plan: Plan, engines: Engines, pool: str) -> dict[str, int]:
    """The float32 copies of bf16 weights that the optimizers of a pool keep on a device, by item; part of their
    states."""
    found = {}
    for worker in plan.graph.workers:
        update = update_of(plan, worker.name) if worker.kind != "function" else None
        if update is None or plan.placement(update.name).pool != pool or offloads(plan, update.name, "optimizer"):
            continue
        if dtype(plan, update.name) != "f32":
            found[f"{worker.name} masters"] = _kept(plan, engines, update.name, lambda rule: optimizer_spec.MASTER)
    return found


def _own(plan: Plan, worker: Worker, pool: str) -> list[str]:
    """The weights that a worker without update keeps in a pool: one copy a layout and type, named by the first node
    that uses it."""
    fed = {e.dst for e in plan.graph.reshards()}
    seen: dict[tuple[str, str], str] = {}
    for node in plan.graph.of(worker.name):
        if node.name not in fed and plan.placement(node.name).pool == pool:
            seen.setdefault((str(plan.placement(node.name).layout), dtype(plan, node.name)), f"{node.name} weights")
    return list(seen.values())


def generation_items(plan: Plan, engines: Engines, node: str) -> dict[str, int]:
    """What a device holds while `node` generates, but for the KV cache."""
    items = resident(plan, engines, plan.placement(node).pool, node)
    edge = next((e for e in plan.graph.reshards() if e.dst == node), None)
    if edge is not None:
        if plan.deploy.reshard.mode == "swap":
            items.pop(f"{plan.graph.node(edge.src).worker} weights", None)
        items["generation weights"] = weights(plan, engines, node)
    return items


def kv_room(plan: Plan, engines: Engines, node: str) -> int:
    """Bytes that are left for the KV cache; may be negative. The engine's option `memory` is the part of the device
    that it may use."""
    part = plan.placement(node).engine.options.get("memory")
    part = part if isinstance(part, (int, float)) and part > 0 else EngineOptions.memory
    return int(capacity(plan.cluster).value * part) - sum(generation_items(plan, engines, node).values())


def waves(plan: Plan, node: str) -> tuple[int, int]:
    """Prompts that a data-parallel group generates from at once, and how many times."""
    rows = group_rows(plan, node)
    at_once = min(rows, micro_batch(plan, node))
    return at_once, -(-rows // at_once)
