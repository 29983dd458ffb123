"""Which pools may be ahead of the updates, when they begin an iteration, and with which weights: what `staleness` and
`every` allow.

Invariant: iteration j generates with weights of iteration j - staleness at the oldest, so that no pool begins an
iteration more than so many before its update does. A pool that is ahead waits within an iteration for none that is in
step, nor for one that has not begun it: what comes between two iterations, as an evaluation does, may wait for it. A
run and its simulation both go by `Leading`, and the estimate by the `Sends` that it is.

A pool with both ends of an edge is ahead of itself, a `pipelined` one: it generates for the next iteration, and then
computes the rest of this one, whose rows have come meanwhile. What it begins early is its `opening`.

A state has one value in each iteration: a function that reads it waits for what the iteration before left. So what the
functions begin early ends before the first that reads one, and no generation that needs such a function is ahead.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import wraps
from itertools import chain, combinations, count, takewhile
from typing import TypeVar

from .attributes import GenerateAttributes, ReshardingEdgeAttributes
from .evaluation import Evaluation
from .instruction import Instruction, InstructionStream
from .plan import FUNCTIONS, Plan
from .rowsets import looping
from .sequences import heating, latest

Edge = tuple[str, str]  # of resharding, (src, dst)
T = TypeVar("T")


def _once(found: Callable[[Plan], T]) -> Callable[[Plan], T]:
    """Works it out once for all plans of a graph that have its nodes in the same pools: a planner asks of thousands.
    What comes of it is read only."""

    @wraps(found)
    def once(plan: Plan) -> T:
        placed = ((p.node, p.pool) for p in plan.placements)
        key = (found.__name__, plan.deploy.run.deterministic, *placed, *(p.name for p in plan.pools))
        known = plan.graph.worked_out
        made: T = known[key] if key in known else known.setdefault(key, found(plan))
        return made

    return once


@_once
def leads(plan: Plan) -> dict[str, int]:
    """By pool, how many iterations it may begin before the updates do; only pools that may. One that is pipelined
    begins no more than the next, unless rows are to be as old as they may be: nobody waits for its weights."""
    behind = _staleness(plan)
    if not any(behind.values()):
        return {}
    pool_of = _pools(plan)
    held = hindered(plan)
    turns = _openings(plan)[0]
    found = dict[str, int]()
    for pool in (p.name for p in plan.pools if p.name not in held):
        into = [n for (_, dst), n in behind.items() if n and pool_of[dst] == pool]
        found[pool] = min(into, default=max(behind.values()))
        if pool in turns and not plan.deploy.run.deterministic:
            found[pool] = 1
    return found


def aged(plan: Plan) -> dict[Edge, int]:
    """The resharding edges, as (src, dst), into pools that may be ahead, and how many versions their weights may be
    behind; where others state `staleness`, these are the newest all the same."""
    if not (ahead := leads(plan)):
        return {}
    pool_of = _pools(plan)
    turns = _openings(plan)[0]
    found = dict[Edge, int]()
    for edge, behind in _staleness(plan).items():
        if behind and (pool := pool_of[edge[1]]) in ahead:
            found[edge] = ahead[pool] if pool in turns else behind
    return found


def row_age_bound(plan: Plan) -> int:
    """Return the largest age that a row can have when it is learnt from, in versions.

    The age of a token is the number of versions that the trainer's weights are newer than the weights that drew it. The
    age of a row is that of its oldest token. A row that is cut `cuts` times (`partial`) is that much older.
    """
    lags = aged(plan)
    return max(
        (
            max((n for (_, dst), n in lags.items() if dst == node.name), default=0)
            + (GenerateAttributes.of(node).cuts if node.cuts else 0)
            for node in plan.graph.verb("generate")
        ),
        default=0,
    )


def fetched(plan: Plan) -> dict[Edge, int]:
    """Of these edges those over which weights are fetched, from another pool."""
    pool_of = _pools(plan)
    return {(src, dst): n for (src, dst), n in aged(plan).items() if pool_of[src] != pool_of[dst]}


def pipelined(plan: Plan) -> dict[str, frozenset[str]]:
    """By pool that generates ahead of its own updates, the nodes of its opening."""
    found, _ = _openings(plan)
    held = hindered(plan) if found else {}
    return {pool: nodes for pool, nodes in found.items() if pool not in held}


def waiting(plan: Plan) -> dict[str, str]:
    """By function that reads a state the first that it reads."""
    graph = plan.graph
    readers = (n for n in graph.nodes if latest(graph, n))
    return {n.name: n.states[0] for n in readers if graph.worker(n.worker).kind == "function"}


def late_states(plan: Plan) -> dict[str, int]:
    """By state that rows are drawn by, as weights of the source or as temperatures, how many iterations old its value
    may be: as early as a pool may begin one."""
    most = max(leads(plan).values(), default=0)
    graph = plan.graph
    read = (s for n in graph.nodes for s in (n.states if n.verb == "source" else heating(graph, n)))
    return dict.fromkeys(read, most) if most else {}


def opening(plan: Plan, stream: InstructionStream) -> int:
    """How many instructions of a stream in training are its opening; 0 if it has none. Of the functions', where
    an iteration may be begun early: all before the first that reads a state."""
    if stream.pool == FUNCTIONS and stream.task == "train":
        late = waiting(plan) if leads(plan) else {}
        return next((i for i, x in enumerate(stream.instructions) if x.op == "RUN" and x.node in late), 0)
    nodes = pipelined(plan).get(stream.pool, frozenset()) if stream.task == "train" else frozenset()
    ran = [i for i, x in enumerate(stream.instructions) if x.op == "RUN" and x.node in nodes]
    rest = stream.instructions[ran[-1] + 1 :] if ran else ()
    return (1 + ran[-1] + len([*takewhile(lambda x: x.op in ("RELEASE", "SWAP_IN"), rest)])) if ran else 0


def sparse(plan: Plan) -> dict[Edge, int]:
    """Of the edges over which weights are fetched those that send every so many-th version. What was fetched over one
    stays on the devices until it is fetched again: an iteration may generate with what the one before had."""
    many = {(e.src, e.dst): ReshardingEdgeAttributes.of(e).every for e in plan.graph.reshards()}
    return {edge: many[edge] for edge in fetched(plan) if many[edge] > 1}


def lanes(plan: Plan) -> int:
    """How many iterations may be under way at once."""
    return 1 + max(leads(plan).values(), default=0)


class Sends:
    """Which versions of the weights are sent over the edges over which they are fetched, in a run that begins with
    `first`, and what an iteration waits for so that its weights are not too old.

    A version is sent if `every` says so; and the first of the run, one that a checkpoint is made of, so that a run that
    goes on from it draws the same, and one that an evaluation takes, since the copy of the one before is gone then."""

    def __init__(self, plan: Plan, first: int = 0) -> None:
        self.run = plan.deploy.run
        self.first = first
        self.leads = leads(plan)
        self.behind = aged(plan)
        self.sparse = sparse(plan)
        self.saves = plan.deploy.saves
        # By edge, of which numbers the versions that are sent are multiples.
        self.multiples: dict[Edge, tuple[int, ...]] = dict.fromkeys(self.behind, (1,))
        for edge, many in self.sparse.items():
            between = (*self.saves, *(e.every for e in evaluations(plan, edge)))
            self.multiples[edge] = (many, *filter(None, between))
        pool_of = _pools(plan)
        self.into = {pool: [edge for edge in self.behind if pool_of[edge[1]] == pool] for pool in self.leads}

    def sends(self, edge: Edge, version: int) -> bool:
        """Whether a version with which the updates begin an iteration is sent."""
        return version == self.first or any(version % many == 0 for many in self.multiples[edge])

    def newest(self, edge: Edge, now: int) -> int:
        """The version that a generation takes while the updates are in the iteration `now`: the newest of those that
        are sent with which they have begun one."""
        return next(v for v in count(now, -1) if self.sends(edge, v))

    def after(self, pool: str, number: int) -> int:
        """The iteration that the updates have begun when a pool may begin one: the first with a version that is sent,
        and not too old for any of its generations. With `deterministic` none from before the last checkpoint that a run
        which is in this iteration would be gone on from."""
        saved = max((number - number % every for every in self.saves), default=0) if self.run.deterministic else 0
        least = max(number - self.leads[pool], saved, self.first)
        of_edges = ((edge, max(number - self.behind[edge], saved, self.first)) for edge in self.into[pool])
        return max((next(v for v in count(old) if self.sends(edge, v)) for edge, old in of_edges), default=least)

    def share(self, edge: Edge) -> float:
        """Which share of the versions is sent in the long run: multiples of any of some numbers, by inclusion and
        exclusion."""
        many = self.multiples[edge]
        some = chain.from_iterable(combinations(many, size) for size in range(1, len(many) + 1))
        return sum((1 if len(of) % 2 else -1) / math.lcm(*of) for of in some)


class PoolProgress(Sends, ABC):
    """How far the pools are that may be ahead: the iteration that each has `begun` last.

    A pool begins iteration j when it has ended j - 1 and the updates have begun one with weights that are new enough;
    its generations take the newest that are sent. With `deterministic` it begins with the oldest that they may be."""

    def __init__(self, plan: Plan, first: int = 0) -> None:
        super().__init__(plan, first)
        self.begun = dict.fromkeys(self.leads, first - 1)
        self.awaits = awaits(plan, self.leads)
        self.taken: dict[Edge, int] = {}  # the version that a generation was told to take last

    @abstractmethod
    def busy(self, pool: str) -> bool:
        """Whether a pool has yet to end something that it has begun."""

    def due(
        self, now: int, iterations: int, foreseen: Callable[[int], bool], pools: Collection[str]
    ) -> Iterator[tuple[str, int]]:
        """Which of some pools may begin an iteration, and which, while the updates are in the iteration `now`: of those
        that can be `foreseen`. Each is to be begun before the next is asked for."""
        more = True
        while more:
            more = False
            for pool in pools:
                number = self.begun[pool] + 1
                if number < iterations and foreseen(number) and self._may(pool, number, now):
                    more = True
                    yield pool, number

    def late(self, now: int, pools: Collection[str]) -> bool:
        """Whether one of some pools has yet to begin an iteration that is to have the weights with which the updates
        began the iteration `now`.

        With `deterministic` the updates wait for such a pool: begun later, the iteration would have newer weights. With
        `partial` a pool cannot begin an iteration before it has ended the one before.
        """
        following = {pool: self.begun[pool] + 1 for pool in pools}
        return self.run.deterministic and any(
            number < self.run.iterations and self._may(pool, number, now) for pool, number in following.items()
        )

    def _may(self, pool: str, number: int, now: int) -> bool:
        """Whether a pool may begin an iteration, and so may those that it waits for, if they have not."""
        return all(
            self.begun[other] >= number or (self.begun[other] == number - 1 and self._free(other, number, now))
            for other in (pool, *self.awaits[pool])
        )

    def _free(self, pool: str, number: int, now: int) -> bool:
        # With `deterministic` as soon as its weights are there, which may be before it has ended the one before.
        return now >= self.after(pool, number) and (self.run.deterministic or not self.busy(pool) or number <= now)

    def takes(self, edge: Edge, version: int) -> bool:
        """Has a generation take a version; whether it is to fetch it, or has it."""
        stays = edge in self.sparse and self.taken.get(edge) == version
        self.taken[edge] = version
        return not stays


def evaluations(plan: Plan, edge: Edge) -> list[Evaluation]:
    """The evaluations that take the weights of an edge."""
    takes = {s.task for s in plan.schedule if Instruction("RESHARD", *edge) in s.instructions}
    return [e for e in plan.deploy.evaluations if e.task in takes]


def awaits(plan: Plan, ahead: Mapping[str, int]) -> dict[str, set[str]]:
    """By pool that may be ahead the others of these whose rows it waits for within an iteration."""
    pool_of = _pools(plan)
    turns = _openings(plan)[0]
    found: dict[str, set[str]] = {pool: set() for pool in ahead}
    for node, pool in pool_of.items():
        if pool in found and node in turns.get(pool, (node,)):
            found[pool] |= {pool_of[n] for n in plan.graph.flow.before(node) if n in pool_of} & found.keys()
    for through in ahead:  # and those that these wait for
        for some in found.values():
            some |= found[through] if through in some else set()
    return {pool: some - {pool} for pool, some in found.items()}


@_once
def hindered(plan: Plan) -> dict[str, str]:
    """By pool that has to be in step with the updates, why, as the end of a sentence that begins with the pool."""
    found = dict[str, str]()
    pool_of = _pools(plan)
    turns, _ = _openings(plan)
    for (_, dst), behind in _staleness(plan).items():
        if pool_of[dst] in turns:
            continue
        if not behind:
            found[pool_of[dst]] = f"gives `{dst}` the newest weights"
        elif because := by_state(plan, [dst]):
            found.setdefault(pool_of[dst], f"runs `{dst}`, which {because}")
    for node in plan.graph.verb("update"):
        if node.name in pool_of and pool_of[node.name] not in turns:
            found[pool_of[node.name]] = f"runs `{node.name}`"
    filter, rounds = looping(plan.graph)
    if filter and plan.deploy.run.deterministic:
        why = (
            f"begins when it is known how often `{filter}` asks, and `deterministic` lets nothing hang on when that is"
        )
        found = dict.fromkeys(pool_of.values(), why) | found
    known = -1
    while len(found) > known:
        known = len(found)
        rest = {n for n, pool in pool_of.items() if pool in turns and n not in turns[pool]}
        for node_name in [n for n, pool in pool_of.items() if pool in found or n in rest]:
            after = plan.graph.flow.after(node_name)
            late = dict.fromkeys(after, "which")
            if filter in after:  # who makes rounds of prompts waits for it: it may ask for another one
                late |= dict.fromkeys(rounds - after, f"as often as `{filter}` asks, which")
            for other in (n for n in pool_of if n in late and n not in rest):
                why = f"runs `{other}`, {late[other]} waits for rows of `{node_name}`, and that is in step"
                found.setdefault(pool_of[other], why)
    return found


def in_turns(plan: Plan) -> dict[str, str]:
    """By pool with both ends of an edge with `staleness` that is not pipelined, why, as a sentence."""
    turns, found = _openings(plan)
    return found | {pool: f"its pool {why}" for pool, why in hindered(plan).items() if pool in turns}


@_once
def _openings(plan: Plan) -> tuple[dict[str, frozenset[str]], dict[str, str]]:
    """By pool with both ends of an edge with `staleness` the nodes of its opening; for those that cannot have one, why.

    These are the generations, what they need, and frozen nodes that need no function's rows but these, unless their
    weights follow the update's. So nothing in it waits, and functions get their rows as early as can be."""
    graph = plan.graph
    pool_of = _pools(plan)
    behind = _staleness(plan)
    found = dict[str, frozenset[str]]()
    why = dict[str, str]()
    shared = [(src, dst) for (src, dst), n in behind.items() if n and pool_of[src] == pool_of[dst]]
    updated = {*graph.weighty} if shared else set()
    for pool in dict.fromkeys(pool_of[dst] for _, dst in shared):
        of = [(src, dst) for src, dst in shared if pool_of[dst] == pool]
        needed = {dst for _, dst in of}.union(*(graph.flow.before(dst) for _, dst in of))
        if because := _waits(plan, of, needed, pool):
            why[pool] = because
            continue
        needed |= {n.name for n in graph.verb("source")}
        for node in graph.nodes:
            if pool_of.get(node.name) == pool and node.worker not in updated and graph.flow.before(node.name) <= needed:
                needed.add(node.name)
        found[pool] = frozenset(n for n in needed if n in pool_of)
    return found, why


