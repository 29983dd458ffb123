"""The simulation of a plan's iterations: all pools walk their streams, rows go by the docks, devices take the seconds of cost/time.py.

Invariant: the same plan, specs and seed give the same numbers, to the last bit; nothing depends on the order in which pools are looked
at. Iterations follow each other as the driver starts them, all at once after the last has ended; where a resharding edge allows
staleness, each pool goes on by itself: a generation takes the newest version that is there, and waits for the oldest that it may use.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..backends.spec import EngineSpec
from ..cost import holdings
from ..cost import time as costs
from ..cost.time import Costs
from ..ir.plan import FUNCTIONS, Instruction, Plan, Pool, Reshard
from ..ir.sequences import token_columns
from .flow import Done, Flow
from .generation import tail
from .lanes import Lanes, Span
from .result import Iteration, Simulation
from .rollout import Group, Rollout
from .rows import Draws
from .specs import Specs
from .states import Lengths, Ran, State


@dataclass
class Turn:
    """An iteration under way: the streams' instructions that are left, what is done, and the rows' lengths."""

    number: int
    left: dict[str, list[Instruction]]
    lengths: dict[str, list[int]]
    base: float
    ran: dict[str, Ran] = field(default_factory=dict)
    taken: float = 0.0  # seconds of a host that functions' calls took
    versions: list[int] = field(default_factory=list)  # of each prompt's responses, the oldest that wrote some of them

    @property
    def done(self) -> Mapping[str, Done]:
        return {n: r.done for n, r in self.ran.items()}


class Simulator:
    """`engines` are the specs by name."""

    def __init__(self, plan: Plan, engines: Mapping[str, EngineSpec], specs: Specs) -> None:
        self.plan, self.specs, self.draws = plan, specs, Draws(plan, specs)
        self.flow = Flow(plan, self.draws)
        self.spans: list[Span] = []
        self.lanes: dict[str, Lanes] = {}
        for pool in plan.pools:
            devices = [pool.device(r, plan.cluster.devices_per_node) for r in range(pool.devices)]
            slow = [self.draws.slowness(d) for d in devices]
            self.lanes[pool.name] = Lanes.of(pool, devices, slow, {p.node: p.layout for p in plan.placements if p.pool == pool.name})
        hosts = list(range(plan.cluster.nodes))
        self.lanes[FUNCTIONS] = Lanes.of(Pool((), 0, len(hosts), FUNCTIONS), hosts, [1.0] * len(hosts), {})
        self.states: dict[str, State] = {}
        for p in plan.placements:
            if p.pool != FUNCTIONS:
                own = Costs(plan, engines, p.node)
                self.states[p.node] = State(plan, self.flow, own, engines[p.engine.name], self.lanes[p.pool], self.spans.append)
        self.stale = {(e.src, e.dst): n for e in plan.graph.reshards() if (n := e.staleness)}
        self.reshards = {(r.src, r.dst): r for r in plan.reshards}
        self.updated: dict[str, list[float]] = {n.name: [] for n in plan.graph.verb("update")}  # when each version was there
        self.held: dict[str, int] = {}  # by generation: the version of its weights
        self.rollouts = {n.name: self._rollout(n.name) for n in plan.graph.verb("generate") if n.number("partial", 1) > 1}
        self._drawn: dict[tuple[str, int], list[int]] = {}

    def run(self, iterations: int) -> Simulation:
        found: list[Iteration] = []
        lengths: list[dict[str, tuple[int, ...]]] = []
        end = 0.0
        for i in range(iterations):
            turn = self._turn(i, end)
            found.append(self._iteration(turn, end))
            lengths.append({c: tuple(n) for c, n in turn.lengths.items()})
            end = found[-1].end
        return Simulation(self.plan, self.specs, tuple(found), tuple(self.spans), tuple(lengths))

    def _turn(self, i: int, end: float) -> Turn:
        """Starts an iteration. Draws that no later one needs are forgotten."""
        if not self.stale:
            for lanes in self.lanes.values():
                lanes.set(range(len(lanes.clock)), end)
        for lanes in self.lanes.values():
            lanes.before = [""] * len(lanes.before)
        base = end if not self.stale else min(lanes.last for name, lanes in self.lanes.items() if name != FUNCTIONS)
        streams = {s.pool: list(s.instructions) for s in self.plan.schedule if s.task == "train"}
        lengths = {c: self._tokens(c, i) for c in token_columns(self.plan.graph)}
        oldest = min((r.next // r.prompts for r in self.rollouts.values()), default=i)
        self._drawn = {k: v for k, v in self._drawn.items() if k[1] >= min(i, oldest)}
        return Turn(i, streams, lengths, base)

    def _tokens(self, column: str, iteration: int) -> list[int]:
        if (column, iteration) not in self._drawn:
            self._drawn[column, iteration] = self.draws.tokens(column, iteration)
        return self._drawn[column, iteration]

    def _iteration(self, turn: Turn, before: float) -> Iteration:
        while any(self._advance(turn, pool) for pool in self.lanes):
            pass
        assert not any(turn.left.values()), "two pools wait for each other"
        ends = {n: r.done.last for n, r in turn.ran.items()}
        end = max(ends.values())
        if not self.stale:
            end = max(lanes.last for lanes in self.lanes.values()) + costs.around(self.plan).value
            end += turn.taken if self.plan.cluster.device.backend == "cpu" else 0.0
        for name in self.updated:
            self.updated[name].append(ends[name])
        generates = [n.name for n in self.plan.graph.verb("generate")]
        tails = [tail(turn.ran[n].stretches) for n in generates]
        prompt, response = self._count(turn.lengths)
        behind = [turn.number - v for v in turn.versions]
        return Iteration(
            number=turn.number,
            begin=before,
            end=end,
            prompt_tokens=prompt,
            response_tokens=response,
            tail=max(tails, default=0.0),
            staleness=sum(behind) / max(1, len(behind)),
            most_stale=max(behind, default=0),
            path=self._path(turn),
        )

    def _count(self, lengths: Lengths) -> tuple[int, int]:
        """Tokens of prompts (once a response) and of responses, as eq. 5 counts them: those that the first generation reads and writes,
        or off-line the first update reads."""
        graph = self.plan.graph
        node = next(iter((*graph.verb("generate"), *graph.verb("update"))), None)
        if node is None:
            return 0, 0
        rows = holdings.row_count(self.plan, node.name)
        writes = node.writes if node.verb == "generate" else ()
        read, written = (
            sum(sum(lengths[c]) * rows // max(1, len(lengths[c])) for c in some if c in lengths) for some in (node.reads, writes)
        )
        return (read, written) if writes else (0, read)

    def _path(self, turn: Turn) -> tuple[str, ...]:
        """The chain of states that the last one to end waited for."""
        name = max(turn.ran, key=lambda n: (turn.ran[n].done.last, n), default="")
        chain: list[str] = []
        while name and name not in chain:
            chain.append(name)
            name = turn.ran[name].cause if name in turn.ran else ""
        return tuple(reversed(chain))

    # The instructions.

    def _advance(self, turn: Turn, pool: str) -> bool:
        """Takes the next step of a pool's stream, if what it needs is there."""
        left, lanes = turn.left.get(pool, []), self.lanes[pool]
        if not left:
            return False
        step = left[0]
        everyone = range(len(lanes.clock))
        if step.op == "RESHARD":
            return self._reshard(turn, step)
        if step.op == "SWAP_IN":
            edge = [r for r in self.plan.reshards if r.src == step.node][-1]
            seconds = costs.swap_in(edge).value if edge.swap_in.bytes else 0.0
            lanes.back[step.node] = [t + seconds for t in lanes.clock]
        elif step.op == "WAIT":
            for device in everyone:
                lanes.set((device,), max(lanes.clock[device], lanes.back[step.node][device]))
        elif step.op == "RUN":
            sources = [e.src for e in self.plan.graph.samples() if e.dst == step.node]
            if not all(s in turn.ran for s in sources):
                return False
            turn.ran[step.node] = self._function(turn, step.node) if pool == FUNCTIONS else self._state(turn, step.node)
        left.pop(0)
        return True

    def _reshard(self, turn: Turn, step: Instruction) -> bool:
        """All devices of both pools take part, when the last is free. Under staleness the weights come from a copy that the update keeps
        of each version: the generation alone spends the time, and none where it has the version."""
        edge = self.reshards[step.node, step.other]
        ends = {self.plan.placement(n).pool for n in (step.node, step.other)}
        if any(turn.left[p][:1] != [step] for p in ends):
            return False
        for pool in ends:
            turn.left[pool].pop(0)
        if (step.node, step.other) in self.stale:
            self._fetch(turn, edge)
            return True
        begin = max(self.lanes[p].last for p in ends)
        self.held[step.other] = turn.number
        self._spend(ends, begin, begin + costs.reshard(self.plan, edge).value, turn)
        return True

    def _fetch(self, turn: Turn, edge: Reshard) -> None:
        pool = self.plan.placement(edge.dst).pool
        begin, there = self.lanes[pool].last, self.updated[edge.src]
        needed = turn.number - self.stale[edge.src, edge.dst]
        if needed > 0:
            begin = max(begin, there[needed - 1])
        newest = bisect_right(there, begin)
        seconds = costs.reshard(self.plan, edge).value if self.held.get(edge.dst) != newest else 0.0
        self.held[edge.dst] = newest
        self._spend({pool}, begin, begin + seconds, turn)

    def _spend(self, pools: set[str], begin: float, end: float, turn: Turn) -> None:
        for pool in sorted(pools):
            lanes = self.lanes[pool]
            lanes.set(range(len(lanes.clock)), end)
            if end > begin:
                self.spans.append(Span(pool, lanes.devices[0], "reshard", turn.number, begin, end, len(lanes.clock)))

    def _state(self, turn: Turn, name: str) -> Ran:
        state = self.states[name]
        batches = self.flow.batches(state.node, turn.number, turn.done, state.weights(turn.lengths))
        if state.node.verb != "generate":
            return state.compute(batches, turn.number, turn.lengths)
        version = self.held.get(name, turn.number)
        if name not in self.rollouts:
            # Of several generations those count whose weights are sent.
            turn.versions = [version] * self.flow.rows(0) if name in self.held or not turn.versions else turn.versions
            return state.generate(batches, turn.number, turn.lengths)
        ready, by = max((b.ready, b.by) for b in batches)
        ran, groups = state.rollout(ready, by, turn.number, version, self.rollouts[name])
        turn.versions = [g.version for g in groups]
        turn.lengths |= self._taken(groups)
        return ran

    def _rollout(self, node: str) -> Rollout:
        prompts, samples = self.flow.rows(0), holdings.samples(self.plan, node)
        parts = int(self.plan.graph.node(node).number("partial", 1))
        most = math.ceil(holdings.written_tokens(self.plan, node) / parts)
        state = self.states[node]
        columns = [c for c, _ in state.context]

        def prompt(number: int) -> tuple[int, list[int]]:
            iteration, row = divmod(number, prompts)
            context = sum(self._tokens(c, iteration)[row] for c in columns)
            return context, self._tokens(state.written, iteration)[row * samples : (row + 1) * samples]

        return Rollout(prompts, samples, most, prompt)

    def _taken(self, groups: list[Group]) -> dict[str, list[int]]:
        """The lengths of an iteration's rows, when some come from prompts of others."""
        found: dict[str, list[int]] = {}
        for column in token_columns(self.plan.graph):
            rows, each = [], self.plan.graph.fan(self.plan.graph.column(column).level)
            for group in groups:
                iteration, row = divmod(group.prompt, self.flow.rows(0))
                rows += self._tokens(column, iteration)[row * each : (row + 1) * each]
            found[column] = rows
        return found

    def _function(self, turn: Turn, name: str) -> Ran:
        """A function on the hosts, each its share, row after row; the source has its rows at once."""
        node, lanes = self.plan.graph.node(name), self.lanes[FUNCTIONS]
        level = self.plan.graph.row_level(node)
        if node.verb == "source":
            return Ran(Done.at(level, self.flow.rows(level), turn.base), "")
        # What a call takes by itself: on a CPU cluster the ranks', which have all cores (Turn.taken).
        call = costs.function(self.plan, self.plan.cluster.nodes).value
        turn.taken += call * self.flow.rows(level) / self.plan.cluster.nodes
        call *= self.plan.cluster.device.backend != "cpu"
        seconds = [call + s for s in self.draws.seconds(name, turn.number, self.flow.rows(level))]
        times = [0.0] * self.flow.rows(level)
        causes = list(lanes.before)
        for batch in self.flow.batches(node, turn.number, turn.done, None):
            for host, part in enumerate(batch.parts):
                rows = self.flow.rows_of(node, part, level)
                if not rows:
                    continue
                begin = max(lanes.clock[host], batch.ready)
                causes[host] = batch.by if batch.ready > lanes.clock[host] else causes[host]
                end = begin + sum(seconds[r] for r in rows)
                for row in rows:
                    times[row] = end
                if end > begin:
                    self.spans.append(Span(FUNCTIONS, host, name, turn.number, begin, end, 1))
                lanes.set((host,), end, name)
        last = max(times, default=turn.base)
        slowest = max(range(len(causes)), key=lambda h: (lanes.clock[h], -h))
        return Ran(Done(level, times, last), causes[slowest])
