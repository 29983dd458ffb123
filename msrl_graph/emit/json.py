"""The results of each stage of a compilation as JSON.

Invariant: each document has the fields `format_version` and `stage`. The JSON of a complete plan is `plan.to_json()`,
and `plan.from_json` reads it.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import msgspec

from ..data.plan_paths import make_existing_absolute
from ..ir.graph import Graph
from ..ir.plan import FORMAT_VERSION, Plan
from .placed_graph import build_placed_graph


def tree_json(root: object) -> str:
    """Return a syntax tree as JSON.

    Each part of the tree is an object whose field `is` names the kind of statement or expression.
    """

    def walk(part: object) -> object:
        if is_dataclass(part):
            return {
                "is": type(part).__name__.removesuffix("Decl"),
                **{field.name: walk(getattr(part, field.name)) for field in fields(part)},
            }
        return [walk(item) for item in part] if isinstance(part, tuple) else part

    return _format_json({"format_version": FORMAT_VERSION, "stage": "ast", "ast": walk(root)})


def graph_json(graph: Graph) -> str:
    """Return an algorithm's graph as JSON."""
    return _format_json({"format_version": FORMAT_VERSION, "stage": "graph", "graph": graph})


def placed_json(plan: Plan) -> str:
    """Return a placed graph as JSON: its nodes and edges, and some parts of the plan.

    The nodes are the worker states, the docks, the allgather-swaps, and the sends of weights between pools. The parts
    of the plan are pools, placements, docks and reshards.
    """
    nodes, edges = build_placed_graph(plan)
    parts = {"pools": plan.pools, "placements": plan.placements, "docks": plan.docks, "reshards": plan.reshards}
    return _format_json({"format_version": FORMAT_VERSION, "stage": "placed", "nodes": nodes, "edges": edges, **parts})


def plan_json(plan: Plan) -> str:
    """Return a plan as JSON.

    File paths are absolute, so that the plan can be run from any folder.
    """
    return _format_json(make_existing_absolute(plan))


def _format_json(content: object) -> str:
    return msgspec.json.format(msgspec.json.encode(content)).decode() + "\n"
