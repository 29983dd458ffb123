"""JSON of every stage.

Invariant: each has `format_version` and `stage`. That of a plan is `plan.to_json()`, which `plan.from_json` reads.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import msgspec

from ..ir.graph import Graph
from ..ir.plan import FORMAT_VERSION, Plan
from ..ir.plan_paths import make_existing_absolute
from .placed_graph import build_placed_graph


def tree_json(root: object) -> str:
    """Return a syntax tree as JSON: each part is an object whose `is` names its kind."""

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
    """Return a placed graph as JSON: its nodes and edges, and parts of the plan.

    Nodes are states, docks and allgather_swaps.
    """
    nodes, edges = build_placed_graph(plan)
    parts = {"pools": plan.pools, "placements": plan.placements, "docks": plan.docks, "reshards": plan.reshards}
    return _format_json({"format_version": FORMAT_VERSION, "stage": "placed", "nodes": nodes, "edges": edges, **parts})


def plan_json(plan: Plan) -> str:
    """Return a plan as JSON, with absolute file paths: it runs from any folder."""
    return _format_json(make_existing_absolute(plan))


def _format_json(content: object) -> str:
    return msgspec.json.format(msgspec.json.encode(content)).decode() + "\n"
