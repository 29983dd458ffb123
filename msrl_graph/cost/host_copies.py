"""The seconds of copies between a device and the memory of its host.

Invariant: the seconds of a copy are its bytes, divided by the bandwidth of the link.
"""

from __future__ import annotations

from dataclasses import replace

from ..hardware.cluster import Device, Figure
from ..ir.plan import Plan
from . import holdings
from .optimizer_states import fetches_states


def copy_seconds(device: Device, amount: int, name: str) -> Figure:
    """Return the seconds to copy `amount` bytes between a device and its host."""
    link = device.copies
    return Figure(amount / link.value, link.source, f"{name}: bytes / host link")


def fetch_seconds(plan: Plan, engines: holdings.Engines, node: str) -> Figure:
    """Return the seconds to copy what is offloaded in when a node begins.

    The seconds to copy it back at the node's end are included: of the weights of followers, and of optimizer states.
    """
    device = plan.cluster.device
    if fetches_states(plan, node):
        states = holdings.optimizer(plan, engines, node)
        return copy_seconds(device, 2 * states, "optimizer states in from host memory, and back at the end")
    if not holdings.offloads(plan, node, "weights"):
        return Figure(0.0, "derived", "the weights are on the device")
    weights = holdings.weights(plan, engines, node)
    worker = plan.graph.worker(plan.graph.node(node).worker)
    if not worker.follows or plan.graph.sharing(worker.name)[0].name != node:
        return copy_seconds(device, weights, "weights in from host memory")
    size = round(weights * (1 + 2 / worker.every))
    return copy_seconds(device, size, "weights in from host memory, weights that follow in and back")


def uncovered_seconds(copies: Figure, device: Device, computing: float) -> Figure:
    """Return the seconds that copies add to `computing` seconds of computation.

    `copies` has the seconds of the copies. If the device runs asynchronously to Python, the copies overlap with the
    computation. Only the seconds by which the copies take longer than the computation are then returned.
    """
    hidden = computing if device.kind.runs_ahead else 0.0
    return replace(copies, value=max(0.0, copies.value - hidden))
