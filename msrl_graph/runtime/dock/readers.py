"""What the dock knows beforehand: of each node what its controller hears of.

Invariant: plain data, a function of the plan.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...ir.attributes import SampleEdgeAttributes, UpdateAttributes
from ...ir.plan import Plan
from ...ir.rowsets import Numbers, Rowset, Sieve, looping, rowsets, upstream
from ...ir.sequences import as_drawn, beginnings, heating, latest, weighs
from ..data.numerics import comparison
from ..process.task import Task, numbers
from .messages import DockAddress, Member


@dataclass(frozen=True)
class ColumnRead:
    """A column that a node reads: the set that its rows are of, and the node that writes it."""

    column: str
    rows: int
    writer: str


@dataclass(frozen=True)
class NodeReads:
    """What a controller needs to know of its node.

    - `reads`: the columns that it reads; `rows` and `unit`: the sets (ir/rowsets.py) of its rows and of what it is
      handed at once. A function with `per = prompt` works on responses, and its units are prompts.
    - `chunk`, `chunk_tokens`: what is handed out at once, as the plan's controller says it.
    - `at`: of each data-parallel group that asks, the warehouse of its host (-1: it has none). `tokens`: by whose
      lengths it is as long as it is, and how often each counts; `balance`: shares are even by these, else by number;
      `imbalance`: how many times an even share one may be.
    - `passed`: the filters whose verdicts decide which rows it gets, and `failing` those of them that do so in an
      evaluation too: nodes that what it reads comes from, and that the rows which fail leave.
    - `refilling`: the graph's filter that asks for more prompts, if there is one, and `before_refill` the filters
      before it. `loops`: the node comes before that filter, or is it, so it works round by round of prompts.
    - `prompts`: a column of the source. A node that loops but reads no column, only nodes, hears by it that a round
      has begun.
    """

    node: str
    reads: tuple[ColumnRead, ...]
    sets: tuple[Rowset, ...]
    rows: int
    unit: int
    whole: bool  # per = batch: one unit holds all rows
    at: tuple[int, ...]
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
    def hears(self) -> dict[str, int]:
        """The columns whose rows concern the node, verdicts too, and the set that they are of."""
        verdicts = (*self.passed, *([self.refilling] if self.refilling else []), *self.before_refill)
        begun = {self.prompts: 0} if self.loops and not self.reads else {}
        return begun | {r.column: r.rows for r in self.reads} | {s.column: s.rows for s in verdicts}

    def numbers(self, task: Task) -> Numbers:
        """How the rows of a task are numbered."""
        return numbers(self.sets, self.refilling, task)


def readers(plan: Plan) -> list[NodeReads]:
    """One for each controller of the plan. Who compares log-probabilities reads those as drawn too, declared or not;
    who scores conversations, where these begin."""
    graph = plan.graph
    found = []
    compared = comparison(plan)
    rows = rowsets(plan.graph)
    balanced = {e.dst for e in graph.samples() if SampleEdgeAttributes.of(e).balance}
    stores = {host: i for i, host in enumerate(plan.docks.warehouses)}
    refilling = rows.refilling
    repeated = looping(graph)[1]
    for controller in plan.docks.controllers:
        node = graph.node(controller.node)
        reads = [ColumnRead(c, rows.columns[c], graph.writer(c).name) for c in node.reads]
        each = {s.name for s in graph.states if s.per}
        reads += [ColumnRead(name, 0, "source") for name in latest(graph, node) if name in each]
        reads += [ColumnRead(as_drawn(name), 0, "source") for name in heating(graph, node) if name in each]
        if compared and compared.node == node.name and compared.column not in node.reads:
            reads.append(
                ColumnRead(compared.column, rows.columns[compared.response], graph.writer(compared.response).name)
            )
        for response, column in beginnings(graph, node).items() if node.verb != "generate" else ():
            reads.append(ColumnRead(column, rows.columns[response], graph.writer(response).name))
        found.append(
            NodeReads(
                node=node.name,
                reads=tuple(reads),
                sets=tuple(rows.sets),
                rows=rows.nodes[node.name],
                unit=rows.units[node.name],
                whole=node.per == "batch",
                at=tuple(stores.get(host, -1) for host in plan.group_hosts(node.name)),
                chunk=controller.chunk,
                chunk_tokens=controller.chunk_tokens,
                tokens=weighs(graph, node),
                balance=node.name in balanced,
                imbalance=plan.docks.imbalance,
                update=node.verb == "update",
                epochs=UpdateAttributes.of(node).epochs,
                mini_batch=UpdateAttributes.of(node).mini_batch or 0,
                seed=plan.deploy.run.seed,
                passed=rows.passed[node.name],
                failing=tuple(
                    s for s in rows.passed[node.name] if s.failures and s.node in upstream(graph, node.reads)
                ),
                refilling=refilling,
                before_refill=rows.passed[refilling.node] if refilling else (),
                loops=node.name in repeated,
                prompts=graph.node("source").writes[0],
            )
        )
    return found


def members(plan: Plan, found: Sequence[NodeReads], key: bytes = b"") -> tuple[list[Member], DockAddress]:
    """The dock's processes, one for each host that has a warehouse or a controller, and the way to them."""
    at = {c.node: c.host for c in plan.docks.controllers}
    stores = {host: i for i, host in enumerate(plan.docks.warehouses)}
    names = {host: f"dock of host {host}" for host in sorted({*at.values(), *stores})}
    hears = {h: frozenset(c for r in found if at[r.node] == h for c in r.hears) for h in names}
    way = DockAddress(
        {node: names[h] for node, h in at.items()},
        [names[h] for h in stores],
        [*stores],
        key,
        secrets.token_bytes(32),
        plan.docks.capacity,
    )
    return [Member(name, h, stores.get(h, -1), hears[h]) for h, name in names.items()], way
