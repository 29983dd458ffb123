"""The verifier: whether a plan is one, in all that can be told of it by itself.

Invariant: each part relies on the parts before it, and yields what is wrong in words, or nothing. A pass names the part
for what it fills, and the compiler asks that after the pass; a plan from a file is asked all of them, `names` first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations

from ..sharding.device_range import meet, runs
from .async_schedule import sparse
from .graph import KINDS, Expr, Graph, Node
from .instruction import Instruction, InstructionStream, Walk, Walker, nodes_run
from .plan import FUNCTIONS, Plan
from .rowsets import looping, upstream

LITERALS = {"number": 0, "string": 0, "bool": 0, "quantity": 0, "word": 0, "column": 0, "state": 0, "neg": 1}


def names(plan: Plan) -> Iterator[str]:
    """Each name is that of a node, column, worker, node, pool or model of the plan; each expression has the parts of
    its kind. Of a program the checks have said so; a file may have been edited."""
    if not plan.pools:
        yield "it does not say which devices its states share"
        return
    yield from _in_graph(plan.graph)
    yield from _in_plan(plan)


def _missing(what: str, names: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    there = set(known)
    yield from (f"it has no {what} `{n}`" for n in names if n not in there)


def _twice(what: str, names: Iterable[str]) -> Iterator[str]:
    yield from (f"it has the {what} `{n}` more than once" for n, count in Counter(names).items() if count > 1)


def _in_graph(graph: Graph) -> Iterator[str]:
    columns, states, workers = ([x.name for x in part] for part in (graph.columns, graph.states, graph.workers))
    nodes = [n.name for n in graph.nodes]
    written = [c for n in graph.nodes for c in n.writes]
    yield from (*_twice("node", nodes), *_twice("column", columns), *_twice("worker", workers))
    yield from _twice("writer of the column", written)
    if not graph.nodes or [n.name for n in graph.nodes if n.verb == "source"] != nodes[:1]:
        yield "its first node is not the source, or another is"
    levels = enumerate(graph.under)
    if len(graph.rows) != len(graph.under) or any(not -1 <= above < level for level, above in levels):
        yield "the levels of its rows are not one under another"
    for column in graph.columns:
        likes = [d.like for d in column.dims if d.like]
        yield from _missing("column", [*likes, *([column.per] if column.per else [])], columns)
        yield from _missing("writer of", [column.name], written)
        if not 0 <= column.level < len(graph.rows):
            yield f"it has no rows of the level of `{column.name}`"
    for state in graph.states:
        yield from (*_missing("column", [state.per] if state.per else [], columns), *_parts(state.initial))
    for node in graph.nodes:
        yield from _missing("worker", [node.worker] if node.verb != "source" else [], workers)
        yield from _missing("column", [*node.reads, *node.writes], columns)
        yield from _missing("column or state", node.gives, [*columns, *states])
        yield from _missing("column", [node.per], [*columns, "row", "batch"])
        yield from _missing("state", node.states, states)
        yield from (fault for expr in node.attributes.values() for fault in _parts(expr))
        kind = next((w.kind for w in graph.workers if w.name == node.worker), "")
        if node.verb not in KINDS.get(kind, (node.verb,)):
            yield f"`{node.name}` is no state of a `{kind}`"
        if node.verb == "generate" and not any(c.element == "i32" for c in graph.columns if c.name in node.writes):
            yield f"`{node.name}` generates no tokens"
    order = {name: i for i, name in enumerate(nodes)}
    for edge in graph.edges:
        yield from _missing("node", [edge.src, edge.dst], nodes)
        yield from (fault for expr in edge.attributes.values() for fault in _parts(expr))
        if edge.kind == "sample" and order.get(edge.src, 0) >= order.get(edge.dst, len(order)):
            yield f"`{edge.dst}` stands before `{edge.src}`, which it reads from"


def _parts(expr: Expr) -> Iterator[str]:
    """What an expression misses of what its kind has."""
    parts = {"call": len(expr.keys), "list": len(expr.args)} | LITERALS
    if len(expr.args) != parts.get(expr.kind, 2):
        yield f"an expression of the kind `{expr.kind}` has {len(expr.args)} parts"
    yield from (fault for part in expr.args for fault in _parts(part))


def _in_plan(plan: Plan) -> Iterator[str]:
    nodes, pools, columns = ([x.name for x in part] for part in (plan.graph.nodes, plan.pools, plan.graph.columns))
    yield from _missing("model", [w.model for w in plan.graph.workers if w.model], plan.deploy.models)
    yield from _twice("pool", pools)
    placed = [*(p.pool for p in plan.placements), *(s.pool for s in plan.schedule)]
    yield from _missing("pool", placed, [*pools, FUNCTIONS])
    named = [*(p.node for p in plan.placements), *(c.node for c in plan.docks.controllers)]
    named += [n for p in plan.pools for n in p.nodes]
    named += [n for r in plan.reshards for n in (r.src, r.dst)] + [n for t in plan.traffic for n in (t.src, t.dst)]
    named += [d.generation for e in plan.deploy.evaluations for d in e.draws]
    named += [n for s in plan.schedule for x in s.instructions for n in (x.node, x.other) if n]
    yield from _missing("node", [*named, *plan.deploy.layouts, *plan.deploy.engines], nodes)
    yield from _twice("evaluation", [e.task for e in plan.deploy.evaluations])
    yield from _missing("data", [e.data for e in plan.deploy.evaluations], plan.deploy.data)
    yield from _missing("column", [c for e in plan.deploy.evaluations for c in e.columns], columns)


# What the passes fill.


def _unfilled(name: str) -> str:
    return f"what the pass `{name}` fills is not whole"


def _every_node_once(plan: Plan, names: Iterable[str]) -> bool:
    return sorted(names) == sorted(n.name for n in plan.graph.nodes)


def _on_hosts(plan: Plan, node: Node) -> bool:
    """Whether a node is a Python function, or the source."""
    return node.verb == "source" or plan.graph.worker(node.worker).kind == "function"


def placements(plan: Plan) -> Iterator[str]:
    """Every node has one place: a function the hosts, a node with weights the devices of its pool, which no other
    pool has. Ranks that train lie as a program states them: process groups and FSDP2 count them in their order."""
    if not _every_node_once(plan, [p.node for p in plan.placements]):
        yield _unfilled("place")
        return
    cluster = plan.cluster
    pools = {p.name: p for p in plan.pools}
    per_host = cluster.devices_per_node
    for pool in plan.pools:
        taken = runs(pool.first, pool.devices, pool.each, per_host)
        if pool.devices < 1 or pool.first < 0 or any(stop > cluster.devices for _, stop in taken):
            yield f"the cluster does not have the devices of its pool `{pool.name}`"
            return
    for one, other in combinations(plan.pools, 2):
        if meet((one.first, one.devices, one.each), (other.first, other.devices, other.each), per_host):
            yield f"its pools `{one.name}` and `{other.name}` have a device in common"
    for p in plan.placements:
        if _on_hosts(plan, plan.graph.node(p.node)) != (p.pool == FUNCTIONS):
            yield f"`{p.node}` cannot be in the pool `{p.pool}`"
        elif p.pool != FUNCTIONS:
            pool = pools[p.pool]
            if p.node not in pool.nodes or (p.first, p.each, p.layout.devices) != (pool.first, pool.each, pool.devices):
                yield f"`{p.node}` is not on the devices of its pool `{pool.name}`"
            elif p.layout.dp % p.layout.inner or (p.layout.inner > 1 and plan.graph.node(p.node).verb != "generate"):
                yield f"the replicas of `{p.node}` cannot lie next to each other in {p.layout.inner}s"


def docks(plan: Plan) -> Iterator[str]:
    """Every node but the source has one controller, which hears of what the node reads."""
    if sorted(c.node for c in plan.docks.controllers) != sorted(n.name for n in plan.graph.nodes[1:]):
        yield _unfilled("dock")
        return
    stores = plan.docks.warehouses
    hosts, used = plan.cluster.nodes, {*stores, *(c.host for c in plan.docks.controllers)}
    if not stores or not all(0 <= host < hosts for host in used):
        yield "a controller or a warehouse of it is on no host of the cluster, or it has no warehouse"
    if len(set(stores)) < len(stores):
        yield "two of its warehouses are on one host"
    for c in plan.docks.controllers:
        placement = plan.placement(c.node)
        if c.columns != plan.graph.node(c.node).reads:
            yield f"the controller of `{c.node}` does not hear of what the node reads, and nothing else"
        if c.groups != (hosts if placement.pool == FUNCTIONS else placement.layout.dp):
            yield f"the controller of `{c.node}` does not have as many groups as the node"


def reshards(plan: Plan) -> Iterator[str]:
    """Every `=>` is planned, and each tensor is in one bucket."""
    if [(r.src, r.dst) for r in plan.reshards] != [(e.src, e.dst) for e in plan.graph.reshards()]:
        yield _unfilled("reshard")
        return
    for r in plan.reshards:
        if (r.mode == "send") != (plan.placement(r.src).pool != plan.placement(r.dst).pool):
            yield f"the mode of `{r.name}` cannot be {r.mode}, as its pools are"
        if Counter(chain.from_iterable(r.buckets)) != Counter(t.name for t in plan.model(r.src).tensors):
            yield f"the buckets of `{r.name}` do not have every tensor once"


def schedule(plan: Plan) -> Iterator[str]:
    """Each task runs its nodes once, where they are placed; weights are there when a node needs them; and no stream
    waits for ever, when a filter asks for one more round of prompts either."""
    if not _every_node_once(plan, nodes_run(plan.schedule)):
        yield _unfilled("schedule")
        return
    evaluated = {e.task: upstream(plan.graph, e.columns) for e in plan.deploy.evaluations}
    tasks, pools = ("train", *evaluated), (*(p.name for p in plan.pools), FUNCTIONS)
    if Counter((s.pool, s.task) for s in plan.schedule) != Counter((p, t) for t in tasks for p in pools):
        yield "it does not have one stream for each pool and task"
        return
    for task in tasks:
        streams = [s for s in plan.schedule if s.task == task]
        if task != "train" and sorted(nodes_run(streams, task)) != sorted(evaluated[task]):
            yield f"the streams of `{task}` do not run each node once that it needs"
        misfits = [(s.pool, x, why) for s in streams for x, why in _misfits(plan, s)]
        yield from (f"the stream of `{pool}` for `{task}` has {x}, which {why}" for pool, x, why in misfits)
        if not misfits:
            yield from (f"the streams of `{task}` {why}" for why in _Streams(plan, task, streams).faults())


def _misfits(plan: Plan, stream: InstructionStream) -> Iterator[tuple[Instruction, str]]:
    """Instructions that cannot be in a stream, whatever else is."""
    edges = {(r.src, r.dst): {plan.placement(n).pool for n in (r.src, r.dst)} for r in plan.reshards}
    filter = looping(plan.graph)[0] if stream.task == "train" else ""
    begun: set[str] = set()  # nodes that a round may go back to
    again = False
    for x in stream.instructions:
        if x.op == "RESHARD":
            begun.add(x.other)
            if stream.pool not in edges.get((x.node, x.other), ()):
                yield x, "is no resharding edge of its nodes"
        elif x.op == "AGAIN":
            if x.node != filter or x.other not in begun or again:
                yield x, "does not repeat its rounds of prompts"
            again = True
        elif x.other or not x.node or plan.placement(x.node).pool != stream.pool:
            yield x, "is not of its nodes"
        elif x.op == "RUN":
            begun.add(x.node)


class _Streams(Walker):
    """The streams of a task as they are walked, where a filter that refills asks for one more round: what has run, and
    where weights are."""

    def __init__(self, plan: Plan, task: str, streams: Sequence[InstructionStream]) -> None:
        self.plan = plan
        self.streams = streams
        self.repeated = looping(plan.graph)[1] if task == "train" else frozenset[str]()
        self.left = {n: 2 if n in self.repeated else 1 for n in nodes_run(streams, task)}  # times to run
        self.edges = {r.dst: r for r in plan.reshards}
        self.there = set[str]()  # generations whose weights are on the devices
        self.stay = {dst for _, dst in sparse(plan)}  # those where they stay for the next task
        self.away = set[str]()  # workers whose weights have left the devices
        self.returning = set[str]()  # updates whose weights are on their way back
        self.wrong: list[str] = []

    def faults(self) -> list[str]:
        ended = Walk({s.pool: s.instructions for s in self.streams}).finish(self)
        if not self.wrong and not ended:
            self.wrong.append("wait for each other")
        if not self.wrong and (self.there - self.stay or self.away or any(self.left.values())):
            self.wrong.append("leave a node that has not run, or weights where the next task does not expect them")
        return self.wrong

    def _worker(self, node: str) -> str:
        return self.plan.graph.node(node).worker

    def ready(self, pool: str, node: str) -> bool:
        # Within rounds a node waits for this round of what is before it, else for all of them.
        most = self.left[node] if node in self.repeated else 1
        return max([self.left.get(e.src, 0) for e in self.plan.graph.into(node)], default=0) < most

    def run(self, pool: str, node: str) -> None:
        self.left[node] -= 1
        away = self.away and self._worker(node) in self.away and self.plan.graph.node(node).verb != "generate"
        if away or (node in self.edges and node not in self.there):
            self.wrong.append(f"run `{node}` where its weights are not there")

    def reshard(self, pools: Sequence[str], src: str, dst: str) -> None:
        if {self.plan.placement(n).pool for n in (src, dst)} != {*pools}:
            self.wrong.append(f"have `{src} => {dst}` in one of its two pools")
        if dst in self.there - self.stay:
            self.wrong.append(f"reshard into `{dst}` where its weights are there")
        self.there.add(dst)
        if self.edges[dst].mode == "swap":
            # It begins when weights that are on their way back have come, as in a filter's next round.
            self.returning = {n for n in self.returning if self._worker(n) != self._worker(src)}
            self.away.add(self._worker(src))

    def release(self, pool: str, node: str) -> None:
        if node not in self.there:
            self.wrong.append(f"release the weights of `{node}` where they are not there")
        if node in self.stay:
            self.wrong.append(f"release the weights of `{node}`, which the next iteration may generate with")
        self.there.discard(node)

    def swap_in(self, pool: str, node: str) -> None:
        if node in self.returning or self._worker(node) not in self.away:
            self.wrong.append(f"swap in the weights of `{node}` where they are not away")
        self.returning.add(node)

    def wait(self, pool: str, node: str) -> None:
        if node not in self.returning:
            self.wrong.append(f"wait for the weights of `{node}` where they are not on their way")
        self.returning.discard(node)
        self.away.discard(self._worker(node))

    def again(self, pool: str, node: str, rounds: int) -> bool:
        return rounds < 2


def traffic(plan: Plan) -> Iterator[str]:
    """Every sample edge is counted."""
    if [(t.src, t.dst) for t in plan.traffic] != [(e.src, e.dst) for e in plan.graph.samples()]:
        yield _unfilled("traffic")


def memory(plan: Plan) -> Iterator[str]:
    """The devices of every pool are counted, and the hosts."""
    if {(m.place, m.pool) for m in plan.memory} != {*(("device", p.name) for p in plan.pools), ("host", "hosts")}:
        yield _unfilled("memory")


def estimate(plan: Plan) -> Iterator[str]:
    """There is one."""
    if plan.estimate is None:
        yield _unfilled("estimate")
