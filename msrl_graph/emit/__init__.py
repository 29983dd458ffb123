"""Graphs and plans as text, JSON, HTML and a Ray script; differences of plans.

The functions here are what a Graph and a Plan show of themselves (`ir/views.py`). Invariant: importing this package
loads none of its modules, so a process that runs a plan loads no code that draws or formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..ir.graph import Graph
    from ..ir.plan import Plan


def graph_text(graph: Graph) -> str:
    from . import text

    return text.graph_text(graph)


def graph_html(graph: Graph) -> str:
    from . import html

    return html.graph_fragment(graph)


def plan_text(plan: Plan, width: int) -> str:
    from . import text

    return text.plan_text(plan, width)


def plan_json(plan: Plan) -> str:
    from . import json

    return json.plan_json(plan)


def plan_html(plan: Plan) -> str:
    from . import html

    return html.plan_fragment(plan)
