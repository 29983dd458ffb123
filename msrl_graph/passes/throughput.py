"""How often an iteration ends, from the seconds of its pieces.

The pieces are followed along the streams of all pools, which run in parallel while rows arrive over the edges.

Invariant: this module only composes, and the result never decreases if a piece takes longer. Without staleness an
iteration takes its critical path. Where pools may be ahead it takes the long-run mean: all pools iterate equally often,
and no cycle of dependencies can run faster than its seconds divided by the iterations that it spans (a maximum cycle
mean; Baccelli et al., Synchronization and Linearity, 1992). Where not every version is sent, iterations differ by their
position between two sent versions: each position is a vertex of its own. The first iterations, which fill the pipeline,
do not count, nor do checkpoints and evaluations.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..cost import transfers as costs
from ..ir.async_schedule import Sends, awaits, fetched, leads, opening, pipelined
from ..ir.instruction import Instruction, Walk, Walker
from ..ir.plan import FUNCTIONS, Plan

Edge = tuple[str, str]  # of resharding, (src, dst)
Seconds = Mapping[tuple[str, str], float]  # by instruction and node; PUBLISH by the destination of its edge
UPDATES = "the updates"  # all pools that are in step, as one
ROUNDS = 50  # the staleness of the long run is simulated over this many times the iterations in flight


@dataclass(frozen=True)
class _Arc:
    """A dependency: `dst` begins an iteration at least `seconds` after `src`.

    `src` counts from when it began the iteration that many `iterations` before. The arc belongs to iterations at one
    `place` between two sent versions.
    """

    src: str
    dst: str
    iterations: int
    seconds: float
    path: str
    place: int = 0


@dataclass(frozen=True)
class Throughput:
    """`seconds` between the ends of two iterations, and the reason `why`.

    `arcs` are the dependencies where pools may be ahead; `places` is the number of positions between two sent versions.
    """

    seconds: float
    why: str
    arcs: tuple[_Arc, ...] = ()
    places: int = 1

    def mean_staleness(self, plan: Plan) -> float:
        """Return the age of the weights that generate, in versions.

        It is the long-run mean over their resharding edges.
        """
        sends = Sends(plan)
        run = plan.deploy.run
        turns = pipelined(plan)
        ahead = [p for p in sends.leads if p not in turns]
        many = ROUNDS * self.places * (1 + max(sends.leads.values(), default=0))
        begins: dict[str, list[float]] = {name: [] for name in (*ahead, UPDATES)}
        behind: list[int] = []
        for number in range(many):
            for name in (UPDATES, *ahead):
                some = [a for a in self.arcs if (a.dst, a.place) == (name, number % self.places)]
                after = [begins[a.src][number - a.iterations] + a.seconds for a in some if number >= a.iterations]
                if name != UPDATES:
                    after.append(begins[UPDATES][sends.after(name, number)])
                begins[name].append(max(after, default=0.0))
            for pool, edges in sends.into.items() if number >= many // 2 else ():
                if pool in turns:
                    behind += [sends.leads[pool]] * len(edges)
                    continue
                now = bisect_right(begins[UPDATES], begins[pool][number]) - 1
                now = sends.after(pool, number) if run.deterministic else now
                behind += [number - sends.newest(edge, now) for edge in edges]
        return sum(behind) / len(behind) if behind else 0.0


def critical(plan: Plan, seconds: Seconds) -> tuple[float, str]:
    """Return the length of an iteration and its critical path.

    All pools begin the iteration at once.
    """
    found = _Clock(plan, seconds, _streams(plan), {p.name: 0.0 for p in plan.pools})
    return found.length, found.path()


def pace(plan: Plan, seconds: Seconds, around: float) -> Throughput:
    """Return the throughput of a plan.

    `around` are the seconds that begin and end an iteration of pools that run on their own.
    """
    if not leads(plan):
        length, path = critical(plan, seconds)
        return Throughput(length + around, f"critical path: {path}")
    deploy = replace(plan.deploy, run=replace(plan.deploy.run, save=0), evaluations=())
    sends = Sends(replace(plan, deploy=deploy))
    places = math.lcm(*(sends.sparse.values()))
    arcs = _arcs(plan, seconds, around, sends, places)
    circle = _slowest(arcs, places)
    whole = math.fsum(a.seconds for a in circle)
    iterations = sum(a.iterations for a in circle)
    chain = " > ".join(dict.fromkeys(a.path for a in circle))
    why = f"{iterations} iterations at a time: {chain}"
    if all((a.src, a.iterations) == (a.dst, 1) for a in circle):
        why = f"the slowest, {circle[0].src}: {chain}"
    return Throughput(whole / iterations, f"in the long run {why}", tuple(arcs), places)


def _arcs(plan: Plan, seconds: Seconds, around: float, sends: Sends, places: int) -> list[_Arc]:
    """Return the dependencies between pools.

    Each pool that may be ahead is on its own. All others begin an iteration together, when the one before has ended
    completely.
    """
    edges = frozenset(fetched(plan))
    turns = pipelined(plan)
    parts = _parts(plan)
    ahead = {pool: lead for pool, lead in sends.leads.items() if pool not in turns}
    in_step = {p.name: 0.0 for p in plan.pools if p.name not in ahead}
    found = list[_Arc]()
    back = dict[str, float]()
    for pool in turns:  # a pipelined pool runs the opening of a later iteration, then the rest of this one
        own = _Clock(plan, seconds, parts, {_opening(pool): 0.0}, edges)
        in_step[pool] = own.clock[_opening(pool)]
        back = back | own.back
        ends = own.ends(ahead)
        found += [
            _Arc(UPDATES, dst, 1 + sends.leads[pool], end + around, path, place)
            for dst, (end, path) in ends.items()
            for place in range(places)
        ]
    alone = _Clock(plan, seconds, parts, in_step, edges, opened=-math.inf, back=back)
    once = [_Arc(UPDATES, UPDATES, 1, alone.length + around, alone.path(), place) for place in range(places)]
    found = once + found
    if chain := [
        n for n in _after_opening(plan) if alone.functions[n]
    ]:  # each waits for the ones of the iteration before
        whole = math.fsum(alone.functions[n] for n in chain)
        found += [_Arc(FUNCTIONS, FUNCTIONS, 1, whole, " > ".join(chain), place) for place in range(places)]
    waits = awaits(plan, sends.leads)
    for pool, lead in ahead.items():
        opened = -math.inf if waits[pool] else 0.0  # else opened by the pools that it waits for
        # Limited by its own devices, or by weights of the largest allowed staleness.
        for src, copies in ((pool, {}), (UPDATES, alone.copied)):
            own = _Clock(plan, seconds, parts, {pool: 0.0}, edges, copies, opened)
            ends = own.ends(ahead)
            for place in range(places):
                # An iteration at this position, long after the first.
                number = places * (1 + lead) + place
                iterations = 1 if src == pool else number + 1 - sends.after(pool, number)
                found += [
                    _Arc(src, dst, iterations, end + around, path, (place + 1) % places)
                    for dst, (end, path) in ends.items()
                    if end > -math.inf
                ]
    return found


def _slowest(arcs: Sequence[_Arc], places: int) -> list[_Arc]:
    """Return the cycle with the most seconds per iteration."""
    best = [arcs[0]] * places  # the updates alone
    while True:
        rate = math.fsum(a.seconds for a in best) / sum(a.iterations for a in best)
        if (better := _above(arcs, places, rate)) is None:
            return best
        best = better


def _above(arcs: Sequence[_Arc], places: int, rate: float) -> list[_Arc] | None:
    """Return a cycle with more seconds per iteration than `rate`, or None.

    Longest paths are computed as by Bellman and Ford: only those around such a cycle grow without end.
    """
    rounding = 1e-12 * max(a.seconds for a in arcs)
    ends = {a: ((a.src, (a.place - a.iterations) % places), (a.dst, a.place)) for a in arcs}
    longest = {dst: 0.0 for _, dst in ends.values()}
    last: dict[tuple[str, int], _Arc] = {}  # the last arc of the longest path to a vertex
    at: tuple[str, int] | None = None
    for _ in longest:
        at = None
        for arc, (src, dst) in ends.items():
            length = longest[src] + arc.seconds - rate * arc.iterations
            if length > longest[dst] + rounding:
                longest[dst] = length
                last[dst] = arc
                at = dst
        if at is None:
            return None
    assert at is not None
    for _ in longest:  # go back until the vertex is on the cycle
        at = ends[last[at]][0]
    circle = [last[at]]
    while (before := ends[circle[0]][0]) != at:
        circle.insert(0, last[before])
    return circle


def _streams(plan: Plan) -> dict[str, Sequence[Instruction]]:
    """Return the training instructions of each pool, each in one piece."""
    return {s.pool: s.instructions for s in plan.schedule if s.task == "train" and s.pool != FUNCTIONS}


def _parts(plan: Plan) -> dict[str, Sequence[Instruction]]:
    """Return the same, with the opening of a pipelined pool as a stream of its own."""
    found: dict[str, Sequence[Instruction]] = {}
    for stream in plan.schedule:
        if stream.task == "train" and stream.pool != FUNCTIONS:
            first = opening(plan, stream)
            found |= {_opening(stream.pool): stream.instructions[:first]} if first else {}
            found[stream.pool] = stream.instructions[first:]
    return found


def _after_opening(plan: Plan) -> list[str]:
    """Return the functions that begin after those of the iteration before, in order."""
    stream = next(s for s in plan.schedule if (s.pool, s.task) == (FUNCTIONS, "train"))
    first = opening(plan, stream)
    return [x.node for x in stream.instructions[first:] if x.op == "RUN"] if first else []


def _opening(pool: str) -> str:
    return f"the opening of {pool}"


class _Clock(Walker):
    """The time in each pool during an iteration.

    A function starts when its rows have arrived; a node on devices starts when its turn in its stream comes. The ranks
    of a CPU cluster use all cores, so there the functions' seconds are added to the ranks'.
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
        back: Mapping[str, float] | None = None,
    ) -> None:
        """Run the streams; each starts at its time in `begins`.

        Pools outside `begins` are awaited only for their rows. `back` is when swapped-in weights have returned. The
        source has its rows at `opened`. Weights of the edges `fetches` are copied by the update and fetched when the
        `copies` exist; at other edges the two pools meet.
        """
        self.plan = plan
        self.seconds = seconds
        self.fetches = fetches
        self.copies = copies or {}
        self.edges = {(t.src, t.dst): t.seconds.value for t in plan.traffic}
        shared = plan.cluster.device.kind.is_host
        self.functions = {p.node: seconds.get(("RUN", p.node), 0.0) for p in plan.placements if p.pool == FUNCTIONS}
        self.taken = sum(self.functions.values()) if shared else 0.0
        self.functions = dict.fromkeys(self.functions, 0.0) if shared else self.functions
        self.handover = costs.handover(plan).value
        # By node: how many of the nodes that it reads from are not done.
        self.waits = {n.name: len(plan.graph.into(n.name)) for n in plan.graph.nodes}
        self.clock = dict.fromkeys(streams, -math.inf) | dict(begins)
        self.before = dict.fromkeys(streams, "")  # by pool: the node that it ran last
        self.opened = opened
        self.done: dict[str, float] = {}
        self.cause: dict[str, str] = {}
        self.back: dict[str, float] = {}
        self.swapped = back or {}
        self.copied: dict[Edge, float] = {}  # when each copy was complete
        for name in [n for n in self.functions if not self.waits[n]]:
            self._start(name)
        Walk(streams).finish(self)
        self.length = max(self.done.values(), default=0.0) + self.taken

    def path(self, pool: str = "") -> str:
        """Return the chain of nodes that leads to the last one, of a pool or of all."""
        last = self.before[pool] if pool else max(self.done, key=lambda n: (self.done[n], n), default="")
        chain = []
        while last:
            chain.append(last)
            last = self.cause.get(last, "")
        return " > ".join(reversed(chain))

    def ends(self, pools: Iterable[str]) -> dict[str, tuple[float, str]]:
        """Return when some pools and the updates are done, each with its chain of nodes."""
        found = {pool: (self.clock[pool] + self.taken, self.path(pool)) for pool in pools}
        return found | {UPDATES: (self.length, self.path())}

    def _arrival(self, name: str) -> tuple[float, str]:
        done = self.done
        edges = self.edges
        handover = self.handover
        into = [(done[e.src] + edges.get((e.src, name), 0.0) + handover, e.src) for e in self.plan.graph.into(name)]
        return max(into, default=(self.opened, ""))

    def _start(self, name: str) -> None:
        """Run a function and all functions that start when it is done."""
        ready = [name]
        while ready:
            name = ready.pop()
            self.done[name], self.cause[name] = self._arrival(name)
            self.done[name] += self.functions[name]
            ready += self._follow(name)

    def _follow(self, name: str) -> list[str]:
        """Return the functions that waited only for a node that is now done."""
        after = [e.dst for e in self.plan.graph.out_of(name)]
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
        for name in self._follow(node):
            self._start(name)

    def reshard(self, pools: Sequence[str], src: str, dst: str) -> None:
        if (src, dst) in self.fetches:
            here, there = (self.plan.placement(node).pool for node in (src, dst))
            self.clock[here] += self.seconds.get(("PUBLISH", dst), 0.0)
            self.copied[src, dst] = self.clock[here]
            self.clock[there] = max(self.clock[there], self.copies.get((src, dst), -math.inf))
            self.clock[there] += self.seconds.get(("RESHARD", dst), 0.0)
            return
        slowest = max(sorted(pools), key=lambda p: self.clock[p])
        self.clock.update(dict.fromkeys(pools, self.clock[slowest] + self.seconds.get(("RESHARD", dst), 0.0)))
        self.before.update(dict.fromkeys(pools, self.before[slowest]))

    def release(self, pool: str, node: str) -> None:
        """Do nothing: it takes no time."""

    def swap_in(self, pool: str, node: str) -> None:
        self.back[node] = self.swapped.get(node, self.clock[pool] + self.seconds.get(("SWAP_IN", node), 0.0))

    def wait(self, pool: str, node: str) -> None:
        self.clock[pool] = max(self.clock[pool], self.back.get(node, 0.0))

    def again(self, pool: str, node: str, rounds: int) -> bool:
        """Return False: one round of prompts is counted, and a note says so.

        How many rounds filters ask for is unknown.
        """
        return False
