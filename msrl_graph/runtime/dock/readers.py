"""What the dock knows beforehand: of each node-state what its controller hears of.

Invariant: plain data, a function of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...ir.plan import Plan
from ...ir.rowsets import Numbers, Rowset, Sieve, looping, rowsets
from ..data.wrong import comparison
from ..process.task import Task, numbers


@dataclass(frozen=True)
class Reader:
    """What a controller needs to know of its node-state. `reads` are (column, set of rows, writer); `rows` and `unit` are the sets of its
    rows and units, `passed` the filters before it. Of the graph's filter that refills, if there is one: itself, the filters before it, and
    whether the node comes before it, or is it. `prompts` is a column of the source: a node that works round by round and reads nothing but
    states hears of it that a round has begun."""

    node: str
    reads: tuple[tuple[str, int, str], ...]
    sets: tuple[Rowset, ...]
    rows: int
    unit: int
    whole: bool  # per = batch: one unit holds all rows
    groups: int
    chunk: int
    balance: bool
    update: bool = False
    epochs: int = 1
    mini_batch: int = 0  # rows; 0: all
    seed: int = 0
    passed: tuple[Sieve, ...] = ()
    refilling: Sieve | None = None
    before_refill: tuple[Sieve, ...] = ()
    loops: bool = False
    prompts: str = ""

    @property
    def by_arrival(self) -> bool:
        """Whether what is decided depends on the order in which rows come: batches are cut from what is there. All else (all rows at once,
        or an update's mini-batches in their order) would be decided again alike: who writes a row again writes it to its warehouse."""
        return self.chunk > 0 and not self.update

    @cached_property
    def hears(self) -> dict[str, int]:
        """The columns whose rows concern the node, verdicts too, and the set that they are of."""
        verdicts = (*self.passed, *([self.refilling] if self.refilling else []), *self.before_refill)
        begun = {self.prompts: 0} if self.loops and not self.reads else {}
        return begun | {c: rows for c, rows, _ in self.reads} | {s.column: s.rows for s in verdicts}

    def numbers(self, task: Task) -> Numbers:
        """How the rows of a task are numbered."""
        return numbers(self.sets, self.refilling, task)


def readers(plan: Plan) -> list[Reader]:
    """One for each controller of the plan. Who compares log-probabilities reads those as drawn too, declared or not."""
    graph, found, compared, rows = plan.graph, [], comparison(plan), rowsets(plan.graph)
    balanced = {e.dst for e in graph.samples() if str(e.attributes.get("balance", "")) == "tokens"}
    refilling, repeated = rows.refilling, looping(graph)[1]
    for controller in plan.docks.controllers:
        node = graph.node(controller.node)
        reads = [(c, rows.columns[c], graph.writer(c).name) for c in node.reads]
        reads += [(s.name, 0, "source") for s in graph.states if s.per and s.name in node.states]
        if compared and compared.node == node.name and compared.column not in node.reads:
            reads.append((compared.column, rows.columns[compared.response], graph.writer(compared.response).name))
        found.append(
            Reader(
                node=node.name,
                reads=tuple(reads),
                sets=tuple(rows.sets),
                rows=rows.nodes[node.name],
                unit=rows.units[node.name],
                whole=node.per == "batch",
                groups=controller.groups,
                chunk=controller.chunk,
                balance=node.name in balanced,
                update=node.verb == "update",
                epochs=int(node.number("epochs", 1)),
                mini_batch=int(node.number("mini_batch", 0)),
                seed=plan.deploy.run.seed,
                passed=rows.passed[node.name],
                refilling=refilling,
                before_refill=rows.passed[refilling.node] if refilling else (),
                loops=node.name in repeated,
                prompts=graph.node("source").writes[0],
            )
        )
    return found


def home(plan: Plan, host: int, index: int) -> int:
    """The warehouse that a process of a host writes to, the `index`-th of its kind: its host's take turns."""
    near = [w for w, at in enumerate(plan.docks.warehouses) if at == host]
    return near[index % len(near)] if near else 0
