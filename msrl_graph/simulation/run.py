"""The simulation of a plan's iterations.

All pools run their instruction streams, and rows pass through the docks. The seconds that devices need come from
cost/time.py. driver.py defines the order of iterations.

Invariant: the same plan, assumptions and seed give the same numbers, to the last bit. The result does not depend on the
order in which the simulator handles pools.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..analysis.concurrency import concurrent_calls, read_signature
from ..analysis.sequences import token_columns
from ..backends.spec import EngineSpec
from ..cost import holdings
from ..cost import transfers as costs
from ..cost.time import Costs
from ..ir.attributes import GenerateAttributes
from ..ir.instruction import Walker
from ..ir.plan import FUNCTIONS, Plan
from .assumptions import Specs
from .driver import SimulatedDriver
from .flow import Lengths, RowTimes, SimulatedDocks
from .generation import tail_share
from .iteration import Turn
from .lanes import Lanes, LaneSpan
from .nodes import ModelNode, NodeTiming
from .result import RESHARD, Iteration, Simulation
from .rollout import Group, SimulatedRollout
from .rows import RowSampler


@dataclass
class _Steps(Walker):
    """The object that simulates each instruction of an iteration."""

    simulator: Simulator
    turn: Turn

    def ready(self, pool: str, node: str) -> bool:
        return all(edge.src in self.turn.timings for edge in self.simulator.plan.graph.into(node))

    def run(self, pool: str, node: str) -> None:
        run = self.simulator._run_function if pool == FUNCTIONS else self.simulator._run_model_node
        self.turn.timings[node] = run(self.turn, node)

    def weights_ready(self, pool: str, src: str, dst: str) -> bool:
        """Return whether a pool can begin its part of the transfer over a resharding edge.

        A generation can fetch a version when the update has copied this version. An update can overwrite its copy when
        all requested fetches of the copy have ended.
        """
        turn = self.turn
        publication = self.simulator.driver.published.get((src, dst))
        edge = (src, dst)
        if publication is None:
            return True
        if pool == self.simulator.plan.placement(dst).pool:
            return edge not in turn.fetches or turn.version[edge] in publication.copy_times
        return (
            not self.simulator.driver.sends(edge, turn.number)
            or len(publication.fetch_times) >= turn.fetches_before[edge]
        )

    def reshard(self, pools: Sequence[str], src: str, dst: str) -> None:
        """Simulate a resharding.

        If both pools are in step, all devices of both pools take part. The resharding begins when all these devices are
        free. If one of the pools may be ahead, there are two separate operations: the devices of the update make a
        copy, and later the devices of the generation fetch the copy.
        """
        simulator = self.simulator
        turn = self.turn
        plan = self.simulator.plan
        edge = simulator.reshards[src, dst]
        publication = simulator.driver.published.get((src, dst))
        begin = max(simulator.lanes[pool].last for pool in pools)
        if publication is None:
            turn.version_by_node[dst] = turn.version.get((src, dst), turn.number)
            simulator._occupy(pools, begin, begin + costs.reshard(plan, edge).value, turn)
        elif pools[0] == plan.placement(dst).pool:
            turn.version_by_node[dst] = turn.version[src, dst]
            if (src, dst) in turn.fetches:
                begin = max(begin, publication.copy_times[turn.version_by_node[dst]])
                publication.fetch_times.append(begin + costs.reshard(plan, edge).value)
                simulator._occupy(pools, begin, publication.fetch_times[-1], turn)
        elif simulator.driver.sends((src, dst), turn.number):
            if fetches := turn.fetches_before[src, dst]:
                begin = max(begin, publication.fetch_times[fetches - 1])
            publication.copy_times[turn.number] = begin + costs.publish(plan, edge).value * (
                not publication.is_copied(turn.number)
            )
            simulator._occupy(pools, begin, publication.copy_times[turn.number], turn)

    def release(self, pool: str, node: str) -> None:
        """Do nothing, because releasing weights takes no time."""

    def swap_in(self, pool: str, node: str) -> None:
        edge = [reshard for reshard in self.simulator.plan.reshards if reshard.src == node][-1]
        seconds = costs.swap_in(edge).value if edge.swap_in.bytes else 0.0
        lanes = self.simulator.lanes[pool]
        lanes.weights_back_at[node] = [time + seconds for time in lanes.clock]

    def wait(self, pool: str, node: str) -> None:
        lanes = self.simulator.lanes[pool]
        for device in range(len(lanes.clock)):
            lanes.set((device,), max(lanes.clock[device], lanes.weights_back_at[node][device]))

    def again(self, pool: str, node: str, rounds: int) -> bool:
        """Return False: an iteration has one round, because filters are not simulated."""
        return False


class Simulator:
    """The simulator of a plan; `engines` has the specs of the engines by name."""

    def __init__(self, plan: Plan, engines: Mapping[str, EngineSpec], specs: Specs) -> None:
        self.plan = plan
        self.specs = specs
        self.draws = RowSampler(plan, specs)
        self.flow = SimulatedDocks(plan, self.draws)
        self.spans: list[LaneSpan] = []
        self.lanes: dict[str, Lanes] = {}
        for pool in plan.pools:
            devices = [pool.device(rank, plan.cluster.devices_per_node) for rank in range(pool.devices)]
            slow = [self.draws.slowness(device) for device in devices]
            self.lanes[pool.name] = Lanes.from_pool(
                pool,
                devices,
                slow,
                {placement.node: placement.layout for placement in plan.placements if placement.pool == pool.name},
            )
        self.model_nodes: dict[str, ModelNode] = {}
        for node_placement in plan.placements:
            if node_placement.pool != FUNCTIONS:
                own = Costs(plan, engines, node_placement.node)
                self.model_nodes[node_placement.node] = ModelNode(
                    plan,
                    self.flow,
                    own,
                    engines[node_placement.engine.name],
                    self.lanes[node_placement.pool],
                    self.spans.append,
                )
        self.reshards = {(reshard.src, reshard.dst): reshard for reshard in plan.reshards}
        self.rollouts = {node.name: self._make_rollout(node.name) for node in plan.graph.verb("generate") if node.cuts}
        self._sampled: dict[tuple[str, int], list[int]] = {}

    def run(self, iterations: int) -> Simulation:
        results: list[Iteration] = []
        lengths: list[dict[str, tuple[int, ...]]] = []
        self.driver = SimulatedDriver(
            self.plan, iterations, self.lanes, self._open_turn, lambda turn: _Steps(self, turn)
        )
        end = begin = 0.0
        for number in range(iterations):
            turn, ended = self.driver.iteration(number, begin)
            results.append(self._make_iteration(turn, end, ended))
            lengths.append({column: tuple(tokens) for column, tokens in turn.lengths.items()})
            begin = self.driver.next_begin(number, ended)
            end = ended
        return Simulation(self.plan, self.specs, tuple(results), tuple(self.spans), tuple(lengths))

    def _open_turn(self, number: int, base: float) -> Turn:
        """Open an iteration at the time `base`.

        The sampled lengths of rows that no later iteration uses are deleted.
        """
        lengths = {column: self._sample_tokens(column, number) for column in token_columns(self.plan.graph)}
        firsts = [group.prompt for rollout in self.rollouts.values() for group in rollout.cut_groups] + [
            rollout.next for rollout in self.rollouts.values()
        ]
        oldest = min((first // self.flow.rows(0) for first in firsts), default=number)
        self._sampled = {key: tokens for key, tokens in self._sampled.items() if key[1] >= min(number, oldest)}
        nodes = self.plan.cluster.nodes
        first = nodes * (number % self.driver.lanes)
        return Turn(number, lengths, base, Lanes(FUNCTIONS, list(range(first, first + nodes)), [1.0] * nodes))

    def _sample_tokens(self, column: str, iteration: int) -> list[int]:
        if (column, iteration) not in self._sampled:
            self._sampled[column, iteration] = self.draws.tokens(column, iteration)
        return self._sampled[column, iteration]

    def _make_iteration(self, turn: Turn, before: float, end: float) -> Iteration:
        generates = [node.name for node in self.plan.graph.verb("generate")]
        tails = [tail_share(turn.timings[name].stretches) for name in generates]
        prompt, response = self._count_tokens(turn.lengths)
        behind = [turn.number - version for version in turn.versions]
        return Iteration(
            number=turn.number,
            begin=before,
            end=end,
            prompt_tokens=prompt,
            response_tokens=response,
            tail=max(tails, default=0.0),
            staleness=sum(behind) / max(1, len(behind)),
            most_stale=max(behind, default=0),
            path=self._critical_path(turn),
        )

    def _count_tokens(self, lengths: Lengths) -> tuple[int, int]:
        """Return an iteration's numbers of prompt tokens and of response tokens.

        The counted tokens are the tokens that the first generation reads and writes. A prompt counts once per response.
        If there is no generation, the counted tokens are the tokens that the first update reads. The throughput
        (arXiv:2507.19017, eq. 5) is computed from these numbers.
        """
        graph = self.plan.graph
        node = next(iter((*graph.verb("generate"), *graph.verb("update"))), None)
        if node is None:
            return 0, 0
        rows = holdings.row_count(self.plan, node.name)
        writes = node.writes if node.verb == "generate" else ()
        read, written = (
            sum(sum(lengths[column]) * rows // max(1, len(lengths[column])) for column in names if column in lengths)
            for names in (node.reads, writes)
        )
        return (read, written) if writes else (0, read)

    def _critical_path(self, turn: Turn) -> tuple[str, ...]:
        """Return the chain of nodes that ends with the node that ends last.

        Each node in the chain waited for the previous node in the chain.
        """
        name = max(turn.timings, key=lambda node: (turn.timings[node].done.last, node), default="")
        chain: list[str] = []
        while name and name not in chain:
            chain.append(name)
            name = turn.timings[name].cause if name in turn.timings else ""
        return tuple(reversed(chain))

    def _occupy(self, pools: Sequence[str], begin: float, end: float, turn: Turn) -> None:
        for pool in sorted(pools):
            lanes = self.lanes[pool]
            lanes.set(range(len(lanes.clock)), end)
            if end > begin:
                self.spans.append(LaneSpan(pool, lanes.devices[0], RESHARD, turn.number, begin, end, len(lanes.clock)))

    def _run_model_node(self, turn: Turn, name: str) -> NodeTiming:
        own = self.model_nodes[name]
        batches = self.flow.batches(own.node, turn.number, turn.done, turn.lengths)
        if own.node.verb != "generate":
            return own.compute(batches, turn.number, turn.lengths)
        version = turn.version_by_node.get(name, turn.number)
        if name not in self.rollouts:
            # If there are several generations, only those to which weights are sent count.
            turn.versions = (
                [version] * self.flow.rows(0) if name in turn.version_by_node or not turn.versions else turn.versions
            )
            return own.generate(batches, turn.number, turn.lengths)
        ready, by = max((batch.ready, batch.by) for batch in batches)
        ran, groups = own.rollout(ready, by, turn.number, version, self.rollouts[name])
        turn.versions = [group.version for group in groups]
        turn.lengths |= self._taken_lengths(groups)
        return ran

    def _make_rollout(self, node: str) -> SimulatedRollout:
        prompts = self.flow.rows(0)
        samples = holdings.samples(self.plan, node)
        attributes = GenerateAttributes.of(self.plan.graph.node(node))
        most = attributes.stretch(holdings.written_tokens(self.plan, node))
        own = self.model_nodes[node]
        columns = [column for column, _ in own.context]

        def prompt(number: int) -> tuple[int, list[int]]:
            iteration, row = divmod(number, prompts)
            context = sum(self._sample_tokens(column, iteration)[row] for column in columns)
            return context, self._sample_tokens(own.written, iteration)[row * samples : (row + 1) * samples]

        return SimulatedRollout(
            prompts, attributes.under_way(prompts), samples, most, attributes.cuts, attributes.waits, prompt
        )

    def _taken_lengths(self, groups: list[Group]) -> dict[str, list[int]]:
        """Return the lengths of the rows that an iteration with partial rollout uses.

        The keys of the result are columns. `groups` are the groups that the iteration uses; their prompts may be from
        earlier or later iterations.
        """
        lengths: dict[str, list[int]] = {}
        for column in token_columns(self.plan.graph):
            rows = []
            rows_per_prompt = self.plan.graph.fan(self.plan.graph.column(column).level)
            for group in groups:
                iteration, row = divmod(group.prompt, self.flow.rows(0))
                rows += self._sample_tokens(column, iteration)[row * rows_per_prompt : (row + 1) * rows_per_prompt]
            lengths[column] = rows
        return lengths

    def _run_function(self, turn: Turn, name: str) -> NodeTiming:
        """Simulate a function on the hosts.

        Each host processes its share of the rows, one row after another, or several rows at the same time. If the
        function is the source of prompts, its rows are available immediately.
        """
        node = self.plan.graph.node(name)
        lanes = turn.hosts
        level = self.plan.graph.row_level(node)
        if node.verb == "source":
            return NodeTiming(RowTimes.all_at(level, self.flow.rows(level), turn.base), "")
        # The overhead of a call. On a CPU cluster, SimulatedDriver.overhead includes it instead.
        call = costs.function_overhead(self.plan, self.plan.cluster.nodes).value * (
            not self.plan.cluster.device.kind.is_host
        )
        seconds = [call + own_seconds for own_seconds in self.draws.seconds(name, turn.number, self.flow.rows(level))]
        calls = concurrent_calls(node, self.plan.deploy.run.function_workers, read_signature(node))
        together = self.plan.graph.fan(level, self.plan.graph.unit_level(node))  # rows per call
        times = [0.0] * self.flow.rows(level)
        causes = list(lanes.last_node)
        for batch in self.flow.batches(node, turn.number, turn.done, turn.lengths):
            for host, part in enumerate(batch.parts):
                rows = self.flow.rows_of(node, part, level)
                if not rows:
                    continue
                begin = max(lanes.clock[host], batch.ready)
                causes[host] = batch.by if batch.ready > lanes.clock[host] else causes[host]
                units = [rows[first_row : first_row + together] for first_row in range(0, len(rows), together)]
                end = begin + _parallel_seconds([sum(seconds[row] for row in unit) for unit in units], calls)
                for row in rows:
                    times[row] = end
                if end > begin:
                    self.spans.append(LaneSpan(FUNCTIONS, lanes.devices[host], name, turn.number, begin, end, 1))
                lanes.set((host,), end, name)
        last = max(times, default=turn.base)
        slowest = max(range(len(causes)), key=lambda host_index: (lanes.clock[host_index], -host_index))
        return NodeTiming(RowTimes(level, times, last), causes[slowest])


def _parallel_seconds(seconds: Sequence[float], calls: int) -> float:
    """Return the seconds until all calls of a function have ended.

    `seconds` has the seconds of each call. The calls start in order, and at most `calls` of them run at the same time.
    """
    ends = [0.0] * max(1, min(calls, len(seconds)))
    for call_seconds in seconds:
        heapq.heapreplace(ends, ends[0] + call_seconds)
    return max(ends)
