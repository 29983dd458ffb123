"""Seconds to update the weights of workers that follow a trained worker.

Invariant: the seconds are the mean per iteration, because followers are updated only every few iterations. This mean is
part of the seconds of the trained worker's first update node.
"""

from __future__ import annotations

import math

from ..hardware.cluster import Figure
from . import holdings
from .time import Costs


def follower_seconds(update: Costs) -> Figure:
    """Return the mean seconds per iteration to update the followers of a worker.

    `update` has the costs of an update node. Followers are the workers that regularly copy the weights of this node's
    worker, or add them to a moving average. For each follower, the trained worker's weights are read and the follower's
    weights are written. For a moving average, the follower's weights are also read. If the follower's weights are in
    host memory, the follower's node counts the seconds to copy them to the device and back (`Costs.fetch`). The result
    is 0 if `update` is not the first update of its worker.
    """
    plan = update.plan
    worker = update.graph_node.worker
    workers = [follower for follower in plan.graph.workers if follower.follows == worker]
    first = holdings.update_of(plan, worker)
    if not workers or first is None or first.name != update.node:
        return Figure(0.0, "derived", "no worker follows")
    size = holdings.weights(plan, update.engines, update.node)
    moved = math.fsum((3 if follower.decay else 2) * size / follower.every for follower in workers)
    bandwidth = update.device.rate("memory_bandwidth", moved / max(len(update.model.weights), 1))
    return Figure(moved / bandwidth.value, bandwidth.source, "weights that follow / memory bandwidth")


__all__ = ["follower_seconds"]
