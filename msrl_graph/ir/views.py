"""What graphs and plans show of themselves in Python: text, HTML, JSON, networkx.

Invariant: a view shows the same content as the command line. The package `ir` is data and imports no code that shows
it. So the root package sets `facade`, the package `emit`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import networkx as nx

    from .graph import Graph
    from .plan import Plan


class Facade(Protocol):
    """The functions that show graphs and plans."""

    def graph_text(self, graph: Graph) -> str: ...
    def graph_html(self, graph: Graph) -> str: ...
    def plan_text(self, plan: Plan, width: int) -> str: ...
    def plan_json(self, plan: Plan) -> str: ...
    def plan_html(self, plan: Plan) -> str: ...


facade = cast(Facade, None)  # set by the root package


class GraphViews:
    """Methods that show a Graph as text, HTML or a networkx graph."""

    def __str__(self: Graph) -> str:  # type: ignore[misc]
        """Return the text that `msrl-compile --emit graph` shows."""
        return facade.graph_text(self).removesuffix("\n")

    def __repr__(self: Graph) -> str:  # type: ignore[misc]
        """Return one line for tracebacks and debuggers, since the text is long."""
        return f"<Graph {self.name}: {len(self.nodes)} states>"

    def _repr_html_(self: Graph) -> str:  # type: ignore[misc]
        """Return the HTML picture that a notebook shows, with nodes grouped by worker."""
        return facade.graph_html(self)

    def to_networkx(self: Graph) -> nx.MultiDiGraph[str]:  # type: ignore[misc]
        """Return a networkx graph; its nodes have `node=` data and its edges `edge=` data."""
        import networkx as nx

        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=self.name)
        for node in self.nodes:
            graph.add_node(node.name, node=node)
        for edge in self.edges:
            graph.add_edge(edge.src, edge.dst, key=edge.kind, edge=edge)
        return graph


class PlanViews:
    """Methods that show a Plan as text, JSON or HTML."""

    def explain(self: Plan, width: int = 100) -> str:  # type: ignore[misc]
        """Return the text that `msrl-compile` shows; `width` is in characters.

        The text says which node runs where, what data is moved, whether the memory suffices, how long an iteration
        takes, and the reasons for all of this.
        """
        return facade.plan_text(self, width)

    def to_json(self: Plan) -> str:  # type: ignore[misc]
        """Return the JSON text that `msrl-compile --format json` writes.

        Paths of existing files are absolute in this text, so that the plan runs from any folder.
        """
        return facade.plan_json(self)

    def __str__(self: Plan) -> str:  # type: ignore[misc]
        """Return the text of `explain`."""
        return self.explain().removesuffix("\n")

    def __repr__(self: Plan) -> str:  # type: ignore[misc]
        """Return one line for tracebacks and debuggers, since the text is long."""
        on = f"{self.graph.name} on {self.cluster.name}"
        return f"<Plan of {on}: {len(self.graph.nodes)} states, {self.cluster.devices} devices>"

    def _repr_html_(self: Plan) -> str:  # type: ignore[misc]
        """Return the HTML picture that a notebook shows, with nodes grouped by pool."""
        return facade.plan_html(self)
