"""The time between the ends of two iterations, from the seconds of instructions.

The instructions of all pools are followed in order. The pools run in parallel, while rows arrive over the sample edges.
Invariant: this module only adds up seconds, and the result never decreases if an instruction takes longer.

Without staleness, an iteration takes the length of its critical path. With staleness, the pools of generations may be
ahead: they may begin an iteration before the updates have finished earlier iterations. The result is then the mean time
of an iteration in a long run. In a long run, all pools complete the same number of iterations. Therefore the mean time
is that of the slowest cycle of dependencies: the seconds of the cycle, divided by the number of iterations that the
cycle spans (a maximum cycle mean; Baccelli et al., Synchronization and Linearity, 1992).

If a resharding edge sends only every n-th version of the weights, iterations differ by their position between two sent
versions. The graph of dependencies then has one vertex for each pool and position. The first iterations, which fill the
pipeline, are not counted. Checkpoints and evaluations are not counted either.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..analysis.async_schedule import (
    Sends,
    awaited_pools,
    count_opening,
    fetched_edges,
    lead_of_pools,
    pipelined_openings,
)
from ..cost import transfers as costs
from ..ir.instruction import Instruction, Walk, Walker
from ..ir.plan import FUNCTIONS, Plan

Edge = tuple[str, str]  # of resharding, (src, dst)
Seconds = Mapping[tuple[str, str], float]  # by instruction and node; PUBLISH by the destination of its edge
UPDATES = "the updates"  # all pools that are in step, as one
ROUNDS = 50  # the staleness of the long run is simulated over this many times the iterations in flight


@dataclass(frozen=True)
class _Arc:
    """A dependency between the iterations of two pools.

    An iteration n of the pool `dst` begins at least `seconds` after the pool `src` began its iteration n -
    `iterations`. The dependency is valid only for iterations of `dst` at the position `place` between two sent versions
    of the weights. `path` is the chain of nodes that takes these seconds.
    """

    src: str
    dst: str
    iterations: int
    seconds: float
    path: str
    place: int = 0


@dataclass(frozen=True)
class Throughput:
    """The seconds between the ends of two iterations, and what limits them.

    `why` explains what limits the seconds. `arcs` are the dependencies between pools, if pools may be ahead of the
    updates. `places` is the number of positions between two sent versions of the weights.
    """

    seconds: float
    why: str
    arcs: tuple[_Arc, ...] = ()
    places: int = 1

    def mean_staleness(self, plan: Plan) -> float:
        """Return by how many versions the weights of generations are behind, on average.

        The mean is over a long run and over the resharding edges of all pools that may be ahead of the updates.
        """
        sends = Sends(plan)
        run = plan.deploy.run
        turns = pipelined_openings(plan)
        leading_pools = [pool_name for pool_name in sends.leads if pool_name not in turns]
        many = ROUNDS * self.places * (1 + max(sends.leads.values(), default=0))
        begins: dict[str, list[float]] = {name: [] for name in (*leading_pools, UPDATES)}
        behind: list[int] = []
        for number in range(many):
            for name in (UPDATES, *leading_pools):
                incoming = [arc for arc in self.arcs if (arc.dst, arc.place) == (name, number % self.places)]
                after = [
                    begins[arc.src][number - arc.iterations] + arc.seconds
                    for arc in incoming
                    if number >= arc.iterations
                ]
                if name != UPDATES:
                    after.append(begins[UPDATES][sends.update_iteration(name, number)])
                begins[name].append(max(after, default=0.0))
            for pool, edges in sends.into.items() if number >= many // 2 else ():
                if pool in turns:
                    behind += [sends.leads[pool]] * len(edges)
                    continue
                now = bisect_right(begins[UPDATES], begins[pool][number]) - 1
                now = sends.update_iteration(pool, number) if run.deterministic else now
                behind += [number - sends.newest(edge, now) for edge in edges]
        return sum(behind) / len(behind) if behind else 0.0


def critical_path(plan: Plan, seconds: Seconds) -> tuple[float, str]:
    """Return the seconds of an iteration, and the nodes on its critical path.

    All pools are assumed to begin the iteration at the same time.
    """
    clock = _Clock(plan, seconds, _streams(plan), {pool.name: 0.0 for pool in plan.pools})
    return clock.length, clock.path()


def estimate_pace(plan: Plan, seconds: Seconds, around: float) -> Throughput:
    """Return the throughput of a plan.

    The keys of `seconds` are (instruction, node). `around` is the number of seconds to begin and to end an iteration.
    """
    if not lead_of_pools(plan):
        length, path = critical_path(plan, seconds)
        return Throughput(length + around, f"critical path: {path}")
    deploy = replace(plan.deploy, run=replace(plan.deploy.run, save=0), evaluations=())
    sends = Sends(replace(plan, deploy=deploy))
    places = math.lcm(*(sends.sparse.values()))
    arcs = _list_arcs(plan, seconds, around, sends, places)
    circle = _find_slowest_cycle(arcs, places)
    total_seconds = math.fsum(arc.seconds for arc in circle)
    iterations = sum(arc.iterations for arc in circle)
    chain = " > ".join(dict.fromkeys(arc.path for arc in circle))
    why = f"{iterations} iterations at a time: {chain}"
    if all((arc.src, arc.iterations) == (arc.dst, 1) for arc in circle):
        why = f"the slowest, {circle[0].src}: {chain}"
    return Throughput(total_seconds / iterations, f"in the long run {why}", tuple(arcs), places)


def _list_arcs(plan: Plan, seconds: Seconds, around: float, sends: Sends, places: int) -> list[_Arc]:
    """Return the dependencies between the iterations of pools.

    A pool that may be ahead of the updates begins its iterations independently. All other pools begin an iteration
    together, when the previous iteration has ended completely.
    """
    edges = frozenset(fetched_edges(plan))
    turns = pipelined_openings(plan)
    parts = _parts(plan)
    leading = {pool: lead for pool, lead in sends.leads.items() if pool not in turns}
    in_step = {member.name: 0.0 for member in plan.pools if member.name not in leading}
    arcs = list[_Arc]()
    returns = dict[str, float]()
    for pool in turns:  # a pipelined pool runs the opening of a later iteration, then the rest of this one
        own = _Clock(plan, seconds, parts, {_opening_name(pool): 0.0}, edges)
        in_step[pool] = own.clock[_opening_name(pool)]
        returns = returns | own.back
        ends = own.ends(leading)
        arcs += [
            _Arc(UPDATES, dst, 1 + sends.leads[pool], end + around, path, place)
            for dst, (end, path) in ends.items()
            for place in range(places)
        ]
    alone = _Clock(plan, seconds, parts, in_step, edges, opened=-math.inf, returns=returns)
    once = [_Arc(UPDATES, UPDATES, 1, alone.length + around, alone.path(), place) for place in range(places)]
    arcs = once + arcs
    # Each function after the opening waits for those of the iteration before.
    if chain := [name for name in _functions_after_opening(plan) if alone.functions[name]]:
        total_seconds = math.fsum(alone.functions[name] for name in chain)
        arcs += [_Arc(FUNCTIONS, FUNCTIONS, 1, total_seconds, " > ".join(chain), place) for place in range(places)]
    waits = awaited_pools(plan, sends.leads)
    for pool, lead in leading.items():
        opened = -math.inf if waits[pool] else 0.0  # else opened by the pools that it waits for
        # Limited by its own devices, or by weights of the largest allowed staleness.
        for src, copies in ((pool, {}), (UPDATES, alone.copied)):
            own = _Clock(plan, seconds, parts, {pool: 0.0}, edges, copies, opened)
            ends = own.ends(leading)
            for place in range(places):
                # An iteration at this position, long after the first.
                number = places * (1 + lead) + place
                iterations = 1 if src == pool else number + 1 - sends.update_iteration(pool, number)
                arcs += [
                    _Arc(src, dst, iterations, end + around, path, (place + 1) % places)
                    for dst, (end, path) in ends.items()
                    if end > -math.inf
                ]
    return arcs


def _find_slowest_cycle(arcs: Sequence[_Arc], places: int) -> list[_Arc]:
    """Return the cycle of dependencies with the most seconds per iteration."""
    best = [arcs[0]] * places  # the updates alone
    while True:
        rate = math.fsum(arc.seconds for arc in best) / sum(arc.iterations for arc in best)
        if (better := _find_slower_cycle(arcs, places, rate)) is None:
            return best
        best = better


def _find_slower_cycle(arcs: Sequence[_Arc], places: int, rate: float) -> list[_Arc] | None:
    """Return a cycle of dependencies with more than `rate` seconds per iteration.

    The result is None if there is no such cycle. Longest paths are computed as in the Bellman-Ford algorithm, with
    `rate` subtracted for each iteration. Only paths around a slower cycle become longer without limit.
    """
    rounding = 1e-12 * max(arc.seconds for arc in arcs)
    ends = {arc: ((arc.src, (arc.place - arc.iterations) % places), (arc.dst, arc.place)) for arc in arcs}
    longest = {dst: 0.0 for _, dst in ends.values()}
    last: dict[tuple[str, int], _Arc] = {}  # the last arc of the longest path to a vertex
    vertex: tuple[str, int] | None = None
    for _ in longest:
        vertex = None
        for arc, (src, dst) in ends.items():
            length = longest[src] + arc.seconds - rate * arc.iterations
            if length > longest[dst] + rounding:
                longest[dst] = length
                last[dst] = arc
                vertex = dst
        if vertex is None:
            return None
    assert vertex is not None
    for _ in longest:  # go back until the vertex is on the cycle
        vertex = ends[last[vertex]][0]
    circle = [last[vertex]]
    while (before := ends[circle[0]][0]) != vertex:
        circle.insert(0, last[before])
    return circle


def _streams(plan: Plan) -> dict[str, Sequence[Instruction]]:
    """Return the instructions of each pool's training stream.

    In contrast to `_parts`, this function does not split any stream.
    """
    return {
        stream.pool: stream.instructions
        for stream in plan.schedule
        if stream.task == "train" and stream.pool != FUNCTIONS
    }


def _parts(plan: Plan) -> dict[str, Sequence[Instruction]]:
    """Return the training streams; the stream of a pipelined pool is split in two.

    A pipelined pool runs the first part of its stream (the opening) for a later iteration, before it runs the rest of
    its stream for the current iteration. In the result, the opening is a stream of its own.
    """
    parts: dict[str, Sequence[Instruction]] = {}
    for stream in plan.schedule:
        if stream.task == "train" and stream.pool != FUNCTIONS:
            first = count_opening(plan, stream)
            parts |= {_opening_name(stream.pool): stream.instructions[:first]} if first else {}
            parts[stream.pool] = stream.instructions[first:]
    return parts


def _functions_after_opening(plan: Plan) -> list[str]:
    """Return the functions that a pipelined plan runs after its opening, in order.

    The opening is the first part of each pool's list of instructions. It runs early, while the previous iteration is
    not done. Each of the returned functions waits until the same function of the previous iteration is done.
    """
    stream = next(candidate for candidate in plan.schedule if (candidate.pool, candidate.task) == (FUNCTIONS, "train"))
    first = count_opening(plan, stream)
    return [instruction.node for instruction in stream.instructions[first:] if instruction.op == "RUN"] if first else []


def _opening_name(pool: str) -> str:
    return f"the opening of {pool}"


class _Clock(Walker):
    """A calculation of when each node of one iteration starts and ends.

    A function starts when its rows have arrived. A node on devices must also wait until earlier instructions of its
    stream are done. On a CPU cluster, ranks use all cores, so the functions' seconds are added to the seconds of the
    ranks.
    """

    def __init__(
        self,
        plan: Plan,
        seconds: Seconds,
        streams: Mapping[str, Sequence[Instruction]],
        begins: Mapping[str, float],
        fetches: Collection[Edge] = (),
        copies: Mapping[Edge, float] | None = None,
        opened: float = 0.0,
        returns: Mapping[str, float] | None = None,
    ) -> None:
        """Calculate all times; `begins` has the times at which streams start.

        - Streams that are not in `begins` start as soon as their first rows arrive.
        - `fetches` are the resharding edges over which the update makes a copy of its weights and the generation
          fetches the copy later. `copies` are the times at which these copies exist. At other resharding edges, the two
          pools wait for each other.
        - `opened` is the time at which the prompts of the iteration are available.
        - `returns` are the times at which swapped-out weights are back on the device.
        """
        self.plan = plan
        self.seconds = seconds
        self.fetches = fetches
        self.copies = copies or {}
        self.edges = {(traffic.src, traffic.dst): traffic.seconds.value for traffic in plan.traffic}
        shared = plan.cluster.device.kind.is_host
        self.functions = {
            placement.node: seconds.get(("RUN", placement.node), 0.0)
            for placement in plan.placements
            if placement.pool == FUNCTIONS
        }
        self.taken = sum(self.functions.values()) if shared else 0.0
        self.functions = dict.fromkeys(self.functions, 0.0) if shared else self.functions
        self.handover = costs.handover(plan).value
        # By node: how many of the nodes that it reads from are not done.
        self.waits = {node.name: len(plan.graph.into(node.name)) for node in plan.graph.nodes}
        self.clock = dict.fromkeys(streams, -math.inf) | dict(begins)
        self.before = dict.fromkeys(streams, "")  # by pool: the node that it ran last
        self.opened = opened
        self.done: dict[str, float] = {}
        self.cause: dict[str, str] = {}
        self.back: dict[str, float] = {}
        self.swapped = returns or {}
        self.copied: dict[Edge, float] = {}  # when each copy was complete
        for name in [name for name in self.functions if not self.waits[name]]:
            self._start(name)
        Walk(streams).finish(self)
        self.length = max(self.done.values(), default=0.0) + self.taken

    def path(self, pool: str = "") -> str:
        """Return the nodes that delay the last node of a pool ("": the last of all nodes)."""
        last = self.before[pool] if pool else max(self.done, key=lambda node: (self.done[node], node), default="")
        chain = []
        while last:
            chain.append(last)
            last = self.cause.get(last, "")
        return " > ".join(reversed(chain))

    def ends(self, pools: Iterable[str]) -> dict[str, tuple[float, str]]:
        """Return when each pool in `pools` ends, and when the updates end.

        Each time comes with a text that lists the nodes that delay the end.
        """
        ends_of = {pool: (self.clock[pool] + self.taken, self.path(pool)) for pool in pools}
        return ends_of | {UPDATES: (self.length, self.path())}

    def _arrival(self, name: str) -> tuple[float, str]:
        done = self.done
        edges = self.edges
        handover = self.handover
        into = [
            (done[edge.src] + edges.get((edge.src, name), 0.0) + handover, edge.src)
            for edge in self.plan.graph.into(name)
        ]
        return max(into, default=(self.opened, ""))

    def _start(self, name: str) -> None:
        """Calculate when a function ends.

        The ends of the functions that waited only for this function are also calculated.
        """
        ready = [name]
        while ready:
            name = ready.pop()
            self.done[name], self.cause[name] = self._arrival(name)
            self.done[name] += self.functions[name]
            ready += self._finish_node(name)

    def _finish_node(self, name: str) -> list[str]:
        """Record that a node is done; return the functions that waited only for this node."""
        after = [edge.dst for edge in self.plan.graph.out_of(name)]
        for other in after:
            self.waits[other] -= 1
        return [other for other in after if not self.waits[other] and other in self.functions]

    def ready(self, pool: str, node: str) -> bool:
        return not self.waits[node]

    def run(self, pool: str, node: str) -> None:
        arrived, by = self._arrival(node)
        self.cause[node] = by if arrived > self.clock[pool] else self.before[pool]
        self.clock[pool] = max(self.clock[pool], arrived) + self.seconds.get(("RUN", node), 0.0)
        self.done[node] = self.clock[pool]
        self.before[pool] = node
        for name in self._finish_node(node):
            self._start(name)

    def reshard(self, pools: Sequence[str], src: str, dst: str) -> None:
        if (src, dst) in self.fetches:
            source, target = (self.plan.placement(node).pool for node in (src, dst))
            self.clock[source] += self.seconds.get(("PUBLISH", dst), 0.0)
            self.copied[src, dst] = self.clock[source]
            self.clock[target] = max(self.clock[target], self.copies.get((src, dst), -math.inf))
            self.clock[target] += self.seconds.get(("RESHARD", dst), 0.0)
            return
        slowest = max(sorted(pools), key=lambda pool: self.clock[pool])
        self.clock.update(dict.fromkeys(pools, self.clock[slowest] + self.seconds.get(("RESHARD", dst), 0.0)))
        self.before.update(dict.fromkeys(pools, self.before[slowest]))

    def release(self, pool: str, node: str) -> None:
        """Do nothing, because releasing weights takes no time."""

    def swap_in(self, pool: str, node: str) -> None:
        self.back[node] = self.swapped.get(node, self.clock[pool] + self.seconds.get(("SWAP_IN", node), 0.0))

    def wait(self, pool: str, node: str) -> None:
        self.clock[pool] = max(self.clock[pool], self.back.get(node, 0.0))

    def again(self, pool: str, node: str, rounds: int) -> bool:
        """Return False, so that only one round of prompts is counted.

        The number of rounds that filters ask for is unknown. A note says that further rounds are not counted.
        """
        return False
