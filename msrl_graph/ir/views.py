"""How a graph or a plan shows itself, for who has one in Python.

Invariant: what is shown is what the command line shows. This room knows nothing of those above it: the package hands it
the emitters, which are loaded when somebody asks. A plan that is run or sent has loaded nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx as nx

    from .graph import Graph
    from .plan import Plan


emitter: Callable[[str], ModuleType] = import_module  # a module of emit, by its name: the package says where that is


class GraphViews:
    """The methods of a Graph that need rooms above this one, or a library of graphs."""

    def __str__(self: Graph) -> str:  # type: ignore[misc]
        """The text that `msrl-compile --emit graph` shows."""
        return str(emitter("text").graph_text(self)).removesuffix("\n")

    def __repr__(self: Graph) -> str:  # type: ignore[misc]
        """In a line, as a traceback or a debugger shows it: the text is long."""
        return f"<Graph {self.name}: {len(self.nodes)} states>"

    def _repr_html_(self: Graph) -> str:  # type: ignore[misc]
        """What a notebook shows: a picture, nodes by worker."""
        return str(emitter("html").graph_fragment(self))

    def to_networkx(self: Graph) -> nx.MultiDiGraph[str]:  # type: ignore[misc]
        """All nodes and edges, with `node=` and `edge=` data."""
        import networkx as nx

        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=self.name)
        for node in self.nodes:
            graph.add_node(node.name, node=node)
        for edge in self.edges:
            graph.add_edge(edge.src, edge.dst, key=edge.kind, edge=edge)
        return graph


class PlanViews:
    """The methods of a Plan that need rooms above this one."""

    def explain(self: Plan, width: int = 100) -> str:  # type: ignore[misc]
        """The text that `msrl-compile` shows: what runs where, what moves, what fits, how long it takes, and why.
        `width` in characters."""
        return str(emitter("text").plan_text(self, width))

    def to_json(self: Plan) -> str:  # type: ignore[misc]
        """What `msrl-compile --format json` writes, with the places of the plan's files: it runs from any folder."""
        return str(emitter("json").plan_json(self))

    def __str__(self: Plan) -> str:  # type: ignore[misc]
        """What `explain` gives."""
        return self.explain().removesuffix("\n")

    def __repr__(self: Plan) -> str:  # type: ignore[misc]
        """In a line, as a traceback or a debugger shows it: the text is long."""
        on = f"{self.graph.name} on {self.cluster.name}"
        return f"<Plan of {on}: {len(self.graph.nodes)} states, {self.cluster.devices} devices>"

    def _repr_html_(self: Plan) -> str:  # type: ignore[misc]
        """What a notebook shows: a picture, nodes by pool."""
        return str(emitter("html").plan_fragment(self))
