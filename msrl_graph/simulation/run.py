"""The simulation of a plan's iterations.

All pools run their streams, rows pass the docks, and devices take the seconds of cost/time.py. Invariant: the same
plan, specs and seed give the same numbers, to the last bit; nothing depends on the order in which pools are visited.
driver.py defines the order of iterations.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..backends.spec import EngineSpec
from ..cost import holdings
from ..cost import transfers as costs
from ..cost.time import Costs
from ..ir.attributes import GenerateAttributes
from ..ir.concurrency import concurrent_calls, read_signature
from ..ir.instruction import Walker
from ..ir.plan import FUNCTIONS, Plan
from ..ir.sequences import token_columns
from .assumptions import Specs
from .driver import SimulatedDriver
from .flow import Lengths, RowTimes, SimulatedDocks
from .generation import tail
from .iteration import Turn
from .lanes import Lanes, LaneSpan
from .nodes import ModelNode, NodeTiming
from .result import RESHARD, Iteration, Simulation
from .rollout import Group, SimulatedRollout
from .rows import RowSampler


@dataclass
class _Steps(Walker):
    """The instructions of an iteration."""

    simulator: Simulator
    turn: Turn

    def ready(self, pool: str, node: str) -> bool:
        return all(e.src in self.turn.ran for e in self.simulator.plan.graph.into(node))

    def run(self, pool: str, node: str) -> None:
        run = self.simulator._function if pool == FUNCTIONS else self.simulator._of_model
        self.turn.ran[node] = run(self.turn, node)

    def given(self, pool: str, src: str, dst: str) -> bool:
        """Return whether a transfer of weights can begin.

        A copy can be replaced by the next once every generation that was told to fetch it has it.
        """
        turn = self.turn
        found = self.simulator.driver.published.get((src, dst))
        edge = (src, dst)
        if found is None:
            return True
        if pool == self.simulator.plan.placement(dst).pool:
            return edge not in turn.fetches or turn.version[edge] in found.copied
        return not self.simulator.driver.sends(edge, turn.number) or len(found.fetched) >= turn.told[edge]

    def reshard(self, pools: Sequence[str], src: str, dst: str) -> None:
        """Simulate a resharding.

        All devices of both pools take part once the last is free. If one pool may be ahead, the update's devices make a
        copy and the generation's fetch it.
        """
        simulator = self.simulator
        turn = self.turn
        plan = self.simulator.plan
        edge = simulator.reshards[src, dst]
        found = simulator.driver.published.get((src, dst))
        begin = max(simulator.lanes[p].last for p in pools)
        if found is None:
            turn.held[dst] = turn.version.get((src, dst), turn.number)
            simulator._spend(pools, begin, begin + costs.reshard(plan, edge).value, turn)
        elif pools[0] == plan.placement(dst).pool:
            turn.held[dst] = turn.version[src, dst]
            if (src, dst) in turn.fetches:
                begin = max(begin, found.copied[turn.held[dst]])
                found.fetched.append(begin + costs.reshard(plan, edge).value)
                simulator._spend(pools, begin, found.fetched[-1], turn)
        elif simulator.driver.sends((src, dst), turn.number):
            if told := turn.told[src, dst]:
                begin = max(begin, found.fetched[told - 1])
            found.copied[turn.number] = begin + costs.publish(plan, edge).value * (not found.made(turn.number))
            simulator._spend(pools, begin, found.copied[turn.number], turn)

    def release(self, pool: str, node: str) -> None:
        """Do nothing: it takes no time."""

    def swap_in(self, pool: str, node: str) -> None:
        edge = [r for r in self.simulator.plan.reshards if r.src == node][-1]
        seconds = costs.swap_in(edge).value if edge.swap_in.bytes else 0.0
        lanes = self.simulator.lanes[pool]
        lanes.back[node] = [t + seconds for t in lanes.clock]

    def wait(self, pool: str, node: str) -> None:
        lanes = self.simulator.lanes[pool]
        for device in range(len(lanes.clock)):
            lanes.set((device,), max(lanes.clock[device], lanes.back[node][device]))

    def again(self, pool: str, node: str, rounds: int) -> bool:
        """Return False: filters are not run, so one round of prompts is simulated."""
        return False


class Simulator:
    """The simulator of a plan; `engines` are the specs by name."""

    def __init__(self, plan: Plan, engines: Mapping[str, EngineSpec], specs: Specs) -> None:
        self.plan = plan
        self.specs = specs
        self.draws = RowSampler(plan, specs)
        self.flow = SimulatedDocks(plan, self.draws)
        self.spans: list[LaneSpan] = []
        self.lanes: dict[str, Lanes] = {}
        for pool in plan.pools:
            devices = [pool.device(r, plan.cluster.devices_per_node) for r in range(pool.devices)]
            slow = [self.draws.slowness(d) for d in devices]
            self.lanes[pool.name] = Lanes.of(
                pool, devices, slow, {p.node: p.layout for p in plan.placements if p.pool == pool.name}
            )
        self.model_nodes: dict[str, ModelNode] = {}
        for p in plan.placements:
            if p.pool != FUNCTIONS:
                own = Costs(plan, engines, p.node)
                self.model_nodes[p.node] = ModelNode(
                    plan, self.flow, own, engines[p.engine.name], self.lanes[p.pool], self.spans.append
                )
        self.reshards = {(r.src, r.dst): r for r in plan.reshards}
        self.rollouts = {n.name: self._rollout(n.name) for n in plan.graph.verb("generate") if n.cuts}
        self._drawn: dict[tuple[str, int], list[int]] = {}

    def run(self, iterations: int) -> Simulation:
        found: list[Iteration] = []
        lengths: list[dict[str, tuple[int, ...]]] = []
        self.driver = SimulatedDriver(self.plan, iterations, self.lanes, self._turn, lambda turn: _Steps(self, turn))
        end = begin = 0.0
        for i in range(iterations):
            turn, ended = self.driver.iteration(i, begin)
            found.append(self._iteration(turn, end, ended))
            lengths.append({c: tuple(n) for c, n in turn.lengths.items()})
            begin = self.driver.then(i, ended)
            end = ended
        return Simulation(self.plan, self.specs, tuple(found), tuple(self.spans), tuple(lengths))

    def _turn(self, i: int, base: float) -> Turn:
        """Open an iteration; forget lengths that no later one needs."""
        lengths = {c: self._tokens(c, i) for c in token_columns(self.plan.graph)}
        firsts = [g.prompt for r in self.rollouts.values() for g in r.cut] + [r.next for r in self.rollouts.values()]
        oldest = min((first // self.flow.rows(0) for first in firsts), default=i)
        self._drawn = {k: v for k, v in self._drawn.items() if k[1] >= min(i, oldest)}
        nodes = self.plan.cluster.nodes
        first = nodes * (i % self.driver.lanes)
        return Turn(i, lengths, base, Lanes(FUNCTIONS, list(range(first, first + nodes)), [1.0] * nodes))

    def _tokens(self, column: str, iteration: int) -> list[int]:
        if (column, iteration) not in self._drawn:
            self._drawn[column, iteration] = self.draws.tokens(column, iteration)
        return self._drawn[column, iteration]

    def _iteration(self, turn: Turn, before: float, end: float) -> Iteration:
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
        """Return the tokens of prompts (once per response) and of responses, for eq. 5.

        They are those that the first generation reads and writes; off-line, those that the first update reads.
        """
        graph = self.plan.graph
        node = next(iter((*graph.verb("generate"), *graph.verb("update"))), None)
        if node is None:
            return 0, 0
        rows = holdings.row_count(self.plan, node.name)
        writes = node.writes if node.verb == "generate" else ()
        read, written = (
            sum(sum(lengths[c]) * rows // max(1, len(lengths[c])) for c in some if c in lengths)
            for some in (node.reads, writes)
        )
        return (read, written) if writes else (0, read)

    def _path(self, turn: Turn) -> tuple[str, ...]:
        """Return the chain of nodes that the last one to end waited for."""
        name = max(turn.ran, key=lambda n: (turn.ran[n].done.last, n), default="")
        chain: list[str] = []
        while name and name not in chain:
            chain.append(name)
            name = turn.ran[name].cause if name in turn.ran else ""
        return tuple(reversed(chain))

    def _spend(self, pools: Sequence[str], begin: float, end: float, turn: Turn) -> None:
        for pool in sorted(pools):
            lanes = self.lanes[pool]
            lanes.set(range(len(lanes.clock)), end)
            if end > begin:
                self.spans.append(LaneSpan(pool, lanes.devices[0], RESHARD, turn.number, begin, end, len(lanes.clock)))

    def _of_model(self, turn: Turn, name: str) -> NodeTiming:
        own = self.model_nodes[name]
        batches = self.flow.batches(own.node, turn.number, turn.done, turn.lengths)
        if own.node.verb != "generate":
            return own.compute(batches, turn.number, turn.lengths)
        version = turn.held.get(name, turn.number)
        if name not in self.rollouts:
            # Of several generations, only those whose weights are sent count.
            turn.versions = [version] * self.flow.rows(0) if name in turn.held or not turn.versions else turn.versions
            return own.generate(batches, turn.number, turn.lengths)
        ready, by = max((b.ready, b.by) for b in batches)
        ran, groups = own.rollout(ready, by, turn.number, version, self.rollouts[name])
        turn.versions = [g.version for g in groups]
        turn.lengths |= self._taken(groups)
        return ran

    def _rollout(self, node: str) -> SimulatedRollout:
        prompts = self.flow.rows(0)
        samples = holdings.samples(self.plan, node)
        said = GenerateAttributes.of(self.plan.graph.node(node))
        most = said.stretch(holdings.written_tokens(self.plan, node))
        own = self.model_nodes[node]
        columns = [c for c, _ in own.context]

        def prompt(number: int) -> tuple[int, list[int]]:
            iteration, row = divmod(number, prompts)
            context = sum(self._tokens(c, iteration)[row] for c in columns)
            return context, self._tokens(own.written, iteration)[row * samples : (row + 1) * samples]

        return SimulatedRollout(prompts, said.under_way(prompts), samples, most, said.cuts, said.waits, prompt)

    def _taken(self, groups: list[Group]) -> dict[str, list[int]]:
        """Return the lengths of an iteration's rows when prompts of others are among them."""
        found: dict[str, list[int]] = {}
        for column in token_columns(self.plan.graph):
            rows = []
            each = self.plan.graph.fan(self.plan.graph.column(column).level)
            for group in groups:
                iteration, row = divmod(group.prompt, self.flow.rows(0))
                rows += self._tokens(column, iteration)[row * each : (row + 1) * each]
            found[column] = rows
        return found

    def _function(self, turn: Turn, name: str) -> NodeTiming:
        """Simulate a function on the hosts; the source has its rows at once.

        Each host has its share, row after row or several in parallel.
        """
        node = self.plan.graph.node(name)
        lanes = turn.hosts
        level = self.plan.graph.row_level(node)
        if node.verb == "source":
            return NodeTiming(RowTimes.at(level, self.flow.rows(level), turn.base), "")
        # The overhead of a call; on a CPU cluster it counts as the ranks' (SimulatedDriver.around).
        call = costs.function(self.plan, self.plan.cluster.nodes).value * (not self.plan.cluster.device.kind.is_host)
        seconds = [call + s for s in self.draws.seconds(name, turn.number, self.flow.rows(level))]
        calls = concurrent_calls(node, self.plan.deploy.run.function_workers, read_signature(node))
        together = self.plan.graph.fan(level, self.plan.graph.unit_level(node))  # rows per call
        times = [0.0] * self.flow.rows(level)
        causes = list(lanes.before)
        for batch in self.flow.batches(node, turn.number, turn.done, turn.lengths):
            for host, part in enumerate(batch.parts):
                rows = self.flow.rows_of(node, part, level)
                if not rows:
                    continue
                begin = max(lanes.clock[host], batch.ready)
                causes[host] = batch.by if batch.ready > lanes.clock[host] else causes[host]
                units = [rows[i : i + together] for i in range(0, len(rows), together)]
                end = begin + _beside([sum(seconds[r] for r in unit) for unit in units], calls)
                for row in rows:
                    times[row] = end
                if end > begin:
                    self.spans.append(LaneSpan(FUNCTIONS, lanes.devices[host], name, turn.number, begin, end, 1))
                lanes.set((host,), end, name)
        last = max(times, default=turn.base)
        slowest = max(range(len(causes)), key=lambda h: (lanes.clock[h], -h))
        return NodeTiming(RowTimes(level, times, last), causes[slowest])


def _beside(seconds: Sequence[float], calls: int) -> float:
    """Return the seconds of calls that start in order, at most `calls` in parallel."""
    ends = [0.0] * max(1, min(calls, len(seconds)))
    for each in seconds:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)
