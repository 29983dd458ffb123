"""Traffic: the bytes and the transfer seconds of each sample edge in an iteration.

Seconds are given for transfers through the dock and, for comparison, through a central buffer. Invariant: traffic is
counted on the graph, with rows of the greatest length. A column is counted once for each node that reads it. An update
reads its rows once per epoch. A column of responses has one value for each response. A column of prompts has one value
for each prompt. tests/sharding/test_equations.py compares the traffic with the equations of arXiv:2507.19017.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..analysis.sequences import bound, token_columns
from ..diagnostics.quantities import duration, size
from ..diagnostics.sheet import Sheet
from ..hardware.cluster import Figure
from ..ir.attributes import UpdateAttributes
from ..ir.graph import Edge
from ..ir.plan import FUNCTIONS, Plan, PlanNote, Traffic
from .facts import Fact, Section
from .spec import Pass, describe_incomplete


@dataclass(frozen=True)
class CountTraffic(Pass):
    """The pass that counts the traffic of sample edges.

    Rows are stored on the host that writes them. At least the fraction 1 / hosts of the rows that a host reads is
    stored on the same host.
    """

    name = "traffic"
    title = "Sample edges"
    needs = ("place", "dock")
    fills = ("traffic",)

    def apply(self, plan: Plan) -> Plan:
        graph = plan.graph
        traffic = _Edges(plan).all()
        unknown = [column.name for column in graph.columns if column.element in ("text", "json")]
        notes = plan.notes
        if unknown:
            notes += (PlanNote("traffic", f"columns of text have no bound and count as 0 bytes: {', '.join(unknown)}"),)
        for text in [column for column in token_columns(graph) if column in unknown and not graph.column(column).dims]:
            most = (
                f"`{text}` is planned with up to {bound(graph, text):,} tokens: write `{text} : text[<= n]` for "
                "another bound"
            )
            notes += (PlanNote("traffic", most),)
        return replace(plan, traffic=tuple(traffic), notes=notes)

    @staticmethod
    def verify(plan: Plan) -> Iterator[str]:
        """Verify that the plan has the traffic of every sample edge."""
        if [(item.src, item.dst) for item in plan.traffic] != [(edge.src, edge.dst) for edge in plan.graph.samples()]:
            yield describe_incomplete("traffic")

    @classmethod
    def write(cls, page: Sheet, plan: Plan) -> None:
        if not plan.traffic:
            return
        total = sum(traffic.bytes for traffic in plan.traffic)
        page.heading("Sample edges", f"{size(total)} an iteration, at the columns' bounds")
        rows = []
        for traffic in plan.traffic:
            cells = (
                f"{traffic.src} -> {traffic.dst}",
                ", ".join(traffic.columns) or "-",
                f"{traffic.rows:,}",
                size(traffic.bytes),
                duration(traffic.seconds.value),
            )
            rows.append((*cells, duration(traffic.central_seconds.value), traffic.seconds.source))
        page.table(("edge", "columns", "rows", "bytes", "dock", "central", "source"), rows, (2, 3, 4, 5), (0, 6))
        for how in dict.fromkeys(traffic.how for traffic in plan.traffic):
            readers = dict.fromkeys(traffic.dst for traffic in plan.traffic if traffic.how == how)
            page.line(f"{how}: {', '.join(readers)}" if len({traffic.how for traffic in plan.traffic}) > 1 else how)
        page.line(f"seconds: {plan.traffic[0].seconds.basis}")
        page.line(f"central: {plan.traffic[0].central_seconds.basis}")

    @staticmethod
    def facts(plan: Plan) -> Section:
        section: Section = {"all": {"bytes": Fact(float(sum(traffic.bytes for traffic in plan.traffic)), "bytes")}}
        for traffic in plan.traffic:
            section[f"{traffic.src} -> {traffic.dst}"] = {
                "bytes": Fact(float(traffic.bytes), "bytes"),
                "rows": Fact(float(traffic.rows), "rows", True),
                "dock": Fact(traffic.seconds.value, "s", True),
                "central": Fact(traffic.central_seconds.value, "s", True),
            }
        return section


@dataclass(frozen=True)
class _Edges:
    """The traffic of a plan's sample edges.

    Texts that are the same for many edges are built once.
    """

    plan: Plan

    def all(self) -> list[Traffic]:
        graph = self.plan.graph
        return [self._count_edge(edge, graph.flow.carried[edge.src, edge.dst]) for edge in graph.samples()]

    def _count_edge(self, edge: Edge, columns: tuple[str, ...]) -> Traffic:
        plan = self.plan
        src = edge.src
        dst = edge.dst
        graph = plan.graph
        hosts = plan.cluster.nodes
        network = plan.cluster.network
        sizes = graph.column_bytes
        epochs = UpdateAttributes.of(graph.node(dst)).epochs
        amount = sum(sizes[column] for column in columns) * epochs
        level = max((graph.column(column).level for column in columns), key=graph.depth, default=0)
        share = (hosts - 1) / hosts
        # Writes to a central buffer also cross the network: a node's puts are counted on its first edge.
        puts = sum(sizes[column] for column in graph.node(src).writes) if edge is graph.out_of(src)[0] else 0
        through, spread = self._bases
        central = Figure((amount + puts) * share / network.value, network.source, through)
        seconds = central
        if hosts == 1:
            seconds = central = self._no_network
        elif plan.docks.mode != "central":
            seconds = Figure(amount * share / len(plan.docks.warehouses) / network.value, network.source, spread)
        how = self._describe_route(dst, epochs) if columns else "order only: its reader gets all columns by other edges"
        return Traffic(src, dst, columns, graph.rows[level], amount, seconds, central, how)

    @cached_property
    def _no_network(self) -> Figure:
        return Figure(0.0, "derived", "on one host nothing crosses the network")

    @cached_property
    def _bases(self) -> tuple[str, str]:
        """The formulas of the seconds, as text: for a central buffer, and for the dock."""
        hosts = self.plan.cluster.nodes
        network = self.plan.cluster.network
        parts = f"bytes x {hosts - 1}/{hosts}"
        spread = f"{parts} / {len(self.plan.docks.warehouses)} warehouses / network; {network.basis}"
        return f"{parts} through one host, puts and gets; {network.basis}", spread

    def _describe_route(self, dst: str, epochs: int) -> str:
        plan = self.plan
        hosts = self.plan.cluster.nodes
        reader = "hosts" if plan.placement(dst).pool == FUNCTIONS else "groups"
        key = plan.controller(dst).groups, reader, epochs
        if key not in self._descriptions:
            if hosts == 1:
                how = "shared memory of one host"
            elif plan.docks.mode == "central":
                how = "through the one warehouse of host 0"
            else:
                how = (
                    f"{len(plan.docks.warehouses)} warehouses; at most {hosts - 1}/{hosts} from other hosts, "
                    f"{key[0]} {reader} read"
                )
            self._descriptions[key] = how + (f"; once in each of {epochs} epochs" if epochs > 1 else "")
        return self._descriptions[key]

    @cached_property
    def _descriptions(self) -> dict[tuple[int, str, int], str]:
        return {}