def _waits(plan: Plan, edges: Sequence[Edge], needed: Collection[str], pool: str) -> str:
    """Why a pool cannot begin its generations early, which need some nodes; "" if it can."""
    graph = plan.graph
    pool_of = _pools(plan)
    behind = _staleness(plan)
    filter, rounds = looping(graph)
    seldom = {(e.src, e.dst) for e in graph.reshards() if ReshardingEdgeAttributes.of(e).every > 1}
    for src, dst in edges:
        if (src, dst) in seldom:
            return "weights that these two swap are new each time"
        if dst in rounds:
            return f"`{filter}` asks for more of its rows before it goes on"
        if graph.node(dst).cuts:
            return f"what `{dst}` cuts is known when it has ended"
    for node in (n for n in needed if n in pool_of):
        if pool_of[node] != pool:
            return f"it waits for rows of `{node}`, which has other devices"
        if graph.node(node).verb == "update" or graph.worker(graph.node(node).worker).follows:
            return f"it waits for rows of `{node}`"
    if because := by_state(plan, [dst for _, dst in edges]):
        return f"it {because}"
    for (src, dst), old in behind.items():
        if dst in needed and not old:
            return f"`{dst}` takes the newest weights"
        if old and pool_of[dst] == pool != pool_of[src]:
            return f"`{dst}` has its weights from other devices"
    return ""


def by_state(plan: Plan, generations: Sequence[str]) -> str:
    """The function that reads a state and that one of some generations waits for, as the end of a sentence that begins
    with the generation; "" if there is none."""
    late = waiting(plan)
    before = {n for dst in generations for n in plan.graph.flow.before(dst)}
    node = next((n for n in late if n in before), "")
    return f"waits for `{node}`, which reads the state `{late[node]}` of the iteration before" if node else ""


def _pools(plan: Plan) -> dict[str, str]:
    """By node on devices its pool, as far as nodes are placed: the planner places some at a time."""
    return {p.node: p.pool for p in plan.placements if p.pool != FUNCTIONS}


def _staleness(plan: Plan) -> dict[Edge, int]:
    pool_of = _pools(plan)
    edges = [e for e in plan.graph.reshards() if e.src in pool_of and e.dst in pool_of]
    return {(e.src, e.dst): ReshardingEdgeAttributes.of(e).staleness for e in edges}
