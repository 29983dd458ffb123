"""costs: seconds of what goes on between the nodes of an iteration and around them: rows that are moved and handed
over, functions, weights that change their layout.

Invariant: as in time.py, nothing is composed here and no order assumed.
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
    """Moving a part of an iteration's rows along a sample edge."""
    return replace(edge.seconds, value=edge.seconds.value * part)


def handover(plan: Plan) -> Figure:
    """From the rows of one node to the next node's having them, their moving left out."""
    return plan.cluster.device.overheads.handover


def shares(plan: Plan) -> Figure:
    """What the dock's own processes take of the hosts' processors in an iteration."""
    number = 0.0
    for controller in plan.docks.controllers:
        node = plan.graph.node(controller.node)
        rows = holdings.row_count(plan, controller.node)
        rounds = UpdateAttributes.of(node).steps(rows) if node.verb == "update" else 1
        number += controller.groups * rounds
    each = plan.cluster.device.overheads.share
    return Figure(number * each.value / plan.cluster.nodes, each.source, f"shares of all states; {each.basis}")


def around(plan: Plan) -> Figure:
    """What is added to the critical path: an iteration's start and end, and what the dock's processes take from ranks
    that have all cores."""
    turn = plan.cluster.device.overheads.turn
    if not plan.cluster.device.kind.is_host:
        return turn
    return total(turn, shares(plan))


def function(plan: Plan, rows: float) -> Figure:
    """A Python function on so many rows, what it does itself left out."""
    each = plan.cluster.device.overheads.function
    return Figure(each.value * rows / plan.cluster.nodes, each.source, each.basis)


def taken(plan: Plan, functions: Iterable[str]) -> Figure:
    """What calls of functions take from ranks that have all cores."""
    each = plan.cluster.device.overheads.function
    if not plan.cluster.device.kind.is_host:
        return Figure(0.0, "derived", "ranks have devices of their own")
    seconds = math.fsum(function(plan, holdings.row_count(plan, name)).value for name in functions)
    return Figure(seconds, each.source, each.basis)


def reshard(plan: Plan, edge: Reshard) -> Figure:
    """All steps of a reshard but the swap-in, which overlaps, and what its operators take at least: a tensor is laid
    into the bucket, taken out of it, and swapped out; a bucket is gathered."""
    device = plan.cluster.device
    tensors = sum(map(len, edge.buckets))
    count = "four" if edge.mode == "send" else "five"
    operators = PER_TENSOR * tensors * device.launch.value
    gathers = len(edge.buckets) * device.collective("all_gather").least.value * any(way.ranks > 1 for way in edge.ways)
    source = weakest(*(s.seconds for s in edge.steps), device.launch)
    seconds = math.fsum(s.seconds.value for s in edge.steps) + operators + gathers
    return Figure(seconds, source, f"the sum of the {count} steps, and what operators take at least")


def publish(plan: Plan, edge: Reshard) -> Figure:
    """The copy of the weights that others fetch, which the update makes as it begins: an operator a tensor."""
    if edge.copied is None:
        return Figure(0.0, "derived", "nothing is copied")
    device = plan.cluster.device
    step = edge.copied.seconds
    operators = device.launch.value * sum(map(len, edge.buckets))
    return Figure(
        step.value + operators, weakest(step, device.launch), f"{step.basis}, and what operators take at least"
    )


def swap_in(edge: Reshard) -> Figure:
    return edge.swap_in.seconds
