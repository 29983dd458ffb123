"""Seconds of transfers between nodes, and of other overhead.

The transfers are moving rows, handing over rows, and resharding. Other overhead is, for example, calling Python
functions. Invariant: as in time.py, each function returns the seconds of one operation. No function adds up operations
of an iteration or assumes their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ..hardware.cluster import Figure, weakest
from ..ir.attributes import UpdateAttributes
from ..ir.plan import Plan, Traffic
from ..ir.resharding_plan import Reshard
from . import holdings
from .collectives import total

PER_TENSOR = 8  # operators of a reshard


def dispatch(edge: Traffic, part: float = 1.0) -> Figure:
    """Return the seconds to move the fraction `part` of an iteration's rows.

    `edge` is the traffic of the sample edge on which the rows are moved.
    """
    return replace(edge.seconds, value=edge.seconds.value * part)


def handover(plan: Plan) -> Figure:
    """Return the seconds between a node's write to the dock and the next node's read.

    The seconds to move the rows are not included.
    """
    return plan.cluster.device.overheads.handover


def dock_overhead(plan: Plan) -> Figure:
    """Return the CPU seconds per host that the docks' processes use in an iteration."""
    number = 0.0
    for controller in plan.docks.controllers:
        node = plan.graph.node(controller.node)
        rows = holdings.row_count(plan, controller.node)
        rounds = UpdateAttributes.of(node).steps(rows) if node.verb == "update" else 1
        number += controller.groups * rounds
    per_state = plan.cluster.device.overheads.share
    return Figure(
        number * per_state.value / plan.cluster.nodes, per_state.source, f"shares of all states; {per_state.basis}"
    )


def iteration_overhead(plan: Plan) -> Figure:
    """Return the seconds that an iteration takes beyond its critical path.

    These are the seconds to start and to end the iteration. On a CPU cluster, the seconds of the docks' processes are
    added, because ranks use all cores.
    """
    turn = plan.cluster.device.overheads.turn
    if not plan.cluster.device.kind.is_host:
        return turn
    return total(turn, dock_overhead(plan))


def function_overhead(plan: Plan, rows: float) -> Figure:
    """Return the overhead, in seconds, of a Python function that gets `rows` rows.

    The seconds in which the function itself runs are not included.
    """
    per_call = plan.cluster.device.overheads.function
    return Figure(per_call.value * rows / plan.cluster.nodes, per_call.source, per_call.basis)


def function_seconds_of_ranks(plan: Plan, functions: Iterable[str]) -> Figure:
    """Return the seconds by which calls of Python functions delay the ranks.

    Only the ranks of a CPU cluster are delayed, because they use all cores. On other clusters the result is 0.
    """
    per_call = plan.cluster.device.overheads.function
    if not plan.cluster.device.kind.is_host:
        return Figure(0.0, "derived", "ranks have devices of their own")
    seconds = math.fsum(function_overhead(plan, holdings.row_count(plan, name)).value for name in functions)
    return Figure(seconds, per_call.source, per_call.basis)


def reshard(plan: Plan, edge: Reshard) -> Figure:
    """Return the seconds of a reshard, except the seconds of the swap-in.

    The swap-in copies the update's weights back to the device, while other nodes compute. The result has two summands:
    the seconds of the reshard's steps, and the minimum seconds of the reshard's operators. For each tensor, operators
    pack the tensor into a bucket, copy it out of the bucket, and swap it out. For each bucket, an operator gathers the
    bucket.
    """
    device = plan.cluster.device
    tensors = sum(map(len, edge.buckets))
    count = "four" if edge.mode == "send" else "five"
    operators = PER_TENSOR * tensors * device.launch.value
    gathers = len(edge.buckets) * device.collective("all_gather").least.value * any(way.ranks > 1 for way in edge.ways)
    source = weakest(*(step.seconds for step in edge.steps), device.launch)
    seconds = math.fsum(step.seconds.value for step in edge.steps) + operators + gathers
    return Figure(seconds, source, f"the sum of the {count} steps, plus the least time of their operators")


def publish(plan: Plan, edge: Reshard) -> Figure:
    """Return the seconds in which an update copies its weights for generations.

    Generations fetch the weights from this copy. The update makes the copy at its beginning, with one operator per
    tensor. If generations do not fetch weights from a copy, the result is 0.
    """
    if edge.copied is None:
        return Figure(0.0, "derived", "nothing is copied")
    device = plan.cluster.device
    step = edge.copied.seconds
    operators = device.launch.value * sum(map(len, edge.buckets))
    return Figure(
        step.value + operators, weakest(step, device.launch), f"{step.basis}, plus the least time of the operators"
    )


def swap_in(edge: Reshard) -> Figure:
    return edge.swap_in.seconds
