"""Frozen workers whose weights are those of a trained worker without its adapter.

Such a worker, often the reference of a KL penalty, needs no weights of its own: its nodes compute with the weights of
the trained worker, and leave the adapter out.

Invariant: a node changes its worker only if the deploy states nothing about the node. Otherwise the frozen worker has
its own weights, for example on devices of its own.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph, Worker
from ..ir.plan import Deployment


def share_bases(graph: Graph, deploy: Deployment) -> Graph:
    """Return the graph in which frozen workers share the weights of others.

    A frozen worker shares those of a worker with an adapter, if both have the same model. A frozen worker that has the
    folder of an adapter computes with this adapter, so it needs its own weights.
    """
    shared = {worker.name: holder for worker in graph.workers if (holder := _find_holder(graph, deploy, worker))}
    if not shared:
        return graph
    nodes = (
        replace(node, worker=shared[node.worker], base_of=node.worker) if node.worker in shared else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def _find_holder(graph: Graph, deploy: Deployment, worker: Worker) -> str:
    """Return the worker whose weights a frozen worker can use; "" if there is none."""
    nodes = graph.nodes_of(worker.name)
    if not worker.frozen or worker.follows or any(node.verb != "infer" for node in nodes):
        return ""
    placed = {name for pool in deploy.pools for name in pool.nodes} | {
        name for some in deploy.together for name in some
    }
    if any(node.name in placed | deploy.layouts.keys() | deploy.engines.keys() for node in nodes):
        return ""
    trained = {node.worker for node in graph.verb("update")}
    model = deploy.models[worker.model]
    for other in graph.workers:
        if other.name not in trained or other.kind != worker.kind or model.initial:
            continue
        theirs = deploy.models[other.model]
        is_same = (model.path or model.name, model.dtype) == (theirs.path or theirs.name, theirs.dtype)
        if is_same and (other.adapter or theirs.initial):
            return other.name
    return ""
