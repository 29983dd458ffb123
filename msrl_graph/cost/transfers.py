"""Seconds of transfers between the nodes of an iteration, and of other overhead.

Transfers are moving rows, handing over rows, calling functions, and resharding. Invariant: as in time.py, each function
returns the seconds of one operation. No function adds up operations of an iteration or assumes their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ..hardware.cluster import Figure, weakest
from ..ir.attributes import UpdateAttributes
from ..ir.plan import Plan, Reshard, Traffic
from . import holdings
from .collectives import total

PER_TENSOR = 8  # operators of a reshard


def dispatch(edge: Traffic, part: float = 1.0) -> Figure:
    """Return the seconds to move a fraction of an iteration's rows on a sample edge."""
    return replace(edge.seconds, value=edge.seconds.value * part)


def handover(plan: Plan) -> Figure:
    """Return the seconds until the next node has a node's rows, through the dock.

    The seconds to move the rows are not included.
    """
    return plan.cluster.device.overheads.handover


def dock_overhead(plan: Plan) -> Figure:
    """Return the CPU seconds per host of the dock's processes in an iteration."""
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
    """Return the seconds of an iteration that are not on its critical path.

    These are the seconds to start and to end the iteration. On a CPU cluster, whose ranks use all cores, the seconds of
    the dock's processes are added.
    """
    turn = plan.cluster.device.overheads.turn
    if not plan.cluster.device.kind.is_host:
        return turn
    return total(turn, dock_overhead(plan))


def function_overhead(plan: Plan, rows: float) -> Figure:
    """Return the overhead of a Python function on `rows` rows, without its own work."""
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
    """Return the seconds of a reshard without its swap-in.

    The swap-in overlaps with computation. The result is the sum of the reshard's steps and of the minimum times of its
    operators. Each tensor is packed into the bucket, copied out of the bucket, and swapped out. Each bucket is
    gathered.
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
    """Return the seconds to copy the weights that generations fetch.

    The update makes the copy when the update begins, with one operator per tensor. Without such a copy the result is 0.
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
