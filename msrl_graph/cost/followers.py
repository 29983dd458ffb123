"""The cost of workers whose weights follow a trained one, after an iteration."""

from __future__ import annotations

import math

from ..hardware.cluster import Figure
from . import holdings
from .time import Costs


def follower_seconds(update: Costs) -> Figure:
    """Return the mean seconds per iteration of all workers that follow an update's.

    Their weights are written, and the update's are read; for a moving average their own are read too. If weights are in
    host memory, their own node counts the copies (`Costs.fetch`).
    """
    plan = update.plan
    worker = update.graph_node.worker
    workers = [follower for follower in plan.graph.workers if follower.follows == worker]
    first = holdings.update_of(plan, worker)
    if not workers or first is None or first.name != update.node:
        return Figure(0.0, "derived", "no worker follows")
    size = holdings.weights(plan, update.engines, update.node)
    moved = math.fsum((3 if follower.decay else 2) * size / follower.every for follower in workers)
    bandwidth = update.device.rate("memory_bandwidth", moved / max(len(update.model.tensors), 1))
    return Figure(moved / bandwidth.value, bandwidth.source, "weights that follow / memory bandwidth")


__all__ = ["follower_seconds"]
