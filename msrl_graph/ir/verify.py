"""Verifier of plans: checks of consistency that do not need the program.

Each compiler pass fills one section of a plan. For each section, this module has a function that yields a text for each
fault in the section. The compiler calls this function after the pass. For a plan from a file, all functions are called,
`names` first.

Invariant: a function relies only on sections that were verified before its own section.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations

from ..sharding.device_range import iterate_runs, ranges_overlap
from .async_schedule import skipping_edges
from .graph import KINDS, Expr, Graph, Node
from .instruction import Instruction, InstructionStream, Walk, Walker, nodes_run
from .plan import FUNCTIONS, Plan
from .rowsets import find_refill, nodes_upstream

LITERALS = {"number": 0, "string": 0, "bool": 0, "quantity": 0, "word": 0, "column": 0, "state": 0, "neg": 1}


def names(plan: Plan) -> Iterator[str]:
    """Verify names and expressions.

    Each name must be the name of a node, column, worker, pool or model of the plan. Each expression must have the
    number of operands that its kind needs. The checks of a program ensure this, but a plan file may have been edited by
    hand.
    """
    if not plan.pools:
        yield "it does not say which devices its states share"
        return
    yield from _check_graph(plan.graph)
    yield from _check_plan(plan)


def _list_missing(kind: str, names: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    existing = set(known)
    yield from (f"it has no {kind} `{name}`" for name in names if name not in existing)


def _list_duplicates(kind: str, names: Iterable[str]) -> Iterator[str]:
    yield from (f"it has the {kind} `{name}` more than once" for name, count in Counter(names).items() if count > 1)


def _check_graph(graph: Graph) -> Iterator[str]:
    columns, states, workers = ([item.name for item in part] for part in (graph.columns, graph.states, graph.workers))
    nodes = [node.name for node in graph.nodes]
    written = [column for node in graph.nodes for column in node.writes]
    yield from (
        *_list_duplicates("node", nodes),
        *_list_duplicates("column", columns),
        *_list_duplicates("worker", workers),
    )
    yield from _list_duplicates("writer of the column", written)
    if not graph.nodes or [node.name for node in graph.nodes if node.verb == "source"] != nodes[:1]:
        yield "its source is not the first node, or not the only source"
    levels = enumerate(graph.under)
    if len(graph.rows) != len(graph.under) or any(not -1 <= above < level for level, above in levels):
        yield "the levels of its rows are not one under another"
    for column in graph.columns:
        likes = [dim.like for dim in column.dims if dim.like]
        yield from _list_missing("column", [*likes, *([column.per] if column.per else [])], columns)
        yield from _list_missing("writer of", [column.name], written)
        if not 0 <= column.level < len(graph.rows):
            yield f"it has no rows of the level of `{column.name}`"
    for state in graph.states:
        yield from (
            *_list_missing("column", [state.per] if state.per else [], columns),
            *_check_operands(state.initial),
        )
    for node in graph.nodes:
        yield from _list_missing("worker", [node.worker] if node.verb != "source" else [], workers)
        yield from _list_missing("column", [*node.reads, *node.writes], columns)
        yield from _list_missing("column or state", node.gives, [*columns, *states])
        yield from _list_missing("column", [node.per], [*columns, "row", "batch"])
        yield from _list_missing("state", node.states, states)
        yield from (fault for expr in node.attributes.values() for fault in _check_operands(expr))
        kind = next((candidate.kind for candidate in graph.workers if candidate.name == node.worker), "")
        if node.verb not in KINDS.get(kind, (node.verb,)):
            yield f"`{node.name}` is not a node that a `{kind}` can have"
        if node.verb == "generate" and not any(
            column.element == "i32" for column in graph.columns if column.name in node.writes
        ):
            yield f"`{node.name}` generates no tokens"
    order = {name: index for index, name in enumerate(nodes)}
    for edge in graph.edges:
        yield from _list_missing("node", [edge.src, edge.dst], nodes)
        yield from (fault for expr in edge.attributes.values() for fault in _check_operands(expr))
        if edge.kind == "sample" and order.get(edge.src, 0) >= order.get(edge.dst, len(order)):
            yield f"`{edge.dst}` comes before `{edge.src}`, which it reads from"


def _check_operands(expr: Expr) -> Iterator[str]:
    """Yield a text for each subexpression with the wrong number of operands."""
    parts = {"call": len(expr.keys), "list": len(expr.args)} | LITERALS
    if len(expr.args) != parts.get(expr.kind, 2):
        yield f"an expression of the kind `{expr.kind}` has {len(expr.args)} parts"
    yield from (fault for part in expr.args for fault in _check_operands(part))


def _check_plan(plan: Plan) -> Iterator[str]:
    nodes, pools, columns = (
        [item.name for item in part] for part in (plan.graph.nodes, plan.pools, plan.graph.columns)
    )
    yield from _list_missing(
        "model", [worker.model for worker in plan.graph.workers if worker.model], plan.deploy.models
    )
    yield from _list_duplicates("pool", pools)
    placed = [*(placement.pool for placement in plan.placements), *(stream.pool for stream in plan.schedule)]
    yield from _list_missing("pool", placed, [*pools, FUNCTIONS])
    named = [
        *(placement.node for placement in plan.placements),
        *(controller.node for controller in plan.docks.controllers),
    ]
    named += [name for pool in plan.pools for name in pool.nodes]
    named += [name for reshard in plan.reshards for name in (reshard.src, reshard.dst)] + [
        name for traffic_item in plan.traffic for name in (traffic_item.src, traffic_item.dst)
    ]
    named += [draw.generation for evaluation in plan.deploy.evaluations for draw in evaluation.draws]
    named += [
        name
        for stream in plan.schedule
        for instruction in stream.instructions
        for name in (instruction.node, instruction.other)
        if name
    ]
    yield from _list_missing("node", [*named, *plan.deploy.layouts, *plan.deploy.engines], nodes)
    yield from _list_duplicates("evaluation", [evaluation.task for evaluation in plan.deploy.evaluations])
    yield from _list_missing("data", [evaluation.data for evaluation in plan.deploy.evaluations], plan.deploy.data)
    yield from _list_missing(
        "column", [column for evaluation in plan.deploy.evaluations for column in evaluation.columns], columns
    )


# Verifiers of the sections that passes fill.


def _describe_incomplete(name: str) -> str:
    return f"the part of the pass `{name}` is incomplete"


def _every_node_once(plan: Plan, names: Iterable[str]) -> bool:
    return sorted(names) == sorted(node.name for node in plan.graph.nodes)


def _is_on_hosts(plan: Plan, node: Node) -> bool:
    """Return whether a node runs on the hosts: a Python function or the source."""
    return node.verb == "source" or plan.graph.worker(node.worker).kind == "function"


def placements(plan: Plan) -> Iterator[str]:
    """Verify placements.

    Every node must have one placement: a function on the hosts, a node with weights on the devices of its pool. No two
    pools may share a device. Only generations may have their data-parallel replicas on neighboring ranks (`inner` > 1).
    All other nodes must have the default order of ranks, since process groups and FSDP2 number ranks in this order.
    """
    if not _every_node_once(plan, [placement.node for placement in plan.placements]):
        yield _describe_incomplete("place")
        return
    cluster = plan.cluster
    pools = {pool.name: pool for pool in plan.pools}
    per_host = cluster.devices_per_node
    for pool in plan.pools:
        ranges = iterate_runs(pool.first, pool.devices, pool.each, per_host)
        if pool.devices < 1 or pool.first < 0 or any(stop > cluster.devices for _, stop in ranges):
            yield f"the cluster does not have the devices of its pool `{pool.name}`"
            return
    for one, other in combinations(plan.pools, 2):
        if ranges_overlap((one.first, one.devices, one.each), (other.first, other.devices, other.each), per_host):
            yield f"its pools `{one.name}` and `{other.name}` have a device in common"
    for placement in plan.placements:
        if _is_on_hosts(plan, plan.graph.node(placement.node)) != (placement.pool == FUNCTIONS):
            yield f"`{placement.node}` cannot be in the pool `{placement.pool}`"
        elif placement.pool != FUNCTIONS:
            pool = pools[placement.pool]
            if placement.node not in pool.nodes or (placement.first, placement.each, placement.layout.devices) != (
                pool.first,
                pool.each,
                pool.devices,
            ):
                yield f"`{placement.node}` is not on the devices of its pool `{pool.name}`"
            elif placement.layout.dp % placement.layout.inner or (
                placement.layout.inner > 1 and plan.graph.node(placement.node).verb != "generate"
            ):
                inner = placement.layout.inner
                yield f"the replicas of `{placement.node}` cannot be next to each other in groups of {inner}"


def docks(plan: Plan) -> Iterator[str]:
    """Verify docks.

    Every node except the source must have one controller. The controller must have the columns that the node reads and
    the number of the node's data-parallel groups. Warehouses must be on different hosts.
    """
    if sorted(controller.node for controller in plan.docks.controllers) != sorted(
        node.name for node in plan.graph.nodes[1:]
    ):
        yield _describe_incomplete("dock")
        return
    stores = plan.docks.warehouses
    hosts = plan.cluster.nodes
    used = {*stores, *(controller.host for controller in plan.docks.controllers)}
    if not stores or not all(0 <= host < hosts for host in used):
        yield "one of its controllers or warehouses is not on a host of the cluster, or it has no warehouse"
    if len(set(stores)) < len(stores):
        yield "two of its warehouses are on one host"
    for controller in plan.docks.controllers:
        placement = plan.placement(controller.node)
        if controller.columns != plan.graph.node(controller.node).reads:
            yield f"the controller of `{controller.node}` does not have exactly the columns of its node"
        if controller.groups != (hosts if placement.pool == FUNCTIONS else placement.layout.dp):
            yield f"the controller of `{controller.node}` does not have as many groups as the node"


def reshards(plan: Plan) -> Iterator[str]:
    """Verify the plans of resharding edges.

    Every resharding edge (`=>`) must have a plan, and each tensor must be in exactly one bucket.
    """
    if [(reshard.src, reshard.dst) for reshard in plan.reshards] != [
        (edge.src, edge.dst) for edge in plan.graph.reshards()
    ]:
        yield _describe_incomplete("reshard")
        return
    for reshard in plan.reshards:
        if (reshard.mode == "send") != (plan.placement(reshard.src).pool != plan.placement(reshard.dst).pool):
            yield f"the mode of `{reshard.name}` cannot be {reshard.mode} with its pools"
        if Counter(chain.from_iterable((*reshard.buckets, *reshard.first_buckets))) != Counter(
            tensor.name for tensor in plan.model(reshard.src).weights
        ):
            yield f"the buckets of `{reshard.name}` do not have every tensor once"


def schedule(plan: Plan) -> Iterator[str]:
    """Verify the schedule.

    - Each task (training or an evaluation) must run each of its nodes once, in the pool where the node is placed.
    - The weights of a node must be on the devices when the node runs.
    - No instruction stream may wait forever, even if a filter requests one more round of prompts.
    """
    if not _every_node_once(plan, nodes_run(plan.schedule)):
        yield _describe_incomplete("schedule")
        return
    evaluated = {
        evaluation.task: nodes_upstream(plan.graph, evaluation.columns) for evaluation in plan.deploy.evaluations
    }
    tasks = ("train", *evaluated)
    pools = (*(pool.name for pool in plan.pools), FUNCTIONS)
    if Counter((stream.pool, stream.task) for stream in plan.schedule) != Counter(
        (pool, task_name) for task_name in tasks for pool in pools
    ):
        yield "it does not have one stream for each pool and task"
        return
    for task in tasks:
        streams = [stream for stream in plan.schedule if stream.task == task]
        if task != "train" and sorted(nodes_run(streams, task)) != sorted(evaluated[task]):
            yield f"the streams of `{task}` do not run each node that it needs once"
        misfits = [
            (stream.pool, instruction, why) for stream in streams for instruction, why in _list_misfits(plan, stream)
        ]
        yield from (
            f"the stream of `{pool}` for `{task}` has {instruction}, which {why}" for pool, instruction, why in misfits
        )
        if not misfits:
            yield from (f"the streams of `{task}` {why}" for why in _Streams(plan, task, streams).faults())


def _list_misfits(plan: Plan, stream: InstructionStream) -> Iterator[tuple[Instruction, str]]:
    """Yield each instruction that does not belong in a stream, with the reason."""
    edges = {
        (reshard.src, reshard.dst): {plan.placement(node).pool for node in (reshard.src, reshard.dst)}
        for reshard in plan.reshards
    }
    filter = find_refill(plan.graph)[0] if stream.task == "train" else ""
    begun: set[str] = set()  # nodes that a round may go back to
    again = False
    for instruction in stream.instructions:
        if instruction.op == "RESHARD":
            begun.add(instruction.other)
            if stream.pool not in edges.get((instruction.node, instruction.other), ()):
                yield instruction, "is not a resharding edge of its nodes"
        elif instruction.op == "AGAIN":
            if instruction.node != filter or instruction.other not in begun or again:
                yield instruction, "does not repeat its rounds of prompts"
            again = True
        elif instruction.other or not instruction.node or plan.placement(instruction.node).pool != stream.pool:
            yield instruction, "is not of its nodes"
        elif instruction.op == "RUN":
            begun.add(instruction.node)


class _Streams(Walker):
    """A simulated execution of the instruction streams of one task.

    The simulation tracks how often each node must still run, and which weights are on the devices. It assumes that a
    filter with `refill` requests one more round of prompts.
    """

    def __init__(self, plan: Plan, task: str, streams: Sequence[InstructionStream]) -> None:
        self.plan = plan
        self.streams = streams
        self.repeated = find_refill(plan.graph)[1] if task == "train" else frozenset[str]()
        self.remaining = {
            node: 2 if node in self.repeated else 1 for node in nodes_run(streams, task)
        }  # remaining runs
        self.edges = {reshard.dst: reshard for reshard in plan.reshards}
        self.loaded = set[str]()  # generations whose weights are on the devices
        self.staying = {dst for _, dst in skipping_edges(plan)}  # generations whose weights stay for the next task
        self.swapped_out = set[str]()  # workers whose weights have left the devices
        self.returning = set[str]()  # updates whose weights are returning to the devices
        self.problems: list[str] = []

    def faults(self) -> list[str]:
        ended = Walk({stream.pool: stream.instructions for stream in self.streams}).finish(self)
        if not self.problems and not ended:
            self.problems.append("wait for each other")
        if not self.problems and (self.loaded - self.staying or self.swapped_out or any(self.remaining.values())):
            self.problems.append("leave a node that has not run, or weights where the next task does not expect them")
        return self.problems

    def _worker(self, node: str) -> str:
        return self.plan.graph.node(node).worker

    def ready(self, pool: str, node: str) -> bool:
        # A node within rounds waits for this round of the nodes before it, other nodes wait for all rounds.
        most = self.remaining[node] if node in self.repeated else 1
        return max([self.remaining.get(edge.src, 0) for edge in self.plan.graph.into(node)], default=0) < most

    def run(self, pool: str, node: str) -> None:
        self.remaining[node] -= 1
        is_away = (
            self.swapped_out
            and self._worker(node) in self.swapped_out
            and self.plan.graph.node(node).verb != "generate"
        )
        if is_away or (node in self.edges and node not in self.loaded):
            self.problems.append(f"run `{node}` while its weights are not on the devices")

    def reshard(self, pools: Sequence[str], src: str, dst: str) -> None:
        if {self.plan.placement(other).pool for other in (src, dst)} != {*pools}:
            self.problems.append(f"have `{src} => {dst}` in only one of its two pools")
        if dst in self.loaded - self.staying:
            self.problems.append(f"reshard into `{dst}` while its weights are on the devices")
        self.loaded.add(dst)
        if self.edges[dst].mode == "swap":
            # The swap begins when returning weights have arrived, for example in the next round of a filter.
            self.returning = {other for other in self.returning if self._worker(other) != self._worker(src)}
            self.swapped_out.add(self._worker(src))

    def release(self, pool: str, node: str) -> None:
        if node not in self.loaded:
            self.problems.append(f"release the weights of `{node}` while they are not on the devices")
        if node in self.staying:
            self.problems.append(f"release the weights of `{node}`, which the next iteration may generate with")
        self.loaded.discard(node)

    def swap_in(self, pool: str, node: str) -> None:
        if node in self.returning or self._worker(node) not in self.swapped_out:
            self.problems.append(f"swap in the weights of `{node}` while they are on the devices")
        self.returning.add(node)

    def wait(self, pool: str, node: str) -> None:
        if node not in self.returning:
            self.problems.append(f"wait for the weights of `{node}`, which are not returning")
        self.returning.discard(node)
        self.swapped_out.discard(self._worker(node))

    def again(self, pool: str, node: str, rounds: int) -> bool:
        return rounds < 2


def traffic(plan: Plan) -> Iterator[str]:
    """Verify that the plan has the traffic of every sample edge."""
    if [(item.src, item.dst) for item in plan.traffic] != [(edge.src, edge.dst) for edge in plan.graph.samples()]:
        yield _describe_incomplete("traffic")


def memory(plan: Plan) -> Iterator[str]:
    """Verify that the plan has the memory of the hosts and of every pool's devices."""
    if {(phase.place, phase.pool) for phase in plan.memory} != {
        *(("device", pool.name) for pool in plan.pools),
        ("host", "hosts"),
    }:
        yield _describe_incomplete("memory")


def estimate(plan: Plan) -> Iterator[str]:
    """Verify that the plan has an estimate of the iteration time."""
    if plan.estimate is None:
        yield _describe_incomplete("estimate")
