"""What the dock knows before a run: which columns each node's controller needs.

Invariant: `NodeReads` is plain data that depends only on the plan.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...analysis.rowsets import Numbers, Rowset, Sieve, find_refill, nodes_upstream, rowsets
from ...analysis.sequences import begins_columns, drawn_name, length_columns, previous_states, temperature_states
from ...ir.attributes import SampleEdgeAttributes, UpdateAttributes
from ...ir.plan import Plan
from ..data.numerics import find_comparison
from ..process.task import Task, row_numbers
from .messages import DockAddress, Member


@dataclass(frozen=True)
class ColumnRead:
    """A column that a node reads.

    `rows` is the index of the column's row set (analysis/rowsets.py), and `writer` is the node that writes the column.
    """

    column: str
    rows: int
    writer: str


@dataclass(frozen=True)
class NodeReads:
    """What a controller needs to know about its node.

    - `reads`: the columns that the node reads. `sets`: all sets of rows of the graph (analysis/rowsets.py).
    - `rows` and `unit`: the sets of the node's rows and of its units, as indices into `sets`. If a function that works
      on responses has `per = prompt`, its units are prompts.
    - `chunk`: the number of units of a batch, or 0. `chunk_tokens`: the number of tokens of a batch, or 0. Both numbers
      are from the plan's controller; 0 means no such limit.
    - `group_warehouses`: for each data-parallel group, the index of the warehouse on the group's host; -1 if that host
      has no warehouse.
    - `tokens`: the columns whose lengths make up the length of a unit, and how often each column counts. `balance`:
      whether the groups' shares have similar total lengths, instead of similar numbers of units. `imbalance`: the
      largest load that a share may have, as a multiple of the average load of the groups' shares.
    - `passed`: the nodes whose verdicts decide which rows this node gets. These nodes are the filters, and those
      generations and functions that drop a failed row from the iteration. `failing`: the generations and functions in
      `passed` that come before this node. In an evaluation, only the nodes in `failing` drop rows.
    - `refilling`: the filter of the graph that requests more prompts, if any. `before_refill`: the filters before
      `refilling`. `loops`: the node is the `refilling` filter or comes before it, so the node works in rounds of
      prompts.
    - `prompts`: a column of the data source. A node that works in rounds of prompts and reads no column learns from
      the news of this column that a round has begun.
    """

    node: str
    reads: tuple[ColumnRead, ...]
    sets: tuple[Rowset, ...]
    rows: int
    unit: int
    whole_batch: bool  # per = batch: one unit has all rows
    group_warehouses: tuple[int, ...]
    chunk: int = 0
    chunk_tokens: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    balance: bool = False
    imbalance: float = 1.0
    update: bool = False
    epochs: int = 1
    mini_batch: int = 0  # rows; 0: all
    seed: int = 0
    passed: tuple[Sieve, ...] = ()
    failing: tuple[Sieve, ...] = ()
    refilling: Sieve | None = None
    before_refill: tuple[Sieve, ...] = ()
    loops: bool = False
    prompts: str = ""

    @cached_property
    def needed_columns(self) -> dict[str, int]:
        """The columns about which the controller needs news, and the row set of each.

        The columns with the verdicts of filters are included. A row set is given as an index into `sets`.
        """
        verdicts = (*self.passed, *([self.refilling] if self.refilling else []), *self.before_refill)
        begun = {self.prompts: 0} if self.loops and not self.reads else {}
        return (
            begun | {read.column: read.rows for read in self.reads} | {sieve.column: sieve.rows for sieve in verdicts}
        )

    def numbers(self, task: Task) -> Numbers:
        """Return how the rows of a task are numbered."""
        return row_numbers(self.sets, self.refilling, task)


def list_node_reads(plan: Plan) -> list[NodeReads]:
    """Return what each controller of the plan needs to know about its node.

    A node may read more columns than its program declares for it:

    - A node that compares log-probabilities reads the log-probabilities that were recorded when the tokens were
      sampled.
    - A node that scores conversations reads the positions where the conversations begin.
    """
    graph = plan.graph
    node_reads = []
    compared = find_comparison(plan)
    rows = rowsets(plan.graph)
    balanced = {edge.dst for edge in graph.samples() if SampleEdgeAttributes.of(edge).balance}
    warehouse_index = {host: i for i, host in enumerate(plan.docks.warehouses)}
    refilling = rows.refilling
    repeated = find_refill(graph)[1]
    for controller in plan.docks.controllers:
        node = graph.node(controller.node)
        reads = [
            ColumnRead(column_name, rows.columns[column_name], graph.writer(column_name).name)
            for column_name in node.reads
        ]
        per_prompt = {state.name for state in graph.states if state.per}
        reads += [ColumnRead(name, 0, "source") for name in previous_states(graph, node) if name in per_prompt]
        reads += [
            ColumnRead(drawn_name(name), 0, "source") for name in temperature_states(graph, node) if name in per_prompt
        ]
        if compared and compared.node == node.name and compared.column not in node.reads:
            reads.append(
                ColumnRead(compared.column, rows.columns[compared.response], graph.writer(compared.response).name)
            )
        for response, column in begins_columns(graph, node).items() if node.verb != "generate" else ():
            reads.append(ColumnRead(column, rows.columns[response], graph.writer(response).name))
        node_reads.append(
            NodeReads(
                node=node.name,
                reads=tuple(reads),
                sets=tuple(rows.sets),
                rows=rows.nodes[node.name],
                unit=rows.units[node.name],
                whole_batch=node.per == "batch",
                group_warehouses=tuple(warehouse_index.get(host, -1) for host in plan.group_hosts(node.name)),
                chunk=controller.chunk,
                chunk_tokens=controller.chunk_tokens,
                tokens=length_columns(graph, node),
                balance=node.name in balanced,
                imbalance=plan.docks.imbalance,
                update=node.verb == "update",
                epochs=UpdateAttributes.of(node).epochs,
                mini_batch=UpdateAttributes.of(node).mini_batch or 0,
                seed=plan.deploy.run.seed,
                passed=rows.passed[node.name],
                failing=tuple(
                    sieve
                    for sieve in rows.passed[node.name]
                    if sieve.failures and sieve.node in nodes_upstream(graph, node.reads)
                ),
                refilling=refilling,
                before_refill=rows.passed[refilling.node] if refilling else (),
                loops=node.name in repeated,
                prompts=graph.node("source").writes[0],
            )
        )
    return node_reads


def list_members(plan: Plan, node_reads: Sequence[NodeReads], key: bytes = b"") -> tuple[list[Member], DockAddress]:
    """Return the dock's processes, and what other processes need to find the dock.

    The dock has one process for each host that has a warehouse or a controller.
    """
    controller_host = {controller.node: controller.host for controller in plan.docks.controllers}
    warehouse_index = {host: i for i, host in enumerate(plan.docks.warehouses)}
    names = {host: f"dock of host {host}" for host in sorted({*controller_host.values(), *warehouse_index})}
    hears = {
        host_number: frozenset(
            column
            for reads in node_reads
            if controller_host[reads.node] == host_number
            for column in reads.needed_columns
        )
        for host_number in names
    }
    dock_address = DockAddress(
        {node: names[host_number] for node, host_number in controller_host.items()},
        [names[host_number] for host_number in warehouse_index],
        [*warehouse_index],
        key,
        secrets.token_bytes(32),
        plan.docks.capacity,
    )
    return [
        Member(name, host_number, warehouse_index.get(host_number, -1), hears[host_number])
        for host_number, name in names.items()
    ], dock_address
