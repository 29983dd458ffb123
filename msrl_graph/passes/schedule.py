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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ..cost.holdings import update_of
from ..ir import verify
from ..ir.async_schedule import lead_of_pools, pipelined_openings, skipping_edges
from ..ir.graph import Node
from ..ir.instruction import Instruction, InstructionStream
from ..ir.plan import FUNCTIONS, Plan
from ..ir.pools_in_step import functions_with_states
from ..ir.rowsets import find_refill, nodes_upstream
from .spec import Pass


@dataclass(frozen=True)
class BuildSchedule(Pass):
    """The pass that schedules the nodes of each pool.

    Nodes that share devices run in this order: first generations, then frozen nodes, then the other nodes. The weights
    of updates are copied back to the device while frozen nodes run. Functions need no device: each function runs as
    early as the graph allows.
    """

    name = "schedule"
    needs = ("place",)

    def verify(self, plan: Plan) -> Iterator[str]:
        return verify.schedule(plan)

    def apply(self, plan: Plan) -> Plan:
        filter, repeated = find_refill(plan.graph)
        order = _order_nodes(plan, repeated)
        streams = [*_build_streams(plan, "train", order, filter, repeated)]
        for evaluation in plan.deploy.evaluations:
            needed = nodes_upstream(plan.graph, evaluation.columns)
            streams += _build_streams(plan, evaluation.task, [node for node in order if node.name in needed])
        return replace(plan, schedule=tuple(streams))


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
