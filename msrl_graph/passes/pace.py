"""How often an iteration ends: what each piece takes, followed along the streams of all pools, which run side by side
while rows come by the edges.

Invariant: only composition, and never less where a piece takes more. In step an iteration is as long as its critical
path. Where pools may be ahead it is as long as they need in the long run: the pools go round, each as often as the
others, and no circle of what waits for what can be gone round quicker than its seconds over the iterations that it
leads through (a maximum cycle mean; Baccelli et al., Synchronization and Linearity, 1992). The first iterations, which
fill the pipeline, count for nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..cost import between as costs
from ..ir.ahead import awaits, fetched, leads, oldest
from ..ir.instruction import Walk, Walker
from ..ir.plan import FUNCTIONS, Plan

Edge = tuple[str, str]  # of resharding, (src, dst)
Seconds = Mapping[tuple[str, str], float]  # of RUN, RESHARD, SWAP_IN by node, of PUBLISH by resharding edge's end
UPDATES = "the updates"  # all pools that are in step, as one
ROUNDS = 50  # iterations, by how many may be under way, after which the staleness is that of the long run


@dataclass(frozen=True)
class _Arc:
    """What `dst` begins an iteration so many seconds after at the earliest: `src` having begun the one that many
    `iterations` before."""

    src: str
    dst: str
    iterations: int
    seconds: float
    path: str


@dataclass(frozen=True)
class Pace:
    """`seconds` between the ends of two iterations, and `why`. `arcs`: what waits for what, where pools may be
    ahead."""

    seconds: float
    why: str
    arcs: tuple[_Arc, ...] = ()

    def versions(self, plan: Plan) -> tuple[float, int]:
        """How old the weights are in the long run, on average over the edges over which they are fetched, and at
        most."""
        ahead, run = leads(plan), plan.deploy.run
        into = [plan.placement(dst).pool for _, dst in fetched(plan)]
        many = ROUNDS * (1 + max(ahead.values(), default=0))
        begins: dict[str, list[float]] = {name: [] for name in (*ahead, UPDATES)}
        behind: list[int] = []
        for number in range(many):
            for name in (UPDATES, *ahead):
                some = [a for a in self.arcs if a.dst == name and number >= a.iterations]
                after = [begins[a.src][number - a.iterations] + a.seconds for a in some]
                if name != UPDATES:
                    after.append(begins[UPDATES][max(0, number - ahead[name])])
                begins[name].append(max(after, default=0.0))
            for pool in into if number >= many // 2 else ():
                newest = bisect_right(begins[UPDATES], begins[pool][number]) - 1
                version = oldest(run, ahead[pool], number) if run.deterministic else newest
                behind.append(number - version)
        return (sum(behind) / len(behind), max(behind)) if behind else (0.0, 0)


def critical(plan: Plan, seconds: Seconds) -> tuple[float, str]:
    """When the last of an iteration is done where all pools begin it at once, and the chain that leads there."""
    found = _Clock(plan, seconds, {p.name: 0.0 for p in plan.pools})
    return found.length, found.path()


def pace(plan: Plan, seconds: Seconds, around: float) -> Pace:
    """`around` is what begins and ends an iteration, for whoever goes on by itself."""
    if not (ahead := leads(plan)):
        length, path = critical(plan, seconds)
        return Pace(length + around, f"critical path: {path}")
    arcs = _arcs(plan, seconds, around, ahead)
    circle = max(_circles(arcs), key=lambda c: sum(a.seconds for a in c) / sum(a.iterations for a in c))
    whole, iterations = sum(a.seconds for a in circle), sum(a.iterations for a in circle)
    chain = " > ".join(dict.fromkeys(a.path for a in circle))
    why = f"{iterations} iterations at a time: {chain}"
    if len(circle) == iterations == 1:
        why = f"the slowest, {circle[0].src}: {chain}"
    return Pace(whole / iterations, f"in the long run {why}", tuple(arcs))


def _arcs(plan: Plan, seconds: Seconds, around: float, ahead: Mapping[str, int]) -> list[_Arc]:
    """Between the pools that may be ahead, each by itself, and all others, which begin together when all of the
    iteration before has ended."""
    edges = frozenset(fetched(plan))
    in_step = {p.name: 0.0 for p in plan.pools if p.name not in ahead}
    alone = _Clock(plan, seconds, in_step, edges, opened=-math.inf)
    found = [_Arc(UPDATES, UPDATES, 1, alone.length + around, alone.path())]
    waits = awaits(plan, ahead)
    for pool, lead in ahead.items():
        opened = -math.inf if waits[pool] else 0.0  # else by those that it waits for
        # By its own devices, or by the weights that are as old as they may be.
        for src, iterations, copies in ((pool, 1, {}), (UPDATES, lead + 1, alone.copied)):
            own = _Clock(plan, seconds, {pool: 0.0}, edges, copies, opened)
            ends = {p: (own.clock[p] + own.taken, own.path(p)) for p in ahead} | {UPDATES: (own.length, own.path())}
            found += [
                _Arc(src, dst, iterations, end + around, path) for dst, (end, path) in ends.items() if end > -math.inf
            ]
    return found


def _circles(arcs: Sequence[_Arc]) -> Iterator[list[_Arc]]:
    """Every way round that meets nobody twice; each once, from the first in the order of names."""

    def onward(way: list[_Arc]) -> Iterator[list[_Arc]]:
        begin, at = way[0].src, way[-1].dst
        if at == begin:
            yield way
        elif at > begin and at not in {a.src for a in way}:
            for arc in (a for a in arcs if a.src == at):
                yield from onward([*way, arc])

    for arc in arcs:
        yield from onward([arc])


class _Clock(Walker):
    """The time in each pool while an iteration goes by. A function starts when its rows are there; a node on devices
    has its turn in its stream. The ranks of a CPU cluster have all cores, so what functions take is taken from them."""

    def __init__(
        self,
        plan: Plan,
        seconds: Seconds,
        begins: Mapping[str, float],
        fetches: Collection[Edge] = (),
        copies: Mapping[Edge, float] | None = None,
        opened: float = 0.0,
    ) -> None:
        """What follows of `begins`, when pools begin: of others nothing is waited for but their rows. The source has
        its rows when the iteration is `opened`. Weights of the edges `fetches` are copied by the update, and fetched
        when the `copies` are there; at others two pools meet."""
        self.plan, self.seconds, self.fetches, self.copies = plan, seconds, fetches, copies or {}
        self.edges = {(t.src, t.dst): t.seconds.value for t in plan.traffic}
        shared = plan.cluster.device.kind.is_host
        self.functions = {p.node: seconds.get(("RUN", p.node), 0.0) for p in plan.placements if p.pool == FUNCTIONS}
        self.taken = sum(self.functions.values()) if shared else 0.0
        self.functions = dict.fromkeys(self.functions, 0.0) if shared else self.functions
        self.handover = costs.handover(plan).value
        # By node: of the nodes that its rows come from, how many are not done.
        self.waits = {n.name: len(plan.graph.into(n.name)) for n in plan.graph.nodes}
        streams = {s.pool: s.instructions for s in plan.schedule if s.task == "train" and s.pool != FUNCTIONS}
        self.clock = dict.fromkeys(streams, -math.inf) | dict(begins)
        self.before = dict.fromkeys(streams, "")  # by pool: what it ran last
        self.opened = opened
        self.done: dict[str, float] = {}
        self.cause: dict[str, str] = {}
        self.back: dict[str, float] = {}
        self.copied: dict[Edge, float] = {}  # when each copy was there
        for name in [n for n in self.functions if not self.waits[n]]:
            self._start(name)
        Walk(streams).finish(self)
        self.length = max(self.done.values(), default=0.0) + self.taken

    def path(self, pool: str = "") -> str:
        """The chain of nodes that leads to the last one, of a pool or of all."""
        last = self.before[pool] if pool else max(self.done, key=lambda n: (self.done[n], n), default="")
        chain = []
        while last:
            chain.append(last)
            last = self.cause.get(last, "")
        return " > ".join(reversed(chain))

    def _arrival(self, name: str) -> tuple[float, str]:
        done, edges, handover = self.done, self.edges, self.handover
        into = [(done[e.src] + edges.get((e.src, name), 0.0) + handover, e.src) for e in self.plan.graph.into(name)]
        return max(into, default=(self.opened, ""))

    def _start(self, name: str) -> None:
        """A function, and all that start when it is done."""
        ready = [name]
        while ready:
            name = ready.pop()
            self.done[name], self.cause[name] = self._arrival(name)
            self.done[name] += self.functions[name]
            ready += self._follow(name)

    def _follow(self, name: str) -> list[str]:
        """The functions for which a node that is done was the last to wait for."""
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
        self.done[node], self.before[pool] = self.clock[pool], node
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
        """It takes no time."""

    def swap_in(self, pool: str, node: str) -> None:
        self.back[node] = self.clock[pool] + self.seconds.get(("SWAP_IN", node), 0.0)

    def wait(self, pool: str, node: str) -> None:
        self.clock[pool] = max(self.clock[pool], self.back.get(node, 0.0))

    def again(self, pool: str, node: str, rounds: int) -> bool:
        """Nobody knows how many rounds of prompts filters ask for: one is counted, and a note says so."""
        return False
