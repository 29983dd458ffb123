"""The schedule: the instructions of each pool's processes, in order.

A stream is the list of a pool's instructions for one task. A task is the training or one of the evaluations. The
instructions are RUN (a node), RESHARD, RELEASE, SWAP_IN, WAIT and AGAIN. Invariants:
- Every node of a task is in one stream. Each pass through this stream runs the node exactly once.
- All streams of all tasks follow one order of the whole graph, so that two pools never wait for each other in a
  deadlock. A RESHARD between two pools is in the streams of both pools, before the generation.
- An update's weights are on the device whenever a node uses them. RESHARD moves them to the host, SWAP_IN starts to
  copy them back, and WAIT waits until they are back.
- RELEASE frees a generation's weights after the generation, unless the next iteration may use them again (`every`).
- The nodes up to a refilling filter come first. The instruction AGAIN after these nodes repeats them while the filter
  requests more prompts.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ..analysis.async_schedule import count_opening, lead_of_pools, pipelined_openings, skipping_edges
from ..analysis.pools_in_step import functions_with_states
from ..analysis.rowsets import find_refill, nodes_upstream
from ..cost.holdings import update_of
from ..diagnostics.sheet import Sheet
from ..ir.graph import Node
from ..ir.instruction import Instruction, InstructionStream, Walk, Walker, nodes_run
from ..ir.plan import FUNCTIONS, Plan
from .evaluations import write_evaluations
from .facts import Fact, Section
from .spec import Pass, describe_incomplete, has_every_node


@dataclass(frozen=True)
class BuildSchedule(Pass):
    """The pass that schedules the nodes of each pool.

    Nodes that share devices run in this order: first generations, then frozen nodes, then the other nodes. The weights
    of updates are copied back to the device while frozen nodes run. Functions need no device: each function runs as
    early as the graph allows.
    """

    name = "schedule"
    title = "Schedule"
    needs = ("place",)
    fills = ("schedule",)

    def apply(self, plan: Plan) -> Plan:
        filter, repeated = find_refill(plan.graph)
        order = _order_nodes(plan, repeated)
        streams = [*_build_streams(plan, "train", order, filter, repeated)]
        for evaluation in plan.deploy.evaluations:
            needed = nodes_upstream(plan.graph, evaluation.columns)
            streams += _build_streams(plan, evaluation.task, [node for node in order if node.name in needed])
        return replace(plan, schedule=tuple(streams))

    @staticmethod
    def verify(plan: Plan) -> Iterator[str]:
        """Verify the schedule.

        - Each task (training or an evaluation) must run each of its nodes once, in the pool where the node is placed.
        - The weights of a node must be on the devices when the node runs.
        - No instruction stream may wait forever, even if a filter requests one more round of prompts.
        """
        if not has_every_node(plan, nodes_run(plan.schedule)):
            yield describe_incomplete("schedule")
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
                (stream.pool, instruction, why)
                for stream in streams
                for instruction, why in _list_misfits(plan, stream)
            ]
            yield from (
                f"the stream of `{pool}` for `{task}` has {instruction}, which {why}"
                for pool, instruction, why in misfits
            )
            if not misfits:
                yield from (f"the streams of `{task}` {why}" for why in _Streams(plan, task, streams).faults())

    @classmethod
    def write(cls, page: Sheet, plan: Plan) -> None:
        if plan.schedule:
            page.heading("Schedule", "what each pool's processes do, in order")
            rows = [(stream.task, stream.pool, describe_instructions(plan, stream) or "-") for stream in plan.schedule]
            page.table(("task", "pool", "instructions"), rows, (), (0, 1))
        write_evaluations(page, plan)

    @staticmethod
    def facts(plan: Plan) -> Section:
        section: Section = {}
        for stream in plan.schedule:
            section[f"{stream.task}, {stream.pool}"] = {"": Fact(describe_instructions(plan, stream))}
        return section


def _build_streams(
    plan: Plan, task: str, order: Sequence[Node], filter: str = "", repeated: Collection[str] = ()
) -> list[InstructionStream]:
    on_devices = [node for node in order if plan.placement(node.name).pool != FUNCTIONS]
    functions = tuple(Instruction("RUN", node.name) for node in order if plan.placement(node.name).pool == FUNCTIONS)
    streams = [
        (device_pool.name, _device_instructions(plan, on_devices, device_pool.name)) for device_pool in plan.pools
    ] + [(FUNCTIONS, functions)]
    if filter:
        streams = _add_again(streams, filter, repeated)
    return [InstructionStream(pool, task, stream) for pool, stream in streams]


def _add_again(
    streams: list[tuple[str, tuple[Instruction, ...]]], filter: str, repeated: Collection[str]
) -> list[tuple[str, tuple[Instruction, ...]]]:
    """Add an AGAIN to each stream, after the instructions that each round repeats.

    A round draws prompts and runs the nodes up to the refilling filter `filter`. `repeated` are these nodes. If a round
    ends with a generation, the generation's weights remain on the devices for the next round. Otherwise the weights are
    resharded in each round. If the weights come from another pool, the RESHARD is also repeated in that other pool. A
    stream repeats its instructions from the first to the last instruction that a round needs.
    """
    resharded = set[str]()  # generations
    known = -1
    while len(resharded) > known:
        known = len(resharded)
        for _, stream in streams:
            if part := _find_round(stream, repeated, resharded):
                resharded |= {instruction.other for instruction in stream[part] if instruction.op == "RESHARD"} | {
                    instruction.node for instruction in stream[part] if instruction.op == "RELEASE"
                }
    extended = []
    for pool, stream in streams:
        if part := _find_round(stream, repeated, resharded):
            first = stream[part.start]
            again = Instruction("AGAIN", filter, first.node if first.op == "RUN" else first.other)
            stream = (*stream[: part.stop], again, *stream[part.stop :])
        extended.append((pool, stream))
    return extended


def _find_round(stream: tuple[Instruction, ...], repeated: Collection[str], resharded: Collection[str]) -> slice | None:
    """Return the range of a stream's instructions that each round repeats.

    `repeated` are the nodes that each round runs. `resharded` are the generations whose weights are resharded in each
    round. The result is None if the stream has no instructions to repeat.
    """
    runs = [i for i, instruction in enumerate(stream) if instruction.op == "RUN" and instruction.node in repeated]
    weights = [
        i for i, instruction in enumerate(stream) if instruction.op == "RESHARD" and instruction.other in repeated
    ]
    first = min([*runs, *(index for index in weights if stream[index].other in resharded)], default=None)
    if first is None:
        return None
    last = max((*runs, *weights))
    if stream[last].node in resharded and stream[last + 1 : last + 2] == (Instruction("RELEASE", stream[last].node),):
        last += 1  # without the RELEASE the weights would stay, and not be resharded again
    return slice(first, last + 1)


def _device_instructions(plan: Plan, order: Sequence[Node], pool: str) -> tuple[Instruction, ...]:
    source = {edge.dst: edge.src for edge in plan.graph.reshards()}
    swapped = {
        user.name
        for user in order
        if plan.deploy.reshard.mode == "swap" and user.name in source and _pools(plan, source, user) == {pool}
    }
    owner = {
        user.name: plan.graph.node(source.get(user.name, user.name)).worker for user in order
    }  # the worker whose weights a node uses
    # Swapped generations after which the weights return: the next user of them is not a swapped generation.
    last_users = {
        user.name
        for i, user in enumerate(order)
        if user.name in swapped
        and next((later.name for later in order[i + 1 :] if owner[later.name] == owner[user.name]), "") not in swapped
    }
    stay = {dst for _, dst in skipping_edges(plan)}
    out: list[Instruction] = []
    returning: dict[str, str] = {}  # by worker: the update whose weights are returning
    for node in order:
        if node.name in source and pool in _pools(plan, source, node):
            out.append(Instruction("RESHARD", source[node.name], node.name))
        if plan.placement(node.name).pool != pool:
            continue
        if node.verb != "generate" and node.worker in returning:
            out.append(Instruction("WAIT", returning.pop(node.worker)))
        out.append(Instruction("RUN", node.name))
        if node.name in source:
            out += [Instruction("RELEASE", node.name)] * (node.name not in stay)
            if node.name in last_users:
                out.append(Instruction("SWAP_IN", source[node.name]))
                returning[owner[node.name]] = source[node.name]
    # A task without an update still ends with the weights where the next one expects them.
    return (*out, *(Instruction("WAIT", update) for update in returning.values()))


def _pools(plan: Plan, source: Mapping[str, str], node: Node) -> set[str]:
    """Return the pools at both ends of the resharding edge to the generation `node`.

    `source` has, for each generation, the update whose weights it uses.
    """
    return {plan.placement(node.name).pool, plan.placement(source[node.name]).pool}


def _order_nodes(plan: Plan, repeated: Collection[str]) -> list[Node]:
    """Return all nodes in an order that respects the graph.

    If several nodes could run next, nodes that a refill repeats come first, then nodes that a pool runs early for a
    later iteration. Next in the order are: functions, generations, frozen nodes, infer nodes of trained workers (whose
    weights are being copied back), updates. If generations may use old weights, functions that wait for the previous
    iteration come last. Nodes that are equal in this order are in the graph's order.
    """
    graph = plan.graph
    early = {*chain.from_iterable(pipelined_openings(plan).values())}
    late = functions_with_states(plan) if lead_of_pools(plan) else {}

    def rank(node: Node) -> tuple[int, int]:
        # A node outside of the rounds waits for all rounds, so it would block a node of the rounds after it.
        precedence = 0 if node.name in repeated else 1 if node.name in early else 2
        if plan.placement(node.name).pool == FUNCTIONS:
            return precedence, 4 if node.name in late else -1
        if node.verb == "generate":
            return precedence, 0
        return precedence, 3 if node.verb == "update" else 2 if update_of(plan, node.worker) else 1

    waits = {member.name: len(graph.into(member.name)) for member in graph.nodes}
    place = {member.name: i for i, member in enumerate(graph.nodes)}
    ready = [(rank(member), place[member.name]) for member in graph.nodes if not waits[member.name]]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        node = graph.nodes[heapq.heappop(ready)[1]]
        order.append(node)
        for edge in graph.out_of(node.name):
            waits[edge.dst] -= 1
            if not waits[edge.dst]:
                heapq.heappush(ready, (rank(graph.node(edge.dst)), place[edge.dst]))
    if len(order) < len(graph.nodes):
        raise ValueError("the sample edges form a cycle")
    return order


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


def describe_instructions(plan: Plan, stream: InstructionStream) -> str:
    """List the instructions that a pool runs in an iteration, in order.

    If the pool runs its first instructions for a later iteration, the text says for which iteration.
    """
    steps = [*map(str, stream.instructions)]
    first = count_opening(plan, stream)
    if not first:
        return ", ".join(steps)
    if stream.pool == FUNCTIONS:
        return f"{', '.join(steps[:first])}; after those of the iteration before: {', '.join(steps[first:])}"
    lead = lead_of_pools(plan)[stream.pool]
    iteration = "the next iteration" if lead == 1 else f"the iteration {lead} after this"
    return f"for {iteration}: {', '.join(steps[:first])}; then for this one: {', '.join(steps[first:])}"
